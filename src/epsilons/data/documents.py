"""Long texts and series as records of equal length, with the person of each.

Windows that overlap hold each other's data, so those of one document must belong to one person.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ..errors import DataError


class Windows(NamedTuple):
    """Records that were cut from documents.

    records  (records, length, …)
    persons  (records,) the document of each record, by its place; or its id, if ids were given
    """

    records: npt.NDArray[Any]
    persons: npt.NDArray[Any]


def windows(
    documents: Sequence[Any],
    length: int,
    step: int | None = None,
    ids: Sequence[Any] | None = None,
    pad: float | None = None,
) -> Windows:
    """Cut documents into records of `length` positions.

    documents  token ids, or numbers: lists, arrays or tensors (positions, …)
    step       positions from the start of a record to the next one; `length` if not given. Smaller steps overlap
    ids        (documents,) whose each document is: all records of one person then share a budget. Without ids each
               document is a person
    pad        fills the end of a document up to one more record. Without it, the positions after the last whole record
               are left out, and so is a document that is shorter than a record

    Raises DataError for lengths and steps that are not whole numbers above 0, for other documents, and for no record.

    >>> windows([[1, 2, 3, 4, 5], [6, 7, 8]], length=3, step=2)
    Windows(records=array([[1, 2, 3],
           [3, 4, 5],
           [6, 7, 8]]), persons=array([0, 0, 1]))
    """
    for name, value in {"length": length, "step": step}.items():
        is_left_out = name == "step" and value is None
        if not is_left_out and (isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 1):
            raise DataError(f"{name} must be a whole number of at least 1, got {value!r}.")
    if ids is not None and len(ids) != len(documents):
        raise DataError(f"ids= needs one id per document; got {len(ids):,} for {len(documents):,} documents.")
    arrays = [np.asarray(document) for document in documents]
    if any(a.ndim == 0 or a.dtype.kind not in "biuf" or a.shape[1:] != arrays[0].shape[1:] for a in arrays):
        raise DataError(
            "Documents must be sequences of token ids or of numbers, all with rows of one shape. Turn texts into token "
            "ids first."
        )
    parts = [_cut(array, length, step or length, pad) for array in arrays]
    if not sum(map(len, parts)):
        raise DataError(
            f"No document has {length:,} positions, so there is no record. Choose a smaller length, or give pad=."
        )
    owner = np.repeat(np.arange(len(parts)), [len(part) for part in parts])
    found = np.concatenate([part for part in parts if len(part)])  # an empty list has another type
    return Windows(found, owner if ids is None else np.asarray(ids)[owner])


def _cut(array: npt.NDArray[Any], length: int, step: int, pad: float | None) -> npt.NDArray[Any]:
    """(records, length, …) of one document."""
    missing = 0 if pad is None or len(array) == 0 else max(length - len(array), (length - len(array)) % step)
    if 0 < missing < length:  # else a record would hold nothing but padding
        array = np.concatenate([array, np.full((missing, *array.shape[1:]), pad, dtype=array.dtype)])
    starts = np.arange(0, len(array) - length + 1, step)
    return np.asarray(array[starts[:, None] + np.arange(length)])
