"""Activation products: the gradients of linear layers' inputs, by oneDNN inside torch's backward pass.

torch computes them with MKL, which on AMD processors multiplies at half the width of vectors (see `..products`). Here a
dispatch mode replaces these products, and nothing else, while the gradients of activations are computed.

Nothing is decided by the number of rows. So a record's gradients are multiplied by the same kernel in whatever physical
batch it is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ..products import has_inner_product, product
from .batch_axis import grad_shape, input_shape, operator
from .graph import Trace

#: {operator: the number of its left factor among its inputs}
_LEFT = {"Mm": 0, "Addmm": 1}
#: Multiplications per record from which the mode is used. It costs about 4 µs an operator of the pass; 32 records of
#: this size take 0.4 ms less with oneDNN.
ENOUGH = 2**20


def fast_products(found: Trace, losses: Tensor) -> AbstractContextManager[Any]:
    """For torch's backward pass through this graph; does nothing where little is multiplied for each record."""
    if not has_inner_product(losses):
        return nullcontext()
    factors = {
        node: i
        for reading in found.readers.values()
        for node, i in reading
        if operator(node) in _LEFT and i >= _LEFT[operator(node)]  # not the bias
    }
    total = sum(_multiplications(node, i) for node, i in factors.items())
    return _ByOneDnn() if total >= ENOUGH * len(losses) else nullcontext()  # type: ignore[no-untyped-call]


def _multiplications(node: Any, index: int) -> int:
    """Of the product of which this input is a factor."""
    is_left = index == _LEFT[operator(node)]
    return math.prod(grad_shape(node, 0)) * input_shape(node, index)[1 if is_left else 0]


class _ByOneDnn(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """All products of two 32-bit matrices on a CPU."""

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten.mm.default and not types and not kwargs:
            left, right = args
            if left.dtype == right.dtype and has_inner_product(left) and left.numel() and right.numel():
                return product(left, right.T)
        return func(*args, **(kwargs or {}))


__all__ = ["ENOUGH", "fast_products"]
