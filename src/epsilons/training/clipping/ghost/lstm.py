"""LSTM: one layer of oneDNN's LSTM, differentiated by its gates.

The fused operator returns gradients of its inputs and sums for its weights. Its outputs are known, so all gates follow
from one product. The gradients of the gates' inputs, dz, come by the usual recurrence, and the four weights need only
those: W_ih: (dz, x), W_hh: (dz, previous h), both biases: dz. Gates in PyTorch's order: input, forget, cell, output.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .batch_axis import grad_shape
from .graph import ParameterUse
from .outer_products import OuterProductGrad, ProductSide
from .per_sample_grads import (
    Cache,
    DenseGrad,
    OutputGrads,
    PerSampleGrad,
    PerSampleGradFn,
)


def _tanh(x: Tensor) -> Tensor:
    """In 32 bits several times faster than torch.tanh, with the same error relative to 1."""
    return (2 * x).sigmoid_().mul_(2).sub_(1) if x.dtype == torch.float32 else x.tanh()


class _Layer:
    """What one call of the operator saved, and the gradients of its gates once they are computed."""

    def __init__(self, node: Any) -> None:
        self.is_reversed = bool(node._saved_reverse)
        self.x = self.in_order(node._saved_input)  # (time, batch, features)
        self.h0, self.c0 = node._saved_hx_, node._saved_cx_
        self.h = self.in_order(node._saved_result0)  # (time, batch, hidden)
        self.w_ih, self.w_hh = node._saved_weight0, node._saved_weight1
        self.bias = node._saved_weight2 + node._saved_weight3 if node._saved_has_biases else None
        self.shapes = [grad_shape(node, k) for k in range(3)]
        self._gates: ProductSide | None = None  # dz, (batch, time, 4·hidden)

    def in_order(self, sequence: Tensor) -> Tensor:
        """The time steps in the order in which this layer processes them."""
        return torch.flip(sequence, (0,)) if self.is_reversed else sequence

    @torch.no_grad()
    def gates(self, output_grads: OutputGrads) -> ProductSide:
        """dz (batch, time, 4·hidden). The first call also sets `inputs`, `before` (x, previous h) and `bias_grad`."""
        if self._gates is not None:
            return self._gates
        dy, dh, dc = (
            self.x.new_zeros(shape) if g is None else g.clone()
            for g, shape in zip(output_grads, self.shapes, strict=True)
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
        # The derivatives of the cell by the inputs of three gates (time, batch, 3, hidden), and of the output.
        by_gates = torch.stack([g * i * (1 - i), cells[:-1] * f * (1 - f), i * (1 - g * g)], 2)
        by_output_gate = shown * o * (1 - o)
        by_cell = o * (1 - shown * shown)
        steps: list[Tensor] = []
        for t in reversed(range(len(f))):
            dh = dh + dy[t]
            dc = torch.addcmul(dc, dh, by_cell[t])
            dz_t = torch.cat([(dc.unsqueeze(1) * by_gates[t]).flatten(1), dh * by_output_gate[t]], 1)
            steps.append(dz_t)
            dh, dc = dz_t @ self.w_hh, dc * f[t]
        dz = torch.stack(steps[::-1])
        self.inputs, self.before = ProductSide(self.x.transpose(0, 1)), ProductSide(previous.transpose(0, 1))
        self.bias_grad = DenseGrad(dz.sum(0))
        self._gates = ProductSide(dz.transpose(0, 1))
        return self._gates


def input_grad(node: Any, output_grads: OutputGrads, cache: Cache) -> Tensor:
    """The gradient of this layer's input (time, batch, features)."""
    layer = _layer(node, cache)
    return layer.in_order(layer.gates(output_grads).tensor.transpose(0, 1) @ layer.w_ih)


def _layer(node: Any, cache: Cache) -> _Layer:
    if node not in cache:
        cache[node] = _Layer(node)
    layer: _Layer = cache[node]
    return layer


def recurrent(use: ParameterUse, records: int, cache: Cache) -> PerSampleGradFn:
    """One of four weights, which share what was computed."""
    layer = _layer(use.node, cache)

    def per_sample_grad(output_grads: OutputGrads) -> PerSampleGrad:
        gates = layer.gates(output_grads)
        if use.index <= 2:
            return OuterProductGrad(gates, layer.inputs if use.index == 1 else layer.before)
        return layer.bias_grad

    return per_sample_grad
