"""A stack of models: each ends where make_private ends under the same key, and what cannot be stacked is refused."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import epsilons
from epsilons.planning import STRATEGIES
from epsilons.training.randomness import Randomness, key_from_seed
from epsilons.training.stacked import StackedModel, train_stacked
from small_runs import CLASSES, FEATURES, RECORDS, private_over, some_budgets, some_data, some_plan, train

pytestmark = pytest.mark.usefixtures("one_thread")

STEPS, MODELS = 25, 3
BUDGETS = (4.0, 8.0, 32.0)


def linear() -> nn.Module:
    return nn.Linear(FEATURES, CLASSES)


def perceptron(*hidden: int, activation: Callable[[], nn.Module] = nn.Tanh) -> nn.Module:
    layers: list[nn.Module] = [nn.Flatten()]
    width = FEATURES
    for units in hidden:
        layers += [nn.Linear(width, units), activation()]
        width = units
    return nn.Sequential(*layers, nn.Linear(width, CLASSES))


def started(make: Callable[[], nn.Module]) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return make()


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1.0)


def momentum(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.5, momentum=0.8, nesterov=True, weight_decay=0.01)


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.05)


def backwards(parameters: Any) -> torch.optim.Optimizer:
    """Biases first and faster: noise is dealt out in the optimizer's order."""
    weights, biases = [], []
    for p in parameters:
        (weights if p.ndim == 2 else biases).append(p)
    return torch.optim.AdamW([{"params": biases, "lr": 0.1}, {"params": weights, "weight_decay": 0.1}], lr=0.05)


@cache
def members(models: int = MODELS) -> np.ndarray:
    coins = np.random.default_rng(5).random((models, RECORDS)) < 0.5
    coins[:, :3] = False  # records that no model is trained on
    return coins


def key(model: int) -> bytes:
    return key_from_seed(100 + model)


def stacked(
    model: nn.Module, plan: epsilons.Plan, make: Any = sgd, data: Any = None, models: int = MODELS, **options: Any
) -> StackedModel:
    options = {"member": members(models), "randomness": [Randomness.fresh(key=key(k)) for k in range(models)]} | options
    group = some_budgets(tuple(plan.epsilons.tolist())).group
    return train_stacked(model, make, some_data() if data is None else data, plan, group=group, **options)


def alone(
    make_model: Callable[[], nn.Module], plan: epsilons.Plan, make: Any, k: int, data: Any = None
) -> list[Tensor]:
    """The slow twin: make_private over all records, with zero losses for those that are no members."""
    model = started(make_model)
    member = torch.from_numpy(members()[k].astype(np.float32))
    data = (*(some_data() if data is None else data), member)
    optimizer = make(model.parameters())
    with private_over(model, data, plan, optimizer=optimizer, seed=None, key=key(k)) as private:
        train(private, model)
    return [p.detach() for p in model.parameters()]


def difference(ours: list[Tensor], theirs: list[Tensor]) -> float:
    """The largest relative difference of a parameter tensor."""
    return max(float((a - b).norm() / b.norm()) for a, b in zip(ours, theirs, strict=True))


def largest_difference(make_model: Callable[[], nn.Module], plan: epsilons.Plan, make: Any = sgd) -> float:
    found = stacked(started(make_model), plan, make).parameters
    return max(difference([p[k] for p in found], alone(make_model, plan, make, k)) for k in range(MODELS))


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("hidden", [(), (5,)], ids=["linear", "perceptron"])
def test_a_stacked_model_is_the_one_trained_alone(strategy, hidden):
    plan = some_plan(strategy, steps=STEPS, levels=BUDGETS)
    assert largest_difference(lambda: perceptron(*hidden), plan) <= 1e-5


@pytest.mark.parametrize("make", [momentum, adam, backwards])
@pytest.mark.parametrize("make_model", [linear, lambda: perceptron(7, 5)], ids=["linear", "two hidden layers"])
def test_every_optimizer_updates_a_stack_as_it_updates_one_model(make, make_model):
    assert largest_difference(make_model, some_plan("mix", steps=STEPS, levels=BUDGETS), make) <= 1e-5
