"""Predictions for the rows of a table, as arrays and as columns of a table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ...errors import RunError
from ...model_file import Outputs

Array = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Predictions:
    """What a model predicts, one row per record, in the order of the table.

    classes        names of the classes, in order; None if the target is a number
    probabilities  (rows, classes); of targets that are 0 or 1, (rows, outputs) probabilities of 1; else None
    values         (rows,) in the target's own units; (rows, outputs) if the model has several; None for classes
    """

    classes: tuple[str, ...] | None
    probabilities: Array | None
    values: Array | None

    @property
    def labels(self) -> npt.NDArray[np.str_]:
        """(rows,) the name of the most probable class. Raises RunError if the target has no classes."""
        if self.classes is None or self.probabilities is None:
            raise RunError("This model predicts no classes. Use .values, or .probabilities.")
        return np.asarray(np.array(self.classes)[self.probabilities.argmax(1)])

    def to_table(self) -> Any:
        """A pyarrow.Table: `prediction` and `probability_CLASS` of each class, or `prediction` alone for a number."""
        import pyarrow

        if self.probabilities is None:
            assert self.values is not None
            return pyarrow.table(_numbered("prediction", self.values))
        if self.classes is None:
            return pyarrow.table(_numbered("probability", self.probabilities))
        columns = zip(self.classes, self.probabilities.T, strict=True)
        return pyarrow.table({"prediction": self.labels, **{f"probability_{name}": column for name, column in columns}})

    def __len__(self) -> int:
        return len(self.values if self.probabilities is None else self.probabilities)  # type: ignore[arg-type]

    def __repr__(self) -> str:
        """The size and the classes, and no prediction: it is about a person."""
        of = "" if self.classes is None else f", classes {', '.join(self.classes)}"
        return f"Predictions({len(self):,} rows{of})"


def _numbered(name: str, values: Array) -> dict[str, Any]:
    """One column, or one per output."""
    if values.ndim == 1 or values.shape[1] == 1:
        return {name: values.reshape(len(values))}
    return {f"{name}_{number}": column for number, column in enumerate(values.T)}


def predictions_of(outputs: Tensor, meaning: Outputs) -> Predictions:
    """What the outputs (rows, …) of a model mean. Raises RunError if they do not have the shape of that meaning."""
    values = outputs.detach().double().cpu()
    values = values[:, None] if values.ndim == 1 else values.flatten(1)
    if meaning.kind == "classes":
        names = meaning.classes or tuple(map(str, range(values.shape[1])))
        if outputs.ndim != 2 or values.shape[1] != len(names):
            raise RunError(
                f"The model has outputs of shape {tuple(outputs.shape[1:])} for {len(names)} classes. Its weights or "
                "model.json belong to another model."
            )
        return Predictions(names, torch.softmax(values, 1).numpy(), None)
    if meaning.kind == "binary":
        return Predictions(None, torch.sigmoid(values).numpy(), None)
    numbers = values.numpy()
    if meaning.bounds is not None:
        numbers = in_units(numbers, *meaning.bounds)
    return Predictions(None, None, numbers[:, 0] if numbers.shape[1] == 1 else numbers)


def in_units(scaled: Array, low: float, high: float, log: bool) -> Array:
    """The inverse of the scaling of a target to -1..1 (`data.tables`). Predictions may lie beyond the bounds.

    >>> in_units(np.array([-1.0, 0.0, 1.0]), 0.0, 10.0, log=False)
    array([ 0.,  5., 10.])
    """
    ends = np.arcsinh([low, high]) if log else np.array([low, high])
    values = ends[0] + (scaled + 1) / 2 * (ends[1] - ends[0])
    return np.asarray(np.sinh(values) if log else values)


def joined(parts: Sequence[Predictions], meaning: Outputs) -> Predictions:
    """Predictions of several parts of a table, one after another."""
    if not parts:
        return predictions_of(torch.empty(0, len(meaning.classes or "1")), meaning)
    # One of both is None in all parts.
    columns = zip(*((part.probabilities, part.values) for part in parts), strict=True)
    both = (None if arrays[0] is None else np.concatenate(arrays) for arrays in columns)
    return Predictions(parts[0].classes, *both)
