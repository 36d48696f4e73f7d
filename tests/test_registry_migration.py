"""Registries of earlier versions: migrated whole or not at all, and wrong events of them taken out of the account."""

from __future__ import annotations

import hashlib
import json
import os
import signal

import numpy as np
import pytest

from epsilons.errors import EpsilonsError, RegistryError, RegistryRefusedError
from epsilons.registry import Registry, databases
from old_registries import GHOST, IDS, REPLAYED, build, write
from registries import KEY, LAST_LINE, OTHER_KEY, begin, outside, reserve, table


def facts(place):
    """Everything that is stored, but the schema's own columns and times."""
    base = databases.database(place[0])
    found = {
        name: sorted(map(repr, base.run(f"select {columns} from {name}")))
        for name, columns in {
            "run": "id, kind, project, digest, plan, charged, key, ledger",
            "part": "*",
            "statement": "*",
            "person": "*",
            "page": "*",
            "cohort": "*",
            "wish": "*",
            "quota": "*",
        }.items()
    }
    base.close()
    return found


def test_an_earlier_registry_says_that_it_is_to_be_migrated(place):
    build(place)
    with pytest.raises(RegistryError, match="epsilons registry migrate URL"):
        Registry(*place)


def test_a_migrated_registry_has_lost_nothing_and_goes_on(place):
    build(place)
    before = facts(place)
    Registry.migrate(place[0])
    assert facts(place) == before
    Registry.migrate(place[0])  # nothing more to do
    with Registry(*place) as registry:
        states = {run.run: run.state for run in registry.summary().runs}
        assert states == {
            "reserved": "reserved", "running": "running", "settled": "settled", "cancelled": "cancelled",
            "mean": "settled",
        }  # fmt: skip
        assert registry.verify().is_right
        begin(registry, "reserved", OTHER_KEY)
        begin(registry, "running")  # again
        registry.settle("running", [7], LAST_LINE, KEY)
        registry.settle("settled", [10], LAST_LINE, KEY)  # again
        registry.cancel("cancelled")  # again
        reserve(registry, "new", IDS[5:], np.zeros(35, dtype=int), table([60.0]))
        registry.withdraw(["p7"])
        registry.limit_refunds(0.5)
        assert registry.verify().is_right


def statements_of(place, monkeypatch):
    """How many statements a migration has."""
    count = [0]
    with monkeypatch.context() as patch:
        for kind in (databases.Sqlite, databases.Postgres):
            patch.setattr(kind, "run", counting(kind.run, count))
        Registry.migrate(place[0])
    return count[0]


def counting(run, count, kill_at=None):
    def counted(self, *arguments):
        if count[0] == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        count[0] += 1
        return run(self, *arguments)

    return counted


def test_a_migration_that_is_killed_at_any_statement_is_whole_or_not_at_all(place, tmp_path, monkeypatch, request):
    build(place)
    before = facts(place)
    other = (f"sqlite:///{tmp_path}/other.db", tmp_path / "pepper")
    if not place[0].startswith("sqlite"):
        other = (request.getfixturevalue("postgres").place(), tmp_path / "pepper")
    build(other)
    statements = statements_of(other, monkeypatch)
    assert statements > 40
    for at in range(statements):
        pid = os.fork()
        if pid == 0:
            for kind in (databases.Sqlite, databases.Postgres):
                setattr(kind, "run", counting(kind.run, [0], at))  # noqa: B010
            try:
                Registry.migrate(place[0])
            finally:
                os._exit(0)
        assert os.waitpid(pid, 0)[1] == signal.SIGKILL
        with pytest.raises(RegistryError, match="migrate URL"):
            Registry(*place)
    assert facts(place) == before
    Registry.migrate(place[0])
    with Registry(*place) as registry:
        assert registry.verify().is_right


@pytest.mark.parametrize("rule", ["event", "part", "statement", "head"])
def test_a_migrated_registry_has_the_rules_of_a_new_one(place, tmp_path, rule, request):
    """The names of all triggers, views and indexes are the same."""
    build(place)
    Registry.migrate(place[0])
    new = f"sqlite:///{tmp_path}/new.db"
    if not place[0].startswith("sqlite"):
        new = request.getfixturevalue("postgres").place()
    Registry.create(new, tmp_path / "new.pepper").close()
    assert rules(place[0], rule) == rules(new, rule) != []


def rules(url, name):
    base = databases.database(url)
    found = base.run(
        "select name from sqlite_master where type = 'trigger' and tbl_name = %s order by 1"
        if url.startswith("sqlite")
        else "select tgname from pg_trigger where tgrelid = %s::regclass and not tgisinternal order by 1",
        name,
    )
    base.close()
    return found


