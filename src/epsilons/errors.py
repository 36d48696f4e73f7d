"""The errors that this package raises on purpose, and their exit codes on the command line.

    EpsilonsError                   base; exit code 2
    ├── InputError                  an argument or a file cannot be used
    │   ├── BudgetError             budgets: a file, an array, shares, deltas
    │   ├── PlanError               a recipe, strategy, option or plan file
    │   ├── DataError               a data set, or data and budgets that do not belong together
    │   ├── RunError                a run's folder: occupied, unreadable, not writable
    │   └── RegistryError           a registry: not there, altered, or used in a wrong way
    ├── ModelError                  the model or loss cannot be trained record by record
    │   ├── UnsupportedLayerError   a layer that mixes records by design
    │   └── BatchDependenceError    one record changed another record's loss
    ├── CallOrderError              draw, backward and step were called in another order
    ├── RankError                   processes that train together disagree, or one of them stopped
    └── PromiseError                a promise cannot be kept; exit code 3
        ├── InfeasibleBudgetError   no noise or rate meets a budget
        ├── BudgetExceededError     a plan, or a step, would spend more than a budget
        ├── LedgerError             a ledger was altered or belongs to another plan
        └── RegistryRefusedError    somebody has too little left, or a run was reserved or settled otherwise

Messages say what was expected, what the code got, and what to do. They contain counts, rows and shapes, and never an
individual budget, because budgets are confidential. Names from data may occur in them, so control characters are
escaped.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from .escaping import printable

T = TypeVar("T")


class EpsilonsError(Exception):
    """Base of all errors raised on purpose by this package."""

    exit_code = 2

    def __init__(self, *parts: object) -> None:
        super().__init__(*(self._shown(part) if isinstance(part, str) else part for part in parts))

    def _shown(self, part: str) -> str:
        return printable(part)


class InputError(EpsilonsError):
    """An argument or a file cannot be used."""


class BudgetError(InputError):
    """Budgets that cannot be used: a missing file or column, a value that is not a positive number."""


class PlanError(InputError):
    """A recipe, strategy, option or plan file that cannot be used."""


class DataError(InputError):
    """A data set that cannot be used, or that does not fit the budgets."""


class RunError(InputError):
    """A run's folder that cannot be used."""


class RegistryError(InputError):
    """A registry that cannot be used, was altered, or is used in a wrong way."""


class ModelError(EpsilonsError):
    """A model or loss that cannot be trained record by record."""


class UnsupportedLayerError(ModelError):
    """A layer that mixes records by design, such as batch normalisation."""


class BatchDependenceError(ModelError):
    """Changing one record changed another record's loss, so no record's gradient can be clipped alone."""


class CallOrderError(EpsilonsError):
    """Draw, backward and step were called in an order under which the accounting would be wrong."""

    def _shown(self, part: str) -> str:
        """Line breaks stay: the message shows code, and nothing from data."""
        return "\n".join(printable(line) for line in part.split("\n"))


class RankError(EpsilonsError):
    """Processes that train together disagree, or one of them stopped or cannot be reached."""


class PromiseError(EpsilonsError):
    """A promise that cannot be kept."""

    exit_code = 3


class InfeasibleBudgetError(PromiseError):
    """No noise multiplier or sampling rate meets this budget."""


class BudgetExceededError(PromiseError):
    """A plan or a step that would spend more than a budget allows."""


class LedgerError(PromiseError):
    """A ledger that was altered, or that belongs to another plan."""


class RegistryRefusedError(PromiseError):
    """A reservation that somebody's lifetime budget does not allow, or that contradicts an earlier one."""


class EpsilonsWarning(UserWarning):
    """A warning of this package, about something that the reader can change."""

    def __init__(self, *parts: object) -> None:
        super().__init__(*(printable(part) if isinstance(part, str) else part for part in parts))


def named(known: Mapping[str, T], name: str, what: str, kind: type[EpsilonsError] = InputError, more: str = "") -> T:
    """The entry of this name in a table. Raises an error of this kind, with all names, if there is none.

    what   what the entries are, for the message
    more   the end of the message
    """
    if name not in known:
        raise kind(f"No {what} is called {name!r:.80}; there are: {', '.join(known)}{more}.")
    return known[name]


__all__ = [
    "BatchDependenceError",
    "BudgetError",
    "BudgetExceededError",
    "CallOrderError",
    "DataError",
    "EpsilonsError",
    "EpsilonsWarning",
    "InfeasibleBudgetError",
    "InputError",
    "LedgerError",
    "ModelError",
    "PlanError",
    "PromiseError",
    "RankError",
    "RegistryError",
    "RegistryRefusedError",
    "RunError",
    "UnsupportedLayerError",
]
