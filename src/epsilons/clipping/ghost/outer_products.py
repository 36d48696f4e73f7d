"""Sums of outer products, of linear layers: entries are not computed where Gram matrices give the norm.

Gram matrices are the inner products of the rows of each side.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from ...core.modules import is_on_cpu
from .. import summing
from ..engine import HEADROOM, Persons, SizeGroup, to_32_bits
from .graph import Trace
from .operator_rules import grad_shape, input_shape, operator
from .per_sample_grads import (
    LARGEST,
    OTHER_ROUNDINGS,
    PRODUCTS_AT_ONCE,
    SMALLEST_NORMAL,
    ClippableGrad,
    DenseGrad,
    PerSampleGrad,
    blanked,
    rounding,
    rounding_in_64_bits,
    smallest_normal,
    squares,
)

#: Up to this width of both sides together, inner products are computed in 64 bits where the sum is: there they cost
#: little beside the sum.
NARROW = 1024
#: All entries are computed if they are at most so many times the numbers of both sides. Their products are needed for
#: the sum in any case, so entries cost one more pass through memory, and Gram matrices many multiplications. The limit
#: is there for memory.
MOST_ENTRIES = 2.75
#: The gradients of so many records that cancel are computed at once: they are large, and rare.
RECORDS_IN_64_BITS = 8


class GramBound(NamedTuple):
    """Of the gradients Σ_t a_t ⊗ g_t of all records, from their Gram matrices. All but `cancelling`: (records,) 64-bit.

    squared_norm  too small by HEADROOM at most, but for those in `cancelling`
    lengths       Σ_t |a_t||g_t|, which is the norm if nothing cancels
    cancelling    which records must be computed in 64 bits: the error of their squared norm may be larger
    """

    squared_norm: Tensor
    lengths: Tensor
    cancelling: Tensor


class ProductSide:
    """One side of a sum of outer products: (records, time, features), and its Gram matrices, computed once."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = to_32_bits(tensor)
        self._grams: dict[bool, Tensor] = {}
        self._merged: dict[SizeGroup, ProductSide] = {}

    def gram(self, in_64_bits: bool) -> Tensor:
        """(records, time, time) 64-bit: inner products of the rows. in_64_bits: whether they are multiplied so, too"""
        if in_64_bits not in self._grams:
            tensor = self.tensor.double() if in_64_bits else self.tensor
            self._grams[in_64_bits] = _inner_products(
                tensor, max(1, tensor.shape[2]) if in_64_bits else PRODUCTS_AT_ONCE
            )
        return self._grams[in_64_bits]

    def merged(self, group: SizeGroup) -> ProductSide:
        """(persons, size·time, features) for this group: the steps of all rows of a person, once for all weights."""
        if group not in self._merged:
            self._merged[group] = ProductSide(group.split(self.tensor).flatten(1, 2))
        return self._merged[group]


