"""Requests: what subjects state by themselves in PostgreSQL (roles.sql), and how an officer carries it out.

A subject has no right to any table of the registry: a page holds 16,384 people. A statement waits in `request`
until an officer's program carries it out. No subject can hold the registry up: each has one open request, the program
takes BATCH of them per transaction, passes over those that are just being changed, and rounds budgets down to a public
grid, because every budget takes one of the registry's numbers of wishes for ever.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from decimal import ROUND_DOWN, Context, Decimal
from importlib import resources
from typing import Any

import numpy as np

from . import databases, people
from .databases import Database
from .rosters import MOST_ROWS, caps

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
        people.withdraw(database, np.array([row[1] for row in leaves], dtype=np.int64))
        applied = dict.fromkeys((row[0] for row in leaves), databases.head(database)[0])
    if stays:
        applied |= _changed(database, stays)
    database.many("update request set applied = %s where id = %s", [(event, one) for one, event in applied.items()])
    return len(rows)


def _changed(database: Database, rows: Sequence[tuple[Any, ...]]) -> dict[int, int]:
    """Carry out these new budgets as one event, inside a transaction; id of the request -> `applied`."""
    numbers = np.array([row[1] for row in rows], dtype=np.int64)
    stated = np.array([on_grid(*row[2:]) for row in rows])
    homes = people.homes_of(database, numbers)
    fits = np.asarray((caps(stated[:, 0], stated[:, 1], homes) > 0).any(axis=1))
    known = set(database.run("select epsilon, delta, home from wish"))
    outcome = np.where(fits, NO_NUMBER_LEFT, TOO_SMALL)
    for i, wish in enumerate(zip(*stated.T.tolist(), homes.tolist(), strict=True)):
        if fits[i] and (wish in known or len(known) < MOST_WISHES):
            known.add(wish)
            outcome[i] = 1
    which = outcome > 0
    if which.any():
        people.change(database, numbers[which], stated[which, 0], stated[which, 1])
        outcome[which] = databases.head(database)[0]
    return {row[0]: int(one) for row, one in zip(rows, outcome, strict=True)}
