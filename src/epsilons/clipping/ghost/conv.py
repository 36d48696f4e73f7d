"""Convolutions: two kernels for per-record weight gradients. The choice depends on shapes and device alone.

windows   few input channels, few positions, or much to multiply: products with the inputs under the kernel
grouped   all else: one grouped backward convolution, one group per record

So a run can be repeated to the last bit. docs/engine.md#kernels has the rule as a table.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from ...core.modules import is_on_cpu
from ..engine import to_32_bits
from ..summing import by_feature, is_single, product
from .graph import ParameterUse
from .outer_products import OuterProductGrad, ProductSide
from .per_sample_grads import Cache, DenseGrad, OutputGrads, PerSampleGrad, PerSampleGradFn, first

# -- Windows: the inputs under a convolution's kernel, as matrices to be multiplied by the gradients of its outputs
#
# by_position  a row for each position, all entries of the kernel in it, channels innermost
# by_entry     a row for each entry of the kernel, all positions in it: long runs where there are few channels
# by_line      as by_position, but along the kernel's first axis the gradients are copied and moved: less to copy
#
# All are views of padded data. Some records' windows are copied at a time, so that they stay in cache.

#: So many values are laid out at once: on a CPU, 1 MB in 32 bits, which stays in a core's second-level cache.
VALUES_AT_ONCE = 2**18
#: On other devices, 256 MB in 32 bits: enough to keep a GPU busy, little beside its memory.
MOST_AT_ONCE = 2**26
#: Products of batches are faster if the rows of their results have a multiple of so many numbers: one vector of AVX.
VECTOR = 8
#: `by_line` multiplies by zeros as well: it was measured to be faster up to this ratio of lines of data to lines of
#: positions (3 x 3 kernels on 16 x 16 pictures and larger).
MOST_LINES = 1.125


@dataclass(frozen=True)
class Kernel:
    """A convolution's settings, one number per axis."""

    size: Sequence[int]
    stride: Sequence[int]
    padding: Sequence[int]
    dilation: Sequence[int]

    @property
    def divides(self) -> bool:
        """Whether `by_entry` takes it: strides divide sizes, and one of stride and dilation is 1."""
        axes = zip(self.size, self.stride, self.dilation, strict=True)
        return all(size % stride == 0 and 1 in (stride, dilation) for size, stride, dilation in axes)


class Windows(NamedTuple):
    """Both sides of a product over positions.

    gradients    (records, outputs, *positions)
    seen         (records, …) a view with time·k numbers per record
    grid         sizes of the grid of positions that `seen` has: with those at which gradients are 0
    is_by_entry  whether `seen` has time innermost, after the k entries
    """

    gradients: Tensor
    seen: Tensor
    grid: Sequence[int]
    is_by_entry: bool

    @property
    def time(self) -> int:
        return self.seen.shape[-1] if self.is_by_entry else math.prod(self.grid)


def by_position(data: Tensor, gradient: Tensor, kernel: Kernel) -> Windows:
    """seen: (records, *positions, *kernel, channels)."""
    data = _padded(data, kernel)
    per_record, *steps, _ = data.stride()
    over = [step * s for step, s in zip(steps, kernel.stride, strict=True)]
    within = [step * d for step, d in zip(steps, kernel.dilation, strict=True)]
    records, _, *positions = gradient.shape
    seen = data.as_strided((records, *positions, *kernel.size, data.shape[-1]), (per_record, *over, *within, 1))
    return Windows(to_32_bits(gradient), seen, positions, False)


def _padded(data: Tensor, kernel: Kernel) -> Tensor:
    """(records, *sizes, channels), contiguous."""
    around = [n for amount in reversed(kernel.padding) for n in (amount, amount)]
    data = F.pad(to_32_bits(data), around) if any(around) else to_32_bits(data)
    return data.movedim(1, -1).contiguous()


