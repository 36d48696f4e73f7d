"""Data sets: a record must be a function of its index and its seed alone, whatever was read before.

The records of a physical batch are read in reverse, then in order. A record that changes while others are read lies in
a buffer; one that differs between the two orders depends on what was read before. Memory that records of two persons
share, and an item that its seed alone decides, show that a record holds the data of others.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ...errors import BatchDependenceError
from ...mechanism import IntArray
from .. import fingerprints
from ..batches import leaves
from .storage import is_dense

#: So many records are read under one seed, at most; in so many, two different items are too few.
UNDER_ONE_SEED, FEW_AMONG = 12, 8
#: Relative to a number, and in hundredths of it to the largest of an array: threads may add in another order.
ROUNDING = 1e-5
#: Attributes of attributes of an object, and arrays nearby in memory that each is compared with, at most.
DEPTH, NEAR = 4, 8

_CAUSES = {
    "buffer": "gives a record that changes when others are read, so a batch holds one record's data in the places of "
    "others. Return a copy of the buffer that it fills again (.clone(), .copy())",
    "order": "does not give the same record when records are read in another order under the same seeds. Usual causes: "
    "state that reading changes (running statistics, a counter, an iterator, a cache with a wrong key), the time, or "
    "random numbers that cannot be seeded. A record must be a function of its index and of random numbers from torch, "
    "NumPy, random, or generators in attributes of the data set, which are seeded for every record",
    "overlap": "gives records of different persons that overlap in memory, such as windows or pairs cut from one "
    "series, so one person's data are in the records of others. Make them the rows of one person (persons=, "
    "epsilons.data.windows). Of a public constant return a copy (.clone(), .copy())",
    "index": "gives the same record for every index under the same random numbers: it ignores the index, so a person's "
    "data are read when others are drawn. Read record `index`, and draw augmentation only",
    "state": "gave other values for training than when the same records are read again. Usual causes: state in the "
    "data set or in its workers, or a collate function that keeps state",
    "refilled": "is collated into memory that is filled again for other records. Return new tensors from the collate "
    "function",
}


def refusal(cause: str, name: str) -> BatchDependenceError:
    """cause: a name in _CAUSES; name: of the data set's type"""
    return BatchDependenceError(f"The data set ({name}) {_CAUSES[cause]}.")


