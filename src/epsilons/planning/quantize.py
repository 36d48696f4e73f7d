"""Very many levels: budgets are rounded down to at most a thousand, solved for, and handed back to everyone.

A group is treated as the strictest of its neighbours within a thousandth or so, so nobody is above a budget, a looser
budget never gets less, and each table row that results is verified by its own accounting. What rounding leaves over
is at most ln(loosest/strictest)/1000 of a budget where all share a delta.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import numpy.typing as npt

from ..budgets import Budgets, FloatArray
from .recipe import Phase

MOST_LEVELS = 1000
#: More distinct deltas than this are rounded down, too.
MOST_DELTAS = 8


def rounded_down(budgets: Budgets) -> tuple[Budgets, npt.NDArray[np.int64]]:
    """Budgets with at most 1,000 levels, none looser than what it stands for, and (groups,) which of them each got."""
    deltas = budgets.delta
    if len(np.unique(deltas)) > MOST_DELTAS:
        deltas = _lowest_of_bin(deltas, MOST_DELTAS)
    epsilon = np.empty_like(budgets.epsilons)
    distinct = np.unique(deltas)
    for delta in distinct:
        rows = deltas == delta
        epsilon[rows] = _lowest_of_bin(budgets.epsilons[rows], MOST_LEVELS // len(distinct))
    coarse = Budgets(epsilon[budgets.group], deltas[budgets.group])
    level = np.empty(len(epsilon), dtype=np.int64)
    level[budgets.group] = coarse.group
    return coarse, level


def handed_back(phase: Phase, level: npt.NDArray[np.int64]) -> Phase:
    """The phase with one row per original group."""
    rows = {name: getattr(phase, name)[level] for name in ("sample_rate", "clip_norm", "weight")}
    return dataclasses.replace(phase, **rows)


def _lowest_of_bin(values: FloatArray, bins: int) -> FloatArray:
    """Each value's smallest neighbour in its bin, of `bins` bins equally wide in logs."""
    log = np.log(values)
    width = max((log.max() - log.min()) / bins, 1e-12)
    which = np.minimum(((log - log.min()) / width).astype(np.int64), bins - 1)
    lowest = np.full(bins, np.inf)
    np.minimum.at(lowest, which, values)
    return np.asarray(lowest[which], dtype=np.float64)
