"""The verifier finds what nobody wrote by a call, as a slow twin does, and ends with a verdict on any values."""

from __future__ import annotations

import contextlib
import hashlib
import json
import shutil
import sqlite3
import sys
import tracemalloc
import zlib
from contextlib import closing
from datetime import UTC, datetime

import numpy as np
import pytest

import registry_twin as twin
from epsilons.errors import EpsilonsError, RegistryRefusedError
from epsilons.registry import Registry, Roster, evidence
from epsilons.registry.databases import database
from epsilons.registry.verifier import verify
from program import epsilons
from registries import FIRST_LINE, KEY, LAST_LINE, OTHER_KEY, begin, settle, table

#: People of a page here, so that a few are on several pages.
SMALL_PAGE = 8
#: Values that a column of SQLite may hold, whatever its type.
STRANGE = (0, -1, 7, 10**18, 1.5, 1e308, "", "x", "0" * 64, b"", b"\xff\xfe\x00", b"x" * 70_000)
TABLES = ("fact", "wish", "cohort", "person", "page", "quota", "run", "part", "statement", "event", "head")


def small_pages(monkeypatch):
    """Pages of 8 people from here on."""
    modules = [module for name, module in sys.modules.items() if name.startswith("epsilons.registry.")]
    for module in (twin, *(module for module in modules if hasattr(module, "PAGE"))):
        monkeypatch.setattr(module, "PAGE", SMALL_PAGE)


@pytest.fixture
def made(tmp_path, monkeypatch):
    """A small registry in which everything has happened: its file."""
    small_pages(monkeypatch)
    path = tmp_path / "people.db"
    with Registry.create(f"sqlite:///{path}") as registry:
        registry._database.run("pragma synchronous=off")
        registry.enrol(range(12), [1.0, 4.0] * 6)
        registry.set_quota("a", 0.9)
        for run in ("reserved", "running", "settled", "cancelled"):
            roster = Roster(np.arange(12), np.arange(12) % 2)
            registry.reserve_table(run, table([40.0, 50.0]), roster, project="a")
        begin(registry, "running")
        settle(registry, "settled", [10])
        registry.cancel("cancelled")
        registry.withdraw([3])
        registry.change([3, 4], 4.0)
    return path


def verdict_of(path):
    with closing(database(f"sqlite:///{path}")) as stored:
        return stored.snapshot(lambda: verify(stored.stream, datetime.now(UTC)))


def judgement_of(path):
    with closing(sqlite3.connect(path)) as connection:
        return twin.judge(twin.read(connection))


@contextlib.contextmanager
def behind(path):
    """A connection without the rules of the database."""
    with closing(sqlite3.connect(path)) as connection, connection:
        for (rule,) in connection.execute("select name from sqlite_master where type = 'trigger'").fetchall():
            connection.execute(f"drop trigger {rule}")
        connection.execute("drop index if exists event_run")
        yield connection


def bodies(connection):
    return [json.loads(body) for (body,) in connection.execute("select body from event order by number")]


def write(connection, events):
    """These events instead of all, with hashes."""
    last = "0" * 64
    connection.execute("delete from event")
    for number, event in enumerate(events, 1):
        body = event if isinstance(event, str) else json.dumps(event, sort_keys=True)
        new = hashlib.sha256((last + body).encode()).hexdigest()
        connection.execute("insert into event values (?, ?, ?, ?)", (number, last, new, body))
        last = new
    connection.execute("update head set number = ?, hash = ?", (len(events), last))


def at(events, kind, **fields):
    """The index of the last event of this kind."""
    found = [i for i, event in enumerate(events) if event["kind"] == kind and fields.items() <= event.items()]
    return found[-1]


