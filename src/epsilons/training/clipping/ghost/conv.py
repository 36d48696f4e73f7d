"""Convolutions: two kernels for per-record weight gradients. The choice depends on shapes and device alone.

windows   few input channels, few positions, or much to multiply: products with the inputs under the kernel
grouped   all else: one grouped backward convolution, one group per record

So a run can be repeated to the last bit. docs/engine.md#kernels has the rule as a table.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..products import is_single
from .graph import ParameterUse
from .outer_products import OuterProductGrad, ProductSide
from .per_sample_grads import (
    Cache,
    DenseGrad,
    OutputGrads,
    PerSampleGrad,
    PerSampleGradFn,
    first,
)
from .windows import Kernel, by_entry, by_position, is_by_line, products, products_by_line

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
