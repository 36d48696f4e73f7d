"""Private selection: a secret number of runs, of which only the best by a private score is released.

Papernot and Steinke, "Hyperparameter Tuning with Rényi Differential Privacy", arXiv 2110.03620v2. One run, with its
score, satisfies (α, ε_α)-RDP at every order α. The released run then satisfies (α, ε′)-RDP, K being the number of runs:

* logarithmic (Theorem 2 at η = 0): ε′ = ε_α + min over β of ((1 − 1/β)·ε_β + ln(1/γ)/β) + ln E[K]/(α − 1), with
  Pr[K = k] = (1 − γ)^k/(k·ln(1/γ)) for k ≥ 1;
* Poisson (Theorem 6): ε′ = ε_α + E[K]·δ_α + ln E[K]/(α − 1), where one run satisfies (ln(1 + 1/(α − 1)), δ_α)-DP.

The accountant "rdp" uses these. "pld" uses the smaller of them and of the following bound, by which the released run is
(R + ε, E[K]·δ(ε))-DP for every ε, where δ is the profile of one run (Koskela, Redberg and Wang, "Privacy Profiles for
Private Selection", arXiv 2402.06701, have it for some K; the proof in docs/why-tiers-hold.md is for any):

    R = max over t in [0, 1] of ln φ′(t)/φ′(G(t)),    φ(t) = E[t^K],

where an event of probability t has at least probability G(t) on the other data set. G(t) is at least e^−x·(t − δ(x))
and 1 − e^x·(1 − t) − δ(x), at every x.

With K known, or a run that lost, none of this holds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from ..core.mechanism import SMALLEST_DELTA, FloatArray, SampledGaussian
from ..errors import PlanError
from . import pld, rdp
from .profile import DELTAS, Profile

#: The distributions of the number of runs.
DISTRIBUTIONS = ("logarithmic", "poisson")
ORDERS: FloatArray = np.array(rdp.EXTENDED_ORDERS)
_AHEAD = np.linspace(0.0, 20.0, 401)
#: Where lines bound G from below, and the ends of the intervals on which one of the lines is used.
LINES = np.geomspace(1e-3, 20.0, 150)
_PARTS = np.unique(np.concatenate([np.linspace(0, 1, 101), 1 - np.geomspace(1e-7, 1, 150)]))
#: A selection of more runs in expectation is refused.
MOST_RUNS = 10_000


@dataclass(frozen=True)
class Selection:
    """A secret number of runs, from this distribution; the best of them is released.

    distribution  "logarithmic": at least one run, and mostly few, but sometimes several times the mean. "poisson":
                  near the mean; none with probability e^−mean. `epsilons advise --runs` shows what each costs in noise
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

    def log_slope(self, t: FloatArray) -> FloatArray:
        """ln φ′(t), up to a constant, for t at most 1."""
        return self.mean * t if self.distribution == "poisson" else -np.log1p(-(1 - self.gamma) * t)

    def shift(self, deltas: FloatArray) -> float:
        """R of one run, rounded up. deltas: (LINES,) upper bounds on its δ there

        On each line in the place of G, φ′(t)/φ′(G(t)) is monotone in t: for "logarithmic" a quotient of linear
        functions, for "poisson" an exponential. So on an interval the larger of its ends counts.
        """
        at, deltas = LINES[:, None], deltas[:, None]
        lines = [np.exp(-at) * (_PARTS - deltas), 1 - np.exp(at) * (1 - _PARTS) - deltas]
        log_ratio = self.log_slope(_PARTS) - self.log_slope(np.vstack(lines))  # (lines, ends)
        worse = np.maximum(log_ratio[:, :-1], log_ratio[:, 1:]).min(axis=0)
        return float(worse.max()) * (1 + 1e-9) + 1e-12


