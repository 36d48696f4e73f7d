"""Whose rows are read: a uniform choice by the person's own rows, whole persons in each batch, and what is refused."""

from __future__ import annotations

import itertools
import json
from collections import Counter

import numpy as np
import pytest
import torch

import epsilons
from epsilons.auditing.membership import attack
from epsilons.auditing.stacked import check_members
from epsilons.draws.persons_rows import Persons, Readings, check_size, persons_of
from epsilons.draws.randomness import Randomness
from epsilons.errors import BudgetError, DataError, InputError
from epsilons.training.validation import warn_if_rounding_is_not_covered
from people import SIZES, a_model, a_plan, budgets, private_over, visits

RANDOMNESS = Randomness(bytes(range(32)))


def chosen(persons: Persons, step: int, drawn: np.ndarray | None = None) -> Readings:
    everyone = np.arange(persons.count) if drawn is None else drawn
    return persons.readings(persons.with_rows(everyone), RANDOMNESS, 0, step)


def owned(sizes: tuple[int, ...], rows_per_person: int = 1, views: int = 1, seed: int = 0) -> Persons:
    person = np.random.default_rng(seed).permutation(np.repeat(np.arange(len(sizes)), sizes))
    return Persons.of(person, len(sizes), rows_per_person, views)


def by_person(readings: Readings) -> dict[int, list[int]]:
    parts = np.split(readings.rows, np.cumsum(readings.sizes)[:-1])
    return {p: rows.tolist() for p, rows in zip(readings.persons.tolist(), parts, strict=True)}


@pytest.mark.parametrize("source", ["philox", "secure"])
@pytest.mark.parametrize(("rows", "size"), [(5, 1), (5, 2), (6, 3), (4, 3)])
def test_every_subset_of_a_person_s_rows_is_equally_likely(rows: int, size: int, source: str):
    """Chi-square over the subsets of one person among 40, with their places; fails by chance once in 10^6."""
    if source == "secure":
        pytest.importorskip("cryptography")
    persons, steps = owned((rows,) * 40, size), 400
    own = {p: np.flatnonzero(persons.person == p).tolist() for p in range(40)}
    counts: Counter[tuple[int, ...]] = Counter()
    for step in range(steps):
        readings = persons.readings(np.arange(40), Randomness(bytes(32), source), 0, step)
        counts.update(tuple(own[p].index(row) for row in mine) for p, mine in by_person(readings).items())
    subsets = list(itertools.combinations(range(rows), size))
    assert set(counts) == set(subsets)
    expected = 40 * steps / len(subsets)
    statistic = sum((counts[s] - expected) ** 2 / expected for s in subsets)
    freedom = len(subsets) - 1
    assert statistic < freedom + 5 * (2 * freedom) ** 0.5 + 12


def test_persons_and_steps_choose_independently():
    """Of pairs (two persons; two steps) with 2 rows each, half agree: within 5 standard deviations."""
    persons, steps = owned((2,) * 1000), 20
    choice = np.array([chosen(persons, step).numbers for step in range(steps)])  # (steps, persons)
    for one, other in ((choice[:, ::2], choice[:, 1::2]), (choice[:-1], choice[1:])):
        same = one == other
        assert abs(same.mean() - 0.5) < 2.5 / same.size**0.5


def test_another_key_phase_or_step_makes_another_choice():
    persons, everyone = owned((50,) * 30), np.arange(30)
    first = persons.readings(everyone, RANDOMNESS, 0, 0).rows.tolist()
    assert persons.readings(everyone, RANDOMNESS, 0, 0).rows.tolist() == first
    others = [(RANDOMNESS, 0, 1), (RANDOMNESS, 1, 0), (Randomness(bytes(32)), 0, 0)]
    assert all(persons.readings(everyone, *other).rows.tolist() != first for other in others)


