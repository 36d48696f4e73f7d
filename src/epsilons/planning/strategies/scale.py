"""Scale: a looser budget buys a larger clip norm under the same noise.

Paper Alg. 3: all records are drawn at the same rate q, and each group's multiplier σ_p meets its budget at that rate.
The shared multiplier σ is their harmonic mean weighted by records, so that the clip norms c_p = σ·c/σ_p average to the
recipe's c exactly (derivation: docs/paper.md#scale). The authors' code uses the arithmetic mean instead.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from ...accounting import Accountant
from ...accounting.calibration import noises_for
from ...budgets import Budgets
from ...errors import PlanError
from ...mechanism import FloatArray
from ..plans import Plan
from ..recipe import Phase, Recipe


def scale(budgets: Budgets, recipe: Recipe, accountant: Accountant, by: str = "norm") -> Plan:
    """Clip norms with the recipe's mean over records.

    by  "norm": clip to c_p (the paper's); "weight": clip all gradients to c and multiply by c_p/c. Privacy is the
        same, but gradients shorter than c_p keep their group's weight (docs/planning.md#scale-by-norm-or-by-weight)

    Raises PlanError for another `by`.
    """
    if by not in ("norm", "weight"):
        raise PlanError(f'scale goes by="norm" or by="weight", got {by!r}.')
    multipliers = group_multipliers(budgets, recipe, accountant)
    plan = _plan(budgets, recipe, accountant, multipliers, 1 / float(budgets.shares @ (1 / multipliers)), "scale")
    if by == "norm":
        return plan
    phase = plan.phases[0]
    equal = np.full(len(multipliers), recipe.clip_norm)
    return dataclasses.replace(
        plan, phases=(dataclasses.replace(phase, clip_norm=equal, weight=phase.clip_norm / recipe.clip_norm),)
    )


def scale_arithmetic(budgets: Budgets, recipe: Recipe, accountant: Accountant) -> Plan:
    """The rule of the authors' published code: the same privacy, but clip norms with a mean above the recipe's."""
    multipliers = group_multipliers(budgets, recipe, accountant)
    return _plan(budgets, recipe, accountant, multipliers, float(budgets.shares @ multipliers), "scale-arithmetic")


def group_multipliers(budgets: Budgets, recipe: Recipe, accountant: Accountant) -> FloatArray:
    """(groups,) σ_p: the noise multiplier at which each group spends its budget at the common rate."""
    rate = recipe.batch_size / budgets.records
    return noises_for(budgets.epsilons, rate, recipe.steps, budgets.claims, accountant)


def _plan(
    budgets: Budgets, recipe: Recipe, accountant: Accountant, multipliers: FloatArray, shared: float, strategy: str
) -> Plan:
    rate = recipe.batch_size / budgets.records
    phase = Phase(
        steps=recipe.steps,
        sample_rate=np.full(len(multipliers), rate),
        clip_norm=shared * recipe.clip_norm / multipliers,
        weight=np.ones(len(multipliers)),
        noise_std=shared * recipe.clip_norm,
        expected_batch=recipe.batch_size,
    )
    return Plan.of(budgets, recipe, accountant, phase, strategy=strategy)
