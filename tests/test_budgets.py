"""Budgets: which record asked for which epsilon; and that nobody's wish is ever repeated aloud."""

from __future__ import annotations

import hashlib
import tracemalloc
import unicodedata
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import parquet
from torch import Tensor, nn
from torch.utils.data import Subset, TensorDataset

import epsilons
from epsilons import Budgets
from epsilons.budgets.budgets import classes_of, tier_column
from epsilons.core import columns
from epsilons.core.columns import PART
from epsilons.core.disclosure import merge_small
from epsilons.core.mechanism import SMALLEST_DELTA
from epsilons.draws.persons_rows import Persons
from epsilons.draws.randomness import Randomness
from epsilons.errors import BudgetError, EpsilonsWarning
from epsilons.registry.databases import PAGE
from epsilons.registry.registry import roster_digest
from epsilons.registry.rosters import NO_PERSON, Roster
from epsilons.tabular import reading
from epsilons.training import validation
from epsilons.training.opening import hash_of_groups

SHARES = {1.0: 0.34, 2.0: 0.43, 3.0: 0.23}

# Values that would be recognised if a message repeated them: no count, row, or shape reads like this.
ODD = st.sampled_from([7.7777, 0.123457, 31.41593, 8.675309, 2.718282])


def test_groups_are_the_distinct_budgets_strictest_first():
    budgets = Budgets([3.0, 1.0, 3.0, 2.0], delta=1e-5)
    np.testing.assert_array_equal(budgets.epsilons, [1, 2, 3])
    np.testing.assert_array_equal(budgets.counts, [1, 1, 2])
    np.testing.assert_array_equal(budgets.group, [2, 0, 2, 1])
    np.testing.assert_array_equal(budgets.delta, [1e-5] * 3)
    np.testing.assert_allclose(budgets.shares, [0.25, 0.25, 0.5])
    assert len(budgets) == budgets.records == 4


@given(st.lists(st.sampled_from([0.1, 0.5, 1.0, 1.0 + 1e-12, 7.5]), min_size=1, max_size=60))
def test_epsilons_indexed_by_group_are_the_budgets_of_the_records(wishes):
    budgets = Budgets(wishes, delta=1e-6)
    np.testing.assert_array_equal(budgets.epsilons[budgets.group], wishes)
    np.testing.assert_array_equal(np.bincount(budgets.group), budgets.counts)
    assert (np.diff(budgets.epsilons) > 0).all()


@given(
    st.lists(st.tuples(st.sampled_from([0.5, 1.0, 2.0]), st.sampled_from([1e-6, 1e-5])), min_size=1, max_size=40),
    st.data(),
)
def test_a_subset_keeps_each_record_s_budget_and_delta(wishes, data):
    epsilon, delta = np.array(wishes).T
    budgets = Budgets(epsilon, delta)
    chosen = data.draw(st.lists(st.integers(0, len(wishes) - 1), min_size=1, max_size=40))
    subset = budgets.subset(chosen)
    np.testing.assert_array_equal(subset.epsilons[subset.group], epsilon[chosen])
    np.testing.assert_array_equal(subset.delta[subset.group], delta[chosen])


def test_a_subset_may_be_given_as_a_mask():
    budgets = Budgets([3.0, 1.0, 2.0], delta=1e-5)
    np.testing.assert_array_equal(budgets.subset(np.array([True, False, True])).epsilons, [2, 3])


OUTSIDE = [[], [3], [-1], [[0, 1]]]


@pytest.mark.parametrize(
    "indices", [*OUTSIDE, [True, False], [True] * 4, [False] * 3, [0.0, 1.0], ["0"], 1, [[0], [1, 2]]]
)
def test_a_subset_takes_whole_numbers_or_a_mask_as_long_as_the_data_and_nothing_else(indices):
    with pytest.raises(BudgetError, match="A subset"):
        Budgets([3.0, 1.0, 2.0], delta=1e-5).subset(indices)


def test_equal_epsilons_at_different_deltas_stay_apart():
    budgets = Budgets([1.0, 1.0, 2.0], delta=[1e-5, 1e-6, 1e-6])
    np.testing.assert_array_equal(budgets.epsilons, [1, 1, 2])
    np.testing.assert_array_equal(budgets.delta, [1e-6, 1e-5, 1e-6])
    np.testing.assert_array_equal(budgets.group, [1, 0, 2])


def test_what_budgets_hold_cannot_be_changed_afterwards():
    wishes = np.array([1.0, 2.0])
    budgets = Budgets(wishes, delta=1e-5)
    wishes[:] = 99
    np.testing.assert_array_equal(budgets.epsilons, [1, 2])
    for array in (budgets.epsilons, budgets.delta, budgets.counts, budgets.group, budgets.shares):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 5


