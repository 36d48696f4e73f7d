"""Open a registry for a command: its URL, which may hold a password, is in no message."""

from __future__ import annotations

import sqlite3
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import InputError, RegistryError
from ..ids import BLANKS

if TYPE_CHECKING:
    from ..registry import Registry

#: What comes after a settlement.
NEXT = "Next: epsilons registry verify URL; then epsilons registry export URL -o FILE, to keep FILE elsewhere."


@contextmanager
def opened(url: str, pepper: Path | None, spelling: str | Sequence[str] | None = None) -> Iterator[Registry]:
    """An open registry. Errors of its database become RegistryError."""
    from ..registry import Registry  # which takes a second, and --help needs none

    with _translating(), Registry(url, pepper, spelling) as registry:
        yield registry


@contextmanager
def created(url: str, pepper: Path | None, spelling: Sequence[str] | None = None) -> Iterator[Registry]:
    """A new registry. Errors of its database become RegistryError."""
    from ..registry import Registry

    with _translating(), Registry.create(url, pepper, spelling) as registry:
        yield registry


@contextmanager
def _translating() -> Iterator[None]:
    try:
        yield
    except Exception as error:
        if isinstance(error, sqlite3.Error) or type(error).__module__.partition(".")[0] == "psycopg":
            # The text of the error may repeat the URL or a row.
            raise RegistryError(
                f"The registry's database failed ({type(error).__name__}). Nothing was changed by this command, or "
                "all of it: repeat it."
            ) from None
        raise


def id_of(person: str | None) -> str:
    """The id on the command line, or the first line of the standard input. Raises InputError for an empty one."""
    text = (sys.stdin.readline() if person == "-" else person or "").strip(BLANKS)
    if not text:
        raise InputError("--person needs an id of a person. With --person - it is read from the standard input.")
    return text
