"""Promise: where one record can move another's gradient, training is refused, for no clipping bounds what it does."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .adapters import Table, Trainer, record
from .probes import NEXT_TO_NONE, mixed

RECORDS, FEATURES, CLASSES = 24, 6, 3


class Centred(nn.Module):
    """Home-made normalisation, of a type that no list knows."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(FEATURES, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x - x.mean(0))


def per_record(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def contrastive(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    """Each record against all others of the chunk."""
    outputs = model(batch[0])
    return F.cross_entropy(outputs @ outputs.T, torch.arange(len(outputs)), reduction="none")


def mixup(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    """Each record blended with its neighbour in the chunk."""
    return F.cross_entropy(model((batch[0] + batch[0].flip(0)) / 2), batch[1], reduction="none")


def linear() -> nn.Module:
    return nn.Linear(FEATURES, CLASSES)


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module, tuple[Tensor, ...]], Tensor]]] = {
    "batch norm": (lambda: nn.Sequential(nn.BatchNorm1d(FEATURES), linear()), per_record),
    "batch norm without running statistics": (
        lambda: nn.Sequential(nn.BatchNorm1d(FEATURES, track_running_stats=False).eval(), linear()),
        per_record,
    ),
    "a home-made mean": (Centred, per_record),
    "a contrastive loss": (linear, contrastive),
    "mixup in the loop": (linear, mixup),
}


@pytest.mark.parametrize("case", CASES)
def test_one_record_cannot_move_the_others(trainer: Trainer, case: str, seed: int):
    """Everyone is drawn and one record exchanged: the sum may move by twice its own bound, or there is no sum."""
    make, losses = CASES[case]
    everyone = Table(3, mixed(RECORDS, 2), (1.0, 1.0), (0.01, 0.02), NEXT_TO_NONE, float(RECORDS))
    table = trainer.express(everyone)
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(RECORDS, FEATURES, generator=generator)
    y = torch.randint(CLASSES, (RECORDS,), generator=generator)
    other = x.clone()
    other[5] = 300.0
    sums = []
    for data in (x, other):
        with suppress(Exception):  # refused, in whatever way
            torch.manual_seed(4)
            sums.append(record(trainer, make(), (data, y), losses, table, seed=seed).sums[0])
    if len(sums) == 2:
        moved = np.sqrt(sum(float((a - b).square().sum()) for a, b in zip(*sums, strict=True)))
        assert moved <= 2 * table.bounds[5] * (1 + 1e-3)


def test_a_forward_pass_that_writes_to_its_parameters_is_refused(trainer: Trainer, seed: int):
    """Embedding(max_norm) rescales the rows that a chunk looks up: who was drawn, in the parameters, without noise."""
    table = trainer.express(Table(3, mixed(RECORDS, 2), (0.5, 0.5), (0.5, 1.0), 0.7, 12.0))
    torch.manual_seed(4)
    model = nn.Sequential(nn.Embedding(RECORDS, 4, max_norm=0.1), nn.Flatten(), nn.Linear(4, CLASSES))
    before = [p.detach().clone() for p in model.parameters()]
    data = (torch.arange(RECORDS)[:, None], torch.arange(RECORDS) % CLASSES)
    finished = None
    with suppress(Exception):
        finished = record(trainer, model, data, per_record, table, seed=seed)
    if finished is not None:  # with lr 0, no update moves anything
        assert all(torch.equal(a, b) for a, b in zip(before, finished.parameters, strict=True))