@pytest.mark.parametrize("rows_per_person", [1, 3])
def test_no_choice_depends_on_other_persons_rows_or_on_who_else_is_drawn(rows_per_person: int):
    """Rows of others are added, removed and moved; a person's own rows keep their order."""
    make = np.random.default_rng(1)
    sizes = make.integers(1, 12, 30)
    one = owned(tuple(sizes.tolist()), rows_per_person, seed=1)
    others = make.integers(0, 40, 30)
    others[:10] = sizes[:10]
    two = owned(tuple(others.tolist()), rows_per_person, seed=2)
    for step in range(5):
        before = chosen(one, step)
        after = chosen(two, step, np.sort(make.permutation(30)[:25]))
        places = [
            {
                p: n.tolist()
                for p, n in zip(r.persons.tolist(), np.split(r.numbers, np.cumsum(r.sizes)[:-1]), strict=True)
            }
            for r in (before, after)
        ]
        same = [p for p in range(10) if p in places[1]]
        assert same
        assert [places[0][p] for p in same] == [places[1][p] for p in same]


def test_rows_are_in_ascending_order_and_their_own_persons():
    persons = owned((7, 0, 3, 50, 1), rows_per_person=4)
    for step in range(20):
        for person, rows in by_person(chosen(persons, step)).items():
            assert rows == sorted(set(rows))
            assert set(persons.person[rows]) == {person}


def test_every_view_has_a_number_of_its_own():
    readings, once = (chosen(owned((3, 1, 8), rows_per_person=2, views=views), 0) for views in (3, 1))
    assert readings.sizes.tolist() == [6, 3, 6]
    assert readings.numbers[::3].tolist() == once.numbers.tolist()
    assert readings.rows[::3].tolist() == once.rows.tolist()
    for first, last in itertools.pairwise(readings.ends.tolist()):
        rows, numbers = readings.rows[first:last], readings.numbers[first:last]
        assert len(set(numbers.tolist())) == len(numbers)
        assert all(len({*rows[i : i + 3].tolist()}) == 1 for i in range(0, len(rows), 3))


