"""Per-record gradients in the form in which they are cheapest, each with its norms and its weighted sum.

    DenseGrad         all entries, one row per record: norm and sum are computed from the same numbers
    OuterProductGrad  sums of outer products, of linear layers: entries are not computed where Gram matrices (the inner
                      products of the rows of each side) give the norm
    EmbeddingGrad     rows of a table: only those that occur

Each can merge the rows of persons: then it has one gradient per person. Every norm is an upper bound (see `norms`), and
weighted sums are computed in 64 bits (see `summing`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from ..persons import SizeGroup
from ..summing import FEW_ROWS, ROWS_AT_ONCE, added, product_in_64_bits, products
from .norms import (
    OTHER_ROUNDINGS,
    PRODUCTS_AT_ONCE,
    GramBound,
    gram_bound,
    in_memory_order,
    rounding,
    rounding_in_64_bits,
    squares,
)

#: Up to this width of both sides together, inner products are computed in 64 bits where the sum is: there they cost
#: little beside the sum.
NARROW = 1024
#: The gradients of so many records that cancel are computed at once: they are large, and rare.
RECORDS_IN_64_BITS = 8

#: (records, time) values -> sorted rows, and the places of their values.
Sort = Callable[[Tensor], tuple[Tensor, Tensor]]


class ClippableGrad(Protocol):
    """Gradients by one tensor: (records or persons, *shape). The methods may be called in any order."""

    def squared_norm(self) -> Tensor:
        """(records,) 64-bit upper bounds on the squared norms of the gradients that `weighted` adds.

        Rounding in 64 bits may make a bound too small by less than 2⁻²¹ of it; `SHRINK` covers that.
        """

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

    def merged(self, group: SizeGroup) -> PerSampleGrad:
        """Of the persons in this group: the sum of the gradients of each person's rows."""


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

    def merged(self, group: SizeGroup) -> DenseGrad:
        axes = in_memory_order(self.rows)
        rows = group.split(self.rows.permute(axes)).sum(1)
        return DenseGrad(rows.permute([axes.index(axis) for axis in range(len(axes))]))


