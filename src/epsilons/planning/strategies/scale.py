"""Scale: a looser budget buys a larger clip norm under the same noise.

Paper Alg. 3: all records are drawn at the same rate q, and each group's multiplier σ_p meets its budget at that rate.
The shared multiplier σ is their harmonic mean weighted by records, so that the clip norms c_p = σ·c/σ_p average to the
recipe's c exactly (derivation: docs/paper.md#scale). The authors' code uses the arithmetic mean instead.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from ...accounting import Accountant
from ...accounting import filter as filter_
from ...accounting.calibration import noises_for
from ...budgets.budgets import Budgets
from ...core.columns import taken
from ...core.mechanism import FloatArray, IntArray
from ...errors import PlanError
from ..plan_numbers import COLUMNS, Phase, Recipe, unweighted
from ..plans import Plan


def scale(budgets: Budgets, recipe: Recipe, accountant: Accountant, by: str = "norm") -> Plan:
    """Clip norms with the recipe's mean over records.

    by  "norm": clip to c_p (the paper's); "weight": clip all gradients to c and multiply by c_p/c. Privacy is the
        same, but gradients shorter than c_p keep their group's weight (docs/planning.md#scale-by-norm-or-by-weight)

    Raises PlanError for another `by`.
    """
    if by not in ("norm", "weight"):
        raise PlanError(f'scale goes by="norm" or by="weight", got {by!r}.')
    multipliers = group_multipliers(budgets, recipe, accountant)
    plan = _plan(budgets, recipe, accountant, multipliers, 1 / float(budgets.shares @ (1 / multipliers)), "scale")
    if by == "norm":
        return plan
    phase = plan.phases[0]
    equal = np.full(len(multipliers), recipe.clip_norm)
    return dataclasses.replace(
        plan, phases=(dataclasses.replace(phase, clip_norm=equal, weight=phase.clip_norm / recipe.clip_norm),)
    )


def scale_arithmetic(budgets: Budgets, recipe: Recipe, accountant: Accountant) -> Plan:
    """The rule of the authors' published code: the same privacy, but clip norms with a mean above the recipe's."""
    multipliers = group_multipliers(budgets, recipe, accountant)
    return _plan(budgets, recipe, accountant, multipliers, float(budgets.shares @ multipliers), "scale-arithmetic")


def group_multipliers(budgets: Budgets, recipe: Recipe, accountant: Accountant) -> FloatArray:
    """(groups,) σ_p: the noise multiplier at which each group spends its budget at the common rate."""
    rate = recipe.batch_size / budgets.records
    return noises_for(budgets.epsilons, rate, recipe.steps, budgets.claims, accountant)


def _plan(
    budgets: Budgets, recipe: Recipe, accountant: Accountant, multipliers: FloatArray, shared: float, strategy: str
) -> Plan:
    rate = recipe.batch_size / budgets.records
    rates, noise_std = np.full(len(multipliers), rate), shared * recipe.clip_norm
    phase = unweighted(recipe.steps, rates, noise_std / multipliers, noise_std, recipe.batch_size)
    return Plan.of(budgets, recipe, accountant, phase, strategy=strategy)


# -- Many different budgets: they are rounded down to at most 1,000, planned for, and expanded to all groups again
#
# A group is treated like the strictest of its neighbours within about a thousandth, so no group exceeds its budget and
# a looser budget never gets less. The resulting plan is verified group by group. Where all groups share a delta,
# rounding leaves at most ln(loosest/strictest)/1000 of a budget unused.

MOST_LEVELS = 1000
#: More distinct deltas than this are rounded down, too.
MOST_DELTAS = 8


def quantize_down(budgets: Budgets) -> tuple[Budgets, IntArray]:
    """Budgets with at most 1,000 groups, none looser than before, and (groups,) the new group of each old one."""
    if budgets.contract is not None:
        raise PlanError(f"A plan has at most {MOST_LEVELS:,} tiers by risk.")
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
    quantized = Budgets(taken(epsilon, budgets._codes), taken(deltas, budgets._codes), unit=budgets.unit)
    level = np.empty(len(epsilon), dtype=np.int64)
    level[budgets._codes] = quantized._codes
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
    return dataclasses.replace(phase, **{name: getattr(phase, name)[level] for name in COLUMNS})


def _lowest_of_bin(values: FloatArray, bins: int) -> FloatArray:
    """The smallest value in the bin of each value, with `bins` bins of equal width in logs."""
    log = np.log(values)
    width = max((log.max() - log.min()) / bins, 1e-12)
    which = np.minimum(((log - log.min()) / width).astype(np.int64), bins - 1)
    lowest = np.full(bins, np.inf)
    np.minimum.at(lowest, which, values)
    return np.asarray(lowest[which], dtype=np.float64)
