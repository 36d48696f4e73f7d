"""Any budgets, any recipe: nobody above the promise by accountants that share nothing with the planner, little unused.

A few cases in every run; `--slow` makes it 500.
"""

from __future__ import annotations

import warnings

import numpy as np
import pytest

import oracles
from epsilons import Budgets, Plan, Recipe, SampledGaussian, plan
from epsilons.accounting import pld
from epsilons.errors import EpsilonsWarning, OutOfReach

#: Opacus' PRV estimates to within this much (against the exact Gaussian).
PRV_ERROR = 3e-5


def case(seed: int) -> tuple[Budgets, Recipe, str, str]:
    random = np.random.default_rng(seed)
    groups = int(random.integers(1, 21))
    levels = np.exp(random.uniform(np.log(0.05), np.log(20.0), size=groups))
    shares = np.exp(random.uniform(np.log(1e-4), 0.0, size=groups))
    records = 20_000
    counts = np.maximum((shares / shares.sum() * records).astype(int), 2)
    delta = 10 ** random.uniform(-9, -3, size=groups if random.random() < 0.3 else 1)
    budgets = Budgets(np.repeat(levels, counts), np.repeat(np.broadcast_to(delta, groups), counts))
    rate = float(np.exp(random.uniform(np.log(1e-4), np.log(0.9))))
    steps = int(np.exp(random.uniform(0.0, np.log(1e5))))
    recipe = Recipe(steps, rate * len(budgets), 1.0)
    return budgets, recipe, str(random.choice(["scale", "sample", "mix"])), str(random.choice(["pld", "pld", "rdp"]))


def exact_or_independent(row: SampledGaussian, delta: float, level: float) -> None:
    q, sigma, steps = row.sample_rate, row.noise_multiplier, row.steps
    if q == 1:
        assert oracles.gaussian(sigma, steps, delta) <= level
    elif steps == 1:
        assert max(oracles.one_step(q, sigma, delta, direction) for direction in oracles.DIRECTIONS) <= level
    elif pld._reach(row) / pld.fitted_grid(row) < 3e3 and steps * q * q < 1e4:
        finer = oracles.dp_accounting_pld(q, sigma, steps, pld.fitted_grid(row) / 4)
        assert finer.get_epsilon_for_delta(delta) <= level
    elif delta > 1e-8 and sigma > 0.5:
        try:
            lower, estimate, _ = oracles.prv(((q, sigma, steps),), delta, error=0.02)
        except (RuntimeError, ValueError, MemoryError):  # it is known to give up now and then
            return
        assert lower <= level
        assert estimate <= level * (1 + PRV_ERROR) + 1e-3


def check(seed: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", EpsilonsWarning)  # delta above 1/records
        budgets, recipe, strategy, accountant = case(seed)
        told = ""
        try:
            made: Plan = plan(budgets, recipe, strategy, accountant)
        except OutOfReach as error:
            # RDP's floor, or a group that Sample cannot draw: told with the way out, never capped in silence.
            told = str(error)
    if told:
        assert accountant == "rdp" or "could not be drawn at all" in told, (seed, told)
        return
    spends = made.spends()
    assert (spends <= made.levels).all(), seed
    used_up = (made.sample_rate == 1) | (spends >= made.levels * (1 - 1e-3))
    if accountant == "pld":
        assert used_up.all(), (seed, strategy)
    saturated = (made.sample_rate == 1).any()
    if not saturated:
        assert budgets.shares @ made.sample_rate == pytest.approx(recipe.batch_size / len(budgets), rel=1e-3), seed
    if strategy != "sample":
        assert budgets.shares @ made.clip_norm == pytest.approx(1.0, rel=1e-3), seed
    random = np.random.default_rng(seed)
    for group in random.permutation(len(made.levels))[:3]:
        row = SampledGaussian(float(made.sample_rate[group]), float(made.noise_multiplier[group]), made.steps)
        exact_or_independent(row, float(made.delta[group]), float(made.levels[group]))


# The cheap ones of the first ten: levels 200 times apart at a rate near 1e-5 take PLD's largest grids, and a minute.
@pytest.mark.parametrize("seed", [2, 3, 5, 8, 9])
def test_any_budgets_are_kept_and_used_up(seed):
    check(seed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [s for s in range(510) if s not in (2, 3, 5, 8, 9)])
def test_five_hundred_more(seed):
    check(seed)
