"""Sites of federated training on one machine, and a server that averages; both without Flower."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import epsilons
from epsilons.doors.rounds import Answer, Site, trained
from epsilons.draws.randomness import key_from_seed
from small_runs import CLASSES, FEATURES, LEVELS, RECORDS, some_budgets, some_plan

NAMES = ("north", "east", "south")
RATE = 0.5


def a_model() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return nn.Sequential(nn.Linear(FEATURES, 4), nn.Tanh(), nn.Linear(4, CLASSES))


def losses(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def plain(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=RATE)


def with_momentum(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=RATE, momentum=0.6)


def data_of(name: str) -> tuple[Tensor, Tensor]:
    """Of one site; sites differ."""
    make = torch.Generator().manual_seed(NAMES.index(name))
    skew = NAMES.index(name) - 1.0
    return torch.randn(RECORDS, FEATURES, generator=make) + skew, torch.randint(CLASSES, (RECORDS,), generator=make)


def key_of(name: str) -> bytes:
    return key_from_seed(100 + NAMES.index(name))


def a_site(folder: Path, name: str = "north", steps: int = 6, **options: Any) -> Site:
    """A site under its own key, with batches of other sizes than its neighbours'."""
    plan = options.pop("plan", None) or some_plan(steps=steps, batch_size=10.0 + 4 * NAMES.index(name))
    settings = {"optimizer": plain, "data": data_of(name), "budgets": some_budgets(LEVELS), "model": a_model}
    settings |= {"seed": epsilons.Randomness.with_key(key_of(name)), "loss": losses} | options
    return Site(folder / name, plan=plan, **settings)


def first_weights() -> dict[str, np.ndarray]:
    return {name: value.numpy().copy() for name, value in trained(a_model()).items()}


def averaged(answers: Sequence[Answer]) -> dict[str, np.ndarray]:
    """As FedAvg does it."""
    total = sum(answer.num_examples for answer in answers)
    return {name: sum(a.weights[name] * (a.num_examples / total) for a in answers) for name in answers[0].weights}


def same_weights(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> bool:
    return ours.keys() == theirs.keys() and all(np.array_equal(ours[name], theirs[name]) for name in ours)


def farthest(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> float:
    return max(float(np.abs(ours[name] - theirs[name]).max()) for name in ours)
