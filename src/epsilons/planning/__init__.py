"""Budgets + Recipe -> Plan. No torch in here.

A strategy is `x(budgets, recipe, accountant, **options) -> Plan`: one file, and one line in STRATEGIES. Callers
may pass such a function of their own; whatever made a plan, its spends are computed here before it is returned.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from .. import accounting
from ..accounting import Accountant
from ..budgets import Budgets
from ..errors import BudgetError, PlanError
from .advice import Advice, advise
from .plans import ROSTER, SHARES, Plan
from .quantize import MOST_LEVELS, handed_back, rounded_down
from .recipe import Phase, Recipe
from .risk_profile import Risk, risk
from .strategies.exclude import exclude
from .strategies.mix import mix
from .strategies.sample import sample
from .strategies.scale import scale, scale_arithmetic
from .strategies.sequential import sequential
from .strategies.uniform import uniform

Strategy = Callable[..., Plan]

STRATEGIES: dict[str, Strategy] = {
    "uniform": uniform,
    "sample": sample,
    "scale": scale,
    "scale-arithmetic": scale_arithmetic,
    "mix": mix,
    "exclude": exclude,
    "sequential": sequential,
}

#: Given everyone's budgets as they are, however many levels: rounded down, a level would miss a threshold it reaches.
UNROUNDED: tuple[Strategy, ...] = (exclude,)


def plan(
    budgets: Budgets,
    recipe: Recipe,
    strategy: str | Strategy = "scale",
    accountant: str | Accountant = "pld",
    *,
    public_shares: Mapping[float, float] | None = None,
    public_records: int | None = None,
    **options: Any,
) -> Plan:
    """Solve for the table that uses up every group's budget at the last step, and verify it.

    strategy        a name in STRATEGIES, or a function (budgets, recipe, accountant, **options) -> Plan
    accountant      "pld" (tight, the default), "rdp" (the paper's), or a function (history, delta) -> epsilon
    public_shares   {epsilon: share} declared by you, not derived from these data
    public_records  their declared number; with both, the plan follows from these alone and protects presence, too
    options         the strategy's own; see its docstring

    Raises PlanError for unknown names or options, InfeasibleBudgetError for a budget that no noise can meet,
    BudgetExceededError if a strategy of your own returns a plan that does not keep the budgets.

    >>> budgets = Budgets.from_shares({1.0: .34, 2.0: .43, 3.0: .23}, records=60_000)
    >>> recipe = Recipe(steps=200, batch_size=512, clip_norm=0.2)
    >>> made = plan(budgets, recipe, strategy="scale", accountant="rdp")
    >>> made.clip_norm.round(3)
    array([0.16 , 0.209, 0.242])
    >>> bool((made.epsilon_spent() <= made.epsilons).all())
    True
    """
    make = strategy if callable(strategy) else _named(strategy)
    label = strategy if isinstance(strategy, str) else str(getattr(strategy, "__name__", type(strategy).__name__))
    if (public_shares is None) != (public_records is None):
        raise PlanError("public_shares and public_records belong together: give both, or neither.")
    if public_shares is not None and public_records is not None:
        budgets = _declared(budgets, public_shares, public_records)
    if recipe.batch_size > budgets.records:
        raise PlanError(
            f"The expected batch ({recipe.batch_size:g}) is larger than the data ({budgets.records:,} records), so "
            f"the sampling rate would exceed 1. Ask for a batch of at most {budgets.records:,}."
        )
    _check_options(make, label, options)
    if len(budgets.epsilons) == 1:
        make, options = uniform, {}  # one level is plain DP-SGD, to the last bit, whatever the strategy
    certify = accounting.accountant(accountant)
    as_they_are = len(budgets.epsilons) <= MOST_LEVELS or make in UNROUNDED
    solved, level = (budgets, None) if as_they_are else rounded_down(budgets)
    made = make(solved, recipe, certify, **options)
    if not all(np.array_equal(getattr(made, name), getattr(solved, name)) for name in ("epsilons", "delta", "counts")):
        raise PlanError(f"The strategy {label!r} returned a plan for other budgets than it was given.")
    phases = made.phases if level is None else tuple(handed_back(phase, level) for phase in made.phases)
    # What a plan says of itself does not count: it is certified by the accountant asked for here.
    asked = Plan.of(budgets, recipe, certify, *phases, strategy=label, options=options)
    return dataclasses.replace(asked, adjacency=ROSTER if public_shares is None else SHARES).verify()


def _named(strategy: str) -> Strategy:
    if strategy not in STRATEGIES:
        raise PlanError(f"No strategy is called {strategy!r}; there are: {', '.join(STRATEGIES)}.")
    return STRATEGIES[strategy]


def _check_options(make: Strategy, label: str, options: Mapping[str, Any]) -> None:
    for name, value in options.items():
        if not isinstance(value, bool | int | float | str):
            raise PlanError(
                f"Options are numbers or texts, so that a plan can be saved; {name} is a {type(value).__name__}."
            )
    parameters = inspect.signature(make).parameters
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
                f"The strategy {label!r} takes a number as {name}, like {default:g}; {options[name]!r} arrived."
            )


def _declared(budgets: Budgets, shares: Mapping[float, float], records: int) -> Budgets:
    """The roster that the declared numbers describe: all that the plan may depend on."""
    deltas = np.unique(budgets.delta)
    if len(deltas) != 1:
        raise BudgetError("Declared shares need one delta for all records; these budgets carry several.")
    declared = Budgets.from_shares(shares, records=records, delta=float(deltas[0]))
    if not np.isin(budgets.epsilons, declared.epsilons).all():
        raise BudgetError(
            "Some records carry a budget that is not among the declared shares. Declare every level that people "
            "could choose from, whether or not anyone did."
        )
    return declared


__all__ = ["STRATEGIES", "Advice", "Phase", "Plan", "Recipe", "Risk", "Strategy", "advise", "plan", "risk"]
