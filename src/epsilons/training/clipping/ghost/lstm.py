"""Recurrent: one layer of oneDNN's LSTM, differentiated by its gates.

The fused operator tells inputs' gradients only. Its outputs are known, so all gates follow from one product; the
gradients of their inputs then come by the usual recurrence, and are all that four weights need:
W_ih: (dz, x), W_hh: (dz, previous h), both biases: dz. Gates in PyTorch's order: input, forget, cell, output.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .batch_axis import shape_into
from .per_sample_grads import Dense, Outer, Piece, Rows

if TYPE_CHECKING:
    from .graph import Place


def _tanh(x: Tensor) -> Tensor:
    """Several times faster than torch.tanh in 32 bits, and as exact against 1."""
    return (2 * x).sigmoid_().mul_(2).sub_(1) if x.dtype == torch.float32 else x.tanh()


class _Layer:
    """What one call of the operator saved, and its gates' gradients once they are known."""

    def __init__(self, node: Any) -> None:
        self.is_reversed = bool(node._saved_reverse)
        self.x = self.in_order(node._saved_input)  # (time, batch, features)
        self.h0, self.c0 = node._saved_hx_, node._saved_cx_
        self.h = self.in_order(node._saved_result0)  # (time, batch, hidden)
        self.w_ih, self.w_hh = node._saved_weight0, node._saved_weight1
        self.bias = node._saved_weight2 + node._saved_weight3 if node._saved_has_biases else None
        self.shapes = [shape_into(node, k) for k in range(3)]
        self.before: Rows | None = None
        self.inputs: Rows | None = None
        self.gates: Rows | None = None
        self.bias_piece: Dense | None = None

    def in_order(self, sequence: Tensor) -> Tensor:
        """The time steps in the order in which this layer walks them."""
        return torch.flip(sequence, (0,)) if self.is_reversed else sequence

    @torch.no_grad()
    def differentiate(self, arrived: Sequence[Tensor | None]) -> None:
        """Fill in the rows (batch, time, …): x, previous h, and the gradients of the gates' inputs."""
        if self.gates is not None:
            return
        dy, dh, dc = (
            self.x.new_zeros(shape) if g is None else g.clone() for g, shape in zip(arrived, self.shapes, strict=True)
        )
        dy = self.in_order(dy)
        previous = torch.cat([self.h0.reshape(1, *self.h.shape[1:]), self.h[:-1]])
        gates = self.x @ self.w_ih.T + previous @ self.w_hh.T
        if self.bias is not None:
            gates += self.bias
        i, f, g, o = gates.chunk(4, 2)
        i, f, g, o = i.sigmoid(), f.sigmoid(), _tanh(g), o.sigmoid()
        cell = [self.c0.reshape(self.h.shape[1:])]
        added = i * g
        for t in range(len(f)):
            cell.append(torch.addcmul(added[t], f[t], cell[-1]))
        cells = torch.stack(cell)
        shown = _tanh(cells[1:])
        # How each gate's input moves the cell, or the output.
        moves = torch.stack([g * i * (1 - i), cells[:-1] * f * (1 - f), i * (1 - g * g)], 2)  # (time, batch, 3, hidden)
        moves_o = shown * o * (1 - o)
        into_cell = o * (1 - shown * shown)
        each: list[Tensor] = []
        for t in reversed(range(len(f))):
            dh = dh + dy[t]
            dc = torch.addcmul(dc, dh, into_cell[t])
            dz_t = torch.cat([(dc.unsqueeze(1) * moves[t]).flatten(1), dh * moves_o[t]], 1)
            each.append(dz_t)
            dh, dc = dz_t @ self.w_hh, dc * f[t]
        dz = torch.stack(each[::-1])
        self.inputs, self.before = Rows(self.x.transpose(0, 1)), Rows(previous.transpose(0, 1))
        self.gates = Rows(dz.transpose(0, 1))
        self.bias_piece = Dense(dz.sum(0))


def at_input(node: Any, arrived: Sequence[Tensor | None], notes: dict[Any, Any]) -> Tensor:
    """The gradient of this layer's input (time, batch, features), from the gates'."""
    layer = _layer(node, notes)
    layer.differentiate(arrived)
    assert layer.gates is not None
    return layer.in_order(layer.gates.tensor.transpose(0, 1) @ layer.w_ih)


def _layer(node: Any, notes: dict[Any, Any]) -> _Layer:
    if node not in notes:
        notes[node] = _Layer(node)
    found: _Layer = notes[node]
    return found


def recurrent(place: Place, records: int, notes: dict[Any, Any]) -> Callable[[Sequence[Tensor | None]], Piece]:
    """One of four weights; the four share what was computed."""
    layer = _layer(place.node, notes)

    def finish(arrived: Sequence[Tensor | None]) -> Piece:
        layer.differentiate(arrived)
        assert layer.gates is not None
        assert layer.inputs is not None
        assert layer.before is not None
        if place.index == 1:
            return Outer(layer.gates, layer.inputs)
        if place.index == 2:
            return Outer(layer.gates, layer.before)
        assert layer.bias_piece is not None
        return layer.bias_piece

    return finish
