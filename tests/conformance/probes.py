"""Models with gradients that are known beforehand, so that a noisy sum can be read like a list of records.

Echo's loss is ⟨weights, x⟩, so a record's gradient is the record itself. With records K·e_i and almost no noise,
coordinate i of each sum is record i's contribution: 0 if it was not drawn, its clip norm if it was, twice that if it
was counted twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from .adapters import Table, Trace, Trainer, record

#: For probes that read the sums.
ALMOST_NO_NOISE = 1e-9

#: Relative distance allowed between a contribution and its bound: epsilons shrinks clip factors by 2**-20, Opacus adds
#: 1e-6 to norms.
CLOSE = 2e-6

#: How often each statistical test fails by chance, under a fresh seed.
FALSE_ALARM = 1e-6


class Echo(nn.Module):
    """One weight tensor per width; the gradient of a record's loss by them is the record, cut into those widths."""

    def __init__(self, *widths: int, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.widths = widths
        self.parts = nn.ModuleList(nn.Linear(width, 1, bias=False, dtype=dtype) for width in widths)
        for p in self.parameters():
            nn.init.zeros_(p)

    def forward(self, x: Tensor) -> Tensor:
        parts = x.split(self.widths, dim=1)
        return torch.stack([part(piece).squeeze(1) for part, piece in zip(self.parts, parts, strict=True)]).sum(0)


class EchoTwice(nn.Module):
    """One weight used by two layers: the gradient of a record (a, b) is a + b, clipped and noised once."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width
        self.first, self.second = (nn.Linear(width, 1, bias=False, dtype=torch.float64) for _ in range(2))
        self.second.weight = self.first.weight
        nn.init.zeros_(self.first.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.first(x[:, : self.width]).squeeze(1) + self.second(x[:, self.width :]).squeeze(1)


def losses_of_echo(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
    return model(batch[0])


def mixed(records: int, groups: int, seed: int = 1) -> tuple[int, ...]:
    """(records,) a group for each, all about equally often, in an order independent of the data's."""
    return tuple(np.random.default_rng(seed).permutation(np.arange(records) % groups).tolist())


def one_hot(records: int, size: float = 1e3) -> tuple[Tensor]:
    """Record i has the gradient size·e_i."""
    return (size * torch.eye(records, dtype=torch.float64),)


def recorded(trainer: Trainer, table: Table, **options: Any) -> Trace:
    """A run of the nearest table that the trainer can express, with `one_hot` records."""
    records = len(table.group)
    return record(trainer, Echo(records), one_hot(records), losses_of_echo, trainer.express(table), **options)


def drawn_in(sums: np.ndarray, table: Table) -> np.ndarray:
    """(updates, records) how often each record is in each sum; asserts that sums are made of whole contributions."""
    times = sums / table.bounds
    counts = np.round(times)
    assert np.abs(times - counts).max() <= 1e-4, "a sum holds parts of contributions"
    return counts.astype(int)
