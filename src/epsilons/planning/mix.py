"""Mix: a looser budget buys both a higher rate and a larger clip norm.

The paper names a combination of its two methods without a formula. Here rates lie a part `weight` of the way from
Scale's to Sample's, and each group's own multiplier meets its budget at its own rate: whatever the rates, every budget
is used up, and the clip norms average to the recipe's (docs/planning.md#mix). At 0 this is Scale, at 1 Sample.
"""

from __future__ import annotations

import math

import numpy as np

from ..accounting import Accountant
from ..accounting.calibrate import noises_for
from ..budgets import Budgets, FloatArray
from ..errors import PlanError
from . import sample as sampling
from . import scale as scaling
from .exposure import excess, risk
from .phases import Phase, Recipe
from .plans import Plan


def mix(
    budgets: Budgets,
    recipe: Recipe,
    accountant: Accountant,
    weight: float = 0.5,
    floor: float = 0.0,
    max_excess: float = math.inf,
) -> Plan:
    """Rates between Scale's and Sample's, and clip norms that use up what is left of each budget.

    weight  part of the way from Scale (0) to Sample (1)
    floor   smallest sampling rate of any group, at most batch_size / records; who is drawn more often for it is
            clipped harder, and the others' rates shrink so that the expected batch stays
    max_excess
            cap on both excesses over Scale (exposure.py): Bayes error lost, and the part by which epsilon at a smaller
            delta is larger; the weight is lowered until no group is above it

    Raises PlanError for a weight, floor or cap outside its range.
    """
    if not max_excess >= 0:
        raise PlanError(f"mix takes a max_excess of at least 0; {max_excess} arrived.")
    if math.isinf(max_excess):
        return _mixed(budgets, recipe, accountant, weight, floor)
    made = _mixed(budgets, recipe, accountant, weight, floor)
    low, high = 0.0, weight
    if (excess(risk(made)) <= max_excess).all():
        return made
    made = _mixed(budgets, recipe, accountant, low, 0.0)
    for _ in range(8):
        middle = (low + high) / 2
        tried = _mixed(budgets, recipe, accountant, middle, floor)
        if (excess(risk(tried)) <= max_excess).all():
            low, made = middle, tried
        else:
            high = middle
    return made


def _mixed(budgets: Budgets, recipe: Recipe, accountant: Accountant, weight: float, floor: float) -> Plan:
    mean_rate = recipe.batch_size / budgets.records
    if not 0 <= weight <= 1:
        raise PlanError(f"mix takes a weight between 0 (scale) and 1 (sample); {weight} arrived.")
    if not 0 <= floor <= mean_rate:
        raise PlanError(
            f"mix takes a floor between 0 and batch_size / records = {mean_rate:.6g}, which is everyone's rate under "
            f"scale; {floor} arrived."
        )
    if weight == 0:
        return scaling.scale(budgets, recipe, accountant)
    if weight == 1 and floor == 0:
        return sampling.sample(budgets, recipe, accountant)
    _, sampled = sampling.solve(budgets, recipe, accountant)
    rates = _averaging_to(mean_rate, (1 - weight) * mean_rate + weight * sampled, budgets.shares, floor)
    own = noises_for(budgets.levels, rates, recipe.steps, budgets.delta, accountant)
    shared = 1 / float(budgets.shares @ (1 / own))
    phase = Phase(
        steps=recipe.steps,
        sample_rate=rates,
        clip_norm=shared * recipe.clip_norm / own,
        weight=np.ones(len(own)),
        noise_std=shared * recipe.clip_norm,
        expected_batch=float(budgets.counts @ rates),
    )
    return Plan.of(budgets, recipe, accountant, phase, strategy="mix")


def _averaging_to(mean_rate: float, rates: FloatArray, shares: FloatArray, floor: float) -> FloatArray:
    """`rates` scaled by one factor, none below `floor` or above 1, so that they average to `mean_rate`."""

    def scaled(factor: float) -> FloatArray:
        return np.asarray(np.clip(factor * rates, floor, 1.0), dtype=np.float64)

    low, high = 0.0, 1.0
    while shares @ scaled(high) < mean_rate and (scaled(high) < 1).any():
        high *= 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if shares @ scaled(middle) < mean_rate else (low, middle)
    return scaled(high)
