"""Risks: held to the exact Gaussian's trade-off curve, to numbers found with other code, and to one another."""

from __future__ import annotations

import json
import math

import pytest
from scipy.stats import norm
from typer.testing import CliRunner

from epsilons import Budgets, Recipe, SampledGaussian, plan
from epsilons.accounting import rdp
from epsilons.accounting.profile import DELTAS, Profile
from epsilons.cli import app
from epsilons.errors import EpsilonsWarning, PlanError
from epsilons.planning import risk, risk_profile

CIFAR = Recipe(1465, 1024, 1.0)


@pytest.mark.parametrize("mu", [0.2, 1.0, 3.0])
def test_without_sampling_attacks_are_the_exact_gaussian_s(mu):
    found = Profile([SampledGaussian(1.0, math.sqrt(100) / mu, 100)])
    exact = 2 * norm.cdf(mu / 2) - 1  # Dong et al., arXiv 1905.02383v3: G_mu
    assert exact <= found.advantage <= exact * 1.002
    for a in (1e-3, 1e-2, 0.3):
        power = norm.cdf(norm.ppf(a) + mu)
        assert power <= found.power(a) <= power * 1.01


def test_a_record_that_takes_no_part_has_no_risk():
    found = Profile([SampledGaussian(0.0, 1.0, 100)])
    assert found.advantage == 0
    assert found.power(0.01) == pytest.approx(0.01)
    assert (found.epsilons == 0).all()


def test_where_no_pld_exists_everything_may_be_found_and_rdp_bounds_epsilon():
    history = [SampledGaussian(0.5, 0.01, 1)]
    found = Profile(history)
    assert found.advantage == 1
    assert found.power(0.001) == 1
    assert found.epsilons.tolist() == [rdp.epsilon(history, delta) for delta in DELTAS]


def two_levels(own: float, others: float, share: float):
    made = plan(Budgets.from_shares({own: share, others: 1 - share}, records=50_000), CIFAR, "sample", "pld")
    return made, risk(made)[int(own > others)]


@pytest.mark.parametrize(
    ("own", "others", "share", "advantage", "power", "excess", "at_1e_7"),
    [
        # Recorded with a separate program: own level, others' level, own share; under Sample.
        (1.0, 20.0, 0.50, 0.066, 0.0166, 0.000, 1.864),
        (8.0, 0.5, 0.05, 0.588, 0.2490, 0.035, 9.630),
        (20.0, 1.0, 0.02, 0.908, 0.8530, 0.057, None),
    ],
)
def test_sample_s_risks_are_the_recorded_ones(own, others, share, advantage, power, excess, at_1e_7):
    _, found = two_levels(own, others, share)
    assert found.advantage == pytest.approx(advantage, abs=2e-3)
    assert found.power[1e-2] == pytest.approx(power, rel=2e-2)
    assert found.bayes_excess == pytest.approx(excess, abs=2e-3)
    if at_1e_7:
        assert found.epsilons[1e-7] == pytest.approx(at_1e_7, rel=5e-3)


def test_a_bayes_excess_of_nothing_does_not_hide_the_fatter_tail():
    _, strict = two_levels(1.0, 20.0, 0.5)
    assert strict.bayes_excess < 1e-3
    # 1.279 -> 1.864 at delta = 1e-7; and more further out.
    assert strict.tail_excess > 0.45


def test_scale_is_its_own_reference():
    made = plan(Budgets.from_shares({1.0: 0.5, 8.0: 0.5}, records=50_000), CIFAR, "scale", "pld")
    assert (risk_profile.excess(risk(made)) < 2e-4).all()


def test_who_is_left_out_risks_nothing_though_scale_could_not_meet_the_budget():
    budgets = Budgets.from_shares({0.05: 0.5, 2.0: 0.5}, records=1000)
    left, kept = risk(plan(budgets, Recipe(20, 50, 1.0), "exclude", "rdp", threshold=1.0))
    assert (left.advantage, left.bayes_excess, left.tail_excess) == (0, 0, 0)
    assert kept.bayes_excess > 0.01  # it is drawn twice as often as under scale


def test_epsilons_of_a_risk_are_the_plan_s_own_at_those_deltas():
    made, _ = two_levels(1.0, 3.0, 0.5)
    for group, one in enumerate(risk(made)):
        for delta in DELTAS:
            assert one.epsilons[delta] == pytest.approx(made.epsilon_spent(delta=delta)[group], rel=1e-9)


def test_a_cap_on_the_excess_is_kept_and_lowers_the_weight():
    budgets = Budgets.from_shares({1.0: 0.5, 8.0: 0.5}, records=50_000)
    free = plan(budgets, CIFAR, "mix", "pld", weight=1)
    with pytest.warns(EpsilonsWarning, match="lowered mix's weight from 1 to"):
        capped = plan(budgets, CIFAR, "mix", "pld", weight=1, max_excess=0.02, floor=0.005)
    assert capped.sample_rate.min() >= 0.005
    assert risk_profile.excess(risk(free)).max() > 0.02
    assert (risk_profile.excess(risk(capped)) <= 0.02).all()
    assert budgets.epsilons[0] < budgets.epsilons[1]
    assert capped.sample_rate[0] > free.sample_rate[0]
    assert capped.sample_rate[0] < 1024 / 50_000  # and not simply Scale
    with pytest.raises(PlanError, match="max_excess"):
        plan(budgets, CIFAR, "mix", "pld", max_excess=-1.0)
    with pytest.raises(PlanError, match="floors alone"):
        plan(budgets, CIFAR, "mix", "pld", weight=1, max_excess=0.0, floor="1:0.03")


def test_the_odds_are_what_the_advantage_says_rounded_up():
    assert "at most 56 of 100 times" in risk_profile.Risk({}, 0.105, {}, 0, 0).odds
    assert "at most 50 of 100 times" in risk_profile.Risk({}, 0.0, {}, 0, 0).odds
    assert "at most 100 of 100 times" in risk_profile.Risk({}, 0.999, {}, 0, 0).odds


def test_the_command_line_shows_risks_and_writes_them_as_json():
    words = ["plan", "--shares", "1:50%,3:50%", "--records", "5000", "--batch-size", "100", "--steps", "200"]
    words += ["--strategy", "sample", "--risk"]
    shown = CliRunner().invoke(app, words)
    assert shown.exit_code == 0, shown.output
    assert "of 100 times; 50 by tossing a coin" in shown.output
    written = json.loads(CliRunner().invoke(app, [*words, "--json"]).output)
    assert [set(row) for row in written["risk"]] == [
        {"epsilons", "advantage", "power", "bayes_excess", "tail_excess", "unit", "shares_declared"} for _ in range(2)
    ]


def test_groups_of_few_records_show_nothing_of_their_own():
    made = plan(Budgets([1.0] * 500 + [2.0] * 3 + [4.0] * 500), Recipe(100, 50, 1.0), "sample", "pld")
    table = risk_profile.risk_table(made, risk(made))[1]
    assert len(table) == 2
    assert "merged" in table[1]
