"""Audits of plans of persons: canaries with 10 rows each keep their bounds; rows clipped by themselves do not."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
import torch

import epsilons
from epsilons.auditing.canaries import CANARY_ROWS, AttackConfig, canaries
from epsilons.training.microbatches import Clipper

STEPS = 30


@cache
def plan(unit: str = "person") -> epsilons.Plan:
    budgets = epsilons.Budgets.from_shares({1.0: 0.5, 4.0: 0.5}, records=1000, seed=0, unit=unit)
    return epsilons.plan(budgets, epsilons.Recipe(STEPS, 100, 1.0), accountant="rdp")


def check_bounds(seed: int) -> None:
    result = epsilons.audit(plan(), canaries=200, seed=seed)
    assert result.verdict == "consistent"
    by_group = [deviation for deviation in result.reestimate.deviations if deviation.group is not None]
    assert by_group == [], "rates, draws and contributions; what is said of noise alone is not about persons"
    for group, epsilon in zip(result.groups, plan().epsilons, strict=True):
        assert max(group.one_run, group.one_run_fdp) <= epsilon
    assert (result.reestimate.epsilon <= 1.1 * plan().epsilons).all()


@pytest.mark.parametrize("seed", [*range(2), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 20))])
def test_the_bounds_of_canaries_who_own_10_rows_hold(seed: int):
    check_bounds(seed)


def test_a_canary_adds_no_more_than_one_person_may_with_all_its_rows():
    trace = canaries(plan(), AttackConfig(canaries=50, seed=1)).trace
    phase = plan().phases[0]
    assert np.allclose(trace.contribution[0], phase.weight * phase.clip_norm, rtol=1e-5)
    assert trace.drawn.sum() == pytest.approx(STEPS * float(phase.sample_rate @ trace.records), rel=0.1)


def test_an_audit_notices_rows_that_are_clipped_in_place_of_persons(monkeypatch: pytest.MonkeyPatch):
    """Each row to the person's norm: a canary then adds 10 times its bound."""

    def by_row(self: Clipper, issued, losses: torch.Tensor):
        sizes = torch.from_numpy(issued.readings.sizes)
        bounds = [bound.repeat_interleave(sizes) for bound in self._bounds(issued)]
        total = self._engine.clipped_sum(losses, *bounds)
        self._engine._draw[-1] = np.unique(self._engine._draw[-1])  # so that draws are counted by person
        return total

    monkeypatch.setattr(Clipper, "clipped_sum", by_row)
    result = epsilons.audit(plan(), canaries=200, seed=0)
    assert result.verdict == "violated"
    assert [group.group for group in result.violated] == [0, 1]
    named = {(deviation.what, deviation.group) for deviation in result.reestimate.deviations}
    assert {("contribution", 0), ("contribution", 1)} <= named
    assert (result.reestimate.epsilon > CANARY_ROWS * plan().epsilons).all()


def test_an_audit_of_records_has_canaries_of_one_row():
    description = canaries(plan("record"), AttackConfig(canaries=20, seed=0)).description
    assert "rows" not in description
    assert f"of {CANARY_ROWS} rows each" in canaries(plan(), AttackConfig(canaries=20, seed=0)).description
