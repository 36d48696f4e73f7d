"""Per-record gradients in the form in which they are cheapest, each with its norms and its weighted sum.

    DenseGrad         here: all entries, one row per record; norm and sum are computed from the same numbers
    OuterProductGrad  `outer_products`: of linear layers
    TableGrad         `embeddings`: rows of a table, only those that occur

Each can add the rows of persons: then it has one gradient per person. The error of every norm is bounded (see below),
and weighted sums are computed in 64 bits (see `summing`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from ..engine import Persons, to_32_bits
from ..summing import added

# -- Norms: sums of squares computed in 32 bits, with a bound on their error for any data and any order of additions
#
# A norm that is understated lets a contribution exceed its clip norm. `HEADROOM` covers what may be missing from a
# squared norm, here and in all other engines. A kernel whose error may be larger leaves the record to 64 bits
# (docs/engine.md#norms).

#: Sums of squares in 32 bits run over this many numbers; from there on, 64 bits. They are too small by 72·2⁻²⁴ at most.
SQUARES_AT_ONCE = 64
#: Inner products run over this many numbers in 32 bits: longer, so that the products still run at full speed.
PRODUCTS_AT_ONCE = 128
#: Further roundings: squares or products, roots, second-order terms, and the additions in 64 bits.
OTHER_ROUNDINGS = 8
#: The smallest normal 32-bit number. A square or product below it may become 0. One side of a gradient can be as small
#: as the other is large, so this is added before sides are multiplied.
SMALLEST_NORMAL = 2.0**-126
#: Beyond this, products of 32-bit numbers may not be finite though their norm is.
LARGEST = 2.0**126

_squares_in_64_bits: ContextVar[bool] = ContextVar("_squares_in_64_bits", default=False)


@contextmanager
def squares_in_64_bits() -> Iterator[None]:
    """Inside, `squares` multiplies in 64 bits: in 32, the square of a number above 2⁶⁴ is not finite."""
    token = _squares_in_64_bits.set(True)
    try:
        yield
    finally:
        _squares_in_64_bits.reset(token)


N = TypeVar("N", float, Tensor)


def rounding(terms: N, dtype: torch.dtype) -> N:
    """By how much a sum of so many products may be too small, relative to the sum of their absolute values.

    In any order, fused or not: Higham, Accuracy and Stability of Numerical Algorithms, 2nd ed., lemma 3.1.
    """
    return (terms + OTHER_ROUNDINGS) * torch.finfo(dtype).eps / 2


def rounding_in_64_bits(time: int, k: N, p: N) -> N:
    """The same for the 64-bit sums over Gram matrices of `time` rows, with sides of k and p numbers."""
    return (time * time + k + p) * 2.0**-53


def smallest_normal(dtype: torch.dtype) -> float:
    """The smallest normal number: a square or product below it may become 0."""
    return SMALLEST_NORMAL if dtype == torch.float32 else torch.finfo(dtype).tiny


def squares(rows: Tensor) -> Tensor:
    """(rows,) 64-bit sums of squares of all numbers in each row: too small by less than 2⁻¹⁷ of it."""
    if _squares_in_64_bits.get():
        rows = rows.double()
    ordered = rows if rows.is_contiguous() else rows.permute(in_memory_order(rows))
    flat = ordered.reshape(rows.shape[0], math.prod(rows.shape[1:]))
    entries = flat.shape[1]
    underflow = entries * smallest_normal(rows.dtype)
    if entries <= SQUARES_AT_ONCE:
        short: Tensor = torch.linalg.vector_norm(flat, dim=1).double().square() + underflow
        return short
    full = entries // SQUARES_AT_ONCE * SQUARES_AT_ONCE
    parts = flat[:, :full].view(flat.shape[0], -1, SQUARES_AT_ONCE)
    total: Tensor = torch.linalg.vector_norm(parts, dim=2).double().square().sum(1)
    if full < entries:
        total += torch.linalg.vector_norm(flat[:, full:], dim=1).double().square()
    return total + underflow


def in_memory_order(rows: Tensor) -> list[int]:
    """The axes: the first, then by stride, widest first, so that flattening copies nothing."""
    return [0, *sorted(range(1, rows.ndim), key=rows.stride, reverse=True)]


# -- Per-record gradients in the form in which they are cheapest, each with its norms and its weighted sum


class ClippableGrad(Protocol):
    """Gradients by one tensor: (records or persons, *shape). The methods may be called in any order."""

    def squared_norm(self) -> Tensor:
        """(records,) 64-bit squared norms of the gradients that `weighted` adds, too small by `HEADROOM` at most."""

    def weighted(self, factor: Tensor) -> Tensor:
        """Σ factor·gradient, 64-bit. The only place where a factor multiplies a gradient. factor: (records,) 64-bit"""

    def add_weighted(self, factor: Tensor, total: Tensor) -> None:
        """Add `weighted` to a contiguous total of the gradient's shape, where possible without memory for another."""
        total += self.weighted(factor)

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
    """The gradient of an operator's first output, in 32 bits at least: nothing is multiplied or added in 16."""
    gradient = output_grads[0]
    assert gradient is not None  # `backward` fills it in
    return to_32_bits(gradient)


class DenseGrad(PerSampleGrad):
    """All entries: (records, *shape)."""

    def __init__(self, rows: Tensor) -> None:
        self.rows = to_32_bits(rows)

    def squared_norm(self) -> Tensor:
        return squares(self.rows)

    def weighted(self, factor: Tensor) -> Tensor:
        return self.in_shape(added(self.entries, factor))

    @property
    def _order(self) -> list[int]:
        return list(range(self.rows.ndim)) if self.rows.is_contiguous() else in_memory_order(self.rows)

    @property
    def entries(self) -> Tensor:
        """(records, entries), in the order of memory."""
        return self.rows.permute(self._order).reshape(len(self.rows), math.prod(self.rows.shape[1:]))

    def in_shape(self, entries: Tensor) -> Tensor:
        """A sum over the records, (entries,), in the shape of the gradient."""
        axes = self._order
        total = entries.view([self.rows.shape[axis] for axis in axes[1:]])
        return total.permute([axes.index(axis) - 1 for axis in range(1, len(axes))])

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


def blanked(tensor: Tensor, keep: Tensor) -> Tensor:
    return torch.where(keep.reshape(-1, *(1 for _ in tensor.shape[1:])), tensor, torch.zeros_like(tensor))
