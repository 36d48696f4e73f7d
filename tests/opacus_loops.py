"""Small loops as they are written for Opacus, and the same training in a loop of our own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import epsilons
from epsilons.opacus import PrivacyEngine

RECORDS, BATCH, DELTA = 120, 24, 1e-3
BUDGETS = np.where(np.arange(RECORDS) % 3, 1.0, 3.0)


def tensors() -> tuple[Tensor, Tensor]:
    made = torch.Generator().manual_seed(5)
    return torch.randn(RECORDS, 6, generator=made), torch.randint(3, (RECORDS,), generator=made)


def net() -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def loader(**options: Any) -> DataLoader[Any]:
    return DataLoader(TensorDataset(*tensors()), batch_size=BATCH, shuffle=True, **options)


@dataclass
class Made:
    """What an engine made, with the model as it was passed."""

    bare: nn.Module
    engine: PrivacyEngine
    module: Any
    optimizer: Any
    loader: Any
    criterion: Any


def make(change: Mapping[str, Any] | None = None, engine: PrivacyEngine | None = None, **options: Any) -> Made:
    """make_private_with_epsilon at one seed, with other arguments; change: with a noise multiplier, make_private."""
    engine = engine or PrivacyEngine(accountant="rdp", most_epochs=4)
    model = options.pop("module", None) or net()
    given = {
        "module": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.5),
        "data_loader": loader(),
        "max_grad_norm": 0.7,
        "seed": 3,
        **options,
    }
    if "noise_multiplier" in given:
        made = engine.make_private(**given)
    else:
        budget = {"target_epsilon": BUDGETS, "target_delta": DELTA, "epochs": 2}
        made = engine.make_private_with_epsilon(**budget | given)
    criterion = made[2] if len(made) == 4 else nn.CrossEntropyLoss(reduction=given.get("loss_reduction", "mean"))
    return Made(model, engine, made[0], made[1], made[-1], criterion)


def step(made: Made, batch: Any) -> None:
    """One step of the usual loop."""
    x, y = batch
    made.optimizer.zero_grad()
    made.criterion(made.module(x), y).backward()
    made.optimizer.step()


def train(made: Made, epochs: int = 2, each: Callable[[Made, Any], None] = step) -> Made:
    for _ in range(epochs):
        for batch in made.loader:
            each(made, batch)
    return made


@cache
def own_loop(epochs: int = 2, reduction: str = "mean", most: int = RECORDS, updates: int | None = None) -> nn.Module:
    """The same training with make_private, at the same key, which tests share; updates: how many, by default all."""
    model, (x, y) = net(), tensors()
    budgets = epsilons.Budgets(BUDGETS, delta=DELTA)
    draws = RECORDS // BATCH
    plan = epsilons.plan(budgets, epsilons.Recipe(epochs * draws, BATCH, 0.7), "scale", "rdp")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    private = epsilons.make_private(
        model,
        optimizer,
        (x, y),
        plan,
        budgets=budgets,
        run_dir=epsilons.RunFolder(None, metadata={"training": {"loss_reduction": reduction}}),
        seed=3,
        performance=epsilons.Performance(max_physical_batch=most),
    )
    with private:
        for inputs, targets in private.batches:
            private.backward(F.cross_entropy(model(inputs), targets, reduction="none"))
            private.step()
            if private.updates == updates:
                break
    return model


def distance(one: nn.Module, other: nn.Module) -> float:
    """The largest difference of two models' weights."""
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return max(float((a.detach() - b.detach()).abs().max()) for a, b in pairs)
