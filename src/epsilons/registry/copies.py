"""Copies of a registry: all tables as of one moment, in a new database of either kind.

A backup is a registry in a SQLite file, whichever database it came from. So it can be verified, and restoring it is
one more copy. What waits in the tables of roles.sql goes along; logins and their roles do not, nor does the pepper.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import UTC, datetime
from itertools import islice

from ..errors import RegistryError, RegistryRefusedError
from . import cohorts, databases, verifier
from .databases import AT_ONCE, SCHEMA, Database, database, rules
from .people import roles_script
from .runs import CANCELLED, SETTLED

#: Tables of roles.sql: their columns, and how a time is read.
ROLES = {"member": "role, project", "subject": "role, number", "request": "id, role, time, epsilon, delta, applied"}
TIME = ("time", "cast(time as text)")


def copy(source: Database, url: str) -> None:
    """Copy all tables into a new, empty database, whole or not at all; nobody waits for it. Raises RegistryError."""
    target = database(url, is_new=True)
    try:
        source.snapshot(lambda: target.build(lambda: databases.create(target, lambda: _fill(source, target))))
    finally:
        target.close()


def _fill(source: Database, target: Database) -> None:
    for table in re.findall(r"create table (\w+)", databases.TABLES):
        _load(source, target, f"select * from {table}", table)
    known = (
        "sqlite_master where name" if source.blob == "blob" else "pg_class where oid = to_regclass(relname) and relname"
    )
    for table, columns in ROLES.items() if source.run(f"select 1 from {known} = 'request'") else ():
        [stated] = re.findall(rf"create table if not exists {table} \(.*?\);", roles_script(), re.DOTALL)
        target.run(f"create table {table} ({columns})" if target.blob == "blob" else stated)
        _load(source, target, f"select {columns.replace(*TIME)} from {table}", table)
        if target.blob != "blob" and table == "request":
            target.run("select setval(pg_get_serial_sequence('request', 'id'), max(id)) from request")


def _load(source: Database, target: Database, statement: str, table: str) -> None:
    rows = source.stream(statement)
    while some := list(islice(rows, AT_ONCE)):
        target.load(table, some)


# -- What only the owner of a registry does: migrate it to the present tables, quarantine wrong events, repair sums

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
    databases.add(database, "migrate", schema=str(SCHEMA), was=schema)
    database.run("update fact set value = %s where name = 'schema'", str(SCHEMA))
    database.run("update run set state = %s where state = %s and key is null", CANCELLED, SETTLED)


def quarantine(database: Database, events: Sequence[int], reason: str) -> None:
    """Take these events out of the account, inside a transaction, with what they wrote. `repair` follows.

    Raises RegistryRefusedError if one of them is legal, or if another one is wrong.
    """
    if not (0 < len(reason) <= LONGEST_REASON and reason.isprintable()):
        raise RegistryError(f"A reason is printable text of 1 to {LONGEST_REASON} characters, in one line.")
    databases.add(database, "quarantine", events=sorted(set(events)), reason=reason)
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


def repair(database: Database) -> None:
    """Compute the sums of all people again, inside a transaction. Raises RegistryError if an event is wrong."""
    history = verifier.History(database.stream, datetime.now(UTC))
    cohorts.rebuild(database, map(history.page, range(history.pages)))
    if history.fault or history.unfounded():
        raise RegistryError(f"The registry was altered: {history.fault or 'a legal event is in quarantine'}.")
