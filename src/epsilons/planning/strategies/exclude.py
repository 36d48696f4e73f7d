"""Exclude: leave out all records with a budget below a threshold, and train the others at the strictest of theirs.

A baseline of the paper (appendix, "Exclude Lower Privacy Groups"): fewer records, but less noise.
"""

from __future__ import annotations

import numpy as np

from ...accounting import Accountant
from ...accounting.calibration import noises_for
from ...budgets import Budgets
from ...errors import PlanError
from ..plans import Plan
from ..quantize import MOST_LEVELS, quantize_down
from ..recipe import Phase, Recipe


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
