"""Which record each entry of a tensor depends on.

A tensor is `FREE` of records, or made of `Rows`, one record beside the other along one axis, or `Mixed`, or `Unknown`.
`Mixed` is certain: an entry was computed from several records. `Unknown` is not: the tensor comes from an operator
without a rule, or from one that moves records, such as sorting.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef


@dataclass(frozen=True)
class Rows:
    """Entry p of `axis` depends on record first + (p // inner) % count alone. axis None: every entry on record first.

    axis   the axis along which the records lie
    inner  entries of the axis per record: (records · time, features) has inner = time
    first  the first record
    count  how many records there are
    """

    axis: int | None
    inner: int
    first: int
    count: int


@dataclass(frozen=True)
class Free:
    """Depends on no record."""


@dataclass(frozen=True)
class Cause:
    """Where something happened: an operator, and the line of the caller's code that ran it."""

    operator: str
    line: str

    def __str__(self) -> str:
        return f"the operator {self.operator} at {self.line}" if self.line else f"the operator {self.operator}"


@dataclass(frozen=True)
class Mixed:
    """An entry depends on several records."""

    cause: Cause


@dataclass(frozen=True)
class Unknown:
    """Nothing is known.

    is_place  whether these are integers that depend on several records: allowed as places, and as nothing else
    """

    cause: Cause
    is_place: bool = False


FREE = Free()
State = Rows | Free | Mixed | Unknown


@dataclass(frozen=True)
class Call:
    """One call of an operator.

    name       its name, without the underscore of the version that works in place
    arguments  by the names of its schema
    states     of every tensor among the arguments, by id
    results    the tensors that came out
    cause      for `Mixed` and `Unknown`
    """

    name: str
    arguments: dict[str, Any]
    states: dict[int, State]
    results: Sequence[Tensor]
    cause: Cause

    def __getitem__(self, name: str) -> Any:
        return self.arguments.get(name)

    def state(self, value: Any) -> State:
        return self.states[id(value)] if isinstance(value, Tensor) else FREE

    def given(self, names: str) -> list[Tensor]:
        """The arguments of these names that are tensors."""
        return [self[name] for name in names.split() if isinstance(self[name], Tensor)]

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors among the arguments."""
        return tensors_in(self.arguments.values())

    def mixed(self) -> State:
        return Mixed(self.cause)

    def unknown(self) -> State:
        return Unknown(self.cause)

    def joined(self, states: Sequence[State]) -> State:
        """The state of a result, each entry of which is computed from one entry of each argument.

        states: of the arguments, with the axes of the result
        """
        bad = worst(states)
        if bad is not None:
            return bad
        rows = [s for s in states if isinstance(s, Rows)]
        if not rows:
            return FREE
        return rows[0] if all(r == rows[0] for r in rows) else self.mixed()

    def broadcast(self, values: Sequence[Tensor]) -> State:
        """The same for arguments that are broadcast."""
        ndim = max((t.ndim for t in values), default=0)
        return self.joined([shifted(self.state(t), ndim - t.ndim) for t in values])


def tensors_in(values: Iterable[Any]) -> list[Tensor]:
    """All tensors in nested lists and tuples."""
    tensors: list[Tensor] = []
    for value in values:
        if isinstance(value, Tensor):
            tensors.append(value)
        elif isinstance(value, list | tuple):
            tensors += tensors_in(value)
    return tensors


def worst(states: Sequence[State]) -> State | None:
    """The first state that is mixed, or else unknown; None if none is."""
    return next((s for s in states if isinstance(s, Mixed)), next((s for s in states if isinstance(s, Unknown)), None))


def shifted(state: State, axes: int) -> State:
    """The same records in a tensor that has so many more axes in front."""
    return replace(state, axis=state.axis + axes) if isinstance(state, Rows) and state.axis is not None else state


def unless(state: State, axes: Collection[int], otherwise: State) -> State:
    """The state itself, but `otherwise` if its records lie along one of these axes."""
    return otherwise if isinstance(state, Rows) and state.axis is not None and state.axis in axes else state


def axes(dims: Any, ndim: int) -> tuple[int, ...]:
    """Dimensions as an operator takes them, counted from 0; none given means all."""
    if dims is None or (isinstance(dims, list | tuple) and not dims):
        return tuple(range(ndim))
    return tuple(d % max(ndim, 1) for d in ((dims,) if isinstance(dims, int) else dims))


# -- Where the records of a tensor lie in its storage, so that views need no rules
#
# A view shows the storage of another tensor with other strides. So what is known is kept per storage, as a layout:
# which record the value at each offset depends on. The state of a view follows from the layout and the view's strides.

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


def rows_in(layout: Layout, tensor: Tensor) -> State:
    """Which records the values of this view of a storage depend on."""
    unit, count = layout.unit, layout.count
    if count == 1:
        return Rows(None, 1, layout.first, 1)
    start = int(tensor.storage_offset()) - layout.origin
    if start < 0 or unit <= 0:
        return _ACROSS
    within, leading = _leading_axes(tensor, unit, count, start % unit)
    if len(leading) > 1:
        return _ACROSS
    record = start // unit % count
    if not leading:
        return Rows(None, 1, layout.first + record, 1) if within < unit else _ACROSS
    ((axis, size, stride),) = leading
    inner = unit // stride if stride < unit else 1  # entries of this axis that one record has
    if inner * stride != unit or size % inner or within >= stride:
        return _ACROSS
    span = size // inner
    if span % count == 0 and record == 0:
        return Rows(axis, inner, layout.first, count)
    if record + span > count:
        return _ACROSS
    return Rows(axis, inner, layout.first + record, span) if span > 1 else Rows(None, 1, layout.first + record, 1)


def _leading_axes(tensor: Tensor, unit: int, count: int, within: int) -> tuple[int, list[tuple[int, int, int]]]:
    """(the last offset within a record, the axes that lead from record to record with their sizes and strides).

    within  the first offset
    """
    leading = []
    for axis, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        if size <= 1 or stride == 0 or stride % (unit * count) == 0:
            continue
        if stride * size <= unit or (stride < unit and within + stride * (size - 1) < unit and unit % stride):
            within += stride * (size - 1)
        else:
            leading.append((axis, size, stride))
    return within, leading


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
        self._drawn: dict[int, Any] = {}  # random numbers, which depend on no record
        self.written: dict[int, int] = {}  # key -> how many operators had run when the storage was last written to

    def clear(self) -> None:
        self._entries.clear()
        self._drawn.clear()

    def put_drawn(self, tensors: Iterable[Tensor]) -> None:
        """New tensors of random numbers, or computed from some, that depend on no record."""
        for tensor in filter(is_dense, tensors):
            self._drawn[key_of(tensor)] = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]

    def is_drawn(self, tensor: Tensor) -> bool:
        return is_dense(tensor) and key_of(tensor) in self._drawn

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
        layout = Layout(1, 0, state.first, 1)
        if state.axis is not None:
            unit = int(tensor.stride(state.axis)) * state.inner
            layout = Layout(unit, int(tensor.storage_offset()), state.first, state.count)
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


# -- What torch says of an ATen operator: its name, and the names and types of its arguments

#: Defaults of these types are numbers in the schema, and mean the same as none.
_TYPES = ("ScalarType", "Optional[ScalarType]", "Layout", "Optional[Layout]")
#: Arguments of these types are sizes and places: they may grow with the number of records.
_SIZES = ("int", "Optional[int]", "List[int]", "Optional[List[int]]")


@dataclass(frozen=True)
class Schema:
    """One overload of an operator.

    name          without the underscore of the version that works in place
    names         of all arguments
    defaults      by name
    sizes         names of arguments that are sizes or places
    written       names of arguments that are written to
    is_pointwise  whether torch calls it entry by entry
    is_view       whether it only changes how a tensor shows its storage
    """

    name: str
    names: tuple[str, ...]
    defaults: dict[str, Any]
    sizes: frozenset[str]
    written: tuple[str, ...]
    is_pointwise: bool
    is_view: bool

    def named(self, args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
        """Arguments by name, those given first, then defaults."""
        given = dict(zip(self.names, args, strict=False)) | kwargs
        return given | {name: value for name, value in self.defaults.items() if name not in given}


@cache
def schema_of(func: Any) -> Schema:
    name = func._schema.name.split("::")[-1]
    arguments = func._schema.arguments
    sizes = {a.name for a in arguments if str(a.type) in _SIZES} | ({"end"} if name == "arange" else set())
    return Schema(
        name[:-1] if name.endswith("_") and not name.endswith("__") else name,
        tuple(a.name for a in arguments),
        {a.name: a.default_value for a in arguments if a.has_default_value() and str(a.real_type) not in _TYPES},
        frozenset(sizes),
        tuple(a.name for a in arguments if a.alias_info is not None and a.alias_info.is_write),
        torch.Tag.pointwise in func.tags,
        torch.Tag.inplace_view in func.tags,
    )