@dataclass(frozen=True)
class Selected:
    """epsilon(history, delta) of the run that is released, where every run goes through this history.

    accountant  that of one run: pld.epsilon, also with fixed options, or rdp.epsilon
    """

    select: Selection
    accountant: Callable[[Sequence[SampledGaussian], float], float]

    def __call__(self, history: Sequence[SampledGaussian], delta: float) -> float:
        return float(self.epsilon_at(history, np.array([delta]))[0])

    def epsilon_at(self, history: Sequence[SampledGaussian], deltas: FloatArray) -> FloatArray:
        """(deltas,) the same at several deltas; 0 for a record that never takes part."""
        if all(part.is_silent for part in history):
            return np.zeros(len(deltas))
        total = np.repeat(_total(self.select, history), len(deltas), axis=0)
        bounds = rdp.converted(total, deltas, ORDERS)
        of_one = deltas / self.select.mean
        if self.accountant is not rdp.epsilon and of_one.min() >= SMALLEST_DELTA:
            options = getattr(self.accountant, "keywords", {})
            spent = pld.epsilon_at(history, of_one, **options)
            shift = self.select.shift(pld.divergences(history, LINES, **options).max(axis=0))
            bounds = np.minimum(bounds, shift + spent)
        return bounds


@dataclass(frozen=True, eq=False)
class SelectedProfile(Profile):
    """The privacy profile of the run that is released, where every run goes through the history."""

    select: Selection = field(kw_only=True)

    @cached_property
    def epsilons(self) -> FloatArray:
        by_rdp = Selected(self.select, rdp.epsilon).epsilon_at(self.history, np.array(DELTAS))
        exact = np.array(DELTAS) / self.select.mean >= SMALLEST_DELTA
        by_rdp[exact] = Selected(self.select, pld.epsilon).epsilon_at(self.history, np.array(DELTAS)[exact])
        return by_rdp

    def _divergence(self, epsilons: FloatArray) -> FloatArray:
        # Below 0 by the other direction: δ(ε) = 1 − e^ε + e^ε·δ'(−ε). The bounds are for both directions alike.
        below = np.minimum(epsilons, 0.0)
        one = -np.expm1(below) + np.exp(below) * self._deltas(np.abs(epsilons))
        return np.stack([one, one])

    def _deltas(self, epsilons: FloatArray) -> FloatArray:
        """(epsilons,) at epsilons >= 0. Near 0 the bounds are loose; there (ε, δ) at a larger ε counts.

        From (ε, δ), δ(ε′) is at most δ + (1 − δ)(e^ε − e^ε′)/(1 + e^ε) for ε′ ≤ ε (Kairouz, Oh and Viswanath, arXiv
        1311.0776v4, Theorem 2.1: the region of the rates of both errors).
        """
        if not self._total.any():
            return np.zeros(len(epsilons))  # of a record that never takes part
        at = np.concatenate([epsilons, _AHEAD])
        by_profile = self.select.mean * pld.divergences(self.history, at - self._shift).max(axis=0)
        both = np.minimum(np.minimum(by_profile, rdp.delta_of(self._total[0], ORDERS, at)), 1.0)
        own, ahead = both[: len(epsilons)], both[len(epsilons) :]
        by_larger = ahead + (1 - ahead) * (np.exp(_AHEAD) - np.exp(epsilons[:, None])) / (1 + np.exp(_AHEAD))
        by_larger[epsilons[:, None] > _AHEAD] = 1.0
        return np.asarray(np.minimum(own, by_larger.min(axis=1)))

    @cached_property
    def _shift(self) -> float:
        return self.select.shift(pld.divergences(self.history, LINES).max(axis=0))

    @cached_property
    def _total(self) -> FloatArray:
        return _total(self.select, self.history)


def profile_of(history: Sequence[SampledGaussian], select: Selection | None) -> Profile:
    """The profile of this history, or of the run that is selected among runs that go through it."""
    return Profile(history) if select is None else SelectedProfile(history, select=select)


def _total(select: Selection, history: Sequence[SampledGaussian]) -> FloatArray:
    """(1, ORDERS)"""
    rates, noises = (np.array([[getattr(m, name)] for m in history]) for name in ("sample_rate", "noise_multiplier"))
    return select.divergences(rates, noises, [m.steps for m in history])
