"""Uniform: plain DP-SGD, with all records at the strictest budget.

Abadi et al., "Deep Learning with Differential Privacy", arXiv 1607.00133v2, Algorithm 1; the baseline of the
paper. With one group every strategy returns this plan.
"""

from __future__ import annotations

import numpy as np

from ...accounting import Accountant
from ...accounting.calibration import noises_for
from ...budgets import Budgets
from ..plans import Plan
from ..recipe import Phase, Recipe


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
