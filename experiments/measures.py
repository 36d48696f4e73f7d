"""Cells without a training: the values of a plan, the time of planning, and the cost of a step beside DP-SGD."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F

import epsilons
from epsilons import Budgets
from epsilons.data import Arrays
from epsilons.draws.randomness import key_from_seed
from epsilons.planning.plan_numbers import CURVE_POINTS

from .settings import RECORDS, Settings
from .training import GPU_BATCH, budgets_of, network, on_gpu, plan_of

#: Timings are medians over this number of repeats, or of rounds.
REPEATS = 5
ROUNDS = 20


def parameters(settings: Settings, seed: int, label: str = "", device: str = "") -> dict[str, Any]:
    """The values of a plan in the paper's terms (noise_scale: noise_std over the recipe's clip norm)."""
    plan = plan_of(settings, budgets_of(settings, RECORDS[settings.dataset], seed))
    return {
        "plan": plan.digest,
        "steps": plan.steps,
        "noise_scale": plan.noise_std / settings.clip_norm,
        "noise_multiplier": plan.noise_multiplier.tolist(),
        "clip_norm": plan.clip_norm.tolist(),
        "sample_rate": plan.sample_rate.tolist(),
        "levels": plan.epsilons.tolist(),
        "spent": plan.epsilon_spent().tolist(),
    }


def planning_time(settings: Settings, seed: int, label: str = "", device: str = "") -> dict[str, Any]:
    """Seconds for one plan of `groups` groups of one size, epsilons evenly spread over [1, 3]; median of REPEATS."""
    assert settings.groups is not None
    levels = np.linspace(1.0, 3.0, settings.groups)
    budgets = Budgets(levels[np.arange(RECORDS[settings.dataset]) % settings.groups], settings.delta)
    plan_of(settings, budgets)  # imports, first use
    seconds = []
    for _ in range(REPEATS):
        started = time.perf_counter()
        plan = plan_of(settings, budgets)
        seconds.append(time.perf_counter() - started)
    spent = plan.epsilon_spent()
    return {
        "plan": plan.digest,
        "planning_seconds": statistics.median(seconds),
        "unused": float((1 - spent / levels).max()),
    }


def step_time(settings: Settings, seed: int, label: str = "", device: str = "auto") -> dict[str, Any]:
    """Median seconds of one step of DP-SGD, Sample and Scale, interleaved in one process, and ratios to DP-SGD's.

    All three have the same expected batch size. A ratio is the median of the ratios within ROUNDS rounds; the order
    rotates from round to round.
    """
    where = torch.device("cuda" if on_gpu(device) else "cpu")
    data = epsilons.data.load(settings.dataset, "train")
    budgets = budgets_of(settings, len(data.targets), seed)
    steps = {
        strategy: _one_step(settings.model_copy(update={"strategy": strategy}), seed, data, budgets, where)
        for strategy in ("uniform", "sample", "scale")
    }
    for step in steps.values():  # the first one allocates
        step()
    names, rounds = list(steps), []
    drawn: dict[str, list[int]] = {name: [] for name in names}
    for number in range(ROUNDS):
        took = {}
        for name in names[number % 3 :] + names[: number % 3]:
            _wait_for(where)
            started = time.perf_counter()
            drawn[name].append(steps[name]())
            _wait_for(where)
            took[name] = time.perf_counter() - started
        rounds.append(took)
    return {
        "seconds_per_step": {name: statistics.median(took[name] for took in rounds) for name in names},
        "ratio": {name: statistics.median(took[name] / took["uniform"] for took in rounds) for name in names},
        "records_per_step": {name: statistics.median(drawn[name]) for name in names},
    }


def _one_step(settings: Settings, seed: int, data: Arrays, budgets: Budgets, device: torch.device) -> Callable[[], int]:
    """A function that makes one step of a new training, and returns the number of records that were drawn."""
    torch.manual_seed(seed)
    model = network(settings, data).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=settings.lr, momentum=settings.momentum)
    records = (torch.from_numpy(data.inputs), torch.from_numpy(data.targets))
    private = epsilons.make_private(
        model,
        optimizer,
        records,
        plan_of(settings, budgets),
        budgets=budgets,
        seed=epsilons.Randomness.with_key(key_from_seed(seed)),
        performance=epsilons.Performance(max_physical_batch=GPU_BATCH if device.type == "cuda" else "auto"),
    )
    batches = iter(private.batches)

    def step() -> int:
        drawn = 0
        for x, y in batches:
            drawn += len(y)
            private.backward(F.cross_entropy(model(x), y, reduction="none"))
            if private.step():
                break
        return drawn

    return step


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def consumption(settings: Settings, seed: int, label: str = "", device: str = "") -> dict[str, Any]:
    """(points, groups) epsilon spent after equal parts of the steps: the paper's figure of privacy costs."""
    plan = plan_of(settings, budgets_of(settings, RECORDS[settings.dataset], seed))
    stride = -(-plan.steps // CURVE_POINTS)
    at = [min(stride * i, plan.steps) for i in range(1, CURVE_POINTS + 1)]
    return {
        "plan": plan.digest,
        "steps": plan.steps,
        "at": at,
        "levels": plan.epsilons.tolist(),
        "spent_at": [plan.spent_after([step]).tolist() for step in at],
        "spent": plan.epsilon_spent().tolist(),
    }
