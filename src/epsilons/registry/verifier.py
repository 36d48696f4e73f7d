"""The verifier: replay a registry from its first event, and compare everything that is stored with the result.

It shares no code with the rest of the registry, only the accountant's table, and takes nothing that it reads on trust:
a value may have any type and any size. docs/registry.md#events has the rules. All that it needs of a database is
`stream(statement, *arguments)`, an iterator of rows.

The first pass reads events in order: the chain, the form of each event, the states of runs, digests. The second takes
16,384 people at a time through all events that touch them: withdrawals, home orders, budgets, quotas, sums.
"""

from __future__ import annotations

import hashlib
import json
import re
import tempfile
import zlib
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ..accounting import filter as weighted_orders
from ..errors import EpsilonsError, RegistryError

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
Stream = Callable[..., Iterator[tuple[Any, ...]]]
#: (page, (PAGE,) number of each wish, (PAGE,) who withdrew, (PAGE, orders) sums)
Page = tuple[int, Ints, Bools, Ints]

ORDERS = [float(order) for order in weighted_orders.ORDERS]
PAGE, NO_PERSON, WITHDRAWN = 1 << 14, -1, 0
UNIT, MOST, MOST_ROWS, LARGEST_EPSILON, SMALLEST_DELTA = 10**12, 2**50, 2**15, 1000.0, 1e-9
#: Sums of up to this many costs, of at most MOST each, fit into 64 bits.
MOST_RUNS = 2**13 - 1
#: Bytes of the longest event, plan and page.
BODY, PLAN, BLOB = 1 << 16, 1 << 24, 1 << 17
#: Rows that one statement asks for; runs are joined while their tables have at most so many combinations of rows.
AT_ONCE, MOST_JOINED = 128, 4096
#: The clocks of machines differ, and schema 1 and 2 wrote them as they were.
CLOCKS = timedelta(days=1)
#: The kinds of events that schema 3 added.
NEW = ("limit", "cancel", "approve", "quarantine")


class Fault(NamedTuple):
    """What is wrong. number, kind: of the event; None if a table is wrong."""

    number: int | None
    kind: str | None
    reason: str

    def __str__(self) -> str:
        return (
            self.reason if self.number is None else f"event {self.number:,} ({self.kind or 'unknown'}): {self.reason}"
        )


@dataclass(frozen=True)
class Verdict:
    """What a verification found.

    people, runs, events  numbers of them
    wrong                 people for whom something else is stored than the events say
    over                  people who were charged beyond their lifetime budget, at the moment of a reservation
    first                 the first event that is wrong, or the table that is; None if there is none
    quarantined           (number, reason) of events that the owner declared to be of no effect
    """

    people: int
    runs: int
    events: int
    wrong: int = 0
    over: int = 0
    first: Fault | None = None
    quarantined: tuple[tuple[int, str], ...] = ()

    @property
    def is_right(self) -> bool:
        return self.wrong == 0 and self.over == 0 and self.first is None


def verify(stream: Stream, now: datetime) -> Verdict:
    """Replay everything. What a database itself raises is raised, and nothing else."""
    ignored: set[int] = set()
    try:
        while True:
            history, wrong = _History(stream, now, ignored), 0
            for page in history.pages():
                wrong += 0 if history.fault else _differences(stream, page)
            if not (more := history.unfounded()):
                break
            ignored |= more
        fault = history.fault or _wrong_table(stream, history)
    except _MALFORMED:
        return Verdict(0, 0, 0, first=Fault(None, None, "a table has values that no registry has"))
    listed = tuple((n, history.reasons[q]) for n, q in sorted(history.named.items()) if q in history.reasons)
    return Verdict(history.people, len(history.runs), history.events, wrong, history.over, fault, listed)


def replayed(stream: Stream, now: datetime) -> Iterator[Page]:
    """The pages as the events say. Raises RegistryError in the end if an event is wrong."""
    history = _History(stream, now)
    yield from history.pages()
    if history.fault or history.unfounded():
        raise RegistryError(f"The registry was altered: {history.fault or 'a legal event is in quarantine'}.")


