"""Two things that only the owner of a registry does: migrate it to the present tables, and quarantine wrong events."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime

from ..errors import RegistryError, RegistryRefusedError
from . import chain, verifier
from .databases import Database
from .runs import CANCELLED, SETTLED
from .schema import SCHEMA, rules

LONGEST_REASON = 500


def check(schema: str | None) -> None:
    """Raise RegistryError for tables of another version than the present one."""
    if schema != str(SCHEMA):
        raise RegistryError(
            f"This registry has version {schema} of the tables, and this is {SCHEMA}. From an earlier one its owner "
            "brings it here, and nothing is lost: epsilons registry migrate URL. For a later one, update epsilons."
        )


def migrate(database: Database) -> None:
    """Bring the tables to the present version, inside a transaction; nothing if they have it."""
    ((schema,),) = database.run("select value from fact where name = 'schema'")
    if schema not in ("1", "2"):  # 2 was 1 with a rule of ids
        check(schema)
        return
    database.run("alter table run add column begun text")
    for statement in rules(database):
        database.run(statement)
    chain.add(database, "migrate", schema=str(SCHEMA), was=schema)
    database.run("update fact set value = %s where name = 'schema'", str(SCHEMA))
    database.run("update run set state = %s where state = %s and key is null", CANCELLED, SETTLED)


def quarantine(database: Database, events: Sequence[int], reason: str) -> None:
    """Take these events out of the account, inside a transaction, with what they wrote. `repair` follows.

    Raises RegistryRefusedError if one of them is legal, or if another one is wrong.
    """
    if not (0 < len(reason) <= LONGEST_REASON and reason.isprintable()):
        raise RegistryError(f"A reason is printable text of 1 to {LONGEST_REASON} characters, in one line.")
    chain.add(database, "quarantine", events=sorted(set(events)), reason=reason)
    now = datetime.now(UTC)
    first = verifier.verify(database.stream, now).first  # before a row goes: it may be what is legal
    if first is not None and first.number is not None:
        raise RegistryRefusedError(f"Name every event that is wrong, and no other. Now the first wrong one is {first}.")
    history = verifier.History(database.stream, now)
    database.run("delete from person where number >= %s", history.people)
    for number in events:
        database.run("delete from statement where event = %s", number)
    for (run,) in database.run("select id from run"):
        if run in history.runs:
            update = "update run set state = %s, charged = %s, ledger = %s, key = %s, begun = %s where id = %s"
            database.run(update, *history.runs[run].stored[4:], run)
        else:
            database.run("delete from part where run = %s", run)
            database.run("delete from run where id = %s", run)
