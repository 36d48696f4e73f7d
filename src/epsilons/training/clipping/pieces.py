"""Pieces: per-record gradients in the form in which they are cheapest, each with its norms and its weighted sum.

    Dense   written out, one row per record: norm and sum are taken from the very same numbers
    Outer   sums of outer products, a linear layer's: never written out where Gram matrices tell the norm
    Tokens  rows of a table, an embedding's: only those that occur

A norm that is understated lets a contribution be longer than its clip norm, so each form says why its own is not; see
docs/engine.md#norms.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from .ways import Ways, made_up

#: Sums of squares in 32 bits are cut into pieces of this length, which are added in 64.
STRETCH = 512
#: Gram matrices in 32 bits are cut likewise, so that their rounding does not grow with the layer's width.
GRAM_STRETCH = 256
#: Rounding of a squared norm from Gram matrices, relative to Σ|a_t|²|g_t|²: six standard deviations of the independent
#: rounding errors (Higham & Mary, SIAM J. Sci. Comput. 41(5), 2019) of two inner products of GRAM_STRETCH terms.
GRAM_ROUNDING = 34 * 2.0**-24
#: Where that is more than this part of the squared norm, the record is done in 64 bits.
TOLERATED = 2.0**-18
#: What a square or product may lose where 32 bits end. One side of a gradient can be as small as the other is large.
LOST = 2.0**-126


class Piece(Protocol):
    """The gradients of all records by one tensor: (records, *shape)."""

    def squared_norm(self) -> Tensor:
        """(records,) 64-bit, at least the truth but for what SHRINK allows for."""

    def weighted(self, factor: Tensor) -> Tensor:
        """Σ factor·gradient. factor: (records,) 64-bit"""

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
        total = (factor.to(rows.dtype) @ rows.reshape(len(rows), -1)).view(rows.shape[1:])
        return total.permute([axes.index(axis) - 1 for axis in range(1, len(axes))])

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
        self._gram: Tensor | None = None

    @property
    def gram(self) -> Tensor:
        """(records, time, time) 64-bit."""
        if self._gram is None:
            stretches = torch.split(self.tensor, GRAM_STRETCH, dim=2)
            total = torch.bmm(stretches[0], stretches[0].mT).double()
            for part in stretches[1:]:
                total += torch.bmm(part, part.mT)
            self._gram = total
        return self._gram


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
        """‖Σ_t a_t ⊗ g_t‖² = Σ_st (a_s·a_t)(g_s·g_t), made safe against cancellation."""
        a, g = self.left.gram, self.right.gram
        squared = (a * g).sum((1, 2))
        of_a, of_g = a.diagonal(dim1=1, dim2=2), g.diagonal(dim1=1, dim2=2)
        spread = (of_a * of_g).sum(1)
        self.spread = spread
        time, k, p = self._sizes
        # Each inner product may lack so much; those of the other side add up to no more than time times their diagonal.
        lost = time * LOST * (k * (of_g + p * LOST).sum(1) + p * (of_a + k * LOST).sum(1))
        rounding = GRAM_ROUNDING * spread
        # Negated, so that NaN counts as fine here and is found by its norm.
        risky = (rounding > TOLERATED * squared).nonzero()[:, 0]
        squared = squared + rounding + lost
        if len(risky):
            self._risky = risky
            # Few at a time: written out in 64 bits, they are large.
            for few in torch.split(risky, 8):
                left, right = self.left.tensor[few].double(), self.right.tensor[few].double()
                squared[few] = torch.bmm(left.mT, right).square().sum((1, 2))
        return squared

    def weighted(self, factor: Tensor) -> Tensor:
        if self.is_written:
            return self._in_shape(factor.to(self._rows.dtype) @ self._rows)
        left, right = self.left.tensor, self.right.tensor
        safe = factor
        if self._risky is not None:
            safe = factor.index_fill(0, self._risky, 0.0)
        scale = safe.to(left.dtype)[:, None, None]
        if left.transpose(0, 1).is_contiguous():  # time first: no copy is needed in that order
            left, right, scale = (t.transpose(0, 1) for t in (left, right, scale))
        # The smaller side is scaled.
        if left.shape[2] <= right.shape[2]:
            total = (left * scale).flatten(0, 1).T @ right.flatten(0, 1)
        else:
            total = left.flatten(0, 1).T @ (right * scale).flatten(0, 1)
        if self._risky is not None:
            few = self._risky
            scaled = self.left.tensor[few].double() * factor[few][:, None, None]
            total = total.double() + scaled.flatten(0, 1).T @ self.right.tensor[few].double().flatten(0, 1)
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
        scaled = self._sums * factor.to(self._sums.dtype)[self._owner][:, None]
        return scaled.new_zeros(self._size, scaled.shape[1]).index_add_(0, self._token, scaled)

    def dense(self) -> Dense:
        rows = self._sums.new_zeros(self._records * self._size, self._sums.shape[1])
        rows.index_add_(0, self._owner * self._size + self._token, self._sums)
        return Dense(rows.view(self._records, self._size, -1))

    def blank(self, keep: Tensor) -> Tokens:
        self._sums = blanked(self._sums, keep[self._owner])
        return self

    def transposed(self) -> Dense:
        return self.dense().transposed()


def by_token(index: Tensor, rows: Tensor, padding: int) -> tuple[Tensor, Tensor, Tensor]:
    """Each record's tokens in order (records, time), where their rows stand, and all rows, zeros for padding."""
    if padding >= 0:
        rows = rows.masked_fill((index == padding).unsqueeze(2), 0.0)
    ordered, places = index.sort(1)
    records, time = index.shape
    source = places + time * torch.arange(records, device=index.device)[:, None]
    return ordered, source.flatten(), wide(rows).flatten(0, 1)


def wide(tensor: Tensor) -> Tensor:
    """At least 32 bits: narrower numbers are widened before anything is multiplied."""
    return tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor


def blanked(tensor: Tensor, keep: Tensor) -> Tensor:
    return torch.where(keep.reshape(-1, *(1 for _ in tensor.shape[1:])), tensor, torch.zeros_like(tensor))


def in_memory_order(rows: Tensor) -> list[int]:
    """The axes: the first one, then from the widest step to the narrowest, so that flattening copies nothing."""
    return [0, *sorted(range(1, rows.ndim), key=rows.stride, reverse=True)]


def squares(rows: Tensor, stretch: int = STRETCH) -> Tensor:
    """(rows,) 64-bit sums of squares of everything in each row, and what squares may have lost where 32 bits end."""
    flat = rows.permute(in_memory_order(rows)).reshape(len(rows), -1)
    lost = flat.shape[1] * LOST
    if flat.shape[1] <= stretch:
        short: Tensor = torch.linalg.vector_norm(flat, dim=1).double().square() + lost
        return short
    whole = flat.shape[1] // stretch * stretch
    stretches = flat[:, :whole].view(len(flat), -1, stretch)
    total: Tensor = torch.linalg.vector_norm(stretches, dim=2).double().square().sum(1) + lost
    if whole < flat.shape[1]:
        total += torch.linalg.vector_norm(flat[:, whole:], dim=1).double().square()
    return total