# -- simulated ----------------------------------------------------------------------------------------------


def test_shares_are_dealt_out_exactly_and_shuffled_by_the_seed():
    budgets = Budgets.from_shares(SHARES, records=60_000)
    np.testing.assert_array_equal(budgets.counts, [20_400, 25_800, 13_800])
    again, other = Budgets.from_shares(SHARES, records=60_000), Budgets.from_shares(SHARES, records=60_000, seed=1)
    np.testing.assert_array_equal(budgets.group, again.group)
    assert (budgets.group != other.group).any()
    # At random: the first half holds each level about as often as the second. A hypergeometric count of 30,000 out
    # of 60,000 has a standard deviation under 61; 6 of them fail by chance less than once in 10^8.
    halves = np.stack([np.bincount(half, minlength=3) for half in np.split(budgets.group, 2)])
    assert (np.abs(halves - budgets.counts / 2) < 6 * 61).all()


@given(
    st.lists(st.integers(1, 100), min_size=1, max_size=8),
    st.integers(1, 5000),
)
def test_rounded_shares_add_up_to_the_records_and_miss_by_less_than_one(parts, records):
    shares = {float(level): part / sum(parts) for level, part in enumerate(parts, start=1)}
    exact = np.array(list(shares.values())) * records
    try:
        counts = Budgets.from_shares(shares, records=records, delta=1e-9).counts
    except BudgetError:
        assert (exact < 1).any()
        return
    assert counts.sum() == records
    assert (np.abs(counts - exact) < 1 + 1e-9).all()


@pytest.mark.parametrize(
    ("shares", "records"),
    [
        ({}, 10),
        ({1.0: 0.5, 2.0: 0.4}, 10),
        ({1.0: 0.5, 2.0: 0.6}, 10),
        ({1.0: 1.5, 2.0: -0.5}, 10),
        ({1.0: float("nan")}, 10),
        ({-1.0: 1.0}, 10),
        ({float("inf"): 1.0}, 10),
        ({1.0: 1.0}, 0),
        ({1.0: 1.0}, 2.5),
        ({1.0: 0.999, 2.0: 0.001}, 10),
    ],
)
def test_shares_that_do_not_describe_the_records_are_refused(shares, records):
    with pytest.raises(BudgetError):
        Budgets.from_shares(shares, records=records)


# -- from files -----------------------------------------------------------------------------------------------


def test_a_csv_column_is_read_in_the_order_of_its_rows(tmp_path):
    path = tmp_path / "wishes.csv"
    path.write_text("who,epsilon,risk\na,3,1e-5\nb,1.0,1e-6\nc,2,1e-5\n")
    budgets = Budgets.from_csv(path, delta=1e-7)
    np.testing.assert_array_equal(budgets.epsilons[budgets.group], [3, 1, 2])
    np.testing.assert_array_equal(budgets.delta, [1e-7] * 3)
    each = Budgets.from_csv(str(path), column="epsilon", delta_column="risk")
    np.testing.assert_array_equal(each.delta[each.group], [1e-5, 1e-6, 1e-5])


def test_a_parquet_column_is_read_in_the_order_of_its_rows(tmp_path):
    path = tmp_path / "wishes.parquet"
    parquet.write_table(pyarrow.table({"wish": [3, 1, 2]}), path)
    for read in (Budgets.from_csv, Budgets.from_parquet):
        budgets = read(path, column="wish")
        np.testing.assert_array_equal(budgets.epsilons[budgets.group], [3, 1, 2])


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("wishes.csv", "epsilon\n1\nmany\n2\n", "not numbers"),
        ("wishes.csv", "epsilon,who\n1,a\n,b\n2,c\n", "empty"),
        ("wishes.csv", "wish\n1\n2\n", "no column 'epsilon'"),
        ("wishes.csv", "epsilon\n1\n0\n2\n", "not positive"),
        ("wishes.csv", "epsilon\ntrue\nfalse\n", None),
        ("wishes.csv", "epsilon\n", None),
        ("wishes.csv", "", None),
        ("wishes.csv", "epsilon,who\n1,a,x,y\n2\n", None),
        ("wishes.txt", "epsilon\n1\n", "neither"),
        ("wishes.parquet", "epsilon\n1\n", "cannot be read"),
    ],
)
def test_a_file_that_does_not_hold_one_budget_per_row_is_refused(tmp_path, name, text, words):
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(BudgetError, match=words):
        Budgets.from_csv(path)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(BudgetError, match=r"nowhere\.csv"):
        Budgets.from_csv(tmp_path / "nowhere.csv")


