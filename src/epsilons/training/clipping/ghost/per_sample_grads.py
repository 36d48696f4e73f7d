"""Per-record gradients in the form in which they are cheapest, each with its norms and its weighted sum.

    DenseGrad         here: all entries, one row per record; norm and sum are computed from the same numbers
    OuterProductGrad  `outer_products`: of linear layers
    EmbeddingGrad     `embeddings`: rows of a table, only those that occur

Each can add the rows of persons: then it has one gradient per person. The error of every norm is bounded (see `norms`),
and weighted sums are computed in 64 bits (see `summing`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from ..persons import Persons
from ..summing import added
from .norms import in_memory_order, squares


class ClippableGrad(Protocol):
    """Gradients by one tensor: (records or persons, *shape). The methods may be called in any order."""

    def squared_norm(self) -> Tensor:
        """(records,) 64-bit squared norms of the gradients that `weighted` adds, too small by `HEADROOM` at most."""

    def weighted(self, factor: Tensor) -> Tensor:
        """Σ factor·gradient, 64-bit. The only place where a factor multiplies a gradient. factor: (records,) 64-bit"""

    def blank(self, keep: Tensor) -> ClippableGrad:
        """Zeros for the records that are not kept: 0·NaN is NaN, so a factor of 0 is not enough."""


class PerSampleGrad(ClippableGrad, Protocol):
    """The gradients of all records by one tensor, which can be transformed before they are clipped."""

    def dense(self) -> DenseGrad:
        """The same gradients with all entries computed."""

    def transposed(self) -> PerSampleGrad:
        """Of the transposed tensor (two axes)."""

    def of_persons(self, persons: Persons) -> ClippableGrad:
        """(persons, *shape): the sum of the gradients of each person's rows."""


OutputGrads = Sequence[Tensor | None]  # gradients of the operator's outputs
PerSampleGradFn = Callable[[OutputGrads], PerSampleGrad]
Cache = dict[Any, Any]  # what the uses of one operator share, for one physical batch


def first(output_grads: OutputGrads) -> Tensor:
    """The gradient of an operator's first output."""
    gradient = output_grads[0]
    assert gradient is not None  # `backward` fills it in
    return gradient


class DenseGrad:
    """All entries: (records, *shape)."""

    def __init__(self, rows: Tensor) -> None:
        self.rows = to_32_bits(rows)

    def squared_norm(self) -> Tensor:
        return squares(self.rows)

    def weighted(self, factor: Tensor) -> Tensor:
        if self.rows.is_contiguous():
            return self._added(self.rows.reshape(self.rows.shape[0], -1), factor).view(self.rows.shape[1:])
        axes = in_memory_order(self.rows)
        rows = self.rows.permute(axes)
        total = self._added(rows.reshape(len(rows), -1), factor).view(rows.shape[1:])
        return total.permute([axes.index(axis) - 1 for axis in range(1, len(axes))])

    def _added(self, rows: Tensor, factor: Tensor) -> Tensor:
        return added(rows, factor)

    def dense(self) -> DenseGrad:
        return self

    def blank(self, keep: Tensor) -> DenseGrad:
        return DenseGrad(blanked(self.rows, keep))

    def transposed(self) -> DenseGrad:
        return DenseGrad(self.rows.transpose(1, 2) if self.rows.ndim == 3 else self.rows)  # vectors stay the same

    def reshaped(self, shape: tuple[int, ...]) -> DenseGrad:
        return DenseGrad(self.rows.reshape(len(self.rows), *shape))

    def plus(self, other: DenseGrad) -> DenseGrad:
        return DenseGrad(self.rows + other.rows)

    def of_persons(self, persons: Persons) -> DenseGrad:
        axes = in_memory_order(self.rows)
        rows = persons.summed(self.rows.permute(axes))
        return DenseGrad(rows.permute([axes.index(axis) for axis in range(len(axes))]))


def to_32_bits(tensor: Tensor) -> Tensor:
    """The tensor with at least 32 bits: narrower numbers are converted before anything is multiplied."""
    return tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor


def blanked(tensor: Tensor, keep: Tensor) -> Tensor:
    return torch.where(keep.reshape(-1, *(1 for _ in tensor.shape[1:])), tensor, torch.zeros_like(tensor))
