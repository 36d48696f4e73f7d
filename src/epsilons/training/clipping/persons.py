"""Persons: consecutive rows of a physical batch that together make one clipped contribution.

The gradient that is clipped is that of the mean of a person's losses. The factor 1/size is part of what the backward
pass begins with, so that no row's gradient is larger than in that mean.

How a person's rows are merged depends on their own number of rows alone: persons are grouped by it, and nothing is
padded. Otherwise one person's rows would change how the gradients of others are rounded (docs/engine.md#persons).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ...errors import InputError


@dataclass(frozen=True, eq=False)
class SizeGroup:
    """All persons of a physical batch who have one number of rows.

    size    rows of each
    places  (persons of this size,) places of these persons; None for all persons
    rows    (persons of this size · size,) their rows, person by person; None for all rows
    """

    size: int
    places: Tensor | None
    rows: Tensor | None

    def split(self, tensor: Tensor) -> Tensor:
        """(persons of this size, size, …) of a tensor with all rows (rows, …)."""
        own = tensor if self.rows is None else tensor.index_select(0, self.rows)
        return own.view(len(own) // self.size, self.size, *own.shape[1:])

    def of(self, values: Tensor) -> Tensor:
        """(persons of this size,) of values for all persons."""
        return values if self.places is None else values.index_select(0, self.places)

    def of_all(self, places: Tensor) -> Tensor:
        """Places among all persons, of places in this group."""
        return places if self.places is None else self.places.index_select(0, places)


class Persons:
    """The rows of each person in one physical batch.

    owner   (rows,) the place of each row's person
    groups  persons by their number of rows
    """

    def __init__(self, sizes: Sequence[int], device: torch.device) -> None:
        own = np.asarray(sizes, dtype=np.int64)
        self.count = len(own)
        self.owner = torch.from_numpy(np.repeat(np.arange(len(own)), own)).to(device)
        self._sizes = torch.from_numpy(own).to(device)
        first = np.cumsum(own) - own
        self.groups: list[SizeGroup] = []
        for size in np.unique(own).tolist():
            places = (own == size).nonzero()[0]
            rows = (first[places, None] + np.arange(size)).ravel()
            some = [torch.from_numpy(t).to(device) if len(places) < len(own) else None for t in (places, rows)]
            self.groups.append(SizeGroup(size, *some))

    def shares(self, losses: Tensor) -> Tensor:
        """(rows,) the gradient of the sum of all means by each loss: 1/size."""
        return self._sizes.to(losses.dtype).reciprocal()[self.owner]

    def means(self, losses: Tensor) -> Tensor:
        """(persons,) the mean of each person's losses, to be differentiated."""
        # Unlike a product with a matrix of 0 and 1, this keeps a loss that is not finite with its person.
        return losses.new_zeros(self.count).index_add(0, self.owner, losses * self.shares(losses))

    def summed(self, rows: Tensor) -> Tensor:
        """(persons, …) each person's rows, added. rows: (rows, …)"""
        if len(self.groups) == 1:
            return self.groups[0].split(rows).sum(1)
        total = rows.new_empty(self.count, *rows.shape[1:])
        for group in self.groups:
            assert group.places is not None  # there are several groups
            total[group.places] = group.split(rows).sum(1)
        return total

    def rows_of(self, is_chosen: Tensor) -> tuple[int, ...]:
        """The rows of the chosen persons. is_chosen: (persons,)"""
        return tuple(is_chosen[self.owner].nonzero()[:, 0].tolist())


def persons_in(losses: Tensor, clip_norm: Tensor, sizes: Sequence[int] | None) -> Persons | None:
    """The persons in this physical batch; None where each row is its own.

    Raises InputError unless there is one size of at least 1 for each clip norm, and they add up to the losses.
    """
    if sizes is None:
        if len(losses) != len(clip_norm):
            raise InputError(f"Expected a clip norm for each of {len(losses)} losses, got {len(clip_norm)}. {_ADVICE}")
        return None
    own = np.asarray(sizes)
    is_whole = own.ndim == 1 and (own.dtype.kind in "iu" or own.size == 0)
    if not is_whole or len(own) != len(clip_norm) or (own < 1).any() or own.sum() != len(losses):
        raise InputError(
            f"Expected one whole number of rows, at least 1, for each of {len(clip_norm)} persons, adding up to "
            f"{len(losses)} losses, got sizes of shape {own.shape} and type {own.dtype} that do not. {_ADVICE}"
        )
    return None if (own == 1).all() else Persons(own.tolist(), losses.device)


_ADVICE = "Leave out persons without rows, and give one clip norm and one weight per person."

__all__ = ["Persons", "SizeGroup", "persons_in"]