# -- what is refused --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "wishes", [[], [[1.0, 2.0]], 1.0, [1.0, 0.0], [1.0, -2.0], [1.0, np.nan], [np.inf, 1.0], ["a"], [[1.0], [2.0, 3.0]]]
)
def test_what_is_not_a_positive_number_per_record_is_refused(wishes):
    with pytest.raises(BudgetError):
        Budgets(wishes, delta=1e-5)


def test_the_refusal_counts_and_locates_what_is_wrong():
    with pytest.raises(BudgetError, match=r"2 of 5 budgets .* row 1,"):
        Budgets([1.0, -1.0, 2.0, 0.0, 3.0], delta=1e-5)


@pytest.mark.parametrize("delta", [0.0, SMALLEST_DELTA / 1.001, 1.0, -1e-5, np.nan, [1e-5], [[1e-5, 1e-5]], "small"])
def test_a_delta_that_cannot_be_certified_is_refused(delta):
    with pytest.raises(BudgetError):
        Budgets([1.0, 2.0], delta=delta)


def test_the_smallest_delta_that_can_be_certified_is_taken():
    assert Budgets([1.0, 2.0], delta=SMALLEST_DELTA).delta[0] == SMALLEST_DELTA


def test_a_delta_that_lets_a_whole_record_be_published_is_warned_about():
    with pytest.warns(EpsilonsWarning, match=r"1/records"):
        Budgets([1.0] * 100, delta=0.01)


# -- confidential ------------------------------------------------------------------------------------------------


def shows(text: str, value: float) -> bool:
    """True if any usual way of writing the value, down to three digits of it, occurs in the text."""
    return any(f"{value:{form}}" in text for form in (".3g", ".4g", ".6g", ".3f")) or repr(value) in text


@given(ODD, ODD, st.integers(2, 30), st.integers(0, 29), st.sampled_from([-1.0, 0.0, np.nan, np.inf]))
def test_no_repr_or_error_of_budgets_contains_what_a_person_asked_for(one, other, records, row, bad):
    wishes = np.where(np.arange(records) % 2, one, other)
    budgets = Budgets(wishes, delta=1e-6)
    said = [repr(budgets), str(budgets), f"{budgets}"]
    broken = wishes.copy()
    broken[row % records] = bad * one
    attempts = [
        lambda: Budgets(broken, delta=1e-6),
        lambda: Budgets([*wishes, "much"], delta=1e-6),
        lambda: Budgets(wishes.reshape(1, -1), delta=1e-6),
        lambda: Budgets(wishes, delta=[1e-6] * (records + 1)),
        lambda: Budgets(wishes, delta=1e-12),
        lambda: budgets.subset([records]),
    ]
    for attempt in attempts:
        with pytest.raises(BudgetError) as caught:
            attempt()
        said.append(str(caught.value))
    for text in said:
        assert not shows(text, one), text
        assert not shows(text, other), text


#: A file in which some row is broken: its value, or its number of cells.
BROKEN_VALUES = ["not a number", "", "-{value}", "1;{value}", "{value} or less", "{value}€"]
BROKEN_FILES = [f"epsilon,who\n{{value}},a\n{cell},b\n{{value}},c\n" for cell in BROKEN_VALUES]
BROKEN_FILES.append("epsilon,who\n1,a\n{value},b,{value}\n{value},c\n")


@given(ODD, st.sampled_from(BROKEN_FILES))
def test_no_error_about_a_file_contains_what_a_person_asked_for(tmp_path_factory, value, content):
    path = tmp_path_factory.mktemp("wishes") / "wishes.csv"
    path.write_text(content.format(value=value))
    with pytest.raises(BudgetError) as caught:
        Budgets.from_csv(path, delta=1e-6)
    assert not shows(str(caught.value), value), str(caught.value)


@given(ODD)
def test_a_budget_out_of_reach_is_refused_without_naming_it(value):
    budgets = Budgets([value / 1000, value] * 20, delta=1e-6)
    with pytest.raises(epsilons.errors.InfeasibleBudgetError) as caught:
        epsilons.plan(budgets, epsilons.Recipe(steps=10, batch_size=4, clip_norm=1.0), "scale", "rdp")
    assert not shows(str(caught.value), value / 1000), str(caught.value)
    assert not shows(str(caught.value), value), str(caught.value)


# -- merging ------------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(1, 60), min_size=1, max_size=40), st.integers(1, 50))
def test_merged_rows_cover_every_group_once_and_only_the_last_may_be_small(counts, smallest):
    spans = merge_small(counts, smallest)
    covered = [group for span in spans for group in range(span.start, span.stop)]
    assert covered == list(range(len(counts)))
    assert all(sum(counts[span]) >= smallest for span in spans[:-1])


