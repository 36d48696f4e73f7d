"""What every attack promises: no signal gives bound 0, and a planted leak is found."""

from __future__ import annotations

import numpy as np
import pytest

import epsilons
from epsilons import auditing
from epsilons.draws.randomness import Randomness


@pytest.fixture(scope="module")
def plan() -> epsilons.Plan:
    budgets = epsilons.Budgets.from_shares({1.0: 0.5, 4.0: 0.5}, records=1_000, seed=0)
    return epsilons.plan(budgets, epsilons.Recipe(steps=40, batch_size=60, clip_norm=1.0))


def plant(monkeypatch, by: float) -> None:
    true = Randomness.noise
    monkeypatch.setattr(Randomness, "noise", lambda self, *address: by * true(self, *address))


@pytest.mark.parametrize("attack", auditing.ATTACKS)
def test_no_signal_gives_bound_0(attack, plan, monkeypatch):
    """A thousand times the noise hides everybody; alpha is the chance that a bound is positive all the same."""
    plant(monkeypatch, 1_000.0)
    findings = epsilons.audit(plan, attack, canaries=200, seed=0, alpha=1e-4)
    assert [(g.one_run, g.one_run_fdp) for g in findings.groups] == [(0.0, 0.0)] * 2
    assert findings.verdict == "consistent"


@pytest.mark.parametrize("attack", auditing.ATTACKS)
def test_a_planted_leak_is_found(attack, plan, monkeypatch):
    """A hundredth of the noise hides nobody: all groups are violated, and every bound says so."""
    plant(monkeypatch, 0.01)
    findings = epsilons.audit(plan, attack, canaries=200, seed=0)
    assert len(findings.violated) == 2
    assert findings.groups[0].one_run > 1.0
    assert findings.groups[0].gaussian_bound > 1.0


@pytest.mark.parametrize("attack", auditing.ATTACKS)
def test_scores_are_finite_and_one_per_canary_under_fair_coins(attack, plan):
    evidence = auditing.ATTACKS[attack](plan, auditing.AttackConfig(canaries=200, seed=0))
    scores = evidence.scores
    assert np.isfinite(scores.score).all()
    assert np.bincount(scores.group).tolist() == [200, 200]
    assert 140 < scores.included.sum() < 260  # six standard deviations
