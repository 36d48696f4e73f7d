"""A slow twin of the registry's verifier: one dictionary per person, whole numbers of Python, every rule by name.

It reads the raw tables and shares no code with the registry. Only Rényi divergences come from the accountant: they are
tested elsewhere, and a sum must be equal to the last pico-nat. docs/registry.md#events has the rules.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import sqlite3
import struct
import zlib
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from typing import Any

import numpy as np

from epsilons.accounting import filter as filter_

PAGE, NOBODY, WITHDRAWN = 16384, -1, 0
ORDERS = (2, 2.5, 3, 4, 5, 6, 8, 10, 12, 15, 18, 24, 32, 44, 64, 96)
PICO, MOST = 10**12, 2**50
LONGEST_EVENT, LONGEST_PLAN = 2**16, 2**24
NAMES = ("fact", "wish", "cohort", "person", "page", "quota", "run", "part", "statement", "event", "head")

Tables = dict[str, list[dict[str, Any]]]


class IllegalError(Exception):
    """An event, or a row, that the rules do not allow."""


class UnclearError(Exception):
    """The rules leave this open: either verdict is right."""


def check(is_so: bool, reason: str) -> None:
    if not is_so:
        raise IllegalError(reason)


# -- reading -----------------------------------------------------------------------------------------------------


def read(connection: Any) -> Tables:
    """All rows of all tables, whatever is in them."""
    is_sqlite = isinstance(connection, sqlite3.Connection)
    if is_sqlite:
        connection.text_factory = lambda raw: raw.decode("utf-8", "surrogateescape")
    found = {}
    for name in NAMES:
        cursor = connection.execute(f"select * from {name}")
        columns = [column[0] for column in cursor.description]
        found[name] = [
            {c: bytes(v) if isinstance(v, memoryview) else v for c, v in zip(columns, row, strict=True)}
            for row in cursor.fetchall()
        ]
    return found


@lru_cache(maxsize=4096)
def people_in(stored: Any, letter: str) -> dict[int, int]:
    """place -> value of a page, without those of nobody. letter: h for rows of people, i for cohorts."""
    check(isinstance(stored, bytes), "a page is no bytes")
    size = PAGE * struct.calcsize(letter)
    unpacker = zlib.decompressobj()
    try:
        raw = unpacker.decompress(stored, size + 1)
    except zlib.error:
        raise IllegalError("a page cannot be unpacked") from None
    check(len(raw) == size and unpacker.eof, "a page has another size")
    if unpacker.unused_data:
        raise UnclearError("bytes after a page")
    nobody = NOBODY if letter == "h" else 0
    return {i: v for i, v in enumerate(struct.unpack(f"<{PAGE}{letter}", raw)) if v != nobody}


def parsed(text: Any, longest: int) -> Any:
    check(isinstance(text, str) and len(text) <= longest, "no text, or a text that is too long")
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise IllegalError("no JSON") from None


def dumped(value: Any) -> str | None:
    try:
        return json.dumps(value, sort_keys=True, allow_nan=False)
    except (ValueError, RecursionError):
        return None


def is_int(value: Any) -> bool:
    return type(value) is int


def is_number(value: Any) -> bool:
    return (type(value) is float and math.isfinite(value)) or (type(value) is int and abs(value) < 2**53)


def is_name(value: Any) -> bool:
    return isinstance(value, str) and len(value) <= 200 and value.isprintable()


def is_hex(value: Any, length: int = 64) -> bool:
    return isinstance(value, str) and re.fullmatch(f"[0-9a-f]{{{length}}}", value) is not None


def is_counts(value: Any) -> bool:
    return isinstance(value, list) and all(is_int(n) for n in value)


# -- amounts -----------------------------------------------------------------------------------------------------


def conversion(order: float, delta: float) -> float:
    return math.log1p(-1 / order) - (math.log(delta) + math.log(order)) / (order - 1)


@lru_cache(maxsize=4096)
def caps(epsilon: float, delta: float, home: int) -> list[int]:
    """Pico-nats that may be spent at each order, rounded down."""
    weights = [0.9 if i == home else (1 - 0.9) / 15 for i in range(16)]
    return [
        math.floor((epsilon - conversion(order, weight * delta)) * PICO) - 1
        for order, weight in zip(ORDERS, weights, strict=True)
    ]


def is_within(sums: list[int], limits: list[int]) -> bool:
    """Whether some order has room. A logarithm's last bit decides the last pico-nat: there either verdict is right."""
    strict = any(s <= cap - 3 for s, cap in zip(sums, limits, strict=True))
    loose = any(s <= cap + 3 for s, cap in zip(sums, limits, strict=True))
    if strict != loose:
        raise UnclearError("a sum at the border")
    return strict and all(s < 2**63 for s in sums)


