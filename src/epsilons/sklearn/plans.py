"""The plan of a fit: one of its own, or one that several fits share, in a folder that counts them."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import numpy as np
from sklearn.base import BaseEstimator

from ..accounting import ACCOUNTANTS
from ..budgets import Budgets
from ..errors import InputError
from ..plan_folder import PlanFolder
from ..planning import Plan, Recipe, plan
from . import inputs

#: Arguments of an estimator that a shared plan determines.
PLANNED = ("delta", "strategy", "accountant", "epochs", "batch_size", "clip_norm")

OF_ONE_FIT = (
    "This is the guarantee of one fit. A search or a cross-validation fits several times, and each fit spends the "
    "budgets of its records again (epsilons.sklearn.total_cost). Scores on private records are not covered, nor is a "
    "choice by such scores, as GridSearchCV makes it."
)
OF_ALL_FITS = (
    "Every fit with the plan's folder is one of its runs, those on folds too. Scores on private records are not "
    "covered, nor is a choice by such scores, as GridSearchCV makes it, nor are folds that depend on the classes."
)


def planned(estimator: BaseEstimator, epsilon: Any, records: int) -> tuple[Plan | PlanFolder, Budgets]:
    """The plan of a fit on so many records, or the folder of the shared plan, and the records' budgets."""
    folder = folder_of(estimator.plan)
    if folder is not None:
        _check_unplanned(estimator)
    budgets = inputs.as_budgets(epsilon, estimator.epsilon, delta_of(estimator, folder), records)
    if folder is not None:
        return folder, budgets
    batch = min(estimator.batch_size, records)
    steps = max(1, int(np.ceil(estimator.epochs * records / batch)))
    recipe = Recipe(steps, batch, estimator.clip_norm)
    return plan(budgets, recipe, estimator.strategy, estimator.accountant), budgets


def folder_of(given: object) -> PlanFolder | None:
    """The folder of a shared plan, from itself or its path; None for None. Raises InputError."""
    if given is None or isinstance(given, PlanFolder):
        return given
    if isinstance(given, str | Path):
        return PlanFolder(given)
    raise InputError(
        f"plan= takes an epsilons.PlanFolder or its path, because the folder counts the fits; got a "
        f"{type(given).__name__}. For a plan: epsilons.PlanFolder.create(path, plan)."
    )


def delta_of(estimator: BaseEstimator, folder: PlanFolder | None) -> float:
    """The delta of budgets that are given as epsilons: that of the shared plan, if it has only one."""
    if folder is None:
        return float(estimator.delta)
    deltas = np.unique(folder.plan.delta)
    if len(deltas) > 1:
        raise InputError(
            f"The shared plan has {len(deltas):,} different deltas, and fit takes one epsilon per record. Make a plan "
            "with one delta."
        )
    return float(deltas[0])


def _check_unplanned(estimator: BaseEstimator) -> None:
    """Raise InputError for arguments that would have no effect beside a shared plan."""
    parameters = inspect.signature(type(estimator).__init__).parameters
    given = [name for name in PLANNED if getattr(estimator, name) != parameters[name].default]
    if given:
        raise InputError(
            f"The shared plan= determines {', '.join(PLANNED)}: leave out {', '.join(given)}, or make a plan with them."
        )


def without_budgets(given: object) -> object:
    """A shared plan for a pickle: its folder's path, if the plan can be loaded from there."""
    is_known = isinstance(given, PlanFolder) and given.plan.accountant in ACCOUNTANTS
    return str(given.path) if is_known and isinstance(given, PlanFolder) else given
