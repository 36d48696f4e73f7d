"""The rows of persons: which rows a drawn person contributes, and how often each is read.

Coins fall per person (`Draws`). A drawn person contributes at most `rows_per_person` of their rows. The choice is
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
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from ..budgets.budgets import Budgets
from ..budgets.ids import SEVERAL_OWNERS
from ..core.columns import Codes, hashed, parts
from ..core.mechanism import IntArray
from ..errors import DataError, InputError
from ..planning import Plan
from .randomness import COIN_BITS, Randomness, Stream, thresholds

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
        owned = np.empty(0, dtype=np.int64) if self.person is None else self.person
        digest = hashed(hashlib.blake2b(f"{self.count} ".encode(), digest_size=16), owned)
        return {"persons": digest, "rows_per_person": self.rows_per_person, "views": self.views}

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


# -- Poisson draws with one rate per record
#
# A draw is a function of (key, phase, step); nothing here has state.
#
# One coin per record is the definition. Above a million records, the number of drawn records is drawn first, and then
# a uniform subset of that size: the distribution is exactly the same. The plan's number of records alone decides,
# because it is public and part of the plan, so a resumed run uses the same method.
#
# About 1,000 from 1e6, 1e7 and 1e8 records take 3, 45 and 480 ms to draw with one coin per record, and 0.8, 2.6 and
# 15 ms with counts, beside 37 ms for the gradients of 512 records in the paper's MNIST network
# (benchmarks/data_path.py, processor's time). The first draw with counts also sorts the records into classes: three of
# them take 26, 114 and 1,800 ms, once per phase, and one takes half of that.

#: Plans for more records than this are drawn by counts.
MOST_COINS = 1_000_000

#: Fair coins that are tossed at once, 64 per word: 512 kB, which stay in the processor's cache.
WORDS_AT_ONCE = 2**16


@dataclass(frozen=True)
class Draws:
    """The draws of one run.

    plan        rates per group
    group       (records,) each record's group
    randomness  source of the coins
    """

    plan: Plan
    group: Codes = field(repr=False)  # each record's choice: kept out of logs
    randomness: Randomness

    @property
    def method(self) -> str:
        """ "coins" or "counts": the same distribution, other records under the same key."""
        return "coins" if self.plan.records <= MOST_COINS else "counts"

    def at(self, phase: int, step: int) -> npt.NDArray[np.int64]:
        """(drawn,) indices of the records drawn at this step, ascending."""
        return self.by_coins(phase, step) if self.method == "coins" else self.by_counts(phase, step)

    def by_coins(self, phase: int, step: int) -> npt.NDArray[np.int64]:
        """One coin for every record, by its index: it is drawn if the coin is below its group's limit."""
        limits = thresholds(self.plan.phases[phase].sample_rate)  # (groups,)
        coins = self.randomness.coins(phase, step, len(self.group))
        likely = np.flatnonzero(coins < limits.max())  # few, so the limits of the others are not looked up
        return likely[coins[likely] < limits[self.group[likely]]]

    def by_counts(self, phase: int, step: int) -> npt.NDArray[np.int64]:
        """The number of candidates, a uniform subset of that size, and one coin for each candidate.

        A record of rate q, 2^-(h+1) < q <= 2^-h, is a candidate with probability 2^-h, and is kept with probability
        q·2^h (thinning: Lewis & Shedler, Naval Research Logistics Quarterly 26(3), 1979). So records of many rates are
        drawn in few classes, and at most twice as many candidates as needed.
        """
        drawn: list[npt.NDArray[Any]] = [np.empty(0, dtype=np.int64)]
        for part in self._classes(phase):
            stream = self.randomness.stream("counts", phase, step, part.halvings)
            count = successes(len(part.members), part.halvings, stream)
            candidates = part.members[subset(count, len(part.members), stream)]
            coins = stream.integers(count) >> np.uint64(64 - COIN_BITS)
            drawn.append(candidates[coins < part.limits[self.group[candidates]]])
        return np.sort(np.concatenate(drawn))

    def _classes(self, phase: int) -> list[RateClass]:
        if phase not in self._latest:
            self._latest.clear()  # as large as the data set, so only one is kept
            self._latest[phase] = rate_classes(thresholds(self.plan.phases[phase].sample_rate), self.group)
        return self._latest[phase]

    @cached_property
    def _latest(self) -> dict[int, list[RateClass]]:
        return {}


@dataclass(frozen=True)
class RateClass:
    """Records that are candidates with probability 2^-halvings.

    members  (count,) their indices, ascending
    limits   (groups,) a candidate of this group is kept if its coin is below; 2^53 is always
    """

    halvings: int
    members: npt.NDArray[np.int32] | IntArray
    limits: npt.NDArray[np.uint64]


def rate_classes(limits: npt.NDArray[np.uint64], group: Codes) -> list[RateClass]:
    """All records that can be drawn, in classes. limits: (groups,) rates·2^53, integers."""
    halvings = np.array([COIN_BITS - (int(limit) - 1).bit_length() if limit else -1 for limit in limits])
    place = np.int32 if len(group) < 2**31 else np.int64

    def members(h: int) -> list[npt.NDArray[Any]]:
        return [(np.flatnonzero(halvings[group[part]] == h) + part.start).astype(place) for part in parts(len(group))]

    return [
        RateClass(h, np.concatenate(members(h)), np.where(halvings == h, limits << np.uint64(h), np.uint64(0)))
        for h in sorted({*halvings.tolist()} - {-1})
    ]


def successes(trials: int, halvings: int, stream: Stream) -> int:
    """Binomial(trials, 2^-halvings), exactly: the trials that come out heads in all of `halvings` rounds."""
    for _ in range(halvings):
        trials = heads(trials, stream)
    return trials