def read_again(
    read: Callable[[int, int], Any],
    copied: Callable[[Any], Any],
    rows: Sequence[int],
    seeds: Sequence[int],
    size: int,
    person: IntArray | None,
) -> tuple[list[Any], str | None]:
    """(copies of the records, in order; what is wrong with them, as in _CAUSES).

    read    (index, seed) -> a record
    rows    (records,) indices; `size` is the number of all
    person  (size,) each row's person; None if each row is one person
    """
    before = [copied(read(row, seed)) for row, seed in zip(reversed(rows), reversed(seeds), strict=True)]
    raw, records = [], []
    for row, seed in zip(rows, seeds, strict=True):
        raw.append(read(row, seed))
        records.append(copied(raw[-1]))
    if not all(is_alike(one, other, 0.0) for one, other in zip(raw, records, strict=True)):
        return records, "buffer"
    if not all(map(is_alike, reversed(before), records)):
        return records, "order"
    near = [(rows[0] + step) % size for step in range(1, min(UNDER_ONE_SEED, size))]
    others = [row for row in dict.fromkeys([*near[:1], *rows, *near]) if row != rows[0]][:UNDER_ONE_SEED]
    looked_at, kinds = list(rows), records[:1]
    for row in others:
        raw.append(read(row, seeds[0]))
        looked_at.append(row)
        item = copied(raw[-1])
        kinds += [] if any(is_alike(item, kind) for kind in kinds) else [item]
        if len(kinds) > 2:
            break
    if overlap(raw, looked_at, person):
        return records, "overlap"
    ignores = (len(others) > 0 and len(kinds) == 1) or (len(others) >= FEW_AMONG and len(kinds) == 2)
    if ignores and not is_alike(records[0], copied(read(rows[0], seeds[0] // 2))):
        return records, "index"
    return records, None


def is_alike(one: Any, other: Any, rounding: float = ROUNDING) -> bool:
    """Whether two records hold the same values. What cannot be compared counts as the same."""
    ones, others = list(_leaves(one)), list(_leaves(other))
    return len(ones) == len(others) and all(_is_like(a, b, rounding) for a, b in zip(ones, others, strict=True))


def overlap(records: Sequence[Any], rows: Sequence[int], person: IntArray | None) -> bool:
    """Whether records of two persons are different views of the same memory. person: as above"""
    views = [
        (array.__array_interface__["data"][0], row if person is None else person[row], place, array, of)
        for row, record in zip(rows, records, strict=True)
        for place, array, of in _arrays(record)
    ]
    near: deque[Any] = deque(maxlen=NEAR)
    for view in sorted(views, key=lambda view: view[0]):
        if any(other[1] != view[1] and _shows_data_of(other, view) for other in near):
            return True
        near.append(view)
    return False


def _shows_data_of(one: Any, other: Any) -> bool:
    """Whether two views overlap, and are not one constant, such as a mask: the same region at the same place."""
    (start, _, place, array, of), (other_start, _, other_place, other_array, _) = one, other
    if start == other_start and (array.shape, array.strides) == (other_array.shape, other_array.strides):
        return bool(place != other_place and array.nbytes < of)
    return np.shares_memory(array, other_array)


def _arrays(record: Any) -> Iterator[tuple[int, npt.NDArray[Any], int]]:
    """(number of the leaf, its memory as an array, bytes of what it was cut from)."""
    for place, leaf in enumerate(_leaves(record)):
        if isinstance(leaf, np.ndarray) and leaf.size:
            yield place, leaf, leaf.base.nbytes if isinstance(leaf.base, np.ndarray) else leaf.nbytes
        elif isinstance(leaf, Tensor) and leaf.numel() and leaf.device.type == "cpu" and leaf.element_size() in _SAME:
            yield place, leaf.detach().view(_SAME[leaf.element_size()]).numpy(), leaf.untyped_storage().nbytes()


#: Integers of so many bytes, which NumPy has.
_SAME = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _leaves(record: Any, depth: int = 0) -> Iterator[Any]:
    """Also those in the attributes of objects."""
    for leaf in leaves(record):
        attributes = None if isinstance(leaf, Tensor | np.ndarray | type) else getattr(leaf, "__dict__", None)
        if isinstance(leaf, Tensor) and not is_dense(leaf):
            yield from leaf.unbind() if leaf.is_nested else [leaf.to_dense()]
        elif attributes and depth < DEPTH and not type(leaf).__module__.startswith("PIL."):
            yield from _leaves(attributes, depth + 1)
        else:
            yield leaf


def _is_like(a: Any, b: Any, rounding: float) -> bool:
    x, y = _numbers(a), _numbers(b)
    if x is None or y is None or x.shape != y.shape:
        return fingerprints.of(a) == fingerprints.of(b)
    largest = torch.nan_to_num(x, 0.0, 0.0, 0.0).abs().max() if x.numel() else 0.0
    is_near = (x - y).abs() <= rounding * (x.abs() + largest / 100)
    return bool(((x == y) | (x.isnan() & y.isnan()) | (is_near & x.isfinite())).all())


def _numbers(leaf: Any) -> Tensor | None:
    """Floating-point numbers in 64 bits; None for other leaves."""
    if isinstance(leaf, Tensor):
        return leaf.detach().cpu().double() if leaf.is_floating_point() else None
    is_array = isinstance(leaf, np.ndarray | np.floating) and leaf.dtype.kind == "f"
    return torch.from_numpy(np.array(leaf, dtype=np.float64)) if is_array else None
