"""Curve: how often the best attack on a planned history finds "in", at each rate of false alarms, from above.

If δ(ε) bounds the hockey-stick divergences of order e^ε in both directions, no attack with false-positive rate a has
a true-positive rate above δ(ε) + e^ε·a, for any real ε (Dong, Roth, Su, arXiv 1905.02383v3, Proposition 6). δ(ε)
comes from dp-accounting's privacy loss distribution, which dominates the true one, on the grid the accountant uses.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

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
    """divergence: δ(ε) at a fixed range of ε of both signs, of whichever direction is larger."""

    divergence: FloatArray

    def power(self, false_positives: npt.ArrayLike) -> FloatArray:
        """The largest true-positive rate at each of these false-positive rates."""
        rate = np.asarray(false_positives, dtype=np.float64)[..., None]
        found: FloatArray = np.minimum((self.divergence + np.exp(_EPSILONS) * rate).min(axis=-1), 1.0)
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
    from dp_accounting.pld import privacy_loss_distribution as distributions

    parts = [m for m in history if not m.is_silent]
    if not parts:
        return Curve(np.maximum(-np.expm1(_EPSILONS), 0.0))
    composed: Any = None
    spacing = min(map(pld.fitted_grid, parts))
    for mechanism in parts:
        many: Any = distributions.from_gaussian_mechanism(
            standard_deviation=mechanism.noise_multiplier,
            sampling_prob=mechanism.sample_rate,
            value_discretization_interval=spacing,
            pessimistic_estimate=True,
            use_connect_dots=True,
        ).self_compose(mechanism.steps)
        composed = many if composed is None else composed.compose(many)
    deltas = np.asarray(composed.get_delta_for_epsilon(_EPSILONS), dtype=np.float64)
    return Curve(np.clip(deltas + pld.FLOAT_SLACK, 0.0, 1.0))
