"""Gradients by the rows of a table: only of the rows that occur."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from ..persons import Persons, SizeGroup
from .norms import squares
from .per_sample_grads import DenseGrad, blanked, to_32_bits

#: (records, time) values -> sorted rows, and the places of their values.
Sort = Callable[[Tensor], tuple[Tensor, Tensor]]


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
        blank = copy.copy(self)
        blank._known = self.sums._replace(rows=blanked(self.sums.rows, keep[self.sums.owner]))
        return blank

    def transposed(self) -> DenseGrad:
        return self.dense().transposed()

    def of_persons(self, persons: Persons) -> EmbeddingGrad:
        parts = [self._merged(group) for group in persons.groups]
        if len(parts) == 1:
            return parts[0]
        own = [part.sums for part in parts]
        owners = [group.of_all(sums.owner) for group, sums in zip(persons.groups, own, strict=True)]
        token, owner, rows = (torch.cat(t) for t in ([s.token for s in own], owners, [s.rows for s in own]))
        merged = copy.copy(self)
        merged._records, merged._known = persons.count, TokenSums(token, owner, rows)
        return merged

    def _merged(self, group: SizeGroup) -> EmbeddingGrad:
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
