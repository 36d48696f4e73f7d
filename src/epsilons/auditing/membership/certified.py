"""The certified curve of a group: no attack on what the plan releases has a higher true-positive rate.

It is the largest power of a test at each false-positive rate (`accounting.profile`; Dong, Roth, Su, arXiv 1905.02383v3,
Proposition 6). It holds for each record, each choice of the other members and, because such a curve is concave, for
averages over records, over targets with independent coins and over thresholds.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np

from ...accounting.profile import Profile
from ...mechanism import FloatArray, IntArray, SampledGaussian
from ...planning import Plan
from .intervals import RATES

#: False-positive rates between which the area is summed.
_STEPS = np.unique(np.concatenate([[0.0], np.geomspace(1e-9, 1e-3, 300), np.linspace(1e-3, 1, 4000)]))


@dataclass(frozen=True, eq=False)
class Certified:
    """Upper bounds for one group.

    area   of the area under any attack's ROC
    power  (rates,) of its true-positive rate at each of intervals.RATES
    """

    area: float
    power: FloatArray = field(repr=False)


def certified(plan: Plan, groups: IntArray) -> Certified:
    """The bounds that hold for every record of these groups of the plan; groups: their indices."""
    return _certified(dominating(plan, groups))


def dominating(plan: Plan, groups: IntArray) -> tuple[SampledGaussian, ...]:
    """A history that reveals at least as much as that of any of these groups: highest rate and least noise by phase.

    A lower rate is post-processing of a higher one (replace the result by one without the record), and more noise is
    post-processing of less. For one group it is the group's own history.
    """
    history = []
    for phase in plan.phases:
        rate, noise = phase.sample_rate[groups], phase.noise_multiplier[groups]
        drawn = noise[rate > 0] if rate.any() else noise
        history.append(SampledGaussian(float(rate.max()), float(drawn.min()), phase.steps))
    return tuple(history)


@lru_cache(maxsize=256)
def _certified(history: tuple[SampledGaussian, ...]) -> Certified:
    profile = Profile(history)
    return Certified(_area(profile), profile.power(RATES))


def _area(profile: Profile) -> float:
    """An upper sum: the curve never falls, so each step has the height of its right end. At most .0003 too much."""
    return float(np.diff(_STEPS) @ profile.power(_STEPS[1:]))
