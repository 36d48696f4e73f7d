"""Sample: a looser budget buys a higher sampling rate under the same noise multiplier.

Paper Alg. 2, as a root instead of its walk downwards: more noise buys every group a higher rate, so the mean rate rises
with σ, and at the root it is the recipe's (departures: docs/paper.md#sample).
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from ...accounting import Accountant
from ...accounting.calibration import (
    FEW,
    SMALLEST_RATE,
    TOLERANCE_OF_MANY,
    gaussian_strength,
    noises_for,
    rates_for,
    rates_near,
)
from ...budgets.budgets import Budgets
from ...core.mechanism import FloatArray
from ...errors import InfeasibleBudgetError, PlanError
from ..plan_numbers import Recipe, unweighted
from ..plans import Plan
from ..risk_profile import excess, risk


def sample(budgets: Budgets, recipe: Recipe, accountant: Accountant, max_excess: float = math.inf) -> Plan:
    """Rates with the recipe's mean over records, to about 1e-5.

    max_excess  cap on both excesses over Scale, as for `mix`

    Raises PlanError for a cap below 0, and for a plan above it.
    """
    if not max_excess >= 0:
        raise PlanError(f"sample takes a max_excess of at least 0, got {max_excess}.")
    log_noise, rates = solve(budgets, recipe, accountant)
    if (rates == 0).any():
        raise InfeasibleBudgetError(
            "Some groups could not be drawn at all under the noise that the budgets of the others lead to. Use "
            'strategy="scale", where groups do not depend on each other, or accountant="pld".'
        )
    noise_std = math.exp(log_noise) * recipe.clip_norm
    phase = unweighted(recipe.steps, rates, recipe.clip_norm, noise_std, float(budgets.counts @ rates))
    made = Plan.of(budgets, recipe, accountant, phase, strategy="sample")
    if math.isfinite(max_excess) and not (excess(risk(made)) <= max_excess).all():
        raise PlanError(
            f"Under sample some group loses more than max_excess = {max_excess:g} because of the budgets of others. "
            "Raise the cap, or use mix, which goes as far towards sample as the cap allows."
        )
    return made


def solve(budgets: Budgets, recipe: Recipe, accountant: Accountant) -> tuple[float, FloatArray]:
    """ln of the shared noise multiplier, and (groups,) rates that keep the budgets; 0 if a group cannot be drawn."""
    mean_rate = recipe.batch_size / budgets.records
    epsilon, delta, steps = budgets.epsilons, budgets.claims, recipe.steps
    strength = gaussian_strength(epsilon, delta)
    # To first order a group's rate is proportional to its strength, and the noise is that of the mean strength.
    rates: FloatArray = np.clip(mean_rate * strength / (budgets.shares @ strength), SMALLEST_RATE, 1.0)

    def near(log_noise: float) -> float:
        """ln(approximate mean rate under this noise / the recipe's)."""
        nonlocal rates
        guess = np.clip(rates, mean_rate * 1e-4, 1.0)
        rates = rates_near(epsilon, math.exp(log_noise), steps, delta, accountant, guess)
        return math.log(max(float(budgets.shares @ rates), 1e-300) / mean_rate)

    def exactly(log_noise: float) -> float:
        nonlocal rates
        rates = rates_for(epsilon, math.exp(log_noise), steps, delta, accountant, rates)
        return math.log(max(float(budgets.shares @ rates), 1e-300) / mean_rate)

    # The root lies between the groups' multipliers at the mean rate: under the largest, all rates are at least the mean
    # rate, under the smallest none is above it.
    deltas, first = np.unique(delta, axis=0, return_index=True)
    last = len(delta) - 1 - np.unique(delta[::-1], axis=0, return_index=True)[1]
    high = math.log(noises_for(epsilon[first], mean_rate, steps, deltas, accountant).max())
    low = math.log(noises_for(epsilon[last], mean_rate, steps, deltas, accountant).min())
    start = (low + high) / 2
    if delta.ndim == 1:
        average = np.interp(budgets.shares @ strength, np.sort(strength), epsilon[np.argsort(strength)])
        start = math.log(float(noises_for(np.array([average]), mean_rate, steps, delta[:1], accountant)[0]))
    log_noise, slope = _root(near, min(max(start, low), high), low, high, slope=1.2, tolerance=1e-4)
    tolerance = 2e-5 if len(epsilon) <= FEW else TOLERANCE_OF_MANY
    log_noise, _ = _root(exactly, log_noise, low, high, slope=slope, tolerance=tolerance)
    return log_noise, rates


def _root(
    excess: Callable[[float], float], x: float, low: float, high: float, slope: float, tolerance: float
) -> tuple[float, float]:
    """A point where a growing function is within `tolerance` of 0, and the slope there: secants inside a bracket.

    The last call of `excess` is at the returned point. If [low, high] brackets no root, that point is the nearer end.
    """
    ends: dict[bool, tuple[float, float]] = {}  # is above the root -> the last (x, value) there
    before = [math.inf, math.inf]
    for attempt in range(40):
        value = excess(x)
        ends[value >= 0] = (x, value)
        stuck = (value < 0 and x >= high) or (value > 0 and x <= low)
        (start, below), (end, above) = ends.get(False, (-math.inf, 0.0)), ends.get(True, (math.inf, 0.0))
        if abs(value) <= tolerance or stuck or end - start < 1e-9:
            break
        is_bracketed = len(ends) == 2
        if is_bracketed and above > below:
            slope = (above - below) / (end - start)
        next_x = x - min(max(value / slope, -0.7), 0.7)
        slow = abs(value) > before[0] / 2  # two secants did not halve it
        before = [before[1], abs(value)]
        if is_bracketed and (slow or not start < next_x < end):
            next_x = (start + end) / 2
        elif not is_bracketed and attempt >= 3:
            slope /= 2.0  # the function is flat here: longer steps
        x = min(max(next_x, low), high)
    return x, max(slope, 0.05)
