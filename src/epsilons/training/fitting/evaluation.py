"""Scores on data that are not trained on, with the counts that their confidence follows from."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from scipy.stats import rankdata
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset

from ...errors import DataError, InputError
from ..validation import columns

# -- What outputs on test data are worth, beside the accuracy: recall, balanced accuracy, AUC, and errors of numbers
#

Floats = npt.NDArray[np.float64]
#: With more classes than this, no AUC is computed: the outputs of all test records would be kept.
MOST_CLASSES = 100
#: With more pairs of a class and a group than this, they are not counted.
MOST_CELLS = 1000


@dataclass(frozen=True)
class Scale:
    """How a number to predict was scaled: from low..high to -1..1; with log, as asinh.

    >>> float(Scale(0.0, 10.0).undone(np.array(0.5)))
    7.5
    """

    low: float
    high: float
    log: bool = False

    def undone(self, values: Floats) -> Floats:
        """Scaled values in their own unit."""
        low, high = (math.asinh(end) if self.log else end for end in (self.low, self.high))
        own = (values + 1) / 2 * (high - low) + low
        return np.asarray(np.sinh(own) if self.log else own)


def of_classes(tallies: list[list[int]]) -> dict[str, Any]:
    """{"recall": of each class, None without records, "balanced_accuracy": their mean, "majority": the accuracy of
    always naming the most frequent class}.

    tallies  [right, records] of each class

    >>> of_classes([[90, 90], [1, 10]])["balanced_accuracy"]
    0.55
    """
    recall = [right / records if records else None for right, records in tallies]
    found = [one for one in recall if one is not None]
    counts = [records for _, records in tallies]
    return {
        "recall": recall,
        "balanced_accuracy": math.fsum(found) / len(found),
        "majority": max(counts) / sum(counts),
    }


def auc(scores: Floats, is_positive: npt.NDArray[np.bool_]) -> float | None:
    """The chance that a positive record scores higher than a negative one; ties count half.

    scores  (records,)

    None without records of both kinds, and for scores that are NaN. (Mann and Whitney 1947, Ann. Math. Statist. 18(1);
    as the area under the ROC curve: Hanley and McNeil 1982, Radiology 143(1), p. 31.)

    >>> auc(np.array([0.1, 0.4, 0.35, 0.8]), np.array([False, False, True, True]))
    0.75
    """
    positives = int(is_positive.sum())
    negatives = len(is_positive) - positives
    if not positives or not negatives or np.isnan(scores).any():
        return None
    ranks = rankdata(scores)
    return float((ranks[is_positive].sum() - positives * (positives + 1) / 2) / (positives * negatives))


def mean_auc(logits: Floats, targets: npt.NDArray[np.int64]) -> float | None:
    """The AUC of two classes; of more, the mean over the classes of one against the rest. None if none can be computed.

    logits   (records, classes), compared by their softmax
    targets  (records,)
    """
    if np.isnan(logits).any():
        return None
    if logits.shape[1] == 2:
        return auc(logits[:, 1] - logits[:, 0], targets == 1)
    shifted = np.exp(logits - logits.max(axis=1, keepdims=True))
    shares = shifted / shifted.sum(axis=1, keepdims=True)
    found = [auc(shares[:, c], targets == c) for c in range(logits.shape[1])]
    areas = [area for area in found if area is not None]
    return math.fsum(areas) / len(areas) if areas else None


def of_numbers(outputs: Floats, targets: Floats, scale: Scale | None) -> dict[str, Any]:
    """{"mean_absolute_error", "rmse", "r2"}: errors in the target's own unit.

    outputs, targets  (values,) as the model sees them
    scale             how the targets were scaled; None if they were not

    r2 is None if all targets are equal.
    """
    if scale is not None:
        outputs, targets = scale.undone(outputs), scale.undone(targets)
    errors = outputs - targets
    spread = float(((targets - targets.mean()) ** 2).sum())
    squares = float((errors**2).sum())
    return {
        "mean_absolute_error": float(np.abs(errors).mean()),
        "rmse": math.sqrt(squares / len(errors)),
        "r2": 1 - squares / spread if spread > 0 else None,
    }


# -- Scores on data that are not trained on, with the counts that their confidence follows from

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
    every    updates between evaluations; by default there is one at the end
    persons  how many persons the records are of, for the report; None if that is not known

    Raises DataError for data that cannot be read by index, InputError for a wrong number of groups or persons.
    """

    __test__ = False  # pytest must not collect it

    data: Any
    public: bool = False
    classes: Sequence[str] | None = None
    groups: npt.NDArray[np.int64] | None = None
    scale: Scale | None = None
    every: int | None = None
    persons: int | None = None

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
        if self.persons is not None and not 0 < self.persons <= len(self):
            raise InputError(f"{len(self):,} test records cannot be of {self.persons:,} persons.")

    def __len__(self) -> int:
        return len(self.data[0]) if isinstance(self.data, tuple | list) else len(self.data)

    def first(self) -> EvalData:
        """The first record alone."""
        is_columns = isinstance(self.data, tuple | list)
        data = tuple(t[:1] for t in columns(self.data)) if is_columns else Subset(self.data, [0])
        return replace(self, data=data, groups=None if self.groups is None else self.groups[:1], persons=None)


