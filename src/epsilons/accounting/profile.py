"""The privacy profile of a history: all that (epsilon, delta) at one point does not say, as upper bounds.

A profile is the hockey-stick divergence δ(ε) at all real ε. Privacy loss distributions bound it from above, whichever
accountant certified the plan; where they are coarse, RDP's bound counts if it is smaller. Three facts follow from it:

* no attack with false-positive rate a has a true-positive rate above min over ε of δ(ε) + e^ε·a (Dong, Roth, Su, arXiv
  1905.02383v3, Proposition 6; Kaissis et al., arXiv 2406.08918v2);
* no attack's advantage is above δ(0);
* with prior odds e^−ε the Bayes error is at least π(1 − δ(ε)), π = 1/(1 + e^ε).
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from ..core.mechanism import FloatArray, SampledGaussian
from . import pld

#: The deltas at which a profile is shown, and at which tails are compared.
DELTAS: tuple[float, ...] = tuple(10.0**power for power in range(-9, -1))

#: Values of ε at which δ(ε) is evaluated: dense around 0, where about one attack in two succeeds, and far out.
GRID = np.unique(np.concatenate([np.linspace(-8, 8, 321), np.linspace(-60, 60, 241)]))
#: A finer grid, for hypothesis tests of an audit.
FINE_GRID = np.unique(np.concatenate([np.linspace(-8, 8, 641), np.linspace(-50, 50, 401)]))
#: The same, and values near 0: where there is much noise, all of the curve is there.
NEAR_0 = np.unique(np.concatenate([FINE_GRID, *np.outer([-1, 1], np.geomspace(1e-4, 1, 300))]))

#: True-positive rates at which costs are tabulated, for tests that ask for thousands of them.
_RATES: list[float] = np.unique([0.0, *np.geomspace(1e-9, 1, 4000), *np.linspace(0, 1, 4001)]).tolist()

#: Rates whose powers are computed together: for thousands at once the tables are larger than a cache.
RATES_AT_ONCE = 64


@dataclass(frozen=True, eq=False)
class Profile:
    """What an attacker who sees everything released can learn about the presence of one record.

    history  what the record goes through
    grid     (points,)  values of ε at which δ(ε) is evaluated
    options  of `pld.divergences`

    >>> profile = Profile((SampledGaussian(sample_rate=0.01, noise_multiplier=1.1, steps=1000),))
    >>> round(profile.advantage, 3)
    0.14
    """

    history: Sequence[SampledGaussian]
    grid: FloatArray = field(default_factory=lambda: GRID)
    options: Mapping[str, Any] = field(default_factory=dict)

    @cached_property
    def divergence(self) -> FloatArray:
        """(2, points) δ(ε) on the grid, of removing and of adding the record."""
        return self._divergence(self.grid)

    @cached_property
    def epsilons(self) -> FloatArray:
        """(deltas,) epsilon at each of DELTAS."""
        return pld.epsilon_at(self.history, np.array(DELTAS))

    @cached_property
    def advantage(self) -> float:
        """The largest true-positive rate minus false-positive rate of any attack."""
        return float(self._divergence(np.zeros(1)).max())

    def power(self, false_positives: npt.ArrayLike) -> FloatArray:
        """The largest true-positive rate at each false-positive rate, in the worse direction."""
        rates = np.asarray(false_positives, dtype=np.float64)
        factor, powers = np.exp(self.grid), np.empty(rates.size)
        for start in range(0, rates.size, RATES_AT_ONCE):
            rows = slice(start, start + RATES_AT_ONCE)
            scaled = factor * rates.reshape(-1)[rows, None]  # (rates, points)
            powers[rows] = np.maximum(*((divergence + scaled).min(axis=-1) for divergence in self.divergence))
        return np.minimum(powers, 1.0).reshape(rates.shape)

    def cost(self, true_positives: float) -> float:
        """The smallest false-positive rate of an attack with this true-positive rate, by the curve's symmetry."""
        return self._costs[bisect_right(_RATES, true_positives) - 1]

    def bayes_excess(self, reference: Profile) -> float:
        """By how much the Bayes error is lower than under `reference`, at the worst prior; 0 if nowhere."""
        prior = 1 / (1 + np.exp(self.grid))
        return max(0.0, float((prior * (self.divergence - reference.divergence)).max()))

    def tail_excess(self, reference: Profile, delta: float) -> float:
        """The largest relative excess of epsilon over `reference`'s at any of DELTAS below `delta`; 0 if none."""
        below = np.array(DELTAS) < delta * 0.999
        if not below.any():
            return 0.0
        mine, theirs = self.epsilons[below], reference.epsilons[below]
        with np.errstate(divide="ignore", invalid="ignore"):
            part = np.where(mine <= theirs, 0.0, mine / theirs - 1)
        return float(np.nan_to_num(part, nan=0.0, posinf=math.inf).max())

    def _divergence(self, epsilons: FloatArray) -> FloatArray:
        return pld.divergences(self.history, epsilons, **self.options)

    @cached_property
    def _costs(self) -> list[float]:
        """The cost at each of _RATES. Costs grow with the rate, so each entry is a lower bound up to the next rate."""
        costs: list[float] = np.maximum(1.0 - self.power(1.0 - np.array(_RATES)), 0.0).tolist()
        return costs


# -- Limits on a profile: points that its curve must not exceed, for budgets by risk

#: How many numbers `usage` takes: delta, epsilon, and the three limits of `Groups`.
TERMS = 5


def used(history: Sequence[SampledGaussian], limits: FloatArray, **options: Any) -> FloatArray:
    """(2,) upper bounds on the advantage, and on the true-positive rate at the false-positive rate of the limits.

    limits  (3,) largest advantage, false-positive rate, largest true-positive rate there; infinity where there is none
    """
    profile = Profile(history, NEAR_0, options)
    advantage = profile.advantage if math.isfinite(limits[0]) else 0.0
    return np.array([advantage, float(profile.power(limits[1])) if math.isfinite(limits[2]) else 0.0])


def usage(history: Sequence[SampledGaussian], terms: FloatArray, **options: Any) -> float:
    """The part of its terms that a history uses, in units of their epsilon: all hold where this is at most epsilon.

    terms    (5,) delta, epsilon, and limits as in `used`
    options  of `pld.epsilon`

    The largest of ε(δ)/epsilon, of the advantage by its limit, and of β(f) − f by the same of the declared rate, times
    epsilon. Each falls to 0 as the noise grows, so calibration inverts it like an epsilon.
    """
    delta, epsilon, most, rate, power = terms
    advantage, found = used(history, terms[2:], **options)
    spent = pld.epsilon(history, float(delta), **options)
    return float(epsilon * max(spent / epsilon, advantage / most, (found - rate) / (power - rate)))
