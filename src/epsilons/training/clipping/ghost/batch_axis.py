"""The batch axis of a tensor: which record each entry belongs to, and how that axis moves through shapes.

The rules in `shape_rules` and `layer_rules` use these values; `rules` lists the rules by operator.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

Shape = tuple[int, ...]


class UnsupportedOp(Exception):
    """There is no rule for this operator, or for this use of it."""


@dataclass(frozen=True)
class BatchAxis:
    """Entry p of this axis belongs to record (p // inner) % records. All other axes stay within a record."""

    axis: int
    inner: int = 1

    def by_record(self, tensor: Tensor, records: int) -> Tensor:
        """(records, outer·inner, *other axes) of a tensor with this batch axis."""
        front = tensor.movedim(self.axis, 0) if self.axis else tensor
        outer = front.shape[0] // (records * self.inner)
        split = front.reshape(outer, records, self.inner, *front.shape[1:])
        if outer == 1:
            return split[0]
        return split.movedim(1, 0).reshape(records, outer * self.inner, *front.shape[1:])


@dataclass(frozen=True)
class Summed:
    """This input has no batch axis: its gradient is a sum over the records."""


SUMMED = Summed()
#: Of one input of an operator. None: no gradient is wanted there, or none reaches it.
InputAxis = BatchAxis | Summed | None
OutputAxes = list[BatchAxis | None]
#: (node, batch axes of its outputs, records) -> one entry per input.
Rule = Callable[[Any, OutputAxes, int], Sequence[InputAxis]]


# -- nodes of the recorded graph ----------------------------------------------------------------------------


def operator(node: Any) -> str:
    """The operator's name, such as "Addmm" for AddmmBackward0; "" for nodes that are not torch's operators."""
    kind: type = type(node)
    return _name_of(kind)


@cache
def _name_of(kind: type) -> str:
    if issubclass(kind, torch.autograd.function.BackwardCFunction):
        return ""  # a user's autograd.Function may have any name
    name, separator, number = kind.__name__.partition("Backward")
    return name if separator and number.isdigit() else ""


def grad_shape(node: Any, index: int) -> Shape:
    """Shape of the gradient of this node's index-th output."""
    metadata = getattr(node, "_input_metadata", None)
    if metadata is None:
        return tuple(node.variable.shape)
    return tuple(metadata[index].shape)


def input_shape(node: Any, index: int) -> Shape:
    """Shape of this node's index-th input."""
    source, number = node.next_functions[index]
    return grad_shape(source, number)


def wanted(node: Any) -> list[bool]:
    """For each input, whether its gradient is computed."""
    return [source is not None for source, _ in node.next_functions]


def signed(value: int) -> int:
    """Saved dimensions are unsigned 64-bit numbers: -1 is saved as 2**64 - 1."""
    return value - 2**64 if value >= 2**63 else value


def dims_of(value: Any, ndim: int) -> tuple[int, ...]:
    """One saved dimension or several, as axes from 0."""
    values = (value,) if isinstance(value, int) else tuple(value)
    return tuple(signed(v) % max(ndim, 1) for v in values)


def only(axes: Sequence[BatchAxis | None]) -> BatchAxis:
    """The batch axis of the first output, the only one that may have one."""
    first = axes[0]
    if first is None or any(axis is not None for axis in axes[1:]):
        raise UnsupportedOp
    return first


# -- moving the batch axis through shapes -------------------------------------------------------------------


def reshaped(batch: BatchAxis, before: Shape, after: Shape, records: int) -> BatchAxis:
    """The same entries in the same order, in another shape."""
    step = batch.inner * math.prod(before[batch.axis + 1 :])  # entries from one record to the next
    beyond = math.prod(after)
    if beyond != math.prod(before):
        raise UnsupportedOp
    for axis, size in enumerate(after):
        around, beyond = beyond, beyond // max(size, 1)
        # All records must lie side by side within this one axis.
        if beyond <= step and step % beyond == 0 and step * records <= around and around % (step * records) == 0:
            return BatchAxis(axis, step // beyond)
    raise UnsupportedOp


def narrowed(batch: BatchAxis, before: Shape, after: Shape) -> BatchAxis | Summed:
    """Undo broadcasting: axes that are missing or 1 are summed over."""
    axis = batch.axis - (len(before) - len(after))
    if axis < 0 or (after[axis] == 1 and before[batch.axis] != 1):
        return SUMMED
    if after[axis] != before[batch.axis]:
        raise UnsupportedOp
    return BatchAxis(axis, batch.inner)


def broadcast_input(node: Any, batch: BatchAxis, index: int) -> InputAxis:
    """Of an input that broadcasts to the output's shape."""
    return narrowed(batch, grad_shape(node, 0), input_shape(node, index)) if wanted(node)[index] else None


def widened(batch: BatchAxis, dims: Sequence[int], keepdim: bool) -> BatchAxis:
    """Put back the axes that a reduction removed."""
    axis = batch.axis
    if not keepdim:
        for dim in sorted(dims):
            axis += dim <= axis
    elif axis in dims:
        raise UnsupportedOp
    return BatchAxis(axis, batch.inner)


def same_axis(batch: BatchAxis, before: Shape, after: Shape, mixed: Sequence[int]) -> BatchAxis:
    """The axis where it was, for an operator that mixes entries along the axes `mixed` only."""
    if batch.axis in mixed or len(before) != len(after) or before[batch.axis] != after[batch.axis]:
        raise UnsupportedOp
    return batch
