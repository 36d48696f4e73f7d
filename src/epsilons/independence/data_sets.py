"""Data sets: a record must be a function of its index and its seed alone, whatever was read before.

The records of a physical batch are read in reverse, then in order. A record that changes while others are read lies in
a buffer; one that differs between the two orders depends on what was read before. Memory that records of two persons
share, an item that its seed alone decides, and a record that changes with either half of a table show that a record
holds the data of others.
"""

from __future__ import annotations

import copy
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from ..core.mechanism import IntArray
from ..draws import fingerprints
from ..draws.batches import copied, leaves
from ..errors import BatchDependenceError
from .states import is_dense

#: So many records are read under one seed, at most; in so many, two different items are too few.
UNDER_ONE_SEED, FEW_AMONG = 12, 8
#: Records that are read from altered copies; smaller tables may be constants; bytes of one that is altered, at most.
FROM_COPIES, SMALLEST, LARGEST = 12, 8, 2**28
#: Relative to a number, and in hundredths of it to the largest of an array: threads may add in another order.
ROUNDING = 1e-5
#: Attributes of attributes of an object, and arrays nearby in memory that each is compared with, at most.
DEPTH, NEAR = 4, 8

_CAUSES = {
    "buffer": "gives a record that changes when the next one is read, so batches hold one record in the places of "
    "others. Return a copy of the buffer that it fills (.clone(), .copy())",
    "order": "gives another record when records are read in another order under the same seeds: state that reading "
    "changes (running statistics, counters, iterators, wrong caches), the time, or random numbers without a seed. "
    "Compute a record from its index alone, and draw from torch, NumPy, random, or generators in its attributes",
    "overlap": "gives records of different persons that overlap in memory, such as windows of one series. Make them "
    "the rows of one person (persons=, epsilons.data.windows). Copy a public constant (.clone(), .copy())",
    "index": "gives the same record for every index under one seed, so a person's data are read when others are drawn. "
    "Read record `index`, and draw augmentation only",
    "others": "reads several rows of one table for a record (pairs, MixUp, windows, a mean of all), so one person's "
    "data are in records of others. Make them one record, or the rows of one person (persons=, epsilons.data.windows)",
    "state": "gave other values for training than it gives now, for the same records. It or its collate function keeps "
    "state between calls, in this process or in a worker. Remove that state",
    "refilled": "is collated into memory that the next batch overwrites. Return new tensors from the collate function",
}


def refusal(cause: str, name: str) -> BatchDependenceError:
    """cause: a name in _CAUSES; name: of the data set's type"""
    return BatchDependenceError(f"The data set ({name}) {_CAUSES[cause]}.")


