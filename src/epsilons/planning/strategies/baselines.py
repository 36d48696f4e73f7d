"""Uniform: plain DP-SGD, with all records at the strictest budget.

Abadi et al., "Deep Learning with Differential Privacy", arXiv 1607.00133v2, Algorithm 1; the baseline of the
paper. With one group every strategy returns this plan.
"""

from __future__ import annotations

import numpy as np

from ...accounting import Accountant
from ...accounting.calibration import noises_for
from ...budgets.budgets import Budgets
from ...errors import PlanError
from ..plan_numbers import Phase, Recipe
from ..plans import Plan
from .scale import MOST_LEVELS, quantize_down


def uniform(budgets: Budgets, recipe: Recipe, accountant: Accountant) -> Plan:
    """One rate, one clip norm, and the noise that the strictest group needs; no options."""
    rate = recipe.batch_size / budgets.records
    # At one delta the smallest epsilon needs the most noise, so one search per delta is enough.
    deltas, first = np.unique(budgets.claims, axis=0, return_index=True)  # epsilons are ordered strictest first
    noise_multiplier = float(noises_for(budgets.epsilons[first], rate, recipe.steps, deltas, accountant).max())
    ones = np.ones(len(budgets.epsilons))
    phase = Phase(
        steps=recipe.steps,
        sample_rate=rate * ones,
        clip_norm=recipe.clip_norm * ones,
        weight=ones,
        noise_std=noise_multiplier * recipe.clip_norm,
        expected_batch=recipe.batch_size,
    )
    return Plan.of(budgets, recipe, accountant, phase, strategy="uniform")


# -- Exclude: leave out all records with a budget below a threshold, and train the others at the strictest of theirs
#


def exclude(budgets: Budgets, recipe: Recipe, accountant: Accountant, threshold: float = 0.0) -> Plan:
    """One rate, clip norm and noise for all records with epsilon >= `threshold`; the others are never drawn.

    By default no record is left out. The threshold is compared with the unrounded epsilons; with more than 1,000 of
    them, the noise is computed from budgets rounded down. Raises PlanError if fewer records than the expected batch are
    left.
    """
    kept = budgets.epsilons >= threshold
    left = int(budgets.counts[kept].sum())
    if left < recipe.batch_size:
        raise PlanError(
            f"A threshold of {threshold:g} leaves fewer records than the expected batch ({recipe.batch_size:g}). Lower "
            "the threshold or the batch size."
        )
    rate = recipe.batch_size / left
    rest = budgets.subset(kept[budgets.group])
    if len(rest.epsilons) > MOST_LEVELS:
        rest, _ = quantize_down(rest)
    deltas, first = np.unique(rest.claims, axis=0, return_index=True)  # the strictest epsilon at each delta
    noise_multiplier = noises_for(rest.epsilons[first], rate, recipe.steps, deltas, accountant).max()
    ones = np.ones(len(budgets.epsilons))
    phase = Phase(
        steps=recipe.steps,
        sample_rate=np.where(kept, rate, 0.0),
        clip_norm=recipe.clip_norm * ones,
        weight=ones,
        noise_std=float(noise_multiplier) * recipe.clip_norm,
        expected_batch=recipe.batch_size,
    )
    return Plan.of(budgets, recipe, accountant, phase, strategy="exclude")


# -- Sequential: one phase per group, strictest first, each with the noise that its own budget needs


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
