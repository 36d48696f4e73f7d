"""Gradients by the rows of a table: only of the rows that occur."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from ...core.modules import is_on_cpu
from ..engine import Persons, to_32_bits
from .graph import ParameterUse
from .operator_rules import BatchAxis, dims_of, grad_shape, input_shape, operator, signed
from .per_sample_grads import (
    DenseGrad,
    OutputGrads,
    PerSampleGrad,
    PerSampleGradFn,
    blanked,
    first,
    squares,
)

#: On a CPU, so many values of a table's gradients are converted to 64 bits at once. More take less time for each row of
#: a table that occurs rarely, fewer stay in cache.
VALUES_AT_ONCE = 2**20


class TokenSums(NamedTuple):
    """One row for each record and token that occurs: norm and sum are computed from these numbers.

    token, owner  (sums,) which token of which record; by token, then by record
    rows          (sums, features) sums of gradients; or (sums,) 64-bit weights of the record's one gradient
    """

    token: Tensor
    owner: Tensor
    rows: Tensor

    def blank(self, keep: Tensor) -> TokenSums:
        return self._replace(rows=blanked(self.rows, keep[self.owner]))


class TableGrad(PerSampleGrad):
    """Gradients by a table: (records, size, features), zeros where a record has no such token."""

    def __init__(self, compute: Callable[[], TokenSums], records: int, size: int) -> None:
        self._compute, self._records, self._size = compute, records, size

    @cached_property
    def sums(self) -> TokenSums:
        """The sums, computed once."""
        return self._compute()

    def squared_norm(self) -> Tensor:
        squared = squares(self.sums.rows)
        return squared.new_zeros(self._records).index_add_(0, self.sums.owner, squared)

    def weighted(self, factor: Tensor) -> Tensor:
        features = self.sums.rows.shape[1]
        total = torch.zeros(self._size, features, dtype=torch.float64, device=factor.device)
        self.add_weighted(factor, total)
        return total

    def add_weighted(self, factor: Tensor, total: Tensor) -> None:
        """Add to the rows of tokens that occur, and to no others."""
        token, owner, rows = self.sums
        self._add_rows(token, None, rows, factor.index_select(0, owner), total)

    def _add_rows(self, token: Tensor, places: Tensor | None, rows: Tensor, factor: Tensor, total: Tensor) -> None:
        """As `table_sum`, for tokens in order."""
        if not is_on_cpu(rows):  # the host would wait to learn which tokens occur
            total += table_sum(begins_in(token, self._size), places, rows, factor)
            return
        found, counts = torch.unique_consecutive(token, return_counts=True)
        begins = F.pad(counts.cumsum(0), (1, 0))
        if not len(found):
            return
        for tokens, own in _parts(begins, max(1, VALUES_AT_ONCE // rows.shape[1])):
            some = begins[tokens.start : tokens.stop + 1] - own.start
            part = rows[own] if places is None else rows
            at = None if places is None else places[own]
            total.index_add_(0, found[tokens], table_sum(some, at, part, factor[own]))

    def dense(self) -> DenseGrad:
        token, owner, sums = self.sums
        rows = sums.new_zeros(self._records * self._size, sums.shape[1])
        rows.index_add_(0, owner * self._size + token, sums)
        return DenseGrad(rows.view(self._records, self._size, -1))

    def blank(self, keep: Tensor) -> TableGrad:
        return TableGrad(lambda: self.sums.blank(keep), self._records, self._size)

    def transposed(self) -> DenseGrad:
        return self.dense().transposed()

    def followed_by(self, other: TableGrad) -> TableGrad:
        """The sum of both: a table with two lookups."""
        token, owner, rows = (torch.cat(both) for both in zip(self.sums, other.sums, strict=True))
        pair, places = in_order(token * self._records + owner, self._size * self._records)
        both = added_up(pair // self._records, pair % self._records, rows, places)
        return TableGrad(lambda: both, self._records, self._size)

    def of_persons(self, persons: Persons) -> TableGrad:
        token, owner, rows = self.sums
        places = torch.arange(len(rows), device=rows.device)
        sums = added_up(token, persons.owner.index_select(0, owner), rows, places)
        return TableGrad(lambda: sums, persons.count, self._size)


def embedding_grad(index: Tensor, rows: Tensor, size: int, padding: int) -> TableGrad:
    """Rows of a table. index: (records, time) token ids; rows: (records, time, features), summed for equal tokens."""

    def compute() -> TokenSums:
        token, places = in_order(index.flatten(), size, padding)
        owner = owners(index, places.dtype).index_select(0, places)
        return added_up(token, owner, to_32_bits(rows).flatten(0, 1), places)

    return TableGrad(compute, len(index), size)


def owners(index: Tensor, dtype: torch.dtype) -> Tensor:
    """(records·time,) which record each token belongs to. index: (records, time)"""
    records, time = index.shape
    return torch.arange(records, dtype=dtype, device=index.device).repeat_interleave(time)


def in_order(token: Tensor, size: int, padding: int = -1) -> tuple[Tensor, Tensor]:
    """The tokens in order, and their places; equal tokens in the order given; without those that are padding.

    token: (N,) from 0 to size - 1
    """
    bits = max(1, len(token) - 1).bit_length()
    if size << bits >= 2**63:
        values, places = torch.sort(token, stable=True)
        return values[values != padding], places[values != padding]
    kind = torch.int32 if size << bits < 2**31 else torch.int64
    # token · 2^bits + place. NumPy sorts these in a tenth of the time of an argsort.
    keys = (token.to(kind) << bits) | torch.arange(len(token), dtype=kind, device=token.device)
    keys = torch.from_numpy(np.sort(keys.numpy())) if is_on_cpu(keys) else keys.sort().values
    if padding >= 0:
        first, end = torch.searchsorted(keys, keys.new_tensor([padding << bits, (padding + 1) << bits])).tolist()
        keys = torch.cat([keys[:first], keys[end:]])
    return keys >> bits, keys & ((1 << bits) - 1)


def added_up(token: Tensor, owner: Tensor, rows: Tensor, places: Tensor) -> TokenSums:
    """Rows of equal token and owner, added in order.

    token, owner, places  (N,) by token, then by owner; `places` of their rows
    rows                  (…, features)
    """
    if len(token) == 0:
        return TokenSums(token.long(), owner.long(), rows[:0])
    begins = is_first(token, owner).nonzero()[:, 0]
    sums = F.embedding_bag(places, rows, begins.to(places.dtype), mode="sum")
    return TokenSums(token.index_select(0, begins).long(), owner.index_select(0, begins).long(), sums)


def is_first(token: Tensor, owner: Tensor) -> Tensor:
    """(N,) whether each is another token or another record than the one before."""
    is_new = torch.ones(len(token), dtype=torch.bool, device=token.device)
    is_new[1:] = (token[1:] != token[:-1]) | (owner[1:] != owner[:-1])
    return is_new


def begins_in(token: Tensor, size: int) -> Tensor:
    """(size + 1,) where each token begins in these ordered ones, and where the last ends."""
    if not is_on_cpu(token):  # bincount reads the largest token
        return torch.searchsorted(token, torch.arange(size + 1, device=token.device))
    return F.pad(torch.bincount(token, minlength=size).cumsum(0), (1, 0))


def table_sum(begins: Tensor, places: Tensor | None, rows: Tensor, factor: Tensor) -> Tensor:
    """(tokens, features) 64-bit: for each token the sum of factor·row, in order.

    begins  (tokens + 1,) as `begins_in`
    places  (N,) of the rows of each token; None: they are in order
    rows    (..., features)
    factor  (N,) 64-bit
    """
    if places is None:
        places = torch.arange(len(rows), device=rows.device)
    return F.embedding_bag(
        places, rows.double(), begins, mode="sum", per_sample_weights=factor, include_last_offset=True
    )


def _parts(begins: Tensor, at_once: int) -> Iterator[tuple[slice, slice]]:
    """Consecutive tokens with about so many rows together: (their range, that of their rows)."""
    steps = torch.arange(0, int(begins[-1]), at_once, device=begins.device)
    cuts = sorted({0, len(begins) - 1, *torch.searchsorted(begins, steps).tolist()})
    ends = begins[cuts].tolist()
    for (start, last), own in zip(itertools.pairwise(cuts), itertools.pairwise(ends), strict=True):
        yield slice(start, last), slice(*own)


# -- Tables with rows that are only added up: the mean or sum of a text's embeddings, with or without weights; bags
#
# All tokens of a record then have one gradient g, multiplied by each token's weight. So row v of the table has C_v·g,
# where C_v is the sum of the weights of token v, and the squared norm is |g|²·Σ_v C_v². No gradients by tokens are
# computed. Which gradient that is follows from the graph, not from values.

#: {operator: the operators that read its outputs, each with the number of the input}
Readers = Mapping[Any, Sequence[tuple[Any, int]]]
#: The smallest normal 64-bit number: a square below it may become 0.
SMALLEST = 2.0**-1022


class Texts(NamedTuple):
    """The tokens that each record looks up, in the order of records.

    token, owner  (N,) which token of which record
    weight        (N,) 64-bit; None: all 1
    scale         (records,) or (), 64-bit: a further factor
    """

    token: Tensor
    owner: Tensor
    weight: Tensor | None
    scale: Tensor


class PooledGrad(TableGrad):
    """Gradients by a table: weight·gradient, with one gradient for each record. gradient: (records, features) 64-bit"""

    def __init__(self, weights: TokenSums, gradient: Tensor, size: int, dtype: torch.dtype) -> None:
        def compute() -> TokenSums:  # with all entries, for sums that have other rows too
            token, owner, weight = weights
            return TokenSums(token, owner, (weight[:, None] * gradient.index_select(0, owner)).to(dtype))

        super().__init__(compute, len(gradient), size)
        self._weights, self._gradient, self._dtype = weights, gradient, dtype

    def squared_norm(self) -> Tensor:
        _, owner, weight = self._weights
        squared = self._gradient.square().sum(1) + self._gradient.shape[1] * SMALLEST
        weights = weight.new_zeros(self._records).index_add_(0, owner, weight.square() + SMALLEST)
        return squared * weights

    def add_weighted(self, factor: Tensor, total: Tensor) -> None:
        token, owner, weight = self._weights
        self._add_rows(token, owner, self._gradient, weight * factor.index_select(0, owner), total)

    def blank(self, keep: Tensor) -> PooledGrad:
        return PooledGrad(self._weights.blank(keep), blanked(self._gradient, keep), self._size, self._dtype)


def weights_of(texts: Texts, size: int, padding: int) -> TokenSums:
    """The weights of equal tokens of a record, added."""
    token, places = in_order(texts.token, size, padding)
    owner = texts.owner.index_select(0, places)
    is_new = is_first(token, owner)
    begins = is_new.nonzero()[:, 0]
    if texts.weight is None:
        counts = torch.diff(begins, append=begins.new_tensor([len(token)])).double()
    else:
        own = texts.weight.index_select(0, places)
        counts = own.new_zeros(len(begins)).index_add_(0, is_new.cumsum(0) - 1, own)
    return TokenSums(token.index_select(0, begins).long(), owner.index_select(0, begins).long(), counts)


# -- lookups whose rows are added up ------------------------------------------------------------------------


def pooled(use: ParameterUse, readers: Readers, records: int) -> tuple[ParameterUse, PerSampleGradFn] | None:
    """This use of a table as one of the operator that adds its rows up, and its sampler; None for all other uses."""
    name = operator(use.node)
    if name == "EmbeddingBag":
        texts = _bags(use, records)
        return None if texts is None else (use, _sampler(use, texts))
    found = _adding(use, readers, records) if name == "Embedding" else None
    if found is None:
        return None
    node, factors = found
    shape, axis = grad_shape(use.node, 0), use.batch.axis
    index = use.node._saved_indices.movedim(axis, 0)  # (records, time)
    weight = None
    for factor in factors:
        own = factor.double().expand(shape)[..., 0].movedim(axis, 0).flatten()
        weight = own if weight is None else weight * own
    scale = 1.0 / index.shape[1] if operator(node) == "Mean" else 1.0
    texts = Texts(
        index.flatten(),
        owners(index, index.dtype),
        weight,
        torch.tensor(scale, dtype=torch.float64, device=index.device),
    )
    return dataclasses.replace(use, node=node, axes=(BatchAxis(0),)), _sampler(use, texts)


def _adding(use: ParameterUse, readers: Readers, records: int) -> tuple[Any, list[Tensor]] | None:
    """(the operator that adds up a record's rows, the factors without features by which they are multiplied)."""
    shape, batch = grad_shape(use.node, 0), use.batch
    if len(shape) != 3 or batch.axis > 1 or batch.inner != 1 or shape[batch.axis] != records:
        return None
    node, factors = use.node, list[Tensor]()
    while len(readers.get(node, ())) == 1:
        (node, place), *_ = readers[node]
        name = operator(node)
        if name in ("Sum", "Mean"):
            is_over_time = node._saved_dim is not None and dims_of(node._saved_dim, 3) == (1 - batch.axis,)
            return (node, factors) if is_over_time and input_shape(node, 0) == shape else None
        if name != "Mul" or grad_shape(node, 0) != shape:
            return None
        factor = node._saved_self if place == 1 else node._saved_other
        if not _is_without_features(factor):
            return None
        factors.append(factor)
    return None


def _is_without_features(factor: Tensor | None) -> bool:
    return factor is not None and (factor.ndim == 0 or factor.shape[-1] == 1) and not factor.is_complex()


def _bags(use: ParameterUse, records: int) -> Texts | None:
    """The texts of torch's bags, one for each record; None for the largest of their embeddings."""
    node = use.node
    offsets, index, padding = node._saved_offsets, node._saved_indices, signed(node._saved_padding_idx)
    mode, weight = node._saved_mode, node._saved_per_sample_weights
    if mode == 2 or grad_shape(node, 0)[0] != records:
        return None
    ends = torch.cat([offsets, offsets.new_tensor([len(index)])])[1 : records + 1]
    owner = torch.arange(records, device=index.device).repeat_interleave(ends - offsets[:records])
    index = index[: len(owner)]
    scale = torch.ones(records, dtype=torch.float64, device=index.device)
    if mode == 1:
        scale /= torch.bincount(owner[index != padding], minlength=records).clamp_min(1)
    return Texts(index, owner, None if weight is None else weight[: len(owner)].double(), scale)


def _sampler(use: ParameterUse, texts: Texts) -> PerSampleGradFn:
    size, padding = input_shape(use.node, use.index)[0], signed(use.node._saved_padding_idx)

    def per_sample_grad(output_grads: OutputGrads) -> PooledGrad:
        gradient = first(output_grads)
        rows = gradient.reshape(-1, gradient.shape[-1]).double() * texts.scale.unsqueeze(-1)
        return PooledGrad(weights_of(texts, size, padding), rows, size, gradient.dtype)

    return per_sample_grad