def cause_in(
    dataset: Any,
    reader: Callable[[Any], Callable[[int, int], Any]],
    seeded: Sequence[tuple[int, int]],
    person: IntArray | None,
) -> str | None:
    """What is wrong with the records of a physical batch, as in _CAUSES.

    reader  data set -> a function that reads the record at an index under a seed
    seeded  (records,) index and seed of each
    person  (rows,) each row's person; None if each row is one person
    """
    read, (first, seed), rows = reader(dataset), seeded[0], [row for row, _ in seeded]
    before = [copied(read(*each)) for each in reversed(seeded)]
    raw, records = [], []
    for each in seeded:
        raw.append(read(*each))
        records.append(copied(raw[-1]))
    if not all(is_alike(one, other, 0.0) for one, other in zip(raw, records, strict=True)):
        return "buffer"
    if not all(map(is_alike, reversed(before), records)):
        return "order"
    near = [(first + step) % len(dataset) for step in range(1, min(UNDER_ONE_SEED, len(dataset)))]
    others = [row for row in dict.fromkeys([*near[:1], *rows, *near]) if row != first][:UNDER_ONE_SEED]
    more, kinds = _under_one_seed(read, seed, others, records[0])
    known = [*zip(seeded, records, strict=True), *(((row, seed), item) for row, _, item in more)]
    if overlap([*raw, *(one for _, one, _ in more)], [*rows, *(row for row, _, _ in more)], person):
        return "overlap"
    ignores = (len(others) > 0 and kinds == 1) or (len(others) >= FEW_AMONG and kinds == 2)
    if ignores and not is_alike(records[0], copied(read(first, seed // 2))):
        return "index"
    return _of_copies(dataset, reader, known[FROM_COPIES::-1], person)


def _under_one_seed(
    read: Callable[[int, int], Any], seed: int, rows: Sequence[int], first: Any
) -> tuple[list[tuple[int, Any, Any]], int]:
    """([(row, record, its copy)] of these rows, number of different ones with `first`), until there are three."""
    found, kinds = [], [first]
    for row in rows:
        raw = read(row, seed)
        item = copied(raw)
        found.append((row, raw, item))
        kinds += [] if any(is_alike(item, kind) for kind in kinds) else [item]
        if len(kinds) > 2:
            break
    return found, len(kinds)


def _of_copies(dataset: Any, reader: Any, known: Sequence[Any], person: IntArray | None) -> str | None:
    """What copies of a data set show: with other rows in one half of a table, then in the other; with an empty cache.

    A record that changes with both halves holds data of two persons.

    known  (index and seed, record) of each that is read from the copies
    """
    values, draw = fingerprints.by(dataset), np.random.default_rng(known[0][0][1])
    shared = {id(value): value for value in values if isinstance(value, Tensor | np.ndarray) or _is_frame(value)}
    shared |= {id(v): copy.copy(v) for v in values if isinstance(v, list | dict) and len(v) > fingerprints.LONGEST}

    def changed(altered: dict[int, Any]) -> list[bool]:
        read = reader(copy.deepcopy(dataset, shared | altered) if altered else dataset)
        return [not is_alike(record, copied(read(*each))) for each, record in known]

    for size, value in _attributes(values):
        with suppress(Exception):  # a data set that cannot be copied, or not be read with other values
            if type(value) in (dict, OrderedDict) and value:
                cold = type(value)()
                if any(changed({id(value): cold})) and cold:  # reading fills it
                    return "order"
            owner = np.arange(len(value)) if person is None else person
            if not _has_rows(value, size) or len(owner) != len(value):
                continue
            found = [changed({id(value): other}) for other in _with_halves_moved(value, owner, draw)]
            if any(map(all, zip(*found, strict=True))):
                return "others"
    return "order" if any(changed({})) else None  # what copies left in a cache outside of the data set


def _with_halves_moved(table: Any, owner: IntArray, draw: np.random.Generator) -> Iterator[Any]:
    """The table with other rows in the places of one half of the persons, then of the other. owner: of each row"""
    places, halves = np.arange(len(table)), draw.integers(2, size=int(owner.max()) + 1)[owner]
    for half in (0, 1):
        rows = np.where(halves == half, np.roll(places, 1), places)
        yield [table[row] for row in rows] if isinstance(table, list | tuple) else table[rows]


def _is_frame(value: Any) -> bool:
    return type(value).__module__.partition(".")[0] in ("pandas", "polars", "pyarrow")


def _attributes(values: Sequence[Any]) -> Iterator[tuple[int, Any]]:
    """(number of its records, value) of every attribute of a data set among these values, and in small collections."""
    for value in values:
        with suppress(Exception):  # an object that has no length now
            own = [*getattr(value, "__dict__", {}).values()] if hasattr(type(value), "__getitem__") else []
            own += [part for some in own if isinstance(some, dict) for part in some.values()]
            own += [part for some in own if isinstance(some, list | tuple) and len(some) < SMALLEST for part in some]
            yield from {id(part): (len(value), part) for part in own}.values()


def _has_rows(table: Any, records: int) -> bool:
    """Whether it is altered: not what is large, on disk, or says where rows of other tables are."""
    if not isinstance(table, list | tuple | Tensor | np.ndarray) or isinstance(table, np.memmap | nn.Parameter):
        return False
    if getattr(table, "nbytes", 0) > LARGEST or not max(SMALLEST, records) <= len(table) < 2 * records:
        return False
    numbers = table[:1].numpy() if isinstance(table, Tensor) and table.ndim == 1 else table
    return len(table) > records + 1 or not isinstance(numbers[0], int | np.integer)


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
    if x is None or y is None or x.shape != y.shape or x.numel() == 0:
        return fingerprints.of(a) == fingerprints.of(b)
    largest = float(x.nan_to_num(0.0, 0.0, 0.0).abs().max())
    return torch.allclose(x, y, rounding, rounding * largest / 100, equal_nan=True)


def _numbers(leaf: Any) -> Tensor | None:
    """Floating-point numbers in 64 bits; None for other leaves."""
    if isinstance(leaf, Tensor):
        return leaf.detach().cpu().double() if leaf.is_floating_point() else None
    is_array = isinstance(leaf, np.ndarray | np.floating) and leaf.dtype.kind == "f"
    return torch.from_numpy(np.array(leaf, dtype=np.float64)) if is_array else None
