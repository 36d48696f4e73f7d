"""The whole privacy profile of a history: what (epsilon, delta) alone does not say, always from above.

All of it follows from the hockey-stick divergences δ(ε) over real ε, which connect-the-dots bounds from above: an
attack with false-positive rate a finds at most min over ε of δ(ε) + e^ε·a (Kaissis et al., arXiv 2406.08918v2, the
duality of profile and trade-off curve), its advantage is at most δ(0), and with prior odds e^−ε its Bayes error is at
least π(1 − δ(ε)), π = 1/(1 + e^ε). RDP has no such profile, so whatever certified a plan, this is PLD's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ..mechanism import SampledGaussian
from . import pld

FloatArray = npt.NDArray[np.float64]

#: Where a profile is shown and its tail compared.
DELTAS: tuple[float, ...] = tuple(10.0**power for power in range(-9, -1))
_EPSILONS = np.unique(np.concatenate([np.linspace(-8, 8, 321), np.linspace(-60, 60, 241)]))


@dataclass(frozen=True, eq=False)
class Profile:
    """What an attacker who sees everything released can learn about one record's presence.

    epsilons   (deltas,)  epsilon at each of DELTAS
    advantage  largest true-positive minus false-positive rate of any attack
    divergence (2, points) δ(ε) of removing and of adding the record, over a fixed range of ε of both signs
    """

    epsilons: FloatArray
    advantage: float
    divergence: FloatArray

    def power(self, false_positives: float) -> float:
        """Largest true-positive rate of any attack with this false-positive rate."""
        bound = self.divergence + np.exp(_EPSILONS) * false_positives
        return min(1.0, max(float(direction.min()) for direction in bound))

    def bayes_excess(self, reference: Profile) -> float:
        """How much Bayes error is lost against `reference`, at the worst prior; 0 if none."""
        prior = 1 / (1 + np.exp(_EPSILONS))
        return max(0.0, float((prior * (self.divergence - reference.divergence)).max()))

    def tail_excess(self, reference: Profile, delta: float) -> float:
        """By what part epsilon exceeds `reference`'s at any of DELTAS below `delta`; 0 if nowhere."""
        below = np.array(DELTAS) < delta * 0.999
        if not below.any():
            return 0.0
        mine, theirs = self.epsilons[below], reference.epsilons[below]
        with np.errstate(divide="ignore", invalid="ignore"):
            part = np.where(mine <= theirs, 0.0, mine / theirs - 1)
        return float(np.nan_to_num(part, nan=0.0, posinf=math.inf).max())


def profile(history: Sequence[SampledGaussian]) -> Profile:
    """The profile of a record that went through `history`."""
    directions = pld.both_directions(history)
    if directions is None:
        points = len(_EPSILONS)
        return Profile(np.full(len(DELTAS), math.inf), 1.0, np.ones((2, points)))
    if not directions:
        nothing = np.maximum(-np.expm1(_EPSILONS), 0.0)
        return Profile(np.zeros(len(DELTAS)), 0.0, np.stack([nothing, nothing]))
    divergence = np.stack([np.minimum(losses.deltas(_EPSILONS) + pld.slack(history), 1.0) for losses in directions])
    advantage = min(1.0, max(float(losses.deltas(np.zeros(1))[0]) for losses in directions) + pld.slack(history))
    return Profile(pld.epsilons(history, np.array(DELTAS)), advantage, divergence)