@dataclass
class Plan:
    """rates, noises: a list of rows for each phase; steps of each phase."""

    rates: list[list[float]]
    noises: list[list[float]]
    steps: list[int]

    @property
    def rows(self) -> int:
        return len(self.rates[0])

    def costs(self, steps: tuple[int, ...]) -> list[list[int]]:
        """Pico-nats of each row at each order, rounded up once for all phases."""
        return _costs(json.dumps([self.rates, self.noises]), steps)

    @classmethod
    def of(cls, text: Any) -> Plan:
        values = parsed(text, LONGEST_PLAN)
        check(isinstance(values, dict) and {"rates", "noises", "steps"} <= set(values), "a plan lacks a field")
        if set(values) != {"rates", "noises", "steps"} or dumped(values) != text:
            raise UnclearError("a plan in another form")
        rates, noises, steps = values["rates"], values["noises"], values["steps"]
        for table in (rates, noises):
            check(isinstance(table, list) and all(isinstance(phase, list) for phase in table), "a plan is no table")
        check(is_counts(steps) and len(steps) == len(rates) == len(noises) > 0, "phases of a plan differ")
        check(len({len(phase) for phase in (*rates, *noises)}) == 1, "a plan has no rectangular tables")
        check(0 < len(rates[0]) <= 2**15, "a plan has no rows or too many")
        check(all(is_number(q) and 0 <= q <= 1 for phase in rates for q in phase), "a rate is out of range")
        check(all(s is None or (is_number(s) and s > 0) for phase in noises for s in phase), "a noise is out of range")
        check(all(n >= 0 for n in steps), "negative steps")
        if any(n >= 2**53 for n in steps):
            raise UnclearError("more steps than a float counts")
        return cls(rates, [[math.inf if s is None else s for s in phase] for phase in noises], steps)


@lru_cache(maxsize=4096)
def _costs(tables: str, steps: tuple[int, ...]) -> list[list[int]]:
    rates, noises = (np.array(table, dtype=np.float64) for table in json.loads(tables))
    with np.errstate(all="ignore"):
        nats = filter_.sums(rates, noises, steps, rates.shape[1])
    return [[math.ceil(min(value * 1e12, MOST)) for value in row] for row in nats.tolist()]


# -- what the events say ------------------------------------------------------------------------------------------


@dataclass
class Person:
    wish: int
    home: int
    is_withdrawn: bool = False
    sums: list[int] = field(default_factory=lambda: [0] * 16)


@dataclass
class Run:
    """roster: number of a person -> row of the plan; costs: of each row, charged now."""

    project: str
    kind: str
    digest: str
    text: str
    plan: Plan
    roster: dict[int, int]
    costs: list[list[int]]
    state: str = "reserved"
    keys: list[str] = field(default_factory=list)
    begun: str | None = None
    charged: list[int] | None = None
    ledger: str | None = None

    def costs_of(self, charged: list[int]) -> list[list[int]]:
        check(
            len(charged) == len(self.plan.steps)
            and all(0 <= n <= most for n, most in zip(charged, self.plan.steps, strict=True)),
            "steps that were never reserved",
        )
        return self.plan.costs(tuple(charged))


