"""Columns with one value per record, in parts: what is made beside a column does not grow with it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from .mechanism import IntArray

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


def different(columns: Iterable[Column]) -> Column:
    """The different values of all these columns, ascending.

    >>> different([np.array([3.0, 1.0]), np.array([1.0, 2.0])])
    array([1., 2., 3.])
    """
    found: list[Column] = []
    for column in columns:
        found.append(np.unique(column))
        if sum(map(len, found)) > 2 * len(found[0]) + PART:
            found = [np.unique(np.concatenate(found))]
    return np.unique(np.concatenate(found))


def coded(columns: Iterable[Column], records: int, values: Column) -> Codes:
    """(records,) the place of each value among `values`, which hold all in rising order; in the smallest type.

    columns  the parts of one column, as `cut` gives them
    """
    codes = np.empty(records, dtype=np.min_scalar_type(len(values) - 1))
    for part, column in zip(parts(records), columns, strict=True):
        order = np.argsort(column)  # values that rise are found faster
        codes[part][order] = np.searchsorted(values, column[order])
    return codes


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
        values = different(cut(column))
        if len(values) == 1:
            continue
        own, count = coded(cut(column), records, values), len(values)
        if ranks > 1:
            values = different(_pairs(codes, own, count))
            own = coded(_pairs(codes, own, count), records, values)
        codes, ranks = own, len(values)
    first = np.empty(ranks, dtype=np.int64)
    for part in reversed(parts(records)):  # the first record of a rank is written last
        first[codes[part][::-1]] = np.arange(part.start, part.stop)[::-1]
    return codes, first


def _pairs(codes: Codes, others: Codes, count: int) -> Iterator[IntArray]:
    """A number for each pair of codes, in parts; they are ordered as the pairs are. count: of the others"""
    return (one.astype(np.int64) * count + other for one, other in zip(cut(codes), cut(others), strict=True))


def hashed(digest: Any, codes: Codes) -> str:
    """The hash after the codes, as 64-bit numbers, were added to this hash of `hashlib`."""
    for part in cut(codes):
        digest.update(part.astype("<i8").tobytes())
    return str(digest.hexdigest())
