"""A baseline of the paper: groups one after another under one noise multiplier."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from epsilons import Budgets, Phase, Plan, Recipe, SampledGaussian
from epsilons.accounting import Accountant
from epsilons.errors import PlanError


def one_after_another(
    budgets: Budgets,
    recipe: Recipe,
    accountant: Accountant,
    noise_multiplier: float = 2.5,
    loosest_first: bool = False,
) -> Plan:
    """Paper, appendix E.2: strictest group first, the next "once the privacy budget of the previous was exhausted".

    All groups have one noise multiplier and one expected batch. Each takes as many steps as its budget allows; the
    steps of the recipe are not used. `loosest_first` is the appendix' other order. Raises PlanError if a budget does
    not allow a single step.
    """
    groups = len(budgets.epsilons)
    ones, phases = np.ones(groups), []
    for group, (epsilon, delta, count) in enumerate(zip(budgets.epsilons, budgets.delta, budgets.counts, strict=True)):
        rate = min(1.0, recipe.batch_size / int(count))

        def spent(steps: int, rate: float = rate, delta: float = float(delta)) -> float:
            return accountant([SampledGaussian(rate, noise_multiplier, steps)], delta)

        phases.append(
            Phase(
                steps=most_steps(spent, float(epsilon)),
                sample_rate=np.where(np.arange(groups) == group, rate, 0.0),
                clip_norm=recipe.clip_norm * ones,
                weight=ones,
                noise_std=noise_multiplier * recipe.clip_norm,
                expected_batch=rate * int(count),
            )
        )
    order = reversed(phases) if loosest_first else phases
    return Plan.of(budgets, recipe, accountant, *order, strategy="one-after-another")


def most_steps(spent: Callable[[int], float], epsilon: float) -> int:
    """The largest number of steps that spends at most `epsilon`, by doubling and bisection."""
    if spent(1) > epsilon:
        raise PlanError("A budget does not allow a single step under this noise multiplier. Raise noise_multiplier.")
    low, high = 1, 2
    while spent(high) <= epsilon:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if spent(middle) <= epsilon else (low, middle)
    return low


STRATEGIES = {"one-after-another": one_after_another}
