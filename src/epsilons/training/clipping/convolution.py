"""Convolutions: three ways to a record's weight gradient; the rule between them goes by shape alone (see `ways`).

patches   few positions, wide layers: products of unfolded patches, their norms from Gram matrices
across    one or few input channels: a grouped *forward* convolution, inputs with gradients
grouped   all else: one grouped backward convolution, a group per record
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional as F

from .pieces import Dense, Outer, Piece, Rows, wide
from .ways import Ways, made_up

if TYPE_CHECKING:
    from .tracing import Place

#: Input channels up to which `across` was faster than `grouped` (oneDNN, AVX-512), and the share of a written-out
#: product's work up to which Gram matrices were.
FEW_CHANNELS = 3
CHEAPER = 0.4


class _Layer:
    """The settings of one convolution, as its operator saved them."""

    def __init__(self, node: Any) -> None:
        self.data: Tensor = node._saved_input
        self.weight: Tensor = node._saved_weight
        self.stride, self.padding, self.dilation = (
            [int(n) for n in getattr(node, f"_saved_{name}")] for name in ("stride", "padding", "dilation")
        )
        self.is_transposed, self.groups = bool(node._saved_transposed), int(node._saved_groups)
        self.extra = [int(n) for n in node._saved_output_padding]

    def piece(self, gradient: Tensor, ways: Ways) -> Piece:
        """(records, outputs, …) -> the weight's gradients, the way that was chosen."""
        is_plain = not self.is_transposed and self.groups == 1
        records, positions = len(gradient), math.prod(gradient.shape[2:])
        k, p = self.weight[0].numel(), len(self.weight)
        usual, possible = "grouped", {"grouped": float(records * k * p)}
        if is_plain:
            possible["across"] = float(records * k * p)
            usual = "across" if self.weight.shape[1] <= FEW_CHANNELS else usual
        if is_plain and gradient.ndim == 4:
            possible["patches"] = float(records * positions * k)
            usual = "patches" if positions * (k + p) <= CHEAPER * k * p else usual

        def attempt(way: str) -> None:
            other = copy.copy(self)
            other.data = made_up(self.data)
            piece: Piece = getattr(other, way)(made_up(gradient))
            piece.squared_norm()
            piece.weighted(torch.ones(records, dtype=torch.float64, device=gradient.device))

        described: list[Sequence[int]] = [self.data.shape[1:], gradient.shape[1:], self.weight.shape]
        described += [self.stride, self.padding, self.dilation, [self.groups, int(self.is_transposed)]]
        layer = "convolution " + " ".join("x".join(map(str, each)) for each in described)
        way = ways.choose(layer, usual, possible, attempt, gradient.device.type)
        found: Piece = getattr(self, way)(gradient)
        return found

    def patches(self, gradient: Tensor) -> Piece:
        patches = F.unfold(
            wide(self.data), self.weight.shape[2:], tuple(self.dilation), tuple(self.padding), tuple(self.stride)
        )
        return Outer(Rows(gradient.flatten(2).mT.contiguous()), Rows(patches.mT.contiguous()), self.weight.shape)

    def across(self, gradient: Tensor) -> Piece:
        """(channels, records, …) by (records·outputs, 1, …): what was stride is dilation here."""
        records, outputs, *positions = gradient.shape
        channels, *kernel = self.weight.shape[1:]
        around = [n for amount in reversed(self.padding) for n in (amount, amount)]
        data = F.pad(self.data, around).transpose(0, 1).contiguous()
        convolve = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}[len(kernel)]
        filters = gradient.contiguous().view(records * outputs, 1, *positions)
        found = convolve(data, filters, stride=self.dilation, dilation=self.stride, groups=records)
        for axis, size in enumerate(kernel):
            found = found.narrow(2 + axis, 0, size)
        return Dense(found.reshape(channels, records, outputs, *kernel).movedim(0, 2).contiguous())

    def grouped(self, gradient: Tensor) -> Piece:
        rows = len(gradient)
        found = torch.ops.aten.convolution_backward(
            gradient.contiguous().view(1, -1, *gradient.shape[2:]),
            self.data.contiguous().view(1, -1, *self.data.shape[2:]),
            self.weight.new_empty(rows * self.weight.shape[0], *self.weight.shape[1:]),
            None,
            self.stride,
            self.padding,
            self.dilation,
            self.is_transposed,
            self.extra,
            rows * self.groups,
            [False, True, False],
        )[1]
        return Dense(found.view(rows, *self.weight.shape))


def convolution(place: Place, records: int, notes: dict[Any, Any]) -> Callable[[Sequence[Tensor | None]], Piece]:
    """Input, weight, bias; the records stand in the first axis, alone or with time."""
    lane = place.lanes[0]
    assert lane is not None
    own = lane
    layer = _Layer(place.node)

    def finish(arrived: Sequence[Tensor | None]) -> Piece:
        gradient = arrived[0]
        assert gradient is not None
        if place.index == 2:
            each = gradient.flatten(2).sum(2) if gradient.ndim > 2 else gradient
            return Dense(own.by_record(each, records).sum(1))
        if len(gradient) == records:
            return layer.piece(gradient, notes.get(Ways) or Ways())
        return Dense(own.by_record(layer.grouped(gradient).dense().rows, records).sum(1))

    return finish
