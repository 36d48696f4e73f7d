"""PLD: upper bounds by numerical composition of privacy loss distributions, in both directions.

Composition by FFT: Koskela et al., arXiv 1906.03049v4. Connect-the-dots rounding, under which every discretised
distribution dominates the true one: Doroshenko et al., arXiv 2207.04380v1, Algorithm 1. dp-accounting computes the same
point by point; the tests compare with it. Here the grid is fitted to each mechanism, the arithmetic is vectorised over
grids, and deltas are evaluated slightly lower, to cover the rounding of the FFT.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from ..errors import BudgetError
from ..mechanism import SMALLEST_DELTA, SMALLEST_NOISE, FloatArray, SampledGaussian
from .composing import convolved, self_composed
from .losses import Losses
from .one_step import MOST_POINTS, adding, fitted_grid, reach, removing

History = tuple[SampledGaussian, ...]

#: Bound on how much rounding lowers a tail: 1e-12, and 2e-16 for each step, because powers of a transform multiply its
#: error (measured against 80-bit arithmetic: at most 6e-12 at 100,000 steps, 1e-12 at 9,375).
FLOAT_SLACK, FLOAT_SLACK_PER_STEP = 1e-12, 2e-16


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
    grid     spacing of the discretised privacy loss, in nats; by default fitted to the mechanisms
    points   approximate maximum size of one step's grid; a smaller one is less tight and faster
    slacks   how many times the rounding of the steps is subtracted from delta. One certifies; searches use two, so that
             their results verify whatever the last bits of the history are

    Returns inf where no finite epsilon can be certified, and 0 for a record that never takes part. Raises BudgetError
    for a delta out of range.

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
    directions = both_directions(history, grid, points)
    if directions is None:
        return np.full(len(deltas), math.inf)
    read = [losses.epsilons(np.maximum(deltas - slack(history, slacks), 0.0)) for losses in directions]
    worst: FloatArray = np.maximum.reduce([np.zeros(len(deltas)), *read])
    return worst


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
    steps: dict[tuple[float, float], int] = {}  # equal mechanisms are one with more steps
    for m in history:
        if not m.is_silent:
            steps[m.sample_rate, m.noise_multiplier] = steps.get((m.sample_rate, m.noise_multiplier), 0) + m.steps
    parts = tuple(SampledGaussian(*row, steps[row]) for row in sorted(steps))
    if not parts:
        return ()
    if min(m.noise_multiplier for m in parts) < SMALLEST_NOISE:
        return None
    # One grid for all: the finest that any mechanism needs, limited by the widest range.
    coarsest = max(map(reach, parts)) / points
    return _composed(parts, grid if grid is not None else max(min(map(fitted_grid, parts)), coarsest))


@lru_cache(maxsize=32)
def _composed(history: History, spacing: float) -> tuple[Losses, ...] | None:
    directions = []
    for discretise in (removing, adding):
        composed: Losses | None = None
        for mechanism in history:
            many = self_composed(discretise(mechanism, spacing), mechanism.steps)
            composed = many if composed is None else convolved(composed, many)
        if composed is None or not np.isfinite(composed.probability).all():
            return None
        directions.append(composed)
    return tuple(directions)
