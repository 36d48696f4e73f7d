"""Promise: what is clipped and added for a record is the gradient of its loss, as one autograd call gives it."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor

from sums import length
from zoo import Case, build

from .adapters import Table, Trainer, record
from .probes import ALMOST_NO_NOISE, CLOSE

#: Models of the zoo: in every run, and with --slow.
ANIMALS = [
    "two layers", "conv", "embedding", "attention", "lstm, last output", "tied weights", "called twice",
    "bare parameter", "frozen part", "in-place relu",
]  # fmt: skip
MORE = [
    "linear", "grouped conv", "group norm", "layer norm", "linear on sequences", "flattened tokens", "positions", "gru",
    "transformer", "shared weights", "gate", "unused part", "two inputs",
]  # fmt: skip
RECORDS = 5


def alone(case: Case, inputs: tuple[Tensor, ...], targets: Tensor) -> list[list[Tensor]]:
    """The oracle: each record's gradient, from a forward pass on that record alone."""
    gradients = []
    for i in range(len(targets)):
        loss = case.loss_of(tuple(t[i : i + 1] for t in inputs), targets[i : i + 1]).sum()
        gradient = torch.autograd.grad(loss, case.parameters, allow_unused=True)
        gradients.append(
            [torch.zeros_like(p) if g is None else g for p, g in zip(case.parameters, gradient, strict=True)]
        )
    return gradients


@pytest.mark.parametrize("animal", [*ANIMALS, *(pytest.param(name, marks=pytest.mark.slow) for name in MORE)])
def test_a_records_contribution_is_its_own_gradient_clipped(each: Trainer, animal: str, seed: int):
    """Each record's contribution alone: the sum of everybody, less the sum with that record's loss set to 0."""
    case = build(animal)
    case.model.double()
    inputs, targets = case.batch(RECORDS, seed=3)
    inputs = tuple(t.double() if t.is_floating_point() else t for t in inputs)
    gradients = alone(case, inputs, targets)
    typical = sorted(map(length, gradients))[RECORDS // 2]
    table = each.express(
        Table(
            steps=1,
            group=tuple(range(RECORDS)),
            sample_rate=(1.0,) * RECORDS,
            clip_norm=tuple(typical * f for f in (0.3, 0.7, 1.0, 1.3, 1.9)),
            noise_std=ALMOST_NO_NOISE * typical,
            expected_batch=float(RECORDS),
        )
    )

    def losses(model: torch.nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
        *inputs, wanted, counted = batch
        return case.losses(model(*inputs), wanted) * counted

    def total(counted: Tensor) -> list[Tensor]:
        model = copy.deepcopy(case.model)
        return record(each, model, (*inputs, targets, counted), losses, table, seed=seed).sums[0]

    ones = torch.ones(RECORDS, dtype=torch.float64)
    everybody = total(ones)
    for i, gradient in enumerate(gradients):
        without = ones.clone()
        without[i] = 0.0
        contribution = [a - b for a, b in zip(everybody, total(without), strict=True)]
        factor = min(1.0, table.bounds[i] / length(gradient))
        difference = [c - factor * g for c, g in zip(contribution, gradient, strict=True)]
        assert length(difference) <= 10 * CLOSE * table.bounds[i] + 1e-6 * factor * length(gradient), f"record {i}"
        assert length(contribution) <= table.bounds[i] * (1 + 1e-6), f"record {i}"
