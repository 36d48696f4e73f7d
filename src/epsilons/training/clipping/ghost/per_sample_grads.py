"""Per-record gradients in the form in which they are cheapest, each with its norms and its weighted sum.

    DenseGrad         written out, one row per record: norm and sum are computed from the same numbers
    OuterProductGrad  sums of outer products, of linear layers: not written out where Gram matrices give the norm
    EmbeddingGrad     rows of a table: only those that occur

Every norm is an upper bound (see `norms`), and weighted sums are computed in 64 bits (see `summing`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from ..summing import FEW_ROWS, ROWS_AT_ONCE, added, is_exact, products
from .norms import LOST, OTHER_ROUNDINGS, PRODUCTS_AT_ONCE, in_memory_order, rounding, squares

#: Up to this width of both sides together, inner products are computed in 64 bits where the sum is: there they cost
#: little beside the sum.
NARROW = 1024
#: A record is done in 64 bits where its squared norm would be overstated by more than this share of it, so that a
#: contribution is at most 0.1 % too short.
TOLERATED = 2.0**-9
#: Beyond this, products of 32-bit numbers may not be finite though their norm is.
LARGEST = 2.0**126
#: So many records are written out in 64 bits at once: they are large, and rare.
RECORDS_IN_64_BITS = 8


class PerSampleGrad(Protocol):
    """The gradients of all records by one tensor: (records, *shape)."""

    def squared_norm(self) -> Tensor:
        """(records,) 64-bit, at least that of what `weighted` adds, but for rounding in 64 bits."""

    def weighted(self, factor: Tensor) -> Tensor:
        """Σ factor·gradient, 64-bit. factor: (records,) 64-bit"""

    def dense(self) -> DenseGrad:
        """Written out."""

    def blank(self, keep: Tensor) -> PerSampleGrad:
        """Zeros for the records that are not kept: 0·NaN is NaN, so a factor of 0 is not enough."""

    def transposed(self) -> PerSampleGrad:
        """Of the transposed tensor (two axes)."""


OutputGrads = Sequence[Tensor | None]  # gradients of the operator's outputs
PerSampleGradFn = Callable[[OutputGrads], PerSampleGrad]
Cache = dict[Any, Any]  # what the uses of one operator share, for one physical batch


class DenseGrad:
    """Gradients written out: (records, *shape)."""

    def __init__(self, rows: Tensor) -> None:
        self.rows = widened(rows)

    def squared_norm(self) -> Tensor:
        return squares(self.rows)

    def weighted(self, factor: Tensor) -> Tensor:
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


class GramRows:
    """(records, time, features), with the inner products of its rows, computed once."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = widened(tensor)
        self._grams: dict[bool, Tensor] = {}

    def gram(self, is_exact: bool) -> Tensor:
        """(records, time, time) 64-bit. is_exact: multiplied in 64 bits, too"""
        if is_exact not in self._grams:
            tensor = self.tensor.double() if is_exact else self.tensor
            parts = torch.split(tensor, max(1, tensor.shape[2]) if is_exact else PRODUCTS_AT_ONCE, dim=2)
            total = torch.bmm(parts[0], parts[0].mT).double()
            for part in parts[1:]:
                total += torch.bmm(part, part.mT)
            self._grams[is_exact] = total
        return self._grams[is_exact]


