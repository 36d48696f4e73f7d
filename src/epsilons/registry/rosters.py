"""Rosters: which people take part, and in which row of a table, page by page."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

from ..errors import RegistryError
from ..mechanism import IntArray
from .amounts import MOST_ROWS
from .schema import PAGE

#: A page of a roster: (PAGE,) each person's row, or NO_PERSON.
Rows = npt.NDArray[np.int16]
NO_PERSON = -1


class Pages(Protocol):
    """Anything with pages, in rising order and each time the same. A page without people may be left out."""

    def pages(self) -> Iterator[tuple[int, Rows]]: ...


@dataclass(frozen=True)
class Roster:
    """A roster in memory.

    numbers  (people,) their numbers in the registry, each once
    rows     (people,) their rows
    """

    numbers: IntArray = field(repr=False)
    rows: IntArray = field(repr=False)

    def __post_init__(self) -> None:
        if len(self.numbers) == 0:
            raise RegistryError("A roster needs at least one person.")
        if not all(np.issubdtype(np.asarray(column).dtype, np.integer) for column in (self.numbers, self.rows)):
            raise RegistryError("The numbers of people and of rows must be whole numbers.")
        if len(self.numbers) != len(self.rows) or int(self.numbers.min()) < 0 or int(self.rows.min()) < 0:
            raise RegistryError("A roster needs one row for each person; numbers and rows are at least 0.")
        if len(np.unique(self.numbers)) < len(self.numbers):
            raise RegistryError("A person is in the roster twice. Each person takes part once, with all their rows.")
        if int(self.rows.max()) >= MOST_ROWS:
            raise RegistryError(f"A table may have at most {MOST_ROWS:,} rows.")

    def pages(self) -> Iterator[tuple[int, Rows]]:
        order = np.argsort(self.numbers, kind="stable")
        numbers, rows = self.numbers[order], self.rows[order]
        first, last = int(numbers[0]) // PAGE, int(numbers[-1]) // PAGE
        cuts = np.searchsorted(numbers, np.arange(first, last + 2) * PAGE)
        for page in range(first, last + 1):
            here = slice(cuts[page - first], cuts[page - first + 1])
            if here.stop > here.start:
                of_page = np.full(PAGE, NO_PERSON, dtype=np.int16)
                of_page[numbers[here] % PAGE] = rows[here]
                yield page, of_page


def checked(roster: Pages) -> Iterator[tuple[int, Rows]]:
    """The pages that have people. Raises RegistryError for pages of another form or order."""
    before, is_empty = -1, True
    for page, rows in roster.pages():
        if page <= before or np.shape(rows) != (PAGE,) or rows.dtype != np.int16 or int(rows.min()) < NO_PERSON:
            raise RegistryError(
                f"The pages of a roster must be in rising order, each ({PAGE:,},) whole numbers of 16 bits from "
                f"{NO_PERSON}, which means that no person takes part."
            )
        before = page
        if (rows != NO_PERSON).any():
            is_empty = False
            yield page, rows
    if is_empty:
        raise RegistryError("A roster needs at least one person.")


class Digest:
    """SHA-256 of who takes part in which row, page by page."""

    def __init__(self) -> None:
        self._known = hashlib.sha256()

    def add(self, page: int, rows: Rows) -> None:
        self._known.update(int(page).to_bytes(8, "little") + rows.tobytes())

    @property
    def value(self) -> str:
        return self._known.hexdigest()


def digest(roster: Pages) -> str:
    """SHA-256 of who takes part in which row."""
    known = Digest()
    for page, rows in checked(roster):
        known.add(page, rows)
    return known.value
