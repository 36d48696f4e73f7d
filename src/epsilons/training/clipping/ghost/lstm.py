"""LSTM: one layer of oneDNN's LSTM, differentiated by its gates.

The fused operator returns gradients of its inputs and sums for its weights. Its outputs are known, so all gates follow
from one product. The gradients of the gates' inputs, dz, come by the usual recurrence, and the four weights need only
those: W_ih: (dz, x), W_hh: (dz, previous h), both biases: dz. Gates in PyTorch's order: input, forget, cell, output.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from .graph import ParameterUse
from .outer_products import OuterProductGrad, ProductSide
from .per_sample_grads import (
    Cache,
    DenseGrad,
    OutputGrads,
    PerSampleGrad,
    PerSampleGradFn,
    to_32_bits,
)


class _Layer:
    """What one call of the operator saved, and the gradients of its gates once they are computed."""

    def __init__(self, node: Any) -> None:
        self.is_reversed = bool(node._saved_reverse)
        self.x = self.in_order(to_32_bits(node._saved_input))  # (time, batch, features)
        self.h = self.in_order(to_32_bits(node._saved_result0))  # (time, batch, hidden)
        first = (1, *self.h.shape[1:])
        self.h0, self.c0 = (to_32_bits(t).reshape(first) for t in (node._saved_hx_, node._saved_cx_))
        self.w_ih, self.w_hh = to_32_bits(node._saved_weight0), to_32_bits(node._saved_weight1)
        self.bias = to_32_bits(node._saved_weight2 + node._saved_weight3) if node._saved_has_biases else None
        self.dtype = node._saved_input.dtype
        self._gates: ProductSide | None = None  # dz, (batch, time, 4·hidden)

    def in_order(self, sequence: Tensor) -> Tensor:
        """The time steps in the order in which this layer processes them."""
        return torch.flip(sequence, (0,)) if self.is_reversed else sequence

    @torch.no_grad()
    def gates(self, output_grads: OutputGrads) -> ProductSide:
        """dz (batch, time, 4·hidden). The first call also sets `inputs`, `before` (x, previous h) and `bias_grad`."""
        if self._gates is None:
            previous = torch.cat([self.h0, self.h[:-1]])
            dz = self._backward(output_grads, *self._derivatives(previous))
            self.inputs, self.before = ProductSide(self.x.transpose(0, 1)), ProductSide(previous.transpose(0, 1))
            self.bias_grad = DenseGrad(dz.sum(0))
            self._gates = ProductSide(dz.transpose(0, 1))
        return self._gates

    def _derivatives(self, previous: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(by_gates, by_cell, forget gates), all (time, batch, ...).

        by_gates  (..., 4·hidden) of the cell by the inputs of three gates, and of the output by the input of the last
        by_cell   (..., hidden) of the output by the cell
        """
        gates = self._sigmoids(previous)
        i, f, g, o = gates.chunk(4, 2)
        g = 2 * g - 1
        cells = torch.cat([self.c0, i * g])
        for t in range(len(f)):
            cells[t + 1].addcmul_(f[t], cells[t])
        shown = (2 * cells[1:]).sigmoid_().mul_(2).sub_(1)  # tanh
        by_gates = torch.addcmul(gates, gates, gates, value=-1)  # s - s²
        for part, factor in zip(by_gates.chunk(4, 2), (g, cells[:-1], 4 * i, shown), strict=True):
            part.mul_(factor)
        return by_gates, torch.addcmul(o, o * shown, shown, value=-1), f

    def _sigmoids(self, previous: Tensor) -> Tensor:
        """(time, batch, 4·hidden) sigmoids of the gates' inputs; for the cell gate of twice its input.

        2·sigmoid(2x) - 1 is tanh(x), in 32 bits several times faster than torch.tanh with the same error relative to 1.
        Doubling is exact.
        """
        hidden = self.h.shape[2]
        scale = torch.ones(4 * hidden, 1, dtype=self.x.dtype, device=self.x.device)
        scale[2 * hidden : 3 * hidden] = 2.0
        weight = torch.cat([self.w_ih, self.w_hh], 1) * scale
        bias = None if self.bias is None else self.bias * scale[:, 0]
        return linear(torch.cat([self.x, previous], 2), weight, bias).sigmoid_()

    def _backward(self, output_grads: OutputGrads, by_gates: Tensor, by_cell: Tensor, f: Tensor) -> Tensor:
        """dz (time, batch, 4·hidden), in place of `by_gates`."""
        dy, dh, dc = (None if g is None else to_32_bits(g) for g in output_grads)
        dh, dc = (self.x.new_zeros(self.h.shape[1:]) if g is None else g.reshape(self.h.shape[1:]) for g in (dh, dc))
        dc = dc.clone()
        dy = None if dy is None else self.in_order(dy)
        *of_cell, of_output = by_gates.chunk(4, 2)
        back = self.w_hh.T
        for t in reversed(range(len(f))):
            dh = dh if dy is None else dh + dy[t]
            dc.addcmul_(dh, by_cell[t])
            for part in of_cell:
                part[t].mul_(dc)
            of_output[t].mul_(dh)
            dh = linear(by_gates[t], back)
            dc.mul_(f[t])
        return by_gates


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x @ weight.T + bias, by oneDNN where x has 32 bits: on AMD processors, MKL computes at half the width of vectors.

    x: (..., k); weight: (p, k); bias: (p,)
    """
    if x.dtype != torch.float32 or x.device.type != "cpu":
        return F.linear(x, weight, bias)
    result: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
    return result


def input_grad(node: Any, output_grads: OutputGrads, cache: Cache) -> Tensor:
    """The gradient of this layer's input (time, batch, features)."""
    layer = _layer(node, cache)
    dz = layer.gates(output_grads).tensor.transpose(0, 1)
    return layer.in_order(linear(dz, layer.w_ih.T)).to(layer.dtype)


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
