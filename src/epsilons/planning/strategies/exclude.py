"""Exclude: leave out everyone whose budget is below a threshold, and train the rest at the strictest of theirs.

A baseline of the paper (appendix, "Exclude Lower Privacy Groups"): fewer records, but less noise.
"""

from __future__ import annotations

import numpy as np

from ...accounting import Accountant
from ...accounting.calibration import noises_for
from ...budgets import Budgets
from ...errors import PlanError
from ..plans import Plan
from ..quantize import MOST_LEVELS, rounded_down
from ..recipe import Phase, Recipe


def exclude(budgets: Budgets, recipe: Recipe, accountant: Accountant, threshold: float = 0.0) -> Plan:
    """One rate, clip norm and noise for all whose epsilon is at least `threshold`; the others are never drawn.

    By default nobody is left out. The threshold is held to everyone's own epsilon, however many levels there are; above
    1,000 of them the noise is that of the rest's budgets rounded down. Raises PlanError if fewer records than the
    expected batch would be left.
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
    if len(rest.epsilons) > MOST_LEVELS:  # for few deltas; the strictest levels at them stay what they are
        rest, _ = rounded_down(rest)
    deltas, first = np.unique(rest.delta, return_index=True)  # the strictest level at each delta
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
