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
from .schema import PAGE

#: A page of a roster: (PAGE,) each person's row, or NOBODY.
Rows = npt.NDArray[np.int16]
NOBODY = -1
#: The most rows that a table may have.
MOST_ROWS = 2**15 - 1


class Pages(Protocol):
    """Anything with pages, in rising order and each time the same. A page without anybody may be left out."""

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
        if len(np.unique(self.numbers)) < len(self.numbers):
            raise RegistryError("A person is in the roster twice. Each person takes part once, with all their rows.")
        if int(self.rows.max()) > MOST_ROWS:
            raise RegistryError(f"A table may have at most {MOST_ROWS + 1:,} rows.")

    def pages(self) -> Iterator[tuple[int, Rows]]:
        order = np.argsort(self.numbers, kind="stable")
        numbers, rows = self.numbers[order], self.rows[order]
        first, last = int(numbers[0]) // PAGE, int(numbers[-1]) // PAGE
        cuts = np.searchsorted(numbers, np.arange(first, last + 2) * PAGE)
        for page in range(first, last + 1):
            here = slice(cuts[page - first], cuts[page - first + 1])
            if here.stop > here.start:
                of_page = np.full(PAGE, NOBODY, dtype=np.int16)
                of_page[numbers[here] % PAGE] = rows[here]
                yield page, of_page


def digest(roster: Pages) -> str:
    """SHA-256 of who takes part in which row."""
    known = hashlib.sha256()
    for page, rows in roster.pages():
        known.update(page.to_bytes(8, "little") + rows.tobytes())
    return known.hexdigest()
