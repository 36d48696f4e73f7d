"""Collate functions: a record must come out of one the same beside any other records, except for padding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..draws import batches
from ..draws.batches import Gathered, is_equal, leaves, tensors
from . import messages
from .fixed_draws import Coins, Variant
from .states import Mixed, Rows, State
from .watch import OperatorWatch


@dataclass(frozen=True)
class Collated:
    """What a collate function did to a form, for messages.

    name      of the function
    lengths   two sizes that records were padded to; None if all were padded alike
    is_moved  whether records came out in another order, or numbers of places changed: sound if the losses undo it
    """

    name: str
    lengths: tuple[int, int] | None = None
    is_moved: bool = False


def check_collate(gathered: Gathered, step: int, records: int) -> Gathered:
    """Watch a collate function, and refuse one that computes across records, or decides by several of them.

    Gives the records as they are put together from here on. They are cut from one batch if the function keeps them
    apart and draws from a generator that is not seeded here. Raises BatchDependenceError.
    """
    assert gathered.collate is not None
    assert gathered.name is not None
    watch = OperatorWatch(records, Coins(step))
    loose = gathered.copies()
    watch.begin_apart([tensors(record) for record in loose])
    try:
        batch = gathered.collate(loose)
    finally:
        watch.end()
    states = [watch.state(tensor) for tensor in tensors(batch)]
    for state, tensor in zip(states, tensors(batch), strict=True):
        if isinstance(state, Mixed) and tensor.is_floating_point():
            raise messages.collate(gathered.name, "computes", state.cause)
    for read in watch.watched.reads:
        if read.is_decision():
            raise messages.collate(gathered.name, "decides", read.line)
    return _repeatable(gathered, states, records)


def _repeatable(gathered: Gathered, states: Sequence[State], records: int) -> Gathered:
    whole = gathered.batch(range(records))
    if batches.is_same(whole, gathered.batch(range(records)), unknown=True):
        return gathered
    if all(isinstance(state, Rows) and (state.first, state.count) == (0, records) for state in states):
        return Gathered(lambda places: batches.take(whole, places, records), gathered.records)
    raise messages.collate(str(gathered.name), "is not repeatable")


def compare(whole: Any, part: Any, variant: Variant, records: int, name: str) -> Collated:
    """Refuse a collate function that gives a record other values beside other records, except for padding.

    Raises BatchDependenceError. What it cannot compare is left to the losses, and so is another order of records.
    """
    lengths, is_moved = None, False
    ones, others = leaves(whole), leaves(part)
    if len(ones) != len(others):
        return Collated(name)
    for one, other in zip(ones, others, strict=True):
        if not (isinstance(one, Tensor) and isinstance(other, Tensor) and one.ndim == other.ndim > 0):
            continue
        if (len(one), len(other)) != (records, len(variant.rows)):
            continue
        a, b = one[list(variant.there)], other[list(variant.here)]
        if a.shape != b.shape:
            axis = next(k for k in range(1, a.ndim) if a.shape[k] != b.shape[k])
            lengths = lengths or (min(b.shape[axis], a.shape[axis]), max(a.shape[axis], b.shape[axis]))
        elif not is_equal(a, b):
            is_place = a.ndim == 1 and not a.is_floating_point()
            if not is_place and not _rows(other) <= _rows(one):
                raise messages.collate(name, "changes")
            is_moved = True
    return Collated(name, lengths, is_moved)


def _rows(column: Tensor) -> set[bytes]:
    """Its rows, without their order."""
    flat = column.detach().cpu().reshape(len(column), -1).contiguous()
    return {row.view(torch.uint8).numpy().tobytes() for row in flat}


# -- where the records of a batch lie ------------------------------------------------------------------------------


def shapes_of(batch: Any) -> list[Any]:
    """The shapes of all tensors, without the number of records."""
    return [(tuple(t.shape[1:]), t.dtype) for t in tensors(batch)]


def axes_of_records(batch: Any, exchanged: Any | None, kept: Sequence[int], records: int) -> list[int | None]:
    """For every tensor of a batch, the axis along which its records lie; None if it is not known.

    exchanged  the batch with some records replaced by others, and `kept` left in their places: what changed shows the
               axis. None: it is the first
    """
    axes: list[int | None] = []
    others: list[Any] = [None] * len(tensors(batch)) if exchanged is None else tensors(exchanged)
    for tensor, other in zip(tensors(batch), others, strict=False):
        searched = range(tensor.ndim if exchanged is not None else min(tensor.ndim, 1))
        possible = [axis for axis in searched if tensor.shape[axis] == records]
        if isinstance(other, Tensor) and other.shape == tensor.shape:
            index = torch.tensor(list(kept), device=tensor.device)
            possible = [a for a in possible if is_equal(tensor.index_select(a, index), other.index_select(a, index))]
        axes.append(possible[0] if possible else None)
    return axes


def with_axes(batch: Any, axes: Sequence[int | None], records: int) -> list[tuple[Tensor, int | None]]:
    """The tensors of a form of that batch, each with the axis of its records."""
    known = [*axes, *(None for _ in tensors(batch))]
    return [
        (tensor, axis if axis is not None and tensor.ndim > axis and tensor.shape[axis] == records else None)
        for tensor, axis in zip(tensors(batch), known, strict=False)
    ]
