"""Roles in PostgreSQL: the database itself refuses what a subject, runner, officer or regulator may not do."""

from __future__ import annotations

import json
import math
import re
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import program
from epsilons.errors import RegistryError, RegistryRefusedError
from epsilons.registry import Registry, Roster, databases, evidence, people
from epsilons.registry.databases import _hash
from epsilons.registry.people import NO_NUMBER_LEFT, REPLACED, carry_out, on_grid
from registries import FORTY as IDS
from registries import VISITS, begin, build_house, reserve, settle, table
from servers import MISSING

TABLES = ["fact", "wish", "cohort", "person", "page", "quota", "run", "part", "statement", "event", "head"]


@pytest.fixture(scope="module")
def house(postgres, tmp_path_factory):
    return build_house(postgres, tmp_path_factory.mktemp("house") / "pepper")


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


# -- commands as each role: a refusal is one sentence that names nobody ----------------------------------------------


#: command -> arguments, without the URL. "own" and "other" are runs of a project of the runner's, and of another's.
COMMANDS = {
    "show": ["show"],
    "person": ["show", "--id", "p7", "--json"],
    "import": ["import", "wishes.csv", "--person", "id"],
    "change": ["change", "--id", "p7", "--epsilon", "2"],
    "withdraw": ["withdraw", "--id", "p8"],
    "quota": ["quota", "oncology", "0.6"],
    "admit": ["admit", "sam", "--id", "p9"],
    "carry-out": ["carry-out"],
    "verify": ["verify"],
    "export": ["export", "-o", "export.json"],
    "backup": ["backup", "-o", "copy.db"],
    "repair": ["repair"],
    "settle": ["settle", "--cancel", "theirs"],
    "approve": ["approve", "theirs"],
    "limit": ["limit", "0.5"],
    "quarantine": ["quarantine", "--event", "3", "--reason", "why"],
    "dry run": ["--dry-run"],
    "own": ["--project", "cardiology", "-o", "own"],
    "other": ["--project", "oncology", "-o", "other"],
}
MAY = {
    "anna": {"show", "person", "dry run", "own"},
    "otto": COMMANDS.keys() - {"settle", "own", "other", "limit", "quarantine", "repair"},
    "rita": {"show", "person", "verify", "export", "backup", "dry run"},
    "sue": set(),
    "nick": set(),
}


