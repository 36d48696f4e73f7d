"""A model under a filter: draw, clip to the charged bounds, add noise, update.

Softmax regression is here: the gradient of a record is an outer product, so norms have a closed form. Noise,
divisor and number of steps are the plan's, however many records are still active: the number of active records is
private.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from epsilons import Phase

from .filters import Filter

CLASSES = 10


class Records(NamedTuple):
    """inputs (records, features) with a last column of ones; targets (records,); lengths (records,) of the inputs"""

    inputs: Tensor
    targets: Tensor
    lengths: Tensor

    @classmethod
    def of(cls, inputs: Tensor, targets: Tensor) -> Records:
        return cls(inputs, targets, inputs.flatten(1).norm(dim=1).double())

    def subset(self, rows: Tensor) -> Records:
        """These records, in rising order; the same object if these are all."""
        return self if len(rows) == len(self.targets) else Records(*(part[rows] for part in self))


class Model(Protocol):
    """What a loop trains: the functions of softmax regression below, or of a network (network.py)."""

    def start(self, data: Records) -> Tensor:
        """The weights before the first step."""

    def clipped_sum(self, data: Records, weights: Tensor, bounds: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Sum over these rows of the gradients, clipped to their bounds, and (rows,) their norms."""

    def gradient_norms(self, data: Records, weights: Tensor) -> Tensor:
        """(records,) norms of the gradients, 64-bit."""

    def accuracy(self, data: Records, weights: Tensor) -> float:
        """Share of the records that the model classifies correctly."""


class Step(NamedTuple):
    """What one step did, for tests and figures; private, apart from `released` and `weights`.

    bounds    (records,) charged norms, 0 for a record that has to stop
    norms     (drawn,)   norms of the contributions
    released  (features, classes) the noisy sum
    weights   (features, classes) the model after the step
    """

    bounds: Tensor
    norms: Tensor
    released: Tensor
    weights: Tensor


class Recipe(NamedTuple):
    """steps; learning rate; momentum; refresh: norms are looked at every so many steps, never if it is 0"""

    steps: int
    lr: float
    momentum: float
    refresh: int


def train(
    data: Records, phase: Phase, meter: Filter, recipe: Recipe, seed: int, model: Model | None = None
) -> Iterator[Step]:
    """The steps of one run, each one finished when it is returned.

    model   softmax regression by default
    phase   rates, noise and divisor of a plan; the meter has the bounds
    seed    of coins and noise. Each step takes one coin per record, so runs with the same seed have the same draws
    """
    coins, noise = (torch.Generator().manual_seed(2 * seed + i) for i in range(2))
    model = model or Softmax()
    weights = model.start(data)
    velocity, sizes = torch.zeros_like(weights), torch.full((len(data.targets),), torch.inf, dtype=torch.float64)
    rate = float(phase.sample_rate[0])
    for number in range(recipe.steps):
        if recipe.refresh and number % recipe.refresh == 0:
            sizes = model.gradient_norms(data, weights)
        bounds = meter.bounds(sizes)
        drawn = torch.rand(len(sizes), generator=coins, dtype=torch.float64) < rate
        total, norms = model.clipped_sum(data, weights, bounds, (drawn & (bounds > 0)).nonzero()[:, 0])
        released = total + phase.noise_std * torch.randn(weights.shape, generator=noise)
        velocity = recipe.momentum * velocity + released / phase.expected_batch
        weights = weights - recipe.lr * velocity
        yield Step(bounds, norms, released, weights)


class Softmax:
    """Softmax regression."""

    def start(self, data: Records) -> Tensor:
        return torch.zeros(data.inputs.shape[1], CLASSES)

    def clipped_sum(self, data: Records, weights: Tensor, bounds: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        return clipped_sum(data, weights, bounds, rows)

    def gradient_norms(self, data: Records, weights: Tensor) -> Tensor:
        return _parts(data, weights)[2]

    def accuracy(self, data: Records, weights: Tensor) -> float:
        return float(((data.inputs @ weights).argmax(1) == data.targets).double().mean())


def clipped_sum(data: Records, weights: Tensor, bounds: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """(features, classes) sum over these rows of the gradients, clipped to their bounds, and (rows,) their norms."""
    inputs, errors, sizes = _parts(data.subset(rows), weights)
    factor = (bounds[rows] / sizes.clamp_min(1e-300)).clamp_max(1.0)
    return inputs.T @ (errors * factor.float()[:, None]), sizes * factor


def _parts(data: Records, weights: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Inputs x, errors e = softmax(xW) − onehot(y), and norms |x|·|e| of the gradients x eᵀ."""
    errors = (data.inputs @ weights).softmax(1)
    errors[torch.arange(len(errors)), data.targets] -= 1
    return data.inputs, errors, data.lengths * errors.norm(dim=1).double()
