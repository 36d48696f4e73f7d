"""The kind "individual-accounting": MNIST, with a filter or without one.

Without a model, softmax regression on 256 fixed features; with one, a network of models.MODELS on the images. Settings:
`steps` of a run; `options` = {filter, a name in FILTERS; nominal, the number of full steps that a budget pays for, by
default `steps`; refresh; runs, models trained one after another from the same budgets; floor, of "count"}.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

import epsilons
from epsilons import Plan
from epsilons.accounting import ACCOUNTANTS, Accountant
from epsilons.core.mechanism import FloatArray
from epsilons.errors import InputError, PlanError
from epsilons.models import build
from epsilons.training.features import scattering

from ..settings import RECORDS, Settings
from ..training import budgets_of
from . import gaussian
from .filters import CERTIFIED_BY, FILTERS, Filter
from .histories import MEASURES, parts_of
from .loop import CLASSES, Model, Recipe, Records, Softmax, Step, train
from .network import Network

ACCOUNTANTS_HERE: dict[str, Accountant] = {"gdp": gaussian.epsilon, **ACCOUNTANTS}

#: Features of a record, and the seed of the projection: public constants.
FEATURES, PROJECTION_SEED = 256, 7
#: Part of a record's budget up to which it counts as used up.
USED_UP = 0.999
#: Quantiles over the records of the part of a budget that was spent.
QUANTILES = (0.1, 0.5, 0.9)


def individual_accounting(settings: Settings, seed: int, label: str = "", device: str = "") -> dict[str, Any]:
    """The accuracy of each run, the number of active records over the steps, and what records spent."""
    train_data, test_data = images(settings.dataset) if settings.model else features(settings.dataset)
    plan, group = planned(settings, seed)
    meter = make_filter(settings, plan, group)
    recipe = Recipe(settings.steps or 0, settings.lr, settings.momentum, refresh_of(settings))
    torch.manual_seed(seed)
    model: Model = Network(build(settings.model, (1, 28, 28), CLASSES)) if settings.model else Softmax()
    scores, bounds = [], []
    for run in range(settings.options.get("runs", 1)):
        steps: list[Step] = []
        for step in train(train_data, plan.phases[0], meter, recipe, 1_000 * run + seed, model):
            bounds.append(step.bounds)
            steps = [step]
        scores.append(model.accuracy(test_data, steps[0].weights))
    parts = parts_of(plan, group, bounds)
    return {
        "plan": plan.digest,
        "steps": recipe.steps,
        "levels": plan.epsilons.tolist(),
        "spent": plan.epsilon_spent().tolist(),
        "accuracy": scores[0],
        "accuracies": scores,
        **_activity(group, parts),
        **_hindsight(settings, plan, group, parts),
    }


def _activity(group: Tensor, parts: FloatArray) -> dict[str, Any]:
    """How many records of each group have a contribution in this step or a later one."""
    last = np.where((parts > 0).any(axis=0), len(parts) - (parts > 0)[::-1].argmax(axis=0), 0)  # (records,)
    counts = [[int((last[group == p] > step).sum()) for p in range(int(group.max()) + 1)] for step in range(len(parts))]
    return {"active": counts}


def _hindsight(settings: Settings, plan: Plan, group: Tensor, parts: FloatArray) -> dict[str, Any]:
    """Part of its budget that a record spent, by its filter's own measure: the largest, and quantiles over all."""
    name = settings.options.get("filter", "none")
    if name == "none":
        return {}
    used = MEASURES[name](plan, group.numpy(), parts) / plan.epsilons[group]
    if used.max() > 1 + 1e-9:
        raise PlanError(f"The filter {name!r} let a record spend {used.max():.6f} of its budget.")
    return {
        "largest_part": float(used.max()),
        "part_spent": np.quantile(used, QUANTILES).tolist(),
        "used_up": float((used > USED_UP).mean()),
    }


def planned(settings: Settings, seed: int) -> tuple[Plan, Tensor]:
    """The plan that pays for `nominal` full steps, and the group of each record.

    Raises InputError if the accountant does not certify the filter's cap, or if there is no filter and the budgets do
    not pay for all steps.
    """
    options, name = settings.options, settings.options.get("filter", "none")
    steps = settings.steps or 0
    nominal, wanted = options.get("nominal", steps), steps * options.get("runs", 1)
    if CERTIFIED_BY.get(name, settings.accountant) != settings.accountant:
        raise InputError(f"The filter {name!r} needs {CERTIFIED_BY[name]!r}, got {settings.accountant!r}.")
    if name == "none" and nominal < wanted:
        raise InputError(f"Without a filter, budgets for {nominal} steps do not pay for {wanted}.")
    budgets = budgets_of(settings, RECORDS[settings.dataset], seed)
    recipe = epsilons.Recipe(steps=nominal, batch_size=settings.batch_size, clip_norm=settings.clip_norm)
    plan = epsilons.plan(budgets, recipe, settings.strategy, accountant=ACCOUNTANTS_HERE[settings.accountant])
    return plan, torch.from_numpy(budgets.group.copy())


def make_filter(settings: Settings, plan: Plan, group: Tensor) -> Filter:
    """The filter of these settings, with full meters."""
    extra = {key: settings.options[key] for key in ("floor",) if key in settings.options}
    made: Filter = FILTERS[settings.options.get("filter", "none")](plan, group, **extra)
    return made


def refresh_of(settings: Settings) -> int:
    """Norms are looked at in each step of "gdp", never without a filter, and else as `refresh` says."""
    usual = {"gdp": 1, "none": 0}.get(settings.options.get("filter", "none"), 10)
    return int(settings.options.get("refresh", usual))


@cache
def features(name: str) -> tuple[Records, Records]:
    """Training and test records of MNIST as 256 numbers of norm 1, and a column of ones.

    Scattering, averaged on a grid of 4 × 4, then a fixed orthogonal projection. Nothing is fitted to the data.
    """
    coins = torch.Generator().manual_seed(PROJECTION_SEED)
    made = []
    for split in ("train", "test"):
        data = epsilons.data.load(name, split)
        inputs, targets = torch.from_numpy(data.inputs), torch.from_numpy(data.targets).long()
        blocks = [scattering(_pixels(block), pooled=4) for block in torch.split(inputs, 512)]
        wide = blocks[0].shape[1]
        projection = torch.linalg.qr(torch.randn(wide, FEATURES, generator=coins.manual_seed(PROJECTION_SEED)))[0]
        unit = torch.cat([F.normalize(block @ projection) for block in blocks])
        made.append(Records.of(torch.cat([unit, torch.ones(len(unit), 1)], dim=1), targets))
    return made[0], made[1]


@cache
def images(name: str) -> tuple[Records, Records]:
    """Training and test records as normalised images."""
    made = []
    for split in ("train", "test"):
        data = epsilons.data.load(name, split)
        made.append(Records.of(torch.from_numpy(data.inputs), torch.from_numpy(data.targets).long()))
    return made[0], made[1]


def _pixels(images: Tensor) -> Tensor:
    """Back to [0, 1]: the library normalises MNIST by the stated constants 0.1307 and 0.3081."""
    return (images * 0.3081 + 0.1307).clamp(0, 1)
