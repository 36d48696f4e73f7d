"""Rosters: which people take part, and in which row of a table, page by page."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol, Self

import numpy as np
import numpy.typing as npt

from ..accounting import filter as weighted_orders
from ..core.mechanism import FloatArray, IntArray
from ..errors import RegistryError
from .databases import PAGE, packed, unpacked

#: Pico-nats per nat.
UNIT = 10**12
#: A cost at one order is at most this, 1,126 nats. It is above every cap, so the order is of no use either way, and
#: 8,000 such costs do not overflow 64 bits.
MOST = 2**50
#: The most rows that a table may have: rows are stored in 16 bits.
MOST_ROWS = 2**15
#: The largest lifetime epsilon of an account: below MOST.
LARGEST_EPSILON = 1000.0


# -- Whole numbers of pico-nats: what a person may spend at each Rényi order, and what a run costs them
#
# Costs are rounded up once for all steps of a row, and caps are rounded down. Sums of whole numbers do not depend on
# the order of their terms, and what is given back is exactly what was charged.


def caps(epsilon: npt.ArrayLike, delta: npt.ArrayLike, home: npt.ArrayLike) -> IntArray:
    """(wishes, orders) pico-nats that may be spent at each order; negative where an order is of no use.

    >>> round(float(caps([1.0], [1e-5], [11])[0, 11]) / UNIT, 3)  # order 24: 1 − c(24, 0.9e-5)
    0.676
    """
    left = np.asarray(epsilon, dtype=np.float64)[:, None] - weighted_orders.offsets(delta, home)
    return np.asarray(np.floor(left * UNIT), dtype=np.int64) - 1  # the subtraction may have rounded up


@dataclass(frozen=True)
class Table:
    """What each row of people goes through: phases of sampled Gaussians.

    rates   (phases, rows)  probability of being drawn in one step
    noises  (phases, rows)  noise multiplier; inf for a row that takes no part
    steps   (phases,)

    Raises RegistryError for anything else: a multiplier that is not a number must not be free of charge.
    """

    rates: FloatArray
    noises: FloatArray
    steps: tuple[int, ...]

    def __post_init__(self) -> None:
        shape = np.shape(self.rates)
        if len(shape) != 2 or shape != np.shape(self.noises) or len(self.steps) != shape[0] or 0 in shape:
            raise RegistryError("A table needs rates and noises of shape (phases, rows), and steps of each phase.")
        if shape[1] > MOST_ROWS:
            raise RegistryError(f"A table may have at most {MOST_ROWS:,} rows, got {shape[1]:,}.")
        if not ((self.rates >= 0) & (self.rates <= 1)).all():
            raise RegistryError("The rates of a table must be between 0 and 1.")
        if not (self.noises > 0).all():
            raise RegistryError("The noise multipliers of a table must be above 0; infinity for a row without part.")
        if not all(isinstance(n, (int, np.integer)) and n >= 0 for n in self.steps):
            raise RegistryError("The steps of a table must be whole numbers, at least 0.")

    @property
    def rows(self) -> int:
        """Number of rows."""
        return int(self.rates.shape[1])

    def costs(self, steps: tuple[int, ...] | None = None) -> IntArray:
        """(rows, orders) pico-nats of so many steps of each phase; by default of all."""
        steps = self.steps if steps is None else steps
        if len(steps) != len(self.steps) or any(not 0 <= n <= most for n, most in zip(steps, self.steps, strict=True)):
            raise RegistryError("More steps were charged than this run reserved, or in other phases.")
        with np.errstate(over="ignore"):
            nats = weighted_orders.sums(self.rates, self.noises, steps, self.rows)
        return np.asarray(np.ceil(np.minimum(nats * UNIT, MOST)), dtype=np.int64)

    def to_dict(self) -> dict[str, Any]:
        """As JSON values. A multiplier of infinity is null."""
        noises = [[None if np.isinf(noise) else float(noise) for noise in phase] for phase in self.noises]
        rates = self.rates.astype(np.float64).tolist()  # whole numbers would be read again in another form
        return {"rates": rates, "noises": noises, "steps": [int(n) for n in self.steps]}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        """From what `to_dict` gives."""
        noises = [[np.inf if noise is None else noise for noise in phase] for phase in values["noises"]]
        return cls(np.array(values["rates"], dtype=np.float64), np.array(noises), tuple(values["steps"]))


# -- Rosters: which people take part, and in which row of a table, page by page

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
        ordered = np.sort(self.numbers)
        if (ordered[1:] == ordered[:-1]).any():
            raise RegistryError("A person is in the roster twice. Each person takes part once, with all their rows.")
        if int(self.rows.max()) >= MOST_ROWS:
            raise RegistryError(f"A table may have at most {MOST_ROWS:,} rows.")

    def pages(self) -> Iterator[tuple[int, Rows]]:
        order = np.argsort(self.numbers, kind="stable")
        first, last = int(self.numbers.min()) // PAGE, int(self.numbers.max()) // PAGE
        cuts = np.searchsorted(self.numbers, np.arange(first, last + 2) * PAGE, sorter=order)
        for page in range(first, last + 1):
            here = order[cuts[page - first] : cuts[page - first + 1]]
            if len(here):
                of_page = np.full(PAGE, NO_PERSON, dtype=np.int16)
                of_page[self.numbers[here] % PAGE] = self.rows[here]
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


class HeldRoster:
    """A roster as it is stored, read once: who is charged is who is stored, whatever the given one gives later.

    stored  (page, its packed rows), by rising page
    """

    def __init__(self, stored: Iterable[tuple[int, bytes]]) -> None:
        self.stored = list(stored)

    @classmethod
    def of(cls, roster: Pages) -> Self:
        """This roster. Raises RegistryError for pages of another form or order."""
        return cls((page, packed(rows)) for page, rows in checked(roster))

    def pages(self) -> Iterator[tuple[int, Rows]]:
        for page, rows in self.stored:
            yield page, unpacked(rows, np.int16)

    @property
    def digest(self) -> str:
        """SHA-256 of who takes part in which row, page by page."""
        known = hashlib.sha256()
        for page, rows in self.pages():
            known.update(int(page).to_bytes(8, "little") + rows.tobytes())
        return known.hexdigest()
