"""Persons: budgets by ids, the rows of each that are read, and runs that differ by one person."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Hashable
from typing import Any

import numpy as np
import pyarrow
import pytest
import torch

import epsilons
from epsilons import Budgets, Plan, Recipe, plan
from epsilons.auditing.stacked import MemberDraws
from epsilons.clipping import ENGINES
from epsilons.draws.persons_rows import Persons, Readings, check_size, persons_of
from epsilons.draws.randomness import Randomness
from epsilons.errors import BudgetError, DataError, InputError, PlanError
from epsilons.training.validation import warn_if_rounding_is_not_covered
from people import (
    NO_PERSON,
    NORMS,
    SIZES,
    STEPS,
    WEIGHTS,
    a_model,
    a_plan,
    budgets,
    clipped,
    drawn,
    private_over,
    rows_seen,
    run,
    visits,
)

# -- budgets of persons -----------------------------------------------------------------------------------------------

DELTA = 1e-6


# -- a slow twin --------------------------------------------------------------------------------------------------


def twin(epsilon: list[float], delta: list[float], ids: list[Any]) -> tuple[list[int], list[tuple[float, float]]]:
    """(rows,) each row's person, and (persons,) the smallest epsilon and delta of each person. With dictionaries."""
    place: dict[Hashable, int] = {}
    smallest: list[tuple[float, float]] = []
    person = []
    for e, d, name in zip(epsilon, delta, ids, strict=True):
        key = str(int(name)) if isinstance(name, int | float) else name.strip()
        if key not in place:
            place[key] = len(smallest)
            smallest.append((e, d))
        at = place[key]
        smallest[at] = (min(smallest[at][0], e), min(smallest[at][1], d))
        person.append(at)
    return person, smallest


