"""Loop: the reference for all engines. One autograd call per record or person on the recorded graph, clip, add.

Slow and simple. It differentiates what the caller computed, whatever the model consists of.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from .engine import NonFiniteGradientError, clip_factors, no_bare_errors, non_finite_losses, persons_in
from .ghost.graph import check_connected


class Loop:
    """One autograd call per record, for every model with losses that each depend on one record alone.

    With persons, one call by the mean of each person's losses.
    """

    def attach(self, model: nn.Module, parameters: Sequence[nn.Parameter]) -> None:
        self._parameters = list(parameters)

    def begin(self, records: int) -> None:
        pass

    @no_bare_errors()
    def clipped_sum(
        self, losses: Tensor, clip_norm: Tensor, weight: Tensor, sizes: Sequence[int] | None = None
    ) -> list[Tensor]:
        total = [torch.zeros_like(p, dtype=torch.float64) for p in self._parameters]
        if len(losses):
            check_connected(losses, self._parameters)
        persons = persons_in(losses, clip_norm, sizes)
        means = losses if persons is None else persons.means(losses)
        for i in range(len(means)):
            gradient = record_gradient(means, i, self._parameters, keep_graph=i < len(means) - 1)
            squared = torch.stack([g.double().square().sum() for g in gradient if g is not None] or [total[0].sum()])
            # A backward pass through the physical batch multiplies values of other records by 0, and 0·NaN is NaN. So
            # another record may have caused a gradient that is not finite.
            if not torch.isfinite(squared.sum()) and len(means) > 1:
                raise NonFiniteGradientError(non_finite_losses(losses))
            factor = clip_factors(squared.sum()[None], clip_norm[i : i + 1], weight[i : i + 1])[0]
            for sum_, g in zip(total, gradient, strict=True):
                if g is not None and factor > 0:
                    sum_.add_(g.double() * factor)
        return total

    def detach(self) -> None:
        pass


def record_gradient(
    losses: Tensor, record: int, parameters: Sequence[nn.Parameter], keep_graph: bool
) -> list[Tensor | None]:
    """The gradient of one record's loss by each parameter; None where the loss does not depend on it."""
    return gradient_of(losses[record], parameters, keep_graph)


def gradient_of(total: Tensor, parameters: Sequence[nn.Parameter], keep_graph: bool = True) -> list[Tensor | None]:
    """By each parameter; None where this number does not depend on it."""
    gradients = torch.autograd.grad(total, list(parameters), retain_graph=keep_graph, allow_unused=True)
    return [None if g is None else strided(g) for g in gradients]


def strided(gradient: Tensor) -> Tensor:
    """Sparse gradients (Embedding(sparse=True)) as ordinary tensors."""
    return gradient if gradient.layout is torch.strided else gradient.to_dense()
