"""Two things that only the owner of a registry does: migrate it to the present tables, and quarantine wrong events."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any

from ..errors import RegistryError, RegistryRefusedError
from . import chain, verifier
from .databases import Database
from .runs import CANCELLED, RESERVED, RUNNING, SETTLED, stored_run
from .schema import SCHEMA, rules

#: Earlier versions of the tables. 2 was 1 with a rule of ids.
EARLIER = ("1", "2")
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
    if schema not in EARLIER:
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

    events  their numbers, rising

    Raises RegistryRefusedError if one of them is legal, or if another one is wrong.
    """
    if not (0 < len(reason) <= LONGEST_REASON and reason.isprintable()):
        raise RegistryError(f"A reason is printable text of 1 to {LONGEST_REASON} characters, in one line.")
    said = {number: _parsed(body) for number, body in database.run("select number, body from event order by number")}
    out = {number for event in said.values() if event.get("kind") == "quarantine" for number in event["events"]}
    if not events or not set(events) <= said.keys() - out:
        raise RegistryError("Give numbers of events, as epsilons registry verify tells them, that are not quarantined.")
    chain.add(database, "quarantine", events=list(events), reason=reason)
    # While the rows are there: a right event without its rows would be a wrong one.
    first = verifier.verify(database.stream, datetime.now(UTC)).first
    if first is not None and first.number is not None:
        raise RegistryRefusedError(f"Name every event that is wrong, and no other. Now the first wrong one is {first}.")
    for number in events:
        database.run("delete from statement where event = %s", number)
        if said[number].get("kind") == "enrol":
            first, people = said[number]["first"], said[number]["people"]
            database.run("delete from person where number >= %s and number < %s", first, first + people)
    left = [event for number, event in said.items() if number not in out | set(events)]
    for run in {str(said[number]["run"]) for number in events if "run" in said[number]}:
        _restore(database, run, {event["kind"]: event for event in left if event.get("run") == run})


def _restore(database: Database, run: str, last: dict[str, dict[str, Any]]) -> None:
    """Store of a run what the last event of each kind says."""
    if "reserve" not in last:
        for statement in ("delete from part where run = %s", "delete from run where id = %s"):
            database.run(statement, run)
        return
    begun, ended = last.get("begin", {}), last.get("settle", last.get("cancel"))
    row = [RUNNING if begun else RESERVED, None, None]
    if ended is not None:
        none = [0] * len(stored_run(database, run).table.steps)
        row = [SETTLED if begun else CANCELLED, json.dumps(ended.get("charged", none)), ended.get("ledger", "")]
    update = "update run set state = %s, charged = %s, ledger = %s, key = %s, begun = %s where id = %s"
    database.run(update, *row, begun.get("key"), begun.get("ledger"), run)


def _parsed(body: str) -> dict[str, Any]:
    """An event; empty if it is none, as an event to quarantine may be."""
    with suppress(ValueError, RecursionError):
        if isinstance(found := json.loads(body), dict):
            return found
    return {}