def test_any_value_in_any_column_gives_a_verdict_and_one_line(made, tmp_path):
    copy, tried = tmp_path / "copy.db", 0
    shutil.copy(f"{made}.pepper", f"{copy}.pepper")
    with closing(sqlite3.connect(made)) as connection:
        columns = [(name, row[1]) for name in TABLES for row in connection.execute(f"pragma table_info({name})")]
    values = [*STRANGE, "[" * 50_000, "{}", "null", 10**18, 1e30, None]
    for name, column in columns:
        for value in values:
            shutil.copy(made, copy)
            which = "number = 3" if name == "person" else "rowid = 1"
            try:
                with behind(copy) as connection:
                    connection.execute(f"update {name} set {column} = ? where {which}", (value,))
                    connection.execute(f"attach '{made}' as before")
                    ((is_same,),) = connection.execute(
                        f"select not exists (select * from {name} except select * from before.{name})"
                    )
            except sqlite3.IntegrityError:
                continue
            verdict, tried = verdict_of(copy), tried + 1
            assert verdict.is_right <= (is_same or name == "cohort"), (name, column, value)
            with contextlib.suppress(EpsilonsError), Registry(f"sqlite:///{copy}") as registry:
                registry.summary()
                evidence.export(registry)
    assert tried > 300


def test_texts_that_are_none_give_a_verdict(made, tmp_path):
    copy = tmp_path / "copy.db"
    for name, column in (("event", "body"), ("run", "plan"), ("run", "id"), ("fact", "value"), ("quota", "project")):
        shutil.copy(made, copy)
        with behind(copy) as connection:
            connection.execute(f"update {name} set {column} = cast(x'ff00fe' as text) where rowid = 1")
        assert not verdict_of(copy).is_right


def test_a_page_that_unpacks_to_a_gigabyte_is_not_unpacked(made):
    pack = zlib.compressobj(9)
    bomb = b"".join([*(pack.compress(bytes(1 << 20)) for _ in range(64)), pack.flush()])
    assert len(bomb) < 1 << 17, "its size gives nothing away"
    for name, column in (("part", "rows"), ("statement", "rows"), ("page", "cohorts")):
        with behind(made) as connection:
            connection.execute(f"update {name} set {column} = ?", (bomb,))
        tracemalloc.start()
        assert not verdict_of(made).is_right
        assert tracemalloc.get_traced_memory()[1] < 1 << 25
        tracemalloc.stop()


def test_a_value_of_200_megabytes_is_not_read(made):
    with behind(made) as connection:
        connection.execute("update run set plan = printf('%.*c', 200000000, '[')")
    tracemalloc.start()
    assert not verdict_of(made).is_right
    assert tracemalloc.get_traced_memory()[1] < 1 << 27
    tracemalloc.stop()


def now():
    return datetime.now(UTC).isoformat(timespec="seconds")


def repeated(kind, **changes):
    """One event of this kind once more."""
    return lambda connection, events: [*events, events[at(events, kind)] | {"time": now()} | changes]


def replaced(kind, **changes):
    def change(connection, events):
        place = at(events, kind)
        return [*events[:place], events[place] | changes, *events[place + 1 :]]

    return change


def without(kind, field):
    def change(connection, events):
        place = at(events, kind)
        return [*events[:place], {n: v for n, v in events[place].items() if n != field}, *events[place + 1 :]]

    return change


def added(**event):
    return lambda connection, events: [*events, {"time": now(), **event}]


def another_run(connection, name, plan, rows, project="a"):
    """The event of a run that is written by hand, with everything that belongs to it."""
    of_page = np.full(SMALL_PAGE, -1, dtype=np.int16)
    of_page[: len(rows)] = rows
    roster = hashlib.sha256((0).to_bytes(8, "little") + of_page.tobytes()).hexdigest()
    text = json.dumps(plan.to_dict(), sort_keys=True)
    digest = hashlib.sha256(json.dumps([text, roster, "train", project]).encode()).hexdigest()
    connection.execute("insert into part values (?, 0, ?)", (name, zlib.compress(of_page.tobytes())))
    columns = "(id, state, kind, project, digest, plan)"
    connection.execute(
        f"insert into run {columns} values (?, 'reserved', 'train', ?, ?, ?)", (name, project, digest, text)
    )
    return {"time": now(), "kind": "reserve", "run": name, "digest": digest, "what": "train", "project": project}


