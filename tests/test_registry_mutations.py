"""Whatever is changed in a registry is refused by the database, found by `verify`, or legal by a slow twin."""

from __future__ import annotations

import random
import tempfile
from pathlib import Path

import numpy as np
import pytest

import registry_twin as twin
from epsilons.accounting import rdp
from epsilons.registry import Registry
from epsilons.registry.rosters import caps
from registry_mutations import EACH, MUTATIONS, Draft, OnPostgres, OnSqlite, memory, outcomes

#: Mutations of each part of the slow tests: 10,000 on each database.
PART = 1000


def failures(on, numbers, kinds=()):
    try:
        return [one for one in outcomes(on, numbers, kinds) if one.is_failure]
    finally:
        on.close()


@pytest.fixture
def folder():
    with tempfile.TemporaryDirectory(dir=memory()) as name:
        yield Path(name)


def test_each_kind_of_mutation_is_found_refused_or_legal_in_a_file(folder):
    assert failures(OnSqlite(folder), range(2 * EACH), sorted(MUTATIONS)) == []


def test_each_role_of_postgresql_changes_nothing_that_stays_unseen(postgres, folder):
    assert failures(OnPostgres(folder, postgres), range(50 * EACH, 51 * EACH)) == []


@pytest.mark.slow
@pytest.mark.parametrize("part", range(10))
def test_thousands_of_mutations_of_a_file_are_found_refused_or_legal(folder, part):
    assert failures(OnSqlite(folder), range(part * PART, (part + 1) * PART)) == []


@pytest.mark.slow
@pytest.mark.parametrize("part", range(10))
def test_thousands_of_mutations_by_roles_are_found_refused_or_legal(postgres, folder, part):
    assert failures(OnPostgres(folder, postgres), range(part * PART, (part + 1) * PART)) == []


@pytest.mark.parametrize("count", [60, pytest.param(2000, marks=pytest.mark.slow)])
def test_a_file_with_flipped_bits_is_found_or_changes_nothing(folder, count):
    on = OnSqlite(folder)
    on.history(4)
    assert [one for one in map(on.flipped, range(count)) if one.is_failure] == []


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 2])
def test_a_registry_of_two_pages_is_judged_alike(folder, seed):
    on = OnSqlite(folder)
    on.history(seed, crowd=twin.PAGE)
    assert len({row["page"] for row in on.tables["part"]}) == 2
    assert [one for one in (on.outcome(n, "file") for n in range(100 * seed, 100 * seed + 60)) if one.is_failure] == []


# -- the twin itself -----------------------------------------------------------------------------------------------


@pytest.fixture
def draft(folder):
    on = OnSqlite(folder)
    on.history(3)
    return Draft(on.tables, random.Random(1), on.columns)


def test_the_twin_caps_budgets_as_the_registry_does():
    epsilon, delta, home = [0.9, 1.0, 4.0, 1000.0], [1e-5, 1e-9, 1e-6, 0.5], [11, 12, 7, 0]
    mine = np.array([twin.caps(*wish) for wish in zip(epsilon, delta, home, strict=True)], dtype=np.int64)
    assert np.abs(mine - caps(epsilon, delta, np.array(home))).max() <= 1


def test_the_twin_charges_what_the_divergences_add_up_to():
    plan = twin.Plan.of(
        '{"noises": [[20.0, null], [10.0, 30.0]], "rates": [[0.01, 0.5], [0.02, 0.0]], "steps": [50, 7]}'
    )
    one = [rdp.divergence(rate, noise, np.array(twin.ORDERS)) for rate, noise in ((0.01, 20.0), (0.02, 10.0))]
    nats = 50 * one[0] + 7 * one[1]
    assert plan.costs((50, 7))[0] == [int(np.ceil(value * 1e12)) for value in nats]
    assert plan.costs((50, 7))[1] == [0] * 16
    assert plan.costs((0, 0))[0] == [0] * 16


@pytest.mark.parametrize(
    "kind", ["wish", "enrol", "change", "withdraw", "quota", "reserve", "begin", "settle", "cancel"]
)
def test_the_twin_calls_an_honest_event_legal(draft, kind):
    draft.append(draft.legal(kind))
    judgement = twin.judge(draft.rebuild().tables)
    assert judgement.is_legal, judgement


def test_the_twin_sees_a_person_whose_sum_is_one_too_small(draft):
    draft.append(draft.reservation(draft.present[:5], noise=90.0))
    state = draft.rebuild().state
    state.people[draft.present[2]].sums[7] -= 1
    draft.store_people(state)
    assert twin.judge(draft.tables).wrong == [draft.present[2]]


def test_the_twin_agrees_with_an_account(folder):
    on = OnSqlite(folder)
    on.history(7)
    people = twin.replayed(on.tables).people
    with Registry(f"sqlite:///{on.base}", on.pepper) as registry:
        ids = np.array([f"p{i}" for i in range(40)])
        ids = ids[registry.are_enrolled(ids)]
        account, numbers = registry.account(ids), registry.numbers(ids)
    mine = np.array([people[number].sums for number in numbers]) / twin.PICO
    assert np.abs(mine - account.spent).max() < 1e-12
    assert mine.max() > 0
