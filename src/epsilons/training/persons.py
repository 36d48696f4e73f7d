"""The rows of persons: which rows a drawn person contributes, and how often each is read.

Coins fall per person (`sampling.py`). A drawn person contributes at most `rows_per_person` of their rows. The choice is
a function of (key, phase, step, person) and of the number of the person's own rows: other persons' rows may be added,
removed or moved, and it stays the same. Every subset of that size is equally likely. Each chosen row is read `views`
times.

The choice is made by random words. The word for a row is number `place` of a SplitMix64 stream (Steele, Lea & Flood,
"Fast splittable pseudorandom number generators", OOPSLA 2014, figure 17) that belongs to the person; the rows with the
smallest words are chosen. No guarantee depends on these words: one person's contribution is clipped whatever rows it
comes from. With 1,000,000 persons and 3,000,000 rows, a draw of 1,000 persons takes well below one millisecond beside
4 ms for the coins (benchmarks/data_path.py).
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from ..mechanism import IntArray
from .randomness import Randomness

Words = npt.NDArray[np.uint64]

#: The increment and the two multipliers of SplitMix64.
_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_FIRST, _SECOND = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


@dataclass(frozen=True, eq=False, repr=False)
class Readings:
    """What drawn persons contribute: the readings of their rows.

    persons  (persons,) positions in the budgets, ascending; every person here has a row
    sizes    (persons,) number of readings of each person, at least 1
    rows     (readings,) data-set index of each reading; the readings of one person are consecutive
    numbers  (readings,) number of each reading among its person's: place of the row among all rows of the person, from
             0, plus their number times the view
    """

    persons: IntArray
    sizes: IntArray
    rows: IntArray
    numbers: IntArray

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def is_of_records(self) -> bool:
        """True if each person has one reading."""
        return len(self.rows) == len(self.persons)

    @cached_property
    def ends(self) -> IntArray:
        """(persons + 1,) where the readings of each person begin, and the end of the last."""
        return np.concatenate([[0], np.cumsum(self.sizes)])

    def span(self, first: int, last: int) -> Readings:
        """The readings of persons first to last, the last excluded."""
        rows = slice(self.ends[first], self.ends[last])
        return Readings(self.persons[first:last], self.sizes[first:last], self.rows[rows], self.numbers[rows])

    def places(self, person: int) -> range:
        """The places of one person's readings. person: place among `persons`"""
        return range(int(self.ends[person]), int(self.ends[person + 1]))

    def persons_at(self, places: Sequence[int]) -> tuple[int, ...]:
        """The persons, by their places among `persons`, that these readings belong to; ascending, each once."""
        return tuple(
            np.unique(np.searchsorted(self.ends, np.asarray(places, dtype=np.int64), side="right") - 1).tolist()
        )

    def batches(self, largest: int) -> list[Readings]:
        """Physical batches of whole persons with at most `largest` readings each; none for no persons.

        The physical batches of one draw are one logical batch: they are added up before any noise.
        """
        if len(self) == 0:
            return []
        if (self.sizes == self.sizes[0]).all():  # of nearly equal size
            bounds = evenly(len(self.sizes), max(1, largest // int(self.sizes[0])))
        else:
            bounds = filled(self.ends, largest)
        return [self.span(first, last) for first, last in pairwise(bounds)]


def evenly(count: int, largest: int) -> list[int]:
    """Where parts of at most `largest` of `count` items begin, as equal as can be, larger ones first; and their end.

    >>> evenly(10, 4)
    [0, 4, 7, 10]
    """
    parts = -(-count // largest)
    size, larger = divmod(count, max(parts, 1))
    return [part * size + min(part, larger) for part in range(parts + 1)]


def filled(ends: IntArray, largest: int) -> list[int]:
    """Where batches of whole persons begin that are filled one after the other, and the end of the last.

    ends   (persons + 1,) where each person's readings begin, and the end of the last

    >>> filled(np.array([0, 3, 4, 8, 9]), 4)
    [0, 2, 3, 4]
    """
    bounds = [0]
    while bounds[-1] < len(ends) - 1:
        last = int(np.searchsorted(ends, ends[bounds[-1]] + largest, side="right")) - 1
        bounds.append(max(last, bounds[-1] + 1))
    return bounds


@dataclass(frozen=True, eq=False, repr=False)
class Persons:
    """Whose rows are whose.

    count            number of persons, with and without rows
    person           (rows,) each row's person; None if each row is one person, in this order
    rows_per_person  number of rows that a drawn person contributes, at most
    views            number of readings of each of them
    """

    count: int
    person: IntArray | None = None
    rows_per_person: int = 1
    views: int = 1

    @classmethod
    def of(cls, person: IntArray, count: int, rows_per_person: int = 1, views: int = 1) -> Persons:
        """Persons with these rows. person: (rows,) positions below `count`"""
        is_plain = len(person) == count and bool((person == np.arange(count)).all())
        return cls(count, None if is_plain else person, rows_per_person, views)

    @property
    def are_records(self) -> bool:
        """True if each person is one row that is read once: the rows are drawn as records are."""
        return self.person is None and self.views == 1

    @cached_property
    def most(self) -> int:
        """The largest number of readings that a person can contribute."""
        if self.person is None:
            return self.views
        return self.views * min(self.rows_per_person, int(np.diff(self._starts).max(initial=1)))

    @cached_property
    def _rows(self) -> IntArray:
        """(rows,) all rows by person, ascending within each."""
        assert self.person is not None
        return np.argsort(self.person, kind="stable")

    @cached_property
    def _starts(self) -> IntArray:
        """(persons + 1,) where each person's rows begin in `_rows`, and their end."""
        assert self.person is not None
        return np.concatenate([[0], np.cumsum(np.bincount(self.person, minlength=self.count))])

    def with_rows(self, drawn: IntArray) -> IntArray:
        """Those of the drawn persons who have rows."""
        return drawn if self.person is None else drawn[self._starts[drawn + 1] > self._starts[drawn]]

    def readings(self, drawn: IntArray, randomness: Randomness, phase: int, step: int) -> Readings:
        """What these persons contribute to this draw. drawn: (persons,) ascending, each with rows"""
        if self.person is None:
            ones = np.ones_like(drawn)
            return self._viewed(Readings(drawn, ones, drawn, np.zeros_like(drawn)), ones)
        starts = self._starts[drawn]
        counts = self._starts[drawn + 1] - starts
        owner = np.repeat(np.arange(len(drawn)), counts)  # (rows of all drawn persons,)
        place = np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)
        if len(counts) and counts.max() > self.rows_per_person:
            key = randomness.stream("rows", phase, step).integers(2)
            order = np.lexsort((words(key, drawn[owner], place), owner))
            kept = np.sort(order[place < self.rows_per_person])  # the first of each person in that order
            owner, place = owner[kept], place[kept]
        sizes = np.minimum(counts, self.rows_per_person)
        return self._viewed(Readings(drawn, sizes, self._rows[starts[owner] + place], place), counts)

    def _viewed(self, once: Readings, counts: IntArray) -> Readings:
        """Each row read `views` times in place of once. counts: (persons,) number of rows of each"""
        if self.views == 1:
            return once
        view = np.tile(np.arange(self.views), len(once.rows))
        rows, places, count = (
            np.repeat(t, self.views) for t in (once.rows, once.numbers, np.repeat(counts, once.sizes))
        )
        return Readings(once.persons, once.sizes * self.views, rows, places + view * count)

    @property
    def facts(self) -> dict[str, Any]:
        """What a sum depends on: a hash of whose rows are whose, and how many are read. Empty for plain records."""
        if self.are_records:
            return {}
        owned = b"" if self.person is None else self.person.tobytes()
        digest = hashlib.blake2b(f"{self.count} ".encode() + owned, digest_size=16)
        return {"persons": digest.hexdigest(), "rows_per_person": self.rows_per_person, "views": self.views}

    def __repr__(self) -> str:
        return f"Persons({self.count:,})"


def words(key: Words, person: IntArray, place: IntArray) -> Words:
    """(rows,) a random word for each row, by its person and its place in the person's rows. key: (2,)"""
    seeds = _splitmix64(key[:1] + (person.astype(np.uint64) + np.uint64(1)) * _GAMMA)
    return _splitmix64((seeds ^ key[1:]) + (place.astype(np.uint64) + np.uint64(1)) * _GAMMA)


def _splitmix64(state: Words) -> Words:
    """The output function of SplitMix64, on arrays: products are taken modulo 2^64."""
    state = (state ^ (state >> np.uint64(30))) * _FIRST
    state = (state ^ (state >> np.uint64(27))) * _SECOND
    return state ^ (state >> np.uint64(31))
