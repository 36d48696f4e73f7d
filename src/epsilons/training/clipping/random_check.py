"""Random check: an engine's gradients against autograd's, for one random combination of the losses.

If the gradient of a single record is wrong, Σ v·g differs from autograd's gradient of Σ v·losses for almost every
random v (Freivalds' check of matrix products, 1977). One backward pass checks a whole physical batch.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from .loop import strided

#: How far the sum may be from autograd's, relative to the size of this parameter's part of it: far above rounding in
#: 32 bits, far below what a gradient given to the wrong record changes.
AGREEMENT = 1e-3
#: Further, relative to the size of the whole sum: what rounding in 32 bits leaves where gradients cancel to 0.
ROUNDING = 4e-6


class RandomCheck:
    """One engine's checks. The seed is fixed: factors must not depend on the data, but need not be secret."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._parameters = parameters
        self._generator = torch.Generator().manual_seed(0)

    def numbers(self, losses: Tensor) -> Tensor:
        """(records,) random numbers for one physical batch."""
        return torch.randn(len(losses), generator=self._generator, dtype=torch.float64).to(losses.device)

    def combination(self, losses: Tensor, numbers: Tensor, clip_factor: Tensor) -> tuple[Tensor, list[Tensor | None]]:
        """(v, autograd's gradient of Σ v·losses by each parameter).

        v is random times the clip factor: in clipped units no record is too small to be seen beside another.
        """
        factor = numbers * clip_factor
        return factor, self.gradients(losses, factor)

    def gradients(self, losses: Tensor, factor: Tensor) -> list[Tensor | None]:
        """Autograd's gradient of Σ factor·losses by each parameter, 64-bit. Keeps the graph."""
        gradients = torch.autograd.grad(
            (factor.to(losses.dtype) * losses).sum(), self._parameters, retain_graph=True, allow_unused=True
        )
        return [None if g is None else strided(g).double() for g in gradients]


def rounding_of(sizes: Iterable[float]) -> float:
    """The rounding allowed for a sum with parts of these sizes."""
    return ROUNDING * math.hypot(*sizes)


def agree(ours: Tensor | None, autograds: Tensor | None, size: float, rounding: float) -> bool:
    """Whether two gradients of one parameter are equal but for rounding. size: of our part of the sum, uncancelled"""
    return size_of(ours, autograds) <= AGREEMENT * size + rounding  # NaN disagrees


def size_of(one: Tensor | None, other: Tensor | None, times: float = 1.0) -> float:
    """The norm of one - times·other; None is 0."""
    zero = torch.zeros((), dtype=torch.float64)
    return float(((zero if one is None else one) - times * (zero if other is None else other)).norm())
