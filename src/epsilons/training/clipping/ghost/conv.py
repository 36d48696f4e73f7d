"""Convolutions: two kernels for per-record weight gradients. The choice depends on shapes alone.

windows   few input channels or few positions: the inputs under the kernel at each position, as rows of a product
grouped   all else: one grouped backward convolution, one group per record

So a run can be repeated to the last bit. On a machine with AVX-512 (90 GFLOPS a thread in MKL's products, 70 in
oneDNN's convolutions) the choice is the faster one, or within 20 % of it, for every convolution of the MNIST CNN, the
CIFAR CNN and ResNet18, except ResNet18's smallest with channels last.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
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
    first,
    to_32_bits,
)

#: Input channels, or positions, up to which `windows` was measured to be faster than `grouped` (oneDNN, AVX-512).
FEW_CHANNELS = 4
FEW_POSITIONS = 64
#: The share of the work of computing all entries up to which Gram matrices of the windows were measured to be faster.
GRAM_SHARE = 0.4
#: So many values are laid out at once: on a CPU, 1 MB in 32 bits, which stays in a core's second-level cache.
VALUES_AT_ONCE = {"cpu": 2**18}
#: On other devices, 256 MB in 32 bits: enough to keep a GPU busy, little beside its memory.
MOST_AT_ONCE = 2**26


def is_windowed(weight: Tensor, positions: int, is_plain: bool) -> bool:
    """Whether `windows` is used. is_plain: neither transposed nor grouped"""
    return is_plain and (weight.shape[1] <= FEW_CHANNELS or positions <= FEW_POSITIONS)


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
        stride, padding, dilation, extra = (
            [int(n) for n in getattr(node, f"_saved_{name}")]
            for name in ("stride", "padding", "dilation", "output_padding")
        )
        settings = stride, padding, dilation, bool(node._saved_transposed), int(node._saved_groups), extra
        return cls(node._saved_input, node._saved_weight, *settings)

    def weight_grad(self, gradient: Tensor) -> PerSampleGrad:
        """gradient: (records, outputs, …)"""
        is_plain = not self.is_transposed and self.groups == 1
        if is_windowed(self.weight, math.prod(gradient.shape[2:]), is_plain):
            return self.windows(gradient)
        return self.grouped(gradient)

    def windows(self, gradient: Tensor) -> PerSampleGrad:
        """One row per position: (outputs), and (*kernel, channels), adjacent in memory where channels come last."""
        outputs, channels, *kernel = self.weight.shape
        around = [n for amount in reversed(self.padding) for n in (amount, amount)]
        data = F.pad(to_32_bits(self.data), around).movedim(1, -1).contiguous()
        per_record, *steps, _ = data.stride()
        over = [step * s for step, s in zip(steps, self.stride, strict=True)]
        within = [step * d for step, d in zip(steps, self.dilation, strict=True)]
        records, _, *positions = gradient.shape
        seen = data.as_strided((records, *positions, *kernel, channels), (per_record, *over, *within, 1))
        time, k = math.prod(positions), math.prod(kernel) * channels
        gradients = to_32_bits(gradient).movedim(1, -1).reshape(records, time, outputs)
        if time * (k + outputs) <= GRAM_SHARE * k * outputs:
            axes = (0, 1 + len(kernel), *range(1, 1 + len(kernel)))  # to (outputs, channels, *kernel)
            rows = ProductSide(seen.reshape(records, time, k))
            return OuterProductGrad(ProductSide(gradients), rows, (outputs, *kernel, channels), axes)
        entries = gradients.new_empty(records, outputs, k)
        at_once = max(1, VALUES_AT_ONCE.get(data.device.type, MOST_AT_ONCE) // (time * k))
        for start in range(0, records, at_once):
            part = slice(start, start + at_once)
            torch.bmm(gradients[part].mT, seen[part].reshape(-1, time, k), out=entries[part])
        return DenseGrad(entries.view(records, outputs, *kernel, channels).movedim(-1, 2))

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
