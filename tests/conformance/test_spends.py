"""Promise: the table that calibration gives to a set of budgets keeps every one of them, by an independent count.

The oracles share no code with any accountant: closed forms in both directions for one step, a quadrature over one of
them for two, the exact Gaussian if every record is always drawn (tests/oracles.py).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import pytest

import epsilons
import oracles

from .adapters import Solution, Trainer


@dataclass(frozen=True)
class Setting:
    """Budgets per group, strictest first, and a recipe that an oracle can follow to the end."""

    epsilons: tuple[float, ...]
    deltas: tuple[float, ...]
    counts: tuple[int, ...]
    steps: int
    rate: float


CASES = {
    "one step": Setting((0.5, 1.0, 3.0), (1e-5,) * 3, (40, 50, 30), 1, 0.1),
    "one step, mostly drawn": Setting((0.5, 1.0, 3.0), (1e-5,) * 3, (40, 50, 30), 1, 0.8),
    "one step, a delta each": Setting((1.0, 1.1, 1.2), (1e-3, 1e-5, 1e-7), (40, 50, 30), 1, 0.1),
    "two steps": Setting((0.7, 2.0), (1e-5,) * 2, (60, 60), 2, 0.2),
    "everyone, always": Setting((0.5, 1.0, 3.0), (1e-5,) * 3, (40, 50, 30), 50, 1.0),
}


def spent(solution: Solution, group: int, delta: float) -> float:
    """Exactly what a record of this group has spent at delta."""
    history = solution.history(group)
    if not history:
        return 0.0
    if all(q == 1 for q, _, _ in history):  # a sequence of Gaussians is one with the squares of 1/σ added
        return oracles.gaussian(1 / math.sqrt(sum(steps / s**2 for _, s, steps in history)), 1, delta)
    single = [(q, s) for q, s, steps in history for _ in range(steps)]
    exact = {1: oracles.one_step, 2: oracles.two_steps}[len(single)]
    arguments = single[0] if len(single) == 1 else single
    return max(exact(*arguments, delta, direction) for direction in oracles.DIRECTIONS)  # type: ignore[operator]


def solved(trainer: Trainer, setting: Setting, method: str) -> Solution:
    """Where the groups are trained one after another, each has as many steps."""
    steps = setting.steps * (len(setting.epsilons) if method.startswith("sequential") else 1)
    budgets = epsilons.Budgets(np.repeat(setting.epsilons, setting.counts), np.repeat(setting.deltas, setting.counts))
    assert budgets.epsilons.tolist() == list(setting.epsilons)
    recipe = epsilons.Recipe(steps=steps, batch_size=setting.rate * sum(setting.counts), clip_norm=0.5)
    solution = trainer.solve(budgets, recipe, method)
    assert sum(table.steps for table in solution.phases) == steps
    return solution


@pytest.mark.parametrize("case", CASES)
def test_no_group_spends_more_than_its_budget(trainer: Trainer, method: str, case: str):
    setting = CASES[case]
    if method == "sample, pld" and case != "two steps":
        pytest.skip("takes long; Sample's own arithmetic is examined with rdp")
    if setting.rate == 1 and method.startswith("sample"):
        pytest.skip("no rate is above 1, so Sample has nothing to give where every record is always drawn")
    solution = solved(trainer, setting, method)
    for group, (epsilon, delta) in enumerate(zip(setting.epsilons, setting.deltas, strict=True)):
        exact = spent(solution, group, delta)
        assert exact <= epsilon * (1 + 1e-9), f"group {group}"
        assert exact <= solution.stated[group] * (1 + 1e-9), f"group {group}"


def test_a_long_run_keeps_its_budget_by_another_programs_count(trainer: Trainer, method: str):
    """Opacus' PRV accountant on the whole run, its lower end: above a budget only if the budget is broken."""
    if method == "sample, pld":
        pytest.skip("takes long; Sample's own arithmetic is examined with rdp")
    setting = Setting((1.0, 2.0, 4.0), (1e-5,) * 3, (400, 500, 300), 800, 0.02)
    solution = solved(trainer, setting, method)
    for group, epsilon in enumerate(setting.epsilons):
        lower, _, _ = oracles.prv(tuple(solution.history(group)), setting.deltas[group])
        assert lower <= epsilon, f"group {group}"