@dataclass
class State:
    """What holds after the events. illegal: number -> (kind, reason), without those that the owner quarantined."""

    facts: dict[str, Any] = field(default_factory=dict)
    wishes: list[tuple[float, float, int]] = field(default_factory=list)
    people: list[Person] = field(default_factory=list)
    quotas: dict[str, float] = field(default_factory=dict)
    runs: dict[str, Run] = field(default_factory=dict)
    approved: set[str] = field(default_factory=set)
    illegal: dict[int, tuple[str, str]] = field(default_factory=dict)
    quarantined: dict[int, str] = field(default_factory=dict)
    unclear: list[str] = field(default_factory=list)
    breaks: str | None = None
    events: int = 0

    @property
    def is_new(self) -> bool:
        return self.facts.get("schema") == "3"

    @property
    def refund(self) -> float:
        return float(self.facts.get("refund", 1.0))


FIELDS: dict[str, dict[str, Any]] = {
    "create": {"schema": lambda v: v in ("1", "2", "3"), "id": lambda v: is_hex(v, 32), "pepper": is_hex},
    "migrate": {"schema": lambda v: v == "3", "was": lambda v: v in ("1", "2")},
    "limit": {"refund": lambda v: is_number(v) and 0 <= v <= 1},
    "wish": {"id": is_int, "epsilon": is_number, "delta": is_number, "home": is_number},
    "enrol": {"digest": is_hex, "first": is_int, "people": is_int, "names": is_hex},
    "change": {"digest": is_hex, "people": is_int},
    "withdraw": {"digest": is_hex, "people": is_int},
    "quota": {"project": is_name, "share": lambda v: is_number(v) and 0 < v <= 1},
    "reserve": {"run": is_name, "digest": is_hex, "what": is_name, "project": is_name},
    "begin": {
        "run": is_name,
        "key": is_hex,
        "previous": lambda v: v is None or is_name(v),  # a key of the old form may be any text
        "ledger": lambda v: v == "" or is_hex(v),
    },
    "settle": {"run": is_name, "charged": is_counts, "ledger": lambda v: v == "" or is_hex(v), "key": is_name},
    "cancel": {"run": is_name},
    "approve": {"run": is_name, "charged": is_counts, "ledger": lambda v: v == "" or is_hex(v)},
    "quarantine": {
        "events": lambda v: is_counts(v) and len(v) > 0 and sorted(set(v)) == v,
        "reason": lambda v: isinstance(v, str) and len(v) <= 500 and v.isprintable(),
    },
}
OLD_FIELDS = {"begin": ("run", "key"), "settle": ("run", "charged", "ledger")}
NEW_KINDS = ("limit", "cancel", "approve", "quarantine")


