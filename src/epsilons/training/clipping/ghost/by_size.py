"""By size: gradients of persons who have different numbers of rows, in one part for each number."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ..persons import SizeGroup
from .per_sample_grads import ClippableGrad


class GradsBySize:
    """The gradients of all persons of a physical batch. parts: of the persons with each number of rows"""

    def __init__(self, parts: Sequence[tuple[SizeGroup, ClippableGrad]], persons: int) -> None:
        self._parts, self._persons = parts, persons

    def squared_norm(self) -> Tensor:
        own = [grad.squared_norm() for _, grad in self._parts]
        total = own[0].new_empty(self._persons)
        for (group, _), squared in zip(self._parts, own, strict=True):
            assert group.places is not None  # there are several groups
            total[group.places] = squared
        return total

    def weighted(self, factor: Tensor) -> Tensor:
        total, *others = (grad.weighted(group.of(factor)) for group, grad in self._parts)
        for other in others:
            total = total.add_(other)
        return total

    def blank(self, keep: Tensor) -> GradsBySize:
        return GradsBySize([(group, grad.blank(group.of(keep))) for group, grad in self._parts], self._persons)
