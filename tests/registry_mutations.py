"""Thousands of altered registries, and whether each is refused by the database, found by `verify`, or legal.

Mutation number N is always the same one: N // EACH is the seed of a history made through the public interface, and N
the seed of what is changed in it, in the raw tables. On SQLite the owner of the file writes it, without triggers. On
PostgreSQL the owner with or without triggers, an officer, a runner, a regulator or a subject tries to, in SQL.

A `Draft` holds the raw tables. It appends events, legal or not, with right hashes, and `rebuild` makes every other
table and the pages agree with them, so that only the meaning is wrong. `registry_twin` says what is legal. `verify` may
say "right" about that and about nothing else; verify, show, export and compare end with a verdict or an error of this
library on any bytes.

Before events had a state machine, `verify` said "right" about 263 of 2,000 altered files, and
verify, show or export ended with a traceback on 273. On PostgreSQL it was 82 and 91 of 2,000, among them 15
and 17 that an officer or a runner wrote.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import json
import os
import random
import shutil
import signal
import sqlite3
import struct
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

import registry_twin as twin
from epsilons.errors import EpsilonsError
from epsilons.registry import Registry, Roster, Table, evidence
from epsilons.registry.people import roles_script
from registries import downgrade
from registry_twin import PAGE, Tables

Event = dict[str, Any]

#: Kinds of events that can be made to be legal.
KINDS = ("wish", "enrol", "change", "withdraw", "quota", "reserve", "begin", "settle")
KINDS += ("limit", "cancel", "approve", "quarantine")
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
        is_first = run.state == "reserved"
        ledger = some_hash(self.rng) if is_first or run.begun is None else run.begun
        return {
            "kind": "begin",
            "run": name,
            "key": key,
            "previous": None if is_first else run.keys[-1],
            "ledger": ledger,
        }

    def settlement(self, name: str, charged: list[int] | None = None) -> Event:
        run, rng = self.state.runs[name], self.rng
        if charged is None:
            least = 1 - self.state.refund
            charged = [rng.randint(-int(-n * least // 1), n) for n in run.plan.steps]
        key = run.keys[-1] if run.keys else some_hash(rng)
        return {"kind": "settle", "run": name, "charged": charged, "ledger": some_hash(rng), "key": key}

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


def copied(tables: Tables) -> Tables:
    return copy.deepcopy(tables)


# -- mutations -------------------------------------------------------------------------------------------------------


#: Mutations of one history.
EACH = 50
#: Seconds that all calls about one registry may take together.
PATIENCE = 20
#: Bytes beyond those of the process at its start. A verifier that unpacks a bomb needs more.
MEMORY = 900 * 2**20

WEIRD: list[Any] = [
    *(None, True, False, 0, 1, -1, 2, 7, 1.5, -0.0, 0.5, 1e-300, 1e308, 2**31, 2**53, 2**63, 10**30, 10**400),
    *("", " ", "x", "1", "3", "null", "\ud800", "a\nb", "\x00", "é" * 3, "x" * 201, "0" * 64, "F" * 64, "f" * 64),
    *([], [0], [1, 2], ["x"], [[]], {}, {"a": 1}, [True], [1.0], [-1], [10**30], [None]),
]
CELLS: list[Any] = [
    *(None, 0, 1, -1, 2, 3, 1.5, 0.9, 2**31, 2**62, -(2**62), "", "x", "1", "reserved", "running", "settled"),
    *("cancelled", "[0]", "[]", "{}", "null", "[1, 2]", "3", "2", b"", b"\x00", b"x" * 16, b"\xff" * 128, bytes(128)),
    *("f" * 64, "alpha", "\x00", "NaN", "[NaN]", "[1e999]", "9" * 5000, "[" * 20000, "é\u202e"),
]


class NothingToChange(Exception):
    """This history has nothing that this mutation could change."""


Mutation = Callable[[Draft], None]
MUTATIONS: dict[str, tuple[Mutation, int]] = {}


def mutation(weight: int = 1) -> Callable[[Mutation], Mutation]:
    def add(function: Mutation) -> Mutation:
        MUTATIONS[function.__name__] = function, weight
        return function

    return add


def pick(draft: Draft, values: list[Any]) -> Any:
    if not values:
        raise NothingToChange
    return draft.rng.choice(values)


# -- events that are appended ------------------------------------------------------------------------------------


@mutation(4)
def a_legal_event(draft: Draft) -> None:
    draft.append(draft.legal(draft.rng.choice(KINDS)))
    draft.rebuild()


@mutation(3)
def several_legal_events(draft: Draft) -> None:
    for _ in range(draft.rng.randint(2, 5)):
        draft.append(draft.legal(draft.rng.choice(KINDS)))
    draft.rebuild()


@mutation(1)
def an_event_without_its_tables(draft: Draft) -> None:
    before = copied(draft.tables)
    draft.append(draft.legal(draft.rng.choice(KINDS)))
    for name in draft.tables:
        if name not in ("event", "head"):
            draft.tables[name] = before[name]


@mutation(8)
def a_field_of_a_new_event(draft: Draft) -> None:
    event = draft.legal(draft.rng.choice(KINDS))
    change_field(draft, event)
    draft.append(body_of(draft, event), is_forced=draft.rng.random() < 0.7)
    draft.rebuild()


@mutation(6)
def a_field_of_an_old_event(draft: Draft) -> None:
    number = draft.rng.randint(1, len(draft.events))
    event = draft.event(number)
    change_field(draft, event)
    draft.write(number, body_of(draft, event))
    draft.chain()
    if draft.rng.random() < 0.5:
        draft.forced.add(number)
    draft.rebuild()


def change_field(draft: Draft, event: Event) -> None:
    rng, names = draft.rng, [*event, "time", "kind"]
    name = rng.choice(names)
    way = rng.randrange(6)
    if way == 0 and name in event:
        del event[name]
    elif way == 1:
        event[rng.choice(["extra", "Kind", "key", "previous", "run", "ledger", "ids", ""])] = rng.choice(WEIRD)
    elif way == 2:
        event[name] = a_neighbour(draft, event.get(name))
    else:
        event[name] = rng.choice(WEIRD)


def a_neighbour(draft: Draft, value: Any) -> Any:
    """Almost this value."""
    rng = draft.rng
    if isinstance(value, bool):
        return int(value)
    if isinstance(value, int):
        return rng.choice([value + 1, value - 1, float(value), str(value), -value])
    if isinstance(value, float):
        return rng.choice([value * 2, value / 2, -value, np.nextafter(value, 9).item(), 1 - value, int(value)])
    if isinstance(value, str):
        options = [value.upper(), value + " ", value[:-1], value[::-1], value + "\u200b", value.replace("+00:00", "Z")]
        return rng.choice([*options, *(row["id"] for row in draft.tables["run"]), *PLACES])
    if isinstance(value, list):
        return rng.choice([value[:-1], [*value, 0], [n + 1 if isinstance(n, int) else n for n in value], value[::-1]])
    return rng.choice([0, "", some_hash(rng)])


PLACES = ("alpha", "beta", "train", "running")


def body_of(draft: Draft, event: Event) -> str:
    return json.dumps({"time": draft.time, **event} if draft.rng.random() < 0.9 else event, sort_keys=True)


@mutation(4)
def a_body_in_another_form(draft: Draft) -> None:
    """Either of a new event or of an old one; the meaning stays the same for a parser that is not strict."""
    rng = draft.rng
    is_appended = rng.random() < 0.6
    if is_appended:
        event = {"time": draft.time, **draft.legal(rng.choice(KINDS))}
    else:
        number = rng.randint(1, len(draft.events))
        event = draft.event(number)
    text = json.dumps(event, sort_keys=True)
    name, value = rng.choice(sorted(event.items(), key=lambda pair: pair[0]))
    shown = json.dumps(value)
    body = rng.choice(
        [
            json.dumps(event),
            json.dumps(event, sort_keys=True, separators=(",", ":")),
            json.dumps(event, sort_keys=True, indent=1),
            text + "\n",
            " " + text,
            "\ufeff" + text,
            text[:-1] + f', "{name}": {shown}' + "}",
            "{" + f'"{name}": {json.dumps(rng.choice(WEIRD))}, ' + text[1:],
            text.replace("kind", "\\u006bind", 1),
            text.replace("time", "t\\u0069me", 1),
            text.replace("e", "\\u0065", 1),
            text.replace(": 1", ": 1.0", 1),
            text.replace(": 1", ": 1e0", 1),
            text.replace(": 0", ": -0", 1),
            text.replace(": ", ":\t", 1),
            text[:-1],
            text + text,
            "[" + text + "]",
            json.dumps(text),
            text[:-1] + ', "x": NaN}',
            text[:-1] + ', "x": 1e999}',
            text[:-1] + ', "x": ' + "[" * 3000 + "]" * 3000 + "}",
            text[:-1] + ', "x": ' + "[" * 200000 + "]" * 200000 + "}",
            text[:-1] + ', "x": ' + "9" * 5000 + "}",
            text[:-1] + ', "x": "' + "y" * 70000 + '"}',
            "[" * 100000,
            "",
            "null",
            "7",
            "{}",
            '{"kind": null}',
            '{"kind": "settle"}',
            "\x00",
            "'" + text + "'",
        ]
    )
    if is_appended:
        draft.append(body, is_forced=rng.random() < 0.5)
    else:
        draft.write(number, body)
        draft.chain()
    draft.rebuild()


@mutation(4)
def an_event_is_replayed(draft: Draft) -> None:
    rng = draft.rng
    number = rng.randint(1, len(draft.events))
    event = draft.event(number)
    if rng.random() < 0.5:
        event.pop("time", None)
    again = draft.next
    for row in [row for row in draft.tables["statement"] if row["event"] == number]:
        draft.insert("statement", event=again, page=row["page"], rows=row["rows"])
    draft.append({"time": draft.time, **event}, is_forced=True)
    if rng.random() < 0.8:
        draft.rebuild()


@mutation(3)
def events_are_reordered(draft: Draft) -> None:
    rng, events = draft.rng, draft.events
    i, j = rng.randrange(len(events)), rng.randrange(len(events))
    if i == j:
        raise NothingToChange
    events[i]["body"], events[j]["body"] = events[j]["body"], events[i]["body"]
    for row in draft.tables["statement"]:
        row["event"] = {i + 1: j + 1, j + 1: i + 1}.get(row["event"], row["event"])
    if rng.random() < 0.8:
        draft.chain()
    if rng.random() < 0.8:
        draft.rebuild()


@mutation(3)
def an_event_is_deleted(draft: Draft) -> None:
    rng, events = draft.rng, draft.events
    number = rng.randint(1, len(events))
    event = draft.event(number)
    del events[number - 1]
    if rng.random() < 0.2:
        return
    moved = []
    for row in draft.tables["statement"]:
        if row["event"] != number:
            moved.append({**row, "event": row["event"] - (row["event"] > number)})
    draft.tables["statement"] = moved
    if event["kind"] == "reserve" and rng.random() < 0.7:
        drop_run(draft, event["run"])
    draft.chain()
    if rng.random() < 0.8:
        draft.rebuild()


def drop_run(draft: Draft, name: str) -> None:
    draft.tables["run"] = [row for row in draft.tables["run"] if row["id"] != name]
    draft.tables["part"] = [row for row in draft.tables["part"] if row["run"] != name]


@mutation(3)
def the_registry_is_rolled_back(draft: Draft) -> None:
    """To an earlier head, with everything in agreement: an export elsewhere finds it."""
    keep = draft.rng.randint(1, len(draft.events) - 1) if len(draft.events) > 1 else 1
    del draft.events[keep:]
    draft.chain()
    draft.rebuild()
    people = len(draft.state.people)
    draft.tables["person"] = [row for row in draft.tables["person"] if row["number"] < people]
    draft.tables["statement"] = [row for row in draft.tables["statement"] if row["event"] <= keep]
    for row in list(draft.tables["run"]):
        if row["id"] not in draft.state.runs:
            drop_run(draft, row["id"])
    if draft.rng.random() < 0.3:
        draft.append(draft.legal(draft.rng.choice(KINDS)))
        draft.rebuild()


# -- runs and statements of another form ---------------------------------------------------------------------


def finish(draft: Draft, event: Event) -> None:
    """Append an event with its effect, legal or not, and make everything agree."""
    draft.append(event, is_forced=True)
    draft.rebuild()


@mutation(2)
def a_run_with_strangers(draft: Draft) -> None:
    people = len(draft.state.people)
    stranger = draft.rng.choice([people, people + 5, twin.PAGE - 1, twin.PAGE, 10 * twin.PAGE])
    finish(draft, draft.reservation([*draft.sample(draft.present, 3), stranger], noise=90.0))


@mutation(2)
def a_roster_of_another_form(draft: Draft) -> None:
    rng, plan = draft.rng, draft.plan(rows=2, noise=90.0)
    people = dict.fromkeys(draft.sample(draft.present), 0)
    some = next(iter(people), 0)
    name = draft.name()
    rows = rng.choice([{**people, some: 2}, {**people, some: -2}, {**people, some: 32767}, {**people, some: -32768}])
    draft.append(draft.new_run(name, rows, plan), is_forced=True)
    draft.rebuild()


@mutation(2)
def a_run_of_nobody(draft: Draft) -> None:
    rng, name = draft.rng, draft.name()
    event = draft.new_run(name, {}, draft.plan())
    if rng.random() < 0.5:
        page = packed({}, "h")
        draft.insert("part", run=name, page=0, rows=page)
        row = draft.run_row(name)
        known = sha("")
        if rng.random() < 0.5:
            known = hashlib.sha256((0).to_bytes(8, "little") + zlib.decompress(page)).hexdigest()
        row["digest"] = event["digest"] = sha(json.dumps([row["plan"], known, event["what"], event["project"]]))
    finish(draft, event)


@mutation(3)
def a_statement_of_another_form(draft: Draft) -> None:
    rng, people, wishes = draft.rng, len(draft.state.people), len(draft.state.wishes)
    kind = rng.choice(["enrol", "change", "withdraw"])
    if kind == "enrol":
        event = draft.enrolment(3)
        way = rng.randrange(5)
        if way == 0:
            event["first"] += rng.choice([1, -1])
        elif way == 1:
            event["names"] = some_hash(rng)
        elif way == 2:
            draft.tables["person"].pop()
        elif way == 3:
            draft.tables["person"][-1]["pseudonym"] = draft.tables["person"][0]["pseudonym"]
        else:
            event["people"] += 1
        finish(draft, event)
        return
    value = 0 if kind == "withdraw" else 1
    wrong = rng.choice([wishes + 1, -2, 32767, 1 - value])
    who = {rng.randrange(people): value, rng.choice([0, people - 1, people, people + 1, twin.PAGE]): wrong}
    finish(draft, draft.state_people(kind, who, people=rng.choice([len(who), len(who), 0, 1, people])))


@mutation(2)
def a_person_is_enrolled_again(draft: Draft) -> None:
    """The statement enrols people who have a number, or the pseudonym is in the list twice."""
    rng = draft.rng
    wishes = dict.fromkeys(draft.sample(list(range(len(draft.state.people))), 3), 1)
    names = {row["number"]: row["pseudonym"] for row in draft.tables["person"]}
    hashed = hashlib.sha256(b"".join(names[i] for i in sorted(wishes))).hexdigest()
    first = rng.choice([min(wishes), len(names)])
    finish(draft, draft.state_people("enrol", wishes, first=first, names=hashed))


@mutation(2)
def a_wish_out_of_range(draft: Draft) -> None:
    rng = draft.rng
    event = draft.new_wish()
    name = rng.choice(["epsilon", "delta", "home", "id"])
    values = {
        "epsilon": [0.0, -1.0, 1e-9, 1000.5, 1e308, 0.01],
        "delta": [0.0, 1.0, 1e-10, -1e-5, 2.0],
        "home": [0.0, 7.0, 1e9, 2.25, -2.0, 97.0],
        "id": [0, 1, event["id"] + 1, -1, 32768],
    }
    event[name] = rng.choice(values[name])
    if rng.random() < 0.2 and draft.state.wishes:
        epsilon, delta, home = rng.choice(draft.state.wishes)
        event |= {"epsilon": epsilon, "delta": delta, "home": float(twin.ORDERS[home])}
    draft.append(event)
    if rng.random() < 0.6:
        home = twin.ORDERS.index(event["home"]) if event["home"] in twin.ORDERS else 3
        draft.rebuild()
        if all(row["id"] != event["id"] for row in draft.tables["wish"]):
            draft.insert("wish", id=event["id"], epsilon=event["epsilon"], delta=event["delta"], home=home)
    else:
        draft.rebuild()


# -- plans and packed pages --------------------------------------------------------------------------------------


@mutation(4)
def a_plan_of_another_form(draft: Draft) -> None:
    rng = draft.rng
    good = {"rates": [[0.01]], "noises": [[90.0]], "steps": [10]}
    plan: Any = rng.choice(
        [
            "{}",
            "[]",
            "null",
            "",
            "7",
            "[" * 100000,
            '{"rates": ' + "[" * 50000 + "]" * 50000 + ', "noises": [[1]], "steps": [1]}',
            '{"noises": [[NaN]], "rates": [[0.01]], "steps": [10]}',
            '{"noises": [[Infinity]], "rates": [[0.01]], "steps": [10]}',
            '{"noises": [[1e999]], "rates": [[0.01]], "steps": [10]}',
            '{"noises": [[90.0]], "rates": [[0.01]], "steps": [10], "steps": [0]}',
            '{"noises": [[90.0]], "rates": [[0.01]], "steps": [' + "9" * 5000 + "]}",
            {**good, "rates": [[-0.01]]},
            {**good, "rates": [[1.5]]},
            {**good, "rates": [["0.01"]]},
            {**good, "rates": [[True]]},
            {**good, "rates": [[None]]},
            {**good, "rates": [[0.01], [0.01]]},
            {**good, "rates": [0.01]},
            {**good, "rates": []},
            {**good, "rates": 0.01},
            {**good, "rates": [[]], "noises": [[]]},
            {**good, "noises": [[0]]},
            {**good, "noises": [[-1.0]]},
            {**good, "noises": [[None]]},
            {**good, "noises": [["inf"]]},
            {**good, "noises": [[90.0, 90.0]]},
            {**good, "noises": [[1e-300]]},
            {**good, "noises": [[10**400]]},
            {**good, "steps": [-1]},
            {**good, "steps": [True]},
            {**good, "steps": [1.0]},
            {**good, "steps": ["10"]},
            {**good, "steps": []},
            {**good, "steps": [10, 10]},
            {**good, "steps": [10**30]},
            {**good, "steps": [10**400]},
            {**good, "steps": [0]},
            {**good, "extra": 1},
            {**good, "rates": [[0.01] * 40000], "noises": [[90.0] * 40000]},
            {**good, "rates": [[0]], "noises": [[1]]},
            {**good, "rates": {"0": [0.01]}},
            {"rates": [[0.01]], "steps": [10]},
        ]
    )
    people = dict.fromkeys(draft.sample(draft.present), 0)
    if not people:
        raise NothingToChange
    name = draft.name()
    event = draft.new_run(name, people, plan)
    draft.append(event, is_forced=rng.random() < 0.5)
    draft.rebuild()
    if rng.random() < 0.4:
        begun = {"kind": "begin", "run": name, "key": some_hash(rng)}
        draft.append(begun | {"previous": None, "ledger": some_hash(rng)})
        draft.run_row(name).update(state="running", key=begun["key"])


@mutation(3)
def packed_bytes_of_another_form(draft: Draft) -> None:
    rng = draft.rng
    table, column, letter = rng.choice([("part", "rows", "h"), ("statement", "rows", "h"), ("page", "cohorts", "i")])
    row = pick(draft, draft.tables[table])
    raw = zlib.decompress(row[column])
    row[column] = rng.choice(
        [
            b"",
            b"\x00",
            raw,
            raw[:50],
            row[column][:-3],
            row[column][3:],
            row[column] + b"tail",
            row[column] + row[column],
            zlib.compress(raw[:-2]),
            zlib.compress(raw[:-1]),
            zlib.compress(raw + b"\xff\xff"),
            zlib.compress(raw * 2),
            zlib.compress(raw, 9),
            zlib.compress(raw, 0),
            zlib.compress(zlib.compress(raw)),
            zlib.compress(b""),
            zlib.compress(bytes(len(raw))),
            zlib.compress(b"\xff" * len(raw)),
            packed({0: 1}, letter),
            bomb(64),
        ]
    )
    if table == "part" and rng.random() < 0.5:  # the digest that such a roster has
        resign(draft, row["run"])


def bomb(size: int) -> bytes:
    """So many MiB of zeros, packed; made from one block, because to pack all of them takes seconds."""
    packer = zlib.compressobj(9, zlib.DEFLATED, -15)
    block = packer.compress(bytes(2**20)) + packer.flush(zlib.Z_FULL_FLUSH)
    checksum = ((size * 2**20) % 65521 << 16) | 1
    return b"\x78\x9c" + block * size + b"\x03\x00" + checksum.to_bytes(4, "big")


def resign(draft: Draft, name: Any) -> None:
    """Give a run the digest that its plan and parts have now, in its row and in its events."""
    known = hashlib.sha256()
    for part in sorted((row for row in draft.tables["part"] if row["run"] == name), key=lambda row: row["page"]):
        unpacker = zlib.decompressobj()
        with contextlib.suppress(zlib.error, TypeError):
            known.update(part["page"].to_bytes(8, "little") + unpacker.decompress(part["rows"], 2**26))
    for row in draft.tables["run"]:
        if row["id"] == name:
            row["digest"] = sha(json.dumps([row["plan"], known.hexdigest(), row["kind"], row["project"]]))
            for number in range(1, len(draft.events) + 1):
                event = draft.event(number)
                if event.get("kind") == "reserve" and event.get("run") == name:
                    draft.write(number, {**event, "digest": row["digest"]})
    draft.chain()


@mutation(3)
def a_roster_is_rewritten(draft: Draft) -> None:
    """People are left out of a run, or moved to another row, with all digests and the whole chain in agreement."""
    rng = draft.rng
    row = pick(draft, draft.tables["part"])
    people = dict(twin.people_in(row["rows"], "h"))
    for place in rng.sample(sorted(people), min(len(people), rng.randint(1, 2))):
        if rng.random() < 0.6:
            del people[place]
        else:
            people[place] = rng.choice([0, 1, 2, 5])
    row["rows"] = packed(people, "h")
    if rng.random() < 0.6:
        resign(draft, row["run"])
    else:
        force(draft, "reserve", row["run"])
    if rng.random() < 0.8:
        draft.rebuild()


def force(draft: Draft, kind: str, name: Any) -> None:
    """The events of this kind about a run count, whatever their digests say."""
    for number in range(1, len(draft.events) + 1):
        event = draft.event(number)
        if event.get("kind") == kind and event.get("run") == name:
            draft.forced.add(number)


@mutation(2)
def a_plan_is_rewritten(draft: Draft) -> None:
    row = pick(draft, draft.tables["run"])
    plan = json.loads(row["plan"])
    plan["noises"] = [[None if s is None else s * 1.5 for s in phase] for phase in plan["noises"]]
    row["plan"] = json.dumps(plan, sort_keys=True)
    if draft.rng.random() < 0.7:
        resign(draft, row["id"])
    if draft.rng.random() < 0.7:
        draft.rebuild()


@mutation(2)
def a_statement_is_rewritten(draft: Draft) -> None:
    rng = draft.rng
    row = pick(draft, draft.tables["statement"])
    people = dict(twin.people_in(row["rows"], "h"))
    place = rng.choice(sorted(people))
    if rng.random() < 0.4:
        del people[place]
    else:
        people[place] = rng.choice([0, 1, 2, len(draft.state.wishes) + 1])
    row["rows"] = packed(people, "h")
    event = draft.event(row["event"])
    if rng.random() < 0.7:
        raw = (row["page"]).to_bytes(8, "little") + zlib.decompress(row["rows"])
        event["digest"] = hashlib.sha256(raw).hexdigest()
        event["people"] = len(people)
        draft.write(row["event"], event)
        draft.chain()
    else:
        draft.forced.add(row["event"])
    if rng.random() < 0.8:
        draft.rebuild()


# -- rows --------------------------------------------------------------------------------------------------------


@mutation(12)
def a_cell(draft: Draft) -> None:
    """Any column of any table becomes something else."""
    rng = draft.rng
    table = pick(draft, [name for name, rows in draft.tables.items() if rows])
    row = rng.choice(draft.tables[table])
    column = rng.choice(draft.columns[table])
    way = rng.randrange(4)
    if way == 0:
        row[column] = rng.choice(draft.tables[table])[column]
    elif way == 1 and isinstance(row[column], (int, float)):
        row[column] = row[column] + rng.choice([1, -1])
    elif way == 1 and isinstance(row[column], (bytes, str)) and row[column]:
        row[column] = row[column][:-1] if rng.random() < 0.5 else row[column] + row[column][:1]
    else:
        row[column] = rng.choice(CELLS)


@mutation(4)
def a_row_is_removed(draft: Draft) -> None:
    table = pick(draft, [name for name, rows in draft.tables.items() if rows])
    del draft.tables[table][draft.rng.randrange(len(draft.tables[table]))]


@mutation(4)
def a_row_is_added(draft: Draft) -> None:
    rng = draft.rng
    table = rng.choice(sorted(draft.tables))
    number, page = rng.choice([0, 1, 10**6, -1]), packed({0: 1}, "h")
    values: dict[str, dict[str, Any]] = {
        "fact": {"name": rng.choice(["refund", "ids", "x"]), "value": rng.choice(["1", "0.5"])},
        "wish": {"id": len(draft.tables["wish"]) + rng.choice([1, 5]), "epsilon": 9.0, "delta": 1e-5, "home": 3},
        "cohort": {"id": 10**6, "wish": 1, "withdrawn": 0, "sums": rng.choice([bytes(128), b"", b"x", bytes(127)])},
        "person": {"pseudonym": rng.randbytes(16), "number": rng.choice([len(draft.tables["person"]), number])},
        "page": {
            "number": rng.choice([1, 5, -1, 10**6]),
            "cohorts": rng.choice([packed({}, "i"), packed({0: 1}, "i")]),
        },
        "quota": {"project": rng.choice(["gamma", "x"]), "share": rng.choice([0.5, 7.0, -1.0])},
        "run": {
            "id": draft.name(),
            "state": rng.choice(["reserved", "running", "settled", "x"]),
            "kind": "train",
            "project": "alpha",
            "digest": some_hash(rng),
            "plan": rng.choice(["{}", json.dumps(draft.plan(), sort_keys=True), "[" * 99999]),
        },
        "part": {"run": rng.choice([*draft.state.runs, "x"]), "page": rng.choice([1, 2, -1]), "rows": page},
        "statement": {"event": rng.randint(1, len(draft.events) + 1), "page": rng.choice([0, 1, 2, -1]), "rows": page},
        "event": {"number": len(draft.events) + 1, "previous": "", "hash": "", "body": "{}"},
        "head": {"one": 2, "number": 1, "hash": "0" * 64},
    }
    draft.insert(table, **values[table])


@mutation(2)
def a_pseudonym_is_replaced(draft: Draft) -> None:
    """The person could be enrolled again, with a fresh budget."""
    row = pick(draft, draft.tables["person"])
    row["pseudonym"] = draft.rng.randbytes(16)
    if draft.rng.random() < 0.5:
        for number in range(1, len(draft.events) + 1):
            event = draft.event(number)
            if event["kind"] == "enrol" and event["first"] <= row["number"] < event["first"] + event["people"]:
                names = {one["number"]: one["pseudonym"] for one in draft.tables["person"]}
                mine = range(event["first"], event["first"] + event["people"])
                event["names"] = hashlib.sha256(b"".join(names[i] for i in mine)).hexdigest()
                draft.write(number, event)
        draft.chain()


@mutation(3)
def sums_are_changed(draft: Draft) -> None:
    rng = draft.rng
    state = draft.state
    if not state.people:
        raise NothingToChange
    for i in rng.sample(range(len(state.people)), min(3, len(state.people))):
        place = rng.randrange(16)
        state.people[i].sums[place] += rng.choice([1, -1, 10**9, -(10**12), -(2**63)])
    draft.store_people(state)


@mutation(2)
def cohorts_are_numbered_anew(draft: Draft) -> None:
    """Legal: pages and cohorts are only a cache, and their numbers mean nothing."""
    shift = draft.rng.choice([1, 100])
    for row in draft.tables["cohort"]:
        row["id"] += shift
    for row in draft.tables["page"]:
        of_page = {place: cohort + shift for place, cohort in twin.people_in(row["cohorts"], "i").items()}
        row["cohorts"] = packed(of_page, "i", 9)


# -- times, quarantines -----------------------------------------------------------------------------------------


@mutation(4)
def a_time(draft: Draft) -> None:
    rng = draft.rng
    now = datetime.now(UTC)
    texts = [
        *("1970-01-01T00:00:00+00:00", "9999-12-31T23:59:59+00:00", "2026-13-01T00:00:00+00:00", "", "now"),
        (now + timedelta(days=3)).isoformat(timespec="seconds"),
        (now - timedelta(days=3)).isoformat(timespec="seconds"),
        now.isoformat(),
        now.isoformat(timespec="seconds").replace("+00:00", "Z"),
        now.isoformat(timespec="seconds").replace("+00:00", "+01:00"),
        now.isoformat(timespec="seconds").replace("T", " "),
        now.isoformat(timespec="seconds").replace("+00:00", ""),
        now.isoformat(timespec="minutes"),
        (now + timedelta(hours=2)).isoformat(timespec="seconds"),
        (now - timedelta(hours=5)).isoformat(timespec="seconds"),
    ]
    time: Any = rng.choice([*texts, 0, None, now.timestamp()])
    if rng.random() < 0.5:
        draft.append({**draft.legal(rng.choice(KINDS)), "time": time}, is_forced=True)
    else:
        number = rng.randint(1, len(draft.events))
        draft.write(number, {**draft.event(number), "time": time})
        draft.chain()
        draft.forced.add(number)
    draft.rebuild()


@mutation(5)
def a_quarantine(draft: Draft) -> None:
    rng = draft.rng
    for _ in range(rng.randint(0, 2)):
        draft.append(
            rng.choice(
                [
                    {"kind": "settle", "run": "nothing", "charged": [0], "ledger": "", "key": some_hash(rng)},
                    {"kind": "cancel", "run": "nothing"},
                    {"kind": "x"},
                    "{}",
                    "not JSON",
                ]
            )
        )
    illegal, every = sorted(draft.state.illegal), range(1, draft.next + 2)
    numbers: Any = rng.choice(
        [
            *(illegal, illegal, illegal, illegal[:1], illegal[::-1], [*illegal, *illegal]),
            *([rng.choice(every)], [*illegal, rng.choice(every)], [0], [-1], [], [True], [1.0], "1", [draft.next]),
        ]
    )
    reason = rng.choice(["why", "why", "why", "", "x" * 501, "a\nb", "\x1b[31m", 7, None, "é"])
    draft.append({"kind": "quarantine", "events": numbers, "reason": reason})
    if rng.random() < 0.3:
        draft.append({"kind": "quarantine", "events": numbers, "reason": "again"})
    if rng.random() < 0.3:
        draft.append({"kind": "quarantine", "events": [draft.next - 1], "reason": "the quarantine itself"})
    if rng.random() < 0.3:
        draft.append(draft.legal(rng.choice(KINDS)))
    draft.rebuild()


@mutation(2)
def a_forgery_and_its_quarantine(draft: Draft) -> None:
    """The owner quarantines what costs too much, or a settlement, with everything in agreement."""
    number = draft.rng.randint(1, len(draft.events))
    draft.append({"kind": "quarantine", "events": [number], "reason": "not liked"})
    without = draft.copy()
    without.write(number, {"kind": "nothing", "time": without.event(number)["time"]})
    without.chain()
    for row in without.tables["run"]:
        if row["id"] not in without.state.runs:
            drop_run(draft, row["id"])
    draft.store_people(without.state)


@mutation(4)
def two_at_once(draft: Draft) -> None:
    for _ in range(2):
        name = chosen(draft.rng)
        if name != "two_at_once":
            with contextlib.suppress(json.JSONDecodeError, struct.error):  # the second cannot follow the first
                MUTATIONS[name][0](draft)


@mutation(1)
def nothing(draft: Draft) -> None:
    """Legal."""


def chosen(rng: random.Random) -> str:
    names = sorted(MUTATIONS)
    return rng.choices(names, [MUTATIONS[name][1] for name in names])[0]


# -- histories ---------------------------------------------------------------------------------------------------


def genuine(url: str, pepper: Path, rng: random.Random, connect: Callable[[], Any], crowd: int = 0) -> Registry:
    """A history of 20 to 40 people and up to 25 steps, through the public interface. Refusals are a part of it.

    One in three begins in the form of schema 1, and is migrated. connect: to the same place, without the library.
    crowd: so many people more, who are enrolled in between, so that others are on a second page
    """
    ids = [f"p{i}" for i in range(rng.randint(20, 40))]
    first = rng.randint(5, len(ids) - 5)
    levels = [1.0, 2.0, 3.0, 5.5]
    registry = Registry.create(url, pepper)
    registry.enrol(ids[:first], [rng.choice(levels) for _ in range(first)])
    house = House(registry, rng, ids[:first], connect, is_old=rng.random() < 0.33)
    if house.is_old:
        for _ in range(rng.randint(0, 12)):
            with contextlib.suppress(EpsilonsError):
                house.step()
        registry.close()
        downgrade(url)
        Registry.migrate(url)
        registry = house.registry = Registry(url, pepper)
        house.is_old = False
    if crowd:
        registry.enrol([f"one of a crowd {i}" for i in range(crowd)], 2.0)
    go_on(house, ids, levels)
    return registry


def go_on(house: House, ids: list[str], levels: list[float]) -> None:
    registry, rng, late = house.registry, house.rng, ids[len(house.ids) :]
    for _ in range(rng.randint(5, 25)):
        if late and rng.random() < 0.15:
            registry.enrol(late, [rng.choice(levels) for _ in late], rng.choice([1e-5, 1e-6]))
            house.ids, late = ids, []
            continue
        with contextlib.suppress(EpsilonsError):
            house.step()


@dataclass
class House:
    """What a history needs to know of its runs: name -> (people, steps, keys, first line of the ledger)."""

    registry: Registry
    rng: random.Random
    ids: list[str]
    connect: Callable[[], Any]
    is_old: bool  # only what schema 1 had
    reserved: dict[str, tuple[int, ...]] = field(default_factory=dict)
    running: dict[str, tuple[tuple[int, ...], str, str]] = field(default_factory=dict)

    def some(self, most: int = 12) -> list[str]:
        return self.rng.sample(self.ids, self.rng.randint(1, min(most, len(self.ids))))

    def step(self) -> None:
        rng, registry = self.rng, self.registry
        ways: list[Callable[[], None]] = [self.reserve] * 4 + [self.begin, self.settle] * 3 + [self.cancel, self.again]
        ways += [lambda: registry.change(self.some(4), rng.choice([0.9, 1.5, 4.0]))]
        ways += [lambda: registry.withdraw(self.some(2))]
        ways += [lambda: registry.set_quota(rng.choice(["alpha", "beta"]), rng.choice([0.4, 0.8, 1]))]
        ways += [self.release]
        if not self.is_old:
            ways += [self.approve, self.quarantine, lambda: registry.limit_refunds(rng.choice([0.3, 0.6, 1.0]))]
        rng.choice(ways)()

    def reserve(self) -> None:
        rng = self.rng
        phases, rows = 1 if self.is_old else rng.choice([1, 1, 2]), rng.choice([1, 2, 3])
        noise = rng.choice([6.0, 12.0, 25.0, 50.0])
        noises = noise * np.linspace(1, 1.5, rows)[None].repeat(phases, axis=0)
        table = Table(np.full((phases, rows), rng.choice([0.01, 0.02])), noises, (100, 50)[:phases])
        ids, name = self.some(), f"run-{rng.getrandbits(32):x}"
        who = Roster(self.registry.numbers(ids), np.array([rng.randrange(rows) for _ in ids]))
        self.registry.reserve_table(name, table, who, project=rng.choice(["", "alpha", "beta"]))
        self.reserved[name] = table.steps

    def begin(self) -> None:
        if not self.reserved:
            return
        name = self.rng.choice(sorted(self.reserved))
        key, ledger = some_hash(self.rng), some_hash(self.rng)
        self.registry.begin(name, key, None, ledger)
        self.running[name] = self.reserved.pop(name), key, ledger

    def again(self) -> None:
        if not self.running:
            return
        name = self.rng.choice(sorted(self.running))
        steps, before, ledger = self.running[name]
        key = some_hash(self.rng)
        self.registry.begin(name, key, before, ledger)
        self.running[name] = steps, key, ledger

    def settle(self) -> None:
        if not self.running:
            return
        name = self.rng.choice(sorted(self.running))
        steps, key, _ = self.running[name]
        charged = tuple(self.rng.randint(n // 2, n) for n in steps)
        self.registry.settle(name, charged, some_hash(self.rng), key)
        del self.running[name]

    def cancel(self) -> None:
        if self.reserved:
            name = self.rng.choice(sorted(self.reserved))
            self.registry.cancel(name)
            del self.reserved[name]

    def approve(self) -> None:
        if self.running:
            name = self.rng.choice(sorted(self.running))
            charged = tuple(n // 3 for n in self.running[name][0])
            ledger = some_hash(self.rng)
            self.registry.approve(name, charged, ledger)
            if self.rng.random() < 0.7:
                self.registry.settle(name, charged, ledger, self.running.pop(name)[1])

    def quarantine(self) -> None:
        """A stranger charges too much, which no database sees, and the owner quarantines it."""
        with contextlib.closing(self.connect()) as connection:
            tables, columns = twin.read(connection), columns_of(connection)
            draft = Draft(tables, self.rng, columns)
            number = draft.append(draft.reservation(draft.sample(draft.present), noise=0.3))
            if draft.state.illegal.keys() != {number} or draft.state.unclear:
                return
            mark = "?" if isinstance(connection, sqlite3.Connection) else "%s"
            connection.execute("begin")
            for text, values in Writer(tables, draft.tables, columns, False).statements:
                connection.execute(text.replace("%s", mark), values)
            connection.execute("commit")
        self.registry.quarantine([number], "more than people have left")

    def release(self) -> None:
        name = f"mean-{self.rng.getrandbits(32):x}"
        self.registry.release(name, 3.0, ids=self.some(), sensitivity=1.0, noise_multiplier=40.0)


# -- databases ---------------------------------------------------------------------------------------------------

Statement = tuple[str, tuple[Any, ...]]
KEYS = {
    "fact": ("name",),
    "wish": ("id",),
    "cohort": ("id",),
    "person": ("pseudonym",),
    "page": ("number",),
    "quota": ("project",),
    "run": ("id",),
    "part": ("run", "page"),
    "statement": ("event", "page"),
    "event": ("number",),
    "head": ("one",),
}


def columns_of(connection: Any) -> dict[str, list[str]]:
    return {name: [c[0] for c in connection.execute(f"select * from {name}").description] for name in twin.NAMES}


def rows_of(tables: Tables, name: str) -> Counter[tuple[Any, ...]]:
    return Counter(tuple(row.values()) for row in tables[name])


def hashable(value: Any) -> Any:
    return repr(value) if isinstance(value, (list, dict)) else value


def as_owner(before: Tables, after: Tables, columns: dict[str, list[str]]) -> list[Statement]:
    """Statements that turn the tables into others: rows that differ are deleted and inserted."""
    deletes, inserts = [], []
    for name in twin.NAMES:
        old, new = rows_of(before, name), rows_of(after, name)
        for row in old - new:
            where = " and ".join(f"{key} = %s" for key in KEYS[name])
            values = dict(zip(columns[name], row, strict=True))
            deletes.append((f"delete from {name} where {where}", tuple(values[key] for key in KEYS[name])))
        marks = ", ".join(["%s"] * len(columns[name]))
        inserts += [(f"insert into {name} values ({marks})", row) for row in (new - old).elements()]
    return deletes + inserts


class Writer:
    """Turns one registry into another as a program that goes through the rules would: event by event, with its rows.

    is_rows_first: whether the rows of an event come before it; those of a reservation always do
    """

    def __init__(self, before: Tables, after: Tables, columns: dict[str, list[str]], is_rows_first: bool) -> None:
        self.columns, self.is_rows_first, self.statements = columns, is_rows_first, list[Statement]()
        self.now = {name: keyed(name, before) for name in twin.NAMES}
        self.goal = {name: keyed(name, after) for name in twin.NAMES}
        for name in ("cohort", "page"):
            self.finish(name)
        for key in [key for key in self.now["event"] if key not in self.goal["event"]]:
            self.remove("event", key)
        for key, row in self.goal["event"].items():
            if self.now["event"].get(key) != row:
                self.event(key, row)
        for name in twin.NAMES:
            if name not in ("event", "head"):
                self.finish(name)
        self.finish("head")

    def event(self, key: Key, row: dict[str, Any]) -> None:
        try:
            event = json.loads(row["body"])
            kind = str(event.get("kind"))
        except (ValueError, TypeError, AttributeError, RecursionError):
            event, kind = {}, ""
        is_first = kind == "reserve" or self.is_rows_first
        if is_first:
            self.rows(kind, event)
        self.put("event", key, row)
        if self.goal["head"]:
            self.put("head", next(iter(self.now["head"])), {"one": 1, "number": row["number"], "hash": row["hash"]})
        if not is_first:
            self.rows(kind, event)
        for other in [k for k in self.goal["statement"] if k[0] == row["number"] and k not in self.now["statement"]]:
            self.put("statement", other, self.goal["statement"][other])

    def rows(self, kind: str, event: Event) -> None:
        """What this event writes in other tables, as far as the goal has such rows."""
        run = (event.get("run"),)
        if kind == "wish" and (hashable(event.get("id")),) in self.goal["wish"]:
            self.put("wish", (event["id"],), self.goal["wish"][event["id"],])
        elif kind == "quota" and (hashable(event.get("project")),) in self.goal["quota"]:
            self.put("quota", (event["project"],), {"project": event["project"], "share": event.get("share")})
        elif kind == "limit":
            self.put("fact", ("refund",), {"name": "refund", "value": json.dumps(event.get("refund"))})
        elif kind == "migrate":
            self.put("fact", ("schema",), {"name": "schema", "value": event.get("schema")})
        elif kind == "enrol":
            self.enrol(event)
        elif isinstance(run[0], str) and run in self.goal["run"]:
            row = dict(self.now["run"].get(run, self.goal["run"][run]))
            if kind == "reserve":
                row |= {name: None for name in ("charged", "key", "ledger", "begun") if name in row}
                row["state"] = "reserved"
            elif kind == "begin":
                row |= {"state": "running", "key": event.get("key")}
                row |= {"begun": event.get("ledger")} if "begun" in row else {}
            elif kind in ("settle", "cancel"):
                charged = json.dumps(event["charged"]) if "charged" in event else self.goal["run"][run]["charged"]
                row |= {"state": "cancelled" if kind == "cancel" else "settled", "charged": charged}
                row |= {"ledger": event.get("ledger", "")}
            self.put("run", run, row)
            for key in [k for k in self.goal["part"] if k[0] == run[0] and k not in self.now["part"]]:
                self.put("part", key, self.goal["part"][key])

    def enrol(self, event: Event) -> None:
        """Pseudonyms in one statement: the hash in the event is of all of them."""
        new = [key for key in self.goal["person"] if key not in self.now["person"]]
        first, people = event.get("first"), event.get("people")
        if isinstance(first, int) and isinstance(people, int):
            numbers = [self.goal["person"][key]["number"] for key in new]
            mine = [k for k, n in zip(new, numbers, strict=True) if isinstance(n, int) and first <= n < first + people]
            new = mine or new
        if new:
            marks = ", ".join(["(%s, %s)"] * len(new))
            rows = [self.goal["person"][key] for key in new]
            values = tuple(value for row in rows for value in (row["pseudonym"], row["number"]))
            self.statements.append((f"insert into person (pseudonym, number) values {marks}", values))
            self.now["person"] |= dict(zip(new, rows, strict=True))

    def finish(self, name: str) -> None:
        """What is left to do in a table."""
        for key in [key for key in self.now[name] if key not in self.goal[name]]:
            self.remove(name, key)
        for key, row in self.goal[name].items():
            self.put(name, key, row)

    def remove(self, name: str, key: Key) -> None:
        where = " and ".join(f"{k} = %s" for k in KEYS[name])
        row = self.now[name].pop(key)
        self.statements.append((f"delete from {name} where {where}", tuple(row[k] for k in KEYS[name])))

    def put(self, name: str, key: Key, row: dict[str, Any]) -> None:
        old = self.now[name].get(key)
        if old is None:
            named = [c for c in self.columns[name] if row[c] is not None]
            text = f"insert into {name} ({', '.join(named)}) values ({', '.join(['%s'] * len(named))})"
            self.statements.append((text, tuple(row[c] for c in named)))
        elif row != old:
            named = [c for c in self.columns[name] if row[c] != old[c]]
            where = " and ".join(f"{k} = %s" for k in KEYS[name])
            text = f"update {name} set {', '.join(f'{c} = %s' for c in named)} where {where}"
            self.statements.append((text, (*(row[c] for c in named), *(row[k] for k in KEYS[name]))))
        self.now[name][key] = row


Key = tuple[Any, ...]


def keyed(name: str, tables: Tables) -> dict[Key, dict[str, Any]]:
    return {tuple(hashable(row[k]) for k in KEYS[name]): row for row in tables[name]}


# -- the judgement -----------------------------------------------------------------------------------------------


@dataclass
class Outcome:
    """What became of a mutation.

    result  refused, found, legal, unclear; "found, and another event named" if the twin names another first event. Or a
            failure: missed (verify says right, and the twin does not), alarm (the other way round), traceback,
            rollback (an export of the former registry is not compared rightly), unrepaired (pages alone are wrong,
            and `repair` does not help)
    """

    number: int
    kind: str
    role: str
    result: str
    detail: str = ""

    @property
    def is_failure(self) -> bool:
        return self.result in ("missed", "alarm", "traceback", "rollback", "unrepaired")


class TooSlowError(Exception):
    pass


@contextlib.contextmanager
def within(seconds: int) -> Iterator[None]:
    def stop(*_: Any) -> None:
        raise TooSlowError

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def examined(url: str, pepper: Path, earlier: dict[str, Any]) -> dict[str, str]:
    """What verify, show, export and compare say: right, wrong, or how they ended."""
    found: dict[str, str] = {}

    def call(name: str, work: Callable[[], Any]) -> None:
        try:
            with within(PATIENCE):
                found[name] = str(work() or "right")
        except EpsilonsError as error:
            found[name] = f"wrong: {error}"
        except (Exception, MemoryError) as error:
            found[name] = f"TRACEBACK {type(error).__name__}: {str(error)[:200]}"

    def verify() -> str:
        verdict = registry.verify()
        if verdict.is_right:
            return "right"
        found["number"] = str(getattr(getattr(verdict, "first", None), "number", None))
        return f"wrong: {verdict}"

    registry: Any = None
    try:
        registry = Registry(url, pepper)
    except EpsilonsError as error:
        return {"verify": f"wrong: {error}"}
    except Exception as error:
        return {"verify": f"TRACEBACK {type(error).__name__}: {str(error)[:200]}"}
    try:
        call("verify", verify)
        call("compare", lambda: evidence.compare(registry, earlier))
        call("show", registry.summary and (lambda: registry.summary() and None))
        call("export", lambda: evidence.export(registry) and None)
    finally:
        registry.close()
    return found


def judged(tables: Tables | None, said: dict[str, str], earlier: dict[str, Any]) -> tuple[str, str]:
    """(result, detail)"""
    broken = [f"{name}: {text}" for name, text in said.items() if text.startswith("TRACEBACK")]
    if broken:
        return "traceback", "; ".join(broken)
    if tables is None:  # not readable at all
        return ("missed", said["verify"]) if said["verify"] == "right" else ("found", "")
    judgement = twin.judge(tables)
    is_right = said["verify"] == "right"
    if judgement.is_legal and "has version" in said["verify"]:
        return "legal", "in the form of schema 1, which is migrated first"
    if judgement.unclear:
        return "unclear", "; ".join(judgement.unclear)
    if judgement.is_legal != is_right:
        return ("missed" if is_right else "alarm"), f"verify: {said['verify']}; twin: {judgement}"
    if not is_right:
        named = str(judgement.first[0] if judgement.first else None)
        is_named = said.get("number", named) == named
        return (
            ("found", "")
            if is_named
            else ("found, and another event named", f"verify: {said['verify']}; twin: {judgement}")
        )
    number, last = earlier["head"]["number"], earlier["head"]["hash"]
    continues = any(row["number"] == number and row["hash"] == last for row in tables["event"])
    if continues != (said["compare"] == "right"):
        return "rollback", f"compare: {said['compare']}"
    return "legal", ""


def mutated(number: int, tables: Tables, columns: dict[str, list[str]], kind: str | None = None) -> tuple[str, Draft]:
    """(kind, what mutation `number` makes of these tables). Another kind is drawn where one finds nothing to change."""
    rng = random.Random(number)
    for _ in range(100):
        name, draft, kind = kind or chosen(rng), Draft(tables, rng, columns), None
        try:
            MUTATIONS[name][0](draft)
        except (NothingToChange, *FORGER_FAILS):
            continue
        return name, draft
    raise AssertionError("no mutation is possible")


#: A draft that was damaged by one mutation cannot always be changed by another one.
FORGER_FAILS = (
    KeyError,
    TypeError,
    IndexError,
    ValueError,
    AttributeError,
    OverflowError,
    RecursionError,
    StopIteration,
)
FORGER_FAILS = (*FORGER_FAILS, twin.IllegalError, twin.UnclearError, zlib.error)  # type: ignore[assignment]


def is_only_cache(tables: Tables) -> bool:
    judgement = twin.judge(tables)
    return judgement.first is None and all(reason.startswith("a page") for reason in judgement.rows)


class OnSqlite:
    """Mutations by the owner of a file, who drops triggers and indexes first."""

    roles = ("file",)

    def __init__(self, folder: Path) -> None:
        self.folder, self.pepper = folder, folder / "people.db.pepper"
        self.base, self.copy = folder / "base.db", folder / "people.db"

    def _connect(self) -> sqlite3.Connection:
        made = sqlite3.connect(self.base, isolation_level=None)
        self.base.chmod(0o600)
        return made

    def history(self, seed: int, crowd: int = 0) -> None:
        for path in self.folder.glob("*.db*"):
            path.unlink()
        rng = random.Random(10**9 + seed)
        with genuine(f"sqlite:///{self.base}", self.pepper, rng, self._connect, crowd) as registry:
            self.earlier = evidence.export(registry)
            verdict = registry.verify()
            assert verdict.is_right, f"the genuine history {seed} is not right: {verdict}"
        with contextlib.closing(sqlite3.connect(self.base)) as connection:
            connection.execute("pragma wal_checkpoint(truncate)")
            connection.execute("pragma journal_mode=delete")
            self.tables, self.columns = twin.read(connection), columns_of(connection)
        judgement = twin.judge(self.tables)
        assert judgement.is_legal, f"the twin calls the genuine history {seed} illegal: {judgement}"

    def outcome(self, number: int, role: str, kind: str | None = None) -> Outcome:
        kind, draft = mutated(number, self.tables, self.columns, kind)
        self._clear()
        shutil.copyfile(self.base, self.copy)
        self.copy.chmod(0o600)
        with contextlib.closing(self._open()) as connection:
            connection.execute("pragma synchronous=off")
            dropped = "select type, name from sqlite_master where type in ('trigger', 'index') and sql is not null"
            for what, name in connection.execute(dropped).fetchall():
                connection.execute(f"drop {what} {name}")
            connection.execute("begin")
            try:
                for text, values in as_owner(self.tables, draft.tables, self.columns):
                    connection.execute(text.replace("%s", "?"), values)
            except (sqlite3.Error, OverflowError, UnicodeEncodeError):
                return Outcome(number, kind, role, "refused")
            connection.execute("commit")
            tables = twin.read(connection)
        said = examined(f"sqlite:///{self.copy}", self.pepper, self.earlier)
        result, detail = judged(tables, said, self.earlier)
        if result == "found" and is_only_cache(tables):
            result, detail = self._repaired()
        return Outcome(number, kind, role, result, detail)

    def _repaired(self) -> tuple[str, str]:
        """What became of a registry whose pages alone are wrong, after its owner had them computed again."""
        try:
            with Registry(f"sqlite:///{self.copy}", self.pepper) as registry:
                registry.repair()
                is_right = registry.verify().is_right
        except Exception as error:
            return "unrepaired", f"{type(error).__name__}: {error}"
        with contextlib.closing(self._open()) as connection:
            judgement = twin.judge(twin.read(connection))
        return ("found", "") if is_right and judgement.is_legal else ("unrepaired", f"{judgement}")

    def flipped(self, number: int) -> Outcome:
        """Random bits of the file change. What SQLite calls damaged may be a row or an index that nothing uses."""
        rng = random.Random(number)
        raw = bytearray(self.base.read_bytes())
        for _ in range(rng.choice([1, 1, 3, 20])):
            raw[rng.randrange(len(raw))] ^= 1 << rng.randrange(8)
        self._clear()
        self.copy.write_bytes(raw)
        self.copy.chmod(0o600)
        tables = None
        with contextlib.suppress(sqlite3.Error, UnicodeDecodeError), contextlib.closing(self._open()) as connection:
            tables = twin.read(connection) if columns_of(connection) == self.columns else None
        said = examined(f"sqlite:///{self.copy}", self.pepper, self.earlier)
        result, detail = judged(tables, said, self.earlier)
        is_damage = result == "alarm" or (result == "missed" and tables is None)
        return Outcome(number, "flipped bits", "file", "unclear" if is_damage else result, detail)

    def _clear(self) -> None:
        for path in self.folder.glob("people.db*"):
            if path != self.pepper:
                path.unlink()

    def _open(self) -> sqlite3.Connection:
        return sqlite3.connect(self.copy, isolation_level=None)

    def close(self) -> None:
        pass


class OnPostgres:
    """Mutations by each role. What the database accepted is undone by its owner, without triggers."""

    roles = ("owner", "owner without triggers", "officer", "runner", "regulator", "subject")
    logins: ClassVar = {"officer": "olga", "runner": "ron", "regulator": "rea", "subject": "sue"}

    def __init__(self, folder: Path, server: Any = None) -> None:
        from servers import Server

        self.pepper, self._own = folder / "pepper", server is None
        self.server = server or Server()
        self._connections: dict[str, Any] = {}

    def history(self, seed: int) -> None:
        import psycopg

        self._disconnect()
        url = self.server.place()
        self.schema = url.rpartition("%3D")[2]
        rng = random.Random(10**9 + seed)
        with genuine(url, self.pepper, rng, lambda: psycopg.connect(url, autocommit=True)) as registry:
            self.earlier = evidence.export(registry)
            verdict = registry.verify()
            assert verdict.is_right, f"the genuine history {seed} is not right: {verdict}"
            self.url = url
            with psycopg.connect(url, autocommit=True) as connection:
                self.columns = columns_of(connection)
                connection.execute(roles_script())
                for role, login in self.logins.items():
                    if not connection.execute("select from pg_roles where rolname = %s", (login,)).fetchall():
                        connection.execute(f"create role {login} login password '{self.server.password}'")
                    connection.execute(f"grant epsilons_{role} to {login}")
                connection.execute("insert into member values ('ron', 'alpha'), ('ron', '')")
                self.tables = twin.read(connection)
            registry.admit("sue", "p3")
        judgement = twin.judge(self.tables)
        assert judgement.is_legal, f"the twin calls the genuine history {seed} illegal: {judgement}"

    def _connection(self, role: str) -> Any:
        import psycopg

        if role not in self._connections:
            user = self.logins.get(role, "owner")
            made = psycopg.connect(self.server.url(self.schema, user=user), autocommit=True)
            if role == "owner without triggers":
                made.execute("set session_replication_role = replica")
            self._connections[role] = made
        return self._connections[role]

    def _done(self, role: str, statements: list[Statement], is_in_savepoints: bool = False) -> bool:
        import psycopg

        connection = self._connection(role)
        try:
            with connection.transaction():
                for text, values in statements:
                    with connection.transaction() if is_in_savepoints else contextlib.nullcontext():
                        connection.execute(text, values or None)
        except (psycopg.Error, UnicodeEncodeError, OverflowError, ValueError):
            return False
        return True

    def outcome(self, number: int, role: str, kind: str | None = None) -> Outcome:
        kind, draft = mutated(number, self.tables, self.columns, kind)
        if role == "owner without triggers":
            ways = [as_owner(self.tables, draft.tables, self.columns)]
        else:
            ways = [Writer(self.tables, draft.tables, self.columns, first).statements for first in (False, True)]
            ways = ways if ways[0] != ways[1] else ways[:1]
        if number % 7 == 3 and role != "owner without triggers":  # each statement by itself
            is_done = sum(self._done(role, [statement]) for statement in ways[0]) > 0
        elif number % 7 == 5 and role != "owner without triggers":  # in any order
            shuffled = random.Random(number).sample(ways[0], len(ways[0]))
            is_done = self._done(role, shuffled) or any(self._done(role, way) for way in ways)
        else:
            is_done = any(self._done(role, way, number % 7 == 1) for way in ways)
        if not is_done:
            return Outcome(number, kind, role, "refused")
        owner = self._connection("owner without triggers")
        try:
            tables = twin.read(owner)
            said = examined(self.url, self.pepper, self.earlier)
            return Outcome(number, kind, role, *judged(tables, said, self.earlier))
        finally:
            back = self._done("owner without triggers", as_owner(tables, self.tables, self.columns))
            assert back, f"mutation {number} could not be undone"

    def _disconnect(self) -> None:
        for connection in self._connections.values():
            connection.close()
        self._connections = {}

    def close(self) -> None:
        self._disconnect()
        if self._own:
            self.server.stop()


def outcomes(on: OnSqlite | OnPostgres, numbers: range, kinds: Sequence[str] = ()) -> Iterator[Outcome]:
    """What became of these mutations. kinds: of each in turn; by default they are drawn."""
    seed = -1
    for number in numbers:
        if number // EACH != seed:
            seed = number // EACH
            on.history(seed)
        kind = kinds[number % len(kinds)] if kinds else None
        yield on.outcome(number, on.roles[number % len(on.roles)], kind)


def memory() -> str | None:
    """A folder in memory where there is one: nothing here depends on a disk."""
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
