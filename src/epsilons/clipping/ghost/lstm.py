"""LSTM: one layer of oneDNN's LSTM, differentiated by its gates.

The fused operator returns gradients of its inputs and sums for its weights. Its outputs are known, so all gates follow
from one product. The gradients of the gates' inputs, dz, come by the usual recurrence, and the four weights need only
those: W_ih: (dz, x), W_hh: (dz, previous h), both biases: dz. Gates in PyTorch's order: input, forget, cell, output.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ..engine import to_32_bits
from ..summing import INNER_PRODUCT, has_inner_product
from .graph import ParameterUse
from .outer_products import Joint, ProductSide
from .per_sample_grads import Cache, DenseGrad, OutputGrads, PerSampleGrad, PerSampleGradFn

#: Gates that oneDNN saved are used if the outputs follow from them within so much. An output is at most 1. Rounding of
#: the cell over `time` steps is at most about time·2⁻²⁴.
SAME = 1e-3


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x @ weight.T + bias, by oneDNN where x has 32 bits: on AMD processors, MKL computes at half the width of vectors.

    x: (..., k); weight: (p, k); bias: (p,)
    """
    if INNER_PRODUCT is None or not has_inner_product(x):
        return F.linear(x, weight, bias)
    return INNER_PRODUCT(x, weight, bias, "none", [], "")