# -- Budgets per class, and the note that they publish the classes: where budgets differ and each class has one ------


pytestmark = pytest.mark.usefixtures("one_thread")

CLASSES = torch.arange(60) % 3
INPUTS = torch.zeros(60, 2)
EPSILONS = {0: 1.0, 1: 2.0, 2: 2.0}
RECIPE = epsilons.Recipe(steps=1, batch_size=10, clip_norm=1.0)
OF_CLASSES = Budgets.by_class(CLASSES, EPSILONS, delta=1e-3)
MIXED = Budgets([1.0] + [2.0] * 59, delta=1e-3)  # one class with two budgets


# -- budgets per class ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [np.asarray, torch.as_tensor, list])
def test_each_record_gets_the_epsilon_of_its_class(kind):
    budgets = Budgets.by_class(kind([2, 0, 1, 2]), {0: 1.0, 1: 2.0, 2: 0.5}, delta=1e-3)
    np.testing.assert_array_equal(budgets.epsilons[budgets.group], [0.5, 1, 2, 0.5])
    np.testing.assert_array_equal(budgets.delta, [1e-3] * 3)


def test_classes_may_be_names_and_more_than_the_records_have():
    budgets = Budgets.by_class(["cat", "dog", "cat"], {"cat": 1.0, "dog": 3.0, "cow": 9.0}, delta=1e-3)
    np.testing.assert_array_equal(budgets.epsilons[budgets.group], [1, 3, 1])


def test_a_class_without_an_epsilon_is_named_if_many_records_have_it():
    with pytest.raises(BudgetError, match=r"2 of 3 classes have no epsilon \('ship'\)") as caught:
        Budgets.by_class(["ship"] * 20 + ["rare"] * 19 + ["cat"], {"cat": 1.5})
    assert "rare" not in str(caught.value)
    assert "1.5" not in str(caught.value)


@pytest.mark.parametrize("targets", [[], [[0, 1]], [0, [1]], 0, ["a", None]])
def test_targets_that_are_not_one_class_per_record_are_refused(targets):
    with pytest.raises(BudgetError, match="flat list"):
        Budgets.by_class(targets, {0: 1.0, 1: 1.0})


@pytest.mark.parametrize("epsilon", [0, -1, np.inf, np.nan, "much"])
def test_epsilons_of_classes_that_are_not_usable_are_refused(epsilon):
    with pytest.raises(BudgetError):
        Budgets.by_class([0, 0], {0: 1.0, 5: epsilon})


# -- the note ------------------------------------------------------------------------------------------------------


