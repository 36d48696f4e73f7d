"""Traceable per-record gradients: in a form that is recorded once for all physical batches.

No operator's shape may depend on values, and no branch may. What depends on data (records redone in 64 bits) is inside
custom operators, so that the recorder sees one opaque operator each.

TraceableEmbedding  one row per time step, not one per token that occurs
TraceableDense      all entries
TraceableOuter      sums of outer products
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ..engine import clip_factors
from ..ghost.backward import per_sample_grads
from ..ghost.embeddings import EmbeddingGrad, TableGrad, TokenSums
from ..ghost.ghost import squared_norms, weighted_sums
from ..ghost.graph import trace
from ..ghost.lstm import linear
from ..ghost.norms import squares
from ..ghost.outer_products import OuterProductGrad, ProductSide, weighted_products
from ..ghost.per_sample_grads import ClippableGrad, DenseGrad, to_32_bits
from ..persons import Persons, persons_in
from ..summing import added


def traceable_sums(
    losses: Tensor, parameters: Sequence[Any], clip_norm: Tensor, weight: Tensor
) -> tuple[list[Tensor], Tensor, list[Tensor]]:
    """(the clipped sum, whether all of it is finite, the tensors that norms and sums were computed from).

    losses: (rows,); clip_norm, weight: (persons,), who have equally many rows.
    """
    persons = persons_in(losses, clip_norm, equal_sizes(len(losses), len(clip_norm)))
    found = trace(losses, {id(p): k for k, p in enumerate(parameters)})
    cache = {EmbeddingGrad: TraceableEmbedding, linear: _linear}
    shares = None if persons is None else persons.shares(losses)
    rows = per_sample_grads(found, losses, parameters, keep_graph=False, cache=cache, shares=shares)
    with torch.no_grad():
        grads = {k: _traceable(grad if persons is None else grad.of_persons(persons)) for k, grad in rows.items()}
        _, total = squared_norms(grads, clip_norm)
        sums = weighted_sums(grads, clip_factors(total, clip_norm, weight), parameters)
        return sums, torch.isfinite(total).all(), [tensor for grad in grads.values() for tensor in _stored(grad)]


class TraceableEmbedding(EmbeddingGrad):
    """Rows of a table with a row per time step, zeros where the token came before."""

    @property
    def _time(self) -> int:
        return self._index.shape[1]

    def _computed(self) -> TokenSums:
        rows = self._rows
        if self._padding >= 0:
            rows = rows.masked_fill((self._index == self._padding).unsqueeze(2), 0.0)
        rows = to_32_bits(rows).flatten(0, 1)
        ordered, places = torch.sort(self._index, dim=1, stable=True)
        source = (places + self._time * torch.arange(self._records, device=ordered.device)[:, None]).flatten()
        is_same = F.pad(ordered[:, 1:] == ordered[:, :-1], (1, 0)).flatten()
        steps = torch.arange(self._records * self._time, device=ordered.device)
        # The rows of each sum begin with its first token. The others begin where the next sum begins, so are empty.
        begins = steps.where(~is_same, len(steps)).flip(0).cummin(0).values.flip(0)
        sums = F.embedding_bag(source, rows, begins, mode="sum")
        return TokenSums(ordered.flatten(), steps // self._time, sums)

    def squared_norm(self) -> Tensor:
        return squares(self.sums.rows).view(self._records, -1).sum(1)

    def weighted(self, factor: Tensor) -> Tensor:
        token, owner, rows = self.sums
        scaled = rows.double() * factor[owner][:, None]
        # Unlike index_add_, compiled without atomic additions, which come in any order.
        return scaled.new_zeros(self._size, scaled.shape[1]).scatter_add_(0, token[:, None].expand_as(scaled), scaled)

    def followed_by(self, other: TableGrad) -> TraceableEmbedding:
        assert isinstance(other, TraceableEmbedding)  # there is no other kind
        index, rows = torch.cat([self._index, other._index], 1), torch.cat([self._rows, other._rows], 1)
        return TraceableEmbedding(index, rows, self._size, self._padding)

    def of_persons(self, persons: Persons) -> TraceableEmbedding:
        (group,) = persons.groups
        index, rows = (group.split(t).flatten(1, 2) for t in (self._index, self._rows))
        return TraceableEmbedding(index, rows, self._size, self._padding)


class TraceableDense(DenseGrad):
    """All entries."""

    def _added(self, rows: Tensor, factor: Tensor) -> Tensor:
        total: Tensor = _weighted_rows(rows, factor)
        return total


class TraceableOuter(OuterProductGrad):
    """Sums of outer products."""

    def __init__(self, grad: OuterProductGrad) -> None:
        super().__init__(grad.left, grad.right, grad.shape, grad.axes)
        self._rows = grad._rows
        self._norms: tuple[Tensor, Tensor] | None = None

    def squared_norm(self) -> Tensor:
        return self._from_grams()[0] if self.uses_grams else super().squared_norm()

    def weighted(self, factor: Tensor) -> Tensor:
        if self.is_dense:
            return self.in_shape(_weighted_rows(self.rows, factor))
        is_cancelling = self._from_grams()[1] if self.uses_grams else torch.zeros_like(factor, dtype=torch.bool)
        return self.in_shape(_weighted_products(self.left.tensor, self.right.tensor, factor, is_cancelling))

    def _from_grams(self) -> tuple[Tensor, Tensor]:
        """(squared norms, which records cancel), once."""
        if self._norms is None:
            grams = (side.gram(self.gram_in_64_bits) for side in (self.left, self.right))
            self._norms = _norms_from_grams(self.left.tensor, self.right.tensor, *grams)
        return self._norms


def equal_sizes(rows: int, persons: int) -> list[int]:
    """Of persons with equally many rows."""
    return [rows // persons] * persons


def _traceable(grad: ClippableGrad) -> ClippableGrad:
    """The same gradients, with norms and sums that branch on no value."""
    if isinstance(grad, OuterProductGrad):
        return TraceableOuter(grad)
    return TraceableDense(grad.rows) if isinstance(grad, DenseGrad) else grad


def _stored(grad: ClippableGrad) -> list[Tensor]:
    """The tensors that both norm and sum are computed from."""
    if isinstance(grad, OuterProductGrad):
        return [grad.left.tensor, grad.right.tensor, *([] if grad._rows is None else [grad._rows])]
    assert isinstance(grad, EmbeddingGrad | DenseGrad)  # there is no other kind
    return [grad.sums.rows if isinstance(grad, EmbeddingGrad) else grad.rows]


# -- operators ----------------------------------------------------------------------------------------------


@torch.library.custom_op("epsilons::norms_from_grams", mutates_args=())
def _norms_from_grams(left: Tensor, right: Tensor, left_gram: Tensor, right_gram: Tensor) -> tuple[Tensor, Tensor]:
    """((records,) squared norms, whether each was computed in 64 bits)."""
    grad = OuterProductGrad(ProductSide(left), ProductSide(right))
    grad.left._grams[grad.gram_in_64_bits], grad.right._grams[grad.gram_in_64_bits] = left_gram, right_gram
    squared = grad.bound.squared_norm
    is_cancelling = torch.zeros_like(squared, dtype=torch.bool)
    is_cancelling[grad.bound.cancelling] = True
    return squared, is_cancelling


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
def _weighted_products(left: Tensor, right: Tensor, factor: Tensor, is_cancelling: Tensor) -> Tensor:
    """Σ factor·left ⊗ right in 64 bits. Records that cancel are multiplied in 64 bits, too."""
    return weighted_products(left, right, factor, is_cancelling.nonzero()[:, 0]).contiguous()


@_weighted_products.register_fake
def _(left: Tensor, right: Tensor, factor: Tensor, is_cancelling: Tensor) -> Tensor:
    return left.new_empty(left.shape[2], right.shape[2], dtype=torch.float64)


@torch.library.custom_op("epsilons::linear", mutates_args=())
def _linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x @ weight.T + bias: TorchInductor has no program for oneDNN's product with weights that change."""
    return linear(x, weight, bias)


@_linear.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty(*x.shape[:-1], len(weight))


@torch.library.custom_op("epsilons::coins", mutates_args=(), tags=(torch.Tag.nondeterministic_seeded,))
def _coins(like: Tensor, p: float) -> Tensor:
    """1 with probability p, drawn in torch's order for this shape and these strides."""
    return torch.empty_like(like).bernoulli_(p)


@_coins.register_fake
def _(like: Tensor, p: float) -> Tensor:
    return torch.empty_like(like)


def _drawn(tensor: Tensor, p: float = 0.5, generator: torch.Generator | None = None) -> Tensor:
    return tensor.copy_(_coins(tensor, p))


#: How dropout is recorded: a compiler would store its masks in another layout, which is another draw.
DRAWS: dict[Any, Callable[..., Tensor]] = {torch.ops.aten.bernoulli_.float: _drawn}

__all__ = ["DRAWS", "equal_sizes", "traceable_sums"]
