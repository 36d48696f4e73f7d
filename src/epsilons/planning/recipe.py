"""Recipe and Phase: what is asked for before anyone's budget is looked at, and the table that comes of it.

A phase holds all that accountant, training loop and ledger ever need: σ_p = noise_std / (weight_p · c_p), and
one record of group p goes through SGM(q_p, σ_p), step after step.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..budgets import FloatArray
from ..errors import PlanError
from ..mechanism import SampledGaussian
from . import plan_file

#: Beyond this many steps no accountant here comes to an end.
MOST_STEPS = 10**9


@dataclass(frozen=True)
class Recipe:
    """How long and how large, before anyone's budget is looked at.

    steps       noisy updates, 1 to MOST_STEPS
    batch_size  EXPECTED records per update, > 0; need not be whole
    clip_norm   L2 norm, in gradient units, that the groups' clip norms average to, > 0

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
                raise PlanError(f"A recipe's {name} must be a positive, finite number; {value} arrived.")


@dataclass(frozen=True, eq=False)
class Phase:
    """One table and a number of steps.

    steps           how many updates use it
    sample_rate     (groups,)  chance that a record is drawn in one step
    clip_norm       (groups,)  L2 bound on one record's gradient
    weight          (groups,)  factor on the clipped gradient, 1 unless a strategy says otherwise
    noise_std       scalar     noise added once to each step's summed gradient, in gradient units
    expected_batch  scalar     records per step in expectation; the divisor of every update
    """

    steps: int
    sample_rate: FloatArray
    clip_norm: FloatArray
    weight: FloatArray
    noise_std: float
    expected_batch: float

    def __post_init__(self) -> None:
        for name in ("sample_rate", "clip_norm", "weight"):
            array = np.array(getattr(self, name), dtype=np.float64)
            array.setflags(write=False)
            object.__setattr__(self, name, array)
        if not (self.sample_rate.ndim == 1 and self.sample_rate.shape == self.clip_norm.shape == self.weight.shape):
            raise PlanError(
                f"A phase needs one sample_rate, clip_norm and weight per group; shapes {self.sample_rate.shape}, "
                f"{self.clip_norm.shape}, {self.weight.shape} arrived."
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
                raise PlanError(f"A phase's {name} must be positive and finite; {value} arrived.")

    @property
    def noise_multiplier(self) -> FloatArray:
        """(groups,) noise standard deviation over a record's own largest contribution."""
        return self.noise_std / (self.weight * self.clip_norm)

    def __repr__(self) -> str:
        return f"Phase({self.steps:,} steps, {len(self.sample_rate):,} groups)"

    @property
    def title(self) -> str:
        """The phase in one line."""
        return f"{self.steps:,} steps, expected batch {self.expected_batch:.6g}, noise_std {self.noise_std:.6g}"

    def to_dict(self) -> dict[str, Any]:
        """As JSON values; a group that is never drawn has no noise multiplier (null)."""
        rows = zip(self.sample_rate, self.clip_norm, self.weight, self.noise_multiplier, strict=True)
        return {
            "steps": int(self.steps),
            "noise_std": float(self.noise_std),
            "expected_batch": float(self.expected_batch),
            "groups": [
                {
                    "sample_rate": float(q),
                    "clip_norm": float(c),
                    "weight": float(w),
                    "noise_multiplier": float(s) if q > 0 else None,
                }
                for q, c, w, s in rows
            ],
        }

    @classmethod
    def from_file(cls, phase: plan_file.PhaseTable) -> Phase:
        """The phase a plan file holds."""
        return cls(
            steps=phase.steps,
            sample_rate=np.array([row.sample_rate for row in phase.groups]),
            clip_norm=np.array([row.clip_norm for row in phase.groups]),
            weight=np.array([row.weight for row in phase.groups]),
            noise_std=phase.noise_std,
            expected_batch=phase.expected_batch,
        )

    def history(self, group: int, steps: int | None = None) -> SampledGaussian:
        """What a record of this group goes through in the first `steps` steps (default: all)."""
        return SampledGaussian(
            float(self.sample_rate[group]),
            float(self.noise_multiplier[group]),
            self.steps if steps is None else min(steps, self.steps),
        )


def _check_steps(what: str, steps: int) -> None:
    if not (math.isfinite(steps) and steps == int(steps) and 1 <= steps <= MOST_STEPS):
        raise PlanError(
            f"A {what} needs a whole number of steps, at least 1 and at most {MOST_STEPS:,}; {steps} arrived."
        )
