"""Curve: how often the best attack on a planned history finds "in", at each rate of false alarms, from above.

If δ(ε) bounds the hockey-stick divergence of order e^ε, no attack in that direction with false-positive rate a has a
true-positive rate above δ(ε) + e^ε·a, for any real ε (Dong, Roth, Su, arXiv 1905.02383v3, Proposition 6). δ(ε) comes
from privacy loss distributions, which dominate the true ones, whatever accountant certified the plan.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from ..accounting import pld
from ..mechanism import SampledGaussian
from .scores import FloatArray

#: Where costs are tabulated, for a test that asks for thousands of them.
_RATES: list[float] = np.unique([0.0, *np.geomspace(1e-9, 1, 4000), *np.linspace(0, 1, 4001)]).tolist()
#: Where δ(ε) is read off: dense about 0, where one attack in two succeeds, and far out.
_EPSILONS = np.unique(np.concatenate([np.linspace(-8, 8, 641), np.linspace(-50, 50, 401)]))


@dataclass(frozen=True, eq=False)
class Curve:
    """divergence: (2, points) δ(ε) of removing and of adding the record, over a fixed range of ε of both signs."""

    divergence: FloatArray

    def power(self, false_positives: npt.ArrayLike) -> FloatArray:
        """The largest true-positive rate at each of these false-positive rates, in the worse direction."""
        rate = np.asarray(false_positives, dtype=np.float64)[..., None]
        each = [(divergence + np.exp(_EPSILONS) * rate).min(axis=-1) for divergence in self.divergence]
        found: FloatArray = np.minimum(np.maximum(*each), 1.0)
        return found

    def cost(self, true_positives: float) -> float:
        """The least false-positive rate of an attack with this true-positive rate: the curve mirrors itself."""
        return self._costs[bisect_right(_RATES, true_positives) - 1]

    @cached_property
    def _costs(self) -> list[float]:
        """At each of _RATES; the one below stands for all up to the next, for cost grows with the rate."""
        found: list[float] = np.maximum(1.0 - self.power(1.0 - np.array(_RATES)), 0.0).tolist()
        return found


def curve(history: Sequence[SampledGaussian]) -> Curve:
    """The curve of a record that goes through `history`."""
    directions = pld.both_directions(history)
    if directions is None:  # nothing can be certified: everything is allowed
        return Curve(np.ones((2, len(_EPSILONS))))
    if not directions:
        return Curve(np.tile(np.maximum(-np.expm1(_EPSILONS), 0.0), (2, 1)))
    divergence = [np.minimum(losses.deltas(_EPSILONS) + pld.slack(history), 1.0) for losses in directions]
    return Curve(np.stack(divergence))