class Replay:
    """The state machine. forced: numbers of events whose effect counts, legal or not (a forger needs that)."""

    def __init__(self, tables: Tables, now: datetime, forced: frozenset[int] = frozenset()) -> None:
        self.tables, self.now, self.forced, self.state = tables, now, forced, State()
        self.statements: dict[Any, dict[Any, Any]] = {}
        for row in tables["statement"]:
            self.statements.setdefault(row["event"], {})[row["page"]] = row["rows"]
        self.parts: dict[Any, dict[Any, Any]] = {}
        for row in tables["part"]:
            self.parts.setdefault(row["run"], {})[row["page"]] = row["rows"]
        self.run_rows = {row["id"]: row for row in tables["run"] if isinstance(row["id"], str)}
        self._last_time: datetime | None = None

    def go(self) -> State:
        state, last = self.state, "0" * 64
        events = self.tables["event"]
        if not all(is_int(row["number"]) for row in events):
            state.breaks = "a number of an event is no number"
            return state
        for count, row in enumerate(sorted(events, key=lambda row: row["number"]), 1):
            body = row["body"]
            if row["number"] != count or row["previous"] != last or not isinstance(body, str):
                state.breaks = f"event {count} does not follow the one before"
                return state
            if row["hash"] != hashlib.sha256((last + body).encode("utf-8", "surrogatepass")).hexdigest():
                state.breaks = f"event {count} has another hash"
                return state
            last, state.events = row["hash"], count
            self._one(count, body)
        heads = [(row["one"], row["number"], row["hash"]) for row in self.tables["head"]]
        if heads != [(1, state.events, last)]:
            state.breaks = "the head is not the last event"
        return state

    def _one(self, number: int, body: str) -> None:
        kind = "?"
        try:
            event = parsed(body, LONGEST_EVENT)
            check(isinstance(event, dict), "an event is no object")
            kind = str(event.get("kind"))
            check(dumped(event) == body, "an event in another form")
            self._form(number, event)
        except IllegalError as error:
            self.state.illegal[number] = (kind, str(error))
            return
        try:
            self._time(number, event["time"])
            getattr(self, f"_{kind}")(number, event)
        except IllegalError as error:
            self.state.illegal[number] = (kind, str(error))
        except UnclearError as error:
            self.state.unclear.append(f"event {number}: {error}")

    def _form(self, number: int, event: dict[str, Any]) -> None:
        state, kind = self.state, event.get("kind")
        check(isinstance(kind, str) and kind in FIELDS, "an unknown kind")
        fields = dict(FIELDS[kind])
        if not state.is_new:
            check(kind not in NEW_KINDS, "a kind of schema 3 before it")
            if kind in OLD_FIELDS:
                fields = {name: fields[name] for name in OLD_FIELDS[kind]}
                # Any text was written there.
                fields |= {name: lambda v: isinstance(v, str) for name in ("ledger", "key") if name in fields}
        asked = set(event) - {"kind", "time"}
        if kind == "create":
            asked -= {"ids"}
            check(is_name(event.get("ids", "x")) and event.get("ids", "x") != "", "ids are no text")
        check(asked == set(fields), "other fields than the kind has")
        for name, is_right in fields.items():
            check(is_right(event[name]), f"the field {name} is out of range")
        check((kind == "create") == (number == 1), "create is the first event and no other")

    def _time(self, number: int, text: Any) -> None:
        check(
            isinstance(text, str) and re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00", text) is not None, "time"
        )
        try:
            time = datetime.fromisoformat(text)
        except ValueError:
            raise IllegalError("no time") from None
        # Before the migration each machine wrote the time of its own clock.
        slack = timedelta(0) if self.state.is_new else timedelta(days=1)
        self._may(number, self._last_time is None or time >= self._last_time - slack, "time goes back")
        self._may(number, time <= self.now + timedelta(days=1), "a time to come")
        self._last_time = time

    def _may(self, number: int, is_so: bool, reason: str) -> None:
        check(is_so or number in self.forced, reason)

    # -- facts and wishes

    def _create(self, number: int, event: dict[str, Any]) -> None:
        check(event["schema"] == "3" or (event["schema"] == "2") == ("ids" in event), "another schema")
        self.state.facts = {name: value for name, value in event.items() if name not in ("kind", "time")}
        if not set(event.get("ids", "casefold").split(", ")) <= {"casefold", "nfkc", "strip blanks"}:
            raise UnclearError("ids that this twin does not know")

    def _migrate(self, number: int, event: dict[str, Any]) -> None:
        self._may(number, event["was"] == self.state.facts.get("schema") and not self.state.is_new, "another schema")
        self.state.facts["schema"] = "3"
        for run in self.state.runs.values():
            if run.state == "settled" and not run.keys:
                run.state = "cancelled"

    def _limit(self, number: int, event: dict[str, Any]) -> None:
        self.state.facts["refund"] = event["refund"]

    def _wish(self, number: int, event: dict[str, Any]) -> None:
        wishes = self.state.wishes
        check(event["id"] == len(wishes) + 1 and len(wishes) < 2**15 - 1, "wishes are numbered")
        check(float(event["home"]) in ORDERS, "no order of this registry")
        epsilon, delta, home = float(event["epsilon"]), float(event["delta"]), ORDERS.index(float(event["home"]))
        check(0 < epsilon <= 1000 and 1e-9 <= delta < 1, "a wish out of range")
        check(any(cap > 0 for cap in caps(epsilon, delta, home)), "a wish without room")
        check((epsilon, delta, home) not in wishes, "a wish is there already")
        wishes.append((epsilon, delta, home))
        if not all(type(event[name]) is float for name in ("epsilon", "delta", "home")):
            raise UnclearError("a whole number where a fraction is expected")

    def _quota(self, number: int, event: dict[str, Any]) -> None:
        self.state.quotas[event["project"]] = float(event["share"])

    # -- people

    def _stated(self, number: int, event: dict[str, Any]) -> dict[int, int]:
        """number of a person -> wish, or WITHDRAWN."""
        found = self._roster(self.statements.get(number, {}))
        self._may(number, self._digest == event["digest"], "other people than the digest says")
        check(len(found) == event["people"], "another number of people")
        return found

    def _roster(self, pages: dict[Any, Any]) -> dict[int, int]:
        known, found = hashlib.sha256(), {}
        check(all(is_int(page) and page >= 0 for page in pages), "a page without a number")
        for page in sorted(pages):
            of_page = people_in(pages[page], "h")
            check(bool(of_page), "a page without people")
            check(min(of_page.values()) >= 0, "a row below 0")
            known.update(page.to_bytes(8, "little") + zlib.decompress(pages[page]))
            found |= {page * PAGE + place: row for place, row in of_page.items()}
        check(bool(found), "no people")
        self._digest = known.hexdigest()
        return found

    def _enrol(self, number: int, event: dict[str, Any]) -> None:
        state, rows = self.state, self._stated(number, event)
        first = len(state.people)
        check(event["first"] == first, "people are numbered")
        check(sorted(rows) == list(range(first, first + len(rows))), "people are missing")
        check(all(1 <= wish <= len(state.wishes) for wish in rows.values()), "no such wish")
        names = {row["number"]: row["pseudonym"] for row in self.tables["person"]}
        mine = [names.get(i) for i in sorted(rows)]
        check(all(isinstance(name, bytes) for name in mine), "a person without a pseudonym")
        self._may(number, hashlib.sha256(b"".join(mine)).hexdigest() == event["names"], "other pseudonyms")  # type: ignore[arg-type]
        state.people += [Person(rows[i], state.wishes[rows[i] - 1][2]) for i in sorted(rows)]

    def _change(self, number: int, event: dict[str, Any]) -> None:
        state, rows = self.state, self._stated(number, event)
        check(max(rows) < len(state.people), "a person who is not enrolled")
        check(all(1 <= wish <= len(state.wishes) for wish in rows.values()), "no such wish")
        same = all(state.wishes[wish - 1][2] == state.people[i].home for i, wish in rows.items())
        self._may(number, same, "a home order changes")
        for i, wish in rows.items():
            state.people[i].wish, state.people[i].is_withdrawn = wish, False
            state.people[i].home = state.wishes[wish - 1][2]

    def _withdraw(self, number: int, event: dict[str, Any]) -> None:
        state, rows = self.state, self._stated(number, event)
        check(max(rows) < len(state.people), "a person who is not enrolled")
        check(set(rows.values()) == {WITHDRAWN}, "a withdrawal is the row 0")
        for i in rows:
            state.people[i].is_withdrawn = True

    # -- runs

    def _reserve(self, number: int, event: dict[str, Any]) -> None:
        state, name = self.state, event["run"]
        self._may(number, name not in state.runs, "a run is reserved twice")
        check(name in self.run_rows, "a run without a row")
        text = self.run_rows[name]["plan"]
        plan = Plan.of(text)
        roster = self._roster(self.parts.get(name, {}))
        whole = json.dumps([text, self._digest, event["what"], event["project"]])
        self._may(number, hashlib.sha256(whole.encode()).hexdigest() == event["digest"], "another plan or roster")
        check(max(roster.values()) < plan.rows, "a row that the plan does not have")
        check(max(roster) < len(state.people), "a person who is not enrolled")
        run = Run(event["project"], event["what"], event["digest"], text, plan, roster, plan.costs(tuple(plan.steps)))
        for i, row in roster.items():
            person = state.people[i]
            self._may(number, not person.is_withdrawn, "a person who withdrew")
            epsilon, delta, home = state.wishes[person.wish - 1]
            sums = [a + b for a, b in zip(person.sums, run.costs[row], strict=True)]
            self._may(number, number in self.forced or is_within(sums, caps(epsilon, delta, home)), "no room")
            if run.project in state.quotas:
                used = run.costs[row][home]
                for other in state.runs.values():
                    if other.project == run.project and i in other.roster:
                        used += other.costs[other.roster[i]][home]
                limit = caps(epsilon, delta, home)[home] * state.quotas[run.project]
                if number not in self.forced and abs(used - limit) <= 3:
                    raise UnclearError("a quota at the border")
                self._may(number, used <= limit, "more than the quota")
        state.runs[name] = run
        self._move(run, [[0] * 16 for _ in run.costs], run.costs)

    def _move(self, run: Run, before: list[list[int]], after: list[list[int]]) -> None:
        for i, row in run.roster.items():
            person = self.state.people[i]
            person.sums = [s + b - a for s, a, b in zip(person.sums, before[row], after[row], strict=True)]

    def _of(self, event: dict[str, Any]) -> Run:
        run = self.state.runs.get(event["run"])
        if run is None:
            raise IllegalError("no such run")
        return run

    def _begin(self, number: int, event: dict[str, Any]) -> None:
        run, key = self._of(event), event["key"]
        self._may(number, run.state in ("reserved", "running"), "a run that is over begins")
        if not self.state.is_new:
            if run.keys and run.keys[-1] == key:
                raise UnclearError("the same key again")
        else:
            previous, ledger = event["previous"], event["ledger"]
            if run.state == "reserved":
                self._may(number, previous is None, "a first key replaces none")
            else:
                self._may(number, bool(run.keys) and previous == run.keys[-1], "another key before")
                self._may(number, key not in run.keys, "a key again")
                self._may(number, run.begun in (None, ledger), "another ledger")
            run.begun = ledger
        run.state = "running"
        run.keys.append(key)

    def _settle(self, number: int, event: dict[str, Any]) -> None:
        run, charged, state = self._of(event), event["charged"], self.state
        is_counted = number in self.forced and len(charged) == len(run.plan.steps) and all(n >= 0 for n in charged)
        costs = run.plan.costs(tuple(charged)) if is_counted else run.costs_of(charged)
        if state.is_new:
            self._may(number, run.state == "running", "a run settles that does not go on")
            self._may(number, bool(run.keys) and event["key"] == run.keys[-1], "another key")
            whole = sum(run.plan.steps)
            back = 1 - sum(charged) / whole if whole else 0.0
            self._may(number, event["ledger"] != "" or charged == run.plan.steps, "a refund without a ledger")
            if dumped([event["run"], charged, event["ledger"]]) not in state.approved and number not in self.forced:
                if abs(back - state.refund) < 1e-9 and back != state.refund:
                    raise UnclearError("a refund at the limit")
                self._may(number, back <= state.refund, "more than may be given back")
        else:
            self._may(number, run.state in ("reserved", "running"), "a run that is over settles")
            self._may(number, bool(run.keys) or not any(charged), "a run that never began was charged")
        self._move(run, run.plan.costs(tuple(run.plan.steps)), costs)
        run.state, run.charged, run.ledger, run.costs = "settled", charged, event["ledger"], costs

    def _cancel(self, number: int, event: dict[str, Any]) -> None:
        run, state = self._of(event), self.state
        self._may(number, run.state == "reserved", "a run that began is cancelled")
        zeros = [0] * len(run.plan.steps)
        is_approved = dumped([event["run"], zeros, ""]) in state.approved
        self._may(number, state.refund >= 1 or is_approved, "more than may be given back")
        after = run.costs_of(zeros)
        self._move(run, run.costs, after)
        run.state, run.charged, run.ledger, run.costs = "cancelled", zeros, "", after

    def _approve(self, number: int, event: dict[str, Any]) -> None:
        run = self._of(event)
        check(run.state in ("reserved", "running"), "a run that is over is approved")
        try:
            run.costs_of(event["charged"])
        except IllegalError:
            self.state.approved.add(str(dumped([event["run"], event["charged"], event["ledger"]])))
            raise UnclearError("an approval that can never be used") from None
        self.state.approved.add(str(dumped([event["run"], event["charged"], event["ledger"]])))

    def _quarantine(self, number: int, event: dict[str, Any]) -> None:
        illegal = self.state.illegal
        check(all(n in illegal for n in event["events"]), "a legal event is quarantined, or one a second time")
        if any(illegal[n][0] == "quarantine" for n in event["events"]):
            raise UnclearError("the quarantine of a quarantine")
        for n in event["events"]:
            del illegal[n]
            self.state.quarantined[n] = event["reason"]


