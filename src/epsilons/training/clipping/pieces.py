"""Pieces: per-record gradients in the form in which they are cheapest, each with its norms and its weighted sum.

    Dense   written out, one row per record: norm and sum are taken from the very same numbers
    Outer   sums of outer products, a linear layer's: never written out where Gram matrices tell the norm
    Tokens  rows of a table, an embedding's: only those that occur

A norm that is understated lets a contribution be longer than its clip norm. So every norm here is an upper bound, for
any data and any order of additions; see docs/engine.md#norms. Weighted sums are taken in 64 bits (see `summing`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Protocol

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from .summing import FEW_ROWS, ROWS_AT_ONCE, added, is_exact, products
from .ways import Ways, made_up

#: Sums of squares in 32 bits are cut into pieces of this length, which are added in 64.
STRETCH = 64
#: So are inner products.
GRAM_STRETCH = 128
#: Up to this width of both sides together, inner products are taken in 64 bits where the sum is.
NARROW = 1024
#: Roundings by the way: products, roots, and the additions in 64 bits.
BY_THE_WAY = 8
#: A record whose squared norm would be overstated by more than this part of it is done in 64 bits.
TOLERATED = 2.0**-9
#: Beyond this, products of 32-bit numbers may not be finite though their norm is.
LARGEST = 2.0**126
#: What a square or product may lose where 32 bits end. One side of a gradient can be as small as the other is large.
LOST = 2.0**-126


#: (records, time) values -> sorted rows, and the places of their values
Sort = Callable[[Tensor], tuple[Tensor, Tensor]]


class Piece(Protocol):
    """The gradients of all records by one tensor: (records, *shape)."""

    def squared_norm(self) -> Tensor:
        """(records,) 64-bit, at least that of what `weighted` adds, but for rounding in 64 bits."""

    def weighted(self, factor: Tensor) -> Tensor:
        """Σ factor·gradient, 64-bit. factor: (records,) 64-bit"""

    def dense(self) -> Dense:
        """Written out."""

    def blank(self, keep: Tensor) -> Piece:
        """Zeros for the records that are not kept: 0·NaN is NaN, so a factor of 0 is not enough."""

    def transposed(self) -> Piece:
        """Of the transposed tensor (two axes)."""


class Dense:
    """Gradients written out: (records, *shape)."""

    def __init__(self, rows: Tensor) -> None:
        self.rows = wide(rows)

    def squared_norm(self) -> Tensor:
        return squares(self.rows)

    def weighted(self, factor: Tensor) -> Tensor:
        axes = in_memory_order(self.rows)
        rows = self.rows.permute(axes)
        total = self._added(rows.reshape(len(rows), -1), factor).view(rows.shape[1:])
        return total.permute([axes.index(axis) - 1 for axis in range(1, len(axes))])

    def _added(self, rows: Tensor, factor: Tensor) -> Tensor:
        return added(rows, factor)

    def dense(self) -> Dense:
        return self

    def blank(self, keep: Tensor) -> Dense:
        return Dense(blanked(self.rows, keep))

    def transposed(self) -> Dense:
        return Dense(self.rows.transpose(1, 2) if self.rows.ndim == 3 else self.rows)  # a vector is its own

    def reshaped(self, shape: tuple[int, ...]) -> Dense:
        return Dense(self.rows.reshape(len(self.rows), *shape))

    def plus(self, other: Dense) -> Dense:
        return Dense(self.rows + other.rows)


class Rows:
    """(records, time, features), with the inner products of its rows, computed once."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = wide(tensor)
        self._grams: dict[bool, Tensor] = {}

    def gram(self, is_exact: bool) -> Tensor:
        """(records, time, time) 64-bit; is_exact: multiplied in 64 bits, too."""
        if is_exact not in self._grams:
            tensor = self.tensor.double() if is_exact else self.tensor
            stretches = torch.split(tensor, max(1, tensor.shape[2]) if is_exact else GRAM_STRETCH, dim=2)
            total = torch.bmm(stretches[0], stretches[0].mT).double()
            for part in stretches[1:]:
                total += torch.bmm(part, part.mT)
            self._grams[is_exact] = total
        return self._grams[is_exact]


