"""Private selection: a secret number of runs, of which only the best by a private score is released.

Papernot and Steinke, "Hyperparameter Tuning with Rényi Differential Privacy", arXiv 2110.03620v2. One run, with its
score, satisfies (α, ε_α)-RDP at every order α. The released run then satisfies (α, ε′)-RDP, K being the number of runs:

* logarithmic (Theorem 2 at η = 0): ε′ = ε_α + min over β of ((1 − 1/β)·ε_β + ln(1/γ)/β) + ln E[K]/(α − 1), with
  Pr[K = k] = (1 − γ)^k/(k·ln(1/γ)) for k ≥ 1;
* Poisson (Theorem 6): ε′ = ε_α + E[K]·δ_α + ln E[K]/(α − 1), where one run satisfies (ln(1 + 1/(α − 1)), δ_α)-DP.

With K known, or a run that lost, neither holds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import numpy as np

from ..core.mechanism import FloatArray, SampledGaussian
from ..errors import PlanError
from . import pld, rdp
from .profile import DELTAS, Profile

#: The distributions of the number of runs.
DISTRIBUTIONS = ("logarithmic", "poisson")
ORDERS: FloatArray = np.array(rdp.EXTENDED_ORDERS)
_AHEAD = np.linspace(0.0, 20.0, 401)
#: A selection of more runs in expectation is refused.
MOST_RUNS = 10_000


@dataclass(frozen=True)
class Selection:
    """A secret number of runs, from this distribution; the best of them is released.

    distribution  "logarithmic": at least one run, and mostly few, but sometimes several times the mean. "poisson":
                  near the mean; none with probability e^−mean. Up to about five runs poisson needs less noise, beyond
                  them logarithmic (`epsilons advise --runs`)
    mean          expected number of runs, above 1

    Raises PlanError for other values.

    >>> str(Selection("logarithmic", mean=10))
    'logarithmic:10'
    """

    distribution: str
    mean: float

    def __post_init__(self) -> None:
        if self.distribution not in DISTRIBUTIONS or not 1 < self.mean <= MOST_RUNS:
            raise PlanError(
                f"A selection is one of {', '.join(DISTRIBUTIONS)}, with an expected number of runs above 1 and at "
                f"most {MOST_RUNS:,}, such as logarithmic:10; got {self.distribution}:{self.mean:g}."
            )
        object.__setattr__(self, "mean", float(self.mean))

    @classmethod
    def of(cls, text: str) -> Selection:
        """The selection in a text, "logarithmic:10". Raises PlanError."""
        distribution, _, mean = text.partition(":")
        try:
            return cls(distribution, float(mean))
        except ValueError:
            raise PlanError(f"A selection is written logarithmic:10 or poisson:10, got {text!r}.") from None

    def __str__(self) -> str:
        return f"{self.distribution}:{self.mean!r}".removesuffix(".0")

    @cached_property
    def gamma(self) -> float:
        """γ of the logarithmic distribution: (1/γ − 1)/ln(1/γ) is the mean."""
        low, high = -40.0, -1e-9  # ln γ
        for _ in range(200):
            middle = (low + high) / 2
            low, high = (middle, high) if math.expm1(-middle) / -middle > self.mean else (low, middle)
        return math.exp(low)

    def number(self, uniform: float) -> int:
        """The number of runs of a uniform value in [0, 1), by the inverse of the distribution's sum.

        >>> Selection("logarithmic", mean=10).number(0.0), Selection("poisson", mean=10).number(0.5)
        (1, 10)
        """
        is_poisson = self.distribution == "poisson"
        count = 0 if is_poisson else 1
        part = math.exp(-self.mean) if is_poisson else (1 - self.gamma) / -math.log(self.gamma)
        below = part
        while uniform >= below and part > 0:
            count += 1
            part *= self.mean / count if is_poisson else (1 - self.gamma) * (count - 1) / count
            below += part
        return count

    def divergences(self, rates: FloatArray, noises: FloatArray, steps: Sequence[int]) -> FloatArray:
        """(rows, ORDERS) Rényi divergences of the released run. rates, noises: (phases, rows) of one run.

        0 for a record that never takes part: then no run depends on it.
        """
        base, deltas = np.zeros((rates.shape[1], len(ORDERS))), None
        for rate, noise, count in zip(rates, noises, steps, strict=True):
            base += count * rdp.divergences(rate, noise, ORDERS)
        if self.distribution == "poisson":
            at = np.log1p(1 / (ORDERS - 1))
            columns = zip(rates.T.tolist(), noises.T.tolist(), strict=True)
            rows = ([SampledGaussian(*one) for one in zip(*column, steps, strict=True)] for column in columns)
            deltas = np.array([pld.divergences(row, at).max(axis=0) for row in rows])
        takes_part = np.asarray(rates > 0).any(axis=0, keepdims=True).T
        return np.asarray(takes_part * self.released(base, deltas))

    def released(self, base: FloatArray, deltas: FloatArray | None = None) -> FloatArray:
        """(rows, ORDERS) divergences of the released run, by the theorems above.

        base    (rows, ORDERS) those of one run
        deltas  (rows, ORDERS) for "poisson", δ of one run at ε = ln(1 + 1/(α − 1))
        """
        if deltas is None:
            extra = ((1 - 1 / ORDERS) * base - math.log(self.gamma) / ORDERS).min(axis=1, keepdims=True)
        else:
            extra = self.mean * deltas
        return np.asarray(base + extra + math.log(self.mean) / (ORDERS - 1))


@dataclass(frozen=True)
class Selected:
    """epsilon(history, delta) of the run that is released, where every run goes through this history."""

    select: Selection
    accountant: ClassVar[Callable[..., float]] = staticmethod(rdp.epsilon)  # which computes the divergences of one run

    def __call__(self, history: Sequence[SampledGaussian], delta: float) -> float:
        return float(rdp.converted(_total(self.select, history), np.array([delta]), ORDERS)[0])


@dataclass(frozen=True, eq=False)
class SelectedProfile(Profile):
    """The privacy profile of the run that is released, converted from its Rényi divergences.

    select  the selection; None for a profile of one run alone
    """

    select: Selection | None = None

    @cached_property
    def epsilons(self) -> FloatArray:
        if self.select is None:
            return super().epsilons
        return rdp.converted(np.repeat(self._total, len(DELTAS), axis=0), np.array(DELTAS), ORDERS)

    def _divergence(self, epsilons: FloatArray) -> FloatArray:
        if self.select is None:
            return super()._divergence(epsilons)
        # Below 0 by the other direction: δ(ε) = 1 − e^ε + e^ε·δ'(−ε). RDP bounds both directions alike.
        below = np.minimum(epsilons, 0.0)
        one = -np.expm1(below) + np.exp(below) * self._deltas(np.abs(epsilons))
        return np.stack([one, one])

    def _deltas(self, epsilons: FloatArray) -> FloatArray:
        """(epsilons,) at epsilons >= 0. The conversion is loose near 0; there (ε, δ) at a larger ε counts.

        From (ε, δ), δ(ε′) is at most δ + (1 − δ)(e^ε − e^ε′)/(1 + e^ε) for ε′ ≤ ε (Kairouz, Oh and Viswanath, arXiv
        1311.0776v4, Theorem 2.1: the region of the rates of both errors).
        """
        if not self._total.any():
            return np.zeros(len(epsilons))  # of a record that never takes part
        deltas = rdp.delta_of(self._total[0], ORDERS, _AHEAD)
        by_larger = deltas + (1 - deltas) * (np.exp(_AHEAD) - np.exp(epsilons[:, None])) / (1 + np.exp(_AHEAD))
        by_larger[epsilons[:, None] > _AHEAD] = 1.0
        return np.asarray(np.minimum(rdp.delta_of(self._total[0], ORDERS, epsilons), by_larger.min(axis=1)))

    @cached_property
    def _total(self) -> FloatArray:
        assert self.select is not None
        return _total(self.select, self.history)


def _total(select: Selection, history: Sequence[SampledGaussian]) -> FloatArray:
    """(1, ORDERS)"""
    rates, noises = (np.array([[getattr(m, name)] for m in history]) for name in ("sample_rate", "noise_multiplier"))
    return select.divergences(rates, noises, [m.steps for m in history])
