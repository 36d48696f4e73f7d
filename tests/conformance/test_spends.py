"""Promise: the table that calibration gives to a set of budgets keeps every one of them, by an independent count.

The oracles share nothing with any accountant: closed forms in both directions for one step, a quadrature over one of
them for two, the exact Gaussian where everyone is always drawn (tests/oracles.py).
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest

import epsilons
import oracles

from .adapters import Table, Trainer


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


def spent(table: Table, group: int, delta: float) -> float:
    """Exactly what a record of this group has spent at delta."""
    q = table.sample_rate[group]
    weight = (table.weight or (1.0,) * len(table.clip_norm))[group]
    s = table.noise_std / (weight * table.clip_norm[group])
    if q == 1:
        return oracles.gaussian(s, table.steps, delta)
    if table.steps == 1:
        return max(oracles.one_step(q, s, delta, direction) for direction in oracles.DIRECTIONS)
    assert table.steps == 2
    return max(oracles.two_steps((q, s), (q, s), delta, direction) for direction in oracles.DIRECTIONS)


@pytest.mark.parametrize("case", CASES)
def test_no_group_spends_more_than_its_budget(trainer: Trainer, method: str, case: str):
    wishes = CASES[case]
    if method == "sample, pld" and case != "two steps":
        pytest.skip("takes long; Sample's own arithmetic is examined with rdp")
    if wishes.rate == 1 and method.startswith("sample"):
        pytest.skip("rates above 1 cannot be had, so Sample has nothing to give where everyone is always drawn")
    recipe = epsilons.Recipe(steps=wishes.steps, batch_size=wishes.rate * len(wishes.group), clip_norm=0.5)
    table = trainer.solve(wishes.levels, wishes.deltas, wishes.group, recipe, method)
    assert table.steps == wishes.steps
    for group, (level, delta) in enumerate(zip(wishes.levels, wishes.deltas, strict=True)):
        exact = spent(table, group, delta)
        assert exact <= level * (1 + 1e-9), f"group {group}"
        assert exact <= table.stated[group] * (1 + 1e-9), f"group {group}"


def test_a_long_run_keeps_its_budget_by_another_programs_count(trainer: Trainer, method: str):
    """Opacus' PRV accountant on the whole run, its lower end: above a budget only if the budget is broken."""
    if method == "sample, pld":
        pytest.skip("takes long; Sample's own arithmetic is examined with rdp")
    wishes = Wishes((1.0, 2.0, 4.0), (1e-5,) * 3, (400, 500, 300), 800, 0.02)
    recipe = epsilons.Recipe(steps=wishes.steps, batch_size=wishes.rate * 1200, clip_norm=0.5)
    table = trainer.solve(wishes.levels, wishes.deltas, wishes.group, recipe, method)
    for group, level in enumerate(wishes.levels):
        history = ((table.sample_rate[group], table.noise_std / table.clip_norm[group], table.steps),)
        lower, _, _ = oracles.prv(history, wishes.deltas[group])
        assert lower <= level, f"group {group}"