class OuterProductGrad:
    """Σ_t left_t ⊗ right_t per record: a matrix, or a tensor with its axes in another order than its entries.

    spread  (records,) Σ|left_t|²|right_t|², which may have cancelled; None until norms come from Gram matrices
    """

    def __init__(
        self,
        left: GramRows,
        right: GramRows,
        shape: tuple[int, ...] | None = None,
        axes: tuple[int, ...] | None = None,
    ) -> None:
        self.left, self.right = left, right
        self.shape = tuple(shape) if shape else (left.tensor.shape[2], right.tensor.shape[2])
        self.axes = axes or tuple(range(len(self.shape)))
        self.spread: Tensor | None = None
        self._risky: Tensor | None = None  # records with Gram matrices that cancel too much for 32 bits
        self._written: Tensor | None = None

    @property
    def is_written(self) -> bool:
        """Whether gradients are written out instead of Gram matrices: where that is fewer values. By shapes alone."""
        time, k, p = self._sizes
        return time > 1 and time * (k + p) > k * p

    @property
    def is_exact(self) -> bool:
        """Whether inner products are computed in 64 bits. By shapes alone."""
        time, k, p = self._sizes
        return self.left.tensor.dtype == torch.float64 or (time <= FEW_ROWS and k + p <= NARROW)

    @property
    def _sizes(self) -> tuple[int, int, int]:
        """Rows per record, and the gradient's two sides."""
        return self.left.tensor.shape[1], self.left.tensor.shape[2], self.right.tensor.shape[2]

    def squared_norm(self) -> Tensor:
        if self.left.tensor.shape[1] == 1:
            return squares(self.left.tensor) * squares(self.right.tensor)
        return squares(self._rows) if self.is_written else self._from_grams()

    def _from_grams(self) -> Tensor:
        """‖Σ_t a_t ⊗ g_t‖² = Σ_st (a_s·a_t)(g_s·g_t), plus the most that rounding may have removed from it."""
        a, g = self.left.gram(self.is_exact), self.right.gram(self.is_exact)
        squared = (a * g).sum((1, 2))
        time, k, p = self._sizes
        # The error of an inner product relative to the two lengths; and of the sum of products in 64 bits.
        of_sum = (time * time + k + p) * 2.0**-53
        of_a, of_g = of_sum, of_sum
        if not self.is_exact:
            of_a, of_g = (of_sum + rounding(min(PRODUCTS_AT_ONCE, n), self.left.tensor.dtype) for n in (k, p))
        # At least the squared lengths of the rows.
        square_a = a.diagonal(dim1=1, dim2=2) + k * LOST
        square_g = g.diagonal(dim1=1, dim2=2) + p * LOST
        square_a, square_g = square_a * (1 + 2 * of_a), square_g * (1 + 2 * of_g)
        all_a, all_g = square_a.sum(1), square_g.sum(1)
        # By Cauchy and Schwarz, of Σ_st |a_s||a_t||g_s·g_t|, and of the same with a and g exchanged.
        hidden = of_a * all_a * torch.linalg.vector_norm(g, dim=(1, 2))
        hidden += of_g * all_g * torch.linalg.vector_norm(a, dim=(1, 2)) + of_a * of_g * all_a * all_g
        # Each inner product may lack so much. Those of the other side add up to at most time times their diagonal.
        lost = time * LOST * (k * all_g + p * all_a)
        self.spread = (square_a * square_g).sum(1)
        size = (square_a * square_g).sqrt().sum(1)  # may have cancelled
        root = (squared + hidden + lost).clamp_min(0.0).sqrt()
        bound: Tensor = (root + self._of_product * size + self._lost_by_product).square()
        # A gradient of 0 is overstated only by what was lost. NaN compares as False here and shows in the norm.
        right = (1 + TOLERATED) * (squared.clamp_min(0.0) + 4 * lost + 4 * self._lost_by_product**2)
        risky = ((bound > right) | ((size > LARGEST) & size.isfinite())).nonzero()[:, 0]
        if len(risky):
            self._risky = risky
            of_product = 2 * (time + OTHER_ROUNDINGS) * 2.0**-53
            for some, written in self._in_64_bits():
                bound[some] = (written.square().sum((1, 2)).sqrt() * (1 + of_sum) + of_product * size[some]).square()
        return bound

    @property
    def _of_product(self) -> float:
        """The error of a record's part of the weighted sum, relative to what may have cancelled in it."""
        time, k, p = self._sizes
        in_64_bits = 2 * (time + OTHER_ROUNDINGS) * 2.0**-53
        if is_exact(time, k, p, self.left.tensor.dtype):
            return in_64_bits
        return rounding(min(time, ROWS_AT_ONCE), self.left.tensor.dtype) + in_64_bits

    @property
    def _lost_by_product(self) -> float:
        """The error of a record's part of the weighted sum where products are too small for 32 bits."""
        time, k, p = self._sizes
        return time * math.sqrt(k * p) * LOST

    def _in_64_bits(self) -> Iterator[tuple[Tensor, Tensor]]:
        """The records that cancel: (some of them, their gradients written out)."""
        assert self._risky is not None
        for some in torch.split(self._risky, RECORDS_IN_64_BITS):
            yield some, torch.bmm(self.left.tensor[some].double().mT, self.right.tensor[some].double())

    def weighted(self, factor: Tensor) -> Tensor:
        if self.is_written:
            return self._in_shape(added(self._rows, factor))
        if self._risky is None:
            return self._in_shape(products(self.left.tensor, self.right.tensor, factor))
        # Apart from all others: what cancels within one record must not round away what others add.
        total = products(self.left.tensor, self.right.tensor, factor.index_fill(0, self._risky, 0.0))
        for some, written in self._in_64_bits():
            total.view(-1).addmv_(written.flatten(1).T, factor[some])
        return self._in_shape(total)

    def _in_shape(self, entries: Tensor) -> Tensor:
        return entries.reshape(self.shape).permute(self.axes)

    @property
    def _rows(self) -> Tensor:
        """(records, entries) written out, once."""
        if self._written is None:
            self._written = torch.bmm(self.left.tensor.mT, self.right.tensor).flatten(1)
        return self._written

    def dense(self) -> DenseGrad:
        rows = self._rows.view(-1, *self.shape)
        return DenseGrad(rows.permute(0, *(1 + axis for axis in self.axes)))

    def blank(self, keep: Tensor) -> OuterProductGrad:
        left, right = (GramRows(blanked(rows.tensor, keep)) for rows in (self.left, self.right))
        blank = OuterProductGrad(left, right, self.shape, self.axes)
        blank.spread, blank._risky = self.spread, self._risky
        return blank

    def transposed(self) -> PerSampleGrad:
        return OuterProductGrad(self.right, self.left) if len(self.shape) == 2 else self.dense().transposed()

    def followed_by(self, other: OuterProductGrad) -> OuterProductGrad:
        """The sum of both, as one sum over more rows: layers called several times."""
        left, right = (
            GramRows(torch.cat([one.tensor, two.tensor], 1))
            for one, two in ((self.left, other.left), (self.right, other.right))
        )
        return OuterProductGrad(left, right, self.shape, self.axes)


