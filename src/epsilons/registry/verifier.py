"""The verifier: replay a registry from its first event, and compare everything that is stored with the result.

It shares no code with the rest of the registry, only the accountant's table, and takes nothing that it reads on trust:
a value may have any type and any size. docs/registry.md#events has the rules. All that it needs of a database is
`stream(statement, *arguments)`, an iterator of rows.

The first pass reads events in order: the chain, the form of each event, the states of runs, digests. The second takes
16,384 people at a time through all events that touch them: withdrawals, home orders, budgets, quotas, sums.
Between them rosters (as they are stored, compressed) and costs lie in a temporary file, in memory up to 64 MiB.
"""

from __future__ import annotations

import hashlib
import json
import re
import tempfile
import zlib
from array import array
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timedelta
from itertools import chain, islice, repeat
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ..accounting import filter as weighted_orders
from ..errors import EpsilonsError

Ints = npt.NDArray[np.int64]
Stream = Callable[..., Iterator[tuple[Any, ...]]]
#: ε, δ, place of the home order
Wish = tuple[float, float, int]
#: (phases, rows) rates, (phases, rows) noise multipliers, (phases,) steps
Table = tuple[Any, Any, Sequence[int]]

ORDERS = [float(order) for order in weighted_orders.ORDERS]
PAGE, NO_PERSON, WITHDRAWN = 1 << 14, -1, 0
UNIT, MOST, MOST_ROWS, LARGEST_EPSILON, SMALLEST_DELTA = 10**12, 2**50, 2**15, 1000.0, 1e-9
#: Sums of up to so many costs, of at most MOST each, fit into 64 bits. Runs are joined up to so many rows together.
MOST_RUNS, MOST_JOINED = 2**13 - 1, 4096
#: Characters of the longest event and plan, bytes of the longest page.
BODY, PLAN, BLOB = 1 << 16, 1 << 24, 1 << 17
#: The clocks of machines differ, and schema 1 and 2 wrote times as they were.
CLOCKS = timedelta(days=1)
#: Kinds that schema 3 added.
NEW = ("limit", "cancel", "approve", "quarantine")
#: Types and forms of fields. Any other is a text, printable and short.
HASH, COUNTS = "str [0-9a-f]{64}", r"list \[([0-9]+(, [0-9]+)*)?\]"
FORMS = dict.fromkeys(("digest", "names", "pepper", "key"), HASH) | dict.fromkeys(("charged", "events"), COUNTS)
FORMS |= dict.fromkeys(("epsilon", "delta", "home"), "float .*") | dict.fromkeys(("share", "refund"), "(int|float) .*")
FORMS |= {"first": "int [0-9]+", "people": "int [0-9]+", "id": "int [0-9]+|str [0-9a-f]{32}", "ledger": f"str |{HASH}"}
FORMS |= {"previous": "NoneType None|str .{0,200}", "reason": "str .{0,500}", "schema": "str [123]"}
FORMS |= {"time": "str [0-9]{4}(-[0-9]{2}){2}T([0-9]{2}:){2}[0-9]{2}[+]00:00"}


class Fault(NamedTuple):
    """What is wrong. number, kind: of the event; None if a table is wrong."""

    number: int | None
    kind: str | None
    reason: str

    def __str__(self) -> str:
        return f"event {self.number:,} ({self.kind or 'unknown'}): {self.reason}" if self.number else self.reason


@dataclass(frozen=True)
class Verdict:
    """What a verification found.

    people, runs, events  numbers of them
    wrong                 people for whom something else is stored than the events say
    over                  people who were charged beyond their lifetime budget, at the moment of a reservation
    first                 the first event that is wrong, or the table that is; None if there is none
    quarantined           (number, reason) of events that the owner declared to be of no effect
    excluded              people who withdrew before the day that was asked about, and stayed so
    """

    people: int
    runs: int
    events: int
    wrong: int = 0
    over: int = 0
    first: Fault | None = None
    quarantined: tuple[tuple[int, str], ...] = ()
    excluded: int = 0

    @property
    def is_right(self) -> bool:
        return self.wrong == 0 and self.over == 0 and self.first is None


