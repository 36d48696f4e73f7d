"""Budgets of persons: ids, conflicts, plans, and the words of their guarantee."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import numpy as np
import pyarrow
import pytest

from epsilons import Budgets, Plan, Recipe, plan
from epsilons.errors import BudgetError, PlanError

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
    assert (budgets.unit, budgets.person, repr(budgets)) == ("person", None, "Budgets(2 persons, 2 groups)")
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