def quarantined(place, wrong, run=None):
    """A registry with wrong events, migrated, in which the owner takes them out."""
    build(place, wrong)
    if run is not None:
        outside(place, run)
    Registry.migrate(place[0])
    with Registry(*place) as registry:
        last = registry.head[0] - 1  # the last one is the migration
        before = registry.account(IDS).spent
        registry.quarantine(range(last - len(wrong) + 1, last + 1), "written by hand")
        assert (registry.account(IDS).spent == before).all()
        assert registry.verify().is_right
        reserve(registry, "new", IDS[5:], np.zeros(35, dtype=int), table([60.0]))
        return json.loads(registry._database.run("select body from event where number = %s", last + 2)[0][0]), {
            run.id: run for run in map(registry.run, ("settled", "running"))
        }, registry._database.run("select id from run order by id")  # fmt: skip


def test_a_replayed_settlement_is_quarantined_and_everyone_goes_on(place):
    event, runs, _ = quarantined(place, [REPLAYED])
    assert event["kind"] == "quarantine"
    assert event["reason"] == "written by hand"
    assert len(event["events"]) == 1
    assert (runs["settled"].state, runs["settled"].charged, runs["settled"].key) == ("settled", (10,), KEY)


def test_a_run_without_a_reservation_is_quarantined_with_its_rows(place):
    ghost = "insert into run (id, state, kind, project, digest, plan) values ('ghost', 'running', '', '', '', '{}')"
    _, _, names = quarantined(place, [GHOST], ghost)
    assert [name for (name,) in names] == ["cancelled", "mean", "new", "reserved", "running", "settled"]


def test_a_settlement_at_too_many_steps_is_quarantined_and_the_run_goes_on(place):
    wrong = REPLAYED | {"run": "running", "charged": [2000]}
    _, runs, _ = quarantined(
        place, [wrong], "update run set state = 'settled', charged = '[2000]', ledger = 'x' where id = 'running'"
    )
    assert (runs["running"].state, runs["running"].charged, runs["running"].ledger) == ("running", None, None)


@pytest.mark.parametrize(
    ("events", "reason"),
    [
        ([2], "why"),
        ([], "why"),
        ([10**6], "why"),
        ([0], "why"),
        ([2], ""),
        ([2], "x" * 501),
        ([2], "two\nlines"),
        ([-1, 2], "why"),
    ],
)
def test_a_quarantine_names_events_and_a_reason(place, events, reason):
    with Registry.create(*place) as registry:
        registry.enrol(IDS, 1.0)
        with pytest.raises(EpsilonsError):
            registry.quarantine(events, reason)
        assert registry.head[0] == 3


@pytest.mark.parametrize(
    "kind", ["create", "wish", "enrol", "withdraw", "change", "quota", "reserve", "begin", "settle"]
)
def test_no_legal_event_is_quarantined_whatever_its_kind(place, kind):
    """Its own rows, such as a person's withdrawal, are not what makes it wrong."""
    with Registry.create(*place) as registry:
        write(registry)
        registry.change(["p1"], 2.0)
        bodies = registry._database.run("select number, body from event")
        number = max(number for number, body in bodies if json.loads(body)["kind"] == kind)
        head = registry.head
        with pytest.raises(RegistryRefusedError, match="Name every event that is wrong, and no other"):
            registry.quarantine([number], "why")
        assert registry.head == head
        assert registry.verify().is_right


def test_a_statement_that_cannot_be_read_is_quarantined_with_its_rows(place):
    """Of an officer, by hand: the database cannot unpack it."""
    with Registry.create(*place) as registry:
        registry.enrol(IDS, 1.0)
        base = registry._database

        def work():
            databases.add(
                base, "enrol", digest="0" * 64, first=40, people=1, names=hashlib.sha256(bytes(16)).hexdigest()
            )
            base.run("insert into statement select number, 0, %s from head", b"nothing")
            base.load("person", [(bytes(16), 40)])

        base.transaction(work)
        number = registry.head[0]
        assert registry.verify().first.number == number
        registry.quarantine([number], "cannot be read")
        assert registry.verify().is_right
        assert registry.enrol(["new"], 1.0) == 1
        assert registry.verify().people == 41


def test_only_wrong_events_are_quarantined_and_all_of_them_at_once(place):
    build(place, [REPLAYED, REPLAYED])
    Registry.migrate(place[0])
    with Registry(*place) as registry:
        head = registry.head
        second = head[0] - 1
        wrong = [second - 1, second]
        for events in (wrong[:1], wrong[1:], [1, *wrong], [*wrong, head[0]], [5]):
            with pytest.raises(RegistryRefusedError, match="Name every event that is wrong, and no other"):
                registry.quarantine(events, "why")
        assert registry.head == head
        assert registry.verify().first.number == wrong[0]
        registry.quarantine(wrong, "why")
        verdict = registry.verify()
        assert verdict.is_right
        assert verdict.quarantined == tuple((number, "why") for number in wrong)
        for events in (wrong, [head[0] + 1]):
            with pytest.raises(EpsilonsError):
                registry.quarantine(events, "again")
        assert registry.verify() == verdict
