"""The former verifier, a second opinion (test_verifier.py). It does not see: settlements that are made twice, quotas,
home orders, kinds of events, times, ledgers of runs."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from epsilons.accounting.filter import ORDERS
from epsilons.core.mechanism import IntArray
from epsilons.errors import RegistryError
from epsilons.registry import Table, databases
from epsilons.registry.cohorts import EMPTY, known, page_of
from epsilons.registry.databases import PAGE, Database, unpacked
from epsilons.registry.people import WITHDRAWN
from epsilons.registry.rosters import NO_PERSON, Pages, Rows, caps, digest
from epsilons.registry.runs import ENDED, StoredRoster, StoredRun

#: Events by which people state something.
STATEMENTS = ("enrol", "change", "withdraw")


@dataclass(frozen=True)
class Verdict:
    """What a verification found.

    people, runs, events  numbers of them
    wrong                 people for whom something else is stored than the events say
    over                  people who were charged beyond their lifetime budget, at the moment of a reservation
    """

    people: int
    runs: int
    events: int
    wrong: int
    over: int

    @property
    def is_right(self) -> bool:
        return self.wrong == 0 and self.over == 0


def verify(database: Database) -> Verdict:
    """Replay the registry, a page of people at a time. Raises RegistryError where events or runs were altered."""
    events = list(checked(database))
    said = {name: value for name, value in events[0].items() if name not in ("kind", "time")} if events else {}
    changed = [("schema", e["schema"]) for e in events if e["kind"] == "migrate"]
    said |= dict(changed + [("refund", json.dumps(e["refund"])) for e in events if e["kind"] == "limit"])
    if said != dict(database.run("select name, value from fact")):
        raise RegistryError("The registry was altered: its facts are not those that it was made with.")
    runs = {run.id: run for run in stored_runs(database)}
    wishes = _wishes(database, events)
    _check_runs(database, events, runs)
    _check_statements(database, events)
    people = wrong = over = 0
    for page in _pages(database):
        replay = _Replay(wishes)
        for number, event in enumerate(events, 1):
            replay.apply(event, runs, _rows(database, number, event, page))
        of_page = _compare(database, page, replay)
        people, wrong, over = (
            people + int((replay.wish != EMPTY).sum()),
            wrong + of_page,
            over + int(replay.was_over.sum()),
        )
    return Verdict(people, len(runs), len(events), wrong, over)


def checked(database: Database) -> Iterator[dict[str, Any]]:
    """All events, from the first. Raises RegistryError where one was changed, removed or added."""
    last, count = databases.BEGINNING, 0
    for number, previous, stored, body in database.run(
        "select number, previous, hash, body from event order by number"
    ):
        if number != count + 1 or previous != last or stored != databases._hash(last, body):
            raise RegistryError(f"The registry was altered: event {count + 1:,} is not what was written.")
        last, count = stored, number
        yield json.loads(body)
    if databases.head(database) != (count, last):
        raise RegistryError("The registry was altered: its last events are missing.")


def stored_runs(database: Database) -> list[StoredRun]:
    """All runs, of any schema."""
    return [
        StoredRun(
            *row[:5], Table.from_dict(json.loads(row[5])), tuple(json.loads(row[6])) if row[6] else None, row[7], "", ""
        )
        for row in database.run("select id, state, kind, project, digest, plan, charged, key from run order by id")
    ]


def digest_of(table: Table, roster: Pages, kind: str, project: str) -> str:
    """SHA-256 of all that a reservation is for."""
    parts = [json.dumps(table.to_dict(), sort_keys=True), digest(roster), kind, project]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


class _Replay:
    """The people of one page, event by event."""

    def __init__(self, wishes: IntArray) -> None:
        self._caps = wishes  # (wishes + 1, orders)
        self.wish = np.full(PAGE, EMPTY, dtype=np.int64)
        self.withdrawn = np.zeros(PAGE, dtype=bool)
        self.sums = np.zeros((PAGE, len(ORDERS)), dtype=np.int64)
        self.was_over = np.zeros(PAGE, dtype=bool)

    def apply(self, event: Mapping[str, Any], runs: Mapping[str, StoredRun], rows: Rows | None) -> None:
        if rows is None:
            return
        here = rows != NO_PERSON
        if event["kind"] in STATEMENTS:
            self.withdrawn[here] = rows[here] == WITHDRAWN
            stays = here & (rows != WITHDRAWN)
            self.wish[stays] = rows[stays]
        elif event["kind"] == "reserve":
            self.sums[here] += runs[event["run"]].table.costs()[rows[here]]
            fits = (self.sums <= self._caps[self.wish]).any(axis=1) & ~self.withdrawn & (self.wish != EMPTY)
            self.was_over |= here & ~fits
        elif event["kind"] == "settle":
            table = runs[event["run"]].table
            self.sums[here] += (table.costs(tuple(event["charged"])) - table.costs())[rows[here]]
        elif event["kind"] == "cancel":
            self.sums[here] -= runs[event["run"]].table.costs()[rows[here]]


def _rows(database: Database, number: int, event: Mapping[str, Any], page: int) -> Rows | None:
    """Who of this page an event is about; None if no person."""
    if event["kind"] in STATEMENTS:
        found = database.run("select rows from statement where event = %s and page = %s", number, page)
    elif event["kind"] in ("reserve", "settle", "cancel"):
        found = database.run("select rows from part where run = %s and page = %s", event["run"], page)
    else:
        return None
    return unpacked(found[0][0], np.int16) if found else None


def _compare(database: Database, page: int, replay: _Replay) -> int:
    """How many people of this page have other sums, another wish or another state than the replay."""
    cohorts = page_of(database, page)
    distinct, which = np.unique(cohorts, return_inverse=True)
    rows = known(database, distinct[distinct != EMPTY])
    if len(rows.ids) != (distinct != EMPTY).sum():
        return PAGE
    first = 1 if distinct[0] == EMPTY else 0  # a row for those who are not enrolled
    empty = np.zeros((first, len(ORDERS)), dtype=np.int64)
    sums = np.concatenate([empty, rows.sums])[which]
    wish = np.concatenate([np.full(first, EMPTY), rows.wishes])[which]
    withdrawn = np.concatenate([np.zeros(first, dtype=bool), rows.withdrawn])[which]
    same = (sums == replay.sums).all(axis=1) & (wish == replay.wish) & (withdrawn == replay.withdrawn)
    return int((~same).sum())


def _pages(database: Database) -> Iterator[int]:
    numbers = {number for (number,) in database.run("select number from page")}
    stated = {number for (number,) in database.run("select distinct page from statement")}
    yield from sorted(numbers | stated)


def _wishes(database: Database, events: Sequence[Mapping[str, Any]]) -> IntArray:
    """(wishes + 1, orders) caps by number of the wish. Raises RegistryError if they are not what the events say."""
    said = [(e["id"], e["epsilon"], e["delta"], e["home"]) for e in events if e["kind"] == "wish"]
    stored = database.run("select id, epsilon, delta, home from wish order by id")
    if said != [(i, epsilon, delta, float(ORDERS[home])) for i, epsilon, delta, home in stored]:
        raise RegistryError("The registry was altered: the wishes are not what its events say.")
    limits = np.full((len(stored) + 1, len(ORDERS)), -1, dtype=np.int64)
    if stored:
        columns = np.array(stored, dtype=np.float64)
        limits[columns[:, 0].astype(int)] = caps(columns[:, 1], columns[:, 2], columns[:, 3].astype(np.int64))
    return limits


def _check_runs(database: Database, events: Sequence[Mapping[str, Any]], runs: Mapping[str, StoredRun]) -> None:
    said: dict[str, dict[str, Any]] = {}
    for event in events:
        if event["kind"] == "reserve":
            said[event["run"]] = {"digest": event["digest"], "charged": None, "key": None}
        elif event["kind"] == "begin":
            said[event["run"]]["key"] = event["key"]
        elif event["kind"] == "settle":
            said[event["run"]]["charged"] = tuple(event["charged"])
        elif event["kind"] == "cancel":
            said[event["run"]]["charged"] = (0,) * len(runs[event["run"]].table.steps)
    if set(said) != set(runs):
        raise RegistryError("The registry was altered: its runs are not those of its events.")
    for name, run in runs.items():
        now = digest_of(run.table, StoredRoster(database, name), run.kind, run.project)
        stored = {"digest": now, "charged": run.charged, "key": run.key}
        if stored != said[name] or now != run.digest or (run.state in ENDED) != (run.charged is not None):
            raise RegistryError(f"The registry was altered: the run {name!r} is not what its events say.")
    quotas = {event["project"]: event["share"] for event in events if event["kind"] == "quota"}
    if quotas != dict(database.run("select project, share from quota")):
        raise RegistryError("The registry was altered: the quotas are not what its events say.")


def _check_statements(database: Database, events: Sequence[Mapping[str, Any]]) -> None:
    said = {number for number, event in enumerate(events, 1) if event["kind"] in STATEMENTS}
    if said != {number for (number,) in database.run("select distinct event from statement")}:
        raise RegistryError("The registry was altered: what people stated is not what its events say.")
    enrolled = 0
    for number in sorted(said):
        event, known_rows = events[number - 1], hashlib.sha256()
        for page, rows in database.run("select page, rows from statement where event = %s order by page", number):
            known_rows.update(int(page).to_bytes(8, "little") + unpacked(rows, np.int16).tobytes())
        if known_rows.hexdigest() != event["digest"]:
            raise RegistryError(f"The registry was altered: event {number:,} is not what people stated.")
        if event["kind"] == "enrol":
            enrolled += event["people"]
            _check_names(database, event)
    if database.run("select count(*) from person") != [(enrolled,)]:
        raise RegistryError("The registry was altered: there are other people than were enrolled.")


def _check_names(database: Database, event: Mapping[str, Any]) -> None:
    names = hashlib.sha256()
    first, last = event["first"], event["first"] + event["people"]
    rows = database.run("select pseudonym from person where number >= %s and number < %s order by number", first, last)
    for (pseudonym,) in rows:
        names.update(bytes(pseudonym))
    if names.hexdigest() != event["names"]:
        raise RegistryError("The registry was altered: the pseudonyms are not those that were enrolled.")