class EmbeddingGrad:
    """Rows of a table. index: (records, time) token ids; rows: (records, time, features), summed for equal tokens."""

    def __init__(self, index: Tensor, rows: Tensor, size: int, padding: int) -> None:
        self._size, (self._records, time) = size, index.shape
        ordered, source, rows = by_token(index, rows, padding)
        is_new = torch.ones_like(ordered, dtype=torch.bool)
        is_new[:, 1:] = ordered[:, 1:] != ordered[:, :-1]
        begins = is_new.flatten().nonzero()[:, 0]  # (sums,) where the rows of each sum begin
        self._token, self._owner = ordered.flatten()[begins], begins // time
        #: One row per record and token that occurs: norm and sum are computed from these numbers.
        self._sums = F.embedding_bag(source, rows, begins, mode="sum")

    def squared_norm(self) -> Tensor:
        each = squares(self._sums)
        return each.new_zeros(self._records).index_add_(0, self._owner, each)

    def weighted(self, factor: Tensor) -> Tensor:
        scaled = self._sums.double() * factor[self._owner][:, None]
        # In 64 bits twice as fast as index_add_.
        return scaled.new_zeros(self._size, scaled.shape[1]).index_put_((self._token,), scaled, accumulate=True)

    def dense(self) -> DenseGrad:
        rows = self._sums.new_zeros(self._records * self._size, self._sums.shape[1])
        rows.index_add_(0, self._owner * self._size + self._token, self._sums)
        return DenseGrad(rows.view(self._records, self._size, -1))

    def blank(self, keep: Tensor) -> EmbeddingGrad:
        self._sums = blanked(self._sums, keep[self._owner])
        return self

    def transposed(self) -> DenseGrad:
        return self.dense().transposed()


def by_token(index: Tensor, rows: Tensor, padding: int) -> tuple[Tensor, Tensor, Tensor]:
    """Each record's tokens in order (records, time), the places of their rows, and all rows, zeros for padding."""
    if padding >= 0:
        rows = rows.masked_fill((index == padding).unsqueeze(2), 0.0)
    ordered, places = index.sort(1)
    records, time = index.shape
    source = places + time * torch.arange(records, device=index.device)[:, None]
    return ordered, source.flatten(), widened(rows).flatten(0, 1)


def widened(tensor: Tensor) -> Tensor:
    """At least 32 bits: narrower numbers are widened before anything is multiplied."""
    return tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor


def blanked(tensor: Tensor, keep: Tensor) -> Tensor:
    return torch.where(keep.reshape(-1, *(1 for _ in tensor.shape[1:])), tensor, torch.zeros_like(tensor))
