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
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from ..engine import HEADROOM, Persons, to_32_bits
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


def rounding(terms: int, dtype: torch.dtype) -> float:
    """By how much a sum of so many products may be too small, relative to the sum of their absolute values.

    In any order, fused or not: Higham, Accuracy and Stability of Numerical Algorithms, 2nd ed., lemma 3.1.
    """
    return (terms + OTHER_ROUNDINGS) * torch.finfo(dtype).eps / 2


def rounding_in_64_bits(time: int, k: int, p: int) -> float:
    """The same for the 64-bit sums over Gram matrices of `time` rows, with sides of k and p numbers."""
    return (time * time + k + p) * 2.0**-53


def _smallest(dtype: torch.dtype) -> float:
    """The smallest normal number: a square or product below it may become 0."""
    return SMALLEST_NORMAL if dtype == torch.float32 else torch.finfo(dtype).tiny


def squares(rows: Tensor) -> Tensor:
    """(rows,) 64-bit sums of squares of all numbers in each row: too small by less than 2⁻¹⁷ of it."""
    if _squares_in_64_bits.get():
        rows = rows.double()
    ordered = rows if rows.is_contiguous() else rows.permute(in_memory_order(rows))
    flat = ordered.reshape(rows.shape[0], math.prod(rows.shape[1:]))
    entries = flat.shape[1]
    underflow = entries * _smallest(rows.dtype)
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


class GramBound(NamedTuple):
    """Of the gradients Σ_t a_t ⊗ g_t of all records, from their Gram matrices. All but `cancelling`: (records,) 64-bit.

    squared_norm  too small by HEADROOM at most, but for those in `cancelling`
    lengths       Σ_t |a_t||g_t|, which is the norm if nothing cancels
    cancelling    which records must be computed in 64 bits: the error of their squared norm may be larger
    """

    squared_norm: Tensor
    lengths: Tensor
    cancelling: Tensor


def gram_bound(a: Tensor, g: Tensor, k: int, p: int, gram_dtype: torch.dtype, product_error: float) -> GramBound:
    """‖Σ_t a_t ⊗ g_t‖², by the formulas (1) to (6) of docs/engine.md#norms.

    a, g           (records, time, time) 64-bit Gram matrices of sides with k and p numbers in each row
    gram_dtype     what their inner products were multiplied in
    product_error  of the gradient that is added, relative to Σ_t |a_t||g_t|
    """
    time = a.shape[1]
    squared = (a * g).sum((1, 2))  # (1)
    error_a = error_g = rounding_in_64_bits(time, k, p)
    if gram_dtype != torch.float64:
        error_a, error_g = (error_a + rounding(min(PRODUCTS_AT_ONCE, n), gram_dtype) for n in (k, p))
    # (2) at least the squared length of each row
    smallest = _smallest(gram_dtype)
    square_a = (a.diagonal(dim1=1, dim2=2) + k * smallest) * (1 + 2 * error_a)
    square_g = (g.diagonal(dim1=1, dim2=2) + p * smallest) * (1 + 2 * error_g)
    all_a, all_g = square_a.sum(1), square_g.sum(1)
    # (3) what rounding of inner products may have removed from (1)
    gram_error = error_a * all_a * torch.linalg.vector_norm(g, dim=(1, 2))
    gram_error += error_g * all_g * torch.linalg.vector_norm(a, dim=(1, 2)) + error_a * error_g * all_a * all_g
    # (4) what underflow may have removed from (1), and the error of the added gradient by underflow
    gram_underflow = time * smallest * (k * all_g + p * all_a)
    product_underflow = time * math.sqrt(k * p) * SMALLEST_NORMAL
    # (5) the norm of the gradient that is added
    lengths = (square_a * square_g).sqrt().sum(1)
    root = (squared + gram_error + gram_underflow).clamp_min(0.0).sqrt()
    bound: Tensor = (root + product_error * lengths + product_underflow).square()
    # (6), with what underflow adds: a gradient of 0 has no other error. What is not finite in 32 bits may be in 64.
    squared_norm = squared.clamp_min(0.0) + 4 * gram_underflow + 4 * product_underflow**2
    is_in_place = (bound <= (1 + HEADROOM) * squared_norm) & (lengths <= LARGEST)
    return GramBound(squared_norm, lengths, (~is_in_place).nonzero()[:, 0])


# -- Per-record gradients in the form in which they are cheapest, each with its norms and its weighted sum


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
    """The gradient of an operator's first output, in 32 bits at least: nothing is multiplied or added in 16."""
    gradient = output_grads[0]
    assert gradient is not None  # `backward` fills it in
    return to_32_bits(gradient)


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


def blanked(tensor: Tensor, keep: Tensor) -> Tensor:
    return torch.where(keep.reshape(-1, *(1 for _ in tensor.shape[1:])), tensor, torch.zeros_like(tensor))