def by_entry(data: Tensor, gradient: Tensor, kernel: Kernel) -> Windows:
    """seen: (records, channels, *kernel, positions of the padded grid). Only where the kernel `divides`.

    Every stride-th row and column of the padded data is one plane. Each entry of the kernel sees one run of numbers of
    one plane. A run also covers the positions at which the kernel would stick out: there, gradients are 0.
    """
    records, channels, *sizes = data.shape
    axes = list(zip(sizes, kernel.padding, kernel.stride, strict=True))
    grid = [-(-(size + 2 * pad) // stride) for size, pad, stride in axes]  # of one plane
    behind = [n * stride - size - pad for n, (size, pad, stride) in zip(grid, axes, strict=True)]
    around = [n for pad, end in zip(reversed(kernel.padding), reversed(behind), strict=True) for n in (pad, end)]
    split = [n for pair in zip(grid, kernel.stride, strict=True) for n in pair]
    planes = F.pad(to_32_bits(data), around).reshape(records, channels, *split)
    planes = planes.permute(0, 1, *range(3, planes.ndim, 2), *range(2, planes.ndim, 2)).contiguous()
    per_record, per_channel, *steps = planes.stride()
    per_plane, along = steps[: len(grid)], steps[len(grid) :]
    shape, strides = [records, channels], [per_record, per_channel]
    for i, (size, stride) in enumerate(zip(kernel.size, kernel.stride, strict=True)):
        shape += [size // stride, stride]
        strides += [along[i] * kernel.dilation[i], per_plane[i]]
    positions = gradient.shape[2:]
    time = 1 + sum((n - 1) * step for n, step in zip(positions, along, strict=True))
    seen = planes.as_strided((*shape, time), (*strides, 1))
    return Windows(to_32_bits(gradient), seen, (positions[0], *grid[1:]), True)


class OnGrid:
    """Gradients as (records, outputs, time), with zeros at the other positions of the grid.

    They are copied for some records at a time, and only if there are other positions.
    """

    def __init__(self, windows: Windows, records: int) -> None:
        self._gradients, self._time = windows.gradients, windows.time
        outputs, *positions = self._gradients.shape[1:]
        self._is_last = self._gradients.stride(1) == 1  # channels last
        self._space: Tensor | None = None
        if positions != list(windows.grid):
            shape = (*windows.grid, outputs) if self._is_last else (outputs, *windows.grid)
            space = self._gradients.new_zeros(records, *shape)
            self._space = space.movedim(-1, 1) if self._is_last else space
            self._inside = self._space[(slice(None), slice(None), *(slice(n) for n in positions))]

    def __getitem__(self, some: slice) -> Tensor:
        gradients = self._gradients[some]
        if self._space is not None:
            self._inside[: len(gradients)].copy_(gradients)
            gradients = self._space[: len(gradients)]
        if self._is_last:
            return gradients.movedim(1, -1).reshape(len(gradients), -1, gradients.shape[1])[:, : self._time].mT
        return gradients.reshape(*gradients.shape[:2], -1)[:, :, : self._time]


def products(windows: Windows) -> Tensor:
    """(records, outputs, k): each record's own product, in 32 bits."""
    seen, time = windows.seen, windows.time
    records, outputs = windows.gradients.shape[:2]
    k = math.prod(seen.shape[1:]) // time
    entries = windows.gradients.new_empty(records, outputs, k)
    is_alone = is_single(time, outputs, k, entries)
    values = VALUES_AT_ONCE if is_on_cpu(seen) else MOST_AT_ONCE
    at_once = 1 if is_alone else max(1, min(records, values // (time * k)))
    gradients = OnGrid(windows, records if is_alone else at_once)
    space = seen.new_empty(at_once, *seen.shape[1:])
    rows = space.view(at_once, k, time).mT if windows.is_by_entry else space.view(at_once, time, k)
    if is_alone:
        own, by_time = space[0], rows[0].mT
        for into, one, numbers in zip(entries, by_feature(gradients[:records].mT), seen, strict=True):
            own.copy_(numbers)
            into.copy_(product(one, by_time))
        return entries
    # The outputs or the entries of the kernel are innermost.
    is_turned = k % VECTOR != 0 and outputs % VECTOR == 0
    turned = entries.view(records, k, outputs)
    for start in range(0, records, at_once):
        some = slice(start, start + at_once)
        left = gradients[some]
        own = rows[: len(left)]
        space[: len(left)].copy_(seen[some])
        if is_turned:
            torch.bmm(own.mT, left.mT, out=turned[some])
        else:
            torch.bmm(left, own, out=entries[some])
    return turned.mT if is_turned else entries


def is_by_line(channels: int, gradient: Tensor, kernel: Kernel) -> bool:
    """Whether `products_by_line` is used. By shapes and device alone."""
    outputs, lines, *along = gradient.shape[1:]
    size = kernel.size[0]
    seen = lines + (size - 1) * kernel.dilation[0]
    if size == 1 or kernel.stride[0] != 1 or seen > MOST_LINES * lines:
        return False
    return is_single(seen * math.prod(along), size * outputs, math.prod(kernel.size[1:]) * channels, gradient)


def products_by_line(data: Tensor, gradient: Tensor, kernel: Kernel) -> Tensor:
    """(records, kernel's first axis, outputs, k): each record's own product. k: the kernel's other axes, channels.

    All numbers under one line of the kernel are copied once, not once for each of its lines. Each line of the kernel
    has a copy of the gradients, moved to the data that it sees, with zeros at the lines that it does not see. Only
    where `is_by_line`.
    """
    padded = _padded(data, kernel)
    per_record, first, *steps, _ = padded.stride()
    outputs, lines, *along = gradient.shape[1:]
    size, width, channels = kernel.size[0], math.prod(along), padded.shape[-1]
    over = [step * s for step, s in zip(steps, kernel.stride[1:], strict=True)]
    within = [step * d for step, d in zip(steps, kernel.dilation[1:], strict=True)]
    moved_by = kernel.dilation[0] * width
    shape = (lines + (size - 1) * kernel.dilation[0], *along, *kernel.size[1:], channels)
    seen = padded.as_strided((len(padded), *shape), (per_record, first, *over, *within, 1))
    gradients = by_feature(to_32_bits(gradient).movedim(1, -1).reshape(len(padded), -1, outputs))
    own = padded.new_empty(shape)
    moved = gradients.new_zeros(size, outputs, shape[0] * width)
    into_moved = moved.as_strided((size, outputs, lines * width), (moved.stride(0) + moved_by, moved.stride(1), 1))
    left, right = moved.flatten(0, 1), own.view(shape[0] * width, -1).mT
    entries = gradients.new_empty(len(padded), len(left), len(right))
    for into, one, windows in zip(entries, gradients, seen, strict=True):
        own.copy_(windows)
        into_moved.copy_(one)
        into.copy_(product(left, right))
    return entries.view(-1, size, outputs, len(right))


# -- Convolutions: two kernels for per-record weight gradients. The choice depends on shapes and device alone

#: Input channels, or positions, up to which `windows` was measured to be faster than `grouped` (oneDNN, AVX-512).
FEW_CHANNELS = 4
FEW_POSITIONS = 64
#: The share of the work of computing all entries up to which Gram matrices of the windows were measured to be faster.
GRAM_SHARE = 0.4


def is_windowed(weight: Tensor, positions: int, is_plain: bool) -> bool:
    """Whether `windows` is used. is_plain: neither transposed nor grouped"""
    is_large = is_single(positions, math.prod(weight.shape[1:]), weight.shape[0], weight)
    return is_plain and (weight.shape[1] <= FEW_CHANNELS or positions <= FEW_POSITIONS or is_large)


@dataclass(frozen=True)
class ConvLayer:
    """One convolution's input, weight and settings."""

    data: Tensor
    weight: Tensor
    stride: Sequence[int]
    padding: Sequence[int]
    dilation: Sequence[int]
    is_transposed: bool
    groups: int
    extra: Sequence[int]  # output padding

    @classmethod
    def saved_by(cls, node: Any) -> ConvLayer:
        axes = node._saved_weight.ndim - 2
        saved = [getattr(node, f"_saved_{name}") for name in ("stride", "padding", "dilation", "output_padding")]
        # One number for all axes: padding="valid" is saved as one 0.
        stride, padding, dilation, extra = ([int(n) for n in v] * (axes if len(v) == 1 else 1) for v in saved)
        settings = stride, padding, dilation, bool(node._saved_transposed), int(node._saved_groups), extra
        return cls(node._saved_input, node._saved_weight, *settings)

    @property
    def kernel(self) -> Kernel:
        return Kernel(self.weight.shape[2:], self.stride, self.padding, self.dilation)

    def weight_grad(self, gradient: Tensor) -> PerSampleGrad:
        """gradient: (records, outputs, …)"""
        is_plain = not self.is_transposed and self.groups == 1
        if is_windowed(self.weight, math.prod(gradient.shape[2:]), is_plain):
            return self.windows(gradient)
        return self.grouped(gradient)

    def windows(self, gradient: Tensor) -> PerSampleGrad:
        outputs, channels, *kernel = self.weight.shape
        time, k = math.prod(gradient.shape[2:]), math.prod(kernel) * channels
        is_gram = time * (k + outputs) <= GRAM_SHARE * k * outputs
        if channels <= FEW_CHANNELS and self.kernel.divides and not is_gram:
            entries = products(by_entry(self.data, gradient, self.kernel))
            return DenseGrad(entries.view(-1, *self.weight.shape))
        if not is_gram and is_by_line(channels, gradient, self.kernel):
            entries = products_by_line(self.data, gradient, self.kernel)
            entries = entries.view(-1, kernel[0], outputs, *kernel[1:], channels)
            return DenseGrad(entries.movedim((2, -1), (1, 2)))
        windows = by_position(self.data, gradient, self.kernel)
        if is_gram:
            axes = (0, 1 + len(kernel), *range(1, 1 + len(kernel)))  # to (outputs, channels, *kernel)
            rows = ProductSide(windows.seen.reshape(-1, time, k))
            steps = ProductSide(windows.gradients.flatten(2).mT)
            return OuterProductGrad(steps, rows, (outputs, *kernel, channels), axes)
        entries = products(windows)
        return DenseGrad(entries.view(-1, outputs, *kernel, channels).movedim(-1, 2))

    def grouped(self, gradient: Tensor) -> DenseGrad:
        rows = len(gradient)
        weight_grad = torch.ops.aten.convolution_backward(
            to_32_bits(gradient).contiguous().view(1, -1, *gradient.shape[2:]),
            to_32_bits(self.data).contiguous().view(1, -1, *self.data.shape[2:]),
            to_32_bits(self.weight).new_empty(rows * self.weight.shape[0], *self.weight.shape[1:]),
            None,
            self.stride,
            self.padding,
            self.dilation,
            self.is_transposed,
            self.extra,
            rows * self.groups,
            [False, True, False],
        )[1]
        return DenseGrad(weight_grad.view(rows, *self.weight.shape))


def convolution(use: ParameterUse, records: int, cache: Cache) -> PerSampleGradFn:
    """Input, weight, bias. The first axis holds the records, alone or with time."""
    batch = use.batch
    layer = ConvLayer.saved_by(use.node)

    def per_sample_grad(output_grads: OutputGrads) -> PerSampleGrad:
        gradient = first(output_grads)
        if use.index == 2:
            bias_grad = gradient.flatten(2).sum(2) if gradient.ndim > 2 else gradient
            return DenseGrad(batch.by_record(bias_grad, records).sum(1))
        if len(gradient) == records:
            return layer.weight_grad(gradient)
        return DenseGrad(batch.by_record(layer.grouped(gradient).rows, records).sum(1))

    return per_sample_grad
