"""Operators that pick, write or join entries by their places."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ..states import FREE, Call, Free, Mixed, Rows, State, axes, shifted, unless
from .general import Rule, dim, lines, meet

#: Slices are added to others: records that share one are added up.
_added = meet(dim, data="self source value", others=Call.mixed)


def index_copy(call: Call) -> State:
    """Writes slices over others: what meets is not added up, but records may come out in another order."""
    state = _added(call)
    return call.unknown() if isinstance(state, Mixed) else state


def index_select(call: Call) -> State:
    x, index = call["self"], call["index"]
    (axis,) = dim(call, x)
    state, chosen = call.state(x), call.state(index)
    if chosen == FREE:
        return state if _is_in_order(index, x.shape[axis]) else unless(state, (axis,), call.unknown())
    if state != FREE or not isinstance(chosen, Rows):
        return call.unknown()
    return replace(chosen, axis=None if chosen.axis is None else axis)


def _is_in_order(index: Tensor, size: int) -> bool:
    """Whether all places are chosen in order, the same along all further axes."""
    if index.ndim == 0 or len(index) != size:
        return False
    flat = index.reshape(size, -1)
    return bool((flat == torch.arange(size, device=index.device)[:, None]).all())


def index(call: Call) -> State:
    """x[…] with tensors: a table looked up by records, or x[arange(n), …], or features picked the same for all."""
    x, indices = call["self"], call["indices"]
    places = [place for place, i in enumerate(indices) if i is not None]
    given = [indices[place] for place in places]
    state = call.state(x)
    if any(i.dtype in (torch.bool, torch.uint8) for i in given):
        return _masked(call, state, places[0], given)
    ndim = max(i.ndim for i in given)
    are_adjacent = places == list(range(places[0], places[0] + len(places)))
    start = places[0] if are_adjacent else 0
    chosen = shifted(call.broadcast(given), start)
    if state == FREE or not isinstance(chosen, Rows | Free):
        return chosen
    assert isinstance(state, Rows)
    if state.axis is None:
        return call.joined([state, chosen])
    if state.axis not in places:
        before = sum(place < state.axis for place in places)
        behind = ndim if not are_adjacent or places[0] < state.axis else 0
        return call.joined([replace(state, axis=state.axis - before + behind), chosen])
    which = given[places.index(state.axis)]
    shape = torch.broadcast_shapes(*(i.shape for i in given))  # type: ignore[no-untyped-call]
    size = x.shape[state.axis]
    is_each_its_own = call.state(which) == FREE and state.inner == 1 and which.ndim == ndim and shape[:1] == (size,)
    if not is_each_its_own or not _is_in_order(which, size):
        return call.unknown()
    return call.joined([replace(state, axis=start), chosen])


def _masked(call: Call, state: State, start: int, given: Sequence[Tensor]) -> State:
    """x[mask]: as many entries as the mask has; nothing is known where it picks records, or depends on them."""
    if len(given) > 1 or call.state(given[0]) != FREE:
        return call.unknown()
    if not isinstance(state, Rows) or state.axis is None or state.axis < start:
        return state
    return call.unknown() if state.axis < start + given[0].ndim else shifted(state, 1 - given[0].ndim)


def cat(call: Call) -> State:
    parts = [t for t in call["tensors"] if t.ndim != 1 or len(t)]
    (axis,) = axes(call["dim"] or 0, call.results[0].ndim)
    states = [call.state(t) for t in parts]
    if all(not isinstance(s, Rows) or s.axis not in (axis, None) for s in states):
        return _beside(call, states)
    return _side_by_side(call, states, [t.shape[axis] for t in parts], axis)


def stack(call: Call) -> State:
    (axis,) = axes(call["dim"] or 0, call.results[0].ndim)
    states = [call.state(t) for t in call["tensors"]]
    if all(isinstance(s, Rows) and s.axis is None for s in states):
        return _side_by_side(call, states, [1] * len(states), axis)
    state = _beside(call, states)
    return shifted(state, 1) if isinstance(state, Rows) and state.axis is not None and state.axis >= axis else state


def _beside(call: Call, states: Sequence[State]) -> State:
    """Parts of different records lie beside each other and never meet."""
    state = call.joined(states)
    return call.unknown() if isinstance(state, Mixed) else state


def _side_by_side(call: Call, states: Sequence[State], sizes: Sequence[int], axis: int) -> State:
    """Parts laid one after the other along the records' axis."""
    rows = [s for s in states if isinstance(s, Rows) and s.axis in (axis, None)]
    if len(rows) < len(states):
        return call.unknown()
    if all(r == rows[0] for r in rows):
        return rows[0]  # all of them, once more; or one record alone
    inner = {size // r.count for size, r in zip(sizes, rows, strict=True)}
    follow = all(b.first == a.first + a.count for a, b in itertools.pairwise(rows))
    if not follow or len(inner) > 1 or any(s % r.count for s, r in zip(sizes, rows, strict=True)):
        return call.unknown()
    return Rows(axis, inner.pop(), rows[0].first, sum(r.count for r in rows))


def repeat(call: Call) -> State:
    return shifted(call.state(call["self"]), len(call["repeats"]) - call["self"].ndim)


RULES: dict[str, Rule] = {
    "gather": meet(dim, Call.unknown, data="self index"),
    **lines(meet(dim, data="self index src value"), "scatter scatter_add scatter_reduce"),
    **lines(_added, "index_add index_reduce"),
    **lines(index_copy, "index_copy index_fill"),
    "index_select": index_select,
    "index": index,
    "cat": cat,
    "stack": stack,
    "repeat": repeat,
}
