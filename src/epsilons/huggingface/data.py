"""The training data: without the column of budgets, read by index; and the loader that the Trainer gets."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from torch.utils.data import Dataset

from ..budgets import Budgets
from ..errors import BudgetError


class Records(Dataset[Any]):
    """A data set that is read record by record.

    without   name of a column that is left out
    """

    def __init__(self, dataset: Any, without: str | None = None) -> None:
        self._dataset, self._without = dataset, without

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> Any:
        record = self._dataset[index]
        if self._without is None:
            return record
        return {name: value for name, value in record.items() if name != self._without}


def budgets_in(dataset: Any, budgets: Budgets | str, person: Any, delta: float) -> tuple[Any, Budgets, Any]:
    """The data set without the columns of budgets and ids, the budgets, and (rows,) the persons of the rows or None.

    dataset   of the library datasets, or any map-style data set of dicts
    budgets   Budgets, or the name of the column of epsilons
    person    the name of the column of ids, (rows,) ids, or None

    Raises BudgetError if there is no such column, and what Budgets raises.
    """
    ids = person
    if isinstance(person, str):
        dataset, ids = _taken(dataset, person, f"person={person!r} must be a column of train_dataset with ids, or ids")
    if not isinstance(budgets, str):
        return dataset, budgets, ids
    what = f"budgets={budgets!r} must be a column of train_dataset with each record's epsilon, or Budgets"
    dataset, values = _taken(dataset, budgets, what)
    epsilons = np.asarray(values)
    if ids is None:
        return dataset, Budgets(epsilons, delta=delta), None
    return dataset, Budgets.by_person(epsilons, ids, delta=delta), ids


def _taken(dataset: Any, column: str, what: str) -> tuple[Any, list[Any]]:
    """The data set without a column, and the column. what: the beginning of the message if there is none"""
    if hasattr(dataset, "column_names"):
        if column not in dataset.column_names:
            raise BudgetError(_no_column(what, dataset.column_names))
        return dataset.remove_columns(column), dataset[column][:]
    values = [_value(dataset[i], column, what) for i in range(len(dataset))]
    return Records(dataset, column), values


def _value(record: Any, column: str, what: str) -> Any:
    if not hasattr(record, "items") or column not in record:
        raise BudgetError(_no_column(what, list(record) if hasattr(record, "items") else []))
    return record[column]


def _no_column(what: str, names: list[str]) -> str:
    return f"{what}; the columns are {', '.join(map(str, names)) or 'unknown: its records are no dicts'}."


class Tickets:
    """What the Trainer takes for its data loader: one empty batch for each draw of an epoch.

    Who is in a draw is read in the Trainer's step. In a resumed run, the first epoch has the draws that are left of it.

    dataset  the training data
    draws    draws per epoch
    steps    draws in all
    made     () -> how many draws were made
    """

    def __init__(self, dataset: Any, draws: int, steps: int, made: Callable[[], int]) -> None:
        self.dataset, self.batch_size = dataset, None
        self._draws, self._steps, self._made = draws, steps, made

    def __len__(self) -> int:
        return self._draws

    def __iter__(self) -> Iterator[dict[str, Any]]:
        end = min((self._made() // self._draws + 1) * self._draws, self._steps)
        while self._made() < end:
            yield {}
