"""Promise: other work beside training, evaluation above all, does not change training, to the bit."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from .adapters import Table, Trainer, Training, record
from .probes import mixed

RECORDS = 60


def some_data() -> tuple[Tensor, Tensor]:
    make = torch.Generator().manual_seed(2)
    return torch.randn(RECORDS, 6, generator=make), torch.randint(3, (RECORDS,), generator=make)


def some_model(dropout: bool) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return nn.Sequential(
            nn.Linear(6, 8), nn.GroupNorm(2, 8), nn.Tanh(), nn.Dropout(0.3 if dropout else 0.0), nn.Linear(8, 3)
        )


def losses_of(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def accuracy(model: nn.Module, _: Training) -> None:
    """The usual: through a loader of its own, in evaluation mode, without gradients."""
    model.eval()
    with torch.no_grad():
        for x, y in DataLoader(TensorDataset(*some_data()), batch_size=16, shuffle=True):
            (model(x).argmax(1) == y).sum()
    model.train()


def with_gradients(model: nn.Module, _: Training) -> None:
    """An influence score, or a forgotten no_grad: gradients by the inputs, none of them kept on parameters."""
    x, y = some_data()
    x.requires_grad_(True)
    loss = F.cross_entropy(model(x), y)
    torch.autograd.grad(loss, x)


def an_average(model: nn.Module, _: Training) -> None:
    """A deep copy, as averages of weights make it, evaluated and deleted."""
    twin = copy.deepcopy(model).eval()
    with torch.no_grad():
        twin(some_data()[0])
        for p in twin.parameters():
            p.mul_(0.5)


def other_randomness(model: nn.Module, _: Training) -> None:
    torch.rand(17)
    torch.manual_seed(0)


BESIDE = [accuracy, with_gradients, an_average, other_randomness]


@pytest.mark.parametrize("dropout", [False, True], ids=["", "dropout"])
@pytest.mark.parametrize("what", BESIDE, ids=lambda f: f.__name__)
def test_the_run_ends_with_the_same_parameters_as_without(
    trainer: Trainer, what: Callable[[nn.Module, Training], None], dropout: bool, seed: int
):
    table = trainer.express(Table(12, mixed(RECORDS, 2), (0.2, 0.3), (0.5, 1.5), 0.8, 15.0))

    def run(beside: Callable[[nn.Module, Training], None] | None) -> list[Tensor]:
        model = some_model(dropout)
        torch.manual_seed(1)
        between = (lambda training: beside(model, training)) if beside else None
        return record(
            trainer, model, some_data(), losses_of, table, lr=0.5, seed=seed, physical_batch=4, between=between
        ).parameters

    assert all(torch.equal(a, b) for a, b in zip(run(None), run(what), strict=True))