class Outer:
    """Σ_t left_t ⊗ right_t per record: a matrix, or a tensor whose axes stand in another order than its entries."""

    def __init__(
        self, left: Rows, right: Rows, shape: tuple[int, ...] | None = None, axes: tuple[int, ...] | None = None
    ) -> None:
        self.left, self.right = left, right
        self.shape = tuple(shape) if shape else (left.tensor.shape[2], right.tensor.shape[2])
        self.axes = axes or tuple(range(len(self.shape)))
        self.spread: Tensor | None = None  # (records,) Σ|left_t|²|right_t|²: what may have cancelled
        self._risky: Tensor | None = None  # records whose Gram matrices cancel too much for 32 bits
        self._written: Tensor | None = None
        time, k, p = self._sizes
        #: Whether the gradients are written out, or Gram matrices tell their norms; the rule goes by cost.
        self.is_written = time > 1 and time * (k + p) > k * p

    @property
    def is_exact(self) -> bool:
        """Whether inner products are taken in 64 bits; by shapes alone."""
        time, k, p = self._sizes
        return self.left.tensor.dtype == torch.float64 or (time <= FEW_ROWS and k + p <= NARROW)

    @property
    def _sizes(self) -> tuple[int, int, int]:
        """Rows per record, and the gradient's two sides."""
        return self.left.tensor.shape[1], self.left.tensor.shape[2], self.right.tensor.shape[2]

    def decide(self, ways: Ways) -> None:
        """Go the way that was chosen."""
        records, (time, k, p) = len(self.left.tensor), self._sizes
        if time == 1:
            return  # norms multiply

        def attempt(way: str) -> None:
            other = Outer(Rows(made_up(self.left.tensor)), Rows(made_up(self.right.tensor)), self.shape, self.axes)
            other.is_written = way == "written"
            other.squared_norm()
            other.weighted(torch.ones(records, dtype=torch.float64, device=self.left.tensor.device))

        possible = {"written": float(records * k * p), "grams": float(records * time * time)}
        usual = "written" if self.is_written else "grams"
        device = self.left.tensor.device.type
        self.is_written = ways.choose(f"products {time}x{k}x{p}", usual, possible, attempt, device) == "written"

    def squared_norm(self) -> Tensor:
        if self.left.tensor.shape[1] == 1:
            return squares(self.left.tensor) * squares(self.right.tensor)
        return squares(self._rows) if self.is_written else self._from_grams()

    def _from_grams(self) -> Tensor:
        """‖Σ_t a_t ⊗ g_t‖² = Σ_st (a_s·a_t)(g_s·g_t), and as much as rounding may hide of it."""
        a, g = self.left.gram(self.is_exact), self.right.gram(self.is_exact)
        squared = (a * g).sum((1, 2))
        time, k, p = self._sizes
        # An inner product is wrong by as much, relative to the two lengths; and the sum of products in 64 bits.
        of_sum = (time * time + k + p) * 2.0**-53
        of_a, of_g = of_sum, of_sum
        if not self.is_exact:
            of_a, of_g = (of_sum + rounding(min(GRAM_STRETCH, n), self.left.tensor.dtype) for n in (k, p))
        # Squared lengths of the rows, at least.
        square_a = a.diagonal(dim1=1, dim2=2) + k * LOST
        square_g = g.diagonal(dim1=1, dim2=2) + p * LOST
        square_a, square_g = square_a * (1 + 2 * of_a), square_g * (1 + 2 * of_g)
        all_a, all_g = square_a.sum(1), square_g.sum(1)
        # By Cauchy and Schwarz, of Σ_st |a_s||a_t||g_s·g_t|, and of the same with a and g exchanged.
        hidden = of_a * all_a * torch.linalg.vector_norm(g, dim=(1, 2))
        hidden += of_g * all_g * torch.linalg.vector_norm(a, dim=(1, 2)) + of_a * of_g * all_a * all_g
        # Each inner product may lack so much; those of the other side add up to no more than time times their diagonal.
        lost = time * LOST * (k * all_g + p * all_a)
        self.spread = (square_a * square_g).sum(1)
        size = (square_a * square_g).sqrt().sum(1)  # what may have cancelled
        root = (squared + hidden + lost).clamp_min(0.0).sqrt()
        bound: Tensor = (root + self._of_product * size + self._lost_by_product).square()
        # A gradient of 0 is not overstated but by what was lost. Negated, so that NaN is fine here; its norm tells.
        right = (1 + TOLERATED) * (squared.clamp_min(0.0) + 4 * lost + 4 * self._lost_by_product**2)
        risky = ((bound > right) | ((size > LARGEST) & size.isfinite())).nonzero()[:, 0]
        if len(risky):
            self._risky = risky
            of_product = 2 * (time + BY_THE_WAY) * 2.0**-53
            for few, written in self._in_64_bits():
                bound[few] = (written.square().sum((1, 2)).sqrt() * (1 + of_sum) + of_product * size[few]).square()
        return bound

    @property
    def _of_product(self) -> float:
        """By how much a record's part of the weighted sum may be wrong, relative to what may have cancelled in it."""
        time, k, p = self._sizes
        in_64_bits = 2 * (time + BY_THE_WAY) * 2.0**-53
        if is_exact(time, k, p, self.left.tensor.dtype):
            return in_64_bits
        return rounding(min(time, ROWS_AT_ONCE), self.left.tensor.dtype) + in_64_bits

    @property
    def _lost_by_product(self) -> float:
        """And by how much where 32 bits end."""
        time, k, p = self._sizes
        return time * math.sqrt(k * p) * LOST

    def _in_64_bits(self) -> Iterator[tuple[Tensor, Tensor]]:
        """The records that cancel: (few of them, their gradients written out). Few at a time, for they are large."""
        assert self._risky is not None
        for few in torch.split(self._risky, 8):
            yield few, torch.bmm(self.left.tensor[few].double().mT, self.right.tensor[few].double())

    def weighted(self, factor: Tensor) -> Tensor:
        if self.is_written:
            return self._in_shape(added(self._rows, factor))
        if self._risky is None:
            return self._in_shape(products(self.left.tensor, self.right.tensor, factor))
        # Apart from all others: what cancels within one record must not round away what others add.
        total = products(self.left.tensor, self.right.tensor, factor.index_fill(0, self._risky, 0.0))
        for few, written in self._in_64_bits():
            total.view(-1).addmv_(written.flatten(1).T, factor[few])
        return self._in_shape(total)

    def _in_shape(self, entries: Tensor) -> Tensor:
        return entries.reshape(self.shape).permute(self.axes)

    @property
    def _rows(self) -> Tensor:
        """(records, entries) written out, once."""
        if self._written is None:
            self._written = torch.bmm(self.left.tensor.mT, self.right.tensor).flatten(1)
        return self._written

    def dense(self) -> Dense:
        rows = self._rows.view(-1, *self.shape)
        return Dense(rows.permute(0, *(1 + axis for axis in self.axes)))

    def blank(self, keep: Tensor) -> Outer:
        left, right = (Rows(blanked(rows.tensor, keep)) for rows in (self.left, self.right))
        blank = Outer(left, right, self.shape, self.axes)
        blank.spread, blank._risky, blank.is_written = self.spread, self._risky, self.is_written
        return blank

    def transposed(self) -> Piece:
        return Outer(self.right, self.left) if len(self.shape) == 2 else self.dense().transposed()

    def followed_by(self, other: Outer) -> Outer:
        """The sum of both, as one sum over more rows: layers called several times."""
        return Outer(
            Rows(torch.cat([self.left.tensor, other.left.tensor], 1)),
            Rows(torch.cat([self.right.tensor, other.right.tensor], 1)),
            self.shape,
            self.axes,
        )


