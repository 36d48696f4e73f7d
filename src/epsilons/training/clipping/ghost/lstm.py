"""LSTM: one layer of oneDNN's LSTM, differentiated by its gates.

The fused operator returns gradients of its inputs and sums for its weights. Its outputs are known, so all gates follow
from one product. The gradients of the gates' inputs, dz, come by the usual recurrence, and the four weights need only
those: W_ih: (dz, x), W_hh: (dz, previous h), both biases: dz. Gates in PyTorch's order: input, forget, cell, output.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ..products import INNER_PRODUCT
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

#: (..., k), (p, k), (p,) -> (..., p): x @ weight.T + bias
Linear = Callable[[Tensor, Tensor, Tensor | None], Tensor]


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x @ weight.T + bias, by oneDNN where x has 32 bits: on AMD processors, MKL computes at half the width of vectors.

    x: (..., k); weight: (p, k); bias: (p,)
    """
    if INNER_PRODUCT is None or x.dtype != torch.float32 or x.device.type != "cpu":
        return F.linear(x, weight, bias)
    return INNER_PRODUCT(x, weight, bias, "none", [], "")


class _Layer:
    """What one call of the operator saved, and the gradients of its gates once they are computed."""

    def __init__(self, node: Any, linear: Linear) -> None:
        self._linear = linear
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
            # What enters the gates: x and the previous h, side by side (time, batch, features + hidden).
            entering = torch.cat([self.x, torch.cat([self.h0, self.h[:-1]])], 2)
            dz = self._backward(output_grads, *self._derivatives(entering))
            sides = torch.split(entering.transpose(0, 1), [self.x.shape[2], self.h.shape[2]], 2)
            self.inputs, self.before = (ProductSide(side) for side in sides)
            self.bias_grad = DenseGrad(dz.sum(1))
            self._gates = ProductSide(dz)
        return self._gates

    def _derivatives(self, entering: Tensor) -> tuple[Sequence[Tensor], Tensor, Tensor]:
        """(by_gates, by_cell, forget gates), all (time, batch, hidden).

        by_gates  of the cell by the inputs of three gates, and of the output by the input of the last
        by_cell   of the output by the cell
        """
        gates = self._sigmoids(entering).chunk(4, 2)
        i, f, g, o = gates
        g = 2 * g - 1
        added, cells = i * g, [self.c0[0]]
        for t in range(len(f)):
            cells.append(torch.addcmul(added[t], f[t], cells[-1]))
        cell = torch.stack(cells)
        shown = (2 * cell[1:]).sigmoid_().mul_(2).sub_(1)  # tanh
        factors = (g, cell[:-1], 4 * i, shown)
        by_gates = [torch.addcmul(s, s, s, value=-1) * factor for s, factor in zip(gates, factors, strict=True)]
        return by_gates, torch.addcmul(o, o * shown, shown, value=-1), f

    def _sigmoids(self, entering: Tensor) -> Tensor:
        """(time, batch, 4·hidden) sigmoids of the gates' inputs; for the cell gate of twice its input.

        2·sigmoid(2x) - 1 is tanh(x), in 32 bits several times faster than torch.tanh with the same error relative to 1.
        Doubling is exact.
        """
        hidden = self.h.shape[2]
        scale = torch.ones(4 * hidden, 1, dtype=self.x.dtype, device=self.x.device)
        scale[2 * hidden : 3 * hidden] = 2.0
        weight = torch.cat([self.w_ih, self.w_hh], 1) * scale
        bias = None if self.bias is None else self.bias * scale[:, 0]
        return self._linear(entering, weight, bias).sigmoid_()

    def _backward(self, output_grads: OutputGrads, by_gates: Sequence[Tensor], by_cell: Tensor, f: Tensor) -> Tensor:
        """dz (batch, time, 4·hidden)."""
        dy, *last = (None if g is None else to_32_bits(g) for g in output_grads)
        dh, dc = (self.h.new_zeros(self.h.shape[1:]) if g is None else g.reshape(self.h.shape[1:]) for g in last)
        dy = None if dy is None else self.in_order(dy)
        back, steps = self.w_hh.T, list[Tensor]()
        for t in reversed(range(len(f))):
            dh = dh if dy is None else dh + dy[t]
            dc = torch.addcmul(dc, dh, by_cell[t])
            *of_cell, of_output = (part[t] for part in by_gates)
            steps.append(torch.cat([*(dc * part for part in of_cell), dh * of_output], 1))
            dh, dc = self._linear(steps[-1], back, None), dc * f[t]
        return torch.stack(steps[::-1], 1)

    def input_grad(self, output_grads: OutputGrads) -> Tensor:
        """(time, batch, features)"""
        dx = self._linear(self.gates(output_grads).tensor, self.w_ih.T, None).to(self.dtype)
        return self.in_order(dx.transpose(0, 1))


def input_grad(node: Any, output_grads: OutputGrads, cache: Cache) -> Tensor:
    """The gradient of this layer's input (time, batch, features)."""
    layer = _layer(node, cache)
    return layer.input_grad(output_grads)


def _layer(node: Any, cache: Cache) -> _Layer:
    if node not in cache:
        cache[node] = _Layer(node, cache.get(linear, linear))
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