class ProductSide:
    """One side of a sum of outer products: (records, time, features), and its Gram matrices, computed once."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = to_32_bits(tensor)
        self._grams: dict[bool, Tensor] = {}
        self._merged: dict[int, ProductSide] = {}  # by the number of rows of each person

    def gram(self, in_64_bits: bool) -> Tensor:
        """(records, time, time) 64-bit: inner products of the rows. in_64_bits: whether they are multiplied so, too"""
        if in_64_bits not in self._grams:
            tensor = self.tensor.double() if in_64_bits else self.tensor
            parts = torch.split(tensor, max(1, tensor.shape[2]) if in_64_bits else PRODUCTS_AT_ONCE, dim=2)
            total = torch.bmm(parts[0], parts[0].mT).double()
            for part in parts[1:]:
                total += torch.bmm(part, part.mT)
            self._grams[in_64_bits] = total
        return self._grams[in_64_bits]

    def merged(self, group: SizeGroup) -> ProductSide:
        """(persons, size·time, features) for this group: the steps of all rows of a person, once for all weights."""
        if group.size not in self._merged:
            self._merged[group.size] = ProductSide(group.split(self.tensor).flatten(1, 2))
        return self._merged[group.size]


class OuterProductGrad:
    """Σ_t left_t ⊗ right_t per record: a matrix, or a tensor with its axes in another order than its entries."""

    def __init__(
        self,
        left: ProductSide,
        right: ProductSide,
        shape: tuple[int, ...] | None = None,
        axes: tuple[int, ...] | None = None,
    ) -> None:
        self.left, self.right = left, right
        self.shape = tuple(shape) if shape else (left.tensor.shape[2], right.tensor.shape[2])
        self.axes = axes or tuple(range(len(self.shape)))
        self._bound: GramBound | None = None
        self._rows: Tensor | None = None

    @property
    def is_dense(self) -> bool:
        """Whether all entries are computed, and no Gram matrices: where that is fewer values. By shapes alone."""
        time, k, p = self._sizes
        return time > 1 and time * (k + p) > k * p

    @property
    def uses_grams(self) -> bool:
        """Whether norms come from Gram matrices. By shapes alone."""
        return self._sizes[0] > 1 and not self.is_dense

    @property
    def gram_in_64_bits(self) -> bool:
        """Whether inner products are computed in 64 bits. By shapes alone."""
        time, k, p = self._sizes
        return self._dtype == torch.float64 or (time <= FEW_ROWS and k + p <= NARROW)

    @property
    def _sizes(self) -> tuple[int, int, int]:
        """Rows per record, and the gradient's two sides."""
        return self.left.tensor.shape[1], self.left.tensor.shape[2], self.right.tensor.shape[2]

    @property
    def _dtype(self) -> torch.dtype:
        return self.left.tensor.dtype

    def squared_norm(self) -> Tensor:
        if self.uses_grams:
            return self.bound.squared_norm
        return squares(self.rows) if self.is_dense else squares(self.left.tensor) * squares(self.right.tensor)

    def weighted(self, factor: Tensor) -> Tensor:
        if self.is_dense:
            return self._in_shape(added(self.rows, factor))
        cancelling = self.bound.cancelling if self.uses_grams else None
        return self._in_shape(weighted_products(self.left.tensor, self.right.tensor, factor, cancelling))

    @property
    def bound(self) -> GramBound:
        """The norms from Gram matrices, once; in 64 bits for the records that cancel."""
        if self._bound is None:
            time, k, p = self._sizes
            a, g = (side.gram(self.gram_in_64_bits) for side in (self.left, self.right))
            gram_dtype = torch.float64 if self.gram_in_64_bits else self._dtype
            bound = gram_bound(a, g, k, p, gram_dtype, self._product_error)
            for some, rows in _in_64_bits(self.left.tensor, self.right.tensor, bound.cancelling):
                norm = rows.square().sum((1, 2)).sqrt() * (1 + rounding_in_64_bits(time, k, p))
                bound.squared_norm[some] = (norm + _error_in_64_bits(time) * bound.lengths[some]).square()
            self._bound = bound
        return self._bound

    @property
    def _product_error(self) -> float:
        """The error of a record's part of the weighted sum, relative to Σ_t |left_t||right_t|."""
        time, k, p = self._sizes
        if product_in_64_bits(time, k, p, self._dtype):
            return _error_in_64_bits(time)
        return rounding(min(time, ROWS_AT_ONCE), self._dtype) + _error_in_64_bits(time)

    def _in_shape(self, entries: Tensor) -> Tensor:
        return entries.reshape(self.shape).permute(self.axes)

    @property
    def rows(self) -> Tensor:
        """(records, entries), all computed, once."""
        if self._rows is None:
            self._rows = torch.bmm(self.left.tensor.mT, self.right.tensor).flatten(1)
        return self._rows

    def dense(self) -> DenseGrad:
        rows = self.rows.view(-1, *self.shape)
        return DenseGrad(rows.permute(0, *(1 + axis for axis in self.axes)))

    def blank(self, keep: Tensor) -> OuterProductGrad:
        left, right = (ProductSide(blanked(side.tensor, keep)) for side in (self.left, self.right))
        blank = OuterProductGrad(left, right, self.shape, self.axes)
        blank._bound = self._bound
        return blank

    def transposed(self) -> PerSampleGrad:
        return OuterProductGrad(self.right, self.left) if len(self.shape) == 2 else self.dense().transposed()

    def followed_by(self, other: OuterProductGrad) -> OuterProductGrad:
        """The sum of both, as one sum over more rows: layers called several times."""
        left, right = (
            ProductSide(torch.cat([one.tensor, two.tensor], 1))
            for one, two in ((self.left, other.left), (self.right, other.right))
        )
        return OuterProductGrad(left, right, self.shape, self.axes)

    def merged(self, group: SizeGroup) -> OuterProductGrad:
        return OuterProductGrad(self.left.merged(group), self.right.merged(group), self.shape, self.axes)


def weighted_products(left: Tensor, right: Tensor, factor: Tensor, cancelling: Tensor | None = None) -> Tensor:
    """As `products`. The records in `cancelling` are computed in 64 bits, apart from all others.

    What cancels within one record must not round away what others add.
    """
    if cancelling is None or len(cancelling) == 0:
        return products(left, right, factor)
    total = products(left, right, factor.index_fill(0, cancelling, 0.0))
    for some, rows in _in_64_bits(left, right, cancelling):
        total.view(-1).addmv_(rows.flatten(1).T, factor[some])
    return total


