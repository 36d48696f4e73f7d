"""Roles in PostgreSQL: the database itself refuses what a subject, runner, officer or regulator may not do."""

from __future__ import annotations

import json

import numpy as np
import pytest

from epsilons.errors import RegistryError, RegistryRefusedError
from epsilons.registry import Roster
from epsilons.registry.databases import _hash
from houses import IDS, build
from registries import begin, reserve, settle, table

TABLES = ["fact", "wish", "cohort", "person", "page", "quota", "run", "part", "statement", "event", "head"]


@pytest.fixture(scope="module")
def house(postgres, tmp_path_factory):
    return build(postgres, tmp_path_factory.mktemp("house") / "pepper")


def test_a_runner_reserves_begins_and_settles_runs_of_the_own_project(house):
    with house.registry("anna") as registry:
        before = registry.account(IDS).spent
        reserve(registry, "mine", IDS, np.zeros(40, dtype=int), table([200.0]), project="cardiology")
        settle(registry, "mine", [0])
        assert (registry.account(IDS).spent == before).all()
    with house.registry("owner") as registry:
        assert registry.verify().is_right


def test_a_runner_reserves_begins_and_settles_no_run_of_another_project(house):
    with house.registry("anna") as registry:
        with pytest.raises(RegistryRefusedError, match="right"):
            reserve(registry, "other", IDS, np.zeros(40, dtype=int), table([200.0]), project="oncology")
        for call in (lambda: begin(registry, "theirs"), lambda: registry.cancel("theirs")):
            with pytest.raises(RegistryError):
                call()
    assert house.sql("anna", "select count(*) from run where project = 'oncology'") == [(0,)]
    assert house.sql("anna", "select count(*) from part where run = 'theirs'") == [(0,)]
    assert house.sql("anna", "update run set state = 'settled' where id = 'theirs'") == 0
    assert house.sql("bob", "select count(*) from part where run = 'theirs'") == [(1,)]


def test_a_runner_does_nothing_else(house):
    with house.registry("anna") as registry:
        for call in (
            lambda: registry.enrol(["new"], 1.0),
            lambda: registry.change(["p1"], 9.0),
            lambda: registry.withdraw(["p1"]),
            lambda: registry.set_quota("cardiology", 1.0),
            lambda: registry.admit("anna", "p1"),
            registry.verify,
        ):
            with pytest.raises(RegistryRefusedError, match="right"):
                call()
    for statement in (
        "select body from event",
        "select * from statement",
        "insert into member values ('anna', 'oncology')",
        "update run set project = 'cardiology'",
        "update run set plan = '{}'",
        "insert into part values ('theirs', 7, '')",
        "update wish set epsilon = 9",
        "update person set number = 0",
        "update quota set share = 1",
        "set role owner",
        "alter table run disable row level security",
        "drop trigger event_is_legal on event",
    ):
        house.refuses("anna", statement)


def test_a_runner_states_nothing_in_the_name_of_an_officer(house):
    number, last = house.sql("anna", "select number, hash from head")[0]
    for facts in ({"kind": "withdraw", "people": 0}, {"kind": "settle", "run": "theirs", "charged": [0]}, {}):
        body = json.dumps(facts)
        house.refuses(
            "anna", "insert into event values (%s, %s, %s, %s)", (number + 1, last, _hash(last, body), body)
        )  # fmt: skip


def test_an_officer_keeps_wishes_and_reserves_nothing(house):
    with house.registry("otto") as registry:
        registry.enrol(["someone new"], 2.0)
        registry.change(["p7"], 2.5)
        registry.withdraw(["p8"])
        registry.set_quota("cardiology", 0.9)
        assert registry.verify().is_right
        for call in (
            lambda: reserve(
                registry, "officers", IDS[:5], np.zeros(5, dtype=int), table([200.0]), project="cardiology"
            ),
            lambda: registry.cancel("theirs"),
            lambda: begin(registry, "theirs"),
        ):
            with pytest.raises(RegistryRefusedError, match="right"):
                call()
    for statement in (
        "update wish set epsilon = 9",
        "update person set number = 0",
        "update statement set rows = ''",
        "insert into request (epsilon, delta) values (1, 1e-5)",
        "insert into member values ('otto', 'oncology')",
    ):
        house.refuses("otto", statement)


def test_a_regulator_verifies_without_the_pepper_and_changes_nothing(house):
    with house.registry("rita", pepper=False) as registry:
        assert registry.verify().is_right
        assert registry.head[0] > 0
        with pytest.raises(RegistryError, match="pepper"):
            registry.account(["p1"])
    with house.registry("rita") as registry:
        for call in (
            lambda: registry.withdraw(["p1"]),
            lambda: registry.enrol(["new too"], 1.0),
            lambda: reserve(registry, "r", ["p1"], [0], table([200.0]), project="cardiology"),
            registry.carry_out,
        ):
            with pytest.raises(RegistryRefusedError, match="right"):
                call()
    for name in [*TABLES, "member", "subject", "request"]:
        house.refuses("rita", f"delete from {name}")
    house.refuses("rita", "begin; lock table head in exclusive mode")