def stated(connection, events, kind, rows):
    """The event of a statement that is written by hand, with its rows."""
    of_page = np.full(SMALL_PAGE, -1, dtype=np.int16)
    of_page[list(rows)] = list(rows.values())
    digest = hashlib.sha256((0).to_bytes(8, "little") + of_page.tobytes()).hexdigest()
    connection.execute("insert into statement values (?, 0, ?)", (len(events) + 1, zlib.compress(of_page.tobytes())))
    return {"time": now(), "kind": kind, "digest": digest, "people": len(rows)}


def another_home(connection, events):
    connection.execute("insert into wish values (4, 1.0, 1e-5, 3)")
    events = [*events, {"time": now(), "kind": "wish", "id": 4, "epsilon": 1.0, "delta": 1e-5, "home": 4.0}]
    return [*events, stated(connection, events, "change", {0: 4})]


def tiny_quota(connection, events):
    connection.execute("update quota set share = 0.001")
    events = [*events, {"time": now(), "kind": "quota", "project": "a", "share": 0.001}]
    return [*events, another_run(connection, "new", table([60.0]), [0])]


def too_dear(connection, events):
    return [*events, another_run(connection, "new", table([0.5], steps=1000), [0], "")]


def of_who_withdrew(connection, events):
    events = [*events, stated(connection, events, "withdraw", {5: 0})]
    return [*events, another_run(connection, "new", table([90.0]), [0, 0, 0, -1, -1, 0], "")]


def limited(ledger="", **approval):
    def change(connection, events):
        connection.execute("insert into fact values ('refund', '0.5')")
        events = [*events, {"time": now(), "kind": "limit", "refund": 0.5}]
        if approval:
            events += [
                {"time": now(), "kind": "approve", "run": "running", "ledger": LAST_LINE, "charged": [0]} | approval
            ]
        settled = {"run": "running", "charged": [0], "ledger": ledger or LAST_LINE, "key": KEY}
        return [*events, {"time": now(), "kind": "settle", **settled}]

    return change


def swapped(statement):
    def change(connection, events):
        connection.execute(statement)
        return events

    return change


