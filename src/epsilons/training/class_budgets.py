"""A note on budgets that follow from the classes of the records, and so publish them."""

from __future__ import annotations

import warnings
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Subset, TensorDataset

from .._links import docs_page
from ..budgets import Budgets
from ..errors import EpsilonsWarning
from ..mechanism import IntArray
from ..planning import Plan
from ..planning.plan_numbers import SHARES
from .persons import Persons
from .validation import are_columns, columns

_PAGE = docs_page("choosing-budgets", "one-budget-per-class")
ROSTER_NOTE = (
    "The budgets differ, and each class has one. The list of budgets is public, so it publishes the class of a record: "
    f"the guarantee protects the input, not the class. Declare shares if classes are confidential. See {_PAGE}"
)
SHARES_NOTE = (
    "The budgets differ, and each class has one. The declared shares protect the class of a record only if the shares "
    f"of the classes were declared, not counted in these data. See {_PAGE}"
)


def warn_if_classes_show_budgets(
    dataset: Any, budgets: Budgets, persons: Persons, plan: Plan, has_classes: bool | None
) -> None:
    """Warn once if budgets differ and all records of each class have one budget.

    has_classes   whether the targets are classes; None if that is unknown: then whole numbers are taken as classes

    A data set without columns and without `targets` is not checked, because it would have to be read as a whole.
    """
    if len(budgets.epsilons) == 1 or has_classes is False:
        return
    targets = targets_of(dataset)
    group = budgets.group if persons.person is None else budgets.group[persons.person]  # (rows,)
    if targets is None or targets.shape != group.shape or (has_classes is None and targets.is_floating_point()):
        return
    if one_group_each(targets.detach().cpu().numpy(), group):
        note = SHARES_NOTE if plan.adjacency == SHARES else ROSTER_NOTE
        warnings.warn(note, EpsilonsWarning, stacklevel=5)


def one_group_each(classes: np.ndarray[Any, Any], group: IntArray) -> bool:
    """Whether all records of each class are in one group. classes: (records,), group: (records,)

    >>> one_group_each(np.array([3, 4, 5, 3]), np.array([0, 1, 1, 0]))
    True
    >>> one_group_each(np.array([3, 4, 5, 3]), np.array([0, 1, 1, 1]))
    False
    """
    _, index = np.unique(classes, return_inverse=True)
    some = np.empty(index.max() + 1, dtype=np.int64)
    some[index] = group  # the group of one record of each class
    return bool((some[index] == group).all())


def targets_of(dataset: Any) -> Tensor | None:
    """(records,) the targets of (input, target) data, if they can be known without reading every record; else None.

    They are the second of two columns, or the attribute `targets` (as in torchvision), also of a Subset.
    """
    if isinstance(dataset, TensorDataset):
        dataset = dataset.tensors
    if are_columns(dataset):
        return _flat(columns(dataset)[1]) if len(dataset) == 2 else None
    with suppress(Exception):  # a custom data set may hold anything under these names
        if isinstance(dataset, Subset):
            whole = targets_of(dataset.dataset)
            return None if whole is None else whole[torch.as_tensor(dataset.indices)]
        return _flat(torch.as_tensor(dataset.targets))
    return None


def _flat(targets: Tensor) -> Tensor:
    """A column with rows of one value as a flat one."""
    return targets.flatten() if targets.shape[1:].numel() == 1 else targets