def test_a_subject_states_the_own_wish_and_sees_nobody_elses(house):
    house.sql("sue", "insert into request (epsilon, delta) values (2.0, 1e-5)")
    house.sql("sam", "insert into request default values")
    assert house.sql("sue", "select epsilon, applied from request order by id") == [(2.0, None)]
    assert house.sql("sam", "select epsilon, applied from request") == [(None, None)]
    assert house.sql("sue", "select role, number from subject") == [("sue", 3)]
    with house.registry("otto") as registry:
        assert registry.carry_out() == 2
        assert registry.carry_out() == 0
        house.sql("sue", "insert into request (epsilon, delta) values (0.001, 1e-5)")
        assert registry.carry_out() == 1
        accounts = registry.account(["p3", "p4"])
        assert registry.verify().is_right
    assert accounts.epsilon[0] == 2.0
    assert accounts.withdrawn.tolist() == [False, True]
    applied = [row[0] for row in house.sql("sue", "select applied from request order by id")]
    assert applied[0] > 0
    assert applied[1] == 0, "no account can keep this budget"


def test_a_subject_does_nothing_else(house):
    for name in TABLES:
        house.refuses("sue", f"select * from {name}")
        house.refuses("sue", f"delete from {name}")
    for statement in (
        "insert into request (role, epsilon, delta) values ('sam', 9, 1e-5)",
        "insert into request (epsilon, delta, applied) values (9, 1e-5, 1)",
        "insert into request (epsilon, delta) values (-1, 1e-5)",
        "insert into request (epsilon, delta) values ('nan', 1e-5)",
        "update request set applied = 1",
        "update request set role = 'sam'",
        "update request set id = default",
        "delete from request",
        "begin; lock table request in share mode",
        "begin; select * from subject for update",
        "update subject set number = 4",
        "begin; lock table head in exclusive mode",
        "set role sam",
    ):
        house.refuses("sue", statement)
    with pytest.raises(RegistryRefusedError, match="right"):
        house.registry("sue")


def test_events_are_only_added_even_by_the_owner(house):
    number, last = house.sql("owner", "select number, hash from head")[0]
    body = json.dumps({"kind": "quota", "project": "x", "share": 1.0})
    for login in ("owner", "otto", "anna"):
        for statement in (
            ("update event set body = replace(body, 'enrol', 'change')",),
            ("delete from event",),
            ("truncate event",),
            ("update head set number = 1",),
            ("update head set number = number + 1",),
            ("insert into event values (%s, %s, %s, %s)", (number + 2, last, _hash(last, body), body)),
            ("insert into event values (%s, %s, %s, %s)", (number + 1, "0" * 64, _hash("0" * 64, body), body)),
            ("insert into event values (%s, %s, %s, %s)", (number + 1, last, "0" * 64, body)),
            (
                "create temp table head as select 0 as number, repeat('0', 64) as hash, 1 as one; "
                f"insert into {house.schema}.event values (1000, repeat('0', 64), '{_hash('0' * 64, body)}', '{body}')",
            ),
        ):
            house.refuses(login, *statement)


def test_a_settled_run_is_never_changed(house):
    with house.registry("bob") as registry:
        registry.reserve_table("done", table([300.0]), Roster(registry.numbers(IDS[20:]), np.zeros(20, dtype=int)),
                               project="oncology")  # fmt: skip
        settle(registry, "done", [5])
    house.refuses("bob", "update run set charged = '[0]' where id = 'done'")
    house.refuses("bob", "update run set state = 'reserved' where id = 'done'")
    house.refuses("owner", "update run set state = 'running' where id = 'done'")


def test_a_dishonest_runner_is_found(house):
    """Sums are written by the runner's program: the database cannot open pages. `verify` finds what it wrote."""
    stored = house.sql("bob", "select number, cohorts from page")
    import zlib

    cohorts = np.frombuffer(zlib.decompress(stored[0][1]), dtype=np.int32).copy()
    cohorts[0] = 1
    house.sql("bob", "update page set cohorts = %s", (zlib.compress(cohorts.tobytes()),))
    with house.registry("rita", pepper=False) as registry:
        assert not registry.verify().is_right
    house.sql("bob", "update page set cohorts = %s", (stored[0][1],))
    with house.registry("rita", pepper=False) as registry:
        assert registry.verify().is_right