def _in_64_bits(left: Tensor, right: Tensor, records: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """(some of these records, their gradients in 64 bits)."""
    for some in torch.split(records, RECORDS_IN_64_BITS):
        if len(some):
            yield some, torch.bmm(left[some].double().mT, right[some].double())


def _error_in_64_bits(time: int) -> float:
    """The error of a sum of `time` outer products in 64 bits, relative to Σ_t |left_t||right_t|."""
    return 2 * (time + OTHER_ROUNDINGS) * 2.0**-53


class TokenSums(NamedTuple):
    """One row for each record and token that occurs: norm and sum are computed from these numbers.

    token, owner  (sums,) which token of which record
    rows          (sums, features)
    """

    token: Tensor
    owner: Tensor
    rows: Tensor


class EmbeddingGrad:
    """Rows of a table. index: (records, time) token ids; rows: (records, time, features), summed for equal tokens."""

    def __init__(self, index: Tensor, rows: Tensor, size: int, padding: int) -> None:
        self._index, self._rows, self._size, self._padding = index, rows, size, padding
        self._records, self._time = index.shape
        self._known: TokenSums | None = None

    @property
    def sums(self) -> TokenSums:
        """The sums, computed once."""
        if self._known is None:
            self._known = self._computed()
        return self._known

    def _computed(self) -> TokenSums:
        ordered, source, rows = by_token(self._index, self._rows, self._padding)
        is_new = torch.ones_like(ordered, dtype=torch.bool)
        is_new[:, 1:] = ordered[:, 1:] != ordered[:, :-1]
        begins = is_new.flatten().nonzero()[:, 0]  # (sums,) where the rows of each sum begin
        sums = F.embedding_bag(source, rows, begins, mode="sum")
        return TokenSums(ordered.flatten()[begins], begins // self._time, sums)

    def squared_norm(self) -> Tensor:
        squared = squares(self.sums.rows)
        return squared.new_zeros(self._records).index_add_(0, self.sums.owner, squared)

    def weighted(self, factor: Tensor) -> Tensor:
        token, owner, rows = self.sums
        scaled = rows.double() * factor[owner][:, None]
        # In 64 bits twice as fast as index_add_.
        return scaled.new_zeros(self._size, scaled.shape[1]).index_put_((token,), scaled, accumulate=True)

    def dense(self) -> DenseGrad:
        token, owner, sums = self.sums
        rows = sums.new_zeros(self._records * self._size, sums.shape[1])
        rows.index_add_(0, owner * self._size + token, sums)
        return DenseGrad(rows.view(self._records, self._size, -1))

    def blank(self, keep: Tensor) -> EmbeddingGrad:
        blank = type(self)(self._index, self._rows, self._size, self._padding)
        blank._known = self.sums._replace(rows=blanked(self.sums.rows, keep[self.sums.owner]))
        return blank

    def transposed(self) -> DenseGrad:
        return self.dense().transposed()

    def merged(self, group: SizeGroup) -> EmbeddingGrad:
        index, rows = (group.split(t).flatten(1, 2) for t in (self._index, self._rows))
        return type(self)(index, rows, self._size, self._padding)


def by_token(index: Tensor, rows: Tensor, padding: int, sort: Sort | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Each record's tokens in order (records, time), the places of their rows, and all rows, zeros for padding."""
    if padding >= 0:
        rows = rows.masked_fill((index == padding).unsqueeze(2), 0.0)
    ordered, places = (sort or sort_rows)(index)
    records, time = index.shape
    source = places + time * torch.arange(records, device=index.device)[:, None]
    return ordered, source.flatten(), to_32_bits(rows).flatten(0, 1)


def stable_sort(index: Tensor) -> tuple[Tensor, Tensor]:
    """Sorted rows and the places of their values; equal values keep their order."""
    values, places = torch.sort(index, dim=1, stable=True)
    return values, places


def sort_rows(index: Tensor) -> tuple[Tensor, Tensor]:
    """As `stable_sort`. On a CPU, NumPy sorts value · time + place in a quarter of the time."""
    time = index.shape[1]
    if index.device.type != "cpu" or index.numel() == 0 or int(index.max()) >= 2**62 // time:
        return stable_sort(index)
    keys = torch.from_numpy(np.sort((index.long() * time + torch.arange(time)).numpy(), axis=1))
    return keys // time, keys % time


def to_32_bits(tensor: Tensor) -> Tensor:
    """The tensor with at least 32 bits: narrower numbers are converted before anything is multiplied."""
    return tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor


def blanked(tensor: Tensor, keep: Tensor) -> Tensor:
    return torch.where(keep.reshape(-1, *(1 for _ in tensor.shape[1:])), tensor, torch.zeros_like(tensor))
