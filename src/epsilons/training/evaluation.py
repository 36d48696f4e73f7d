"""Scores on data that are not trained on, with the counts that their confidence follows from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset

from ..errors import DataError, InputError
from . import scores
from .scores import Scale
from .validation import columns

#: loss(outputs, targets) -> (batch,), one number per record.
Loss = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True, eq=False)
class EvalData:
    """Data to evaluate on.

    data     (inputs, targets) as tensors or arrays, or a map-style data set of such pairs
    public   True if scores on them may be published; the release report leaves them out otherwise
    classes  names of the classes, in the order of their indices
    groups   (records,) each record's group in the plan, -1 for unknown
    scale    how numbers to predict were scaled, so that errors are in their own unit; None if they were not

    Raises DataError for data that cannot be read by index, InputError for a wrong number of groups.
    """

    __test__ = False  # pytest must not collect it

    data: Any
    public: bool = False
    classes: Sequence[str] | None = None
    groups: npt.NDArray[np.int64] | None = None
    scale: Scale | None = None

    def __post_init__(self) -> None:
        if isinstance(self.data, DataLoader):
            raise DataError(
                "Got a DataLoader as test data. Pass the data set itself (loader.dataset), or (inputs, targets)."
            )
        if not hasattr(self.data, "__getitem__") or not hasattr(self.data, "__len__"):
            raise DataError(
                f"Test data must be readable by index, got a {type(self.data).__name__}. Pass (inputs, targets), or a "
                "map-style data set, with __len__ and __getitem__."
            )
        if self.groups is not None and len(self.groups) != len(self):
            raise InputError(f"Got {len(self.groups):,} groups for {len(self):,} test records. Pass one per record.")

    def __len__(self) -> int:
        return len(self.data[0]) if isinstance(self.data, tuple | list) else len(self.data)

    def first(self) -> EvalData:
        """The first record alone."""
        is_columns = isinstance(self.data, tuple | list)
        data = tuple(t[:1] for t in columns(self.data)) if is_columns else Subset(self.data, [0])
        return replace(self, data=data, groups=None if self.groups is None else self.groups[:1])


@torch.no_grad()
def evaluate(
    model: nn.Module,
    eval_data: EvalData,
    loss: Loss,
    binary: bool = False,
    batch: int = 1024,
    numbers: bool = False,
) -> dict[str, Any]:
    """{"loss", "accuracy", "per_class", "per_group", …} of `model` on the test data.

    accuracy   only if targets are classes
    per_class  [right, records] of each class, if each record has one class
    per_group  [right, records] of each group, if eval_data.groups is given; records of unknown group are left out
    recall, balanced_accuracy, majority, auc
               with per_class: the share of right records of each class, its mean over the classes, the accuracy of
               naming the most frequent class, and the area under the ROC curve, of more than two classes the mean of
               one against the rest. auc is None where it is not defined
    mean_absolute_error, rmse, r2
               only with `numbers`: targets are numbers, and errors are in their own unit (eval_data.scale)

    binary: outputs are logits of targets that are 0 or 1, one or several per record. Raises InputError for no data.
    """
    dataset: Dataset[Any] = (
        TensorDataset(*columns(eval_data.data)) if isinstance(eval_data.data, tuple | list) else eval_data.data
    )
    where = next(model.parameters()).device
    model.eval()
    total, count, outcomes = 0.0, 0, 0
    right: list[Tensor] = []
    classes: list[Tensor] = []
    kept: list[Tensor] = []
    goals: list[Tensor] = []
    for inputs, targets in DataLoader(dataset, batch_size=batch):
        inputs, targets = inputs.to(where), targets.to(where)
        outputs = model(inputs)
        total += float(loss(outputs, targets).double().sum())
        count += len(targets)
        if binary:
            flat = outputs.reshape(len(targets), -1)
            right.append(((flat > 0) == targets.reshape(flat.shape).bool()).cpu())
            if flat.shape[1] == 1:
                right[-1] = right[-1][:, 0]
                classes.append(targets.reshape(-1).long().cpu())
                kept.append(torch.cat([torch.zeros_like(flat), flat], dim=1).double().cpu())
                outcomes = 2
        elif not targets.is_floating_point() and outputs.ndim == targets.ndim + 1:
            right.append((outputs.argmax(1) == targets).cpu())
            classes.append(targets.cpu())
            outcomes = outputs.shape[1]
            if targets.ndim == 1 and outcomes <= scores.MOST_CLASSES:
                kept.append(outputs.double().cpu())
        elif numbers:
            kept.append(outputs.reshape(-1).double().cpu())
            goals.append(targets.reshape(-1).double().cpu())
    if not count:
        raise InputError("The test data are empty; there is nothing to evaluate on.")
    row: dict[str, Any] = {"loss": total / count}
    if right:
        hits = torch.cat(right).double()
        row["accuracy"] = float(hits.mean())
        if classes and hits.ndim == 1:
            row["per_class"] = _tallies(hits, torch.cat(classes), outcomes)
            row |= scores.of_classes(row["per_class"])
            row["auc"] = scores.mean_auc(torch.cat(kept).numpy(), torch.cat(classes).numpy()) if kept else None
        if eval_data.groups is not None and hits.ndim == 1:
            row["per_group"] = _tallies(
                hits, torch.from_numpy(eval_data.groups), int(eval_data.groups.max(initial=-1)) + 1
            )
    if goals:
        row |= scores.of_numbers(torch.cat(kept).numpy(), torch.cat(goals).numpy(), eval_data.scale)
    return row


def _tallies(hits: Tensor, labels: Tensor, count: int) -> list[list[int]]:
    """[right, records] for each label 0..count-1."""
    known = labels >= 0
    records = torch.bincount(labels[known], minlength=count)
    right = torch.bincount(labels[known], weights=hits[known], minlength=count)
    return [[int(r), int(n)] for r, n in zip(right, records, strict=True)]
