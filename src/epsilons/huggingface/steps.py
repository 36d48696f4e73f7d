"""One step of the Trainer is one draw: the part before `optimizer.step()`, the update in it, and nothing else.

A draw has several physical batches, after those that are only checked, or none. All of them are computed within
`training_step`. The update waits for `optimizer.step()`, so that callbacks, schedules, logs and saves see what they see
in any training. The update of an empty draw is made within `training_step`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.data import Dataset

from ..budgets.budgets import Budgets
from ..doors.foreign_loop import WrappedOptimizer
from ..errors import BudgetError, CallOrderError, InputError
from ..training import Private


class Steps:
    """The draws of a run, one for each step of the Trainer.

    private   the run
    schedule  of learning rates
    losses    batch -> (batch,) losses, one per record
    """

    def __init__(self, private: Private, schedule: Any, losses: Callable[[Any], Tensor]) -> None:
        self.private, self.schedule, self._losses = private, schedule, losses
        self._draws: Iterator[Iterator[Any]] | None = None
        self._draw: Iterator[Any] = iter(())
        self._is_open, self._is_due = False, False

    def begin(self, is_counted: bool) -> float:
        """Compute a draw, up to its update. Returns the mean loss of its records if it is counted, otherwise 0."""
        if self._is_open:
            raise CallOrderError("The Trainer began a step before optimizer.step() of the last one.")
        if self._draws is None:
            self._draws = self.private.draws
        self._draw, self._is_open = next(self._draws), True
        return self._compute(is_counted)

    def _compute(self, is_counted: bool) -> float:
        total, records = 0.0, 0
        for batch in self._draw:
            losses = self._losses(batch)
            self.private.backward(losses)
            if is_counted and not self.private.is_check:
                total, records = total + float(losses.detach().sum()), records + len(losses)
            if self._completes_draw:
                self._is_due = True
                break
            self.private.step()
        return total / max(records, 1)

    @property
    def _completes_draw(self) -> bool:
        return self.private.is_last and self.private._issuer.non_finite is None

    def end(self) -> None:
        """Add noise, and update. For `optimizer.step()`."""
        if not self._is_open:
            raise CallOrderError(
                "optimizer.step() was called without a training step of PrivateTrainer before. Override record_losses, "
                "and not training_step."
            )
        while self._is_due:
            self._is_due = False
            self.private.step()
            # Under a new key, the draw is made again. Otherwise nothing is left of it.
            self._compute(is_counted=False)
        self._is_open = False


class StepOptimizer(WrappedOptimizer):
    """What the Trainer takes for its optimizer: `step` adds noise and updates."""

    #: accelerate puts no optimizer of its own around this one: it would search for a package twice in every step.
    _is_accelerate_prepared = True
    #: As accelerate's has it.
    step_was_skipped = False

    def __init__(self, optimizer: Optimizer, steps: Steps) -> None:
        super().__init__(optimizer)
        self._steps = steps

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if closure is not None:
            raise InputError("optimizer.step takes no closure here: the losses are computed in the training step.")
        self._steps.end()


def zero(device: torch.device, value: float = 0.0) -> Tensor:
    """A loss for the Trainer to sum."""
    return torch.tensor(value, device=device)


# -- The training data: without the column of budgets, read by index; and the loader that the Trainer gets


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
