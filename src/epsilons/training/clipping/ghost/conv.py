"""Convolutions: two ways to a record's weight gradient; the rule between them goes by shape alone (see `ways`).

windows   few input channels or few positions: what the kernel saw at each position, laid out in rows, and a product
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

from ..ways import Ways, made_up
from .per_sample_grads import Dense, Outer, Piece, Rows, wide

if TYPE_CHECKING:
    from .graph import Place

#: Input channels, or positions, up to which `windows` was faster than `grouped` (oneDNN, AVX-512).
FEW_CHANNELS = 4
FEW_POSITIONS = 64
#: The share of a written-out product's work up to which Gram matrices of what was seen were faster.
CHEAPER = 0.4
#: What the kernel saw is laid out for so many values at once: on a CPU they stay in a core's cache until they are used.
VALUES_AT_ONCE = {"cpu": 2**18}
MOST_AT_ONCE = 2**26


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
            possible["windows"] = float(records * positions * k)
            usual = "windows" if self.weight.shape[1] <= FEW_CHANNELS or positions <= FEW_POSITIONS else usual

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

    def windows(self, gradient: Tensor) -> Piece:
        """Rows per position: (outputs), and (*kernel, channels), which lie together where channels come last."""
        outputs, channels, *kernel = self.weight.shape
        around = [n for amount in reversed(self.padding) for n in (amount, amount)]
        data = F.pad(wide(self.data), around).movedim(1, -1).contiguous()
        per_record, *steps, _ = data.stride()
        over = [step * s for step, s in zip(steps, self.stride, strict=True)]
        within = [step * d for step, d in zip(steps, self.dilation, strict=True)]
        records, _, *positions = gradient.shape
        seen = data.as_strided((records, *positions, *kernel, channels), (per_record, *over, *within, 1))
        time, k = math.prod(positions), math.prod(kernel) * channels
        gradients = wide(gradient).movedim(1, -1).reshape(records, time, outputs)
        axes = (0, 1 + len(kernel), *range(1, 1 + len(kernel)))  # to (outputs, channels, *kernel)
        if time * (k + outputs) <= CHEAPER * k * outputs:
            return Outer(Rows(gradients), Rows(seen.reshape(records, time, k)), (outputs, *kernel, channels), axes)
        written = gradients.new_empty(records, outputs, k)
        few = max(1, VALUES_AT_ONCE.get(data.device.type, MOST_AT_ONCE) // (time * k))
        for start in range(0, records, few):
            part = slice(start, start + few)
            torch.bmm(gradients[part].mT, seen[part].reshape(-1, time, k), out=written[part])
        return Dense(written.view(records, outputs, *kernel, channels).movedim(-1, 2))

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
