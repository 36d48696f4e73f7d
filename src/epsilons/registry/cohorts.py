"""Cohorts: people with the same wish and the same sums share one row, so that a run over all people changes few rows.

`move` is the only function that changes sums. It looks at the distinct pairs (cohort, row of the run), which are few,
and then gives each person their new cohort, page by page.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ..accounting.filter import ORDERS, offsets
from ..core.mechanism import FloatArray, IntArray
from ..errors import RegistryError, RegistryRefusedError
from .databases import ALTERED, PAGE, Database, packed, rows_in, unpacked
from .rosters import NO_PERSON, Pages, caps

#: Up to this many possible pairs are counted in an array, which is faster than sorting.
FEW_PAIRS = 1 << 18
#: Pairs that are in memory with their sums.
PAIRS_AT_ONCE = 1 << 14
#: No person is enrolled at this place.
EMPTY = 0

Cohorts = npt.NDArray[np.int32]


class Wishes:
    """All lifetime budgets by number.

    ids, epsilon, delta, home  (wishes,) home: index of the home order

    Raises RegistryError for one that is out of range.
    """

    def __init__(self, database: Database) -> None:
        rows = database.run("select id, epsilon, delta, home from wish order by id")
        columns = np.array(rows, dtype=np.float64).reshape(-1, 4).T
        self.epsilon, self.delta = columns[1:3]
        if not (((columns >= 0) & (columns < 2**31)).all() and ((self.delta > 0) & (self.delta < 1)).all()):
            raise RegistryError(ALTERED)
        self.ids, self.home = columns[0].astype(np.int64), columns[3].astype(np.int64)

    def places(self, numbers: IntArray) -> IntArray:
        """(…,) where the wishes with these numbers are. Raises RegistryError for a number that no wish has."""
        found = np.searchsorted(self.ids, numbers)
        if (found == len(self.ids)).any() or not np.array_equal(self.ids[found], numbers):
            raise RegistryError(ALTERED)
        return found

    def caps(self, numbers: IntArray) -> IntArray:
        """(…, orders) the caps of the wishes with these numbers."""
        found: IntArray = caps(self.epsilon, self.delta, self.home)[self.places(numbers)]
        return found

    @property
    def capacity(self) -> FloatArray:
        """(wishes,) nats at the home order."""
        found: FloatArray = self.epsilon - offsets(self.delta, self.home)[np.arange(len(self.ids)), self.home]
        return found


class Known(NamedTuple):
    """Rows of the table `cohort`, by rising id.

    ids, wishes  (cohorts,)
    withdrawn    (cohorts,) True if these people withdrew
    sums         (cohorts, orders) pico-nats spent and reserved
    """

    ids: IntArray
    wishes: IntArray
    withdrawn: npt.NDArray[np.bool_]
    sums: IntArray


def page_of(database: Database, page: int) -> Cohorts:
    """(PAGE,) the cohort of each place."""
    rows = database.run("select cohorts from page where number = %s", page)
    return unpacked(rows[0][0], np.int32) if rows else np.zeros(PAGE, dtype=np.int32)


def store_page(database: Database, page: int, cohorts: Cohorts) -> None:
    database.run(
        "insert into page values (%s, %s) on conflict (number) do update set cohorts = excluded.cohorts",
        page,
        packed(cohorts),
    )


def known(database: Database, ids: Iterable[int]) -> Known:
    """These rows of the table `cohort`."""
    rows = sorted(rows_in(database, "select id, wish, withdrawn, sums from cohort where id", map(int, ids)))
    sums = np.frombuffer(b"".join(row[3] for row in rows), dtype=np.int64).reshape(-1, len(ORDERS))
    numbers = np.array([row[:3] for row in rows], dtype=np.int64).reshape(-1, 3)
    return Known(numbers[:, 0], numbers[:, 1], numbers[:, 2] > 0, sums)


def of_people(database: Database, numbers: IntArray) -> tuple[Known, IntArray]:
    """The cohorts of the people with these numbers, and (people,) which of them each is in."""
    cohorts, pages = np.zeros(len(numbers), dtype=np.int64), numbers // PAGE
    for page in np.unique(pages):
        here = pages == page
        cohorts[here] = page_of(database, int(page))[numbers[here] % PAGE]
    distinct, which = np.unique(cohorts, return_inverse=True)
    return known(database, distinct), which


def move(database: Database, roster: Pages, change: IntArray, is_charge: bool) -> None:
    """Add change[row] to the sums of all people in the roster, inside a transaction.

    is_charge  True: refuse all if some person would be over at every order, or withdrew. False: sums become smaller

    Raises RegistryRefusedError, which says nothing about any person.
    """
    rows, wishes = len(change), Wishes(database) if is_charge else None
    pairs = _pairs(database, roster, rows)
    blocks = (pairs[i : i + PAIRS_AT_ONCE] for i in range(0, len(pairs), PAIRS_AT_ONCE))
    after = np.concatenate([_moved(database, block, change, wishes) for block in blocks])
    for page, of_page in roster.pages():
        stored, takes_part = page_of(database, page), of_page != NO_PERSON
        key = stored[takes_part].astype(np.int64) * rows + of_page[takes_part]
        stored[takes_part] = after[np.searchsorted(pairs, key)]
        store_page(database, page, stored)


def _moved(database: Database, pairs: IntArray, change: IntArray, wishes: Wishes | None) -> Cohorts:
    """(pairs,) the cohort of each pair after this change; wishes: for a charge, those that it must fit into."""
    cohorts, where = np.unique(pairs // len(change), return_inverse=True)
    before = known(database, cohorts)
    if not np.array_equal(before.ids, cohorts):
        raise RegistryError(
            "The registry was altered: cohorts are missing. See what is wrong: epsilons registry verify."
        )
    stated, withdrawn = before.wishes[where], before.withdrawn[where]
    sums = before.sums[where] + change[pairs % len(change)]
    if wishes is not None:
        # A sum that does not fit into 64 bits became negative: it is too much, and not room for more.
        fits = (sums <= wishes.caps(stated)).any(axis=1) & (sums >= 0).all(axis=1) & ~withdrawn
        if not fits.all():
            raise RegistryRefusedError(
                "Some people in this roster have too little left for this run, or withdrew. Nothing was charged. Plan "
                "on what they have left (registry.account), or leave them out."
            )
    if (sums < 0).any():
        raise RegistryError("The registry was altered: more would be given back than was charged.")
    return ids_of(database, stated, withdrawn, sums)


def rebuild(database: Database, pages: Iterable[tuple[int, IntArray, npt.NDArray[Any], IntArray]]) -> None:
    """Write the tables `page` and `cohort` again, inside a transaction.

    pages  page, and of each of its places: (PAGE,) number of the wish, (PAGE,) True if withdrawn, (PAGE, orders) sums
    """
    for table in ("page", "cohort"):
        database.run(f"delete from {table}")
    for page, *columns in pages:
        distinct, which = np.unique(np.column_stack(columns), axis=0, return_inverse=True)
        is_person = distinct[:, 0] != EMPTY
        cohorts, rows = np.full(len(distinct), EMPTY, dtype=np.int32), distinct[is_person]
        cohorts[is_person] = ids_of(database, rows[:, 0], rows[:, 1] > 0, rows[:, 2:])
        store_page(database, page, cohorts[which.reshape(-1)])


def leavers(database: Database, numbers: IntArray) -> IntArray:
    """(leavers,) places of those who withdrew, or whose sums are over their caps at every order."""
    rows, which = of_people(database, numbers)
    fits = (rows.sums <= Wishes(database).caps(rows.wishes)).any(axis=1) & ~rows.withdrawn
    return np.flatnonzero(~fits[which])


def _pairs(database: Database, roster: Pages, rows: int) -> IntArray:
    """All pairs (cohort · rows + row) that occur, rising."""
    ((most,),) = database.run("select coalesce(max(id), 0) from cohort")
    seen = np.zeros((most + 1) * rows, dtype=bool) if (most + 1) * rows <= FEW_PAIRS else None
    pairs = []
    for page, of_page in roster.pages():
        cohorts, takes_part = page_of(database, page), of_page != NO_PERSON
        if (cohorts[takes_part] == EMPTY).any() or int(of_page.max()) >= rows:
            raise RegistryError("The roster has people who are not enrolled, or rows that the table does not have.")
        key = cohorts[takes_part].astype(np.int64) * rows + of_page[takes_part]
        if seen is not None:
            seen[key] = True
        else:
            pairs.append(np.unique(key))
    return np.flatnonzero(seen) if seen is not None else np.unique(np.concatenate(pairs))


def ids_of(database: Database, wishes: IntArray, withdrawn: npt.NDArray[np.bool_], sums: IntArray) -> Cohorts:
    """The cohort of each of these rows; rows that do not exist are added, inside a transaction."""
    keys = [(int(w), int(g), s.tobytes()) for w, g, s in zip(wishes, withdrawn, sums, strict=True)]
    alike, found = defaultdict[tuple[int, int], list[bytes]](list), dict[tuple[int, int, bytes], int]()
    for wish, gone, one in keys:
        alike[wish, gone].append(one)
    for (wish, gone), some in alike.items():  # one after the other, as the index begins with these columns
        select = f"select sums, id from cohort where wish = {wish} and withdrawn = {gone} and sums"
        found |= {(wish, gone, bytes(one)): i for one, i in rows_in(database, select, some)}
    missing = [key for key in dict.fromkeys(keys) if key not in found]
    ((most,),) = database.run("select coalesce(max(id), 0) from cohort")
    found |= {key: most + 1 + i for i, key in enumerate(missing)}
    database.many("insert into cohort values (%s, %s, %s, %s)", [(found[key], *key) for key in missing])
    return np.array([found[key] for key in keys], dtype=np.int32)