def noted(call: Any) -> list[str]:
    """The notes that a call gives."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    return [str(w.message) for w in caught if issubclass(w.category, EpsilonsWarning)]


def notes_of_fit(budgets: Budgets, targets: Tensor, loss: Any = "cross_entropy", **declared: Any) -> list[str]:
    plan = epsilons.plan(budgets, RECIPE, accountant="rdp", **declared)
    model = nn.Linear(2, 1 if loss != "cross_entropy" else max(2, int(targets.max()) + 1))
    data = INPUTS[: len(targets)], targets
    return noted(
        lambda: epsilons.fit(model, data, plan, budgets=budgets, training=epsilons.Training(loss=loss, progress=False))
    )


def notes_of_make_private(budgets: Budgets, data: Any) -> list[str]:
    plan = epsilons.plan(budgets, RECIPE, accountant="rdp")
    model = nn.Linear(2, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return noted(lambda: epsilons.make_private(model, optimizer, data, plan, budgets=budgets).close())


def test_budgets_that_follow_from_the_classes_are_noted():
    assert notes_of_fit(OF_CLASSES, CLASSES) == [validation.ROSTER_NOTE]
    assert notes_of_make_private(OF_CLASSES, (INPUTS, CLASSES)) == [validation.ROSTER_NOTE]


def test_under_declared_shares_the_note_asks_for_declared_class_shares():
    declared = {"public_shares": {1.0: 0.4, 2.0: 0.6}, "public_records": 60}
    assert notes_of_fit(OF_CLASSES, CLASSES, **declared) == [validation.SHARES_NOTE]
    assert notes_of_fit(MIXED, CLASSES, **declared) == []


def test_equal_budgets_are_not_noted():
    assert notes_of_fit(Budgets([2.0] * 60, delta=1e-3), CLASSES) == []


def test_one_record_with_another_budget_than_its_class_ends_the_note():
    assert notes_of_fit(MIXED, CLASSES) == []
    last = Budgets([*np.array([1.0, 2, 2] * 19), 1, 2, 3], delta=1e-3)
    assert notes_of_fit(last, CLASSES) == []


def test_deltas_that_follow_from_the_classes_are_noted():
    assert len(notes_of_fit(Budgets([2.0] * 60, np.where(CLASSES == 1, 1e-3, 1e-4)), CLASSES)) == 1


def test_a_regression_is_not_noted_whatever_its_numbers():
    numbers = CLASSES.double().float()
    assert notes_of_fit(OF_CLASSES, numbers, "mse") == []
    assert notes_of_fit(OF_CLASSES, CLASSES, "mse") == []
    assert notes_of_make_private(OF_CLASSES, (INPUTS, numbers)) == []


def test_yes_and_no_as_floating_point_numbers_are_classes():
    yes = (CLASSES == 1).float()
    budgets = Budgets.by_class(yes, {0: 1.0, 1: 2.0}, delta=1e-3)
    assert len(notes_of_fit(budgets, yes, "binary_cross_entropy")) == 1
    assert len(notes_of_fit(budgets, yes[:, None], "binary_cross_entropy")) == 1
    assert notes_of_fit(MIXED, yes, "binary_cross_entropy") == []


def test_a_loss_of_one_s_own_is_of_classes_if_targets_are_whole_numbers():
    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs.flatten() - targets).square()

    assert len(notes_of_fit(OF_CLASSES, CLASSES, loss)) == 1
    assert notes_of_fit(OF_CLASSES, CLASSES.float(), loss) == []


def test_many_classes_and_classes_of_one_record_are_noted():
    each = torch.arange(60)
    assert len(notes_of_fit(Budgets(np.resize([1.0, 2.0], 60), delta=1e-3), each)) == 1
    pairs = each // 2
    assert len(notes_of_fit(Budgets(np.repeat(np.resize([1.0, 2.0], 30), 2), delta=1e-3), pairs)) == 1
    assert notes_of_fit(Budgets(np.resize([1.0, 2.0], 60), delta=1e-3), pairs) == []


class Pictures(torch.utils.data.Dataset):
    """A data set that is read record by record, with `targets` as in torchvision."""

    def __init__(self, targets: Any) -> None:
        self.targets = targets

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return INPUTS[index], CLASSES[index]

    def __len__(self) -> int:
        return len(CLASSES)


def test_targets_are_found_in_data_sets_and_their_subsets():
    order = torch.arange(59, -1, -1)
    for data in (TensorDataset(INPUTS, CLASSES), Pictures(CLASSES), Pictures(CLASSES.tolist())):
        assert len(notes_of_make_private(OF_CLASSES, data)) == 1
    for data in (Subset(TensorDataset(INPUTS, CLASSES), order), Subset(Pictures(CLASSES.tolist()), order.tolist())):
        assert len(notes_of_make_private(OF_CLASSES.subset(order), data)) == 1


@pytest.mark.parametrize("targets", [None, "many", [1, 2], [[1]] * 60 + [[2, 3]], torch.zeros(60, 3)])
def test_targets_that_are_not_one_per_record_are_not_noted(targets):
    assert notes_of_make_private(OF_CLASSES, Pictures(targets)) == []


def test_columns_other_than_inputs_and_targets_are_not_noted():
    assert notes_of_make_private(OF_CLASSES, (INPUTS, CLASSES, CLASSES)) == []
    assert validation.targets_of((INPUTS,)) is None
    assert validation.targets_of(SimpleNamespace()) is None


def test_the_note_is_the_same_whatever_the_budgets():
    other = Budgets.by_class(CLASSES, {0: 7.5, 1: 0.25, 2: 3.5}, delta=1e-3)
    assert notes_of_fit(other, CLASSES) == notes_of_fit(OF_CLASSES, CLASSES)
    assert not any(number in validation.ROSTER_NOTE for number in ("7.5", "0.25", "3.5"))


# -- Budgets of many records: grouped in parts, with few bytes a record


def grouped_at_once(*columns: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(records,) ranks of the rows of these columns and (ranks, columns) the rows, by one sort of all."""
    table = np.stack(columns)
    order = np.lexsort(table[::-1])
    ordered = table[:, order]
    first = np.concatenate([[True], (ordered[:, 1:] != ordered[:, :-1]).any(axis=0)])
    rank = np.empty(table.shape[1], dtype=np.int64)
    rank[order] = np.cumsum(first) - 1
    return rank, ordered[:, first].T


