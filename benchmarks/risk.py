"""Budgets by risk beside the epsilons that imply the same odds: accuracy, and shadow models below declared limits.

    python benchmarks/risk.py [SEEDS [SHADOWS]]

MNIST, a linear model on 729 scattering features, Scale. Tiers declare 55, 60 and 65 right guesses of 100. Each way has
the learning rate that is best on the last 10,000 training pictures, for a model that is trained on the others; this
choice is not charged. Then it prints the accuracy on the test pictures for each seed, and attacks the plan by risk with
shadow models: the largest lower bound on TPR − FPR beside what is certified and what was declared. 15 minutes on one
core.
"""

from __future__ import annotations

import math
import sys

import numpy as np
import torch

import epsilons
from epsilons.auditing.membership import attack
from epsilons.training.features import FEATURES

STEPS, RATE, CLIP_NORM, MOMENTUM, VALIDATION = 300, 4096 / 60_000, 0.1, 0.9, 10_000
RATES = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0)
ODDS = {"strict": 55, "medium": 60, "open": 65}
SHARES, TAIL = {"strict": 0.34, "medium": 0.43, "open": 0.23}, (4.0, 1e-5)
Data = tuple[torch.Tensor, torch.Tensor]


def mnist(split: str) -> Data:
    found = epsilons.data.load("mnist", split, pixels=True)
    pictures = torch.as_tensor(np.asarray(found.inputs)).float()
    return FEATURES["scattering"](pictures, pooled=3), torch.as_tensor(np.asarray(found.targets)).long()


def budgets_of(way: str, records: int, seed: int) -> epsilons.Budgets:
    """Tiers drawn at random: by risk, or with the largest epsilon that promises the same odds at delta."""
    if way == "by risk":
        risks = {name: epsilons.Risk(odds=odds) for name, odds in ODDS.items()}
        return epsilons.Budgets.by_risk(risks, SHARES, tail=TAIL, records=records, seed=seed)
    delta = TAIL[1]
    implied = {name: math.log((odds / 100 - delta) / (1 - odds / 100)) for name, odds in ODDS.items()}
    shares = {implied[name]: share for name, share in SHARES.items()}
    return epsilons.Budgets.from_shares(shares, records=records, delta=delta, seed=seed)


def plan_of(budgets: epsilons.Budgets) -> epsilons.Plan:
    return epsilons.plan(budgets, epsilons.Recipe(STEPS, RATE * budgets.records, CLIP_NORM), "scale")


def accuracy(way: str, train: Data, test: Data, lr: float, seed: int) -> float:
    budgets = budgets_of(way, len(train[1]), seed)
    model = zeros(train[0].shape[1])
    how = epsilons.Training(lr=lr, momentum=MOMENTUM)
    epsilons.fit(model, train, plan_of(budgets), budgets=budgets, training=how, seed=seed)
    with torch.no_grad():
        return 100 * float((model(test[0]).argmax(1) == test[1]).double().mean())


def zeros(features: int) -> torch.nn.Linear:
    model = torch.nn.Linear(features, 10)
    for parameter in model.parameters():
        torch.nn.init.zeros_(parameter)
    return model


def attacked(train: Data, test: Data, lr: float, shadows: int) -> None:
    budgets = budgets_of("by risk", len(train[1]), 0)
    plan = plan_of(budgets)
    options = {"shadows": shadows, "lr": lr, "momentum": MOMENTUM, "jobs": 1}
    found = attack(zeros(train[0].shape[1]), train, plan, budgets=budgets, population=test, **options)
    above = [f"{one.attack} on {found.groups[one.group].label}" for one in found.exceeds_certified]
    print(f"{shadows} shadows, above the certified curve: {', '.join(above) or 'none'}")
    for one in found.attacks:
        row, roc, odds = found.groups[one.group], one.roc, list(ODDS.values())[one.group]
        power = row.certified.power[np.isin(row.certified.rate, roc.rate)]
        print(
            f"{one.attack}, {odds} of 100: TPR - FPR {(roc.found - roc.rate).max():.4f}, lower bound "
            f"{(roc.band - roc.rate).max():.4f}; certified {plan.certified_limits[one.group, 0]:.4f}, declared "
            f"{2 * odds / 100 - 1:.2f}; lower bound over certified TPR at most {(roc.band / power).max():.3f}"
        )


def main(seeds: int, shadows: int) -> None:
    train, test = mnist("train"), mnist("test")
    fitted, held = (tuple(x[part] for x in train) for part in (slice(-VALIDATION), slice(-VALIDATION, None)))
    chosen = {}
    for way in ("by risk", "via epsilon"):
        scores = {lr: accuracy(way, fitted, held, lr, seed=100) for lr in RATES}
        chosen[way] = max(scores, key=scores.__getitem__)
        print(f"{way}, validation: {', '.join(f'{lr:g}: {one:.2f}' for lr, one in scores.items())}", flush=True)
        for lr in sorted({chosen[way], 16.0}):
            every = [accuracy(way, train, test, lr, seed) for seed in range(seeds)]
            mean = f"{np.mean(every):.2f} ± {np.std(every, ddof=1):.2f}"
            print(f"{way}, learning rate {lr:g}: {mean}, {np.round(every, 2).tolist()}", flush=True)
    attacked(train, test, chosen["by risk"], shadows)


if __name__ == "__main__":
    seeds, shadows = [*map(int, sys.argv[1:]), *(5, 64)[len(sys.argv) - 1 :]]
    main(seeds, shadows)
