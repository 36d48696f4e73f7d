"""Small attacks on membership that several tests share: data, budgets, plans, models, settings."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import epsilons
from epsilons.auditing import membership
from epsilons.auditing.membership.shadows import ShadowSetting, shadow_plan
from epsilons.training.fitting.losses import optimizer_maker

RECORDS, FEATURES, CLASSES = 80, 5, 3


@cache
def budgets() -> epsilons.Budgets:
    return epsilons.Budgets(np.random.default_rng(1).permutation(np.resize([2.0, 8.0], RECORDS)), delta=1e-3)


@cache
def a_plan(strategy: str = "sample", steps: int = 4, **options: Any) -> epsilons.Plan:
    recipe = epsilons.Recipe(steps=steps, batch_size=20, clip_norm=0.5)
    return epsilons.plan(budgets(), recipe, strategy, "rdp", **options)


def some_data(records: int = RECORDS, seed: int = 2) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    return rng.normal(size=(records, FEATURES)).astype(np.float32), rng.integers(CLASSES, size=records)


def linear() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return nn.Linear(FEATURES, CLASSES)


def dropping() -> nn.Module:
    """A model that cannot be stacked."""
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return nn.Sequential(nn.Linear(FEATURES, 4), nn.Tanh(), nn.Dropout(0.2), nn.Linear(4, CLASSES))


def a_setting(**changes: Any) -> ShadowSetting:
    inputs, targets = some_data()
    usual: dict[str, Any] = {
        "model": linear(),
        "optimizer": optimizer_maker("sgd", 0.5, None),
        "loss": "cross_entropy",
        "inputs": inputs,
        "targets": targets,
        "plan": shadow_plan(a_plan(), RECORDS),
        "budgets": budgets(),
        "population": some_data(30, seed=5),
        "seed": 7,
        "method": "stacked",
        "performance": epsilons.Performance(),
        "device": "cpu",
    }
    return ShadowSetting(**usual | changes)


def attack(folder: Path | None = None, **changes: Any) -> membership.MembershipResult:
    usual: dict[str, Any] = {
        "model": linear(),
        "dataset": some_data(),
        "plan": a_plan(),
        "budgets": budgets(),
        "population": some_data(30, seed=5),
        "shadows": 8,
        "lr": 0.5,
        "jobs": 1,
        "folder": folder,
    }
    return membership.attack(**usual | changes)
