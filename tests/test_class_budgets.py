"""Budgets per class, and the note that they publish the classes: where budgets differ and each class has one."""

from __future__ import annotations

import warnings
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Subset, TensorDataset

import epsilons
from epsilons import Budgets
from epsilons.errors import BudgetError, EpsilonsWarning
from epsilons.training import validation

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
    return noted(lambda: epsilons.fit(model, data, plan, budgets=budgets, loss=loss, progress=False))


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
