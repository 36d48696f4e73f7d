"""Columns with one value per record, in parts: what is made beside a column does not grow with it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from .mechanism import IntArray, read_only

#: (records,) a value of each record
Column = npt.NDArray[Any]
#: (records,) whole numbers from 0, of any type
Codes = npt.NDArray[np.integer[Any]]

#: The values of a part: few enough for the cache.
PART = 1 << 16


def parts(records: int, size: int = PART) -> list[slice]:
    """The places of all records, in parts of this size; the last may be smaller.

    >>> parts(5, 2)
    [slice(0, 2, None), slice(2, 4, None), slice(4, 5, None)]
    """
    return [slice(first, min(first + size, records)) for first in range(0, records, size)]


def cut(column: Column) -> Iterator[Column]:
    """The parts of a column."""
    return (column[part] for part in parts(len(column)))


def coded(columns: Iterable[Column]) -> tuple[Column, Codes]:
    """(values,) the different values, ascending, and (records,) the place of each record's among them.

    columns  the parts of one column, as `cut` gives them

    >>> coded([np.array([3.0, 1.0]), np.array([1.0, 2.0])])
    (array([1., 2., 3.]), array([2, 0, 0, 1], dtype=uint8))
    """
    each = (np.unique(column, return_inverse=True) for column in columns)
    found = [(own, _shrunk(index, len(own))) for own, index in each]
    values = np.unique(np.concatenate([own for own, _ in found]))
    return values, np.concatenate([_shrunk(np.searchsorted(values, own), len(values))[index] for own, index in found])


def _shrunk(codes: IntArray, most: int) -> Codes:
    """The same numbers, which are below `most`, in the smallest type."""
    return codes.astype(np.min_scalar_type(most - 1))


def taken(values: Column, codes: Column) -> Column:
    """values[codes], without the codes as 64-bit numbers."""
    made = np.empty(len(codes), dtype=values.dtype)
    for part in parts(len(codes)):
        made[part] = values[codes[part]]
    return made


def counted(codes: Codes, most: int) -> IntArray:
    """(most,) how often each number below `most` is among the codes."""
    counts = np.zeros(most, dtype=np.int64)
    for part in parts(len(codes), max(PART, most)):
        counts += np.bincount(codes[part], minlength=most)
    return counts


def ranked(columns: Sequence[Column]) -> tuple[Codes, IntArray]:
    """(records,) the rank of each record's row among the different rows, and (ranks,) the first record of each rank.

    columns  (records,) each; rows are ordered by the first column, then by the second, and so on

    >>> ranked([np.array([3.0, 1.0, 3.0]), np.array([2.0, 9.0, 1.0])])[0].tolist()
    [2, 0, 1]
    """
    records, ranks = len(columns[0]), 1
    codes: Codes = np.zeros(records, dtype=np.uint8)
    for column in columns:
        values, own = coded(cut(column))
        if len(values) > 1 and ranks > 1:  # a number for each pair, which rises as they do
            both = zip(cut(codes), cut(own), strict=True)
            values, own = coded(rank.astype(np.int64) * len(values) + place for rank, place in both)
        if len(values) > 1:
            codes, ranks = own, len(values)
    first = np.empty(ranks, dtype=np.int64)
    for part in reversed(parts(records)):  # the first record of a rank is written last
        first[codes[part][::-1]] = np.arange(part.start, part.stop)[::-1]
    return read_only(codes), first


def hashed(digest: Any, codes: Codes) -> str:
    """The hash after the codes, as 64-bit numbers, were added to this hash of `hashlib`."""
    for part in cut(codes):
        digest.update(part.astype("<i8").tobytes())
    return str(digest.hexdigest())