ROW = "update {} set rows = (select rows from part where run = 'other') where {}"
FORGED = {
    "settled twice": (repeated("settle"), "the run is settled"),
    "settled at other steps again": (repeated("settle", charged=[100]), "the run is settled"),
    "begun after it was settled": (repeated("begin", key=OTHER_KEY, previous=KEY), "the run is settled"),
    "begun after it was cancelled": (repeated("begin", run="cancelled"), "the run is cancelled"),
    "cancelled after it began": (repeated("cancel", run="running"), "the run is running"),
    "reserved twice": (repeated("reserve"), "reserved before"),
    "settled before it began": (repeated("settle", run="reserved"), "the run is reserved"),
    "a run that nobody reserved": (repeated("begin", run="ghost"), "no such run"),
    "settled under another key": (repeated("settle", run="running", key=OTHER_KEY), "its key"),
    "settled at more steps": (repeated("settle", run="running", charged=[101]), "more than was reserved"),
    "settled at steps of two phases": (repeated("settle", run="running", charged=[1, 1]), "more than was reserved"),
    "settled without a ledger": (repeated("settle", run="running", ledger=""), "without a ledger"),
    "a key that was used": (repeated("begin", run="running", previous=KEY), "its key"),
    "a key after no key": (repeated("begin", run="running", key=OTHER_KEY, previous=None), "its key"),
    "another ledger": (repeated("begin", run="running", key=OTHER_KEY, previous=KEY, ledger=KEY), "another ledger"),
    "above the limit": (limited(), "more than the limit"),
    "approved for other steps": (limited(charged=[1]), "more than the limit"),
    "approved for another ledger": (limited(ledger=FIRST_LINE, charged=[0]), "more than the limit"),
    "of 1970": (repeated("quota", time="1970-01-01T00:00:00+00:00"), "its time"),
    "a second too early": (repeated("quota", time="2026-01-01T00:00:00+00:00"), "its time"),
    "to come": (repeated("quota", time="2999-01-01T00:00:00+00:00"), "its time"),
    "no time": (repeated("quota", time="2026-02-30T00:00:00+00:00"), "its fields"),
    "of an unknown kind": (added(kind="gift", run="settled"), "its fields"),
    "a second beginning": (lambda c, events: [*events, events[0] | {"time": now()}], "is created once"),
    "a migration": (added(kind="migrate", schema="3", was="1"), "migrates"),
    "a field more": (repeated("quota", note="x"), "its fields"),
    "a field less": (without("settle", "key"), "its fields"),
    "a whole number that is true": (replaced("enrol", first=False), "a field"),
    "a share of 2": (repeated("quota", share=2.0), "no part"),
    "a wish again": (repeated("wish"), "the next new budget"),
    "a wish for too much": (repeated("wish", id=4, epsilon=1001.0), "no account"),
    "another home order": (another_home, "home order"),
    "more than the quota": (tiny_quota, "its quota"),
    "beyond the budget": (too_dear, "beyond a lifetime budget"),
    "a person who withdrew": (of_who_withdrew, "who had withdrawn"),
    "people exchanged in a roster": (swapped("update part set rows = (select rows from part where run = 'running' and "
                                             "page = 1) where run = 'running' and page = 0"), "its plan or its people"),
    "people exchanged in a statement": (swapped("update statement set rows = (select rows from statement where "
        "event = 4 and page = 0) where event = (select max(event) from statement)"), "its people are not those stored"),
    "another plan": (swapped("update run set plan = replace(plan, '40.0', '90.0')"), "its plan or its people"),
    "pseudonyms exchanged": (swapped("update person set number = 1 - number where number < 2"), "pseudonyms"),
    "another person": (swapped("update person set pseudonym = x'00112233445566778899aabbccddeeff' where number = 0"),
                       "pseudonyms"),
    "a person fewer": (swapped("delete from person where number = 11"), ""),
    "a person more": (swapped("insert into person values (x'00112233445566778899aabbccddeeff', 12)"), "table person"),
    "a run's last line": (swapped("update run set ledger = key where id = 'settled'"), "table run"),
    "a run's first line": (swapped("update run set begun = key where id = 'settled'"), "table run"),
    "a run's state": (swapped("update run set state = 'running', key = digest where id = 'reserved'"), "table run"),
    "another registry": (swapped("update fact set value = value || '0' where name = 'id'"), "table fact"),
    "a fact more": (swapped("insert into fact values ('refund', '0.5')"), "table fact"),
    "a quota more": (swapped("insert into quota values ('b', 0.5)"), "table quota"),
    "a roster of no run": (swapped("insert into part select 'ghost', page, rows from part limit 1"), "table part"),
    "a page more of a roster": (swapped("insert into part select run, 7, rows from part limit 1"), "its plan or"),
    "a statement of no event": (swapped("insert into statement select 9999, page, rows from statement limit 1"),
                                "table statement"),
    "a page of no people": (swapped("insert into page select 7, cohorts from page limit 1"), "table page"),
    "a legal event in quarantine": (added(kind="quarantine", events=[5], reason="x"), "is legal"),
    "no event in quarantine": (added(kind="quarantine", events=[], reason="x"), "do not rise"),
    "a later event in quarantine": (added(kind="quarantine", events=[99], reason="x"), "is legal"),
}  # fmt: skip


@pytest.mark.parametrize(("change", "reason"), FORGED.values(), ids=FORGED)
def test_events_with_right_hashes_that_the_rules_forbid_are_found(made, change, reason):
    with behind(made) as connection:
        write(connection, change(connection, bodies(connection)))
    verdict = verdict_of(made)
    assert not verdict.is_right
    assert reason in str(verdict.first)
    assert not judgement_of(made).is_legal, "the slow twin says the same"


@pytest.mark.parametrize("head", ["number = number - 1", "number = number + 1", "hash = (select hash from event)"])
def test_another_head_than_the_last_event_is_found(made, head):
    assert verdict_of(made).is_right
    assert judgement_of(made).is_legal
    with behind(made) as connection:
        connection.execute(f"update head set {head}")
    assert "the head is not the last event" in str(verdict_of(made).first)
    assert not judgement_of(made).is_legal


