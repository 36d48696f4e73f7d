"""PLD: upper bounds by numerical composition of privacy loss distributions, in both directions.

Composition by FFT: Koskela et al., arXiv 1906.03049v4. Connect-the-dots rounding, under which every discretised
distribution dominates the true one: Doroshenko et al., arXiv 2207.04380v1, Algorithm 1. dp-accounting computes the same
point by point; the tests compare with it. Here the grid is fitted to each mechanism, the arithmetic is vectorised over
grids, and deltas are evaluated slightly lower, to cover the rounding of the FFT. Memory is bounded (histories.py).

Where the grid is coarse, or delta hardly larger than that rounding, RDP's bound can be the smaller one. Both hold for
the same history at the same delta, which is fixed before, so the smaller of the two holds as well.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from ..errors import BudgetError
from ..mechanism import SMALLEST_DELTA, SMALLEST_NOISE, FloatArray, SampledGaussian
from . import rdp
from .histories import Directions, History, composed
from .losses import Losses
from .one_step import FINENESS, MOST_POINTS, deviation, fitted_grid, reach
from .recent import recent

#: Bound on how much rounding lowers a tail: 1e-12, and 2e-16 for each step, because powers of a transform multiply its
#: error (measured against 80-bit arithmetic, at 150 random histories of 10^4 to 10^8 steps and small deltas: at most
#: 0.9 of this bound). What rounding takes off large divergences is `_lost`.
FLOAT_SLACK, FLOAT_SLACK_PER_STEP = 1e-12, 2e-16

#: Losses of a divergence below this part of the slack are counted as part of it.
MOST_LOST = 0.1

#: Where the slack is more than this part of a delta, RDP's bound is computed, too.
MOST_SLACK = 0.1


def epsilon(
    history: Sequence[SampledGaussian],
    delta: float,
    grid: float | None = None,
    points: float = MOST_POINTS,
    slacks: float = 1.0,
) -> float:
    """Upper bound on epsilon at `delta` for a record with this history.

    history  the mechanisms that the record goes through
    delta    probability in [1e-9, 1)
    grid     spacing of the discretised privacy loss, in nats; by default fitted to the mechanisms. It is doubled
             where it would need more than 2^23 points
    points   approximate maximum size of one step's grid; a smaller one is less tight and faster
    slacks   how many times the rounding of the steps is subtracted from delta. One certifies; searches use two, so that
             their results verify whatever the last bits of the history are

    Returns RDP's epsilon where that is smaller, unless `grid` is given. Returns inf where no finite epsilon can be
    certified, and 0 for a record that never takes part. Raises BudgetError for a delta out of range.

    >>> round(epsilon([SampledGaussian(512 / 60_000, 3.4358, 9375)], 1e-5), 4)
    0.9141
    """
    return _one(tuple(history), float(delta), grid, points, slacks)


def epsilon_at(
    history: Sequence[SampledGaussian],
    deltas: FloatArray,
    grid: float | None = None,
    points: float = MOST_POINTS,
    slacks: float = 1.0,
) -> FloatArray:
    """(deltas,) the same at several deltas, for little more than the cost of one."""
    if not ((deltas >= SMALLEST_DELTA) & (deltas < 1)).all():
        raise BudgetError(f"delta must lie between {SMALLEST_DELTA:g} and 1: a smaller one is beyond double precision.")
    parts = merged(history)
    directions = _directions(parts, grid, points)
    if directions is None:
        worst = np.full(len(deltas), math.inf)
    else:
        allowed = slack(history, slacks)
        read = [
            losses.epsilons(np.maximum(deltas - allowed - _lost(losses, deltas, allowed), 0)) for losses in directions
        ]
        worst = np.maximum.reduce([np.zeros(len(deltas)), *read])
    if grid is None:
        rough = _is_coarse(parts, directions) | (slack(history, slacks) > MOST_SLACK * deltas)
        if rough.any():
            worst[rough] = np.fmin(worst[rough], rdp.epsilon_at(parts, deltas[rough]))
    return worst


def divergences(history: Sequence[SampledGaussian], epsilons: FloatArray) -> FloatArray:
    """(2, epsilons) upper bounds on the hockey-stick divergence of removing and of adding, at any real epsilons."""
    parts = merged(history)
    directions = _directions(parts, None, MOST_POINTS)
    never = -np.expm1(np.minimum(epsilons, 0.0))  # the divergence of a record that never takes part
    if directions == ():
        return np.stack([never, never])
    bound = np.ones((2, len(epsilons)))
    if directions:
        allowed = slack(history)
        bound = np.stack([_with_rounding(losses, losses.deltas(epsilons), allowed) for losses in directions])
    if _is_coarse(parts, directions) or slack(history) > MOST_SLACK * SMALLEST_DELTA:
        # Below 0 by the other direction: δ(ε) = 1 − e^ε + e^ε·δ'(−ε). RDP bounds both directions alike.
        by_rdp = never + np.exp(np.minimum(epsilons, 0.0)) * rdp.delta_at(parts, np.abs(epsilons))
        bound = np.fmin(bound, by_rdp)
    return bound


def _with_rounding(losses: Losses, deltas: FloatArray, allowed: float) -> FloatArray:
    """Upper bounds from computed divergences."""
    bound: FloatArray = np.minimum(deltas + _lost(losses, deltas, allowed) + allowed, 1.0)
    return bound


def _lost(losses: Losses, deltas: FloatArray, allowed: float) -> FloatArray:
    """(deltas,) what rounding of the total probability takes off each divergence; 0 where it is far below `allowed`.

    Probabilities of a step that add up to 1 − η, not 1, make those of n steps too small by the factor (1 − η)^n.
    """
    lost = deltas * max(0.0, 1 / (float(losses.probability.sum()) + losses.infinite) - 1)
    return np.where(lost > MOST_LOST * allowed, lost, 0.0)


def _is_coarse(parts: History, directions: tuple[Losses, ...] | None) -> bool:
    """Whether the grid is coarser than FINENESS asks, or no PLD exists: then RDP's bound can be smaller."""
    if directions is None:
        return True
    return any(losses.spacing > 1.001 * FINENESS * deviation(m) for losses in directions for m in parts)