def heads(coins: int, stream: Stream) -> int:
    """Binomial(coins, 1/2), exactly: the number of ones among so many random bits."""
    ones = 0
    while coins > 0:
        words = stream.integers(min(-(-coins // 64), WORDS_AT_ONCE))
        surplus = max(64 * len(words) - coins, 0)
        words[-1] >>= np.uint64(surplus)
        ones += int(np.bitwise_count(words).sum())
        coins -= 64 * len(words)
    return ones


def subset(size: int, count: int, stream: Stream) -> npt.NDArray[np.int64]:
    """(size,) distinct integers below `count`, ascending: every subset is equally likely.

    Uniform integers are drawn until there are enough different ones. Of more than half, the others are drawn.
    """
    if 2 * size > count:
        is_chosen = np.ones(count, dtype=bool)
        is_chosen[subset(count - size, count, stream)] = False
        return np.flatnonzero(is_chosen)
    chosen = np.empty(0, dtype=np.int64)
    while len(chosen) < size:
        bits = (count - 1).bit_length()
        words = stream.integers(2 * (size - len(chosen)) + 16) >> np.uint64(64 - bits)
        chosen = np.concatenate([chosen, words[words < count].astype(np.int64)])
        chosen = chosen[np.sort(np.unique(chosen, return_index=True)[1])]  # the first of each value
    return np.sort(chosen[:size])


# -- persons= of make_private and fit: each row's person, checked against the budgets. No message shows an id

_MAKE = 'Budgets.by_person(epsilon, ids) or Budgets.from_csv(…, person="…")'


def persons_of(budgets: Budgets, rows: int, persons: Any = None, rows_per_person: int = 1, views: int = 1) -> Persons:
    """Whose rows are whose.

    rows             number of rows of the data set
    persons          (rows,) ids that the budgets know, or, for budgets without ids, positions in the budgets; None
                     takes those of the budgets
    rows_per_person  number of rows that a drawn person contributes, at most
    views            number of readings of each row

    Raises DataError if persons, budgets and rows do not fit, InputError for other numbers than whole ones above 0,
    BudgetError for ids that the budgets do not know, or that may be several spellings of one, without a statement.
    """
    check_number("rows_per_person", rows_per_person)
    check_number("views", views)
    if budgets.unit == "record":
        _check_records(persons, rows_per_person)
        return Persons(rows, None, 1, int(views))
    budgets.check_spelling()
    person = _of_budgets(budgets, rows) if persons is None else _given(budgets, persons)
    if len(person) != rows:
        raise DataError(
            f"persons= needs the person of each row, in data-set order; got {len(person):,} for a data set of "
            f"{rows:,} rows. For part of the data take the same part of the ids."
        )
    return Persons.of(person, len(budgets), int(rows_per_person), int(views))


def check_size(persons: Persons, largest: int) -> None:
    """Refuse persons who do not fit into a physical batch. Raises DataError."""
    if persons.most > largest:
        settings = f"rows_per_person={persons.rows_per_person:,} and views={persons.views:,}"
        raise DataError(
            f"A person's rows are computed together, and with {settings} those of some person do not fit into a "
            f"physical batch of {largest:,} rows. Lower rows_per_person or views, or raise "
            "Performance(max_physical_batch=…)."
        )


def check_number(name: str, value: object) -> None:
    """Raise InputError for another value than a whole number above 0."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 1:
        raise InputError(f"{name} must be a whole number of at least 1, got {value!r}.")


def _check_records(persons: Any, rows_per_person: int) -> None:
    """Refuse what budgets of records have no use for."""
    if persons is not None or rows_per_person != 1:
        name = "persons" if persons is not None else "rows_per_person"
        raise DataError(
            f"{name}= is for budgets of persons, and these are of records: each row has a budget of its own, and all "
            f"rows of one person together lose the sum. Make budgets with {_MAKE}, plan with them, and pass them here; "
            f"or leave {name}= out if each row is one person."
        )


def _of_budgets(budgets: Budgets, rows: int) -> IntArray:
    if budgets.person is None or len(budgets.person) != rows:
        known = "hold no rows" if budgets.person is None else f"were made from {len(budgets.person):,} rows"
        raise DataError(
            f"The budgets are of persons and {known}, so it is unknown whose each of these {rows:,} rows is. Pass "
            "persons=, the id of each row's person in data-set order; for budgets without ids, the person's position "
            "in the budgets. If each row is one person, in the order of the budgets, pass persons=range(rows)."
        )
    return budgets.person


def _given(budgets: Budgets, persons: Any) -> IntArray:
    """(rows,) positions in the budgets."""
    if budgets._roster is not None:
        return budgets.persons_of(persons)
    if np.ma.is_masked(persons):
        raise DataError("Some persons are masked. Every row needs one; fill them in, or leave these rows out.")
    try:
        array = np.asarray(persons)
    except (TypeError, ValueError, RuntimeError):
        array = np.empty((), dtype=object)
    if array.ndim == 2:
        raise DataError(SEVERAL_OWNERS.format(count=array.shape[1]))
    if array.ndim != 1 or not np.issubdtype(array.dtype, np.integer):
        raise DataError(
            "These budgets hold no ids, so persons= takes positions in the budgets: a flat list of whole numbers "
            f"counted from 0, got an array of {array.dtype} of shape {array.shape}. For ids make the budgets with "
            f"{_MAKE}."
        )
    if len(array) and not (int(array.min()) >= 0 and int(array.max()) < len(budgets)):
        raise DataError(
            f"persons= has positions outside the budgets of {len(budgets):,} persons: positions are whole numbers from "
            f"0 to {len(budgets) - 1:,}. For ids make the budgets with {_MAKE}."
        )
    return array.astype(np.int64)
