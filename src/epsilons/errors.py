"""The errors that this package raises on purpose, and their exit codes on the command line.

    EpsilonsError                   base; exit code 2
    ├── InputError                  an argument or a file cannot be used; also a ValueError
    │   ├── BudgetError             budgets: a file, an array, shares, deltas
    │   ├── PlanError               a recipe, strategy, option or plan file
    │   ├── DataError               a data set, or data and budgets that do not belong together
    │   ├── RunError                a run's folder: occupied, unreadable, not writable
    │   ├── RegistryError           a registry: not there, altered, or used in a wrong way
    │   └── MissingPackageError     a package of the extra `app` is not installed; also an ImportError
    ├── ModelError                  the model or loss cannot be trained record by record; also a ValueError
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

import json
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from types import ModuleType
from typing import Any, TypeVar

# -- Text from data without control characters, for messages, tables, pages and JSON. And JSON read from files
#
# Names of tiers, classes, columns and files come from the data. Written raw, an escape sequence could recolour or
# overwrite what a terminal shows, and a bidirectional override could turn a name around. Messages, tables and pages
# pass such text through `printable`. JSON keeps the text itself, with JSON's escapes.

#: Control (Cc) and format characters (Cf), line and paragraph separators, lone surrogates. The two joiners U+200C and
#: U+200D are allowed: some scripts need them, and they move no other character.
UNPRINTABLE = re.compile(
    "[\x00-\x1f\x7f-\x9f\u00ad\u0600-\u0605\u061c\u06dd\u070f\u0890\u0891\u08e2\u180e\u200b\u200e\u200f\u2028-\u202e"
    "\u2060-\u2064\u2066-\u206f\ud800-\udfff\ufeff\ufff9-\ufffb\U000110bd\U000110cd\U00013430-\U0001343f\U0001bca0-\U0001bca3"
    "\U0001d173-\U0001d17a\U000e0001\U000e0020-\U000e007f]"
)

#: The deepest nesting of what is read from a file. Python's own limit would end in a RecursionError anywhere later.
DEEPEST = 100


def printable(text: object) -> str:
    r"""Return the text in one line, with every control character replaced by its escape.

    >>> printable("strict\x1b[31m\n")
    'strict\\x1b[31m\\n'
    """
    return UNPRINTABLE.sub(lambda match: match[0].encode("unicode_escape").decode("ascii"), str(text))


def json_text(values: Any, indent: int | None = 1, allow_nan: bool = False) -> str:
    r"""JSON text in which every control character is escaped, also those that the standard library leaves raw.

    >>> json_text("\x9b31m ε", indent=None)
    '"\\u009b31m ε"'
    """
    lines = json.dumps(values, indent=indent, ensure_ascii=False, allow_nan=allow_nan).split("\n")
    return "\n".join(UNPRINTABLE.sub(lambda match: json.dumps(match[0])[1:-1], line) for line in lines)


def parsed_json(text: str | bytes, **hooks: Any) -> Any:
    """The value of a JSON text. Raises ValueError if it is none, or nested more than DEEPEST levels deep.

    hooks  as of json.loads

    >>> parsed_json("[" * 101 + "]" * 101)
    Traceback (most recent call last):
    ValueError: nested more than 100 levels deep
    """
    try:
        return not_too_deep(json.loads(text, **hooks))
    except RecursionError:
        raise ValueError("nested too deeply") from None


def not_too_deep(value: Any) -> Any:
    """The same value of dicts, lists and others. Raises ValueError if it is nested more than DEEPEST levels deep.

    Also for NaN and infinity, and for whole numbers that no floating-point number can hold.
    """
    level = [value]
    for _ in range(DEEPEST):
        if any(isinstance(one, int | float) and not abs(one) <= sys.float_info.max for one in level):
            raise ValueError("a number out of range")
        nested = (one.values() if isinstance(one, dict) else one for one in level if isinstance(one, dict | list))
        level = [part for parts in nested for part in parts]
        if not level:
            return value
    raise ValueError(f"nested more than {DEEPEST} levels deep")


# -- The errors that this package raises on purpose, and their exit codes on the command line

T = TypeVar("T")


class EpsilonsError(Exception):
    """Base of all errors raised on purpose by this package."""

    exit_code = 2

    def __init__(self, *parts: object) -> None:
        super().__init__(*(self._shown(part) if isinstance(part, str) else part for part in parts))

    def _shown(self, part: str) -> str:
        return printable(part)


class InputError(EpsilonsError, ValueError):
    """An argument or a file cannot be used. Code that catches ValueError, as for other libraries, catches it, too."""


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


class MissingPackageError(InputError, ImportError):
    """A package of the extra `app` is not installed."""


class ModelError(EpsilonsError, ValueError):
    """A model or loss that cannot be trained record by record. It is also a ValueError."""


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


# -- The extra `app`: what tables, pages, pictures and the command line need, and training on tensors does not

APP = ("jinja2", "joblib", "matplotlib", "PIL", "pyarrow", "pydantic", "rich", "sklearn", "typer")


@contextmanager
def app_packages() -> Iterator[None]:
    """A block that imports packages of the extra `app`. Raises MissingPackageError if one is not installed."""
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in APP:
            raise
        message = f"{package} is not installed. It is in the extra `app`: pip install '.[app]' in a clone of epsilons"
        raise MissingPackageError(message) from None


class Package(ModuleType):
    """A module of the extra `app`, which is imported when a name in it is first used."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        with app_packages():
            module = import_module(self.__name__)
        setattr(self, name, getattr(module, name))
        return getattr(module, name)


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
