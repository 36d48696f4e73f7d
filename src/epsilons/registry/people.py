"""People: pseudonyms, wishes, withdrawal.

A person's name never enters the database. The pseudonym is a keyed hash of it, and the key, the pepper, is in a file
apart: a plain hash of a name or an e-mail address can be reversed by trying all of them. What people state is kept page
by page, one entry per statement, so that `verify` can replay it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ..accounting.filter import ORDERS, home_orders
from ..budgets.ids import Rule, texts_of
from ..core.disclosure import how_many
from ..core.mechanism import SMALLEST_DELTA, FloatArray, IntArray
from ..errors import RegistryError, RegistryRefusedError
from . import databases
from .cohorts import EMPTY, Wishes, ids_of, known, of_people, page_of, store_page
from .databases import Database, rows_in
from .rosters import LARGEST_EPSILON, MOST_ROWS, NO_PERSON, HeldRoster, Roster, caps

#: The row of a statement that says "no further draws". Others are numbers of wishes.
WITHDRAWN = 0


def pseudonyms(ids: Sequence[Any] | npt.NDArray[Any], pepper: bytes, rule: Rule = ()) -> list[bytes]:
    """16 bytes for each id. Raises RegistryError for ids that occur twice, as `rule` makes them equal."""
    texts = texts_of(ids, rule).to_pylist()
    hashed = [hashlib.blake2b(text.encode(), key=pepper, digest_size=16).digest() for text in texts]
    if len(set(hashed)) < len(hashed):
        raise RegistryError("An id occurs twice. The unit is a person: give each person once.")
    return hashed


def numbers_of(database: Database, hashed: Sequence[bytes]) -> IntArray:
    """(people,) the numbers of these pseudonyms, −1 for those who are not enrolled."""
    ((people,),) = database.run("select count(*) from person")
    if 4 * len(hashed) > people:
        rows = database.run("select pseudonym, number from person")
    else:
        rows = rows_in(database, "select pseudonym, number from person where pseudonym", hashed)
    found = {bytes(one): number for one, number in rows}
    return np.array([found.get(one, -1) for one in hashed], dtype=np.int64)


def enrolled(database: Database, hashed: Sequence[bytes]) -> IntArray:
    """(people,) their numbers. Raises RegistryRefusedError if some are not enrolled."""
    numbers = numbers_of(database, hashed)
    missing = int((numbers < 0).sum())
    if missing:
        raise RegistryRefusedError(
            f"{how_many(missing, len(numbers))} people of this list are not enrolled. Enrol them first "
            "(epsilons registry import), or leave them out."
        )
    return numbers


def enrol(database: Database, hashed: Sequence[bytes], epsilon: FloatArray, delta: FloatArray) -> IntArray:
    """Give these people their first wish, inside a transaction; (people,) their numbers.

    Raises RegistryRefusedError if some are enrolled, RegistryError for wishes that no account can keep.
    """
    if (numbers_of(database, hashed) >= 0).any():
        raise RegistryRefusedError(
            "Some people of this list are enrolled already. A later wish is a change (registry.change): enrolling "
            "again would forget what was spent."
        )
    ((first,),) = database.run("select coalesce(max(number) + 1, 0) from person")
    numbers = np.arange(first, first + len(hashed), dtype=np.int64)
    wishes = _wishes(database, epsilon, delta, home_orders(epsilon, delta))
    names = hashlib.sha256(b"".join(hashed)).hexdigest()
    _state(database, "enrol", Roster(numbers, wishes), first=int(first), people=len(hashed), names=names)
    database.load("person", sorted(zip(hashed, numbers.tolist(), strict=True)))  # in the order of the index
    return numbers


def change(database: Database, numbers: IntArray, epsilon: FloatArray, delta: FloatArray) -> None:
    """Give these people another wish, inside a transaction. Their home orders and what was spent stay.

    Below what is spent and reserved, no further run can be reserved for them; what was released stays, and the former
    wish is what was promised for it.
    """
    wishes = _wishes(database, epsilon, delta, homes_of(database, numbers))
    _state(database, "change", Roster(numbers, wishes), people=len(numbers))


def homes_of(database: Database, numbers: IntArray) -> IntArray:
    """(people,) the home order of each, as an index into ORDERS."""
    (rows, which), wishes = of_people(database, numbers), Wishes(database)
    homes: IntArray = wishes.home[wishes.places(rows.wishes)[which]]
    return homes


def withdraw(database: Database, numbers: IntArray) -> None:
    """No further draws of these people, inside a transaction. What was released stays, and so does what was spent."""
    _state(database, "withdraw", Roster(numbers, np.full(len(numbers), WITHDRAWN)), people=len(numbers))


def _wishes(database: Database, epsilon: FloatArray, delta: FloatArray, homes: IntArray) -> IntArray:
    """(people,) the number of each wish (ε, δ, home order); new ones are added."""
    triples = np.stack([*np.broadcast_arrays(epsilon, delta), homes.astype(np.float64)], axis=1)
    distinct, which = np.unique(triples, axis=0, return_inverse=True)
    _check(distinct)
    stored = {row[1:]: row[0] for row in database.run("select id, epsilon, delta, home from wish")}
    keys = [(one, d, int(home)) for one, d, home in distinct.tolist()]
    if len(stored.keys() | keys) >= MOST_ROWS:
        raise RegistryError(
            f"A registry may have {MOST_ROWS - 1:,} different lifetime budgets. Round them down to fewer, say to 0.01."
        )
    for key in keys:
        if key not in stored:
            stored[key] = len(stored) + 1
            databases.add(database, "wish", id=stored[key], epsilon=key[0], delta=key[1], home=float(ORDERS[key[2]]))
            database.run("insert into wish values (%s, %s, %s, %s)", stored[key], *key)
    numbers = np.array([stored[key] for key in keys], dtype=np.int64)
    found: IntArray = numbers[which.reshape(-1)]
    return found


def check_wishes(epsilon: FloatArray, delta: FloatArray) -> None:
    """Raise RegistryError for first wishes, (people,) each, that no account can keep."""
    pairs = np.unique(np.stack([epsilon, delta], axis=1), axis=0)
    _check(np.concatenate([pairs, home_orders(pairs[:, 0], pairs[:, 1])[:, None]], axis=1))


def _check(wishes: FloatArray) -> None:
    """Raise RegistryError for wishes (ε, δ, home) that no account can keep."""
    epsilon, delta = wishes[:, 0], wishes[:, 1]
    if not (np.isfinite(epsilon) & (epsilon > 0) & (epsilon <= LARGEST_EPSILON)).all():
        raise RegistryError(f"Lifetime budgets must be above 0 and at most {LARGEST_EPSILON:g}.")
    if not ((delta >= SMALLEST_DELTA) & (delta < 1)).all():
        raise RegistryError(f"A lifetime delta must be between {SMALLEST_DELTA:g} and 1 (1 excluded).")
    if not (caps(epsilon, delta, wishes[:, 2]) > 0).any(axis=1).all():
        raise RegistryError("Some lifetime budgets are too small: no run, however much noise it has, fits into them.")


def _state(database: Database, kind: str, roster: Roster, **facts: Any) -> None:
    """Record what these people stated, and move them to their new cohorts. Rows: numbers of wishes, or WITHDRAWN."""
    event, held = databases.head(database)[0] + 1, HeldRoster.of(roster)
    databases.add(database, kind, digest=held.digest, **facts)
    database.many("insert into statement values (%s, %s, %s)", [(event, *page) for page in held.stored])
    for page, rows in held.pages():
        cohorts, stated = page_of(database, page), rows != NO_PERSON
        cohorts[stated] = _after(database, cohorts[stated].astype(np.int64), rows[stated].astype(np.int64))
        store_page(database, page, cohorts)


def _after(database: Database, cohorts: IntArray, rows: IntArray) -> npt.NDArray[np.int32]:
    """(people,) their cohorts after a statement."""
    pairs, which = np.unique(np.stack([cohorts, rows]), axis=1, return_inverse=True)
    before = known(database, pairs[0])
    is_new = pairs[0] == EMPTY
    where = np.minimum(np.searchsorted(before.ids, pairs[0]), max(len(before.ids) - 1, 0))
    sums = np.zeros((pairs.shape[1], len(ORDERS)), dtype=np.int64)
    wishes, gone = pairs[1].copy(), pairs[1] == WITHDRAWN
    if not is_new.all():
        sums[~is_new] = before.sums[where[~is_new]]
        leaves = gone & ~is_new
        wishes[leaves] = before.wishes[where[leaves]]
    found: npt.NDArray[np.int32] = ids_of(database, wishes, gone, sums)[which.reshape(-1)]
    return found
