"""Audits of plans of persons: canaries with 10 rows each keep their bounds; rows clipped by themselves do not."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch

import epsilons
import program
from epsilons.auditing.canaries import CANARY_ROWS, AttackConfig, canaries
from epsilons.draws.randomness import Randomness
from epsilons.errors import InputError
from epsilons.training.microbatches import Clipper
from sums import OVERSTATED

STEPS = 30


@cache
def plan(unit: str = "person") -> epsilons.Plan:
    budgets = epsilons.Budgets.from_shares({1.0: 0.5, 4.0: 0.5}, records=1000, seed=0, unit=unit)
    return epsilons.plan(budgets, epsilons.Recipe(STEPS, 100, 1.0), accountant="rdp")


def check_bounds(seed: int) -> None:
    result = epsilons.audit(plan(), canaries=200, canary_rows=10, seed=seed)
    assert result.verdict == "consistent"
    by_group = [deviation for deviation in result.reestimate.deviations if deviation.group is not None]
    assert by_group == [], "rates, draws and contributions; what is said of noise alone is not about persons"
    for group, epsilon in zip(result.groups, plan().epsilons, strict=True):
        assert max(group.one_run, group.one_run_fdp) <= epsilon
    assert (result.reestimate.epsilon <= 1.1 * plan().epsilons).all()


@pytest.mark.parametrize("seed", [*range(2), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 20))])
def test_the_bounds_of_canaries_who_own_10_rows_hold(seed: int):
    check_bounds(seed)


@pytest.mark.parametrize("rows", [1, 3, 50])
def test_a_canary_adds_no_more_than_one_person_may_with_all_its_rows(rows: int):
    trace = canaries(plan(), AttackConfig(canaries=50, canary_rows=rows, seed=1)).trace
    phase = plan().phases[0]
    assert np.allclose(trace.contribution[0], phase.weight * phase.clip_norm / OVERSTATED, rtol=1e-5)
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
    assert "person" not in description
    assert (
        f"canary persons of {CANARY_ROWS} rows each" in canaries(plan(), AttackConfig(canaries=20, seed=0)).description
    )


def test_without_a_signal_every_bound_of_canary_persons_is_0(monkeypatch: pytest.MonkeyPatch):
    """A thousand times the noise; alpha is the chance that a bound is positive all the same."""
    true = Randomness.noise
    monkeypatch.setattr(Randomness, "noise", lambda self, *address: 1000 * true(self, *address))
    result = epsilons.audit(plan(), canaries=200, seed=0, alpha=1e-4)
    assert [(group.one_run, group.one_run_fdp) for group in result.groups] == [(0.0, 0.0)] * 2
    assert result.verdict == "consistent"


@pytest.mark.parametrize("rows", [0, 2.0, True])
def test_a_number_of_canary_rows_is_whole_and_above_0(rows: object):
    with pytest.raises(InputError, match="canary_rows must be a whole number"):
        epsilons.audit(plan(), canaries=20, canary_rows=rows)


def test_canaries_of_records_take_no_number_of_rows():
    with pytest.raises(InputError, match="for records, and a record is one row"):
        epsilons.audit(plan("record"), canaries=20, canary_rows=10)


CONFIG = """
[data]
train = "visits.csv"
test_share = 0.2
target = "label"
classes = ["no", "yes"]
person = "patient"
[data.numeric]
age = [0, 100]
[budgets]
column = "epsilon"
delta = 1e-4
[model]
name = "logistic"
[training]
steps = 5
batch_size = 10
lr = 0.2
rows_per_person = 4
[privacy]
accountant = "rdp"
"""


def test_a_run_of_a_config_of_persons_is_audited_for_persons(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    rows = [f"p{i % 60},{20 + i % 60},{('no', 'yes')[i % 7 % 2]},{(1, 4)[i % 2]}" for i in range(150)]
    Path("visits.csv").write_text("\n".join(["patient,age,label,epsilon", *rows]) + "\n")
    Path("visits.toml").write_text(CONFIG)
    program.epsilons("train", "visits.toml").succeeded()
    audit = ("audit", "runs/visits-1", "--canaries", "20", "--seed", "0", "--canary-rows", "5")
    outcome = program.epsilons(*audit)
    outcome.succeeded()
    assert "Each canary is a person who owns 5 rows" in " ".join(outcome.out.split())
    found = json.loads(Path("runs/visits-1/audit.json").read_text())
    assert found["setting"]["canary_rows"] == 5
    assert found["holds"]
    program.epsilons("report", "runs/visits-1").succeeded()
    words = json.loads(Path("runs/visits-1/report.json").read_text())["audited"]["words"]
    assert words.startswith("An audit attacked the training with synthetic persons")