def _saved_gates(space: Tensor, time: int, batch: int, hidden: int) -> Sequence[Tensor] | None:
    """The four gates, (time, batch, hidden), that oneDNN keeps for its backward pass; None where they cannot be.

    oneDNN documents no layout. This is that of its 32-bit kernels: a row for each step and record, which begins the
    space, and has padding against conflicts in the cache (`get_good_ld` in src/cpu/rnn/rnn_utils.cpp, oneDNN 3). So
    `_is_product` checks what is read.
    """
    row = -(-4 * hidden // 16) * 16
    row += 16 if row % 256 == 0 else 0
    if space.dtype != torch.uint8 or space.numel() % 4 or space.numel() < 4 * time * batch * row:
        return None
    rows = space.view(torch.float32).as_strided((time, batch, 4, hidden), (batch * row, row, hidden, 1))
    return rows.unbind(2)


def _is_product(h: Tensor, o: Tensor, shown: Tensor) -> bool:
    """Whether h is o·shown, up to rounding, wherever it is finite: then all four gates are what they should be."""
    wrong = torch.addcmul(h, o, shown, value=-1).abs_()
    return bool(wrong.amax() <= SAME) or bool(((wrong <= SAME) | ~h.isfinite()).all())


def _differentiate(gates: Sequence[Tensor], cell: Tensor, shown: Tensor, into: Tensor) -> None:
    """Of one step: the cell by the inputs of three gates, the output by the last. into: (batch, 4, hidden)"""
    i, f, g, o = gates
    by_i, by_f, by_g, by_o = into.unbind(1)
    sigmoid_backward = torch.ops.aten.sigmoid_backward.grad_input
    sigmoid_backward(g, i, grad_input=by_i)
    sigmoid_backward(cell, f, grad_input=by_f)
    torch.ops.aten.tanh_backward.grad_input(i, g, grad_input=by_g)
    sigmoid_backward(shown, o, grad_input=by_o)


def _tanh(twice: Tensor) -> Tensor:
    """tanh(x) from 2x, as 2·sigmoid(2x) - 1: much faster than torch.tanh, the same error relative to 1."""
    return twice.sigmoid().mul_(2).sub_(1)


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
        self._saved = _saved_gates(node._saved_result3, *self.h.shape)
        self._gates: ProductSide | None = None  # dz, (batch, time, 4·hidden)

    def in_order(self, sequence: Tensor) -> Tensor:
        """The time steps in the order in which this layer processes them."""
        return torch.flip(sequence, (0,)) if self.is_reversed else sequence

    @torch.no_grad()
    def gates(self, output_grads: OutputGrads) -> ProductSide:
        """dz (batch, time, 4·hidden). The first call also sets `weight_grads` (by W_ih, W_hh) and `bias_grad`."""
        if self._gates is None:
            entering = self._entering()
            dz = self._backward(output_grads, *self._states(entering))
            self._gates, self._saved = ProductSide(dz), None
            joint = Joint(self._gates, ProductSide(entering), [self.x.shape[2], self.h.shape[2]])
            self.weight_grads = joint.grads()
            self.bias_grad = DenseGrad(dz.sum(1))
        return self._gates

    def _entering(self) -> Tensor:
        """What enters the gates: x and the previous h, side by side (batch, time, features + hidden)."""
        features = self.x.shape[2]
        entering = self.h.new_empty(self.h.shape[1], len(self.h), features + self.h.shape[2])
        x, before = entering.transpose(0, 1).tensor_split([features], 2)
        x.copy_(self.x)
        before[:1].copy_(self.h0)
        before[1:].copy_(self.h[:-1])
        return entering

    def _states(self, entering: Tensor) -> tuple[Sequence[Tensor], Tensor, Tensor]:
        """(the four gates, the cell before each step, tanh of the cell after it), all (time, batch, hidden)."""
        if self._saved is not None:
            cell, shown = self._cells(self._saved)
            if _is_product(self.h, self._saved[3], shown):
                return self._saved, cell, shown
        gates = self._computed_gates(entering)
        return (gates, *self._cells(gates))

    def _cells(self, gates: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """(the cell before each step, tanh of the cell after it)."""
        i, f, g, _ = gates
        cells = torch.cat([self.c0, i * g])
        for t in range(len(f)):
            cells[t + 1].addcmul_(f[t], cells[t])
        return cells[:-1], _tanh(2 * cells[1:])

    def _computed_gates(self, entering: Tensor) -> Sequence[Tensor]:
        """All four, (time, batch, hidden), from the inputs of the layer and its outputs."""
        hidden = self.h.shape[2]
        scale = torch.ones(4 * hidden, 1, dtype=self.x.dtype, device=self.x.device)
        scale[2 * hidden : 3 * hidden] = 2.0  # for the tanh of the cell gate; doubling is exact
        weight = torch.cat([self.w_ih, self.w_hh], 1) * scale
        bias = None if self.bias is None else self.bias * scale[:, 0]
        i, f, g, o = linear(entering, weight, bias).transpose(0, 1).chunk(4, 2)
        return i.sigmoid(), f.sigmoid(), _tanh(g), o.sigmoid()

    def _backward(self, output_grads: OutputGrads, gates: Sequence[Tensor], cell: Tensor, shown: Tensor) -> Tensor:
        """dz (batch, time, 4·hidden). Arguments as `_states` returns them."""
        dy, *last = (None if g is None else to_32_bits(g) for g in output_grads)
        time, batch, hidden = self.h.shape
        dh, dc = (self.h.new_zeros(batch, hidden) if g is None else g.reshape(batch, hidden) for g in last)
        dy = None if dy is None else self.in_order(dy)
        back, by_cell = self.w_hh.T, torch.ops.aten.tanh_backward(gates[3], shown)
        dz, one = self.h.new_empty(batch, time, 4, hidden), self.h.new_empty(batch, 4, hidden)
        for t in reversed(range(time)):
            dh = dh if dy is None else dh + dy[t]
            dc = torch.addcmul(dc, dh, by_cell[t])
            _differentiate([gate[t] for gate in gates], cell[t], shown[t], one)
            one[:, :3].mul_(dc[:, None])
            one[:, 3].mul_(dh)
            dz[:, t] = one  # `one` has no gaps, so the product is faster
            dh, dc = linear(one.flatten(1), back, None), dc * gates[1][t]
        return dz.flatten(2)

    def input_grad(self, output_grads: OutputGrads) -> Tensor:
        """(time, batch, features)"""
        dx = linear(self.gates(output_grads).tensor, self.w_ih.T, None).to(self.dtype)
        return self.in_order(dx.transpose(0, 1))


def input_grad(node: Any, output_grads: OutputGrads, cache: Cache) -> Tensor:
    """The gradient of this layer's input (time, batch, features)."""
    return _layer(node, cache).input_grad(output_grads)


def _layer(node: Any, cache: Cache) -> _Layer:
    if node not in cache:
        cache[node] = _Layer(node)
    layer: _Layer = cache[node]
    return layer


def recurrent(use: ParameterUse, records: int, cache: Cache) -> PerSampleGradFn:
    """One of four weights, which share what was computed."""
    layer = _layer(use.node, cache)

    def per_sample_grad(output_grads: OutputGrads) -> PerSampleGrad:
        layer.gates(output_grads)
        return layer.weight_grads[use.index - 1] if use.index <= 2 else layer.bias_grad

    return per_sample_grad
