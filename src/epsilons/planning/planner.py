"""The function `plan`: it calls a strategy, and certifies the result."""

from __future__ import annotations

import dataclasses
import inspect
import math
import traceback
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

import numpy as np

from .. import accounting
from ..accounting import Accountant, pld, rdp
from ..accounting.selection import Selected, Selection
from ..budgets.budgets import Budgets
from ..core.mechanism import Counted, Repeated
from ..errors import BudgetError, EpsilonsError, InputError, PlanError, named
from .plan_numbers import ROSTER, SHARES, Recipe, check_runs
from .plans import Plan
from .strategies import STRATEGIES, UNROUNDED, Strategy
from .strategies.baselines import uniform
from .strategies.scale import MOST_LEVELS, expand, quantize_down

# -- Code of the caller by import path, "package.module:function": strategies, and how all such code is imported

_OWN = '; one of your own is written "package.module:function"'


def is_import_path(strategy: object) -> bool:
    """True for "package.module:function"."""
    return isinstance(strategy, str) and ":" in strategy


def strategy_of(strategy: str | Strategy) -> Strategy:
    """The function of a strategy: of a name in STRATEGIES, of an import path, or itself. Raises PlanError."""
    if not isinstance(strategy, str):
        return strategy
    if is_import_path(strategy):
        return imported(strategy, "strategy", PlanError)
    return named(STRATEGIES, strategy, "strategy", PlanError, _OWN)


def label_of(strategy: str | Strategy) -> str:
    """The name under which a plan keeps its strategy."""
    return strategy if isinstance(strategy, str) else str(getattr(strategy, "__name__", type(strategy).__name__))


def table_of(
    function: Strategy, label: str, budgets: Budgets, recipe: Recipe, accountant: Accountant, options: dict[str, Any]
) -> Plan:
    """The plan that a strategy returns. Raises PlanError if it is no plan for these budgets.

    An exception of a strategy that was named by import path becomes a PlanError, too. Its message names the line and
    not the values, which may be budgets.
    """
    _check_signature(function, label)
    try:
        table = function(budgets, recipe, accountant, **options)
    except EpsilonsError:
        raise
    except Exception as error:
        if not is_import_path(label):
            raise
        raise PlanError(
            f"The strategy {label!r} raised {type(error).__name__} in {_line_of(error)}. For the whole trace call "
            "epsilons.plan(…, strategy=function) in Python."
        ) from error
    if not isinstance(table, Plan):
        raise PlanError(
            f"The strategy {label!r} returned a {type(table).__name__}, and a Plan is needed: return "
            "epsilons.Plan.of(budgets, recipe, accountant, phase, strategy=…)."
        )
    if table.groups != budgets.groups:
        raise PlanError(f"The strategy {label!r} returned a plan for other budgets than it was given.")
    return table


def _check_signature(function: Strategy, label: str) -> None:
    try:
        inspect.signature(function).bind_partial(None, None, None)
    except TypeError:
        raise PlanError(
            f"The strategy {label!r} must take three arguments, budgets, recipe and accountant, and then its options."
        ) from None
    except ValueError:
        return  # a builtin without a signature


def imported(path: str, what: str, kind: type[EpsilonsError] = InputError) -> Callable[..., Any]:
    """The function or class of an import path. Importing runs the module's code: on the command line, only by --trust.

    what  what it is, for messages

    Raises an error of this kind if it cannot be imported.
    """
    module, _, name = path.partition(":")
    if not module or not name:
        raise kind(f'The import path of a {what} is written "package.module:function", got {path!r}.')
    try:
        found = import_module(module)
    except Exception as error:  # a module of the caller may raise anything
        reason = str(error) if isinstance(error, ImportError) else f"{type(error).__name__} in {_line_of(error)}"
        raise kind(
            f"The {what} {path!r} cannot be imported: {reason}. Modules are looked for among installed packages, in "
            "the current folder, and in the config's folder."
        ) from error
    function: Callable[..., Any] | None = getattr(found, name, None)
    if not callable(function):
        raise kind(f"The {what} {path!r} cannot be imported: {module} has no function {name!r}.")
    return function


def _line_of(error: Exception) -> str:
    """File and line of the innermost frame; for a syntax error, of the text."""
    if isinstance(error, SyntaxError):
        return f"{error.filename}, line {error.lineno}"
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{frame.filename}, line {frame.lineno}"


# -- The function `plan`: it calls a strategy, and certifies the result


def plan(
    budgets: Budgets,
    recipe: Recipe,
    strategy: str | Strategy = "scale",
    accountant: str | Accountant = "pld",
    *,
    runs: int = 1,
    select: Selection | None = None,
    class_noise: float | None = None,
    public_shares: Mapping[float, float] | Mapping[str, float] | None = None,
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
    select          a secret number of runs, of which only the best by a private score is released, in place of runs:
                    every group uses up its budget with the whole selection. `tune` makes the runs
    class_noise     lets each run count the classes in each tier, with noise of this standard deviation in people
                    (`class_counts`), for `balanced_loss`; it is charged like a step
    public_shares   {epsilon: share} that you declare and did not derive from these data; of budgets by risk,
                    {tier: share}
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
    certify = _certifier(accounting.accountant(accountant), int(runs), select, class_noise)
    unrounded = len(budgets.groups) <= MOST_LEVELS or function in UNROUNDED
    solved, level = (budgets, None) if unrounded else quantize_down(budgets)
    table = table_of(function, label, solved, recipe, certify, options)
    phases = table.phases if level is None else tuple(expand(phase, level) for phase in table.phases)
    # Nothing else of the strategy's plan is used: the accountant that was asked for certifies the phases.
    certified = Plan.of(budgets, recipe, certify, *phases, strategy=label, options=options)
    return dataclasses.replace(certified, adjacency=ROSTER if public_shares is None else SHARES).verify()


def _certifier(accountant: Accountant, runs: int, select: Selection | None, class_noise: float | None) -> Accountant:
    """The accountant of all runs together with their counts, or of a selection."""
    if select is None:
        counted = accountant if class_noise is None else Counted(accountant, float(class_noise), runs)
        return Repeated(counted, runs) if runs > 1 else counted
    if class_noise is not None:
        raise PlanError("A selection counts no classes: declare them.")
    if runs > 1 or accountant not in (pld.epsilon, rdp.epsilon):
        raise PlanError('A selection is certified by "pld" or "rdp", and has its own number of runs.')
    return Selected(select, accountant)


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


def _declared(budgets: Budgets, shares: Mapping[Any, float], records: int) -> Budgets:
    """The budgets that the declared numbers describe: the plan may depend on nothing else."""
    deltas = np.unique(budgets.delta)
    if len(deltas) != 1:
        raise BudgetError(f"Declared shares need one delta for all {budgets.unit}s; these budgets have several.")
    shares = shares if budgets.contract is None else budgets.contract.shares(shares)
    declared = Budgets.from_shares(shares, records=records, delta=float(deltas[0]), unit=budgets.unit)
    declared = declared.limited(budgets.contract)
    if not np.isin(budgets.epsilons, declared.epsilons).all():
        raise BudgetError(
            f"Some {budgets.unit}s have a budget that is not among the declared shares. Declare every epsilon that "
            "people could choose, whether or not anyone did."
        )
    return declared
