"""Which record each entry of a tensor depends on.

A tensor is `FREE` of records, or made of `Rows`, one record beside the other along one axis, or `Mixed`, or `Unknown`.
`Mixed` is certain: an entry was computed from several records. `Unknown` is not: the tensor comes from an operator
without a rule, or from one that moves records, such as sorting.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor


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
