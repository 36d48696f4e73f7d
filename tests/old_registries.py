"""Registries as earlier versions made them: the tables of schema 1, and the old forms of events."""

from __future__ import annotations

import json

import numpy as np

from epsilons.registry import Registry
from epsilons.registry.databases import BEGINNING, _hash, database
from registries import LAST_LINE, OTHER_KEY, begin, reserve, settle, table

IDS = [f"p{i}" for i in range(40)]
#: Removes what schema 3 added, by the names in the catalogue.
RULES = {
    "sqlite": "select 'drop ' || type || ' ' || name from sqlite_master where type in ('trigger', 'view') "
    "or name = 'event_run'",
    "postgresql": "select 'drop function ' || oid::regprocedure || ' cascade' from pg_proc "
    "where pronamespace = current_schema()::regnamespace union all select 'drop view latest' "
    "union all select 'drop index event_run' union all "
    "select format('alter table %I drop constraint %I', conrelid::regclass::text, conname) from pg_constraint "
    "where connamespace = current_schema()::regnamespace and conname like '%\\_size'",
}


def write(registry: Registry) -> None:
    """Forty people, a quota, and a run in each state: reserved, running, settled, given back before it began."""
    registry.enrol(IDS, [1.0, 3.0] * 20)
    registry.set_quota("", 0.9)
    for name in ("reserved", "running", "settled", "cancelled"):
        reserve(registry, name, IDS, np.arange(40) % 2, table([50.0, 40.0]))
    begin(registry, "running")
    settle(registry, "settled", [10])
    registry.cancel("cancelled")
    registry.withdraw(["p3"])
    registry.release("mean", 1.0, ids=IDS[:2], sensitivity=1.0, noise_multiplier=90.0)


def old(event: dict) -> dict:
    """An event in the form that schema 1 had."""
    if event["kind"] == "create":
        return event | {"schema": "1"}
    if event["kind"] == "begin":
        return {name: event[name] for name in ("kind", "time", "run", "key")}
    if event["kind"] == "settle":
        return {name: event[name] for name in ("kind", "time", "run", "charged", "ledger")}
    if event["kind"] == "cancel":
        return event | {"kind": "settle", "charged": [0], "ledger": ""}
    return event


def build(place, more=()) -> None:
    """Make a registry of schema 1 there.

    more  events that somebody added behind its back
    """
    with Registry.create(*place) as registry:
        write(registry)
    downgrade(place[0], more)


def downgrade(url: str, more=()) -> None:
    base = database(url)

    def work():
        for (statement,) in base.run(RULES[url.partition(":")[0]]):
            base.run(statement)
        last, events = (
            BEGINNING,
            [old(json.loads(body)) for (body,) in base.run("select body from event order by number")],
        )
        base.run("delete from event")
        for number, event in enumerate([*events, *more], 1):
            body = json.dumps(event, sort_keys=True)
            base.run("insert into event values (%s, %s, %s, %s)", number, last, _hash(last, body), body)
            last = _hash(last, body)
        base.run("update head set number = %s, hash = %s", len(events) + len(more), last)
        base.run("update fact set value = '1' where name = 'schema'")
        base.run("update run set state = 'settled' where state = 'cancelled'")
        base.run("alter table run drop column begun")

    base.transaction(work)
    base.close()


REPLAYED = {
    "kind": "settle", "time": "2026-01-01T00:00:00+00:00", "run": "settled", "charged": [10], "ledger": LAST_LINE,
}  # fmt: skip
GHOST = {"kind": "begin", "time": "2026-01-01T00:00:00+00:00", "run": "ghost", "key": OTHER_KEY}
