"""People: pseudonyms, wishes, withdrawal.

A person's name never enters the database. The pseudonym is a keyed hash of it, and the key, the pepper, is in a file
apart: a plain hash of a name or an e-mail address can be reversed by trying all of them. What people state is kept page
by page, one entry per statement, so that `verify` can replay it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from decimal import ROUND_DOWN, Context, Decimal
from importlib import resources
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


# -- Requests: what subjects state by themselves in PostgreSQL (roles.sql), and how an officer carries it out
#
# A subject has no right to any table of the registry: a page holds 16,384 people. A statement waits in `request` until
# an officer's program carries it out. No subject can hold the registry up: each has one open request, the program takes
# BATCH of them per transaction, passes over those that are just being changed, and rounds budgets down to a public
# grid, because every budget takes one of the registry's numbers of wishes for ever.

#: Requests that are carried out in one transaction, and rows of old ones that are marked as replaced in one.
BATCH, REPLACED_AT_ONCE = 50, 5000
#: What `applied` says of a request that was not carried out; otherwise it is the number of the event.
TOO_SMALL, REPLACED, NO_NUMBER_LEFT = 0, -1, -2
#: Requests use numbers of wishes below this one. The others are left to officers.
MOST_WISHES = MOST_ROWS // 2

#: A subject who has just locked a row must not hold up the transaction, which has the registry's lock.
_NEXT = """select id, number, epsilon, delta from request join subject using (role)
  where applied is null and id <= %s order by id limit %s for update of request skip locked"""
#: Earlier tables may hold many open requests of one subject.
_REPLACE = """update request set applied = %s where id in (
  select id from request join (select role, max(id) as newest from request where applied is null group by role) as last
  using (role) where applied is null and id < newest limit %s) returning id"""


def roles_script() -> str:
    """roles.sql, which sets up the roles subject, runner, officer and regulator in PostgreSQL."""
    return resources.files(__package__).joinpath("sql", "roles.sql").read_text(encoding="utf-8")


def carry_out(database: Database, progress: Callable[[float], None]) -> int:
    """Carry out the requests that wait now, oldest first, in short transactions; their number.

    A budget that no account can keep is marked as refused. Of several requests of one subject only the newest counts,
    and the others are marked as replaced. An interrupted call is repeated.

    progress  is told the part that is done, after each transaction
    """
    open_ones = "select coalesce(max(id), 0), count(*) from request where applied is null"
    ((last, waiting),) = database.snapshot(lambda: database.run(open_ones))
    done = [0, 0]
    works = (lambda: len(database.run(_REPLACE, REPLACED, REPLACED_AT_ONCE)), lambda: _carry_out_some(database, last))
    for i, work in enumerate(works):
        while found := database.transaction(work):
            done[i] += found
            progress(min(sum(done) / max(waiting, 1), 1.0))
    return done[1]


def on_grid(epsilon: float, delta: float) -> tuple[float, float]:
    """A stated budget, rounded down: two significant digits of epsilon, and a power of ten.

    >>> on_grid(2.345, 3e-5), on_grid(0.3, 1e-5), on_grid(999.9, 0.5)
    ((2.3, 1e-05), (0.3, 1e-05), (990.0, 0.1))
    """
    rounded = Context(prec=2, rounding=ROUND_DOWN).create_decimal(repr(epsilon))
    return float(rounded), float(Decimal(1).scaleb(Decimal(repr(delta)).adjusted()))


def _carry_out_some(database: Database, last: int) -> int:
    """Carry out the next requests, inside a transaction; their number."""
    rows, applied = database.run(_NEXT, last, BATCH), {}
    leaves = [row for row in rows if row[2] is None]
    stays = [row for row in rows if row[2] is not None]
    if leaves:
        withdraw(database, np.array([row[1] for row in leaves], dtype=np.int64))
        applied = dict.fromkeys((row[0] for row in leaves), databases.head(database)[0])
    if stays:
        applied |= _changed(database, stays)
    database.many("update request set applied = %s where id = %s", [(event, one) for one, event in applied.items()])
    return len(rows)


def _changed(database: Database, rows: Sequence[tuple[Any, ...]]) -> dict[int, int]:
    """Carry out these new budgets as one event, inside a transaction; id of the request -> `applied`."""
    numbers = np.array([row[1] for row in rows], dtype=np.int64)
    stated = np.array([on_grid(*row[2:]) for row in rows])
    homes = homes_of(database, numbers)
    fits = np.asarray((caps(stated[:, 0], stated[:, 1], homes) > 0).any(axis=1))
    known = set(database.run("select epsilon, delta, home from wish"))
    outcome = np.where(fits, NO_NUMBER_LEFT, TOO_SMALL)
    for i, wish in enumerate(zip(*stated.T.tolist(), homes.tolist(), strict=True)):
        if fits[i] and (wish in known or len(known) < MOST_WISHES):
            known.add(wish)
            outcome[i] = 1
    which = outcome > 0
    if which.any():
        change(database, numbers[which], stated[which, 0], stated[which, 1])
        outcome[which] = databases.head(database)[0]
    return {row[0]: int(one) for row, one in zip(rows, outcome, strict=True)}
