"""Code of the caller by import path, "package.module:function": strategies, and how all such code is imported."""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable
from importlib import import_module
from typing import Any

from ..accounting import Accountant
from ..budgets import Budgets
from ..errors import EpsilonsError, InputError, PlanError, named
from .plans import Plan
from .recipe import Recipe
from .strategies import STRATEGIES, Strategy

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