@pytest.mark.parametrize("levels", [1, 3, 256, 257, 10**9])
@pytest.mark.parametrize("records", [1, 2, 1000, 2 * PART, 2 * PART + 17])
@pytest.mark.parametrize("more", ["", "deltas", "starts"])
def test_groups_made_in_parts_are_those_of_one_sort_to_the_bit(levels, records, more):
    rng = np.random.default_rng([levels, records])
    epsilon, delta = 1 + rng.integers(levels, size=records) / levels, np.full(records, 1e-9)
    delta = rng.choice([1e-9, 2e-9, 0.5], records) if more else delta
    starts = rng.choice([-1.0, -0.0, 0.0, 0.25], (records, 2)) if more == "starts" else None
    with warnings.catch_warnings(action="ignore"):
        budgets = Budgets(epsilon, delta if more else 1e-9, starts=starts)
    rank, rows = grouped_at_once(epsilon, delta, *([] if starts is None else starts.T))
    assert budgets.group.dtype == np.int64
    assert budgets.group.tobytes() == rank.tobytes()
    assert budgets.counts.tobytes() == np.bincount(rank).tobytes()
    held = [budgets.epsilons, budgets.delta, *([] if starts is None else budgets.groups.starts.T)]
    assert np.stack(held, axis=1).tobytes() == np.ascontiguousarray(rows).tobytes()


@pytest.mark.parametrize("records", [5, PART + 3])
def test_ranks_of_infinite_values_are_those_of_one_sort_and_all_nan_are_one_value_above_them(records):
    values = np.random.default_rng(0).choice([np.inf, -np.inf, 0.0, 5e-324, 1.0], records)
    others = np.random.default_rng(1).choice([2.0, np.inf, -np.inf], records)
    ranks, first = columns.ranked([values, others])
    expected, rows = grouped_at_once(values, others)
    assert ranks.tolist() == expected.tolist()
    assert (values[first] == rows[:, 0]).all()
    assert first.tolist() == [ranks.tolist().index(rank) for rank in range(len(first))]
    values[::2] = np.nan
    ranks, first = columns.ranked([values])
    assert (ranks[::2] == len(first) - 1).all()
    assert (ranks[1::2] < len(first) - 1).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 0.0])
def test_one_bad_budget_among_many_is_counted_and_located(bad):
    epsilon = np.ones(3 * PART)
    epsilon[2 * PART + 5] = bad
    with pytest.raises(BudgetError, match=rf"1 of {3 * PART:,} budgets .* \(first at row {2 * PART + 5:,}"):
        Budgets(epsilon, 1e-9)


@pytest.mark.parametrize("names", [["b", "ä", "a" * 40], [3, -1, 7], [0.5, np.inf, -2.0], [True, False, True]])
@pytest.mark.parametrize("kind", [None, object])
def test_classes_found_in_parts_are_those_of_one_sort(names, kind):
    targets = np.resize(np.array(names, dtype=kind), 2 * PART + 1)
    classes, index = classes_of(targets)
    expected, of_each = np.unique(targets, return_inverse=True)
    assert classes == expected.tolist()
    assert index.tolist() == of_each.tolist()


def test_targets_of_two_types_are_refused_wherever_the_second_begins():
    with pytest.raises(BudgetError, match="got a mixture"):
        classes_of(np.array(["a"] * PART + [1] * PART, dtype=object))


def test_budgets_hold_no_part_of_the_array_that_they_are_made_of():
    epsilon = np.array([3.0, 1.0, 2.0])
    budgets = Budgets(epsilon, 1e-3)
    epsilon[:] = 9.0
    assert budgets.epsilons[budgets.group].tolist() == [3.0, 1.0, 2.0]
    assert epsilon.flags.writeable
    assert budgets.subset([2, 0]).epsilons.tolist() == [2.0, 3.0]


def test_hashes_of_groups_are_those_of_64_bit_numbers():
    group = np.random.default_rng(0).integers(200, size=PART + 9)
    whole = group.astype("<i8").tobytes()
    persons = Persons.of(group, 200)
    expected = hashlib.blake2b(b"200 " + whole, digest_size=16).hexdigest()
    assert persons.facts["persons"] == expected
    for kind in (np.uint8, np.uint16, np.int64):
        assert hash_of_groups(group.astype(kind)) == hashlib.blake2b(whole, digest_size=16).hexdigest()
        assert roster_digest(group.astype(kind)) == hashlib.sha256(whole).hexdigest()


def big_parquet(tmp_path: Path, **changed: Any) -> Path:
    """Four columns of 2.5 parts, in groups of rows of another size."""
    count = 2 * PART + PART // 2
    table = {"epsilon": np.resize([1.0, 3.0, 2.0], count), "delta": np.resize([1e-9, 2e-9], count)}
    table |= {"tier": np.resize(["open", "strict"], count), "note": ["none"] * count}
    for name, (row, value) in changed.items():
        table[name] = [value if i == row else cell for i, cell in enumerate(np.asarray(table[name]).tolist())]
    parquet.write_table(pyarrow.table(table), tmp_path / "budgets.parquet", row_group_size=PART - 7)
    return tmp_path / "budgets.parquet"


