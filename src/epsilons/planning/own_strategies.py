"""Strategies of the caller by import path, "package.module:function"."""

from __future__ import annotations

import inspect
import traceback
from importlib import import_module
from typing import Any

from ..accounting import Accountant
from ..budgets import Budgets
from ..errors import EpsilonsError, PlanError, named
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
    return _imported(strategy) if is_import_path(strategy) else named(STRATEGIES, strategy, "strategy", PlanError, _OWN)


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


def _imported(path: str) -> Strategy:
    module, _, name = path.partition(":")
    if not module or not name:
        raise PlanError(f'The import path of a strategy is written "package.module:function", got {path!r}.')
    try:
        found = import_module(module)
    except Exception as error:  # a module of the caller may raise anything
        reason = str(error) if isinstance(error, ImportError) else f"{type(error).__name__} in {_line_of(error)}"
        raise PlanError(
            f"The strategy {path!r} cannot be imported: {reason}. Modules are looked for in the current folder, in "
            "that of the config, and among installed packages."
        ) from error
    function = getattr(found, name, None)
    if not callable(function):
        raise PlanError(f"The strategy {path!r} cannot be imported: {module} has no function {name!r}.")
    strategy: Strategy = function
    return strategy


def _line_of(error: Exception) -> str:
    """File and line of the innermost frame; for a syntax error, of the text."""
    if isinstance(error, SyntaxError):
        return f"{error.filename}, line {error.lineno}"
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{frame.filename}, line {frame.lineno}"
