"""Data as a tuple of columns: what counts as columns, and what is refused because it is read by column."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..errors import DataError


def columns(data: Sequence[Any]) -> tuple[Tensor, ...]:
    """Tensors as they are, and arrays as tensors; read-only and reversed arrays are copied.

    Raises DataError for an array of a type that torch does not have.
    """
    try:
        return tuple(
            t if isinstance(t, Tensor) else torch.from_numpy(np.require(t, requirements=["C", "W"])) for t in data
        )
    except (TypeError, ValueError) as e:
        kinds = ", ".join(str(t.dtype) for t in data)
        raise DataError(
            f"Not all of these arrays can become tensors, got the types {kinds}. Convert them to numbers first, e.g. "
            "array.astype(numpy.float32)."
        ) from e


def are_columns(data: object) -> bool:
    """True for tensors or arrays with one row per record. A list of arrays is a data set instead, one record each."""
    kinds = (Tensor, np.ndarray) if isinstance(data, tuple) else Tensor
    return isinstance(data, tuple | list) and len(data) > 0 and all(isinstance(t, kinds) for t in data)


def refuse_tables(data: object) -> None:
    """Raise DataError for tables and dicts of columns: their index is a column, and here it must be a record."""
    parts = data if isinstance(data, tuple | list) and len(data) < 10 else ()
    for part in (data, *parts):
        is_frame = hasattr(part, "columns") and hasattr(part, "to_numpy")  # of pandas, polars, modin, cudf
        if is_frame or type(part).__module__.partition(".")[0] == "pyarrow":
            raise DataError(
                f"Got a {type(part).__module__.partition('.')[0]} {type(part).__name__}, which is read by column. "
                "Pass its columns as arrays, (frame[features].to_numpy(), frame[target].to_numpy()), or train on the "
                "table itself by a config: epsilons init."
            )
    if isinstance(data, Mapping) and set(data) != set(range(len(data))):
        names = ", ".join(repr(name) for name in list(data)[:4]) + (", …" if len(data) > 4 else "")
        raise DataError(
            f"Got a {type(data).__name__} of {len(data)} columns ({names}). Pass the columns as a tuple of tensors "
            "or arrays, or a data set of which each record is a dict."
        )
