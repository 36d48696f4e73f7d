"""The demonstration: logistic regression on the handwritten digits, with tiers assigned at random.

Its settings were chosen for all records at the strictest budget, without momentum, on a part of the training data and
on seeds that the demonstration does not show (the protocol of experiments/protocol.toml). It shows seeds 0-4.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.progress import track
from torch import Tensor, nn

from .. import data, planning
from ..budgets.budgets import Budgets
from ..configs.plan_choice import saved_plan
from ..draws.randomness import key_from_seed
from ..errors import DataError, printable
from ..ledger.plan_folder import PlanFolder, opened
from ..planning import Plan, Recipe
from ..planning.display import rounded_spend, spend_table
from ..training import Randomness, Training, fit
from ..training.fitting.fit_loop import Run
from .options import console, show_plan, show_table

SHARES = {0.5: 0.34, 1.0: 0.43, 2.0: 0.23}
RECIPE = Recipe(steps=50, batch_size=512, clip_norm=2.0)
LEARNING_RATE = 1.0
SHADOWS = 64
STRATEGIES = {
    "uniform": "everyone at the strictest",
    "exclude": "only the looser tiers",
    "scale": "Scale: own clip norms",
    "sample": "Sample: own rates",
}
OPTIONS: dict[str, Any] = {"exclude": {"threshold": 1.0}}


@dataclass(frozen=True)
class Digits:
    """The handwritten digits as tensors: inputs (records, 64), targets (records,)."""

    train: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]

    @classmethod
    def load(cls) -> Digits:
        train, test = (tuple(map(torch.from_numpy, data.load("digits", split))) for split in ("train", "test"))
        return cls((train[0], train[1]), (test[0], test[1]))

    def fit(self, plan: Plan | PlanFolder, budgets: Budgets, run_dir: Path, seed: int | None, progress: bool) -> Run:
        torch.set_num_threads(1)  # more threads make a model this small slower
        torch.manual_seed(seed or 0)
        return fit(
            nn.Linear(64, 10),
            self.train,
            plan,
            budgets=budgets,
            training=Training(lr=LEARNING_RATE, device="cpu", progress=progress),
            evaluation=self.test,
            # A seeded key would differ with the plan. This one gives all strategies the same coins and noise.
            seed=None if seed is None else Randomness.with_key(key_from_seed(seed)),
            run_dir=run_dir,
        )


def all_strategies(folder: Path, seeds: Sequence[int], quiet: bool = False) -> None:
    """Train the same model under each strategy over some seeds, and print accuracy and spends."""
    out, digits = console(quiet=quiet), Digits.load()
    records = len(digits.train[0])
    tiers = ", ".join(f"{share:.0%} of them ε = {level:g}" for level, share in SHARES.items())
    out.print(
        f"{records:,} digits (8x8), logistic regression, {RECIPE.steps} steps of about {RECIPE.batch_size:g} records.",
        style="bold",
    )
    out.print(f"The tiers are SIMULATED, assigned at random: {tiers}, δ = 1e-05.\n")
    plans: dict[str, Plan] = {}
    accuracy: dict[str, list[float]] = {strategy: [] for strategy in STRATEGIES}
    jobs = [(seed, strategy) for seed in seeds for strategy in STRATEGIES]
    for seed, strategy in track(jobs, "training", console=console(stderr=True, quiet=quiet), transient=True):
        budgets = Budgets.from_shares(SHARES, records=records, seed=seed)
        if strategy not in plans:  # tiers have the same sizes for every seed, so the plan is the same
            plans[strategy] = planning.plan(budgets, RECIPE, strategy, **OPTIONS.get(strategy, {}))
        run = digits.fit(plans[strategy], budgets, folder / f"{strategy}-{seed}", seed, progress=False)
        accuracy[strategy].append(float(run.metrics[-1]["accuracy"]))
    levels = plans["uniform"].epsilons
    rows = []
    for strategy, label in STRATEGIES.items():
        values = 100 * np.array(accuracy[strategy])
        spread = f" ± {values.std(ddof=1):.1f}" if len(values) > 1 else ""
        spends = [rounded_spend(s, level) for s, level in zip(plans[strategy].epsilon_spent(), levels, strict=True)]
        rows.append([label, f"{values.mean():.1f}{spread} %", f"{values.min():.1f}–{values.max():.1f} %", *spends])
    headers = ["trained", "test accuracy", "worst–best seed", *(f"spent of ε = {level:g}" for level in levels)]
    show_table((headers, rows), out, left=1)
    if not quiet:
        out.print(membership_line(digits, plans["sample"]) + "\n")
    out.print(
        f"± is the standard deviation over {len(seeds)} seeds (tiers, draws and noise). Accuracy is on "
        f"{len(digits.test[0])} held-out digits.\n"
        "Model, learning rate and clip norm are the same for all rows, chosen for the first one on other seeds.\n"
        "Every ε above is for one run alone. These runs are seeded: with the seed, the noise can be removed.\n"
        f"Plan, ledger, metrics and model of each run: {printable(folder)}/"
    )


def membership_line(digits: Digits, plan: Plan) -> str:
    """How well an attacker who sees only a model recognises the members of each tier, by shadow models."""
    from ..auditing import membership

    torch.manual_seed(0)
    result = membership.attack(
        nn.Linear(64, 10),
        digits.train,
        plan,
        budgets=Budgets.from_shares(SHARES, records=len(digits.train[0]), seed=0),
        population=digits.test,
        lr=LEARNING_RATE,
        shadows=SHADOWS,
        attacks=["rmia"],
        dealt_at_random=True,
        device="cpu",
    )
    reached = ", ".join(f"{one.auc.value:.3f}" for one in result.attacks)
    certified = ", ".join(f"{math.ceil(1000 * row.certified_auc) / 1000:.3f}" for row in result.groups)
    levels = ", ".join(row.label for row in result.groups)
    return (
        f"Membership inference against Sample, {SHADOWS} shadow models: AUC {reached} for ε = {levels}; guessing 0.5, "
        f"certified at most {certified}."
    )


def under_plan(file: Path, folder: Path, quiet: bool = False) -> None:
    """Train once under a saved plan, with its tiers assigned at random and a new key."""
    out, digits, chosen = console(quiet=quiet), Digits.load(), saved_plan(file)
    plan, _ = opened(chosen)
    records = len(digits.train[0])
    if plan.records != records:
        raise DataError(
            f"The demonstration trains on {records:,} digits, got a plan for {plan.records:,} records in {file}. Plan "
            f"again with --records {records}."
        )
    group = np.random.default_rng(0).permutation(np.repeat(np.arange(len(plan.counts)), plan.counts))
    budgets = Budgets(plan.epsilons[group], plan.delta[group])
    out.print(f"{records:,} real handwritten digits (8x8); the plan's tiers are SIMULATED, assigned at random.\n")
    show_plan(plan, out)
    run = digits.fit(chosen, budgets, folder, seed=None, progress=not quiet)
    out.print(f"{sum(run.charged):,} of {plan.steps:,} steps charged; test accuracy {run.metrics[-1]['accuracy']:.1%}")
    show_table(spend_table(plan, run.charged), out)
    out.print(plan.guarantee_of_run("chacha20"), style="dim")
    out.print(f"\nPlan, ledger, metrics and model: {printable(folder)}/")
