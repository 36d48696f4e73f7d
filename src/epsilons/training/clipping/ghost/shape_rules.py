"""Rules for operators without weights: entry by entry, views, reductions, and parts of tensors.

Each rule has the signature `batch_axis.Rule`. Inputs that want no gradient may get any entry: `rules.propagate` removes
it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .batch_axis import (
    SUMMED,
    BatchAxis,
    InputAxis,
    OutputAxes,
    Rule,
    UnsupportedOp,
    broadcast_input,
    dims_of,
    grad_shape,
    input_shape,
    only,
    operator,
    reshaped,
    same_axis,
    wanted,
    widened,
)


def elementwise(node: Any, axes: OutputAxes, records: int) -> list[InputAxis]:
    """Entry by entry, with broadcasting."""
    batch = only(axes)
    return [broadcast_input(node, batch, i) for i in range(len(node.next_functions))]


def loss_by_entry(node: Any, axes: OutputAxes, records: int) -> list[InputAxis]:
    if node._saved_reduction != 0:
        raise UnsupportedOp
    return elementwise(node, axes, records)


# -- views --------------------------------------------------------------------------------------------------


def view(node: Any, axes: OutputAxes, records: int) -> list[InputAxis]:
    return [reshaped(only(axes), grad_shape(node, 0), input_shape(node, 0), records)]


def restrided(node: Any, axes: OutputAxes, records: int) -> list[InputAxis]:
    """Adaptive pooling of channels_last images to one position ends with it: (n, c, 1, 1) stays the same."""
    batch, shape = only(axes), grad_shape(node, 0)
    source, _ = node.next_functions[0]
    is_pooled = operator(source) == "Mean" and source._saved_keepdim and all(size == 1 for size in shape[2:])
    if not is_pooled or batch.axis != 0 or shape != input_shape(node, 0) or node._saved_storage_offset not in (None, 0):
        raise UnsupportedOp
    if tuple(node._saved_stride[:2]) != (shape[1], 1):
        raise UnsupportedOp
    return [batch]


def transpose(node: Any, axes: OutputAxes, records: int) -> list[InputAxis]:
    batch, ndim = only(axes), len(grad_shape(node, 0))
    if hasattr(node, "_saved_dim0"):
        one, other = dims_of((node._saved_dim0, node._saved_dim1), ndim)
    else:
        one, other = 0, ndim - 1
    return [BatchAxis({one: other, other: one}.get(batch.axis, batch.axis), batch.inner)]


def permute(node: Any, axes: OutputAxes, records: int) -> list[InputAxis]:
    batch = only(axes)
    dims = dims_of(node._saved_dims, len(grad_shape(node, 0)))
    return [BatchAxis(dims[batch.axis], batch.inner)]


# -- along one axis -----------------------------------------------------------------------------------------


def reduction(node: Any, axes: OutputAxes, records: int) -> list[InputAxis]:
    """A sum, mean, maximum, norm … over some axes: the entries it reduces belong to the record of the result."""
    before = input_shape(node, 0)
    saved = node._saved_dim
    dims = dims_of(saved, len(before)) if saved is not None and saved != () else tuple(range(len(before)))
    return [widened(only(axes), dims, node._saved_keepdim)]


def along(node: Any, axes: OutputAxes, records: int) -> list[InputAxis]:
    """Mixes along one saved axis (softmax, cat …), which must not be the batch axis. Shapes may differ there only."""
    batch, shape = only(axes), grad_shape(node, 0)
    saved = getattr(node, "_saved_dim", None)
    dims = dims_of(node._saved_dims if saved is None else saved, len(shape))
    return [
        same_axis(batch, shape, input_shape(node, i), dims) if want else None for i, want in enumerate(wanted(node))
    ]


def leading(mixed: int) -> Rule:
    """Mixes the last `mixed` axes in any way: pooling, padding, interpolation."""

    def rule(node: Any, axes: OutputAxes, records: int) -> list[InputAxis]:
        batch, shape = only(axes), grad_shape(node, 0)
        last = tuple(range(len(shape) - mixed, len(shape)))
        return [same_axis(batch, shape, input_shape(node, 0), last)]

    return rule


def last_axis(node: Any, axes: OutputAxes, records: int) -> list[InputAxis]:
    """One axis more at the end, or one less: windows along one axis; complex numbers as pairs."""
    batch, shape, before = only(axes), grad_shape(node, 0), input_shape(node, 0)
    ndim = min(len(shape), len(before))
    mixed = dims_of(node._saved_dimension, ndim) if operator(node) == "Unfold" else ()
    return [same_axis(batch, shape[:ndim], before[:ndim], mixed)]


def first_axis(node: Any, axes: OutputAxes, records: int) -> list[InputAxis]:
    """The first axis of all inputs and outputs holds the records, and everything else is mixed."""
    batch, size = only(axes), grad_shape(node, 0)[0]
    if batch.axis != 0 or any(want and input_shape(node, i)[0] != size for i, want in enumerate(wanted(node))):
        raise UnsupportedOp
    return [batch for _ in node.next_functions]


def sliced(node: Any, axes: OutputAxes, records: int) -> list[InputAxis]:
    if grad_shape(node, 0) == input_shape(node, 0) and node._saved_step == 1:
        return [only(axes)]  # nothing is cut off
    return along(node, axes, records)


def rolled(node: Any, axes: OutputAxes, records: int) -> list[InputAxis]:
    if len(node._saved_dims) == 0:
        raise UnsupportedOp  # rolls the flattened tensor
    return along(node, axes, records)


def padded(node: Any, axes: OutputAxes, records: int) -> list[InputAxis]:
    ndim = len(grad_shape(node, 0))
    changed = [ndim - 1 - i for i in range(len(node._saved_pad) // 2)]
    return [same_axis(only(axes), grad_shape(node, 0), input_shape(node, 0), changed)]


# -- parts --------------------------------------------------------------------------------------------------


def select(node: Any, axes: OutputAxes, records: int) -> list[InputAxis]:
    return [widened(only(axes), dims_of(node._saved_dim, len(input_shape(node, 0))), keepdim=False)]


def split(node: Any, axes: OutputAxes, records: int) -> list[InputAxis]:
    """Several outputs side by side along one axis."""
    before = input_shape(node, 0)
    dims = dims_of(node._saved_dim, len(before))
    return [
        _common({same_axis(axis, grad_shape(node, k), before, dims) for k, axis in enumerate(axes) if axis is not None})
    ]


def unbind(node: Any, axes: OutputAxes, records: int) -> list[InputAxis]:
    dims = dims_of(node._saved_dim, len(input_shape(node, 0)))
    return [_common({widened(axis, dims, keepdim=False) for axis in axes if axis is not None})]


def _common(candidates: set[BatchAxis]) -> BatchAxis:
    if len(candidates) != 1:
        raise UnsupportedOp
    return candidates.pop()


def stack(node: Any, axes: OutputAxes, records: int) -> list[InputAxis]:
    batch = only(axes)
    (dim,) = dims_of(node._saved_dim, len(grad_shape(node, 0)))
    if batch.axis == dim:
        raise UnsupportedOp
    return [BatchAxis(batch.axis - (batch.axis > dim), batch.inner) for _ in node.next_functions]


def repeat(node: Any, axes: OutputAxes, records: int) -> list[InputAxis]:
    """Copies side by side. Along the batch axis, the gradient sums over the records."""
    batch, before, after = only(axes), grad_shape(node, 0), input_shape(node, 0)
    axis = batch.axis - (len(before) - len(after))
    if axis < 0:
        return [SUMMED]
    if before[batch.axis] == after[axis]:
        return [BatchAxis(axis, batch.inner)]
    if batch.inner % after[axis] == 0:
        return [SUMMED]
    raise UnsupportedOp


def index(node: Any, axes: OutputAxes, records: int) -> list[InputAxis]:
    """x[arange(records), …]: record i picks from row i. x[:, places]: the same places of each record."""
    indices = node._saved_indices
    given = [axis for axis, i in enumerate(indices) if i is not None]
    is_one_block = given == list(range(given[0], given[-1] + 1))  # otherwise the picked axes come first
    if is_one_block and only(axes).axis < given[0]:
        return [only(axes)]
    if only(axes) != BatchAxis(0) or indices[0] is None or input_shape(node, 0)[0] != records:
        raise UnsupportedOp
    first = indices[0]
    if first.dtype in (torch.bool, torch.uint8) or any(i is None for i in indices):
        raise UnsupportedOp
    shape = torch.broadcast_shapes(*(i.shape for i in indices))  # type: ignore[no-untyped-call]
    if shape[0] != records or not _is_in_order(first.expand(shape)):
        raise UnsupportedOp
    return [BatchAxis(0)]


def _is_in_order(index: Tensor) -> bool:
    in_order = torch.arange(len(index), device=index.device).reshape(-1, *(1 for _ in index.shape[1:]))
    return bool((index == in_order).all())
