"""The structure of a batch: its parts, its leaves, and the same structure with other leaves.

Batches are tensors in lists, tuples, mappings (transformers' BatchEncoding is a UserDict), dataclasses and whatever
else is registered with `torch.utils._pytree`, in any nesting. A structure keeps its type where the type can be copied;
a mapping that cannot be copied becomes a dict.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence
from torch.utils import _pytree

from ..errors import DataError

#: Leaves of these types are compared by their text.
_PLAIN = (bool, int, float, complex, str, bytes, type(None))
#: Most leaves are of these types, and are known by them at once.
_LEAVES = {Tensor, torch.nn.Parameter, np.ndarray, *_PLAIN}


def parts(node: Any) -> dict[Any, Any] | None:
    """The parts of a structure, by name or place; None for a leaf."""
    if type(node) in _LEAVES:
        return None
    if isinstance(node, Mapping):
        return dict(node.items())
    if type(node) in (list, tuple):
        return dict(enumerate(node))
    if dataclasses.is_dataclass(node) and not isinstance(node, type):
        return {field.name: getattr(node, field.name) for field in dataclasses.fields(node)}
    inner, spec = _pytree.tree_flatten(node, is_leaf=lambda part: part is not node)
    return None if spec.is_leaf() else dict(enumerate(inner))


def rebuilt(node: Any, new: Mapping[Any, Any]) -> Any:
    """A copy of a structure with these parts."""
    if type(node) is dict:
        return dict(new)
    if type(node) in (list, tuple):
        return type(node)(new.values())
    if isinstance(node, MutableMapping):
        copied: Any = copy.copy(node)
        copied.update(new)
        return copied
    if isinstance(node, Mapping):
        return dict(new)
    if dataclasses.is_dataclass(node):
        copied = copy.copy(node)
        for name, value in new.items():
            object.__setattr__(copied, name, value)  # a frozen one, too
        return copied
    _, spec = _pytree.tree_flatten(node, is_leaf=lambda part: part is not node)
    return _pytree.tree_unflatten(list(new.values()), spec)


def mapped(node: Any, change: Callable[[Any], Any], is_leaf: Callable[[Any], bool] = lambda node: False) -> Any:
    """The batch with every leaf changed. is_leaf: structures that count as one leaf."""
    inner = None if is_leaf(node) else parts(node)
    return change(node) if inner is None else rebuilt(node, {k: mapped(v, change, is_leaf) for k, v in inner.items()})


def leaves(node: Any) -> list[Any]:
    """All leaves, in order."""
    inner = parts(node)
    return [node] if inner is None else [leaf for part in inner.values() for leaf in leaves(part)]


def tensors(node: Any) -> list[Tensor]:
    """All leaves that are tensors, in order."""
    return [leaf for leaf in leaves(node) if isinstance(leaf, Tensor)]


def _structure(node: Any) -> Any:
    """Types and names of all parts; None for a leaf."""
    inner = parts(node)
    return None if inner is None else (type(node), {name: _structure(part) for name, part in inner.items()})


def moved(node: Any, device: torch.device) -> Any:
    """The batch with every tensor in it on this device."""

    def move(leaf: Any) -> Any:
        kinds: Any = (Tensor, PackedSequence)
        return leaf.to(device) if isinstance(leaf, kinds) else leaf

    return mapped(node, move, lambda part: isinstance(part, PackedSequence))


def copied(node: Any) -> Any:
    """A copy whose tensors hold their values alone: deepcopy would copy the whole table that a tensor is a row of."""
    return mapped(node, lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else copy.deepcopy(leaf))


def is_equal(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors of one shape hold the same values, and NaN in the same places."""
    return bool(((a == b) | ((a != a) & (b != b))).all())


def is_same(one: Any, other: Any, unknown: bool = False) -> bool:
    """Whether two batches hold the same values, and NaN in the same places.

    unknown  the answer for leaves that are neither tensors nor plain values
    """

    def is_like(a: Any, b: Any) -> bool:
        if a is b:
            return True
        if isinstance(a, Tensor) and isinstance(b, Tensor):
            return a.shape == b.shape and a.dtype == b.dtype and is_equal(a, b)
        return repr(a) == repr(b) if isinstance(a, _PLAIN) else unknown  # written out, NaN equals NaN

    return bool(_structure(one) == _structure(other)) and all(map(is_like, leaves(one), leaves(other)))


# -- records of a batch --------------------------------------------------------------------------------------------


def take(batch: Any, rows: Sequence[int], records: int) -> Any:
    """These records of a collated batch: the same structure, with every column of `records` items cut.

    Raises DataError if the batch has no column, so that it cannot be cut into records.
    """
    columns = 0

    def cut(column: Any) -> Any:
        nonlocal columns
        if not _is_column(column, records, column is batch):
            return column
        columns += 1
        if isinstance(column, Tensor):
            return column[torch.as_tensor(rows, device=column.device)]
        return [column[i] for i in rows]

    result = mapped(batch, cut, lambda node: _is_column(node, records, node is batch))
    if not columns:
        raise DataError(
            f"The data set's batches are of type {type(batch).__name__}, which cannot be cut into its {records} "
            "records. Collate records into a tensor, or a tuple, list or dict of tensors, with the records in the "
            "first dimension. A collate function that packs several records into one row cannot be used."
        )
    return result


def has_different(batch: Any, records: int) -> bool:
    """True if not all records of the batch are the same, so that exchanging them can show anything."""
    return not is_same(batch, take(batch, [0] * records, records))


def _is_column(node: Any, records: int, is_root: bool) -> bool:
    """Whether this is a tensor or list with one item per record.

    A list of as many parts as there are records may also be a structure. Then its parts hold tensors; and the batch
    itself is a column only if its items are plain values.
    """
    if isinstance(node, Tensor):
        return node.ndim > 0 and len(node) == records
    kinds = (Tensor, list, tuple, Mapping) if is_root else (Tensor,)
    return isinstance(node, list) and len(node) == records and not any(isinstance(part, kinds) for part in node)


class Gathered:
    """The records of one physical batch, from which other batches can be built.

    batch    positions -> a batch of the records at these positions, in that order
    calm     the same, with random operators of a custom collate function that draw nothing
    records  the single records of a map-style data set; None where a batch is cut, and nothing is collated
    name     name of the collate function, if it is a custom one
    collate  copies of records -> a batch of them
    """

    def __init__(
        self,
        batch: Callable[[Sequence[int]], Any],
        records: Sequence[Any] | None = None,
        name: str | None = None,
        collate: Callable[[list[Any]], Any] | None = None,
        calm: Callable[[Sequence[int]], Any] | None = None,
    ) -> None:
        self.batch, self.records, self.name, self.collate = batch, records, name, collate
        self.calm = calm or batch

    def copies(self) -> list[Any]:
        """Of all records, by themselves."""
        assert self.records is not None
        return [copied(record) for record in self.records]


def sizes_of(records: Sequence[Any]) -> list[int]:
    """The size of each record: its number of values, and the lengths of its texts."""

    def size(leaf: Any) -> int:
        if isinstance(leaf, Tensor):
            return leaf.numel()
        if isinstance(leaf, np.ndarray):
            return int(leaf.size)
        return len(leaf) if isinstance(leaf, str | bytes) else 1

    return [sum(size(leaf) for leaf in leaves(record)) for record in records]
