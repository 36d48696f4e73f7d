"""Rules for operators with weights: products, convolutions, lookups, norms, attention, recurrent layers.

Each rule has the signature `batch_axis.Rule`. Inputs that want no gradient may get any entry: `rules.propagate` removes
it.
"""

from __future__ import annotations

from typing import Any

from .batch_axis import (
    SUMMED,
    BatchAxis,
    InputAxis,
    OutputAxes,
    UnsupportedOp,
    broadcast_input,
    grad_shape,
    input_shape,
    narrowed,
    only,
    wanted,
)

# -- products -----------------------------------------------------------------------------------------------


def mm(node: Any, axes: OutputAxes, records: int) -> list[InputAxis]:
    """(n, k) @ (k, p): rows of the result come from rows of the left side, columns from columns of the right."""
    batch = only(axes)
    return [batch, SUMMED] if batch.axis == 0 else [SUMMED, batch]


def mv(node: Any, axes: OutputAxes, records: int) -> list[InputAxis]:
    """(n, k) @ (k,): rows of the result come from rows of the matrix."""
    return [only(axes), SUMMED]


def addmm(node: Any, axes: OutputAxes, records: int) -> list[InputAxis]:
    return [broadcast_input(node, only(axes), 0), *mm(node, axes, records)]


def bmm(node: Any, axes: OutputAxes, records: int) -> list[InputAxis]:
    """(batch, n, k) @ (batch, k, p): the first axis is never mixed; the others are as for `mm`."""
    batch = only(axes)
    if batch.axis == 0:
        return [batch, batch]
    return [batch, SUMMED] if batch.axis == 1 else [SUMMED, batch]


def baddbmm(node: Any, axes: OutputAxes, records: int) -> list[InputAxis]:
    return [broadcast_input(node, only(axes), 0), *bmm(node, axes, records)]


def linear(node: Any, axes: OutputAxes, records: int) -> list[InputAxis]:
    """A fused linear layer: input, weight, bias."""
    batch = only(axes)
    if batch.axis == len(grad_shape(node, 0)) - 1:
        raise UnsupportedOp
    return _weighted(node, batch)


def trilinear(node: Any, axes: OutputAxes, records: int) -> list[InputAxis]:
    """As nn.Bilinear uses it: (rows, n), (out, n, m), (rows, m) -> (rows, out)."""
    batch = only(axes)
    expands = [tuple(getattr(node, f"_saved_expand{i}")) for i in (1, 2, 3)]
    if batch.axis != 0 or expands != [(1, 3), (0,), (1, 2)]:
        raise UnsupportedOp
    return [batch, SUMMED, batch]


# -- convolutions, norms ------------------------------------------------------------------------------------


def convolution(node: Any, axes: OutputAxes, records: int) -> list[InputAxis]:
    """Input, weight, bias; records in the first axis only."""
    batch, shape = only(axes), grad_shape(node, 0)
    if batch.axis != 0 or (wanted(node)[0] and shape[0] != input_shape(node, 0)[0]):
        raise UnsupportedOp
    return _weighted(node, batch)


def group_norm(node: Any, axes: OutputAxes, records: int) -> list[InputAxis]:
    return convolution(node, [axes[0]], records)


def layer_norm(node: Any, axes: OutputAxes, records: int) -> list[InputAxis]:
    batch = only(axes)
    if batch.axis >= len(grad_shape(node, 0)) - len(node._saved_normalized_shape):
        raise UnsupportedOp
    return _weighted(node, batch)


def batch_norm(node: Any, axes: OutputAxes, records: int) -> list[InputAxis]:
    """Channels in axis 1 are never mixed, and instance norm has the records there. Training mode mixes the others."""
    batch = axes[0]
    if batch is None or (batch.axis != 1 and node._saved_training):
        raise UnsupportedOp
    return _weighted(node, batch, BatchAxis(0, batch.inner) if batch.axis == 1 else SUMMED)


def _weighted(node: Any, batch: BatchAxis, weights: InputAxis = SUMMED) -> list[InputAxis]:
    return [batch, *(weights for _ in node.next_functions[1:])]


# -- lookups, losses, sequences -----------------------------------------------------------------------------


def nll(node: Any, axes: OutputAxes, records: int) -> list[InputAxis]:
    batch = only(axes)
    if node._saved_reduction != 0:
        raise UnsupportedOp
    return [BatchAxis(batch.axis + (batch.axis > 0), batch.inner)]


def embedding(node: Any, axes: OutputAxes, records: int) -> list[InputAxis]:
    if only(axes).axis == len(grad_shape(node, 0)) - 1 or node._saved_scale_grad_by_freq:
        raise UnsupportedOp
    return [SUMMED]


def bag(node: Any, axes: OutputAxes, records: int) -> list[InputAxis]:
    if axes[0] != BatchAxis(0) or node._saved_scale_grad_by_freq or wanted(node)[1]:
        raise UnsupportedOp
    return [SUMMED, None]


def attention(node: Any, axes: OutputAxes, records: int) -> list[InputAxis]:
    """Query, key, value (batch, heads, time, features): batch and heads are never mixed."""
    batch, shape = axes[0], grad_shape(node, 0)
    if batch is None or batch.axis >= len(shape) - 2:
        raise UnsupportedOp
    return [narrowed(batch, shape, input_shape(node, i)) if want else None for i, want in enumerate(wanted(node))]


def recurrent(node: Any, axes: OutputAxes, records: int) -> list[InputAxis]:
    """One layer of oneDNN's LSTM: outputs (time, batch, hidden), (batch, hidden), (batch, hidden)."""
    if any(batch not in (None, BatchAxis(axis)) for batch, axis in zip(axes, (1, 0, 0), strict=False)):
        raise UnsupportedOp
    return [BatchAxis(1), *(SUMMED for _ in range(4)), BatchAxis(0), BatchAxis(0)]