# -- the judgement ------------------------------------------------------------------------------------------------


@dataclass
class Judgement:
    """first: number, kind and reason of an illegal event; rows: tables that differ; wrong: people; unclear: why."""

    first: tuple[int, str, str] | None
    rows: list[str]
    wrong: list[int]
    unclear: list[str]

    @property
    def is_legal(self) -> bool:
        return self.first is None and not self.rows and not self.wrong


def replayed(tables: Tables, now: datetime | None = None, forced: frozenset[int] = frozenset()) -> State:
    return Replay(tables, now or datetime.now(UTC), forced).go()


def judge(tables: Tables, now: datetime | None = None) -> Judgement:
    """Whether these tables are what a history of legal events leaves behind."""
    state = replayed(tables, now)
    if state.breaks is not None:
        return Judgement((state.events + 1, "?", state.breaks), [], [], [])
    first = None
    if state.illegal:
        number = min(state.illegal)
        first = (number, *state.illegal[number])
    unclear = list(state.unclear)
    rows = _rows(tables, state, unclear)
    try:
        wrong = _wrong(tables, state)
    except IllegalError as error:
        rows, wrong = [*rows, str(error)], []
    except UnclearError as error:
        unclear, wrong = [*unclear, str(error)], []
    return Judgement(first, rows, wrong, unclear)


