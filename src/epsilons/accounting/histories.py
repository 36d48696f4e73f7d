"""The losses of a whole history, on a grid that fits into memory.

Most histories are composed on the grid that is asked for, with at most `composing.MOST_POINTS` points. The others are
composed from distributions with less rounding, in tighter windows, and on a grid that is doubled until it fits: a wider
grid only raises the divergence (`losses.coarsened`).
"""

from __future__ import annotations

import functools
import math

import numpy as np

from ..mechanism import SampledGaussian
from . import composing
from .composing import convolved, self_composed, window
from .losses import Losses, coarsened
from .one_step import adding, both_directions, points, removing

History = tuple[SampledGaussian, ...]
Directions = tuple[Losses, Losses]
DIRECTIONS = (removing, adding)

#: Rounding of one step's probabilities may change the total probability of all steps by this part.
MOST_ROUNDING = 1e-3


def composed(history: History, spacing: float) -> Directions:
    """The losses of removing and of adding a record, composed over all mechanisms (at least one)."""
    return _one_direction(history, spacing, 0), _one_direction(history, spacing, 1)


def _one_direction(history: History, spacing: float, direction: int) -> Losses:
    return _as_asked(history, spacing, direction) or _bounded(history, spacing, direction)


def _as_asked(history: History, spacing: float, direction: int) -> Losses | None:
    """On this very grid; None where it has too many points, or where rounding would be visible."""
    total: Losses | None = None
    for mechanism in history:
        if points(mechanism, spacing) > composing.MOST_POINTS:
            return None
        one, times = DIRECTIONS[direction](mechanism, spacing), mechanism.steps
        if times * abs(one.probability.sum() + one.infinite - 1) > MOST_ROUNDING:
            return None
        kept = window(one.probability, times) if times > 1 else (0, len(one.probability) - 1)
        if kept[1] - kept[0] + (len(total.probability) if total else 0) >= composing.MOST_POINTS:
            return None
        many = self_composed(one, times, kept)
        total = many if total is None else convolved(total, many)
    return total if total is not None and np.isfinite(total.probability).all() else None


def _bounded(history: History, spacing: float, direction: int) -> Losses:
    """On grids of spacing·2^k with the smallest k that fits, and with little rounding."""
    most = composing.MOST_POINTS // min(len(history), 2)
    parts = (_many(mechanism, spacing, most, direction) for mechanism in history)
    return functools.reduce(_joined, parts)


def _many(mechanism: SampledGaussian, spacing: float, most: int, direction: int) -> Losses:
    """All steps of one mechanism, with at most `most` points."""
    width = points(mechanism, spacing)
    while True:
        spacing *= 2 ** max(0, math.ceil(math.log2(width / most)))
        width = points(mechanism, spacing)
        if width > most:
            continue
        one = both_directions(mechanism, spacing)[direction]
        if mechanism.steps == 1:
            return one
        start, end = window(one.probability, mechanism.steps, wide_search=True)
        width = end - start + 1
        if width <= most:
            return self_composed(one, mechanism.steps, (start, end))


def _joined(one: Losses, other: Losses) -> Losses:
    """The sum of two independent losses, on the coarser of their grids or one that fits."""
    spacing = max(one.spacing, other.spacing)
    while (one.spacing * len(one.probability) + other.spacing * len(other.probability)) / spacing > (
        composing.MOST_POINTS - 4
    ):
        spacing *= 2
    one, other = (coarsened(losses, round(spacing / losses.spacing)) for losses in (one, other))
    return convolved(one, other)