def verify(stream: Stream, now: datetime, day: str = "") -> Verdict:
    """Replay everything. What a database itself raises is raised, and nothing else."""
    ignored, more = set[int](), {0}
    try:
        while more:
            history = History(stream, now, ignored, day)
            wrong = sum(_differences(stream, p) for p in map(history.page, range(history.pages)) if not history.fault)
            ignored |= (more := history.unfounded())
        fault = history.fault or _wrong_table(stream, history)
    except _MALFORMED:
        return Verdict(0, 0, 0, first=Fault(None, None, "a table has values that no registry has"))
    listed = tuple((n, history.reasons[q]) for n, q in sorted(history.named.items()) if q in history.reasons)
    return Verdict(history.people, len(history.runs), history.events, wrong, history.over, fault, listed, history.gone)


class _Wrong(ValueError):
    """An event that the rules forbid. str(error): why."""


#: What values of other types and forms raise when they are read; RecursionError is a RuntimeError.
_MALFORMED: tuple[type[Exception], ...] = (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError)
_MALFORMED += (EpsilonsError, ValueError, zlib.error)


def _check(is_right: Any, reason: str) -> None:
    if not is_right:
        raise _Wrong(reason)


def _fits(name: str, value: Any, is_old: bool = False) -> bool:
    """Whether a field has its type and form. Before schema 3, keys and hashes of ledgers were any text."""
    if is_old and name in ("key", "ledger"):
        return isinstance(value, str)
    text = f"{type(value).__name__} {value}"
    return text.isprintable() and re.fullmatch(FORMS.get(name, "str .{0,200}"), text) is not None


@dataclass(slots=True)
class _Run:
    """A run.

    facts        kind, project, digest
    pages        page -> place of its rows
    share        quota when it was reserved
    full, final  places of its costs
    """

    name: str
    facts: tuple[str, str, str]
    table: Table
    pages: dict[int, int]
    share: float | None
    full: int
    keys: list[str | None]
    state: str = "reserved"
    final: int = -1
    begun: str | None = None
    charged: list[int] | None = None
    ledger: str | None = None

    @property
    def stored(self) -> tuple[Any, ...]:
        """The row of table `run`, without the plan."""
        charged = self.charged and str(self.charged)
        return self.name, *self.facts, self.state, charged, self.ledger, self.keys[-1], self.begun


class _Adder:
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
        for some in (slice(i, i + 2048) for i in range(0, PAGE, 2048)):  # what fits into a cache
            self._sums[some] += self._table[self._index[some]]
        self._table, self._index = np.zeros_like(self._table[:1]), np.zeros_like(self._index)
        return self._sums