class Tokens:
    """Rows of a table. index: (records, time) which; rows: (records, time, features) gradients, summed where alike."""

    def __init__(self, index: Tensor, rows: Tensor, size: int, padding: int) -> None:
        self._size, (records, time) = size, index.shape
        ordered, source, rows = by_token(index, rows, padding)
        is_new = torch.ones_like(ordered, dtype=torch.bool)
        is_new[:, 1:] = ordered[:, 1:] != ordered[:, :-1]
        first = is_new.flatten().nonzero()[:, 0]  # (sums,) where each sum's rows begin
        self._token, self._owner = ordered.flatten()[first], first // time
        #: One row per record and token that occurs: norm and sum are taken from these very numbers.
        self._sums = F.embedding_bag(source, rows, first, mode="sum")
        self._records = records

    def squared_norm(self) -> Tensor:
        each = squares(self._sums)
        return each.new_zeros(self._records).index_add_(0, self._owner, each)

    def weighted(self, factor: Tensor) -> Tensor:
        scaled = self._sums.double() * factor[self._owner][:, None]
        # Twice as fast as index_add_ in 64 bits.
        return scaled.new_zeros(self._size, scaled.shape[1]).index_put_((self._token,), scaled, accumulate=True)

    def dense(self) -> Dense:
        rows = self._sums.new_zeros(self._records * self._size, self._sums.shape[1])
        rows.index_add_(0, self._owner * self._size + self._token, self._sums)
        return Dense(rows.view(self._records, self._size, -1))

    def blank(self, keep: Tensor) -> Tokens:
        self._sums = blanked(self._sums, keep[self._owner])
        return self

    def transposed(self) -> Dense:
        return self.dense().transposed()