def excluded(stream: Stream, now: datetime, day: str) -> tuple[int, int]:
    """(people who withdrew before this day, and stayed so; how many of them a run took up since then).

    Raises RegistryError where an event was altered.
    """
    history, people, taken = _History(stream, now, day=day), 0, 0
    if history.fault:
        raise RegistryError(f"The registry was altered: {history.fault}.")
    for page in range(history.page_count):
        gone, wrong = np.zeros(PAGE, dtype=bool), np.zeros(PAGE, dtype=bool)
        for number, rows in history.steps(page):
            here = (rows != NO_PERSON) & (number not in history.named)
            if number in history.reserves:
                wrong |= gone & here
            elif number not in history.ends:
                gone = (gone & ~here) | (here & (rows == WITHDRAWN) & (number in history.early))
        people, taken = people + int(gone.sum()), taken + int((gone & wrong).sum())
    return people, taken


class _Wrong(Exception):
    """An event that the rules forbid. str(error): why."""


#: What values of other types and forms raise when they are read.
_MALFORMED = (_Wrong, EpsilonsError, ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
_MALFORMED += (zlib.error,)  # RecursionError is a RuntimeError


def _check(is_right: Any, reason: str) -> None:
    if not is_right:
        raise _Wrong(reason)


def _is_text(value: Any, longest: int = 200) -> bool:
    return isinstance(value, str) and len(value) <= longest and value.isprintable()


def _is_hash(value: Any, digits: int = 64) -> bool:
    return isinstance(value, str) and re.fullmatch(f"[0-9a-f]{{{digits}}}", value) is not None


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0


def _are_counts(value: Any) -> bool:
    return isinstance(value, list) and all(map(_is_count, value))


#: Form of each field; `_History.on_…` say which fields each kind has.
FIELDS: dict[str, Callable[[Any], Any]] = {
    **dict.fromkeys(["digest", "names", "pepper"], _is_hash),
    **dict.fromkeys(["run", "what", "project", "key", "ledger", "ids"], _is_text),
    **dict.fromkeys(["first", "people"], _is_count),
    **dict.fromkeys(["charged", "events"], _are_counts),
    **dict.fromkeys(["epsilon", "delta"], lambda v: type(v) is float),
    **dict.fromkeys(["refund", "share"], lambda v: type(v) in (int, float) and 0 <= v <= 1),
    **dict.fromkeys(["schema", "was"], lambda v: v in ("1", "2", "3")),
    "id": lambda v: _is_count(v) or _is_hash(v, 32),
    "home": lambda v: type(v) is float and v in ORDERS,
    "previous": lambda v: v is None or _is_text(v),
    "reason": lambda v: _is_text(v, 500),
}


@dataclass(slots=True)
class _Run:
    """A run. facts: kind, project, digest; share: quota when it was reserved; full, final: places of its costs."""

    name: str
    facts: tuple[str, str, str]
    table: tuple[Any, Any, tuple[int, ...]]
    pages: Sequence[int]
    share: float | None
    full: int
    final: int = -1
    state: str = "reserved"
    keys: list[str] = field(default_factory=list)
    begun: str | None = None
    charged: tuple[int, ...] | None = None
    ledger: str | None = None
    approved: set[tuple[tuple[int, ...], str]] = field(default_factory=set)

    @property
    def key(self) -> str | None:
        return self.keys[-1] if self.keys else None


class _Sums:
    """(PAGE, orders) sums of costs. Runs with few rows are joined, so that one look-up adds several of them."""

    def __init__(self) -> None:
        self._sums, self._index = np.zeros((PAGE, len(ORDERS)), dtype=np.int64), np.zeros(PAGE, dtype=np.int64)
        self._table: Ints = self._sums[:1].copy()

    def add(self, rows: Ints, costs: Ints) -> None:
        """costs: with a last row of 0, which is that of NO_PERSON."""
        if len(self._table) * len(costs) > MOST_JOINED:
            self.now()
        self._index = self._index * len(costs) + (rows + 1)
        self._table = (self._table[:, None] + np.roll(costs, 1, axis=0)).reshape(-1, len(ORDERS))

    def now(self) -> Ints:
        if len(self._table) > 1:
            for some in (slice(i, i + 2048) for i in range(0, PAGE, 2048)):
                self._sums[some] += self._table[self._index[some]]
            self._table, self._index = np.zeros_like(self._table[:1]), np.zeros_like(self._index)
        return self._sums


class _History:
    """The replay of all events, up to the first that is wrong.

    ignored  quarantines that are wrong, so that the events that they name have their effect
    """

    def __init__(self, stream: Stream, now: datetime, ignored: set[int] | None = None, day: str = "") -> None:
        self._stream, self._ignored, self._day = stream, ignored or set(), day
        self._latest, self._time, self._costs = now + CLOCKS, "", tempfile.SpooledTemporaryFile(1 << 26)  # noqa: SIM115
        self._names = stream("select number, pseudonym from person order by number")
        self.fault: Fault | None = None
        self.events = self.people = self.over = self.statements = 0
        self.facts: dict[str, str] = {}
        self.refund = 1.0
        self.wishes: dict[tuple[float, float, int], None] = {}
        self.quotas: dict[str, float] = {}
        self.runs, self.reserves, self.ends = dict[str, _Run](), dict[int, _Run](), dict[int, _Run]()
        self.illegal, self.early, self.excused, self._quoted = set[int](), set[int](), set[str](), set[str]()
        self._touched: dict[int, array[int]] = {}
        self.reasons: dict[int, str] = {}
        self.named = {n: q for q, numbers in self._quarantines() for n in numbers}
        self._read()
        self._homes = np.array([0, *(home for *_, home in self.wishes)], dtype=np.int64)
        self._caps = np.concatenate([np.full((1, len(ORDERS)), -1), _caps(list(self.wishes))])

    @property
    def page_count(self) -> int:
        return -(-self.people // PAGE)

    def unfounded(self) -> set[int]:
        """Quarantines that are wrong."""
        found = self.named.items()
        return {q for n, q in found if q <= self.events and (q not in self.reasons or n not in self.illegal)}

    # -- the first pass: events in order -----------------------------------------------------------

    def _quarantines(self) -> Iterator[tuple[int, list[int]]]:
        """(number, the events that it names and no earlier one does), before any check of it."""
        seen: set[int] = set()
        select = f"select number, {_up_to('body', BODY)} from event where body like %s order by number"
        for number, body in self._stream(select, '%"kind": "quarantine"%'):
            try:
                event = _parsed(body)
                is_one = event["kind"] == "quarantine" and _are_counts(event["events"])
            except _MALFORMED:
                continue
            if is_one and number not in self._ignored:
                yield number, (new := [n for n in event["events"] if n < number and n not in seen])
                seen.update(new)

    def _read(self) -> None:
        last = "0" * 64
        select = f"select number, previous, hash, {_up_to('body', 1 << 20)} from event order by number"
        for number, previous, stored, body in self._stream(select):
            if (number, previous, stored) != (
                self.events + 1,
                last,
                hashlib.sha256(f"{last}{body}".encode()).hexdigest(),
            ):
                self.fault = Fault(self.events + 1, None, "it is not what was written")
                return
            last, self.events, event = stored, number, {}
            try:
                event = _parsed(body)
                next(step := self._step(number, event))
            except _MALFORMED as error:
                reason = str(error) if isinstance(error, _Wrong) else "its fields are not those of its kind"
                self._found(number, event.get("kind"), reason)
            else:
                self._time = event["time"]
                if number not in self.named:
                    next(step, None)
            if number in self.named:
                self.excused.add(str(event.get("run")))
            if self.fault:
                return
        if list(islice(self._stream("select one, number, hash from head"), 2)) != [(1, self.events or 1, last)]:
            self.fault = Fault(self.events + 1, None, "it is missing, or the head is not the last event")

    def _step(self, number: int, event: dict[str, Any]) -> Iterator[None]:
        """Check an event. The iterator goes on with its effect."""
        kind, is_old = event["kind"], self.facts.get("schema", "3") != "3"
        fields = {name: value for name, value in event.items() if name not in ("kind", "time")}
        _check((kind == "create") == (number == 1), "a registry is created once, by its first event")
        _check(not is_old or kind not in NEW, "a registry that was not migrated has no such event")
        _check(all(FIELDS[name](value) for name, value in fields.items()), "a field has another form or range")
        _check(re.fullmatch("[0-9]{4}(-[0-9]{2}){2}T([0-9]{2}:){2}[0-9]{2}[+]00:00", event["time"]), "its time is none")
        time, before = (datetime.fromisoformat(text) for text in (event["time"], self._time or event["time"]))
        _check(time <= self._latest, "its time is in the future")
        _check(time >= before - is_old * CLOCKS, "its time is before that of an earlier event")
        if event["time"] < self._day:
            self.early.add(number)
        handler = f"{'old' if is_old and kind in ('begin', 'settle') else 'on'}_{kind}"
        made: Iterator[None] = getattr(self, handler)(number, **fields)
        return made

    def _found(self, number: int, kind: Any, reason: str) -> None:
        """This event is wrong."""
        if number in self.named:
            self.illegal.add(number)
        elif self.fault is None or number < (self.fault.number or 0):
            self.fault = Fault(number, kind if hasattr(self, f"on_{kind}") else None, reason)

    # Each kind: checks, and after `yield` the effect.

    def on_create(self, number: int, schema: str, id: str, pepper: str, ids: str = "") -> Iterator[None]:
        _check(isinstance(id, str) and schema in ("3", "2" if ids else "1"), "its fields are not those of its schema")
        yield
        self.facts = {"schema": schema, "id": id, "pepper": pepper} | ({"ids": ids} if ids else {})

    def on_migrate(self, number: int, schema: str, was: str) -> Iterator[None]:
        _check(schema == "3" and was == self.facts["schema"] != "3", "it migrates from another schema")
        yield
        self.facts["schema"] = schema

    def on_limit(self, number: int, refund: float) -> Iterator[None]:
        yield
        self.refund = refund

    def on_wish(self, number: int, id: int, epsilon: float, delta: float, home: float) -> Iterator[None]:
        wish = (epsilon, delta, ORDERS.index(home))
        _check(id == len(self.wishes) + 1 < MOST_ROWS and wish not in self.wishes, "it is not the next new budget")
        is_kept = 0 < epsilon <= LARGEST_EPSILON and SMALLEST_DELTA <= delta < 1 and (_caps([wish]) > 0).any()
        _check(is_kept, "no account can keep this lifetime budget")
        yield
        self.wishes[wish] = None

    def on_enrol(self, number: int, digest: str, first: int, people: int, names: str) -> Iterator[None]:
        pages, low, high = self._people("statement", "event", number, digest, people)
        _check((first, low, high) == (self.people, first, first + people - 1), "its people are not the next ones")
        known = hashlib.sha256()
        for place in range(first, first + people, PAGE):
            some = list(islice(self._names, min(PAGE, first + people - place)))
            _check([n for n, _ in some] == list(range(place, place + len(some))), "a person is missing")
            known.update(b"".join(one for _, one in some if len(one) == 16))
        _check(known.hexdigest() == names, "the pseudonyms are not those that were enrolled")
        yield
        self.people += people
        self._touch(number, pages)

    def on_change(self, number: int, digest: str, people: int, most: int | None = None) -> Iterator[None]:
        pages, _, high = self._people("statement", "event", number, digest, people, most)
        _check(high < self.people, "some of its people are not enrolled")
        self._touch(number, pages)
        yield

    def on_withdraw(self, number: int, digest: str, people: int) -> Iterator[None]:
        return self.on_change(number, digest, people, WITHDRAWN)

    def on_quota(self, number: int, project: str, share: float) -> Iterator[None]:
        _check(share > 0, "its share is 0")
        yield
        self.quotas[project] = share
        self._quoted.add(project)

    def on_reserve(self, number: int, run: str, digest: str, what: str, project: str) -> Iterator[None]:
        _check(run not in self.runs, "this run was reserved before")
        stored = self._stream(f"select kind, project, digest, {_up_to('plan', PLAN)} from run where id = %s", run)
        *facts, plan = next(stored, (None, None))
        _check(facts == [what, project, digest], "the run that is stored is another one")
        table = _table(plan)
        pages, _, high = self._people("part", "run", run, "", 0, table[0].shape[1] - 1)
        said = hashlib.sha256(json.dumps([plan, self._roster, what, project]).encode()).hexdigest()
        _check(said == digest, "its plan or its people are not those that were reserved")
        _check(high < self.people, "some of its people are not enrolled")
        made = _Run(run, (what, project, digest), table, pages, self.quotas.get(project), self._stored_costs(table))
        self.reserves[number] = made
        self._touch(number, pages)
        yield
        self.runs[run] = made

    def on_begin(self, number: int, run: str, key: str, previous: str | None, ledger: str) -> Iterator[None]:
        found = self._run(run, "reserved", "running")
        _check(previous == found.key and key not in found.keys, "its key does not follow the one before")
        _check(found.begun in (None, ledger), "it has begun with another ledger")
        yield
        found.state, found.begun = "running", ledger
        found.keys.append(key)

    def old_begin(self, number: int, run: str, key: str) -> Iterator[None]:
        found = self._run(run, "reserved", "running")
        _check(key != found.key, "it has begun under this key before")
        yield
        found.state = "running"
        found.keys.append(key)

    def on_settle(self, number: int, run: str, charged: list[int], ledger: str, key: str) -> Iterator[None]:
        found = self._run(run, "running")
        _check(key == found.key, "its key is another one")
        _check(ledger or tuple(charged) == found.table[2], "steps are given back without a ledger")
        return self._end(number, found, "settled", charged, ledger)

    def old_settle(self, number: int, run: str, charged: list[int], ledger: str) -> Iterator[None]:
        return self._end(number, self._run(run, "reserved", "running"), "settled", charged, ledger)

    def on_cancel(self, number: int, run: str) -> Iterator[None]:
        found = self._run(run, "reserved")
        return self._end(number, found, "cancelled", [0] * len(found.table[2]), "")

    def on_approve(self, number: int, run: str, charged: list[int], ledger: str) -> Iterator[None]:
        found = self._run(run, "reserved", "running")
        yield
        found.approved.add((tuple(charged), ledger))

    def on_quarantine(self, number: int, events: list[int], reason: str) -> Iterator[None]:
        is_new = number not in self._ignored and all(self.named.get(n) == number for n in events)
        _check(is_new, "an event that it names is legal, or in quarantine already")
        _check(events and sorted(set(events)) == events, "the numbers of its events do not rise")
        yield
        self.reasons[number] = reason

    def _run(self, run: str, *states: str) -> _Run:
        _check(run in self.runs, "there is no such run")
        _check(self.runs[run].state in states, f"the run is {self.runs[run].state}")
        return self.runs[run]

    def _end(self, number: int, run: _Run, state: str, charged: list[int], ledger: str) -> Iterator[None]:
        rates, noises, steps = run.table
        _check(len(charged) == len(steps), "its phases are others")
        _check(all(n <= most for n, most in zip(charged, steps, strict=True)), "it charges more than was reserved")
        is_within = 1 - sum(charged) / max(sum(steps), 1) <= self.refund or (tuple(charged), ledger) in run.approved
        _check(is_within, "it gives back more than the limit, and nobody approved it")
        final = run.full if tuple(charged) == steps else self._stored_costs((rates, noises, tuple(charged)))
        yield
        run.state, run.charged, run.ledger, run.final = state, tuple(charged), ledger, final
        if final != run.full:
            self.ends[number] = run
            self._touch(number, run.pages)

    def _touch(self, number: int, pages: Sequence[int]) -> None:
        for page in pages:
            self._touched.setdefault(page, array("q")).append(number)

    def _people(
        self, table: str, column: str, key: Any, digest: str, people: int, most: int | None = None
    ) -> tuple[Sequence[int], int, int]:
        """(pages, the lowest number of a person, the highest) of a statement or a run. most: the last row that exists."""
        known, pages, count, low, high = hashlib.sha256(), array("q"), 0, 1 << 62, -1
        least, most = (1, len(self.wishes)) if most is None else (0, most)
        select = f"select page, {_up_to('rows', BLOB)} from {table} where {column} = %s order by page"
        for page, stored in self._stream(select, key):
            _check(_is_count(page) and page < 1 << 48 and (not pages or page > pages[-1]), "its pages do not rise")
            rows = _unpacked(stored, np.int16)
            here = np.flatnonzero(rows != NO_PERSON)
            _check(len(here) and least <= rows[here].min() and rows[here].max() <= most, "its rows are out of range")
            known.update(page.to_bytes(8, "little") + rows.tobytes())
            low, high, count = min(low, page * PAGE + int(here[0])), page * PAGE + int(here[-1]), count + len(here)
            pages.append(page)
        self._roster = known.hexdigest()
        is_said = table == "part" or (digest, people) == (self._roster, count)
        _check(count and is_said, "its people are not what is stored")
        self.statements += len(pages) * (table == "statement" and key not in self.named)
        return pages, low, high

    # -- costs of runs: (rows + 1, orders) pico-nats, the last row 0; in a file once they are many ------------------

    def _stored_costs(self, table: tuple[Any, Any, tuple[int, ...]]) -> int:
        """The place of these costs."""
        with np.errstate(all="ignore"):
            costs = np.ceil(np.minimum(weighted_orders.sums(*table, table[0].shape[1]) * UNIT, MOST))
        _check(not np.isnan(costs).any(), "its plan has no costs")
        self._costs.seek(0, 2)
        place = self._costs.tell()
        self._costs.write(costs.astype(np.int64).tobytes() + bytes(8 * len(ORDERS)))
        return place

    def _costs_at(self, place: int, run: _Run) -> Ints:
        self._costs.seek(place)
        stored = self._costs.read((run.table[0].shape[1] + 1) * 8 * len(ORDERS))
        return np.frombuffer(stored, dtype=np.int64).reshape(-1, len(ORDERS))

    # -- the second pass: people, a page at a time -------------------------------------------------

    def pages(self) -> Iterator[Page]:
        """Replay page by page. What is wrong is in `fault`, `over` and `illegal` afterwards."""
        for page in range(self.page_count):
            yield page, *self._page(page)

    def steps(self, page: int) -> Iterator[tuple[int, npt.NDArray[np.int16]]]:
        """(number, rows) of the events that touch this page."""
        for numbers in _batches(self._touched.get(page, ())):
            runs = {n: run.name for n in numbers if (run := self.reserves.get(n) or self.ends.get(n))}
            keys = {"part": sorted(set(runs.values())), "statement": [n for n in numbers if n not in runs]}
            found: dict[Any, Any] = {}
            for (table, some), column in zip(keys.items(), ("run", "event"), strict=True):
                select = f"select {column}, rows from {table} where page = %s and {column} in ({_marks(some)})"
                found |= dict(self._stream(select, page, *some)) if some else {}
            for n in numbers:
                yield n, _unpacked(found[runs.get(n, n)], np.int16)

    def _page(self, page: int) -> tuple[Ints, Bools, Ints]:
        wish, withdrawn, was_over = (
            np.zeros(PAGE, dtype=np.int64),
            np.zeros(PAGE, dtype=bool),
            np.zeros(PAGE, dtype=bool),
        )
        home, cap, spent, sums, reserved = wish, wish - 1, wish, _Sums(), 0
        used: dict[str, Ints] = {}
        for number, small in self.steps(page):
            rows, here, is_named = small.astype(np.int64), small != NO_PERSON, number in self.named
            run = self.reserves.get(number) or self.ends.get(number)
            if run is None:
                stays = here & (small != WITHDRAWN)
                if (stays & (wish > 0) & (self._homes[np.where(stays, rows, 0)] != home)).any():
                    self._found(number, "change", "it changes a home order")
                if not is_named:
                    withdrawn, wish = np.where(here, ~stays, withdrawn), np.where(stays, rows, wish)
                    home = self._homes[wish]
                    cap = self._caps[wish, home]
                continue
            costs = self._costs_at(run.full, run)
            costs = costs if number in self.reserves else self._costs_at(run.final, run) - costs
            change = costs.reshape(-1)[rows * len(ORDERS) + home]
            uses = change + used.get(run.facts[1], 0)
            if number in self.reserves:
                reserved += 1
                over = here & (withdrawn | (spent + change > cap))
                if over.any() or reserved > MOST_RUNS:
                    # Who is over at the home order fits if they do at another one.
                    which = np.flatnonzero(here if reserved > MOST_RUNS else over)
                    after = sums.now()[which] + costs[rows[which]]
                    fits = (after <= self._caps[wish[which]]).any(axis=1) & (after >= 0).all(axis=1)
                    over[which] = ~fits | withdrawn[which]
                if over.any():
                    self._found(number, "reserve", "it charges people who withdrew, or beyond their lifetime budget")
                    was_over |= over & (not is_named)
                if run.share is not None and (here & (uses > cap * run.share)).any():
                    self._found(number, "reserve", "its project uses more than its quota")
            if not is_named:
                spent = spent + change
                sums.add(rows, costs)
                if run.facts[1] in self._quoted:
                    used[run.facts[1]] = uses
        self.over += int(was_over.sum())
        return wish, withdrawn, sums.now()


def _up_to(column: str, longest: int) -> str:
    """SQL for a value, or null if it is longer."""
    return f"case when length({column}) <= {longest} then {column} end"


def _marks(values: Sequence[Any]) -> str:
    return ", ".join(["%s"] * len(values))


def _batches(values: Sequence[int]) -> Iterator[Sequence[int]]:
    return (values[i : i + AT_ONCE] for i in range(0, len(values), AT_ONCE))


def _unpacked(stored: Any, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """(PAGE,) numbers. Not more is unpacked than a page has."""
    size, unpack = PAGE * np.dtype(dtype).itemsize, zlib.decompressobj()
    _check(isinstance(stored, bytes) and len(stored) <= BLOB, "a page of it is missing, or too large")
    raw = unpack.decompress(stored, size + 1)
    _check(len(raw) == size and unpack.eof and not unpack.unused_data, "a page of it has another size")
    return np.frombuffer(raw, dtype=dtype)


def _written(text: Any, longest: int) -> Any:
    """The JSON value of this text. A value has one form only, so that nobody reads it in another way."""
    _check(isinstance(text, str) and len(text) <= longest, "it is missing, or too long")
    value = json.loads(text)
    _check(json.dumps(value, sort_keys=True, allow_nan=False) == text, "it is written in another form")
    return value


def _parsed(body: Any) -> dict[str, Any]:
    event = _written(body, BODY)
    _check(isinstance(event, dict), "it is no event")
    return dict(event)


def _table(plan: Any) -> tuple[Any, Any, tuple[int, ...]]:
    """(phases, rows) rates, (phases, rows) noise multipliers, (phases,) steps."""
    values = _written(plan, PLAN)
    _check(set(values) == {"rates", "noises", "steps"} and _are_counts(values["steps"]), "its plan is no table")
    types = [{type(value) for phase in values[name] for value in phase} for name in ("rates", "noises")]
    _check(types[0] <= {int, float} and types[1] <= {int, float, type(None)}, "its plan is no table of numbers")
    noises = [[np.inf if noise is None else noise for noise in phase] for phase in values["noises"]]
    rates, noise = (np.array(numbers, dtype=np.float64) for numbers in (values["rates"], noises))
    is_table = rates.ndim == 2 and rates.shape == noise.shape and 0 not in rates.shape and rates.shape[1] <= MOST_ROWS
    _check(is_table and len(values["steps"]) == len(rates), "its plan is no table")
    _check(((rates >= 0) & (rates <= 1)).all() and (noise > 0).all(), "its plan has numbers out of range")
    return rates, noise, tuple(values["steps"])


def _caps(wishes: Sequence[tuple[float, float, int]]) -> Ints:
    """(wishes, orders) pico-nats that may be spent at each order, rounded down."""
    epsilon, delta, home = np.array(wishes, dtype=np.float64).reshape(-1, 3).T
    return np.floor((epsilon[:, None] - weighted_orders.offsets(delta, home)) * UNIT).astype(np.int64) - 1


def _differences(stream: Stream, replayed: Page) -> int:
    """How many people of this page have other sums, another wish or another state than the replay."""
    page, wish, withdrawn, sums = replayed
    try:
        cohorts = _unpacked(
            next(stream(f"select {_up_to('cohorts', BLOB)} from page where number = %s", page))[0], np.int32
        )
    except (*_MALFORMED, StopIteration):
        return PAGE
    distinct, which = np.unique(cohorts, return_inverse=True)
    known = np.full((len(distinct), 2 + len(ORDERS)), -1, dtype=np.int64)
    known[distinct == 0] = 0  # nobody is enrolled there
    for some in _batches([one for one in distinct.tolist() if one != 0]):
        select = f"select id, wish, withdrawn, {_up_to('sums', 1024)} from cohort where id in ({_marks(some)})"
        for one, *stated, stored in stream(select, *some):
            if all(_is_count(n) and n < MOST_ROWS for n in stated) and isinstance(stored, bytes) and len(stored) == 128:
                known[np.searchsorted(distinct, one)] = [*stated, *np.frombuffer(stored, dtype=np.int64)]
    return int((known[which] != np.column_stack([wish, withdrawn, sums])).any(axis=1).sum())


def _wrong_table(stream: Stream, history: _History) -> Fault | None:
    """The first table that is not what the events say."""
    begun = ["begun"] if history.facts["schema"] == "3" else []
    columns = ", ".join(["id, state, kind, project, digest, key, ledger, charged", *begun])
    facts = history.facts | ({"refund": str(history.refund)} if history.refund < 1 else {})
    runs = (
        (run.name, run.state, *run.facts, run.key, run.ledger, run.charged and json.dumps(run.charged))
        + ((run.begun,) if begun else ())
        for run in history.runs.values()
    )
    unknown = history.excused - history.runs.keys()
    parts = sum(len(run.pages) for run in history.runs.values())
    for table, found, wanted in (
        ("fact", stream("select name, value from fact"), facts.items()),
        (
            "wish",
            stream("select id, epsilon, delta, home from wish"),
            [(i, *w) for i, w in enumerate(history.wishes, 1)],
        ),
        ("quota", stream("select project, share from quota"), history.quotas.items()),
        ("run", (row for row in stream(f"select {columns} from run") if row[0] not in unknown), runs),
        ("person", stream("select count(*) from person"), [(history.people,)]),
        ("part", _counted(stream, "part", "run", unknown), [(parts,)]),
        ("statement", _counted(stream, "statement", "event", history.named), [(history.statements,)]),
        ("page", stream("select number from page"), ((page,) for page in range(history.page_count))),
    ):
        rest = {row[0]: tuple(row) for row in wanted}
        if not all(rest.pop(row[0], None) == row for row in found) or rest:
            return Fault(None, None, f"the table {table} is not what the events say")
    return None


def _counted(stream: Stream, table: str, column: str, excused: Any) -> Iterator[tuple[int]]:
    rows = stream(f"select {column}, count(*) from {table} group by {column}")
    yield (sum(count for key, count in rows if key not in excused),)