class History:
    """The replay of all events, up to the first that is wrong.

    ignored  quarantines that are wrong, so that the events that they name have their effect
    day      `gone` counts people who withdrew before it, and stayed so
    """

    def __init__(self, stream: Stream, now: datetime, ignored: set[int] | None = None, day: str = "") -> None:
        self._stream, self._ignored, self._day, self._latest = stream, ignored or set(), day, now + CLOCKS
        self._names = chain(stream("select number, pseudonym from person order by number"), repeat((None, b"")))
        self._file = tempfile.SpooledTemporaryFile(1 << 26)  # noqa: SIM115
        self.fault: Fault | None = None
        self.events = self.people = self.over = self.gone = 0
        self._time, self.refund, self.facts = "", 1.0, dict[str, str]()
        self.wishes, self.quotas, self.runs = dict[Wish, None](), dict[str, float](), dict[str, _Run]()
        self.touched: dict[int, array[int]] = defaultdict(lambda: array("q"))
        self.moves, self._early = dict[int, tuple[_Run, list[int]]](), list[int]()
        self.illegal, self.excused, self._approved = set[int](), set[str](), set[tuple[str, str, str]]()
        self.reasons, self.named = dict[int, str](), dict[int, int]()
        self._read()
        self._homes = np.array([0, *(home for *_, home in self.wishes)], dtype=np.int64)
        self._caps = np.concatenate([np.full((1, len(ORDERS)), -1), _caps(list(self.wishes))])
        self.pages = -(-self.people // PAGE)

    def __del__(self) -> None:
        self._file.close()

    def unfounded(self) -> set[int]:
        """Quarantines that are wrong: they name an event that was read and is legal, or are not legal themselves."""
        legal = {q for n, q in self.named.items() if n <= self.events and n not in self.illegal}
        wrong = legal | {q for q in self.named.values() if q <= self.events and q not in self.reasons}
        return wrong - {q for n, q in self.named.items() if n in wrong}  # these are judged again after what they name

    # -- the first pass: events in order -----------------------------------------------------------

    def _read(self) -> None:
        # Who is named by a quarantine, before any check of it: the first one that names an event counts.
        select = f"select number, {_up_to('body', BODY)} from event where body like %s order by number"
        for number, body in self._stream(select, '%"kind": "quarantine"%'):
            with suppress(*_MALFORMED):
                event = _written(body, BODY)
                if event["kind"] == "quarantine" and number not in self._ignored:
                    new = (n for n in event["events"] if type(n) is int and 0 < n < number and n not in self.named)
                    self.named |= dict.fromkeys(new, int(number))
        last = "0" * 64
        select = f"select number, previous, hash, {_up_to('body', 1 << 20)} from event order by number"
        for number, *link, body in self._stream(select):
            if [number, *link] != [self.events + 1, last, hashlib.sha256(f"{last}{body}".encode()).hexdigest()]:
                self.fault = Fault(self.events + 1, None, "it is not what was written")
                return
            last, self.events, event = link[1], number, {}
            try:
                event = _written(body, BODY)
                self._step(number, **event)
                self._time = event["time"]
            except _MALFORMED as error:
                reason = str(error) if isinstance(error, _Wrong) else "its fields are not those of its kind"
                self._found(number, event.get("kind"), reason)
            self.excused |= {str(event.get("run"))} if number in self.named else set()
            if self.fault:
                return
        if list(islice(self._stream("select one, number, hash from head"), 2)) != [(1, self.events or 1, last)]:
            self.fault = Fault(self.events + 1, None, "it is missing, or the head is not the last event")

    def _step(self, number: int, kind: str, time: str, **event: Any) -> None:
        """Check an event, and let it have its effect.

        A quarantined event that is legal here has it too: its quarantine is wrong. What only the second pass finds
        has none.
        """
        is_old = self.facts.get("schema", "3") != "3"
        _check((kind == "create") == (number == 1), "a registry is created once, by its first event")
        _check(not is_old or kind not in NEW, "a registry that was not migrated has no such event")
        _check(all(_fits(*one, is_old) for one in [("time", time), *event.items()]), "a field has another form")
        at, before = datetime.fromisoformat(time), datetime.fromisoformat(self._time or time)
        _check(before - is_old * CLOCKS <= at <= self._latest, "its time is before an earlier event, or in the future")
        self._early += [number] * (time < self._day)
        getattr(self, f"{'old' if is_old and kind in ('begin', 'settle') else 'on'}_{kind}")(number, **event)

    def _found(self, number: int, kind: Any, reason: str) -> None:
        """This event is wrong."""
        if number in self.named:
            self.illegal.add(number)
        elif self.fault is None or number < (self.fault.number or 0):
            self.fault = Fault(number, kind if hasattr(self, f"on_{kind}") else None, reason)

    # Each kind: checks, and after them the effect.

    def on_create(self, number: int, schema: str, id: Any, pepper: str, ids: str = "") -> None:
        _check(isinstance(id, str) and schema in ("3", "2" if ids else "1"), "its fields are not those of its schema")
        self.facts = {"schema": schema, "id": id, "pepper": pepper} | ({"ids": ids} if ids else {})

    def on_migrate(self, number: int, schema: str, was: str) -> None:
        _check(schema == "3" and was == self.facts["schema"] != "3", "it migrates from another schema")
        self.facts["schema"] = schema
        for run in self.runs.values():
            run.state = "cancelled" if run.state == "settled" and run.keys[-1] is None else run.state

    def on_limit(self, number: int, refund: float) -> None:
        _check(0 <= refund <= 1, "it is no part")
        self.refund, self.facts["refund"] = refund, json.dumps(refund)

    def on_wish(self, number: int, id: Any, epsilon: float, delta: float, home: float) -> None:
        wish = (epsilon, delta, ORDERS.index(home))
        _check(id == len(self.wishes) + 1 < MOST_ROWS and wish not in self.wishes, "it is not the next new budget")
        is_kept = 0 < epsilon <= LARGEST_EPSILON and SMALLEST_DELTA <= delta < 1 and (_caps([wish]) > 0).any()
        _check(is_kept, "no account can keep this lifetime budget")
        self.wishes[wish] = None

    def on_enrol(self, number: int, digest: str, first: int, people: int, names: str) -> None:
        pages, *found = self._people("statement where event", number)
        is_next = (first, *found) == (self.people, digest, people, first, first + people - 1)
        _check(is_next, "its people are not those stored, or not the next ones")
        known = hashlib.sha256()
        for person, (stored, pseudonym) in zip(range(first, first + people), self._names, strict=False):
            _check(person == stored and len(pseudonym) == 16, "a person is missing")
            known.update(pseudonym)
        _check(known.hexdigest() == names, "the pseudonyms are not those that were enrolled")
        self.people += people
        self._touch(number, pages)

    def on_change(self, number: int, digest: str, people: int, most: int | None = None) -> None:
        pages, *found, _, high = self._people("statement where event", number, most)
        _check(found == [digest, people] and 0 <= high < self.people, "its people are not those stored, or unknown")
        self._touch(number, pages)

    def on_withdraw(self, number: int, digest: str, people: int) -> None:
        self.on_change(number, digest, people, WITHDRAWN)

    def on_quota(self, number: int, project: str, share: float) -> None:
        _check(0 < share <= 1, "it is no part")
        self.quotas[project] = share

    def on_reserve(self, number: int, run: str, digest: str, what: str, project: str) -> None:
        _check(run not in self.runs, "this run was reserved before")
        select = f"select kind, project, digest, {_up_to('plan', PLAN)} from run where id = %s"
        *facts, plan = next(self._stream(select, run), [None])
        _check(facts == [what, project, digest], "the run that is stored is another one")
        table = _table(plan)
        pages, roster, *_, high = self._people("part where run", run, table[0].shape[1] - 1)
        said = hashlib.sha256(json.dumps([plan, roster, what, project]).encode()).hexdigest()
        _check(said == digest, "its plan or its people are not those that were reserved")
        _check(0 <= high < self.people, "some of its people are not enrolled, or it has none")
        made = _Run(run, (what, project, digest), table, pages, self.quotas.get(project), self._cost(*table), [None])
        self.moves[number] = made, [made.full]
        self._touch(number, pages)
        self.runs |= {run: made} if number not in self.named else {}

    def on_begin(self, number: int, run: str, key: str, previous: str | None, ledger: str) -> None:
        found = self._run(run, "reserved", "running")
        _check(previous == found.keys[-1] and key not in found.keys, "its key does not follow the one before")
        _check(found.begun in (None, ledger), "it has begun with another ledger")
        found.state, found.begun = "running", ledger
        found.keys.append(key)

    def old_begin(self, number: int, run: str, key: str) -> None:
        found = self._run(run, "reserved", "running")
        _check(key != found.keys[-1], "it has begun under this key before")
        found.state = "running"
        found.keys.append(key)

    def on_settle(self, number: int, run: str, charged: list[int], ledger: str, key: str) -> None:
        found = self._run(run, "running")
        _check(key == found.keys[-1], "its key is another one")
        _check(ledger or charged == found.table[2], "steps are given back without a ledger")
        self._end(number, found, "settled", charged, ledger)

    def old_settle(self, number: int, run: str, charged: list[int], ledger: str) -> None:
        found = self._run(run, "reserved", "running")
        _check(found.keys[-1] is not None or not any(charged), "it charges steps of a run that never began")
        self._end(number, found, "settled", charged, ledger)

    def on_cancel(self, number: int, run: str) -> None:
        self._end(number, found := self._run(run, "reserved"), "cancelled", [0] * len(found.table[2]), "")

    def on_approve(self, number: int, run: str, charged: list[int], ledger: str) -> None:
        self._run(run, "reserved", "running")
        self._approved.add((run, str(charged), ledger))

    def on_quarantine(self, number: int, events: list[int], reason: str) -> None:
        is_new = number not in self._ignored and all(self.named.get(n) == number for n in events)
        _check(is_new, "an event that it names is legal, or in quarantine already")
        _check(events and sorted(set(events)) == events, "the numbers of its events do not rise")
        self.reasons[number] = reason

    def _run(self, run: str, *states: str) -> _Run:
        _check(run in self.runs, "there is no such run")
        _check(self.runs[run].state in states, f"the run is {self.runs[run].state}")
        return self.runs[run]

    def _end(self, number: int, run: _Run, state: str, charged: list[int], ledger: str) -> None:
        rates, noises, steps = run.table
        is_less = len(charged) == len(steps) and all(n <= most for n, most in zip(charged, steps, strict=True))
        _check(is_less, "it charges more than was reserved, or other phases")
        back = 1 - sum(charged) / sum(steps) if sum(steps) and state == "settled" else state == "cancelled"
        is_within = back <= self.refund or (run.name, str(charged), ledger) in self._approved
        _check(is_within, "it gives back more than the limit, and nobody approved it")
        run.final = run.full if charged == steps else self._cost(rates, noises, charged)
        run.state, run.charged, run.ledger = state, charged, ledger
        if run.final != run.full:
            self.moves[number] = run, [run.final, run.full]
            self._touch(number, run.pages)

    def _touch(self, number: int, pages: dict[int, int]) -> None:
        for page, place in pages.items():
            self.touched[page].extend((number, place))

    def _people(self, table: str, key: Any, most: int | None = None) -> tuple[dict[int, int], str, int, int, int]:
        """(pages, digest, people, lowest number, highest) of a statement or a run. most: the last row; None: wishes."""
        known, pages, count, low, high = hashlib.sha256(), dict[int, int](), 0, 1 << 62, -1
        least, most = (1, len(self.wishes)) if most is None else (0, most)
        select = f"select page, {_up_to('rows', BLOB)} from {table} = %s order by page"
        for page, stored in self._stream(select, key):
            _check(type(page) is int and 0 <= page < 1 << 48 and page not in pages, "its pages do not rise")
            rows = _unpacked(stored, np.int16)
            here = np.flatnonzero(rows != NO_PERSON)
            _check(len(here) and least <= rows[here].min() and rows[here].max() <= most, "its rows are out of range")
            known.update(page.to_bytes(8, "little") + rows.tobytes())
            low, high, count = min(low, page * PAGE + int(here[0])), page * PAGE + int(here[-1]), count + len(here)
            pages[page] = self._keep(stored)
        return pages, known.hexdigest(), count, low, high

    def _cost(self, rates: Any, noises: Any, steps: Sequence[int]) -> int:
        """The place of these costs: (rows + 1, orders) pico-nats, the last row 0."""
        with np.errstate(all="ignore"):
            costs = np.ceil(np.minimum(weighted_orders.sums(rates, noises, steps, rates.shape[1]) * UNIT, MOST))
        _check(not np.isnan(costs).any(), "its plan has no costs")
        return self._keep(costs.astype(np.int64).tobytes() + bytes(8 * len(ORDERS)))

    # -- what both passes need: in a file once it is much -------------------------------------------

    def _keep(self, value: bytes) -> int:
        place = self._file.seek(0, 2)
        self._file.write(value)
        return place << 24 | len(value)

    def _kept(self, place: int) -> bytes:
        self._file.seek(place >> 24)
        return self._file.read(place & 0xFFFFFF)

    # -- the second pass: people, a page at a time -------------------------------------------------

    def page(self, page: int) -> tuple[int, Ints, Ints, Ints]:
        """(page, (PAGE,) number of each wish, (PAGE,) 1 for who withdrew, (PAGE, orders) sums).

        What is wrong is in `fault`, `over` and `illegal` afterwards.
        """
        wish, was_over = np.zeros(PAGE, dtype=np.int64), np.zeros(PAGE, dtype=bool)
        home, cap, spent, withdrawn, used, sums, reserved = wish, wish - 1, wish, wish, dict[str, Ints](), _Adder(), 0
        for number, place in zip(self.touched[page][::2], self.touched[page][1::2], strict=True):
            rows, is_named = _unpacked(self._kept(place), np.int16).astype(np.int64), number in self.named
            here = rows != NO_PERSON
            if number not in self.moves:
                stays = here & (rows != WITHDRAWN)
                if (stays & (wish > 0) & (self._homes[np.where(stays, rows, 0)] != home)).any():
                    self._found(number, "change", "it changes a home order")
                if not is_named:
                    withdrawn, wish = np.where(here, ~stays * number, withdrawn), np.where(stays, rows, wish)
                    home, cap = self._homes[wish], self._caps[wish, self._homes[wish]]
                continue
            run, places = self.moves[number]
            costs, *before = (np.frombuffer(self._kept(at), dtype=np.int64).reshape(-1, len(ORDERS)) for at in places)
            costs = costs - before[0] if before else costs
            change = costs.reshape(-1)[rows * len(ORDERS) + home]
            total, uses = spent + change, change + used.get(run.facts[1], 0)
            if not before:
                reserved += 1
                over = here & ((withdrawn > 0) | (total > cap))
                if over.any() or reserved > MOST_RUNS:
                    # Who is over at the home order fits if they do at another one.
                    which = np.flatnonzero(here if reserved > MOST_RUNS else over)
                    after = sums.now()[which] + costs[rows[which]]
                    fits = (after <= self._caps[wish[which]]).any(axis=1) & (after >= 0).all(axis=1)
                    over[which] = ~fits | (withdrawn[which] > 0)
                if over.any():
                    self._found(number, "reserve", "it charges people who had withdrawn, or beyond a lifetime budget")
                if run.share is not None and (here & (uses > cap * run.share)).any():
                    self._found(number, "reserve", "its project uses more than its quota")
                was_over = was_over | (over & (not is_named))
            if not is_named:
                spent = total
                sums.add(rows, costs)
                used |= {run.facts[1]: uses} if run.facts[1] in self.quotas else {}
        self.over, self.gone = self.over + int(was_over.sum()), self.gone + int(np.isin(withdrawn, self._early).sum())
        return page, wish, (withdrawn > 0).astype(np.int64), sums.now()


def _up_to(column: str, longest: int) -> str:
    """SQL for a value, or null if it is longer."""
    return f"case when length({column}) <= {longest} then {column} end"


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
    is_only_form = isinstance(value, dict) and json.dumps(value, sort_keys=True, allow_nan=False) == text
    _check(is_only_form, "it is written in another form")
    return value


def _table(plan: Any) -> Table:
    values = _written(plan, PLAN)
    _check(set(values) == {"rates", "noises", "steps"} and _fits("charged", values["steps"]), "its plan is no table")
    types = {type(value) for name in ("rates", "noises") for phase in values[name] for value in phase}
    _check(types <= {int, float, type(None)}, "its plan is no table of numbers")
    rates, noise = (np.array(values[name], dtype=np.float64) for name in ("rates", "noises"))  # None: NaN
    is_table = rates.ndim == 2 and rates.shape == noise.shape and 0 not in rates.shape and rates.shape[1] <= MOST_ROWS
    _check(is_table and len(values["steps"]) == len(rates), "its plan is no table")
    noise[np.isnan(noise)] = np.inf
    _check(((rates >= 0) & (rates <= 1)).all() and (noise > 0).all(), "its plan has numbers out of range")
    return rates, noise, values["steps"]


def _caps(wishes: Sequence[Wish]) -> Ints:
    """(wishes, orders) pico-nats that may be spent at each order, rounded down."""
    epsilon, delta, home = np.array(wishes, dtype=np.float64).reshape(-1, 3).T
    return np.floor((epsilon[:, None] - weighted_orders.offsets(delta, home)) * UNIT).astype(np.int64) - 1


def _differences(stream: Stream, replayed: tuple[int, Ints, Ints, Ints]) -> int:
    """How many people of this page have other sums, another wish or another state than the replay."""
    page, *columns = replayed
    try:
        select = f"select {_up_to('cohorts', BLOB)} from page where number = %s"
        cohorts = _unpacked(next(stream(select, page), [None])[0], np.int32)
    except _MALFORMED:
        return PAGE
    distinct, which = np.unique(cohorts, return_inverse=True)
    known = np.full((len(distinct), 2 + len(ORDERS)), -1, dtype=np.int64)
    select = f"select id, wish, withdrawn, {_up_to('sums', 1024)} from cohort where id in "
    stored = stream(f"{select} ({', '.join(['%s'] * len(distinct))})", *distinct.tolist())
    types, size = (int, int, int, bytes), 8 * len(ORDERS)
    if rows := [row for row in stored if tuple(map(type, row)) == types and len(row[3]) == size]:
        place = np.searchsorted(distinct, [row[0] for row in rows])
        known[place, :2] = [row[1:3] for row in rows]
        known[place, 2:] = np.frombuffer(b"".join(row[3] for row in rows), dtype=np.int64).reshape(len(rows), -1)
    known[distinct == 0] = 0  # nobody is enrolled there
    return int((known[which] != np.column_stack(columns)).any(axis=1).sum())


def _wrong_table(stream: Stream, history: History) -> Fault | None:
    """The first table that is not what the events say."""
    is_new = history.facts["schema"] == "3"
    runs, unknown = history.runs.values(), history.excused - history.runs.keys()
    stated = Counter(n for steps in history.touched.values() for n in steps[::2] if n not in history.moves)
    columns = "id, kind, project, digest, state, charged, ledger, key" + ", begun" * is_new
    for table, select, wanted in (
        ("fact", "name, value from fact", history.facts.items()),
        ("wish", "id, epsilon, delta, home from wish", [(i, *wish) for i, wish in enumerate(history.wishes, 1)]),
        ("quota", "project, share from quota", history.quotas.items()),
        ("run", f"{columns} from run", [run.stored[: 8 + is_new] for run in runs]),
        ("person", "count(*) from person", [(history.people,)]),
        ("part", "run, count(*) from part group by run", [(run.name, len(run.pages)) for run in runs]),
        ("statement", "event, count(*) from statement group by event", stated.items()),
        ("page", "number from page", [(page,) for page in range(history.pages)]),
    ):
        skipped: Any = {"run": unknown, "part": unknown, "statement": history.named}.get(table, ())
        rest: dict[Any, Any] = {row[0]: row for row in wanted if row[0] not in skipped}
        found = (row for row in stream(f"select {select}") if row[0] not in skipped)
        if not all(rest.pop(row[0], None) == row for row in found) or rest:
            return Fault(None, None, f"the table {table} is not what the events say")
    return None
