"""Sample: a looser budget buys a higher sampling rate under the same noise multiplier.

Paper Alg. 2, as one bisection instead of its downward walk: more noise buys every group a higher rate, so the
mean rate rises with σ, and one root makes it the recipe's (departures: docs/paper.md#sample).
"""

from __future__ import annotations

import math

import numpy as np
from scipy.optimize import brentq

from ..accounting import Accountant
from ..accounting.calibrate import rate_for
from ..budgets import Budgets, FloatArray
from ..errors import OutOfReach
from .phases import Phase, Recipe
from .plans import Plan
from .scale import own_multipliers


def sample(budgets: Budgets, recipe: Recipe, accountant: Accountant) -> Plan:
    """Rates whose mean over records is the recipe's, to about 1e-5; no options."""
    mean_rate = recipe.batch_size / budgets.records
    rates: FloatArray = np.full(len(budgets.levels), mean_rate)  # kept between calls: a near guess saves evaluations

    def excess(log_noise: float) -> float:
        """ln(mean rate that this noise buys / the recipe's)."""
        nonlocal rates
        rates = np.array(
            [
                rate_for(float(epsilon), math.exp(log_noise), recipe.steps, float(delta), accountant, float(guess))
                for epsilon, delta, guess in zip(budgets.levels, budgets.delta, rates, strict=True)
            ]
        )
        return math.log(max(float(budgets.shares @ rates), 1e-300) / mean_rate)

    # The root lies between the groups' own multipliers: under the largest, all rates reach the mean or exceed it, under
    # the smallest none does. Scale's shared multiplier is within a few per cent of it where budgets are not far apart.
    own = np.log(own_multipliers(budgets, recipe, accountant))
    near = -math.log(float(budgets.shares @ np.exp(-own)))
    low = high = near
    stride = 0.05
    while excess(low) > 0 and low > own.min():
        low, stride = max(low - stride, float(own.min())), 2 * stride
    stride = 0.05
    while excess(high) < 0 and high < own.max():
        high, stride = min(high + stride, float(own.max())), 2 * stride
    crosses = excess(low) < 0 < excess(high)  # unless calibration's tolerance leaves both ends on one side
    log_noise = float(brentq(excess, low, high, xtol=1e-6, rtol=1e-6)) if crosses else high
    excess(log_noise)  # leaves the rates of exactly this noise behind, each a safe end
    if (rates == 0).any():
        raise OutOfReach(
            f"{(rates == 0).sum():,} of {len(rates):,} groups could not be drawn at all under the noise that the "
            'budgets of the others lead to. Use strategy="scale", whose groups do not depend on each other, or '
            'accountant="pld".'
        )
    phase = Phase(
        steps=recipe.steps,
        sample_rate=rates,
        clip_norm=np.full(len(rates), recipe.clip_norm),
        weight=np.ones(len(rates)),
        noise_std=math.exp(log_noise) * recipe.clip_norm,
        expected_batch=float(budgets.counts @ rates),
    )
    return Plan.of(budgets, recipe, accountant, phase, strategy="sample")
