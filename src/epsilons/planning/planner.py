"""The function `plan`: it calls a strategy, and certifies the result."""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from .. import accounting
from ..accounting import Accountant
from ..accounting.repeated import Repeated
from ..budgets import Budgets
from ..errors import BudgetError, PlanError
from .own_strategies import label_of, strategy_of, table_of
from .plan_numbers import ROSTER, SHARES
from .plans import Plan
from .quantize import MOST_LEVELS, expand, quantize_down
from .recipe import Recipe, check_runs
from .strategies import UNROUNDED, Strategy
from .strategies.uniform import uniform


def plan(
    budgets: Budgets,
    recipe: Recipe,
    strategy: str | Strategy = "scale",
    accountant: str | Accountant = "pld",
    *,
    runs: int = 1,
    public_shares: Mapping[float, float] | None = None,
    public_records: int | None = None,
    **options: Any,
) -> Plan:
    """Compute the table under which every group uses up its budget at the last step, and verify it.

    strategy        a name in STRATEGIES, or a function (budgets, recipe, accountant, **options) -> Plan of your own,
                    also by import path: "package.module:function"
    accountant      "pld" (tight, the default), "rdp" (the paper's), or a function (history, delta) -> epsilon
    runs            number of runs that may follow the plan: every group uses up its budget at the last step of the last
                    of them. More than one need a PlanFolder, which counts them; docs/tuning.md says what may differ
                    between them
    public_shares   {epsilon: share} that you declare and did not derive from these data
    public_records  the declared number of records (or persons). With both, the plan follows from the declared numbers
                    alone, and the guarantee covers presence, too
    options         options of the strategy; see its docstring

    Raises PlanError for unknown names or options, InfeasibleBudgetError for a budget that no noise can meet,
    BudgetExceededError if a custom strategy returns a plan that exceeds a budget.

    >>> budgets = Budgets.from_shares({1.0: .34, 2.0: .43, 3.0: .23}, records=60_000)
    >>> recipe = Recipe(steps=200, batch_size=512, clip_norm=0.2)
    >>> scaled = plan(budgets, recipe, strategy="scale", accountant="rdp")
    >>> scaled.clip_norm.round(3)
    array([0.16 , 0.209, 0.242])
    >>> bool((scaled.epsilon_spent() <= scaled.epsilons).all())
    True
    """
    function, label = strategy_of(strategy), label_of(strategy)
    if (public_shares is None) != (public_records is None):
        raise PlanError("public_shares and public_records belong together: give both, or neither.")
    if public_shares is not None and public_records is not None:
        budgets = _declared(budgets, public_shares, public_records)
    if runs > 1 and budgets.groups.starts is not None:
        raise PlanError(
            "A plan on accounts of a registry is for one run. Reserve each run by itself: the registry adds them up, "
            "and a later run may be planned by what earlier ones released."
        )
    if recipe.batch_size > budgets.records:
        raise PlanError(
            f"The expected batch ({recipe.batch_size:g}) is larger than the data ({budgets.records:,} "
            f"{budgets.unit}s), so the sampling rate would exceed 1. Ask for a batch of at most {budgets.records:,}."
        )
    _check_options(function, label, options)
    if len(budgets.groups) == 1:
        function, options = uniform, {}  # one group is plain DP-SGD, to the last bit, whatever the strategy
    check_runs(runs, recipe.steps)
    certify = accounting.accountant(accountant)
    if runs > 1:
        certify = Repeated(certify, int(runs))
    unrounded = len(budgets.groups) <= MOST_LEVELS or function in UNROUNDED
    solved, level = (budgets, None) if unrounded else quantize_down(budgets)
    table = table_of(function, label, solved, recipe, certify, options)
    phases = table.phases if level is None else tuple(expand(phase, level) for phase in table.phases)
    # Nothing else of the strategy's plan is used: the accountant that was asked for certifies the phases.
    certified = Plan.of(budgets, recipe, certify, *phases, strategy=label, options=options)
    return dataclasses.replace(certified, adjacency=ROSTER if public_shares is None else SHARES).verify()


def _check_options(function: Strategy, label: str, options: Mapping[str, Any]) -> None:
    for name, value in options.items():
        if not isinstance(value, bool | int | float | str):
            raise PlanError(
                f"Options must be numbers or texts, so that a plan can be saved, got {name} of {type(value).__name__}."
            )
    parameters = inspect.signature(function).parameters
    known = list(parameters)[3:]
    unknown = [name for name in options if name not in known]
    if unknown and not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        takes = f"it takes {', '.join(known)}" if known else "it takes none"
        raise PlanError(f"The strategy {label!r} has no option {unknown[0]!r}; {takes}.")
    for name in set(options) & set(known):
        default, takes_text = parameters[name].default, "str" in str(parameters[name].annotation)
        is_number = isinstance(default, float) and not takes_text
        if is_number and (isinstance(options[name], bool | str) or math.isnan(options[name])):
            raise PlanError(
                f"The strategy {label!r} takes a number as {name}, like {default:g}, got {options[name]!r}."
            )


def _declared(budgets: Budgets, shares: Mapping[float, float], records: int) -> Budgets:
    """The budgets that the declared numbers describe: the plan may depend on nothing else."""
    deltas = np.unique(budgets.delta)
    if len(deltas) != 1:
        raise BudgetError(f"Declared shares need one delta for all {budgets.unit}s; these budgets have several.")
    declared = Budgets.from_shares(shares, records=records, delta=float(deltas[0]), unit=budgets.unit)
    if not np.isin(budgets.epsilons, declared.epsilons).all():
        raise BudgetError(
            f"Some {budgets.unit}s have a budget that is not among the declared shares. Declare every epsilon that "
            "people could choose, whether or not anyone did."
        )
    return declared