@pytest.fixture
def command_house(postgres, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    made = build_house(postgres, tmp_path / "pepper")
    made.sql("owner", "delete from subject where role = 'sam'")
    Path("wishes.csv").write_text("id,epsilon\nnew1,1\nnew2,4\n")
    rows = [f"{one},{20 + i},{('no', 'yes')[i % 3 % 2]}" for i, one in enumerate(IDS)]
    Path("visits.csv").write_text("\n".join(["id,age,label", *rows]) + "\n")
    Path("people.toml").write_text(VISITS.replace("steps = 20", "steps = 5"))
    return made


@pytest.mark.parametrize("login", MAY)
def test_each_role_may_use_these_commands_and_no_other(command_house, login):
    url, pepper = command_house.server.url(command_house.schema, user=login), ["--pepper", command_house.pepper]
    with command_house.registry("owner") as registry:
        before = registry.head
    worked = set()
    for name, arguments in COMMANDS.items():
        if arguments[0].startswith("--"):
            call = ["train", "people.toml", "--registry", url, "--share", "0.1", "-q", *pepper, *arguments]
        else:
            needs_none = arguments[0] in ("approve", "limit", "quarantine")
            call = ["registry", arguments[0], url, *arguments[1:], *([] if needs_none else pepper)]
        outcome = program.epsilons(*call)
        if outcome.code == 0:
            worked.add(name)
            continue
        assert outcome.code in (2, 3), (name, outcome)
        assert re.search(r"right to do this|your role may see|No run 'theirs'", outcome.err), (name, outcome)
        assert len(outcome.err.splitlines()) <= 3, (name, outcome)
        unsaid = rf"\bp\d|Traceback|{command_house.server.password}"
        assert not re.search(unsaid, outcome.err + outcome.out), (name, outcome)
    assert worked == MAY[login]
    with command_house.registry("owner") as registry:
        assert registry.verify().is_right
        assert (registry.head != before) == bool(MAY[login] & {"own", "change"}), "a refused command changed something"


@pytest.mark.slow
def test_a_run_of_a_runner_is_settled_and_seen_by_the_others(command_house):
    url = command_house.server.url(command_house.schema, user="anna")
    run = ["train", "people.toml", "--registry", url, "--pepper", command_house.pepper, "--share", "0.1", "-q"]
    program.epsilons(*run, "--project", "cardiology", "-o", "own").succeeded()
    with Registry(command_house.server.url(command_house.schema, user="rita")) as registry:
        assert {run.project: run.state for run in registry.summary().runs} == {
            "cardiology": "settled",
            "oncology": "reserved",
        }
    with Registry(url) as registry:
        assert [run.project for run in registry.summary().runs] == ["cardiology"]


# -- what subjects state waits, and is carried out -------------------------------------------------------------------


psycopg = pytest.importorskip("psycopg", reason=MISSING)

#: The table as it was: any number of open requests per subject.
OLD = """drop trigger request_is_the_only_one on request; drop index one_open_request;
  drop policy changes on request; drop policy states on request; drop policy own on request;
  create policy own on request to epsilons_subject
  using (role = current_user) with check (role = current_user and applied is null);"""
MANY = "insert into request (epsilon, delta) select 1 + n / 100000.0, 1e-5 from generate_series(1, %s) n"


@pytest.fixture
def fresh_house(postgres, tmp_path):
    return build_house(postgres, tmp_path / "pepper")


def connect(fresh_house, login):
    return psycopg.connect(fresh_house.server.url(fresh_house.schema, user=login))


def state(fresh_house, login, epsilon, delta="1e-5"):
    fresh_house.sql(login, f"insert into request (epsilon, delta) values ({epsilon}, {delta})")


def test_a_subject_has_one_open_request_and_changes_it(fresh_house):
    state(fresh_house, "sue", 2)
    with pytest.raises(psycopg.errors.UniqueViolation, match="one request of yours waits already") as refused:
        state(fresh_house, "sue", 3)
    assert "update request set epsilon" in refused.value.diag.message_hint
    assert fresh_house.sql("sue", "update request set epsilon = 4 where applied is null") == 1
    with fresh_house.registry("otto") as registry:
        assert registry.carry_out() == 1
        assert registry.account(["p3"]).epsilon == [4.0]
    assert fresh_house.sql("sue", "update request set epsilon = 9") == 0, "what was carried out stays as it was stated"
    state(fresh_house, "sue", "null", "null")
    with fresh_house.registry("otto") as registry:
        assert registry.carry_out() == 1
        assert registry.account(["p3"]).withdrawn.all()


def test_two_open_requests_at_the_same_moment_become_one(fresh_house):
    with connect(fresh_house, "sue") as first, connect(fresh_house, "sue") as second:
        first.execute("insert into request default values")
        second.execute("set lock_timeout = '100ms'")
        with pytest.raises(psycopg.errors.LockNotAvailable):
            second.execute("insert into request default values")
    assert fresh_house.sql("owner", "select count(*) from request where applied is null") == [(1,)]


@given(st.floats(1e-300, 1000), st.floats(1e-9, 1, exclude_max=True))
def test_the_grid_rounds_down_to_two_digits_and_a_power_of_ten(epsilon, delta):
    rounded = on_grid(epsilon, delta)
    unit = Fraction(10) ** (math.floor(math.log10(epsilon)) - 1)
    assert 0 <= (epsilon - rounded[0]) / rounded[0] <= 0.1
    assert min(abs(Fraction(repr(rounded[0])) / one % 1) for one in (unit, unit / 10)) == 0
    assert 1e-9 <= rounded[1] <= delta < 10.001 * rounded[1]
    assert rounded[1] in [float(f"1e-{n}") for n in range(1, 10)]
    assert on_grid(*rounded) == rounded


def test_stated_budgets_become_wishes_on_the_grid(fresh_house):
    state(fresh_house, "sue", 2.3456, "3.3e-5")
    with fresh_house.registry("otto") as registry:
        registry.carry_out()
        accounts = registry.account(["p3"])
    assert (accounts.epsilon[0], accounts.delta[0]) == (2.3, 1e-5)
    assert fresh_house.sql("sue", "select epsilon from request") == [(2.3456,)]


def test_requests_leave_half_of_the_numbers_of_wishes_to_officers(fresh_house, monkeypatch):
    known = fresh_house.sql("owner", "select count(*) from wish")[0][0]
    monkeypatch.setattr(people, "MOST_WISHES", known + 1)
    state(fresh_house, "sue", 2)
    state(fresh_house, "sam", 5)
    with fresh_house.registry("otto") as registry:
        registry.carry_out()
        assert fresh_house.sql("owner", "select count(*) from wish") == [(known + 1,)]
        assert fresh_house.sql("sam", "select applied from request") == [(NO_NUMBER_LEFT,)]
        state(fresh_house, "sam", "null", "null")
        state(fresh_house, "sue", 3)
        registry.carry_out()
        assert registry.account(["p4"]).withdrawn.all(), "a withdrawal needs no number"
        assert registry.account(["p3"]).epsilon == [3.0], "nor does a budget that is known"
        registry.change(["p5"], 7.0)
        assert registry.verify().is_right


def test_of_an_old_backlog_only_the_newest_request_per_subject_counts(fresh_house, monkeypatch):
    monkeypatch.setattr(people, "REPLACED_AT_ONCE", 70)
    fresh_house.sql("owner", OLD)
    with connect(fresh_house, "sue") as sue:
        sue.execute(MANY, [200])
    fresh_house.sql("sam", "insert into request default values")
    parts = []
    with fresh_house.registry("otto") as registry:
        before = registry.head[0]
        assert registry.carry_out(parts.append) == 2
        assert registry.head[0] <= before + 3, "a wish, a change, a withdrawal"
        assert registry.account(["p3"]).epsilon == [1.0]
        assert registry.verify().is_right
    assert parts == sorted(parts)
    assert parts[-1] == 1.0
    applied = [row[0] for row in fresh_house.sql("sue", "select applied from request order by id")]
    assert applied[:-1] == [REPLACED] * 199
    assert applied[-1] > 0
    fresh_house.sql("owner", people.roles_script())
    with connect(fresh_house, "sue") as sue, pytest.raises(psycopg.errors.UniqueViolation):
        sue.execute(MANY, [2])


def test_running_the_roles_again_closes_an_old_backlog_itself(fresh_house):
    fresh_house.sql("owner", OLD)
    with connect(fresh_house, "sue") as sue:
        sue.execute(MANY, [20])
    fresh_house.sql("owner", people.roles_script())
    assert fresh_house.sql("sue", "select count(*) from request where applied is null") == [(1,)]
    assert fresh_house.sql("sue", "select epsilon from request where applied is null") == [(1 + 20 / 100000.0,)]


def test_batches_are_transactions_of_their_own_and_an_interrupted_call_is_repeated(fresh_house, monkeypatch):
    monkeypatch.setattr(people, "BATCH", 3)
    fresh_house.sql("owner", "insert into request (role, epsilon, delta) select 'r' || n, 2 + n % 2, 1e-5 "
                       "from generate_series(10, 19) n")  # fmt: skip
    fresh_house.sql("owner", "insert into subject select 'r' || n, n from generate_series(10, 19) n")

    def stop(part):
        raise KeyboardInterrupt

    with fresh_house.registry("owner") as registry:
        with pytest.raises(KeyboardInterrupt):
            registry.carry_out(stop)
        assert fresh_house.sql("owner", "select count(*) from request where applied is null") == [(7,)]
        before = registry.head[0]
        parts = []
        assert registry.carry_out(parts.append) == 7
        assert len(parts) == 3
        assert registry.head[0] == before + 3, "one change for each batch"
        assert registry.account(IDS[10:20]).epsilon.tolist() == [2.0, 3.0] * 5
        assert registry.verify().is_right


def test_a_subject_who_holds_the_own_row_or_table_holds_up_nobody(fresh_house):
    state(fresh_house, "sue", 2)
    state(fresh_house, "sam", 2)
    with connect(fresh_house, "sue") as sue:
        sue.execute("update request set epsilon = 4")
        with fresh_house.registry("otto") as registry:
            registry._database.run("set lock_timeout = '2s'")
            assert registry.carry_out() == 1
            registry.withdraw(["p9"])
            assert registry.account(["p4"]).epsilon == [2.0]
    with fresh_house.registry("otto") as registry:
        assert registry.carry_out() == 1
        assert registry.account(["p3"]).epsilon == [4.0]


def test_what_a_subject_states_during_the_call_waits_for_the_next_one(fresh_house):
    state(fresh_house, "sue", 2)
    with fresh_house.registry("otto") as registry:
        assert registry.carry_out(lambda part: state(fresh_house, "sue", 3)) == 1
        assert registry.account(["p3"]).epsilon == [2.0]
        assert registry.carry_out() == 1
        assert registry.account(["p3"]).epsilon == [3.0]


def test_requests_at_random_are_those_of_a_slow_twin(fresh_house):
    """Each round: subjects state, change and withdraw; carry-out does what one call per subject would."""
    rng = np.random.default_rng(5)
    logins = [f"s{n}" for n in range(8)]
    fresh_house.sql("owner", "insert into subject select 's' || n, 10 + n from generate_series(0, 7) n")
    twin = {login: ([1.0, 3.0][n % 2], False) for n, login in enumerate(logins)}
    with fresh_house.registry("owner") as registry:
        for _ in range(12):
            for login in rng.permutation(logins)[: rng.integers(0, 9)]:
                epsilon = rng.choice([0.001, 1, 1.999, 2.04, 55.55])
                if rng.random() < 0.3:
                    fresh_house.sql("owner", f"insert into request (role) values ('{login}')")
                    twin[login] = (twin[login][0], True)
                    continue
                fresh_house.sql(
                    "owner", f"insert into request (role, epsilon, delta) values ('{login}', {epsilon}, 9e-5)"
                )
                if epsilon > 0.001:
                    twin[login] = (math.floor(epsilon * 10) / 10 if epsilon < 10 else math.floor(epsilon), False)
            registry.carry_out()
            accounts = registry.account([f"p{10 + n}" for n in range(8)])
            found = list(zip(accounts.epsilon.tolist(), accounts.withdrawn.tolist(), strict=True))
            assert found == list(twin.values())
        assert registry.verify().is_right


def test_carrying_out_a_file_is_refused_and_leaves_the_file(tmp_path):
    with Registry.create(f"sqlite:///{tmp_path}/a.db") as registry, pytest.raises(Exception, match="database failed"):
        carry_out(registry._database, print)
    with Registry(f"sqlite:///{tmp_path}/a.db") as registry:
        assert registry.verify().is_right


def test_readers_wait_for_no_writer(place):
    """A writer holds the registry's lock, and has written, for as long as they read."""

    class GivenUp(Exception):
        pass

    with Registry.create(*place) as registry:
        registry.enrol(IDS, 3.0)
        reserve(registry, "one", IDS, [0] * 40, table([50.0]))
        before = registry.head

        def work():
            databases.add(registry._database, "quota", project="x", share=0.5)
            with Registry(*place) as reader:
                assert reader.verify().is_right
                assert reader.summary().people == "40 or more"
                assert reader.account(IDS).can_take_part.all()
                assert reader.head == before
                assert reader.runs_of("p1")[0].run == "one"
                assert evidence.export(reader)["head"]["number"] == before[0]
            raise GivenUp

        with pytest.raises(GivenUp):
            registry._database.transaction(work)
