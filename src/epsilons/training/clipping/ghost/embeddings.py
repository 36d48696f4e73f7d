"""Gradients by the rows of a table: only of the rows that occur."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from ..persons import Persons
from .norms import squares
from .per_sample_grads import DenseGrad, blanked, to_32_bits

#: So many values of a table's gradients are converted to 64 bits at once. More at once takes less time for each row of
#: a table that occurs rarely, fewer stay in cache.
VALUES_AT_ONCE = 2**20


class TokenSums(NamedTuple):
    """One row for each record and token that occurs: norm and sum are computed from these numbers.

    token, owner  (sums,) which token of which record; by token, then by record
    rows          (sums, features)
    """

    token: Tensor
    owner: Tensor
    rows: Tensor


class TableGrad:
    """Gradients by a table: (records, size, features), zeros where a record has no such token."""

    def __init__(self, sums: TokenSums | None, records: int, size: int) -> None:
        self._known, self._records, self._size = sums, records, size

    @property
    def sums(self) -> TokenSums:
        """The sums, computed once."""
        if self._known is None:
            self._known = self._computed()
        return self._known

    def _computed(self) -> TokenSums:
        raise NotImplementedError  # only those whose sums are not known yet

    def squared_norm(self) -> Tensor:
        squared = squares(self.sums.rows)
        return squared.new_zeros(self._records).index_add_(0, self.sums.owner, squared)

    def weighted(self, factor: Tensor) -> Tensor:
        token, owner, rows = self.sums
        begins = begins_in(token, self._size)
        if rows.numel() <= VALUES_AT_ONCE:
            return table_sum(begins, None, rows, factor.index_select(0, owner))
        total = torch.empty(self._size, rows.shape[1], dtype=torch.float64, device=rows.device)
        for tokens, own in _parts(begins, max(1, VALUES_AT_ONCE // rows.shape[1])):
            some = begins[tokens.start : tokens.stop + 1] - own.start
            total[tokens] = table_sum(some, None, rows[own], factor.index_select(0, owner[own]))
        return total

    def dense(self) -> DenseGrad:
        token, owner, sums = self.sums
        rows = sums.new_zeros(self._records * self._size, sums.shape[1])
        rows.index_add_(0, owner * self._size + token, sums)
        return DenseGrad(rows.view(self._records, self._size, -1))

    def blank(self, keep: Tensor) -> TableGrad:
        sums = self.sums._replace(rows=blanked(self.sums.rows, keep[self.sums.owner]))
        return TableGrad(sums, self._records, self._size)

    def transposed(self) -> DenseGrad:
        return self.dense().transposed()

    def followed_by(self, other: TableGrad) -> TableGrad:
        """The sum of both: a table with two lookups."""
        token, owner, rows = (torch.cat(both) for both in zip(self.sums, other.sums, strict=True))
        pair, places = in_order(token * self._records + owner, self._size * self._records)
        both = added_up(pair // self._records, pair % self._records, rows, places)
        return TableGrad(both, self._records, self._size)

    def of_persons(self, persons: Persons) -> TableGrad:
        token, owner, rows = self.sums
        places = torch.arange(len(rows), device=rows.device)
        return TableGrad(added_up(token, persons.owner.index_select(0, owner), rows, places), persons.count, self._size)


class EmbeddingGrad(TableGrad):
    """Rows of a table. index: (records, time) token ids; rows: (records, time, features), summed for equal tokens."""

    def __init__(self, index: Tensor, rows: Tensor, size: int, padding: int) -> None:
        super().__init__(None, len(index), size)
        self._index, self._rows, self._padding = index, rows, padding

    def _computed(self) -> TokenSums:
        token, places = in_order(self._index.flatten(), self._size, self._padding)
        owner = owners(self._index, places.dtype).index_select(0, places)
        return added_up(token, owner, to_32_bits(self._rows).flatten(0, 1), places)


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
    keys = torch.from_numpy(np.sort(keys.numpy())) if keys.device.type == "cpu" else keys.sort().values
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
    for (first, last), own in zip(itertools.pairwise(cuts), itertools.pairwise(ends), strict=True):
        yield slice(first, last), slice(*own)