@pytest.mark.parametrize("largest", [7, 8, 20, 1000])
@pytest.mark.parametrize("sizes", [(1,) * 50, (3,) * 20, (7, 1, 1, 2, 5, 7, 7, 1, 3), (1,), (2, 2, 2, 1)])
def test_physical_batches_hold_whole_persons_in_order(sizes: tuple[int, ...], largest: int):
    readings = chosen(owned(sizes, rows_per_person=7), 3)
    parts = readings.batches(largest)
    assert all(0 < len(part) <= largest and len(part) == part.sizes.sum() for part in parts)
    for name in ("persons", "sizes", "rows", "numbers"):
        assert np.concatenate([getattr(part, name) for part in parts]).tolist() == getattr(readings, name).tolist()
    fewest = -(-len(readings) // largest)
    assert fewest <= len(parts) <= 2 * fewest


def test_the_places_of_rows_belong_to_their_persons():
    readings = chosen(owned((3, 1, 2), rows_per_person=3), 0)
    assert [list(readings.places(p)) for p in range(3)] == [[0, 1, 2], [3], [4, 5]]
    assert readings.persons_at([5, 0, 1]) == (0, 2)
    assert readings.persons_at([]) == ()


# -- what is refused ----------------------------------------------------------------------------------------------


def named() -> epsilons.Budgets:
    """Persons Ann and Bob."""
    return epsilons.Budgets.by_person([1.0, 3.0, 1.0], ["ann", "bob", "ann"], delta=1e-3)


def test_the_rows_of_the_budgets_count_unless_others_are_given():
    people = named()
    assert persons_of(people, 3).person.tolist() == [0, 1, 0]
    assert persons_of(people, 2, ["bob", "ann"]).person.tolist() == [1, 0]
    assert persons_of(people, 2, np.array(["ann", "ann"])).count == 2
    unnamed = epsilons.Budgets([1.0, 3.0], delta=1e-3, unit="person")
    assert persons_of(unnamed, 2, torch.tensor([1, 0])).person.tolist() == [1, 0]
    assert persons_of(unnamed, 2, range(2)).are_records


REFUSED = {
    "another length": (["ann"], "got 1 for a data set of 3 rows"),
    "an unknown id": (["ann", "bob", "SECRET"], "without a budget"),
    "no id": (["ann", None, "bob"], "no id"),
    "not a number": (["ann", float("nan"), "bob"], "no id"),
    "two columns": (np.array([["ann", "SECRET"]] * 3), "several people"),
    "lists of owners": ([["ann", "SECRET"], ["bob"], ["ann"]], "texts or whole numbers|several people|flat list"),
    "pairs of owners": ([("ann", "SECRET")] * 3, "several people"),
    "one name": ("SECRET", "flat list|got"),
    "a number": (7, "flat list"),
    "masked": (np.ma.masked_array(["ann", "SECRET", "bob"], [False, True, False]), "masked"),
    "a dict": ({"SECRET": 1}, "flat list"),
    "bytes": ([b"SECRET", b"bob", b"ann"], "texts or whole numbers"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_ids_that_do_not_fit_are_refused_and_never_shown(name: str):
    ids, message = REFUSED[name]
    with pytest.raises((DataError, BudgetError), match=message) as error:
        persons_of(named(), 3, ids)
    assert "SECRET" not in str(error.value)


WRONG_POSITIONS = {
    "outside": ([0, 1, 2], "outside the budgets of 2 persons"),
    "negative": ([0, -1, 1], "outside the budgets"),
    "numbers with a point": ([0.0, 1.0, 1.0], "whole numbers"),
    "texts": (["ann", "bob", "ann"], "hold no ids"),
    "yes or no": ([True, False, True], "whole numbers"),
    "ragged": ([[0, 1], [1], [0]], "whole numbers"),
    "two owners": ([[0, 1], [1, 0], [0, 0]], "several people"),
    "one number": (1, "flat list"),
    "a set": ({0, 1}, "flat list"),
    "an iterator": (iter([0, 1, 0]), "flat list"),
    "none for some": ([0, None, 1], "whole numbers"),
    "masked": (np.ma.masked_array([0, 1, 0], [False, True, False]), "masked"),
    "beyond 64 bits": ([0, 2**70, 1], "whole numbers"),
    "beyond 63 bits": (np.array([0, 2**63 + 5, 1], dtype=np.uint64), "outside the budgets"),
    "empty": ([], "whole numbers|got 0"),
    "too few": ([0, 1], "got 2 for a data set of 3"),
}


@pytest.mark.parametrize("name", WRONG_POSITIONS)
def test_positions_that_do_not_fit_are_refused(name: str):
    given, message = WRONG_POSITIONS[name]
    with pytest.raises(DataError, match=message):
        persons_of(epsilons.Budgets([1.0, 3.0], delta=1e-3, unit="person"), 3, given)


@pytest.mark.parametrize("given", [{"persons": [0, 1, 2]}, {"rows_per_person": 2}])
def test_budgets_of_records_take_no_persons(given: dict[str, object]):
    with pytest.raises(DataError, match=f"{next(iter(given))}= is for budgets of persons"):
        persons_of(epsilons.Budgets([1.0, 3.0, 1.0], delta=1e-3), 3, **given)


def test_budgets_of_persons_need_the_person_of_each_row():
    with pytest.raises(DataError, match="made from 3 rows"):
        persons_of(named(), 5)
    with pytest.raises(DataError, match="hold no rows"):
        persons_of(named().subset([0]), 2)
    with pytest.raises(DataError, match=r"persons=range\(rows\)"):
        persons_of(epsilons.Budgets([1.0, 3.0], delta=1e-3, unit="person"), 2)


@pytest.mark.parametrize("name", ["rows_per_person", "views"])
@pytest.mark.parametrize("value", [0, -1, 1.5, True, None, "2", float("nan")])
def test_numbers_of_rows_and_views_are_whole_and_above_0(name: str, value: object):
    with pytest.raises(InputError, match=f"{name} must be a whole number of at least 1"):
        persons_of(named(), 3, None, **{name: value})


def test_a_person_whose_rows_do_not_fit_into_a_batch_is_refused_before_training():
    data, model = visits(), a_model()
    with pytest.raises(DataError, match="Lower rows_per_person or views, or raise") as error:
        private_over(data, model, rows_per_person=30, largest=29)
    assert "50" not in str(error.value)
    private = private_over(data, model, rows_per_person=15, views=2, largest=30)
    with pytest.raises(DataError, match="Lower rows_per_person"):
        private.max_physical_batch = 29
    assert private.max_physical_batch == 30
    private.close()
    check_size(persons_of(budgets(), len(data.person), data.person, 1000), max(SIZES))


def test_an_engine_that_takes_no_persons_is_refused_before_training():
    class Old:
        def attach(self, model, parameters): ...
        def begin(self, records): ...
        def detach(self): ...
        def clipped_sum(self, losses, clip_norm, weight):
            raise AssertionError

    with pytest.raises(InputError, match="sizes"):
        private_over(visits(), a_model(), engine=Old(), rows_per_person=2)
    private_over(visits(), a_model(), engine=Old()).close()
    assert a_plan().records == len(SIZES)


@pytest.mark.parametrize(("unit", "of_the_plan"), [("record", "person"), ("person", "record")])
def test_a_plan_for_another_unit_is_refused(unit: str, of_the_plan: str):
    """Its guarantee would name what is not drawn and clipped."""
    one, other = (epsilons.Budgets(np.resize([1.0, 4.0], len(SIZES)), 1e-5, unit=u) for u in (unit, of_the_plan))
    data = visits(tuple(1 for _ in SIZES))
    persons = None if unit == "record" else data.person
    with pytest.raises(DataError, match="another unit"):
        private_over(data, a_model(), a_plan(people=other), budgets=one, persons=persons)


def test_shadow_models_of_persons_are_refused():
    data = visits()
    pairs = data.inputs.float().numpy(), data.targets.numpy()
    with pytest.raises(InputError, match="audit it"):
        attack(torch.nn.Linear(5, 3), pairs, a_plan(), budgets=budgets())


def test_stacks_of_models_take_no_plan_of_persons():
    with pytest.raises(InputError, match="one by one"):
        check_members(a_plan(), len(SIZES), budgets().group, np.ones((1, len(SIZES)), dtype=bool), [RANDOMNESS])


def test_a_fold_of_persons_needs_the_persons_of_its_rows(tmp_path):
    """Half of the persons, with their rows: budgets.subset keeps the ids, and persons= says whose each row is."""
    data = visits()
    ids = np.array([f"id {p}" for p in data.person])
    people = epsilons.Budgets.by_person(np.where(data.person % 2, 4.0, 1.0), ids, delta=1e-3)
    plan = epsilons.plan(people, epsilons.Recipe(4, 4.0, 0.5), accountant="rdp", runs=2)
    half = people.subset(range(0, len(people), 2))
    kept = np.isin(people.person, range(0, len(people), 2))
    rows = tuple(t[torch.from_numpy(kept)] for t in data.columns)
    folder = epsilons.PlanFolder.create(tmp_path / "plan", plan).for_subset()
    with pytest.raises(DataError, match="hold no rows"):
        private_over(data, a_model(), folder, budgets=half, persons=None, dataset=rows)
    with private_over(
        data, a_model(), folder, budgets=half, persons=ids[kept], dataset=rows, run_dir=tmp_path / "run"
    ) as private:
        assert private._parts.persons.count == len(half)
    settings = json.loads((tmp_path / "run" / "run.json").read_text())
    assert settings["subset_records"] == len(half)
    assert (settings["rows_per_person"], settings["views"]) == (1, 1)


@pytest.mark.parametrize(("largest", "is_covered"), [(8, False), (300, True), (10**6, False)])
def test_rounding_is_warned_of_as_the_extreme_batches_of_persons_demand(largest: int, is_covered: bool, recwarn):
    """Persons with 1 to 4 rows, n of them: n·(most in a batch + most batches) is at most 2^32."""
    expected = 68_000.0
    n = expected + 8 * expected**0.5
    assert is_covered == (n * (min(largest, n) + min(n, 2 * 4 * n / largest + 1)) <= 2**32)
    plan = a_plan(expected_batch=expected, weight=[1.0, 1.0], clip_norm=[1.0, 1.0])
    warn_if_rounding_is_not_covered(plan, largest, 4)
    assert bool(recwarn) is not is_covered


def test_whatever_changes_the_sum_of_persons_is_in_their_facts():
    """A run that is resumed with other facts gets another key: the sum is another one."""
    owner = np.array([0, 1, 1, 2])
    facts = [
        Persons(3).facts,
        Persons(3, views=2).facts,
        Persons(3, views=3).facts,
        *(Persons(count, owner, rows, views).facts for count in (3, 4) for rows in (1, 2) for views in (1, 2)),
        Persons(3, owner[::-1].copy()).facts,
    ]
    assert facts[0] == {}
    assert len({repr(sorted(each.items())) for each in facts}) == len(facts)
