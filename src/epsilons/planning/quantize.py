"""Many different budgets: they are rounded down to at most 1,000, planned for, and expanded to all groups again.

A group is treated like the strictest of its neighbours within about a thousandth, so no group exceeds its budget and a
looser budget never gets less. The resulting plan is verified group by group. Where all groups share a delta, rounding
leaves at most ln(loosest/strictest)/1000 of a budget unused.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from ..accounting import filter as filter_
from ..budgets import Budgets
from ..mechanism import FloatArray, IntArray
from .recipe import Phase

MOST_LEVELS = 1000
#: More distinct deltas than this are rounded down, too.
MOST_DELTAS = 8


def quantize_down(budgets: Budgets) -> tuple[Budgets, IntArray]:
    """Budgets with at most 1,000 groups, none looser than before, and (groups,) the new group of each old one."""
    if budgets.groups.starts is not None:
        return _accounts(budgets, budgets.groups.starts)
    deltas = budgets.delta
    if len(np.unique(deltas)) > MOST_DELTAS:
        deltas = _lowest_of_bin(deltas, MOST_DELTAS)
    epsilon = np.empty_like(budgets.epsilons)
    distinct = np.unique(deltas)
    for delta in distinct:
        rows = deltas == delta
        epsilon[rows] = _lowest_of_bin(budgets.epsilons[rows], MOST_LEVELS // len(distinct))
    quantized = Budgets(epsilon[budgets.group], deltas[budgets.group], unit=budgets.unit)
    level = np.empty(len(epsilon), dtype=np.int64)
    level[budgets.group] = quantized.group
    return quantized, level


def _accounts(budgets: Budgets, starts: FloatArray) -> tuple[Budgets, IntArray]:
    """The same for accounts: those with nearly the same left are planned for as one that spent what any of them did."""
    left = (budgets.epsilons[:, None] - starts) / filter_.ORDERS
    best, strength = left.argmax(axis=1), left.max(axis=1)
    bins = MOST_LEVELS // len(filter_.ORDERS)
    level = np.empty(len(best), dtype=np.int64)
    epsilon, most = budgets.epsilons.copy(), starts.copy()
    for order in np.unique(best):
        rows = np.flatnonzero(best == order)
        lowest = _lowest_of_bin(np.maximum(strength[rows], 1e-12), bins)
        for value in np.unique(lowest):
            same = rows[lowest == value]
            epsilon[same], most[same] = budgets.epsilons[same].min(), starts[same].max(axis=0)
    group = budgets.group
    quantized = Budgets(epsilon[group], budgets.delta.min(), unit=budgets.unit, starts=most[group])
    level[group] = quantized.group
    return quantized, level


def expand(phase: Phase, level: IntArray) -> Phase:
    """The phase with one row per original group."""
    rows = {name: getattr(phase, name)[level] for name in ("sample_rate", "clip_norm", "weight")}
    return dataclasses.replace(phase, **rows)


def _lowest_of_bin(values: FloatArray, bins: int) -> FloatArray:
    """The smallest value in the bin of each value, with `bins` bins of equal width in logs."""
    log = np.log(values)
    width = max((log.max() - log.min()) / bins, 1e-12)
    which = np.minimum(((log - log.min()) / width).astype(np.int64), bins - 1)
    lowest = np.full(bins, np.inf)
    np.minimum.at(lowest, which, values)
    return np.asarray(lowest[which], dtype=np.float64)