def slack(history: Sequence[SampledGaussian], times: float = 1.0) -> float:
    """Bound on how much rounding lowers a delta of this history; the part of the steps counts `times` times."""
    return FLOAT_SLACK + times * FLOAT_SLACK_PER_STEP * sum(m.steps for m in history if not m.is_silent)


@lru_cache(maxsize=65_536)
def _one(history: History, delta: float, grid: float | None, points: float, slacks: float) -> float:
    return float(epsilon_at(history, np.array([delta]), grid, points, slacks)[0])


def both_directions(
    history: Sequence[SampledGaussian], grid: float | None = None, points: float = MOST_POINTS
) -> tuple[Losses, ...] | None:
    """The losses of removing and of adding a record, composed separately; None where nothing can be certified.

    Their hockey-stick divergences bound both orders of the two data sets, so the larger one counts. The tuple is empty
    for a record that never takes part.
    """
    return _directions(merged(history), grid, points)


def _directions(parts: History, grid: float | None, points: float) -> tuple[Losses, ...] | None:
    if not parts:
        return ()
    if min(m.noise_multiplier for m in parts) < SMALLEST_NOISE:
        return None
    # One grid for all: the finest that any mechanism needs, limited by the widest range.
    coarsest = max(map(reach, parts)) / points
    return _composed(parts, grid if grid is not None else max(min(map(fitted_grid, parts)), coarsest))


def merged(history: Sequence[SampledGaussian]) -> History:
    """The history in an order of its own, without silent parts; equal mechanisms are one with more steps."""
    steps: dict[tuple[float, float], int] = {}
    for m in history:
        if not m.is_silent:
            steps[m.sample_rate, m.noise_multiplier] = steps.get((m.sample_rate, m.noise_multiplier), 0) + m.steps
    return tuple(SampledGaussian(*row, steps[row]) for row in sorted(steps))


@recent(entries=32, size=2**24)
def _composed(history: History, spacing: float) -> Directions:
    return composed(history, spacing)
