"""Requests of subjects: one at a time, in short transactions, on a public grid; and readers that wait for nobody."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from epsilons.registry import Registry, databases, evidence, requests
from epsilons.registry.requests import NO_NUMBER_LEFT, REPLACED, carry_out, on_grid
from houses import IDS, build
from registries import reserve, table
from servers import MISSING

psycopg = pytest.importorskip("psycopg", reason=MISSING)

#: The table as it was: any number of open requests per subject.
OLD = """drop trigger request_is_the_only_one on request; drop index one_open_request;
  drop policy changes on request; drop policy states on request; drop policy own on request;
  create policy own on request to epsilons_subject
  using (role = current_user) with check (role = current_user and applied is null);"""
MANY = "insert into request (epsilon, delta) select 1 + n / 100000.0, 1e-5 from generate_series(1, %s) n"


@pytest.fixture
def house(postgres, tmp_path):
    return build(postgres, tmp_path / "pepper")


def connect(house, login):
    return psycopg.connect(house.server.url(house.schema, user=login))


def state(house, login, epsilon, delta="1e-5"):
    house.sql(login, f"insert into request (epsilon, delta) values ({epsilon}, {delta})")


def test_a_subject_has_one_open_request_and_changes_it(house):
    state(house, "sue", 2)
    with pytest.raises(psycopg.errors.UniqueViolation, match="one request of yours waits already") as refused:
        state(house, "sue", 3)
    assert "update request set epsilon" in refused.value.diag.message_hint
    assert house.sql("sue", "update request set epsilon = 4 where applied is null") == 1
    with house.registry("otto") as registry:
        assert registry.carry_out() == 1
        assert registry.account(["p3"]).epsilon == [4.0]
    assert house.sql("sue", "update request set epsilon = 9") == 0, "what was carried out stays as it was stated"
    state(house, "sue", "null", "null")
    with house.registry("otto") as registry:
        assert registry.carry_out() == 1
        assert registry.account(["p3"]).withdrawn.all()


def test_two_open_requests_at_the_same_moment_become_one(house):
    with connect(house, "sue") as first, connect(house, "sue") as second:
        first.execute("insert into request default values")
        second.execute("set lock_timeout = '100ms'")
        with pytest.raises(psycopg.errors.LockNotAvailable):
            second.execute("insert into request default values")
    assert house.sql("owner", "select count(*) from request where applied is null") == [(1,)]


@given(st.floats(1e-300, 1000), st.floats(1e-9, 1, exclude_max=True))
def test_the_grid_rounds_down_to_two_digits_and_a_power_of_ten(epsilon, delta):
    rounded = on_grid(epsilon, delta)
    unit = Fraction(10) ** (math.floor(math.log10(epsilon)) - 1)
    assert 0 <= (epsilon - rounded[0]) / rounded[0] <= 0.1
    assert min(abs(Fraction(repr(rounded[0])) / one % 1) for one in (unit, unit / 10)) == 0
    assert 1e-9 <= rounded[1] <= delta < 10.001 * rounded[1]
    assert rounded[1] in [float(f"1e-{n}") for n in range(1, 10)]
    assert on_grid(*rounded) == rounded


def test_stated_budgets_become_wishes_on_the_grid(house):
    state(house, "sue", 2.3456, "3.3e-5")
    with house.registry("otto") as registry:
        registry.carry_out()
        accounts = registry.account(["p3"])
    assert (accounts.epsilon[0], accounts.delta[0]) == (2.3, 1e-5)
    assert house.sql("sue", "select epsilon from request") == [(2.3456,)]


def test_requests_leave_half_of_the_numbers_of_wishes_to_officers(house, monkeypatch):
    known = house.sql("owner", "select count(*) from wish")[0][0]
    monkeypatch.setattr(requests, "MOST_WISHES", known + 1)
    state(house, "sue", 2)
    state(house, "sam", 5)
    with house.registry("otto") as registry:
        registry.carry_out()
        assert house.sql("owner", "select count(*) from wish") == [(known + 1,)]
        assert house.sql("sam", "select applied from request") == [(NO_NUMBER_LEFT,)]
        state(house, "sam", "null", "null")
        state(house, "sue", 3)
        registry.carry_out()
        assert registry.account(["p4"]).withdrawn.all(), "a withdrawal needs no number"
        assert registry.account(["p3"]).epsilon == [3.0], "nor does a budget that is known"
        registry.change(["p5"], 7.0)
        assert registry.verify().is_right


def test_of_an_old_backlog_only_the_newest_request_per_subject_counts(house, monkeypatch):
    monkeypatch.setattr(requests, "REPLACED_AT_ONCE", 70)
    house.sql("owner", OLD)
    with connect(house, "sue") as sue:
        sue.execute(MANY, [200])
    house.sql("sam", "insert into request default values")
    parts = []
    with house.registry("otto") as registry:
        before = registry.head[0]
        assert registry.carry_out(parts.append) == 2
        assert registry.head[0] <= before + 3, "a wish, a change, a withdrawal"
        assert registry.account(["p3"]).epsilon == [1.0]
        assert registry.verify().is_right
    assert parts == sorted(parts)
    assert parts[-1] == 1.0
    applied = [row[0] for row in house.sql("sue", "select applied from request order by id")]
    assert applied[:-1] == [REPLACED] * 199
    assert applied[-1] > 0
    house.sql("owner", requests.roles_script())
    with connect(house, "sue") as sue, pytest.raises(psycopg.errors.UniqueViolation):
        sue.execute(MANY, [2])


def test_running_the_roles_again_closes_an_old_backlog_itself(house):
    house.sql("owner", OLD)
    with connect(house, "sue") as sue:
        sue.execute(MANY, [20])
    house.sql("owner", requests.roles_script())
    assert house.sql("sue", "select count(*) from request where applied is null") == [(1,)]
    assert house.sql("sue", "select epsilon from request where applied is null") == [(1 + 20 / 100000.0,)]


def test_batches_are_transactions_of_their_own_and_an_interrupted_call_is_repeated(house, monkeypatch):
    monkeypatch.setattr(requests, "BATCH", 3)
    house.sql("owner", "insert into request (role, epsilon, delta) select 'r' || n, 2 + n % 2, 1e-5 "
                       "from generate_series(10, 19) n")  # fmt: skip
    house.sql("owner", "insert into subject select 'r' || n, n from generate_series(10, 19) n")

    def stop(part):
        raise KeyboardInterrupt

    with house.registry("owner") as registry:
        with pytest.raises(KeyboardInterrupt):
            registry.carry_out(stop)
        assert house.sql("owner", "select count(*) from request where applied is null") == [(7,)]
        before = registry.head[0]
        parts = []
        assert registry.carry_out(parts.append) == 7
        assert len(parts) == 3
        assert registry.head[0] == before + 3, "one change for each batch"
        assert registry.account(IDS[10:20]).epsilon.tolist() == [2.0, 3.0] * 5
        assert registry.verify().is_right


def test_a_subject_who_holds_the_own_row_or_table_holds_up_nobody(house):
    state(house, "sue", 2)
    state(house, "sam", 2)
    with connect(house, "sue") as sue:
        sue.execute("update request set epsilon = 4")
        with house.registry("otto") as registry:
            registry._database.run("set lock_timeout = '2s'")
            assert registry.carry_out() == 1
            registry.withdraw(["p9"])
            assert registry.account(["p4"]).epsilon == [2.0]
    with house.registry("otto") as registry:
        assert registry.carry_out() == 1
        assert registry.account(["p3"]).epsilon == [4.0]


def test_what_a_subject_states_during_the_call_waits_for_the_next_one(house):
    state(house, "sue", 2)
    with house.registry("otto") as registry:
        assert registry.carry_out(lambda part: state(house, "sue", 3)) == 1
        assert registry.account(["p3"]).epsilon == [2.0]
        assert registry.carry_out() == 1
        assert registry.account(["p3"]).epsilon == [3.0]


def test_requests_at_random_are_those_of_a_slow_twin(house):
    """Each round: subjects state, change and withdraw; carry-out does what one call per subject would."""
    rng = np.random.default_rng(5)
    logins = [f"s{n}" for n in range(8)]
    house.sql("owner", "insert into subject select 's' || n, 10 + n from generate_series(0, 7) n")
    twin = {login: ([1.0, 3.0][n % 2], False) for n, login in enumerate(logins)}
    with house.registry("owner") as registry:
        for _ in range(12):
            for login in rng.permutation(logins)[: rng.integers(0, 9)]:
                epsilon = rng.choice([0.001, 1, 1.999, 2.04, 55.55])
                if rng.random() < 0.3:
                    house.sql("owner", f"insert into request (role) values ('{login}')")
                    twin[login] = (twin[login][0], True)
                    continue
                house.sql("owner", f"insert into request (role, epsilon, delta) values ('{login}', {epsilon}, 9e-5)")
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
                assert reader.summary().people == "40"
                assert reader.account(IDS).can_take_part.all()
                assert reader.head == before
                assert reader.runs_of("p1")[0].run == "one"
                assert evidence.export(reader)["head"]["number"] == before[0]
            raise GivenUp

        with pytest.raises(GivenUp):
            registry._database.transaction(work)
