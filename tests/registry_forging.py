"""Forges registries: events with valid hashes, and all tables that follow from them, written without the library.

A `Draft` holds the raw tables. It appends events, legal or not, and `rebuild` makes every other table and the pages
agree with them, so that only the meaning is wrong.
"""

from __future__ import annotations

import copy
import hashlib
import json
import random
import re
import sqlite3
import struct
import zlib
from datetime import UTC, datetime
from typing import Any

import registry_twin as twin
from registry_twin import PAGE, Tables

Event = dict[str, Any]

#: Kinds of events that can be made to be legal, in each form of a registry.
OLD_KINDS = ("wish", "enrol", "change", "withdraw", "quota", "reserve", "begin", "settle")
NEW_KINDS = (*OLD_KINDS, "limit", "cancel", "approve", "quarantine")
PROJECTS = ("alpha", "beta", "")


def packed(values: dict[int, int], letter: str, level: int = 1) -> bytes:
    """A page with these values at these places."""
    nobody = twin.NOBODY if letter == "h" else 0
    rows = [nobody] * PAGE
    for place, value in values.items():
        rows[place] = value
    return zlib.compress(struct.pack(f"<{PAGE}{letter}", *rows), level)


def pages(people: dict[int, int], letter: str = "h") -> dict[int, bytes]:
    """page -> bytes, of number -> value."""
    found: dict[int, dict[int, int]] = {}
    for number, value in people.items():
        found.setdefault(number // PAGE, {})[number % PAGE] = value
    return {page: packed(found[page], letter) for page in sorted(found)}


def digest(of_pages: dict[int, bytes]) -> str:
    known = hashlib.sha256()
    for page in sorted(of_pages):
        known.update(page.to_bytes(8, "little") + zlib.decompress(of_pages[page]))
    return known.hexdigest()


def sha(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def some_hash(rng: random.Random) -> str:
    return f"{rng.getrandbits(256):064x}"


class Draft:
    """Raw tables that are written. forced: events whose effect counts although they are illegal."""

    def __init__(self, tables: Tables, rng: random.Random, columns: dict[str, list[str]]) -> None:
        self.tables: Tables = {name: [dict(row) for row in rows] for name, rows in tables.items()}
        self.rng, self.columns, self.forced = rng, columns, set[int]()
        self._state: twin.State | None = None

    def copy(self) -> Draft:
        made = Draft(self.tables, self.rng, self.columns)
        made.forced = set(self.forced)
        return made

    @property
    def state(self) -> twin.State:
        """What the events say now."""
        if self._state is None:
            self._state = twin.replayed(self.tables, forced=frozenset(self.forced))
        return self._state

    @property
    def is_new(self) -> bool:
        return self.state.is_new

    @property
    def kinds(self) -> tuple[str, ...]:
        return NEW_KINDS if self.is_new else OLD_KINDS

    @property
    def events(self) -> list[dict[str, Any]]:
        return self.tables["event"]

    @property
    def next(self) -> int:
        return len(self.events) + 1

    @property
    def time(self) -> str:
        """Of the last event, if it is one."""
        try:
            return str(json.loads(self.events[-1]["body"])["time"])
        except (ValueError, KeyError, TypeError, IndexError, RecursionError):
            return datetime.now(UTC).isoformat(timespec="seconds")

    def event(self, number: int) -> Event:
        found: Event = json.loads(self.events[number - 1]["body"])
        return found

    def insert(self, table: str, **values: Any) -> dict[str, Any]:
        row = {name: values.get(name) for name in self.columns[table]}
        self.tables[table].append(row)
        return row

    def run_row(self, name: Any) -> dict[str, Any]:
        return next(row for row in self.tables["run"] if row["id"] == name)

    # -- events

    def append(self, event: Event | str, is_forced: bool = False) -> int:
        """Add an event, or a body in any form, with the right hash."""
        body = event if isinstance(event, str) else json.dumps({"time": self.time, **event}, sort_keys=True)
        number, last = self.next, self.events[-1]["hash"] if self.events else "0" * 64
        self.insert("event", number=number, previous=last, hash=sha(last + body), body=body)
        self.tables["head"] = [{"one": 1, "number": number, "hash": self.events[-1]["hash"]}]
        if is_forced:
            self.forced.add(number)
        self._state = None
        return number

    def write(self, number: int, event: Event | str) -> None:
        """Replace an event; call `chain` afterwards."""
        self.events[number - 1]["body"] = event if isinstance(event, str) else json.dumps(event, sort_keys=True)
        self._state = None

    def chain(self) -> None:
        """Number all events anew, with right hashes."""
        last = "0" * 64
        for number, row in enumerate(self.events, 1):
            row["number"], row["previous"], row["hash"] = number, last, sha(last + row["body"])
            last = row["hash"]
        self.tables["head"] = [{"one": 1, "number": len(self.events), "hash": last}]
        self._state = None

    def rebuild(self) -> Draft:
        """Make all other tables what the events say, with the effects of those in `forced`."""
        self._state = None
        state = self.state
        for name, wanted in twin.expected(state).items():
            rows = [dict(zip(self.columns[name], (key, *others), strict=True)) for key, others in wanted.items()]
            self.tables[name] = rows
        for row in self.tables["run"]:
            if isinstance(row["id"], str) and row["id"] in state.runs:
                wanted_row = twin.run_row(state.runs[row["id"]])
                row |= {name: value for name, value in wanted_row.items() if name in row}
        self.store_people(state)
        return self

    def store_people(self, state: twin.State) -> None:
        """Pages and cohorts."""
        ids = {(row["wish"], row["withdrawn"], row["sums"]): row["id"] for row in self.tables["cohort"]}
        stored: dict[int, int] = {}
        for number, person in enumerate(state.people):
            try:
                key = person.wish, int(person.is_withdrawn), struct.pack("<16q", *person.sums)
            except struct.error:  # a sum beyond 64 bits cannot be stored
                key = person.wish, int(person.is_withdrawn), bytes(128)
            if key not in ids:
                ids[key] = max(ids.values(), default=0) + 1
                self.insert("cohort", id=ids[key], wish=key[0], withdrawn=key[1], sums=key[2])
            stored[number] = ids[key]
        wanted = {
            number // PAGE: {n % PAGE: c for n, c in stored.items() if n // PAGE == number // PAGE}
            for number in range(0, len(stored), PAGE)
        }
        before = {row["number"]: row["cohorts"] for row in self.tables["page"]}
        self.tables["page"] = []
        for page, values in wanted.items():
            self.insert("page", number=page, cohorts=self._page(before.get(page), values))

    @staticmethod
    def _page(before: Any, values: dict[int, int]) -> bytes:
        try:
            if twin.people_in(before, "i") == values:
                return bytes(before)
        except (twin.IllegalError, twin.UnclearError, TypeError):
            pass
        return packed(values, "i")

    # -- statements and rosters, with their rows

    def state_people(self, kind: str, people: dict[int, int], number: int | None = None, **fields: Any) -> Event:
        """An event in which these people state something: number -> wish, or 0. Its statement is stored."""
        of_pages = pages(people)
        for page, rows in of_pages.items():
            self.insert("statement", event=number or self.next, page=page, rows=rows)
        return {"kind": kind, "digest": digest(of_pages), "people": len(people), **fields}

    def new_run(
        self, name: str, people: dict[int, int], plan: Any, project: str = "alpha", what: str = "train"
    ) -> Event:
        """The reservation of a run whose row and parts are stored. plan: JSON values, or a text."""
        text = plan if isinstance(plan, str) else json.dumps(plan, sort_keys=True)
        of_pages = pages(people)
        whole = sha(json.dumps([text, digest(of_pages), what, project]))
        values = {"id": name, "state": "reserved", "kind": what, "project": project, "digest": whole, "plan": text}
        self.insert("run", **values)
        for page, rows in of_pages.items():
            self.insert("part", run=name, page=page, rows=rows)
        return {"kind": "reserve", "run": name, "digest": whole, "what": what, "project": project}

    # -- legal events

    def plan(self, rows: int | None = None, noise: float | None = None) -> dict[str, Any]:
        rng, phases = self.rng, self.rng.choice([1, 1, 2])
        rows = rows or rng.choice([1, 2, 3])
        noise = noise or rng.choice([30.0, 60.0, 90.0])
        return {
            "rates": [[rng.choice([0.01, 0.02]) for _ in range(rows)] for _ in range(phases)],
            "noises": [[noise * (1 + row / 2) for row in range(rows)] for _ in range(phases)],
            "steps": [rng.choice([50, 100, 200]) for _ in range(phases)],
        }

    def sample(self, people: list[int], most: int = 12) -> list[int]:
        return sorted(self.rng.sample(people, min(len(people), self.rng.randint(1, most))))

    @property
    def present(self) -> list[int]:
        """Numbers of people who did not withdraw."""
        return [i for i, person in enumerate(self.state.people) if not person.is_withdrawn]

    def names_of(self, *states: str) -> list[str]:
        return [name for name, run in self.state.runs.items() if run.state in states]

    def name(self) -> str:
        return f"run-{self.rng.getrandbits(40):x}"

    def a_run(self, *states: str) -> str:
        """A run in one of these states. One is made, with events of its own, if there is none."""
        found = self.names_of(*states)
        if found:
            return self.rng.choice(found)
        self.append(self.legal("reserve"))
        name: str = self.event(len(self.events))["run"]
        if "reserved" not in states:
            self.append(self.beginning(name))
        if states == ("settled",):
            self.append(self.settlement(name))
        return name

    def beginning(self, name: str) -> Event:
        run, key = self.state.runs[name], some_hash(self.rng)
        event: Event = {"kind": "begin", "run": name, "key": key}
        if self.is_new:
            is_first = run.state == "reserved"
            event |= {"previous": None if is_first else run.keys[-1]}
            event |= {"ledger": some_hash(self.rng) if is_first or run.begun is None else run.begun}
        return event

    def settlement(self, name: str, charged: list[int] | None = None) -> Event:
        run, rng = self.state.runs[name], self.rng
        if charged is None:
            least = 1 - self.state.refund
            charged = [rng.randint(-int(-n * least // 1), n) for n in run.plan.steps]
        event: Event = {"kind": "settle", "run": name, "charged": charged, "ledger": some_hash(rng)}
        return event | ({"key": run.keys[-1] if run.keys else some_hash(rng)} if self.is_new else {})

    def new_wish(self, home: int | None = None) -> Event:
        while True:
            epsilon, delta = round(self.rng.uniform(0.8, 6.0), 3), self.rng.choice([1e-5, 1e-6])
            order = self.rng.randrange(8, 14) if home is None else home
            if (epsilon, delta, order) not in self.state.wishes:
                return {
                    "kind": "wish",
                    "id": len(self.state.wishes) + 1,
                    "epsilon": epsilon,
                    "delta": delta,
                    "home": float(twin.ORDERS[order]),
                }

    def legal(self, kind: str) -> Event:
        """An event of this kind that may come next, with its rows. It is not appended."""
        rng = self.rng
        if kind == "wish":
            return self.new_wish()
        if kind == "quota":
            return {"kind": "quota", "project": rng.choice(PROJECTS), "share": round(rng.uniform(0.3, 1), 2)}
        if kind == "limit":
            return {"kind": "limit", "refund": rng.choice([0.25, 0.5, 1.0])}
        if kind == "enrol":
            return self.enrolment(rng.randint(1, 4))
        if kind == "change":
            who = self.sample(list(range(len(self.state.people))), 4)
            homes = {i: self.state.people[i].home for i in who}
            wishes = {h: [j for j, w in enumerate(self.state.wishes, 1) if w[2] == h] for h in homes.values()}
            return self.state_people("change", {i: rng.choice(wishes[homes[i]]) for i in who})
        if kind == "withdraw":
            return self.state_people("withdraw", dict.fromkeys(self.sample(list(range(len(self.state.people))), 3), 0))
        if kind == "reserve":
            return self.reservation()
        if kind == "begin":
            return self.beginning(self.a_run("reserved", "running") if rng.random() < 0.7 else self.a_run("reserved"))
        if kind == "settle":
            return self.settlement(self.a_run("running"))
        if kind == "cancel":
            name = self.a_run("reserved")
            zeros = [0] * len(self.state.runs[name].plan.steps)
            if self.state.refund < 1:
                self.append({"kind": "approve", "run": name, "charged": zeros, "ledger": ""})
            return {"kind": "cancel", "run": name}
        if kind == "approve":
            name = self.a_run("reserved", "running")
            charged = [rng.randint(0, n) for n in self.state.runs[name].plan.steps]
            return {"kind": "approve", "run": name, "charged": charged, "ledger": some_hash(rng)}
        if kind == "quarantine":
            if not self.state.illegal:
                self.append({"kind": "change", "digest": some_hash(rng), "people": 3})
            return {"kind": "quarantine", "events": sorted(self.state.illegal), "reason": "written by a stranger"}
        raise AssertionError(kind)

    def enrolment(self, count: int, names: list[bytes] | None = None) -> Event:
        first, rng = len(self.state.people), self.rng
        names = names or [rng.randbytes(16) for _ in range(count)]
        for i, name in enumerate(names):
            self.insert("person", pseudonym=name, number=first + i)
        wishes = {first + i: rng.randint(1, len(self.state.wishes)) for i in range(count)}
        return self.state_people("enrol", wishes, first=first, names=hashlib.sha256(b"".join(names)).hexdigest())

    def reservation(self, people: list[int] | None = None, noise: float | None = None) -> Event:
        plan = self.plan(noise=noise)
        who = self.sample(self.present) if people is None else people
        rows = {i: self.rng.randrange(len(plan["rates"][0])) for i in who}
        return self.new_run(self.name(), rows, plan, self.rng.choice(PROJECTS))


# -- registries of the first form --------------------------------------------------------------------------------

#: The tables of schema 1, as they were.
OLD_TABLES = """
create table fact (name text primary key, value text not null);
create table wish (
  id integer primary key, epsilon double precision not null, delta double precision not null, home integer not null,
  unique (epsilon, delta, home));
create table cohort (
  id integer primary key, wish integer not null, withdrawn integer not null, sums BLOB not null,
  unique (wish, withdrawn, sums));
create table person (pseudonym BLOB primary key, number integer not null);
create table page (number integer primary key, cohorts BLOB not null);
create table quota (project text primary key, share double precision not null);
create table run (
  id text primary key, state text not null, kind text not null, project text not null, digest text not null,
  plan text not null, charged text, key text, ledger text);
create table part (run text not null, page integer not null, rows BLOB not null, primary key (run, page));
create table statement (event integer not null, page integer not null, rows BLOB not null, primary key (event, page));
create table event (number integer primary key, previous text not null, hash text not null, body text not null);
create table head (one integer primary key, number integer not null, hash text not null);
"""
OLD_COLUMNS = {
    name: re.findall(r"(?:^|,|\()\s*(\w+) (?:text|integer|double|BLOB)", body)
    for name, body in re.findall(r"create table (\w+) \((.*?)\);\n", OLD_TABLES.replace("\n  ", " "))
}


def old_registry(connection: Any, pepper: bytes, ids: list[str], rng: random.Random, events: int = 8) -> Draft:
    """Write a registry of schema 1 with these people into an empty database: sqlite3 or psycopg."""
    is_sqlite = isinstance(connection, sqlite3.Connection)
    for statement in OLD_TABLES.replace("BLOB", "blob" if is_sqlite else "bytea").split(";\n"):
        if statement.strip():
            connection.execute(statement)
    commitment = hashlib.blake2b(b"pepper", key=pepper, digest_size=32).hexdigest()
    made = Draft({name: [] for name in OLD_COLUMNS}, rng, OLD_COLUMNS)
    made.append({"kind": "create", "schema": "1", "id": f"{rng.getrandbits(128):032x}", "pepper": commitment})
    for _ in range(4):
        made.append(made.new_wish())
    names = [hashlib.blake2b(one.encode(), key=pepper, digest_size=16).digest() for one in ids]
    made.append(made.enrolment(len(ids), names))
    while events > 0:
        before, draft = made, made.copy()
        draft.append(draft.legal(rng.choice(OLD_KINDS)))
        made = draft if not draft.state.illegal and not draft.state.unclear else before
        events -= 1
    made.rebuild()
    for name, rows in made.tables.items():
        for row in rows:
            marks = ", ".join(["?" if is_sqlite else "%s"] * len(row))
            connection.execute(f"insert into {name} values ({marks})", tuple(row.values()))
    return made


def copied(tables: Tables) -> Tables:
    return copy.deepcopy(tables)