def random_rows(seed: int) -> tuple[list[float], list[float], list[Any]]:
    """Rows with repeated ids of every type, blanks around some, and budgets that often contradict each other."""
    rng = np.random.default_rng(seed)
    rows = int(rng.integers(1, 60))
    ids: list[Any] = []
    for number in rng.integers(0, max(rows // 2, 1), rows).tolist():
        spellings: list[Any] = [number, float(number), f"{number}", f" {number}\t", f"0{number}", f"\u00a0{number}"]
        ids.append(spellings[int(rng.integers(0, 6 if seed % 2 else 2))])
    return rng.choice([0.5, 1.0, 3.0], rows).tolist(), rng.choice([1e-6, 1e-5], rows).tolist(), ids


def stated(budgets: Budgets) -> list[tuple[float, float]]:
    """(persons,) epsilon and delta."""
    return [(float(budgets.epsilons[g]), float(budgets.delta[g])) for g in budgets.group]


def no_blank(ids: list[Any]) -> list[Any]:
    return [name.strip() if isinstance(name, str) else name for name in ids]


@pytest.mark.filterwarnings("ignore:delta")
@pytest.mark.parametrize("seed", range(60))
def test_budgets_by_person_equal_a_slow_twin_with_dictionaries(seed):
    epsilon, delta, ids = random_rows(seed)
    person, smallest = twin(epsilon, delta, no_blank(ids))
    budgets = Budgets.by_person(epsilon, ids, delta=delta, conflict="strictest")
    assert budgets.person is not None
    assert budgets.person.tolist() == person
    assert stated(budgets) == smallest
    assert budgets.persons_of(ids).tolist() == person
    agree = all((e, d) == smallest[p] for e, d, p in zip(epsilon, delta, person, strict=True))
    if agree:
        assert stated(Budgets.by_person(epsilon, ids, delta=delta)) == smallest
    else:
        with pytest.raises(BudgetError, match="strictest"):
            Budgets.by_person(epsilon, ids, delta=delta)


@pytest.mark.filterwarnings("ignore:delta")
@pytest.mark.parametrize("seed", range(0, 40, 2))
def test_the_order_of_rows_does_not_change_what_a_person_has(seed):
    epsilon, delta, ids = random_rows(seed)
    order = np.random.default_rng(seed).permutation(len(ids)).tolist()
    budgets, shuffled = (
        Budgets.by_person(
            [epsilon[i] for i in rows], [ids[i] for i in rows], delta=[delta[i] for i in rows], conflict="strictest"
        )
        for rows in (range(len(ids)), order)
    )
    names = sorted(set(map(str, map(int, ids))))
    before, after = (b.persons_of(names) for b in (budgets, shuffled))
    assert [stated(budgets)[p] for p in before] == [stated(shuffled)[p] for p in after]


# -- ids ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "ids",
    [
        [7, "7", 7.0, " 7 "],
        np.array([7, 7, 7, 7]),
        np.array([7.0, 7.0, 7.0, 7.0]),
        pyarrow.array(["a", "a ", "\ta", "a"]),
        pyarrow.chunked_array([["a", "a"], ["a", "a"]]),
        pyarrow.array(["a", "a", "a", "a"]).dictionary_encode(),
        np.array(["a", "a", " a", "a"]),
    ],
    ids=["mixed", "int", "float", "texts", "chunks", "dictionary", "numpy-texts"],
)
def test_one_id_in_several_spellings_is_one_person(ids):
    assert len(Budgets.by_person([1.0] * 4, ids)) == 1


def test_ids_may_come_in_many_parts():
    parts = pyarrow.chunked_array([["a", "b"], [], ["a"], ["b ", "c"]])
    budgets = Budgets.by_person([1.0] * 5, parts, delta=DELTA)
    assert budgets.person is not None
    assert budgets.person.tolist() == [0, 1, 0, 1, 2]
    assert budgets.persons_of(parts).tolist() == [0, 1, 0, 1, 2]
    with pytest.raises(BudgetError, match="one id"):
        Budgets.by_person([1.0], pyarrow.chunked_array([], pyarrow.string()))


def test_ids_are_compared_letter_by_letter():
    budgets = Budgets.by_person([1.0] * 5, ["7", "07", "a", "A", "a1"], delta=DELTA)
    assert len(budgets) == 5


@pytest.mark.parametrize("empty", ["", "  ", "NA", None, float("nan"), np.nan])
@pytest.mark.parametrize("rows", [1, 25])
def test_an_empty_id_is_refused_with_a_count_by_the_rule_of_20(empty, rows):
    ids = [empty] * rows + [f"secret-{i}" for i in range(30)]
    with pytest.raises(BudgetError) as error:
        Budgets.by_person([1.0] * len(ids), ids)
    assert str(error.value).startswith("Fewer than 20 rows" if rows == 1 else "25 of 55 rows")
    assert "secret" not in str(error.value)


@pytest.mark.parametrize("ids", [[b"a", b"b"], [["a"], ["b"]], [float("inf"), 1.0], [2.0**60, 1.0], [{}, {}]])
def test_ids_that_cannot_be_compared_are_refused(ids):
    with pytest.raises(BudgetError, match="ids of persons"):
        Budgets.by_person([1.0, 1.0], ids)


@pytest.mark.parametrize("ids", [[("a", "b"), ("a", "c")], np.array([["a", "b"], ["a", "c"]])])
def test_two_ids_in_a_row_are_refused_with_what_to_do(ids):
    with pytest.raises(BudgetError, match=r"Name the column.*one id"):
        Budgets.by_person([1.0, 1.0], np.array(ids))


def test_two_columns_of_owners_are_refused_with_what_to_do(tmp_path):
    with pytest.raises(BudgetError, match=r"a sender and a receiver.*Name the column.*one id"):
        Budgets.from_csv(tmp_path / "mail.csv", person=["sender", "receiver"])


def test_ids_of_another_length_are_refused():
    with pytest.raises(BudgetError, match="one id"):
        Budgets.by_person([1.0, 1.0], ["a"])


@pytest.mark.parametrize(("persons", "start"), [(3, "Fewer than 20 persons"), (40, "40 of 100 persons")])
def test_a_conflict_is_refused_with_a_count_and_without_ids_or_values(persons, start):
    ids = [f"secret-{i}" for i in range(100)] * 2
    epsilon = [0.77] * 100 + [0.88 if i < persons else 0.77 for i in range(100)]
    with pytest.raises(BudgetError) as error:
        Budgets.by_person(epsilon, ids)
    message = str(error.value)
    assert message.startswith(start)
    assert not any(private in message for private in ("secret", "0.77", "0.88"))


def test_the_rows_of_one_person_do_not_count_as_many_conflicts():
    with pytest.raises(BudgetError, match=r"^Fewer than 20 persons"):
        Budgets.by_person([1.0] * 100 + [2.0] * 50, ["a"] * 150)


def test_the_rows_of_one_stranger_do_not_count_as_many_persons():
    budgets = Budgets.by_person([1.0] * 100, range(100), delta=DELTA)
    with pytest.raises(BudgetError, match=r"^Fewer than 20 persons"):
        budgets.persons_of(["stranger"] * 50 + [*range(100)])


def test_no_repr_shows_an_id():
    budgets = Budgets.by_person([1.0, 2.0], ["secret-1", "secret-2"], delta=DELTA)
    shown = [repr(budgets), str(budgets), *map(repr, vars(budgets).values()), repr(plan(budgets, Recipe(1, 1, 1.0)))]
    assert not any("secret" in text for text in shown)


def test_an_id_without_a_budget_is_refused_without_naming_it():
    budgets = Budgets.by_person([1.0], ["ann"])
    with pytest.raises(BudgetError, match="Fewer than 20 persons") as error:
        budgets.persons_of(["ann", "secret"])
    assert "secret" not in str(error.value)


def test_a_subset_keeps_ids_and_forgets_rows():
    budgets = Budgets.by_person([1.0, 2.0, 1.0, 3.0], ["a", "b", "a", "c"], delta=DELTA)
    some = budgets.subset([2, 0])
    assert (some.unit, some.person, stated(some)) == ("person", None, [(3.0, DELTA), (1.0, DELTA)])
    assert some.persons_of(["a", "c", "a"]).tolist() == [1, 0, 1]
    with pytest.raises(BudgetError):
        some.persons_of(["b"])
    for people in (budgets, budgets.without_ids()):
        with pytest.raises(BudgetError, match="at most once"):
            people.subset([0, 0])


def test_budgets_of_persons_without_ids_know_no_rows():
    budgets = Budgets([1.0, 2.0], DELTA, unit="person")
    assert (budgets.unit, budgets.person, repr(budgets)) == ("person", None, "Budgets(2 persons)")
    with pytest.raises(BudgetError, match="hold no ids"):
        budgets.persons_of(["a"])
    with pytest.raises(BudgetError, match="unit must be"):
        Budgets([1.0], unit="people")


def test_a_table_gives_budgets_of_persons(tmp_path):
    path = tmp_path / "visits.csv"
    path.write_text("patient,tier,d\n07,strict,1e-6\n7,open,1e-6\n 07,strict,1e-7\n")
    tiers = {"strict": 0.5, "open": 8.0}
    budgets = Budgets.from_csv(
        path, column="tier", tiers=tiers, person="patient", delta_column="d", conflict="strictest"
    )
    assert stated(budgets) == [(0.5, 1e-7), (8.0, 1e-6)]
    assert budgets.person.tolist() == [0, 1, 0]
    with pytest.raises(BudgetError, match="no column 'person'"):
        Budgets.from_csv(path, column="tier", tiers=tiers, person="person")


def test_budgets_by_class_of_persons_need_rows_that_agree():
    epsilons = {0: 1.0, 1: 2.0, 2: 2.0}
    agreed = Budgets.by_class([0, 1, 2], epsilons, ids=["a", "b", "b"], delta=DELTA)
    assert stated(agreed) == [(1.0, DELTA), (2.0, DELTA)]
    with pytest.raises(BudgetError, match="different budgets"):
        Budgets.by_class([0, 1, 2], epsilons, ids=["a", "a", "b"])


# -- plans --------------------------------------------------------------------------------------------------------


def both() -> tuple[Plan, Plan]:
    """A plan of persons and the plan of records with the same numbers."""
    of_persons = Budgets.from_shares({1.0: 0.5, 3.0: 0.5}, records=100, delta=DELTA, unit="person")
    of_records = Budgets.from_shares({1.0: 0.5, 3.0: 0.5}, records=100, delta=DELTA)
    recipe = Recipe(5, 20, 1.0)
    return plan(of_persons, recipe, accountant="rdp"), plan(of_records, recipe, accountant="rdp")


def test_a_plan_of_persons_has_the_numbers_of_records_and_another_digest():
    persons, records = both()
    assert (persons.unit, records.unit) == ("person", "record")
    assert persons.epsilon_spent().tolist() == records.epsilon_spent().tolist()
    assert persons != records
    with pytest.raises(PlanError, match="cannot be compared"):
        persons.compare(records)


def test_the_unit_is_saved_and_old_readers_refuse_it(tmp_path):
    persons, records = both()
    assert Plan.load(persons.save(tmp_path / "plan.json")) == persons
    assert Plan.load(tmp_path / "plan.json").unit == "person"
    assert (persons.to_dict()["unit"], persons.to_dict()["schema"]) == ("person", 4)
    assert "unit" not in records.to_dict()


@pytest.mark.parametrize("change", [{"unit": "record"}, {"schema": 2}, {"schema": 3}, {"unit": "people"}])
def test_a_unit_that_was_edited_is_refused(tmp_path, change):
    import json

    values = both()[0].to_dict() | change
    (tmp_path / "plan.json").write_text(json.dumps(values))
    with pytest.raises(PlanError):
        Plan.load(tmp_path / "plan.json")


def test_every_text_of_a_plan_of_persons_speaks_of_persons():
    persons, records = both()
    few = plan(Budgets([1.0] * 30 + [2.0] * 3, DELTA, unit="person"), Recipe(5, 20, 1.0), accountant="rdp")
    for text in (persons.summary(), repr(persons), persons.compare(persons), few.summary(), few.compare(few)):
        assert "person" in text
        assert "record" not in text
    assert "Fewer than 20 persons" in few.summary()
    assert "person" not in records.summary()


@pytest.mark.parametrize("shares", [None, {1.0: 0.5, 3.0: 0.5}])
def test_the_guarantee_of_persons_covers_all_rows_of_a_person(shares):
    budgets = Budgets.from_shares({1.0: 0.5, 3.0: 0.5}, records=100, delta=DELTA, unit="person")
    made = plan(budgets, Recipe(5, 20, 1.0), accountant="rdp", public_shares=shares, public_records=shares and 100)
    text = made.guarantee
    assert "all rows of" in text
    assert "several records of one person" not in text
    assert "rows of a person under another id" in text
    assert "record" not in text


# -- whose rows are read ----------------------------------------------------------------------------------------------

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


@pytest.mark.parametrize("source", ["chacha20", "secure"])
@pytest.mark.parametrize(("rows", "size"), [(5, 1), (5, 2), (6, 3), (4, 3)])
def test_every_subset_of_a_person_s_rows_is_equally_likely(rows: int, size: int, source: str):
    """Chi-square over the subsets of one person among 40, with their places; fails by chance once in 10^6."""
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


def test_stacks_of_models_take_no_plan_of_persons():
    with pytest.raises(InputError, match="one by one"):
        MemberDraws(a_plan(), budgets().group, np.ones((1, len(SIZES)), dtype=bool), [RANDOMNESS]).check(len(SIZES))


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
        assert private._persons.count == len(half)
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


# -- runs without one person ------------------------------------------------------------------------------------------

DATA = visits()


@pytest.mark.parametrize("views", [1, 2])
@pytest.mark.parametrize("rows_per_person", [1, 4, 50])
@pytest.mark.parametrize("engine", ENGINES)
def test_each_drawn_person_adds_one_clipped_gradient_of_the_mean(engine: str, rows_per_person: int, views: int):
    """Sums, drawn persons and numbers of rows against the definition, written out person by person."""
    trace = run(DATA, engine=engine, rows_per_person=rows_per_person, views=views, largest=100)
    for step in range(STEPS):
        by_person = rows_seen(DATA, trace.seen[step])
        assert sorted(by_person) == [p for p in drawn(step) if SIZES[p]], "persons are drawn, whatever their rows"
        for person, rows in by_person.items():
            chosen = rows[::views]
            assert rows == [row for row in chosen for _ in range(views)]
            assert chosen == sorted(set(chosen))
            assert len(chosen) == min(rows_per_person, SIZES[person])
        expected = sum(clipped(DATA, person, rows) for person, rows in by_person.items())
        assert np.abs(trace.sums[step] - expected).max() <= 1e-6


@pytest.mark.parametrize("rows_per_person", [1, 3])
@pytest.mark.parametrize("who", [0, 1, 2, 4, 10], ids=lambda who: f"{SIZES[who]} rows")
def test_without_a_person_s_rows_only_their_clipped_vector_is_missing(who: int, rows_per_person: int):
    """Other rows get other indices: nobody's choice, coin or noise depends on them."""
    whole, without = (run(d, rows_per_person=rows_per_person, largest=9) for d in (DATA, DATA.without(who)))
    times = 0
    for step in range(STEPS):
        seen = rows_seen(DATA, whole.seen[step])
        mine = seen.pop(who, [])
        others = [n for n in whole.seen[step] if n not in DATA.numbers[DATA.rows_of(who)].tolist()]
        assert others == without.seen[step]
        assert bool(mine) == (who in drawn(step))
        difference = whole.sums[step] - without.sums[step]
        times += bool(mine)
        assert np.abs(difference - (clipped(DATA, who, mine) if mine else 0.0)).max() <= 2e-6 * NORMS[who % 2]
        assert np.linalg.norm(difference) <= WEIGHTS[who % 2] * NORMS[who % 2] * (1 + 1e-9)
    assert 0 < times < STEPS


def test_a_person_without_rows_is_drawn_and_adds_nothing():
    assert any(NO_PERSON in drawn(step) for step in range(STEPS))
    trace = run(DATA)
    assert len(trace.sums) == STEPS
    only = visits((*(0 for _ in SIZES[:-1]), 1))
    empty = run(only)
    for step, (seen, total) in enumerate(zip(empty.seen, empty.sums, strict=True)):
        expected = clipped(only, len(SIZES) - 1, [0]) if len(SIZES) - 1 in drawn(step) else 0.0
        assert len(seen) == (len(SIZES) - 1 in drawn(step))
        assert np.abs(total - expected).max() <= 1e-6
