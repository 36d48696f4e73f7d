"""Where the records of a tensor lie in its storage, so that views need no rules.

A view shows the storage of another tensor with other strides. So what is known is kept per storage, as a layout: which
record the value at each offset depends on. The state of a view follows from the layout and the view's strides.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from .states import FREE, Cause, Free, Mixed, Rows, State, Unknown

_PART = Unknown(Cause("a write to a part of a tensor", ""))
_ACROSS = Unknown(Cause("a view across records", ""))
_STRIDES = Unknown(Cause("a tensor of unusual strides", ""))


@dataclass(frozen=True)
class Layout:
    """The value at offset o of a storage depends on record first + ((o - origin) // unit) % count."""

    unit: int
    origin: int
    first: int
    count: int


def layout_of(rows: Rows, tensor: Tensor) -> Layout:
    """The layout of a dense tensor's storage."""
    if rows.axis is None:
        return Layout(1, 0, rows.first, 1)
    return Layout(int(tensor.stride(rows.axis)) * rows.inner, int(tensor.storage_offset()), rows.first, rows.count)


def rows_in(layout: Layout, tensor: Tensor) -> State:
    """Which records the values of this view of a storage depend on."""
    unit, count = layout.unit, layout.count
    if count == 1:
        return Rows(None, 1, layout.first, 1)
    start = tensor.storage_offset() - layout.origin
    if start < 0 or unit <= 0:
        return _ACROSS
    within, across = start % unit, None  # offset within a record; the axis that leads from record to record
    for axis, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        if size <= 1 or stride == 0 or stride % (unit * count) == 0:
            continue
        if stride * size <= unit or (stride < unit and within + stride * (size - 1) < unit and unit % stride):
            within += stride * (size - 1)
        elif across is None:
            across = (axis, size, stride)
        else:
            return _ACROSS
    record = start // unit % count
    if across is None:
        return Rows(None, 1, layout.first + record, 1) if within < unit else _ACROSS
    axis, size, stride = across
    inner = unit // stride if stride < unit else 1  # entries of this axis that one record has
    if inner * stride != unit or size % inner or within >= stride:
        return _ACROSS
    span = size // inner
    if span % count == 0 and record == 0:
        return Rows(axis, inner, layout.first, count)
    if record + span > count:
        return _ACROSS
    return Rows(axis, inner, layout.first + record, span) if span > 1 else Rows(None, 1, layout.first + record, 1)


Content = Layout | Mixed | Unknown


@dataclass(frozen=True)
class _Entry:
    """What is known of a storage.

    storage  a reference that does not keep its values, but its address: no other storage gets it meanwhile
    steps    the operators that made its values, as the bits of a number
    """

    storage: Any
    content: Content | None
    steps: int


_SPARSE = _Entry(None, Unknown(Cause("a sparse or nested tensor", "")), -1)


class Storages:
    """What is known of all storages that depend on records."""

    def __init__(self) -> None:
        self._entries: dict[int, _Entry] = {}
        self.written: dict[int, int] = {}  # key -> how many operators had run when the storage was last written to

    def clear(self) -> None:
        self._entries.clear()

    def state(self, tensor: Tensor) -> State:
        """Which records the values of this tensor depend on."""
        entry = self._entry(tensor)
        if entry is None or entry.content is None:
            return FREE
        return rows_in(entry.content, tensor) if isinstance(entry.content, Layout) else entry.content

    def steps(self, tensors: Sequence[Tensor]) -> int:
        """The operators that made these values, as bits; all of them if that is not known."""
        steps = 0
        for tensor in tensors:
            entry = self._entry(tensor)
            steps |= entry.steps if entry else 0
        return steps

    def put(self, tensor: Tensor, state: State, steps: int = 0, at: int = 0) -> None:
        """A new tensor. steps: the operators that made it, as bits; at: how many had run."""
        if is_dense(tensor):
            self._set(tensor, None if isinstance(state, Free) else self._content(tensor, state), steps, at)

    def write(self, tensor: Tensor, state: State, steps: int, at: int) -> None:
        """A tensor was written to in place; others may show the same storage."""
        if is_dense(tensor):
            entry = self._entry(tensor) or _Entry(None, None, 0)
            self._set(tensor, self._merged(entry.content, tensor, state), steps | entry.steps, at)

    def _merged(self, old: Content | None, tensor: Tensor, state: State) -> Content | None:
        if isinstance(state, Free) or isinstance(old, Mixed):
            return old
        new = self._content(tensor, state)
        if isinstance(new, Mixed) or old == new:
            return new
        if isinstance(old, Layout) and isinstance(new, Layout):
            return old if rows_in(old, tensor) == state else _PART
        is_part = tensor.numel() * tensor.element_size() < tensor.untyped_storage().nbytes()
        is_one = old is None and isinstance(new, Layout) and new.count == 1
        return _PART if is_part and is_one else old if isinstance(old, Unknown) else new

    def _content(self, tensor: Tensor, state: State) -> Content:
        if not isinstance(state, Rows):
            assert not isinstance(state, Free)
            return state
        layout = layout_of(state, tensor)
        return layout if rows_in(layout, tensor) == state else _STRIDES

    def _entry(self, tensor: Tensor) -> _Entry | None:
        if not is_dense(tensor):
            return _SPARSE
        entry = self._entries.get(key_of(tensor))
        return None if entry is None or entry.storage.expired() else entry

    def _set(self, tensor: Tensor, content: Content | None, steps: int, at: int) -> None:
        key = key_of(tensor)
        self.written[key] = at
        if content is None:
            self._entries.pop(key, None)
        else:
            reference = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
            self._entries[key] = _Entry(reference, content, steps)


def key_of(tensor: Tensor) -> int:
    """The same for all views of one storage."""
    return int(tensor.untyped_storage()._cdata)


def is_dense(tensor: Tensor) -> bool:
    """Whether its values lie in one storage at its strides: neither sparse nor nested."""
    return tensor.layout is torch.strided and not tensor.is_nested