def test_columns_of_a_parquet_file_are_read_in_parts_and_no_others(tmp_path, monkeypatch):
    path, count = big_parquet(tmp_path), 2 * PART + PART // 2
    asked: list[Any] = []
    read = reading.parquet.ParquetFile.iter_batches

    def noted(self: Any, rows: int, columns: list[str]) -> Any:
        asked.append((rows, columns))
        return read(self, rows, columns=columns)

    monkeypatch.setattr(reading.parquet.ParquetFile, "iter_batches", noted)
    monkeypatch.setattr(reading.parquet, "read_table", lambda *_, **__: pytest.fail("the whole file was read"))
    budgets = Budgets.from_parquet(path, delta_column="delta")
    expected = Budgets(np.resize([1.0, 3.0, 2.0], count), np.resize([1e-9, 2e-9], count))
    assert budgets.groups == expected.groups
    assert (budgets.group == expected.group).all()
    tiers = Budgets.from_parquet(path, column="tier", tiers={"strict": 1.0, "open": 2.0}, delta=1e-9)
    assert tiers.group.tolist() == np.resize([1, 0], count).tolist()
    assert asked == [(PART, ["epsilon"]), (PART, ["delta"]), (PART, ["tier"])]


@pytest.mark.parametrize(
    ("column", "value", "words"),
    [
        ("epsilon", None, r"1 of 163,840 cells of column 'epsilon' .* are empty or NaN \(first at row 140,000"),
        ("epsilon", float("nan"), r"1 of 163,840 budgets .* \(first at row 140,000"),
        ("tier", "opne", r"cells of column 'tier' .* are not the name of a tier .* Is it spelt as in the file"),
    ],
)
def test_an_error_about_a_part_is_about_the_whole_file(tmp_path, column, value, words):
    path = big_parquet(tmp_path, **{column: (140_000, value)})
    tiers = {"strict": 1.0, "open": 2.0, "never": 3.0} if column == "tier" else None
    with pytest.raises(BudgetError, match=words):
        Budgets.from_parquet(path, column=column, tiers=tiers, delta=1e-9)
    with pytest.raises(BudgetError, match="has no column 'x'; it has: 'epsilon', 'delta', 'tier', 'note'"):
        Budgets.from_parquet(path, column="x", delta=1e-9)


MANY = 10**6


def bytes_a_record(make: Callable[[], Any]) -> float:
    """Bytes that NumPy and Python hold at the peak while something is made, for each of MANY records."""
    tracemalloc.start()
    try:
        made = make()
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    del made
    return peak / MANY


def many(*values: Any) -> np.ndarray:
    return np.array(values)[np.random.default_rng(0).integers(len(values), size=MANY)]


@pytest.mark.parametrize(
    ("most", "make"),
    [
        (6, lambda: partial(Budgets, many(1.0, 2.0, 3.0), 1e-9)),
        (8, lambda: partial(Budgets, many(*np.linspace(1, 3, 1000)), 1e-9)),
        (7, lambda: partial(Budgets, many(1.0, 2.0, 3.0), many(1e-9, 2e-9))),
        (14, lambda: partial(Budgets, many(1.0, 2.0, 3.0).astype(np.float32), 1e-9)),
        (14, lambda: partial(Budgets.from_shares, {1.0: 0.5, 2.0: 0.5}, records=MANY, delta=1e-9)),
        (15, lambda: partial(Budgets.by_class, many("strict", "open"), {"strict": 1.0, "open": 2.0}, delta=1e-9)),
        (1, lambda: Budgets(many(1.0, 2.0), 1e-9).without_ids),
        (14, lambda: partial(Budgets(many(1.0, 2.0), 1e-9).subset, np.arange(0, MANY, 2))),
    ],
    ids=["few", "thousand", "deltas", "float32", "shares", "classes", "without-ids", "half"],
)
def test_budgets_take_few_bytes_a_record(most, make):
    assert bytes_a_record(make()) <= most


def test_the_group_of_each_record_is_held_in_one_byte_until_it_is_asked_for():
    made = Budgets(many(1.0, 2.0, 3.0), 1e-9)
    assert made._codes.nbytes == MANY
    assert "group" not in vars(made)
    assert bytes_a_record(lambda: made.group) <= 8.1
    assert made.group is made.group


