"""Data sets that are read by column: DataFrames of pandas or polars, and dicts of tensors or arrays.

Alone, such a data set gives batches {name: (batch, …)}, as torch's default_collate makes of records that are dicts. In
a tuple, (frame, series), a frame is the matrix of its columns.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ..errors import DataError

#: Kinds of arrays that become tensors: booleans, integers, floats.
_NUMBERS = "biuf"
_MOST_NAMED = 4


def is_frame(data: object) -> bool:
    """True for a DataFrame of pandas, polars, modin or cudf."""
    return hasattr(data, "columns") and hasattr(data, "to_numpy") and hasattr(data, "__getitem__")


def is_series(data: object) -> bool:
    """True for one column of a DataFrame."""
    return hasattr(data, "to_numpy") and hasattr(data, "dtype") and not isinstance(data, Tensor | np.ndarray)


def named_columns(data: object) -> dict[Any, Tensor] | None:
    """The columns of a DataFrame or of a dict of columns; None for other data. Raises DataError if one has no numbers.

    A dict of records by number, {0: record, 1: …}, is a data set of records.
    """
    if is_frame(data):
        return _tensors(_of_frame(data), f"this {type(data).__name__}")
    if not isinstance(data, Mapping) or not data or set(data) == set(range(len(data))):
        return None
    columns = {name: column.to_numpy() if is_series(column) else column for name, column in data.items()}
    if not all(isinstance(column, Tensor | np.ndarray) for column in columns.values()):
        raise DataError(
            f"Got a {type(data).__name__} of {len(data):,} entries ({listed(data)}), which are not all tensors or "
            "arrays. Make each an array with one row per record, e.g. numpy.asarray(values), or pass a data set of "
            "which each record is a dict."
        )
    return _tensors(columns, f"this {type(data).__name__}")


def matrix(frame: Any) -> npt.NDArray[Any]:
    """(rows, columns) the numbers of a DataFrame. Raises DataError for other columns."""
    columns = _of_frame(frame)
    _check_numbers(columns, f"this {type(frame).__name__}")
    return np.stack(list(columns.values()), axis=1) if columns else np.empty((len(frame), 0))


def as_tensor(array: Any) -> Tensor:
    """A tensor as it is, and an array, frame or series as a tensor; read-only and reversed arrays are copied."""
    if isinstance(array, Tensor):
        return array
    values = matrix(array) if is_frame(array) else array.to_numpy() if is_series(array) else array
    return torch.from_numpy(np.require(values, requirements=["C", "W"]))


def listed(names: Mapping[Any, Any] | Sequence[Any]) -> str:
    """The first few names, for a message."""
    few = list(names)[:_MOST_NAMED]
    return ", ".join(map(repr, few)) + (", …" if len(names) > _MOST_NAMED else "")


def _of_frame(frame: Any) -> dict[Any, npt.NDArray[Any]]:
    names = list(frame.columns)
    if len(set(names)) < len(names):
        raise DataError(f"This {type(frame).__name__} has two columns with one name. Rename one of them.")
    return {name: np.asarray(frame[name].to_numpy()) for name in names}


def _tensors(columns: Mapping[Any, Any], what: str) -> dict[Any, Tensor]:
    _check_numbers(columns, what)
    return {name: as_tensor(column) for name, column in columns.items()}


def _check_numbers(columns: Mapping[Any, Any], what: str) -> None:
    others = [
        name
        for name, column in columns.items()
        if not isinstance(column, Tensor) and np.asarray(column).dtype.kind not in _NUMBERS
    ]
    if others:
        raise DataError(
            f"{len(others):,} of {len(columns):,} columns of {what} hold no numbers: {listed(others)}. Leave them out, "
            "or replace them by numbers. Categories, dates and empty cells of a table are read by a config: epsilons "
            "init."
        )
