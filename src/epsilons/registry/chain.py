"""The chain of events: each has the hash of the one before, so that nothing in the middle can be changed unseen.

The owner of the database can write a whole new chain. To notice that, keep the hash of the last event elsewhere
(`epsilons registry export`).
"""

from __future__ import annotations

import hashlib
import json
from datetime import UTC, datetime
from typing import Any

from .databases import Database

#: What comes before the first event.
BEGINNING = "0" * 64


def add(database: Database, kind: str, **facts: Any) -> None:
    """Add an event, inside a transaction. Its rows follow, except a run and its roster, which come before.

    Its time is never before the one of the last event.
    """
    ((number, last),) = database.run("select number, hash from head")
    ((before,),) = database.run("select coalesce(max(time), '') from latest")
    time = max(before, datetime.now(UTC).isoformat(timespec="seconds"))
    body = json.dumps({"kind": kind, "time": time, **facts}, sort_keys=True, allow_nan=False)
    new = _hash(last, body)
    database.run("insert into event values (%s, %s, %s, %s)", number + 1, last, new, body)
    database.run("update head set number = %s, hash = %s", number + 1, new)


def head(database: Database) -> tuple[int, str]:
    """(number of events, hash of the last one)."""
    ((number, last),) = database.run("select number, hash from head")
    return int(number), str(last)


def hash_at(database: Database, number: int) -> str | None:
    """The hash of this event; None if there are fewer events."""
    if number == 0:
        return BEGINNING
    rows = database.run("select hash from event where number = %s", number)
    return rows[0][0] if rows else None


def _hash(last: str, body: str) -> str:
    return hashlib.sha256((last + body).encode()).hexdigest()