def by_token(index: Tensor, rows: Tensor, padding: int, sort: Sort | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Each record's tokens in order (records, time), where their rows stand, and all rows, zeros for padding."""
    if padding >= 0:
        rows = rows.masked_fill((index == padding).unsqueeze(2), 0.0)
    records, time = index.shape
    ordered, places = (sort or in_order)(index)
    source = places + time * torch.arange(records, device=index.device)[:, None]
    return ordered, source.flatten(), wide(rows).flatten(0, 1)


def stable(index: Tensor) -> tuple[Tensor, Tensor]:
    """The same by torch."""
    values, places = torch.sort(index, dim=1, stable=True)
    return values, places


def in_order(index: Tensor) -> tuple[Tensor, Tensor]:
    """Sorted rows and the places of their values; equal values stay in their order. NumPy sorts faster on a CPU."""
    time = index.shape[1]
    if index.device.type != "cpu" or index.numel() == 0 or int(index.max()) >= 2**62 // time:
        return stable(index)
    keys = torch.from_numpy(np.sort((index.long() * time + torch.arange(time)).numpy(), axis=1))
    return keys // time, keys % time


def wide(tensor: Tensor) -> Tensor:
    """At least 32 bits: narrower numbers are widened before anything is multiplied."""
    return tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor


def blanked(tensor: Tensor, keep: Tensor) -> Tensor:
    return torch.where(keep.reshape(-1, *(1 for _ in tensor.shape[1:])), tensor, torch.zeros_like(tensor))


def in_memory_order(rows: Tensor) -> list[int]:
    """The axes: the first one, then from the widest step to the narrowest, so that flattening copies nothing."""
    return [0, *sorted(range(1, rows.ndim), key=rows.stride, reverse=True)]


def rounding(terms: int, dtype: torch.dtype) -> float:
    """How much smaller a sum of so many products may come out, relative to the sum of their absolute values.

    In any order, fused or not: Higham, Accuracy and Stability of Numerical Algorithms, 2nd ed., lemma 3.1.
    """
    return (terms + BY_THE_WAY) * torch.finfo(dtype).eps / 2


def squares(rows: Tensor) -> Tensor:
    """(rows,) 64-bit upper bounds on sums of squares of everything in each row."""
    flat = rows.permute(in_memory_order(rows)).reshape(len(rows), -1)
    # What squares may have lost where 32 bits end.
    lost = flat.shape[1] * LOST
    more = 1 + rounding(min(flat.shape[1], STRETCH), rows.dtype) + flat.shape[1] * 2.0**-53
    if flat.shape[1] <= STRETCH:
        short: Tensor = torch.linalg.vector_norm(flat, dim=1).double().square() * more + lost
        return short
    whole = flat.shape[1] // STRETCH * STRETCH
    stretches = flat[:, :whole].view(len(flat), -1, STRETCH)
    total: Tensor = torch.linalg.vector_norm(stretches, dim=2).double().square().sum(1)
    if whole < flat.shape[1]:
        total += torch.linalg.vector_norm(flat[:, whole:], dim=1).double().square()
    return total * more + lost
