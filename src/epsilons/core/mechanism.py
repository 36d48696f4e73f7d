"""The two values that every layer shares: what one record goes through, and which groups there are.

`SampledGaussian` is a Gaussian mechanism on a Poisson sample, repeated: Mironov, Talwar, Zhang, "Rényi Differential
Privacy of the Sampled Gaussian Mechanism", arXiv 1908.10530v1, Definition 1. Accountants see a history of these and
nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from ..errors import PlanError

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

#: What has a budget, is drawn and is clipped: a record, or a person with all their rows.
Unit = Literal["record", "person"]

#: Below this noise multiplier one step spends hundreds of nats on a record that is drawn; calibration goes no lower.
SMALLEST_NOISE = 0.05

#: Below this delta, double precision is not enough for the accountants.
SMALLEST_DELTA = 1e-9


@dataclass(frozen=True)
class SampledGaussian:
    """`steps` releases of a sum in which this record takes part with probability `sample_rate`.

    sample_rate       probability of being drawn in one step, in [0, 1]
    noise_multiplier  noise standard deviation / largest L2 norm of this record's contribution, > 0
    steps             number of releases, >= 0

    Raises PlanError for values outside these ranges.

    >>> SampledGaussian(sample_rate=0.01, noise_multiplier=1.1, steps=1000)
    SampledGaussian(sample_rate=0.01, noise_multiplier=1.1, steps=1000)
    """

    sample_rate: float
    noise_multiplier: float
    steps: int

    def __post_init__(self) -> None:
        if not 0.0 <= self.sample_rate <= 1.0:
            raise PlanError(f"A sampling rate must be a probability between 0 and 1, got {self.sample_rate}.")
        if not self.noise_multiplier > 0.0:
            raise PlanError(
                f"A noise multiplier must be positive, got {self.noise_multiplier}. Without noise no finite epsilon "
                "can be promised."
            )
        if not (math.isfinite(self.steps) and self.steps == int(self.steps) and self.steps >= 0):
            raise PlanError(f"The number of steps must be a whole number, 0 or more, got {self.steps}.")

    @property
    def is_silent(self) -> bool:
        """True if the record never takes part, so that nothing about it is released."""
        return self.sample_rate == 0.0 or self.steps == 0 or math.isinf(self.noise_multiplier)


@dataclass(frozen=True, eq=False)
class Groups:
    """Records with the same budget form a group; groups are ordered strictest first.

    epsilons  (groups,)  in nats, positive and finite, rising
    deltas    (groups,)  in [1e-9, 1), rising where epsilons are equal
    counts    (groups,)  records in each group, at least 1
    starts    (groups, orders)  for accounts of a registry, what was spent before, as `accounting.filter` takes it; else
              None. Then groups with one epsilon and delta may differ in it
    limits    (groups, 3)  for budgets by risk: the largest advantage, a false-positive rate, and the largest
              true-positive rate there, infinity where nothing is declared; else None

    Raises PlanError for anything else; the message has no budget in it.
    """

    epsilons: FloatArray
    deltas: FloatArray
    counts: IntArray
    starts: FloatArray | None = None
    limits: FloatArray | None = None

    def __post_init__(self) -> None:
        for name, dtype in (("epsilons", np.float64), ("deltas", np.float64), ("counts", np.int64)):
            object.__setattr__(self, name, read_only(np.array(getattr(self, name), dtype=dtype)))
        shape = self.epsilons.shape
        if len(shape) != 1 or shape[0] == 0 or self.deltas.shape != shape or self.counts.shape != shape:
            raise PlanError("A plan needs one epsilon, delta and number of records per group, and at least one group.")
        if not (
            (np.isfinite(self.epsilons) & (self.epsilons > 0)).all()
            and ((self.deltas >= SMALLEST_DELTA) & (self.deltas < 1)).all()
        ):
            raise PlanError(
                f"A plan's budgets must be positive and finite, its deltas at least {SMALLEST_DELTA:g} and below 1."
            )
        rows = [self.epsilons[:, None], self.deltas[:, None]]
        if self.starts is not None:
            object.__setattr__(self, "starts", read_only(np.array(self.starts, dtype=np.float64)))
            if self.starts.ndim != 2 or len(self.starts) != shape[0] or not np.isfinite(self.starts).all():
                raise PlanError("A plan on accounts needs one finite number per group and Rényi order.")
            rows.append(self.starts)
        if self.limits is not None:
            object.__setattr__(self, "limits", read_only(np.array(self.limits, dtype=np.float64)))
            if self.starts is not None or self.limits.shape != (*shape, 3) or not _are_limits(*self.limits.T):
                raise PlanError("Budgets by risk need, in every group, limits that are probabilities, or none.")
        if not _is_rising(np.hstack(rows)):
            raise PlanError("A plan's groups must be distinct and ordered strictest first.")
        if (self.counts < 1).any():
            raise PlanError("A plan's groups must hold at least one record each.")

    def __len__(self) -> int:
        return len(self.epsilons)

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Groups)
            and all(
                np.array_equal(getattr(self, name), getattr(other, name)) for name in ("epsilons", "deltas", "counts")
            )
            and np.array_equal(self.terms, other.terms)
        )

    __hash__ = None  # type: ignore[assignment]  # arrays have none

    def __repr__(self) -> str:
        return f"Groups({self.records:,} records)"

    @property
    def records(self) -> int:
        """Number of records in all groups together."""
        return int(self.counts.sum())

    @property
    def claims(self) -> FloatArray:
        """What an accountant needs beside a history: (groups,) deltas, or (groups, orders) starts of accounts."""
        return self.deltas if self.starts is None else self.starts

    @property
    def terms(self) -> FloatArray:
        """What calibration needs beside epsilons: the claims, or (groups, 5) delta, epsilon and limits."""
        return self.claims if self.limits is None else np.column_stack([self.deltas, self.epsilons, self.limits])

    @property
    def declared(self) -> dict[float, tuple[float, ...]]:
        """{epsilon: limits} of budgets by risk; {} for others."""
        return (
            {}
            if self.limits is None
            else dict(zip(self.epsilons.tolist(), map(tuple, self.limits.tolist()), strict=True))
        )


def _are_limits(advantage: FloatArray, rate: FloatArray, power: FloatArray) -> bool:
    """Whether each limit can be met by a record that takes no part, and NaN is nowhere."""
    return bool(((advantage > 0) & (rate >= 0) & (rate < 1) & (power > rate)).all())


def _is_rising(rows: FloatArray) -> bool:
    """Whether each row comes after the one before, by its first different number."""
    difference = np.diff(rows, axis=0)
    first = (difference != 0).argmax(axis=1)
    return bool((difference[np.arange(len(difference)), first] > 0).all())


def read_only(array: Any) -> Any:
    """The same array, protected against writing."""
    array.setflags(write=False)
    return array


# -- An accountant of several equal runs together: each mechanism of a history counts once for every run
#
# The n runs are n · steps mechanisms of one fixed table, and what may differ between them never enters an accountant:
# adaptive composition of mechanisms that are each dominated by one fixed pair (Zhu, Dong, Wang, "Optimal Accounting of
# Differential Privacy via Characteristic Function", arXiv 2106.08567, Theorem 10; docs/tuning.md#why-it-holds).


@dataclass(frozen=True)
class Repeated:
    """epsilon(history, delta) of `runs` runs that go through this history each.

    accountant  a function (history, delta) -> epsilon
    runs        number of runs, at least 1

    >>> from epsilons.accounting import rdp
    >>> twice = Repeated(rdp.epsilon, runs=2)
    >>> one, both = SampledGaussian(0.01, 1.1, steps=50), SampledGaussian(0.01, 1.1, steps=100)
    >>> twice([one], 1e-5) == rdp.epsilon([both], 1e-5)
    True
    """

    accountant: Callable[[Sequence[SampledGaussian], float], float]
    runs: int

    def __call__(self, history: Sequence[SampledGaussian], delta: float) -> float:
        return self.accountant([replace(part, steps=part.steps * self.runs) for part in history], delta)


@dataclass(frozen=True)
class Counted:
    """epsilon(history, delta) of runs that also release how often each class occurs in each group, with noise.

    A member of a group adds a vector no longer than 1 to its counts: one Gaussian mechanism beside those of training.

    accountant  a function (history, delta) -> epsilon
    noise       standard deviation of the noise, in people
    runs        number of such counts
    """

    accountant: Callable[[Sequence[SampledGaussian], float], float]
    noise: float
    runs: int = 1

    @property
    def mechanism(self) -> SampledGaussian:
        """What a member of a group goes through. Raises PlanError for noise that is not positive."""
        return SampledGaussian(1.0, self.noise, self.runs)

    def __call__(self, history: Sequence[SampledGaussian], delta: float) -> float:
        return self.accountant([*history, self.mechanism], delta)
