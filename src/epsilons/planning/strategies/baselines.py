"""Uniform: plain DP-SGD, with all records at the strictest budget. Exclude: the same without some of the records.

Abadi et al., "Deep Learning with Differential Privacy", arXiv 1607.00133v2, Algorithm 1; the baseline of the
paper. With one group every strategy returns this plan. Exclude leaves out all records with a budget below a threshold.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ...accounting import Accountant
from ...accounting.calibration import noises_for
from ...budgets.budgets import Budgets
from ...errors import PlanError
from ..plan_numbers import Recipe, unweighted
from ..plans import Plan
from .scale import MOST_LEVELS, quantize_down


def uniform(budgets: Budgets, recipe: Recipe, accountant: Accountant) -> Plan:
    """One rate, one clip norm, and the noise that the strictest group needs; no options."""
    everyone = np.ones(len(budgets.epsilons), dtype=bool)
    return _at_the_strictest(budgets, recipe, accountant, "uniform", everyone, budgets)


def exclude(budgets: Budgets, recipe: Recipe, accountant: Accountant, threshold: float = 0.0) -> Plan:
    """One rate, clip norm and noise for all records with epsilon >= `threshold`; the others are never drawn.

    By default no record is left out. The threshold is compared with the unrounded epsilons; with more than 1,000 of
    them, the noise is computed from budgets rounded down. Raises PlanError if fewer records than the expected batch are
    left.
    """
    kept = budgets.epsilons >= threshold
    if budgets.counts[kept].sum() < recipe.batch_size:
        raise PlanError(
            f"A threshold of {threshold:g} leaves fewer records than the expected batch ({recipe.batch_size:g}). Lower "
            "the threshold or the batch size."
        )
    rest = budgets.subset(kept[budgets.group])
    if len(rest.epsilons) > MOST_LEVELS:
        rest, _ = quantize_down(rest)
    return _at_the_strictest(budgets, recipe, accountant, "exclude", kept, rest)


def _at_the_strictest(
    budgets: Budgets, recipe: Recipe, accountant: Accountant, strategy: str, kept: npt.NDArray[np.bool_], rest: Budgets
) -> Plan:
    """One rate and clip norm for the groups that are kept, and the noise that the strictest of their budgets needs."""
    rate = recipe.batch_size / int(budgets.counts[kept].sum())
    # At one delta the smallest epsilon needs the most noise, so one search per delta is enough.
    deltas, first = np.unique(rest.claims, axis=0, return_index=True)  # epsilons are ordered strictest first
    noise_multiplier = float(noises_for(rest.epsilons[first], rate, recipe.steps, deltas, accountant).max())
    rates, noise_std = np.where(kept, rate, 0.0), noise_multiplier * recipe.clip_norm
    phase = unweighted(recipe.steps, rates, recipe.clip_norm, noise_std, recipe.batch_size)
    return Plan.of(budgets, recipe, accountant, phase, strategy=strategy)


# -- Sequential: one phase per group, strictest first, each with the noise that its own budget needs
#
# A baseline of the paper (appendix: "trained on each privacy group separately one after another"; the order from strict
# to loose worked best there). The paper's rule is different: one tuned noise multiplier, 2.5, for all groups, and for
# each as many steps as its budget allows (`one_after_another` in experiments/strategies.py). Here each group gets the
# same number of steps. Records are drawn only in the phase of their group, so its noise concerns this group alone.


def sequential(budgets: Budgets, recipe: Recipe, accountant: Accountant) -> Plan:
    """The recipe's steps divided evenly, the remainder to the loosest groups; no options.

    A group smaller than the expected batch is drawn completely in each of its steps. Raises PlanError if there are
    fewer steps than groups.
    """
    groups = len(budgets.epsilons)
    if recipe.steps < groups:
        raise PlanError(
            f"sequential needs a step for each different budget; the recipe has {recipe.steps:,}. Ask for more steps, "
            "or for fewer different budgets."
        )
    even, left = divmod(recipe.steps, groups)
    rates = np.minimum(1.0, recipe.batch_size / budgets.counts)
    # For all groups at both step counts, so that an error does not show which group's budget is out of reach.
    noises = {n: noises_for(budgets.epsilons, rates, n, budgets.claims, accountant) for n in {even, even + (left > 0)}}
    phases = []
    for group, rate in enumerate(rates):
        steps = even + (group >= groups - left)
        own, noise_std = np.where(np.arange(groups) == group, rate, 0.0), noises[steps][group] * recipe.clip_norm
        phases.append(unweighted(steps, own, recipe.clip_norm, float(noise_std), float(rate * budgets.counts[group])))
    return Plan.of(budgets, recipe, accountant, *phases, strategy="sequential")