def expected(state: State) -> dict[str, dict[Any, tuple[Any, ...]]]:
    """table -> key -> the other columns, of the tables that follow from the events alone."""
    return {
        "fact": {name: (str(value),) for name, value in state.facts.items()},
        "wish": dict(enumerate(state.wishes, 1)),
        "quota": {project: (share,) for project, share in state.quotas.items()},
    }


def run_row(run: Run) -> dict[str, Any]:
    """The columns of a run but its name. What began in the old form has no first line of a ledger."""
    return {
        "state": run.state,
        "kind": run.kind,
        "project": run.project,
        "digest": run.digest,
        "plan": run.text,
        "charged": None if run.charged is None else json.dumps(run.charged),
        "key": run.keys[-1] if run.keys else None,
        "ledger": run.ledger,
        "begun": run.begun,
    }


def _rows(tables: Tables, state: State, unclear: list[str]) -> list[str]:
    """What differs in tables that must be exactly what the events say."""
    found = []
    for name, wanted in expected(state).items():
        stored = {}
        for row in tables[name]:
            key, *others = row.values()
            stored[key] = tuple(others)
        if len(stored) != len(tables[name]) or stored.keys() != wanted.keys():
            found.append(f"{name} has other rows")
        elif any(not _same(stored[key], wanted[key]) for key in wanted):
            found.append(f"{name} has other values")
    left = _left_over(tables, state)
    names = [row["id"] for row in tables["run"]]
    if {name for name in names if name not in left} != set(state.runs) or len(set(names)) != len(names):
        found.append("run has other rows")
    for row in tables["run"]:
        if row["id"] in state.runs:
            wanted_row = run_row(state.runs[row["id"]])
            if any(name in row and not _same((row[name],), (value,)) for name, value in wanted_row.items()):
                is_cancelled = state.runs[row["id"]].state == "cancelled" and row["state"] == "cancelled"
                if is_cancelled and row["charged"] is None and row["ledger"] is None:
                    continue
                found.append("run has other values")
    if any(row["run"] not in state.runs and row["run"] not in left for row in tables["part"]):
        found.append("part has other rows")
    stating = {n for n in range(1, state.events + 1) if n not in state.illegal and n not in state.quarantined}
    kinds = {}
    for row in tables["event"]:
        if row["number"] in stating:
            kinds[row["number"]] = json.loads(row["body"])["kind"]
    for row in tables["statement"]:
        if kinds.get(row["event"]) not in ("enrol", "change", "withdraw") and row["event"] not in state.quarantined:
            found.append("statement has other rows")
    people = [(row["number"], row["pseudonym"]) for row in tables["person"]]
    if not all(is_int(number) for number, _ in people) or sorted(n for n, _ in people) != list(
        range(len(state.people))
    ):
        found.append("person has other rows")
    elif any(not isinstance(name, bytes) or len(name) != 16 for _, name in people):
        found.append("a pseudonym has another length")
    elif len({name for _, name in people}) != len(people):
        found.append("a pseudonym occurs twice")
    if left and any(row["id"] in left for row in tables["run"]):
        unclear.append("rows of a run whose events are quarantined")
    return found