def test_a_parquet_file_takes_few_bytes_a_record(tmp_path):
    path = tmp_path / "budgets.parquet"
    columns = {"epsilon": many(1.0, 2.0, 3.0), "tier": many("strict", "open"), "other": np.arange(MANY)}
    parquet.write_table(pyarrow.table(columns), path)
    pool = pyarrow.default_memory_pool()
    for words in ({}, {"column": "tier", "tiers": {"strict": 1.0, "open": 2.0}}):
        assert bytes_a_record(lambda words=words: Budgets.from_parquet(path, delta=1e-9, **words)) <= 14
    assert pool.bytes_allocated() < MANY  # nothing of the table is left


@pytest.mark.parametrize(("rows", "most"), [(None, 1), (4, 12)])
def test_persons_and_their_rows_take_few_bytes_and_another_draw_none(rows, most):
    person = np.repeat(np.arange(MANY // 4), 4) if rows else np.arange(MANY)
    persons, randomness = Persons.of(person, MANY // (rows or 1), 2), Randomness(bytes(32))
    drawn = np.arange(0, MANY // 4, 1000)
    assert bytes_a_record(lambda: persons.readings(drawn, randomness, 0, 0)) <= most
    assert bytes_a_record(lambda: persons.readings(drawn, randomness, 0, 1)) <= 0.2


def test_persons_of_whole_numbers_take_few_bytes_a_row():
    ids, epsilon = np.repeat(np.arange(MANY // 4), 4), np.repeat(many(1.0, 2.0)[::4], 4)
    made = partial(Budgets.by_person, epsilon, ids, delta=1e-9, spelling="as written")
    assert bytes_a_record(made) <= 16  # without what pyarrow holds


def test_pages_of_a_roster_take_few_bytes_a_person():
    numbers = np.random.default_rng(0).permutation(MANY)
    rows = (numbers % 3).astype(np.uint8)
    roster = Roster(numbers, rows)
    assert bytes_a_record(lambda: sum(1 for _ in roster.pages())) <= 17
    assert bytes_a_record(lambda: Roster(numbers, rows)) <= 10
    for page, of_page in roster.pages():
        here = page * PAGE + np.flatnonzero(of_page != NO_PERSON)
        assert (of_page[of_page != NO_PERSON] == here % 3).all()


# -- spellings of tiers ------------------------------------------------------------------------------------------------

_TIERS = {"Streng": 0.5, "Großzügig": 2.0, "\u1e69ehr offen": 8.0}
_BLANKS = st.text(" \t\u00a0", max_size=2)
_WAYS = st.sampled_from([str, str.lower, str.upper, str.title, str.swapcase])
_FORMS = st.sampled_from(["NFC", "NFD"])


@st.composite
def _spelling(draw, names):
    """A name, and how somebody may write it."""
    name = draw(st.sampled_from(sorted(names)))
    written = unicodedata.normalize(draw(_FORMS), draw(_WAYS)(name))
    return name, f"{draw(_BLANKS)}{written}{draw(_BLANKS)}"


def _tiers_in(cells: list[str], tiers: dict[str, float]) -> list[float]:
    table, path = pyarrow.table({"tier": cells}), Path("people.csv")
    return tier_column(table, "tier", path, tiers).tolist()


@given(st.lists(_spelling(_TIERS), min_size=1, max_size=8))
def test_one_declared_tier_stands_for_all_its_spellings(cells):
    assert _tiers_in([cell for _, cell in cells], _TIERS) == [_TIERS[name] for name, _ in cells]


@given(st.sets(_spelling({"streng": 0.0, "offen": 0.0}).map(lambda pair: pair[1]), min_size=2, max_size=5), st.data())
def test_no_cell_gets_the_epsilon_of_a_tier_that_it_may_not_mean(names, data):
    tiers = {name: float(number) for number, name in enumerate(sorted(names), 1)}
    assert _tiers_in(list(tiers), tiers) == list(tiers.values())  # as declared, each has its own
    _, cell = data.draw(_spelling(tiers))
    close = [name for name in tiers if name.strip().lower() == cell.strip().lower()]
    try:
        (found,) = _tiers_in([cell], tiers)
    except BudgetError:
        assert len({name.strip().lower() for name in tiers}) < len(tiers)  # what may be two is none
    else:
        assert cell in tiers or len(close) == 1 or [found] == [tiers[n] for n in close if n.strip() == cell.strip()]
        assert found in [tiers[name] for name in close]


@pytest.mark.parametrize("cell", ["", " ", "NA", "na", "none", "str eng", "stren\u200bg"])
def test_what_is_no_spelling_of_a_tier_is_refused(cell):
    with pytest.raises(BudgetError, match="not the name of a tier"):
        _tiers_in([cell, "streng"], {"streng": 0.5, "n/a": 1.0})
