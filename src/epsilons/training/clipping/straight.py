"""Straight: pieces in a form that can be recorded once for all chunks, where no operator's shapes depend on values.

EveryToken     one row per time step, not one per token that occurs
StraightDense  gradients written out; the weighted sum is one custom operator, which runs the code of `summing`
StraightOuter  sums of outer products. Which records are done in 64 bits depends on values, so norms from Gram matrices
               and weighted products are custom operators, too: the recorder sees one operator each
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from .pieces import Dense, Outer, Piece, Rows, Tokens, by_token, squares, stable
from .summing import added


class EveryToken(Tokens):
    """Rows of a table with a row per time step, zeros where the token came before."""

    def __init__(self, index: Tensor, rows: Tensor, size: int, padding: int) -> None:
        self._size, (records, time) = size, index.shape
        ordered, source, rows = by_token(index, rows, padding, stable)
        is_same = F.pad(ordered[:, 1:] == ordered[:, :-1], (1, 0)).flatten()
        own = torch.arange(records * time, device=index.device)
        # The rows of each sum begin with its first token; for the others, where the next sum's begin: none are left.
        first = own.where(~is_same, records * time).flip(0).cummin(0).values.flip(0)
        self._token, self._owner = ordered.flatten(), own // time
        self._sums = F.embedding_bag(source, rows, first, mode="sum")
        self._records = records

    def squared_norm(self) -> Tensor:
        return squares(self._sums).view(self._records, -1).sum(1)

    def weighted(self, factor: Tensor) -> Tensor:
        scaled = self._sums.double() * factor[self._owner][:, None]
        # Unlike index_add_, compiled without atomic additions, whose order is nobody's.
        return scaled.new_zeros(self._size, scaled.shape[1]).scatter_add_(
            0, self._token[:, None].expand_as(scaled), scaled
        )


class StraightDense(Dense):
    """Gradients written out."""

    def _added(self, rows: Tensor, factor: Tensor) -> Tensor:
        total: Tensor = _weighted_rows(rows, factor)
        return total


class StraightOuter(Outer):
    """Sums of outer products, taken over with the way that was decided on."""

    def __init__(self, piece: Outer) -> None:
        super().__init__(piece.left, piece.right, piece.shape, piece.axes)
        self.is_written, self._written = piece.is_written, piece._written
        self._is_risky: Tensor | None = None

    def squared_norm(self) -> Tensor:
        if self.left.tensor.shape[1] == 1:
            return squares(self.left.tensor) * squares(self.right.tensor)
        if self.is_written:
            return squares(self._rows)
        squared: Tensor
        squared, self._is_risky = _norms_from_grams(
            self.left.tensor,
            self.right.tensor,
            self.left.gram(self.is_exact),
            self.right.gram(self.is_exact),
        )
        return squared

    def weighted(self, factor: Tensor) -> Tensor:
        if self.is_written:
            return self._in_shape(_weighted_rows(self._rows, factor))
        is_risky = self._is_risky
        if is_risky is None:
            is_risky = torch.zeros_like(factor, dtype=torch.bool)
        return self._in_shape(_weighted_products(self.left.tensor, self.right.tensor, factor, is_risky))


def straight(piece: Piece) -> Piece:
    """The same piece, looking at no value."""
    if isinstance(piece, Outer):
        return StraightOuter(piece)
    return StraightDense(piece.rows) if isinstance(piece, Dense) else piece


def read(piece: Piece) -> list[Tensor]:
    """The numbers that both norm and sum are taken of."""
    if isinstance(piece, Outer):
        return [piece.left.tensor, piece.right.tensor, *([] if piece._written is None else [piece._written])]
    return [piece._sums if isinstance(piece, Tokens) else piece.dense().rows]


# -- operators ----------------------------------------------------------------------------------------------


def _outer(left: Tensor, right: Tensor) -> Outer:
    piece = Outer(Rows(left), Rows(right))
    piece.is_written = False
    return piece


@torch.library.custom_op("epsilons::norms_from_grams", mutates_args=())
def _norms_from_grams(left: Tensor, right: Tensor, left_gram: Tensor, right_gram: Tensor) -> tuple[Tensor, Tensor]:
    """(records,) squared norms, and whether each was done in 64 bits."""
    piece = _outer(left, right)
    piece.left._grams[piece.is_exact], piece.right._grams[piece.is_exact] = left_gram, right_gram
    squared = piece.squared_norm()
    is_risky = torch.zeros_like(squared, dtype=torch.bool)
    if piece._risky is not None:
        is_risky[piece._risky] = True
    return squared, is_risky


@_norms_from_grams.register_fake
def _(left: Tensor, right: Tensor, left_gram: Tensor, right_gram: Tensor) -> tuple[Tensor, Tensor]:
    return left.new_empty(len(left), dtype=torch.float64), left.new_empty(len(left), dtype=torch.bool)


@torch.library.custom_op("epsilons::weighted_rows", mutates_args=())
def _weighted_rows(rows: Tensor, factor: Tensor) -> Tensor:
    """Σ factor·row in 64 bits. rows: (records, entries)"""
    return added(rows, factor)


@_weighted_rows.register_fake
def _(rows: Tensor, factor: Tensor) -> Tensor:
    return rows.new_empty(rows.shape[1], dtype=torch.float64)


@torch.library.custom_op("epsilons::weighted_products", mutates_args=())
def _weighted_products(left: Tensor, right: Tensor, factor: Tensor, is_risky: Tensor) -> Tensor:
    """Σ factor·left ⊗ right in 64 bits, those that were risky computed in them."""
    piece = _outer(left, right)
    risky = is_risky.nonzero()[:, 0]
    piece._risky = risky if len(risky) else None
    return piece.weighted(factor)


@_weighted_products.register_fake
def _(left: Tensor, right: Tensor, factor: Tensor, is_risky: Tensor) -> Tensor:
    return left.new_empty(left.shape[2], right.shape[2], dtype=torch.float64)


@torch.library.custom_op("epsilons::coins", mutates_args=(), tags=(torch.Tag.nondeterministic_seeded,))
def _coins(like: Tensor, p: float) -> Tensor:
    """1 with probability p, drawn in the order that torch takes for this shape and these strides."""
    return torch.empty_like(like).bernoulli_(p)


@_coins.register_fake
def _(like: Tensor, p: float) -> Tensor:
    return torch.empty_like(like)


def _drawn(tensor: Tensor, p: float = 0.5, generator: torch.Generator | None = None) -> Tensor:
    return tensor.copy_(_coins(tensor, p))


#: How dropout is recorded: a compiler would lay its masks out in another order, which is another draw.
DRAWS: dict[Any, Callable[..., Tensor]] = {torch.ops.aten.bernoulli_.float: _drawn}

__all__ = ["DRAWS", "EveryToken", "read", "straight"]