def _left_over(tables: Tables, state: State) -> set[str]:
    """Names of runs that only quarantined events have."""
    found = set()
    for row in tables["event"]:
        if row["number"] in state.quarantined:
            try:
                event = json.loads(row["body"])
                found |= {event["run"]} if isinstance(event.get("run"), str) else set()
            except (ValueError, RecursionError, AttributeError, KeyError):
                continue
    return found - set(state.runs)


def _same(stored: tuple[Any, ...], wanted: tuple[Any, ...]) -> bool:
    return len(stored) == len(wanted) and all(
        a == b and ((isinstance(a, (int, float)) and isinstance(b, (int, float))) or type(a) is type(b))
        for a, b in zip(stored, wanted, strict=True)
    )


def _wrong(tables: Tables, state: State) -> list[int]:
    """Numbers of people whose stored wish, state or sums are not what the events say."""
    cohorts = {row["id"]: row for row in tables["cohort"]}
    stored: dict[int, Any] = {}
    for row in tables["page"]:
        check(is_int(row["number"]) and row["number"] >= 0, "a page without a number")
        of_page = people_in(row["cohorts"], "i")
        check(bool(of_page) or row["number"] * PAGE < max(len(state.people), 1), "a page too many")
        stored |= {row["number"] * PAGE + place: cohort for place, cohort in of_page.items()}
    wrong = [number for number in stored if number >= len(state.people)]
    for number, person in enumerate(state.people):
        cohort = cohorts.get(stored.get(number))
        if cohort is None:
            wrong.append(number)
            continue
        sums = cohort["sums"]
        if (
            not isinstance(sums, bytes)
            or any(not -(2**63) <= s < 2**63 for s in person.sums)
            or sums != struct.pack("<16q", *person.sums)
            or not _same((cohort["wish"], cohort["withdrawn"]), (person.wish, int(person.is_withdrawn)))
        ):
            wrong.append(number)
    return sorted(wrong)
