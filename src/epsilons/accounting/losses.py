"""Discretised privacy losses: epsilon at a delta, and delta at an epsilon.

Connect-the-dots rounding, under which every discretised distribution dominates the true one: Doroshenko et al., arXiv
2207.04380v1, Algorithm 1.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from ..mechanism import FloatArray


@dataclass(frozen=True, eq=False)
class Losses:
    """A discretised privacy loss.

    spacing      nats between neighbouring losses
    lowest       the smallest loss, in spacings
    probability  (points,) of each loss spacing·(lowest + i)
    infinite     probability of an infinite loss
    """

    spacing: float
    lowest: int
    probability: FloatArray
    infinite: float

    def epsilons(self, deltas: FloatArray) -> FloatArray:
        """(deltas,) the smallest epsilon >= 0 with a hockey-stick divergence of at most each delta, rounded up."""
        loss, above, below = self._sums
        divergence = above - np.exp(np.minimum(loss, 700.0)) * below  # with epsilon equal to each loss
        # Rounding can swap neighbours in the last digits; the running maximum is an upper bound.
        falling = np.maximum.accumulate(divergence[::-1])[::-1]
        first = np.searchsorted(-falling, -deltas, side="left")  # first point at which delta is met
        at = np.minimum(first, len(loss) - 1)
        # Between that point and the one before, divergence is above − e^ε · below.
        with np.errstate(divide="ignore", invalid="ignore"):
            inside = np.log(np.maximum(above[at] - deltas, 0.0) / below[at])
        inside = np.where(np.isfinite(inside), np.minimum(inside, loss[at]), loss[at])
        inside = np.where(above[at] <= deltas, 0.0, inside)  # delta covers everything
        out: FloatArray = np.maximum(np.where(at > 0, np.maximum(inside, loss[at - 1]), inside), 0.0)
        return np.where((self.infinite > deltas) | (first == len(loss)), math.inf, out)

    def deltas(self, epsilons: FloatArray) -> FloatArray:
        """(epsilons,) hockey-stick divergence at each epsilon, of either sign."""
        loss = self.spacing * (self.lowest + np.arange(len(self.probability)))
        at = np.searchsorted(loss, epsilons, side="right")
        above = np.append(np.cumsum(self.probability[::-1])[::-1], 0.0) + self.infinite
        # Σ p e^{ε − l} over l > ε, scaled so that nothing overflows.
        scale = np.append(_decayed_sums(self.probability, self.spacing), 0.0)
        nearest = np.append(loss, loss[-1] + self.spacing)[at]
        out: FloatArray = np.clip(above[at] - np.exp(epsilons - nearest) * scale[at], 0.0, 1.0)
        return out

    @property
    def _sums(self) -> tuple[FloatArray, FloatArray, FloatArray]:
        """Losses >= 0, the probability of a loss at least as large, and the same sum weighted by e^−loss."""
        start = max(0, -self.lowest)
        kept = self.probability[start:] if start < len(self.probability) else np.zeros(1)
        loss: FloatArray = self.spacing * (max(self.lowest, 0) + np.arange(len(kept), dtype=np.float64))
        above = np.cumsum(kept[::-1])[::-1] + self.infinite
        below = np.cumsum((kept * np.where(loss < 700, np.exp(-np.minimum(loss, 700.0)), 0.0))[::-1])[::-1]
        return loss, above, below


def connect_the_dots(delta: FloatArray, lowest: int, spacing: float) -> Losses:
    """Probabilities on the grid: their hockey-stick curve joins the given dots by chords in e^ε (Algorithm 1)."""
    delta = np.minimum.accumulate(np.clip(delta, 0.0, 1.0))
    step, grow = np.diff(delta), math.expm1(spacing)
    probability = np.empty_like(delta)
    probability[0] = 1 - delta[0] + step[0] / grow
    probability[1:-1] = (step[1:] - step[:-1] * math.exp(spacing)) / grow
    probability[-1] = step[-1] / math.expm1(-spacing)
    return Losses(spacing, lowest, np.maximum(probability, 0.0), float(delta[-1]))


def connect_both(removed: FloatArray, added: FloatArray, spacing: float) -> tuple[Losses, Losses]:
    """Both directions of one pair of distributions (P, Q), from the divergences of each at ε = 0, spacing, 2·spacing, …

    The losses of (Q, P) are those of (P, Q) with the other sign, each with probability e^−loss of before. Both curves
    fix the same dots, since δ_QP(−ε) = 1 − e^−ε + e^−ε·δ_PQ(ε), so the chords are the same, too.
    """
    removed, added = (np.minimum.accumulate(np.clip(delta, 0.0, 1.0)) for delta in (removed, added))
    grow = math.expm1(spacing)
    drop = (removed[0] - removed[1]) + (added[0] - added[1])
    middle = np.array([max(0.0, 1 - removed[0] - drop / grow)])
    up_removed, up_added = (connect_the_dots(delta, 0, spacing).probability[1:] for delta in (removed, added))
    down_removed, down_added = (
        (up * np.exp(-spacing * np.arange(1.0, len(up) + 1)))[::-1] for up in (up_added, up_removed)
    )
    return (
        Losses(spacing, -len(up_added), np.concatenate([down_removed, middle, up_removed]), float(removed[-1])),
        Losses(spacing, -len(up_removed), np.concatenate([down_added, middle, up_added]), float(added[-1])),
    )


def coarsened(losses: Losses, factor: int) -> Losses:
    """On a grid `factor` times as wide: never a smaller divergence at any ε.

    Each probability p at loss l is divided between the two neighbours of l on the new grid, so that Σ p and Σ p·e^−l
    stay the same. A divergence is Σ p·(1 − e^{ε − l})⁺, which is convex in e^−l, so it can only grow: connect-the-dots
    for a discrete distribution (Doroshenko et al., arXiv 2207.04380v1; between compositions: Ghazi et al., arXiv
    2207.04381v1).
    """
    lowest = losses.lowest // factor
    before = losses.lowest - lowest * factor
    cells = -(-(before + len(losses.probability)) // factor)
    padded = np.zeros((cells, factor))  # row i: the points from the new grid's point i up to the next
    padded.reshape(-1)[before : before + len(losses.probability)] = losses.probability
    upper = np.expm1(-losses.spacing * np.arange(factor)) / math.expm1(-losses.spacing * factor)
    probability = np.append(padded @ (1 - upper), 0.0)
    probability[1:] += padded @ upper
    return Losses(losses.spacing * factor, lowest, probability, losses.infinite)


def _decayed_sums(probability: FloatArray, spacing: float) -> FloatArray:
    """(points,) Σ_{j ≥ i} p_j e^{−(j − i)·spacing}, by a recursion from the top that cannot overflow."""
    from scipy import signal

    out: FloatArray = signal.lfilter([1.0], [1.0, -math.exp(-spacing)], probability[::-1])[::-1]
    return out
