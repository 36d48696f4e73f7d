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

    # Scale's shared multiplier is within a few per cent of Sample's where budgets are not far apart.
    near = math.log(1 / float(budgets.shares @ (1 / own_multipliers(budgets, recipe, accountant))))
    low, high = near - 0.05, near + 0.05
    stride = 0.1
    while excess(low) > 0:
        low, high, stride = low - stride, low, 2 * stride
    stride = 0.1
    while excess(high) < 0 and (rates < 1).any():  # at rate 1 for all, rounding may leave the mean a hair below
        low, high, stride = high, high + stride, 2 * stride
    log_noise = float(brentq(excess, low, high, xtol=1e-6, rtol=1e-6)) if (rates < 1).any() else high
    excess(log_noise)  # leaves the rates of exactly this noise behind, each a safe end
    phase = Phase(
        steps=recipe.steps,
        sample_rate=rates,
        clip_norm=np.full(len(rates), recipe.clip_norm),
        weight=np.ones(len(rates)),
        noise_std=math.exp(log_noise) * recipe.clip_norm,
        expected_batch=float(budgets.counts @ rates),
    )
    return Plan.of(budgets, recipe, accountant, phase, strategy="sample")
