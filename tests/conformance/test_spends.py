"""Promise: the table that calibration gives to a set of budgets keeps every one of them, by an independent count.

The oracles share nothing with any accountant: closed forms in both directions for one step, a quadrature over one of
them for two, the exact Gaussian where everyone is always drawn (tests/oracles.py).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import pytest

import epsilons
import oracles

from .adapters import Solution, Trainer


@dataclass(frozen=True)
class Wishes:
    """Budgets and a recipe that an oracle can follow to the end."""

    levels: tuple[float, ...]
    deltas: tuple[float, ...]
    counts: tuple[int, ...]
    steps: int
    rate: float

    @property
    def group(self) -> tuple[int, ...]:
        return tuple(g for g, count in enumerate(self.counts) for _ in range(count))


CASES = {
    "one step": Wishes((0.5, 1.0, 3.0), (1e-5,) * 3, (40, 50, 30), 1, 0.1),
    "one step, mostly drawn": Wishes((0.5, 1.0, 3.0), (1e-5,) * 3, (40, 50, 30), 1, 0.8),
    "one step, a delta each": Wishes((1.0, 1.1, 1.2), (1e-3, 1e-5, 1e-7), (40, 50, 30), 1, 0.1),
    "two steps": Wishes((0.7, 2.0), (1e-5,) * 2, (60, 60), 2, 0.2),
    "everyone, always": Wishes((0.5, 1.0, 3.0), (1e-5,) * 3, (40, 50, 30), 50, 1.0),
}


def spent(solution: Solution, group: int, delta: float) -> float:
    """Exactly what a record of this group has spent at delta."""
    history = solution.history(group)
    if not history:
        return 0.0
    if all(q == 1 for q, _, _ in history):  # Gaussians in a row are one with the squares of 1/σ added
        return oracles.gaussian(1 / math.sqrt(sum(steps / s**2 for _, s, steps in history)), 1, delta)
    each = [(q, s) for q, s, steps in history for _ in range(steps)]
    exact = {1: oracles.one_step, 2: oracles.two_steps}[len(each)]
    arguments = each[0] if len(each) == 1 else each
    return max(exact(*arguments, delta, direction) for direction in oracles.DIRECTIONS)  # type: ignore[operator]


def solved(trainer: Trainer, wishes: Wishes, method: str) -> Solution:
    """Where the groups are trained one after another, there are as many steps for each."""
    if method.startswith("sequential"):
        wishes = replace(wishes, steps=wishes.steps * len(wishes.epsilons))
    recipe = epsilons.Recipe(steps=wishes.steps, batch_size=wishes.rate * len(wishes.group), clip_norm=0.5)
    solution = trainer.solve(wishes.epsilons, wishes.deltas, wishes.group, recipe, method)
    assert sum(table.steps for table in solution.phases) == wishes.steps
    return solution


@pytest.mark.parametrize("case", CASES)
def test_no_group_spends_more_than_its_budget(trainer: Trainer, method: str, case: str):
    wishes = CASES[case]
    if method == "sample, pld" and case != "two steps":
        pytest.skip("takes long; Sample's own arithmetic is examined with rdp")
    if wishes.rate == 1 and method.startswith("sample"):
        pytest.skip("rates above 1 cannot be had, so Sample has nothing to give where everyone is always drawn")
    solution = solved(trainer, wishes, method)
    for group, (level, delta) in enumerate(zip(wishes.epsilons, wishes.deltas, strict=True)):
        exact = spent(solution, group, delta)
        assert exact <= level * (1 + 1e-9), f"group {group}"
        assert exact <= solution.stated[group] * (1 + 1e-9), f"group {group}"


def test_a_long_run_keeps_its_budget_by_another_programs_count(trainer: Trainer, method: str):
    """Opacus' PRV accountant on the whole run, its lower end: above a budget only if the budget is broken."""
    if method == "sample, pld":
        pytest.skip("takes long; Sample's own arithmetic is examined with rdp")
    wishes = Wishes((1.0, 2.0, 4.0), (1e-5,) * 3, (400, 500, 300), 800, 0.02)
    solution = solved(trainer, wishes, method)
    for group, level in enumerate(wishes.epsilons):
        lower, _, _ = oracles.prv(tuple(solution.history(group)), wishes.deltas[group])
        assert lower <= level, f"group {group}"
