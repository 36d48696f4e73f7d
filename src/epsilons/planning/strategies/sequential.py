"""Sequential: one phase per group, strictest first, each with the noise that its own budget needs.

A baseline of the paper (appendix: "trained on each privacy group separately one after another"; the order from strict
to loose worked best there). The paper's rule is different: one tuned noise multiplier, 2.5, for all groups, and for
each as many steps as its budget allows (`one_after_another` in experiments/strategies.py). Here each group gets the
same number of steps. Records are drawn only in the phase of their group, so its noise concerns this group alone.
"""

from __future__ import annotations

import numpy as np

from ...accounting import Accountant
from ...accounting.calibration import noises_for
from ...budgets import Budgets
from ...errors import PlanError
from ..plans import Plan
from ..recipe import Phase, Recipe


def sequential(budgets: Budgets, recipe: Recipe, accountant: Accountant) -> Plan:
    """The recipe's steps divided evenly, the remainder to the loosest groups; no options.

    A group smaller than the expected batch is drawn completely in each of its steps. Raises PlanError if there are
    fewer steps than groups.
    """
    groups = len(budgets.epsilons)
    if recipe.steps < groups:
        raise PlanError(
            f"sequential needs a step for each of the {groups:,} groups; the recipe has {recipe.steps:,}. Ask for more "
            "steps, or for fewer different budgets."
        )
    even, left = divmod(recipe.steps, groups)
    rates = np.minimum(1.0, recipe.batch_size / budgets.counts)
    # For all groups at both step counts, so that an error does not show which group's budget is out of reach.
    noises = {n: noises_for(budgets.epsilons, rates, n, budgets.claims, accountant) for n in {even, even + (left > 0)}}
    ones, phases = np.ones(groups), []
    for group, rate in enumerate(rates):
        steps = even + (group >= groups - left)
        phases.append(
            Phase(
                steps=steps,
                sample_rate=np.where(np.arange(groups) == group, rate, 0.0),
                clip_norm=recipe.clip_norm * ones,
                weight=ones,
                noise_std=float(noises[steps][group]) * recipe.clip_norm,
                expected_batch=float(rate * budgets.counts[group]),
            )
        )
    return Plan.of(budgets, recipe, accountant, *phases, strategy="sequential")
