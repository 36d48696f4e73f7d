"""Recipe, the input of a strategy, and Phase, the table that it computes.

Accountant, training loop and ledger need nothing but phases: σ_p = noise_std / (weight_p · c_p), and in each step a
record of group p goes through the sampled Gaussian mechanism SGM(q_p, σ_p).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from ..errors import PlanError
from ..mechanism import FloatArray, SampledGaussian, read_only

Convention = Literal["paper", "authors-code"]

#: The accountants do not finish in reasonable time beyond this many steps.
MOST_STEPS = 10**9


@dataclass(frozen=True)
class Recipe:
    """Length and size of a training run, chosen without the budgets.

    steps       noisy updates, 1 to MOST_STEPS
    batch_size  expected records per update, > 0; need not be a whole number
    clip_norm   mean over records of the groups' clip norms, an L2 norm in gradient units, > 0

    Raises PlanError for values outside these ranges.

    >>> Recipe(steps=9_375, batch_size=512, clip_norm=0.2)
    Recipe(steps=9375, batch_size=512, clip_norm=0.2)
    """

    steps: int
    batch_size: float
    clip_norm: float

    def __post_init__(self) -> None:
        _check_steps("recipe", self.steps)
        object.__setattr__(self, "steps", int(self.steps))
        for name in ("batch_size", "clip_norm"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise PlanError(f"A recipe's {name} must be a positive, finite number, got {value}.")

    @classmethod
    def of_epochs(
        cls, epochs: float, *, records: int, batch_size: float, clip_norm: float, convention: Convention = "paper"
    ) -> Recipe:
        """The recipe with the length of an expected number of passes over the data, at least one step.

        records     number of records of the plan; the declared number under public shares
        convention  "paper": steps = epochs · records / batch_size. "authors-code": steps = epochs · ceil(records /
                    batch_size), and the batch becomes records / ceil(records / batch_size)

        >>> Recipe.of_epochs(80, records=60_000, batch_size=512, clip_norm=0.2)
        Recipe(steps=9375, batch_size=512.0, clip_norm=0.2)
        """
        batch = float(batch_size)
        for name, value in (("epochs", epochs), ("records", records), ("batch_size", batch)):
            if not (math.isfinite(value) and value > 0):
                raise PlanError(f"A recipe's {name} must be a positive, finite number, got {value}.")
        per_epoch = records / batch
        if convention == "authors-code":
            per_epoch = math.ceil(per_epoch)
            batch = records / per_epoch
        # 1e-9: 80 · 60,000 / 512 is 9,375 steps in spite of rounding errors
        return cls(steps=max(int(epochs * per_epoch + 1e-9), 1), batch_size=batch, clip_norm=clip_norm)


@dataclass(frozen=True, eq=False)
class Phase:
    """One table and a number of steps.

    steps           number of updates that use it
    sample_rate     (groups,)  probability that a record is drawn in one step
    clip_norm       (groups,)  L2 bound on one record's gradient
    weight          (groups,)  factor on the clipped gradient, 1 unless a strategy says otherwise
    noise_std       scalar     noise added once to each step's summed gradient, in gradient units
    expected_batch  scalar     expected records per step; the divisor of every update

    Raises PlanError for values outside their ranges.
    """

    steps: int
    sample_rate: FloatArray
    clip_norm: FloatArray
    weight: FloatArray
    noise_std: float
    expected_batch: float

    def __post_init__(self) -> None:
        for name in ("sample_rate", "clip_norm", "weight"):
            object.__setattr__(self, name, read_only(np.array(getattr(self, name), dtype=np.float64)))
        if not (self.sample_rate.ndim == 1 and self.sample_rate.shape == self.clip_norm.shape == self.weight.shape):
            raise PlanError(
                f"A phase needs one sample_rate, clip_norm and weight per group, got shapes {self.sample_rate.shape}, "
                f"{self.clip_norm.shape}, {self.weight.shape}."
            )
        if not ((self.sample_rate >= 0) & (self.sample_rate <= 1)).all():
            raise PlanError("A phase's sampling rates must be probabilities between 0 and 1; at least one is not.")
        for name in ("clip_norm", "weight"):
            values = getattr(self, name)
            if not (np.isfinite(values) & (values > 0)).all():
                raise PlanError(f"A phase's {name} must be positive and finite in every group; at least one is not.")
        _check_steps("phase", self.steps)
        object.__setattr__(self, "steps", int(self.steps))
        for name in ("noise_std", "expected_batch"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise PlanError(f"A phase's {name} must be positive and finite, got {value}.")

    @property
    def noise_multiplier(self) -> FloatArray:
        """(groups,) noise standard deviation / largest L2 norm of one record's contribution."""
        return self.noise_std / (self.weight * self.clip_norm)

    def __repr__(self) -> str:
        return f"Phase({self.steps:,} steps, {len(self.sample_rate):,} groups)"

    @property
    def title(self) -> str:
        """The phase in one line."""
        return f"{self.steps:,} steps, expected batch {self.expected_batch:.6g}, noise_std {self.noise_std:.6g}"

    def to_dict(self) -> dict[str, Any]:
        """As JSON values; a group that is never drawn has no noise multiplier (null)."""
        columns = {name: getattr(self, name).tolist() for name in ("sample_rate", "clip_norm", "weight")}
        noises = zip(self.sample_rate, self.noise_multiplier.tolist(), strict=True)
        columns["noise_multiplier"] = [noise if rate > 0 else None for rate, noise in noises]
        return {
            "steps": self.steps,
            "noise_std": float(self.noise_std),
            "expected_batch": float(self.expected_batch),
            "groups": [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)],
        }

    def history(self, group: int, steps: int | None = None) -> SampledGaussian:
        """The mechanism of one record of this group in the first `steps` steps (default: all)."""
        return SampledGaussian(
            float(self.sample_rate[group]),
            float(self.noise_multiplier[group]),
            self.steps if steps is None else min(steps, self.steps),
        )


def check_runs(runs: int, steps: int) -> None:
    """Raise PlanError for a number of runs that no plan has, with so many steps each."""
    if isinstance(runs, bool) or not (math.isfinite(runs) and runs == int(runs) and runs >= 1):
        raise PlanError(f"A plan is for a whole number of runs, at least 1, got {runs}.")
    if runs * steps > MOST_STEPS:
        raise PlanError(
            f"A plan has at most {MOST_STEPS:,} steps in all its runs together, got {runs:,} runs of {steps:,} steps."
        )


def _check_steps(what: str, steps: int) -> None:
    if not (math.isfinite(steps) and steps == int(steps) and 1 <= steps <= MOST_STEPS):
        raise PlanError(f"A {what} needs a whole number of steps, at least 1 and at most {MOST_STEPS:,}, got {steps}.")
