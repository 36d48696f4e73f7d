"""Mix: a looser budget buys both a higher rate and a larger clip norm.

The paper names a combination of its two methods without a formula. Here the rates are a part `weight` of the way from
Scale's to Sample's, and each group's noise multiplier meets its budget at its rate. Every budget is used up, and the
clip norms average to the recipe's (docs/planning.md#mix). At 0 this is Scale, at 1 Sample.
"""

from __future__ import annotations

import functools
import math
import warnings

import numpy as np

from ...accounting import Accountant
from ...accounting.calibration import bisected, noises_for
from ...budgets.budgets import Budgets
from ...core.disclosure import has_small_cells
from ...core.mechanism import FloatArray
from ...errors import EpsilonsWarning, InfeasibleBudgetError, PlanError
from ...tabular import decimal
from ..plan_numbers import Recipe, unweighted
from ..plans import Plan
from ..risk_profile import excess, risk
from .sample import sample, solve
from .scale import scale


def mix(
    budgets: Budgets,
    recipe: Recipe,
    accountant: Accountant,
    weight: float = 0.5,
    floor: float | str = 0.0,
    max_excess: float = math.inf,
) -> Plan:
    """Rates between Scale's and Sample's, and clip norms that use up what is left of each budget.

    weight  part of the way from Scale (0) to Sample (1)
    floor   smallest sampling rate, of every group or, as "1:0.004,2:0.01", of those with these epsilons; at most
            batch_size / records on average. A group that is drawn more often because of it is clipped harder, and the
            other rates shrink so that the expected batch stays
    max_excess
            cap on both excesses over Scale (see planning.GroupRisk): Bayes error lost, and the part by which epsilon at
            a smaller delta is larger; the weight is lowered until no group is above it, and a warning names the weight

    Raises PlanError for a weight, floor or cap outside its range, and for a cap that the floors alone exceed.
    """
    if not 0 <= weight <= 1:
        raise PlanError(f"mix takes a weight between 0 (scale) and 1 (sample), got {weight}.")
    if not max_excess >= 0:
        raise PlanError(f"mix takes a max_excess of at least 0, got {max_excess}.")
    floors = _floors(floor, budgets, recipe)

    @functools.cache
    def mixed_at(weight: float) -> Plan:
        return _mixed(budgets, recipe, accountant, weight, floors)

    def is_within(weight: float) -> bool:
        return bool((excess(risk(mixed_at(weight))) <= max_excess).all())

    if math.isinf(max_excess) or is_within(weight):
        return mixed_at(weight)
    if (floors > recipe.batch_size / budgets.records).any() and not is_within(0.0):
        raise PlanError(
            f"The floors alone cost more than max_excess = {max_excess:g}: rates above batch_size / records leave "
            "scale, too. Lower the floors or raise the cap."
        )
    lowered, _ = bisected(is_within, 0.0, weight, times=8)
    mixed = mixed_at(lowered)
    to = "" if has_small_cells(mixed.groups) else f" to {lowered:.3g}"
    warnings.warn(
        f"max_excess = {max_excess:g} lowered mix's weight from {weight:g}{to} (0 is scale).",
        EpsilonsWarning,
        stacklevel=3,
    )
    return mixed


def _mixed(budgets: Budgets, recipe: Recipe, accountant: Accountant, weight: float, floors: FloatArray) -> Plan:
    mean_rate = recipe.batch_size / budgets.records
    if weight == 0 and (floors <= mean_rate).all():
        return scale(budgets, recipe, accountant)
    if weight == 1 and not floors.any():
        return sample(budgets, recipe, accountant)
    sampled = solve(budgets, recipe, accountant)[1] if weight > 0 else np.zeros(len(floors))
    rates = _averaging_to(mean_rate, (1 - weight) * mean_rate + weight * sampled, budgets.shares, floors)
    if (rates == 0).any():
        raise InfeasibleBudgetError(
            "Some groups could not be drawn at all beside the others. Give them a floor, lower the weight, or use "
            'accountant="pld".'
        )
    noises = noises_for(budgets.epsilons, rates, recipe.steps, budgets.claims, accountant)
    shared = 1 / float(budgets.shares @ (1 / noises))
    noise_std = shared * recipe.clip_norm
    phase = unweighted(recipe.steps, rates, noise_std / noises, noise_std, float(budgets.counts @ rates))
    return Plan.of(budgets, recipe, accountant, phase, strategy="mix")


def _floors(floor: float | str, budgets: Budgets, recipe: Recipe) -> FloatArray:
    """(groups,) smallest rates, from one for all or from "epsilon:rate,…"."""
    floors = np.zeros(len(budgets.epsilons))
    if isinstance(floor, str) and budgets.contract is not None:
        raise PlanError("mix takes one floor for all budgets by risk: their tiers share epsilons.")
    if isinstance(floor, str):
        pairs = [tuple(map(decimal, one.split(":"))) for one in floor.split(",")]
        if any(len(pair) != 2 or None in pair for pair in pairs):
            raise PlanError(
                f'mix takes a floor like 0.004, or like "1:0.004,2:0.01" with one rate per epsilon, got {floor!r}.'
            )
        for level, rate in pairs:
            if not (budgets.epsilons == level).any():
                raise PlanError(f"mix takes floors for epsilons that are in the plan; there is no epsilon = {level:g}.")
            floors[budgets.epsilons == level] = rate
    else:
        floors[:] = floor
    mean_rate, lifted = recipe.batch_size / budgets.records, float(budgets.shares @ floors)
    if not ((floors >= 0) & (floors <= 1)).all() or not lifted <= mean_rate * (1 + 1e-12):
        raise PlanError(
            "mix takes a floor of at least 0, with a mean over records of at most batch_size / records = "
            f"{mean_rate:.6g}, the rate of all records under scale, got {floor}."
        )
    return floors


def _averaging_to(mean_rate: float, rates: FloatArray, shares: FloatArray, floors: FloatArray) -> FloatArray:
    """`rates` scaled by one factor, none below its floor or above 1, so that they average to `mean_rate`."""

    def scaled(factor: float) -> FloatArray:
        return np.asarray(np.clip(factor * rates, floors, 1.0), dtype=np.float64)

    def is_too_low(factor: float) -> bool:
        return bool(shares @ scaled(factor) < mean_rate)

    highest = 1.0
    while is_too_low(highest) and (scaled(highest) < 1).any():
        highest *= 2
    return scaled(bisected(is_too_low, 0.0, highest, times=60)[1])