def _inner_products(rows: Tensor, width: int) -> Tensor:
    """(records, time, time) 64-bit: inner products of the rows, added from parts of so many features.

    On a GPU, many parts side by side are one product.
    """
    records, time, _ = rows.shape
    at_once = width if is_on_cpu(rows) else width * max(1, summing.MOST_AT_ONCE // (records * time * time))
    total = rows.new_zeros(records, time, time, dtype=torch.float64)
    for part in torch.split(rows, at_once, 2):
        if part.shape[2] <= width:
            total += torch.bmm(part, part.mT)
        else:
            wide = F.pad(part, (0, -part.shape[2] % width)).view(records, time, -1, width)
            side = wide.transpose(1, 2).flatten(0, 1)
            total += torch.bmm(side, side.mT).view(records, -1, time, time).sum(1, dtype=torch.float64)
    return total


class OuterProductGrad(PerSampleGrad):
    """Σ_t left_t ⊗ right_t per record: a matrix, or a tensor with its axes in another order than its entries."""

    def __init__(
        self,
        left: ProductSide,
        right: ProductSide,
        shape: tuple[int, ...] | None = None,
        axes: tuple[int, ...] | None = None,
        bound: GramBound | None = None,
    ) -> None:
        self.left, self.right = left, right
        self.shape = tuple(shape) if shape else (left.tensor.shape[2], right.tensor.shape[2])
        self.axes = axes or tuple(range(len(self.shape)))
        self._bound = bound
        self._rows: Tensor | None = None

    @property
    def time(self) -> int:
        """Rows per record."""
        return self.left.tensor.shape[1]

    @property
    def is_dense(self) -> bool:
        """Whether all entries are computed, and no Gram matrices: where they are few. By shapes alone."""
        time, k, p = self._sizes
        return time > 1 and k * p <= MOST_ENTRIES * time * (k + p)

    @property
    def uses_grams(self) -> bool:
        """Whether norms come from Gram matrices. By shapes alone."""
        return self._sizes[0] > 1 and not self.is_dense

    @property
    def gram_in_64_bits(self) -> bool:
        """Whether inner products are computed in 64 bits. By shapes alone."""
        time, k, p = self._sizes
        return self._dtype == torch.float64 or (time <= summing.FEW_ROWS and k + p <= NARROW)

    @property
    def is_product_in_64_bits(self) -> bool:
        """Whether `weighted` multiplies in 64 bits, where products of 32-bit numbers are exact. By shapes alone."""
        return not self.is_dense and summing.product_in_64_bits(*self._sizes, self._dtype)

    @property
    def cancelling(self) -> Tensor:
        """The records that are computed in 64 bits, apart from all others."""
        if self.uses_grams:
            return self.bound.cancelling
        return torch.zeros(0, dtype=torch.int64, device=self.left.tensor.device)

    @property
    def _sizes(self) -> tuple[int, int, int]:
        """Rows per record, and the gradient's two sides."""
        return self.time, self.left.tensor.shape[2], self.right.tensor.shape[2]

    @property
    def _dtype(self) -> torch.dtype:
        return self.left.tensor.dtype

    def squared_norm(self) -> Tensor:
        if self.uses_grams:
            return self.bound.squared_norm
        return squares(self.entries) if self.is_dense else squares(self.left.tensor) * squares(self.right.tensor)

    def weighted(self, factor: Tensor) -> Tensor:
        if self.is_dense:
            return self.in_shape(summing.added(self.entries, factor))
        return self.in_shape(weighted_products(self.left.tensor, self.right.tensor, factor, self.cancelling))

    def add_weighted(self, factor: Tensor, total: Tensor) -> None:
        is_matrix = self.axes == tuple(range(len(self.shape))) and total.is_contiguous()
        if self.is_product_in_64_bits and not len(self.cancelling) and is_matrix:
            rows = total.view(self.left.tensor.shape[2], -1)
            summing.add_products(self.left.tensor, self.right.tensor, factor, rows)
        else:
            super().add_weighted(factor, total)

    @property
    def bound(self) -> GramBound:
        """The norms from Gram matrices, once; in 64 bits for the records that need it."""
        if self._bound is None:
            set_bounds([self])
            assert self._bound is not None
        return self._bound

    def set_bound(self, bound: GramBound) -> None:
        """Keep this bound, with the norms of records that cancel computed in 64 bits."""
        time, k, p = self._sizes
        for some, rows in _in_64_bits(self.left.tensor, self.right.tensor, bound.cancelling):
            norm = rows.square().sum((1, 2)).sqrt() * (1 + rounding_in_64_bits(time, k, p))
            left, right = (side.tensor[some].double().norm(dim=2) for side in (self.left, self.right))
            bound.squared_norm[some] = (norm + _error_in_64_bits(time) * (left * right).sum(1)).square()
        self._bound = bound

    @property
    def squared_lengths(self) -> Tensor:
        """(records,) Σ_t |left_t|²|right_t|², about: the rounding of autograd's sum over time grows with it."""
        left, right = (side.tensor.double().square().sum(2) for side in (self.left, self.right))
        return (left * right).sum(1)

    @property
    def _product_error(self) -> float:
        """The error of a record's part of the weighted sum, relative to Σ_t |left_t||right_t|."""
        time, k, p = self._sizes
        if summing.product_in_64_bits(time, k, p, self._dtype):
            return _error_in_64_bits(time)
        return rounding(min(time, summing.ROWS_AT_ONCE), self._dtype) + _error_in_64_bits(time)

    def in_shape(self, entries: Tensor) -> Tensor:
        """Of (k, p) or flat entries."""
        return entries.reshape(self.shape).permute(self.axes)

    @property
    def entries(self) -> Tensor:
        """(records, entries), all computed, once."""
        if self._rows is None:
            self._rows = summing.products_of_all(self.left.tensor, self.right.tensor).flatten(1)
        return self._rows

    def dense(self) -> DenseGrad:
        rows = self.entries.view(-1, *self.shape)
        return DenseGrad(rows.permute(0, *(1 + axis for axis in self.axes)))

    def blank(self, keep: Tensor) -> OuterProductGrad:
        left, right = (ProductSide(blanked(side.tensor, keep)) for side in (self.left, self.right))
        blank = OuterProductGrad(left, right, self.shape, self.axes, self._bound)
        if self._rows is not None:  # those of the norm: in another layout, products are rounded differently
            blank._rows = blanked(self._rows, keep)
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
        """Of the persons in this group: their rows' products are one sum over more steps."""
        return OuterProductGrad(self.left.merged(group), self.right.merged(group), self.shape, self.axes)

    def of_persons(self, persons: Persons) -> ClippableGrad:
        if len(persons.groups) == 1:
            return self.merged(persons.groups[0])
        return OuterProductsBySize(self, persons, [self.merged(group) for group in persons.groups])


class OuterProductsBySize(ClippableGrad):
    """The sums of outer products of persons who have different numbers of rows.

    rows   of all rows
    parts  of the persons with each number of rows
    """

    def __init__(self, rows: OuterProductGrad, persons: Persons, parts: Sequence[OuterProductGrad]) -> None:
        self._rows, self._persons, self.parts = rows, persons, parts

    def squared_norm(self) -> Tensor:
        own = [part.squared_norm() for part in self.parts]
        total = own[0].new_empty(self._persons.count)
        for group, squared in zip(self._persons.groups, own, strict=True):
            total[group.places] = squared
        return total

    def weighted(self, factor: Tensor) -> Tensor:
        by_row = factor.new_zeros(len(self._persons.owner))
        together: list[Tensor | None] = []  # rows of products in 64 bits: one product for persons of all sizes
        sums: list[Tensor] = []
        for group, part in zip(self._persons.groups, self.parts, strict=True):
            own = group.of(factor)
            if not part.is_product_in_64_bits:
                sums.append(part.weighted(own))
                continue
            for some, entries in _in_64_bits(part.left.tensor, part.right.tensor, part.cancelling):
                sums.append(part.in_shape(own[some] @ entries.flatten(1)))
            by_row[group.rows] = own.index_fill(0, part.cancelling, 0.0).repeat_interleave(group.size)
            together.append(group.rows)
        if together:
            sums.append(self._product(by_row, together))
        return torch.stack(sums).sum(0) if len(sums) > 1 else sums[0]

    def _product(self, by_row: Tensor, together: Sequence[Tensor | None]) -> Tensor:
        """Σ factor·product over these rows."""
        left, right = self._rows.left.tensor, self._rows.right.tensor
        if len(together) < len(self.parts):
            chosen = torch.cat([rows for rows in together if rows is not None])
            left, right, by_row = (t.index_select(0, chosen) for t in (left, right, by_row))
        return self._rows.in_shape(summing.products(left, right, by_row))

    def blank(self, keep: Tensor) -> OuterProductsBySize:
        parts = [part.blank(group.of(keep)) for group, part in zip(self._persons.groups, self.parts, strict=True)]
        return OuterProductsBySize(self._rows.blank(keep[self._persons.owner]), self._persons, parts)


def without_bounds(grads: Iterable[ClippableGrad]) -> list[OuterProductGrad]:
    """Those whose norms are still to come from Gram matrices."""
    parts = [part for grad in grads for part in (grad.parts if isinstance(grad, OuterProductsBySize) else [grad])]
    return [part for part in parts if type(part) is OuterProductGrad and part.uses_grams and part._bound is None]


def gram_bound(grads: Sequence[OuterProductGrad]) -> tuple[Tensor, Tensor, Tensor]:
    """Of each gradient, (gradients, records): squared norms, lengths, and whether a record must be computed in 64 bits.

    ‖Σ_t a_t ⊗ g_t‖², by the formulas (1) to (6) of docs/engine.md#norms. All have one number of records and of rows,
    and inner products in one type; they share kernels.
    """
    time, in_64_bits = grads[0].time, grads[0].gram_in_64_bits
    gram_dtype = torch.float64 if in_64_bits else grads[0]._dtype
    a, g = [one.left.gram(in_64_bits) for one in grads], [one.right.gram(in_64_bits) for one in grads]
    numbers = [(*one._sizes[1:], one._product_error) for one in grads]
    k, p, product_error = torch.tensor(numbers, dtype=torch.float64, device=a[0].device).T[:, :, None]
    squared = torch.stack([(one * other).sum((1, 2)) for one, other in zip(a, g, strict=True)])  # (1)
    error_a = error_g = rounding_in_64_bits(time, k, p)
    if gram_dtype != torch.float64:
        error_a, error_g = (error_a + rounding(n.clamp_max(PRODUCTS_AT_ONCE), gram_dtype) for n in (k, p))
    # (2) at least the squared length of each row
    smallest = smallest_normal(gram_dtype)
    square_a, square_g = (torch.stack([one.diagonal(dim1=1, dim2=2) for one in side]) for side in (a, g))
    size_a, size_g = (torch.stack([torch.linalg.vector_norm(one, dim=(1, 2)) for one in side]) for side in (a, g))
    square_a = (square_a + (k * smallest)[:, :, None]) * (1 + 2 * error_a)[:, :, None]
    square_g = (square_g + (p * smallest)[:, :, None]) * (1 + 2 * error_g)[:, :, None]
    all_a, all_g = square_a.sum(2), square_g.sum(2)
    # (3) what rounding of inner products may have removed from (1)
    gram_error = error_a * all_a * size_g
    gram_error += error_g * all_g * size_a + error_a * error_g * all_a * all_g
    # (4) what underflow may have removed from (1), and the error of the added gradient by underflow
    gram_underflow = time * smallest * (k * all_g + p * all_a)
    product_underflow = time * (k * p).sqrt() * SMALLEST_NORMAL
    # (5) the norm of the gradient that is added
    lengths = (square_a * square_g).sqrt().sum(2)
    root = (squared + gram_error + gram_underflow).clamp_min(0.0).sqrt()
    bound = (root + product_error * lengths + product_underflow).square()
    # (6), with what underflow adds: a gradient of 0 has no other error. What is not finite in 32 bits may be in 64.
    squared_norm = squared.clamp_min(0.0) + 4 * gram_underflow + 4 * product_underflow**2
    return squared_norm, lengths, ~((bound <= (1 + HEADROOM) * squared_norm) & (lengths <= LARGEST))


def set_bounds(grads: Sequence[OuterProductGrad]) -> None:
    """The norms from Gram matrices, together: on a GPU, one read tells whether any record cancels in any weight."""
    alike: dict[Any, list[OuterProductGrad]] = {}
    for grad in grads:
        alike.setdefault((*grad.left.tensor.shape[:2], grad.gram_in_64_bits, grad._dtype), []).append(grad)
    bounds = [gram_bound(some) for some in alike.values()]
    none = torch.zeros(0, dtype=torch.int64, device=bounds[0][0].device)
    is_any = bool(torch.cat([cancels.flatten() for _, _, cancels in bounds]).any())
    for some, parts in zip(alike.values(), bounds, strict=True):
        for grad, norm, length, cancels in zip(some, *parts, strict=True):
            grad.set_bound(GramBound(norm, length, cancels.nonzero()[:, 0] if is_any else none))


def weighted_products(left: Tensor, right: Tensor, factor: Tensor, cancelling: Tensor) -> Tensor:
    """As `products`. The records in `cancelling` are computed in 64 bits, apart from all others.

    What cancels within one record must not round away what others add.
    """
    if len(cancelling) == 0:
        return summing.products(left, right, factor)
    total = summing.products(left, right, factor.index_fill(0, cancelling, 0.0))
    for some, rows in _in_64_bits(left, right, cancelling):
        total += (factor[some] @ rows.flatten(1)).view(total.shape)
    return total


def _in_64_bits(left: Tensor, right: Tensor, records: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """(some of these records, their gradients in 64 bits)."""
    for some in torch.split(records, RECORDS_IN_64_BITS):
        if len(some):
            yield some, torch.bmm(left[some].double().mT, right[some].double())


def _error_in_64_bits(time: int) -> float:
    """The error of a sum of `time` outer products in 64 bits, relative to Σ_t |left_t||right_t|."""
    return 2 * (time + OTHER_ROUNDINGS) * 2.0**-53


# -- Joint products: the gradients of several matrices with one common side, as one product per record
#
# A recurrent layer has them: dz ⊗ [x, previous h]. One large product runs at a higher rate than its parts. Norms are
# those of each part, from Gram matrices, which share that of the common side.


class Joint:
    """Sums of outer products with one left side, and right sides that are parts of one tensor.

    left    (records, time, k)
    right   (records, time, the sum of sizes)
    bounds  of each part; by default, computed when they are needed
    """

    def __init__(
        self,
        left: ProductSide,
        right: ProductSide,
        sizes: Sequence[int],
        bounds: Sequence[GramBound | None] | None = None,
    ) -> None:
        self.left, self.right, self.sizes = left, right, list(sizes)
        sides = torch.split(right.tensor, self.sizes, 2)
        bounds = [None] * len(sides) if bounds is None else bounds
        self.parts = [
            OuterProductGrad(left, ProductSide(side), bound=bound) for side, bound in zip(sides, bounds, strict=True)
        ]
        self._weighted: tuple[Tensor, Sequence[Tensor]] | None = None
        self._blank: tuple[Tensor, Joint] | None = None
        self._merged: dict[SizeGroup, Joint] = {}

    def grads(self) -> Sequence[OuterProductGrad]:
        """One for each part. By shapes alone, whether they are computed together."""
        return [JointGrad(self, place) for place in range(len(self.parts))] if self._is_faster else self.parts

    @property
    def _is_faster(self) -> bool:
        """Whether norms come from Gram matrices, and products are computed record by record."""
        whole, dtype = OuterProductGrad(self.left, self.right), self.left.tensor.dtype
        k, p = whole.shape
        if not whole.uses_grams or any(summing.product_in_64_bits(whole.time, k, size, dtype) for size in self.sizes):
            return False
        return summing.is_single(whole.time, k, p, self.left.tensor)

    def weighted(self, factor: Tensor) -> Sequence[Tensor]:
        """Of each part. The last result is kept, because each parameter asks for its part."""
        if self._weighted is None or not torch.equal(self._weighted[0], factor):
            # A record that cancels in one part is computed in 64 bits in all: the bounds of the others hold for it.
            cancelling = torch.unique(torch.cat([part.bound.cancelling for part in self.parts]))
            total = weighted_products(self.left.tensor, self.right.tensor, factor, cancelling)
            self._weighted = factor, torch.split(total, self.sizes, 1)
        return self._weighted[1]

    def blank(self, keep: Tensor) -> Joint:
        if self._blank is None or not torch.equal(self._blank[0], keep):
            left, right = (ProductSide(blanked(side.tensor, keep)) for side in (self.left, self.right))
            self._blank = keep, Joint(left, right, self.sizes, [part.bound for part in self.parts])
        return self._blank[1]

    def merged(self, group: SizeGroup) -> Joint:
        if group not in self._merged:
            self._merged[group] = Joint(self.left.merged(group), self.right.merged(group), self.sizes)
        return self._merged[group]


class JointGrad(OuterProductGrad):
    """One part, with a weighted sum that is computed for all parts together."""

    def __init__(self, joint: Joint, place: int) -> None:
        self.part = joint.parts[place]
        super().__init__(self.part.left, self.part.right)
        self._joint, self._place = joint, place

    @property
    def is_dense(self) -> bool:
        return False

    def add_weighted(self, factor: Tensor, total: Tensor) -> None:
        total += self.weighted(factor)

    @property
    def bound(self) -> GramBound:
        return self.part.bound

    def weighted(self, factor: Tensor) -> Tensor:
        return self._joint.weighted(factor)[self._place]

    def blank(self, keep: Tensor) -> OuterProductGrad:
        return self._joint.blank(keep).grads()[self._place]

    def merged(self, group: SizeGroup) -> OuterProductGrad:
        return self._joint.merged(group).grads()[self._place]


# -- Joined gradients: on a GPU, a kernel for a few numbers takes about as long as one for many
#
# The number of entries alone decides which gradients are joined: how the squares of a record are added must not depend
# on the number of records.

#: Gradients with at most so many entries are joined.
FEW_ENTRIES = 2**15


class JoinedGrad(DenseGrad):
    """Gradients by several parameters, with all entries of a record in one row: one norm, and one sum.

    parts  {place of a parameter: its gradients}
    """

    def __init__(self, parts: Mapping[int, DenseGrad | OuterProductGrad]) -> None:
        super().__init__(torch.cat([part.entries for part in parts.values()], 1))
        self._parts = parts

    def sums(self, factor: Tensor) -> dict[int, Tensor]:
        """`weighted` of each part."""
        own = torch.split(self.weighted(factor), [part.entries.shape[1] for part in self._parts.values()])
        return {k: part.in_shape(total) for (k, part), total in zip(self._parts.items(), own, strict=True)}

    def blank(self, keep: Tensor) -> JoinedGrad:
        return JoinedGrad({k: part.blank(keep) for k, part in self._parts.items()})


def joined(grads: Mapping[int, ClippableGrad], like: Tensor) -> dict[int, ClippableGrad]:
    """On a GPU, one gradient in place of all with few entries, at the place of one of them."""
    few: dict[int, DenseGrad | OuterProductGrad] = {}
    for k, grad in ({} if is_on_cpu(like) else grads).items():
        if isinstance(grad, DenseGrad) or (isinstance(grad, OuterProductGrad) and grad.is_dense):
            few |= {k: grad} if grad.entries.shape[1] <= FEW_ENTRIES else {}
    units = {k: grad for k, grad in grads.items() if k not in few}
    return units | ({min(few): JoinedGrad(few)} if few else {})


# -- Activation products: the gradients of linear layers' inputs, by oneDNN inside torch's backward pass
#
# torch computes them with MKL, which on AMD processors multiplies at half the width of vectors (see `..summing`). Here
# a dispatch mode replaces these products, and nothing else, while the gradients of activations are computed.
#
# Nothing is decided by the number of rows. So a record's gradients are multiplied by the same kernel in whatever
# physical batch it is.

#: {operator: the number of its left factor among its inputs}
_LEFT = {"Mm": 0, "Addmm": 1}
#: Multiplications per record from which the mode is used. It costs about 4 µs an operator of the pass; 32 records of
#: this size take 0.4 ms less with oneDNN.
ENOUGH = 2**20


def fast_products(found: Trace, losses: Tensor) -> AbstractContextManager[Any]:
    """For torch's backward pass through this graph; does nothing where little is multiplied for each record."""
    if not summing.has_inner_product(losses):
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
            if left.dtype == right.dtype and summing.has_inner_product(left) and left.numel() and right.numel():
                return summing.product(left, right.T)
        return func(*args, **(kwargs or {}))
