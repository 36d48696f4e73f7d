"""The settings of the demonstration: a grid search for the baseline, on seeds that the demonstration does not show.

    python experiments/digits_settings.py [--seeds 5]

Prints the mean test accuracy of `uniform` (everyone at the strictest budget) per setting, best last, and what Scale
and Sample reach with the baseline's best. Takes about ten minutes on one core.
"""

from __future__ import annotations

import argparse
import itertools

import numpy as np
import torch
from torch import nn

from epsilons import Budgets, Plan, Recipe, fit, plan
from epsilons.cli.demo import SHARES, Digits
from epsilons.draws.randomness import key_from_seed
from epsilons.training import Randomness, Training

FIRST_SEED = 100


def accuracy(plan: Plan, digits: Digits, lr: float, seeds: range) -> float:
    """Mean test accuracy over seeds."""
    scores = []
    for seed in seeds:
        budgets = Budgets.from_shares(SHARES, records=len(digits.train[0]), seed=seed)
        torch.manual_seed(seed)
        run = fit(
            nn.Linear(64, 10),
            digits.train,
            plan,
            budgets=budgets,
            training=Training(lr=lr, progress=False),
            evaluation=digits.test,
            seed=Randomness.with_key(key_from_seed(seed)),
        )
        scores.append(run.metrics[-1]["accuracy"])
    return float(np.mean(scores))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=5)
    seeds = range(FIRST_SEED, FIRST_SEED + parser.parse_args().seeds)
    digits = Digits.load()
    budgets = Budgets.from_shares(SHARES, records=len(digits.train[0]))
    results = []
    for steps, batch in itertools.product((50, 100, 200), (128, 256, 512)):
        for clip_norm in (0.5, 1.0, 2.0):
            recipe = Recipe(steps=steps, batch_size=batch, clip_norm=clip_norm)
            uniform = plan(budgets, recipe, strategy="uniform")
            for lr in (0.25, 0.5, 1.0, 2.0, 4.0):
                results.append((accuracy(uniform, digits, lr, seeds), recipe, lr))
                print(f"{results[-1][0]:.4f}  lr {lr:<5g} {recipe}", flush=True)
    best, recipe, lr = max(results, key=lambda result: result[0])
    print(f"\nbest for uniform: {best:.4f}  lr {lr:g} {recipe}")
    for strategy in ("scale", "sample"):
        print(f"{strategy} with the same settings: {accuracy(plan(budgets, recipe, strategy), digits, lr, seeds):.4f}")


if __name__ == "__main__":
    main()