def test_an_event_that_was_changed_without_its_hash_is_found(made):
    with behind(made) as connection:
        connection.execute("update event set body = replace(body, '\"share\": 0.9', '\"share\": 0.8')")
        connection.execute("update quota set share = 0.8")
    assert str(verdict_of(made).first) == "event 5 (unknown): it is not what was written"


def test_the_commands_end_with_one_line_on_what_cannot_be_read(made, monkeypatch):
    monkeypatch.chdir(made.parent)
    url = f"sqlite:///{made.name}"
    epsilons("registry", "verify", url).succeeded("16 events")
    with behind(made) as connection:
        write(connection, repeated("settle")(connection, bodies(connection)))
    epsilons("registry", "verify", url).is_refused(3, "event 17 (settle): the run is settled")
    with behind(made) as connection:
        connection.execute("update run set plan = '{}'")
    epsilons("registry", "verify", url).is_refused(3, "event 6 (reserve): its plan is no table")
    epsilons("registry", "show", url).is_refused(2, "epsilons registry verify")
    epsilons("registry", "export", url, "-o", "x.json", "--excluded", "2030-01-01").is_refused(3, "event 6 (reserve)")


def test_what_an_officer_approved_is_legal_and_everything_else_is_as_it_was(made):
    with behind(made) as connection:
        write(connection, limited(charged=[0])(connection, bodies(connection)))
        connection.execute(
            "update run set state = 'settled', charged = '[0]', ledger = ? where id = 'running'", (LAST_LINE,)
        )
    verdict = verdict_of(made)
    assert verdict.first is None
    assert verdict.wrong == 12, "the sums are not changed"


@pytest.mark.parametrize("named", [[0], [5], [0, 5], [17]], ids=str)
def test_a_quarantine_that_is_wrong_can_itself_be_quarantined(made, named):
    with behind(made) as connection:
        events = added(kind="quarantine", events=named, reason="wrong")(connection, bodies(connection))
        write(connection, events)
    assert verdict_of(made).first.number == len(events)
    with behind(made) as connection:
        write(connection, added(kind="quarantine", events=[len(events)], reason="mend")(connection, events))
    verdict = verdict_of(made)
    assert verdict.is_right, verdict.first
    assert verdict.quarantined == ((len(events), "mend"),)


def test_the_first_wrong_event_is_named_and_its_quarantine_heals(made):
    wrong = [repeated("settle"), repeated("begin", run="ghost"), added(kind="gift"), too_dear]
    with behind(made) as connection:
        events = bodies(connection)
        first = len(events) + 1
        for change in wrong:
            events = change(connection, events)
        write(connection, events)
    assert verdict_of(made).first[:2] == (first, "settle")
    for count in range(1, 5):
        with behind(made) as connection:
            named = list(range(first, first + count))
            write(connection, added(kind="quarantine", events=named, reason="by hand")(connection, events))
        verdict = verdict_of(made)
        assert verdict.is_right == (count == 4)
        assert verdict.is_right or verdict.first.number == first + count
    assert verdict.quarantined == tuple((n, "by hand") for n in named)
    with behind(made) as connection:  # with a legal event beside them none is in quarantine
        write(connection, added(kind="quarantine", events=[5, *named], reason="by hand")(connection, events))
    assert verdict_of(made).first.number == first


def test_a_quarantine_that_is_in_quarantine_has_no_effect(made):
    with behind(made) as connection:
        events = repeated("settle")(connection, bodies(connection))
        wrong, no_reason = len(events), {"time": now(), "kind": "quarantine", "events": [len(events)], "reason": "\n"}
        events = [*events, no_reason]
        write(connection, added(kind="quarantine", events=[len(events)], reason="x")(connection, events))
    assert verdict_of(made).first.number == wrong


def test_a_legal_event_is_not_put_into_quarantine_with_its_rows(made):
    with Registry(f"sqlite:///{made}") as registry:
        before = registry.account(range(12)).spent
        for number in range(1, registry.head[0] + 1):
            with pytest.raises(RegistryRefusedError, match="legal"):
                registry.quarantine([number], "x")
        assert (registry.account(range(12)).spent == before).all()
        assert registry.verify().is_right
