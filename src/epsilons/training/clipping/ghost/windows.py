"""Windows: the inputs under a convolution's kernel, as matrices to be multiplied by the gradients of its outputs.

by_position  a row for each position, all entries of the kernel in it, channels innermost
by_entry     a row for each entry of the kernel, all positions in it: long runs where there are few channels

Both are views of padded data. `products` copies some records' windows at a time, so that they stay in cache.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from ..products import is_single, product
from .per_sample_grads import to_32_bits

#: So many values are laid out at once: on a CPU, 1 MB in 32 bits, which stays in a core's second-level cache.
VALUES_AT_ONCE = {"cpu": 2**18}
#: On other devices, 256 MB in 32 bits: enough to keep a GPU busy, little beside its memory.
MOST_AT_ONCE = 2**26


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

    gradients    (records, outputs, time)
    seen         (records, …) a view with time·k numbers per record
    is_by_entry  whether `seen` has time innermost, after the k entries
    """

    gradients: Tensor
    seen: Tensor
    is_by_entry: bool


def by_position(data: Tensor, gradient: Tensor, kernel: Kernel) -> Windows:
    """seen: (records, *positions, *kernel, channels)."""
    around = [n for amount in reversed(kernel.padding) for n in (amount, amount)]
    data = F.pad(to_32_bits(data), around) if any(around) else to_32_bits(data)
    data = data.movedim(1, -1).contiguous()
    per_record, *steps, _ = data.stride()
    over = [step * s for step, s in zip(steps, kernel.stride, strict=True)]
    within = [step * d for step, d in zip(steps, kernel.dilation, strict=True)]
    records, outputs, *positions = gradient.shape
    seen = data.as_strided((records, *positions, *kernel.size, data.shape[-1]), (per_record, *over, *within, 1))
    gradients = to_32_bits(gradient).movedim(1, -1).reshape(records, -1, outputs)
    return Windows(gradients.mT, seen, False)


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
    return Windows(_on_grid(to_32_bits(gradient), grid, time), seen, True)


def _on_grid(gradient: Tensor, grid: Sequence[int], time: int) -> Tensor:
    """(records, outputs, time): the gradients at the positions of the padded grid."""
    records, outputs, *positions = gradient.shape
    shape = (positions[0], *grid[1:])
    if gradient.stride(1) == 1:  # channels last
        rows = gradient.movedim(1, -1)
        if tuple(positions) != shape:
            rows = gradient.new_zeros(records, *shape, outputs)
            rows[(slice(None), *(slice(n) for n in positions))] = gradient.movedim(1, -1)
        return rows.reshape(records, -1, outputs)[:, :time].mT
    columns = gradient
    if tuple(positions) != shape:
        columns = gradient.new_zeros(records, outputs, *shape)
        columns[(slice(None), slice(None), *(slice(n) for n in positions))] = gradient
    return columns.reshape(records, outputs, -1)[:, :, :time]


def products(gradients: Tensor, seen: Tensor, is_by_entry: bool) -> Tensor:
    """(records, outputs, k): each record's own product, in 32 bits. Arguments as in `Windows`."""
    records, outputs, time = gradients.shape
    k = math.prod(seen.shape[1:]) // time
    entries = gradients.new_empty(records, outputs, k)
    is_alone = is_single(time, outputs, k, gradients)
    values = VALUES_AT_ONCE.get(seen.device.type, MOST_AT_ONCE)
    at_once = 1 if is_alone else max(1, min(records, values // (time * k)))
    space = seen.new_empty(at_once, *seen.shape[1:])
    rows = space.view(at_once, k, time).mT if is_by_entry else space.view(at_once, time, k)
    if is_alone:
        own, by_time = space[0], rows[0].mT
        for into, one, windows in zip(entries, gradients, seen, strict=True):
            own.copy_(windows)
            into.copy_(product(one, by_time))
        return entries
    for start in range(0, records, at_once):
        some = slice(start, start + at_once)
        count = len(seen[some])
        space[:count].copy_(seen[some])
        torch.bmm(gradients[some], rows[:count], out=entries[some])
    return entries


__all__ = ["Kernel", "Windows", "by_entry", "by_position", "products"]