@torch.no_grad()
def evaluate(
    model: nn.Module,
    eval_data: EvalData,
    loss: Loss,
    binary: bool = False,
    batch: int = 1024,
    numbers: bool = False,
    groups: int = 0,
) -> dict[str, Any]:
    """{"loss", "accuracy", "per_class", "per_group", …} of `model` on the test data.

    groups     number of groups of the plan, of which the last may have no test records

    accuracy   only if targets are classes
    per_class  [right, records] of each class, if each record has one class
    per_group  [right, records] of each group, if eval_data.groups is given; records of unknown group are left out
    per_class_group
               for each class, [right, records] of each group, where there are both and not too many
    recall, balanced_accuracy, majority, auc
               with per_class: the share of right records of each class, its mean over the classes, the accuracy of
               naming the most frequent class, and the area under the ROC curve, of more than two classes the mean of
               one against the rest. auc is None where it is not defined
    mean_absolute_error, rmse, r2
               only with `numbers`: targets are numbers, and errors are in their own unit (eval_data.scale)

    binary: outputs are logits of targets that are 0 or 1, one or several per record. Raises InputError for no data.
    """
    is_columns = isinstance(eval_data.data, tuple | list)
    dataset: Dataset[Any] = _Columns(*columns(eval_data.data)) if is_columns else eval_data.data
    found = _Outcomes(binary, numbers)
    where = next(model.parameters()).device
    model.eval()
    total, count = 0.0, 0
    for inputs, targets in DataLoader(dataset, batch_size=batch, collate_fn=tuple if is_columns else None):
        inputs, targets = inputs.to(where), targets.to(where)
        outputs = model(inputs)
        total += float(loss(outputs, targets).double().sum())
        count += len(targets)
        found.add(outputs, targets)
    if not count:
        raise InputError("The test data are empty; there is nothing to evaluate on.")
    return {"loss": total / count, **found.metrics(eval_data, groups)}


class _Columns(TensorDataset):
    """Tensors of which a batch is read at once."""

    def __getitems__(self, indices: list[int]) -> list[Tensor]:
        return [tensor[torch.tensor(indices)].contiguous() for tensor in self.tensors]


class _Outcomes:
    """What a model said of test records, batch by batch.

    right    which records, or entries of records, are right; for targets that are classes
    targets  classes or numbers
    kept     the outputs that metrics of their order or size need
    """

    def __init__(self, binary: bool, numbers: bool) -> None:
        self._binary, self._numbers, self._classes = binary, numbers, 0
        self._right: list[Tensor] = []
        self._targets: list[Tensor] = []
        self._kept: list[Tensor] = []

    def add(self, outputs: Tensor, targets: Tensor) -> None:
        if self._binary:
            flat = outputs.reshape(len(targets), -1)
            right = (flat > 0) == targets.reshape(flat.shape).bool()
            if flat.shape[1] == 1:
                self._add_classes(torch.cat([torch.zeros_like(flat), flat], dim=1), targets.reshape(-1).long())
                right = right[:, 0]
            self._right.append(right.cpu())
        elif not targets.is_floating_point() and outputs.ndim == targets.ndim + 1:
            self._add_classes(outputs, targets)
            self._right.append((outputs.argmax(1) == targets).cpu())
        elif self._numbers:
            self._kept.append(outputs.reshape(-1).double().cpu())
            self._targets.append(targets.reshape(-1).double().cpu())

    def _add_classes(self, scores: Tensor, targets: Tensor) -> None:
        self._targets.append(targets.cpu())
        self._classes = scores.shape[1]
        if targets.ndim == 1 and self._classes <= MOST_CLASSES:
            self._kept.append(scores.double().cpu())

    def metrics(self, eval_data: EvalData, count: int) -> dict[str, Any]:
        kept, targets = (torch.cat(parts).numpy() if parts else None for parts in (self._kept, self._targets))
        if not self._right:
            return {} if kept is None or targets is None else of_numbers(kept, targets, eval_data.scale)
        hits = torch.cat(self._right).double()
        row: dict[str, Any] = {"accuracy": float(hits.mean())}
        if hits.ndim > 1:
            return row
        if targets is not None:
            row["per_class"] = _tallies(hits, torch.from_numpy(targets), self._classes)
            row |= of_classes(row["per_class"])
            row["auc"] = None if kept is None else mean_auc(kept, targets)
        if eval_data.groups is not None:
            groups, count = torch.from_numpy(eval_data.groups), max(count, int(eval_data.groups.max(initial=-1)) + 1)
            row["per_group"] = _tallies(hits, groups, count)
            if targets is not None:
                row |= self._crossed(hits, torch.from_numpy(targets), groups, count)
        return row

    def _crossed(self, hits: Tensor, targets: Tensor, groups: Tensor, count: int) -> dict[str, Any]:
        if not 0 < self._classes * count <= MOST_CELLS:
            return {}
        cells = _tallies(hits, torch.where(groups < 0, -1, targets * count + groups), self._classes * count)
        return {"per_class_group": [cells[at : at + count] for at in range(0, len(cells), count)]}


def _tallies(hits: Tensor, labels: Tensor, count: int) -> list[list[int]]:
    """[right, records] for each label 0..count-1."""
    known = labels >= 0
    records = torch.bincount(labels[known], minlength=count)
    right = torch.bincount(labels[known], weights=hits[known], minlength=count)
    return [[int(r), int(n)] for r, n in zip(right, records, strict=True)]
