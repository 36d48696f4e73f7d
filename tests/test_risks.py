"""Odds and risks of a plan: against integrals, the exact Gaussian, numbers found with other code, and one another."""

from __future__ import annotations

import json
import math
from fractions import Fraction

import numpy as np
import pytest
from scipy import integrate, stats
from scipy.stats import norm
from typer.testing import CliRunner

from epsilons import Budgets, Recipe, SampledGaussian, plan
from epsilons.accounting import rdp
from epsilons.accounting.profile import DELTAS, Profile
from epsilons.cli import app
from epsilons.core.disclosure import display_rows
from epsilons.errors import EpsilonsWarning, PlanError
from epsilons.planning import risk, risk_profile


def total_variation(rate: float, noise: float) -> float:
    """½∫|p − q| of one step: q = N(0, σ²) without the record, p = (1 − rate)·q + rate·N(1, σ²) with it."""

    def difference(x: float) -> float:
        without, drawn = stats.norm.pdf(x, 0, noise), stats.norm.pdf(x, 1, noise)
        return abs((1 - rate) * without + rate * drawn - without)

    pieces = [integrate.quad(difference, low, low + noise, limit=200)[0] for low in noise * np.arange(-12.0, 14.0)]
    return 0.5 * math.fsum(pieces)


@pytest.mark.parametrize("noise", [0.4, 1.0, 2.5, 20.0])
@pytest.mark.parametrize("rate", [0.05, 0.5, 1.0])
def test_one_step_s_odds_are_the_integral_s_rounded_up(noise, rate):
    exact = total_variation(rate, noise)
    assert exact == pytest.approx(rate * (2 * stats.norm.cdf(0.5 / noise) - 1), abs=1e-9)
    bound = risk_profile.right_of_advantage(risk_profile.Profile((SampledGaussian(rate, noise, 1),)).advantage)
    assert 50 * (1 + exact) <= bound <= 50 * (1 + exact) + 1.05


@pytest.mark.parametrize(("steps", "noise"), [(4, 2.0), (25, 4.0), (400, 40.0), (9, 1.0)])
def test_many_full_batches_are_one_gaussian_and_have_its_odds(steps, noise):
    # Besides the formula, the best attack itself is run 400,000 times.
    mean = math.sqrt(steps) / noise
    exact = 2 * stats.norm.cdf(mean / 2) - 1
    bound = risk_profile.right_of_advantage(risk_profile.Profile((SampledGaussian(1.0, noise, steps),)).advantage)
    assert math.ceil(50 * (1 + exact)) <= bound <= math.ceil(50 * (1 + exact) + 0.05)
    generator = np.random.default_rng(0)
    released = np.concatenate([generator.normal(mean, 1, 200_000), generator.normal(0, 1, 200_000)])
    right = ((released > mean / 2) == (np.arange(400_000) < 200_000)).mean()
    assert right <= bound / 100 + 0.005  # false alarm: 6 standard errors
    assert right >= bound / 100 - 0.015


def test_a_number_of_right_guesses_is_never_rounded_down():
    values = [0.0, 1e-300, 1e-17, 0.02, math.nextafter(0.02, 1), 0.04 - 1e-16, 0.5, 1 - 2**-53, 1.0]
    for advantage in [*values, *np.random.default_rng(1).uniform(size=2000)]:
        exact = 50 * (1 + Fraction(float(advantage)))
        assert exact <= risk_profile.right_of_advantage(advantage) < exact + 1
    assert risk_profile.right_of_advantage(1.5) == 100


def test_a_promise_s_odds_are_never_rounded_down():
    for epsilon in np.geomspace(1e-6, 100, 200):
        for delta in (0.0, 1e-5, 0.1):
            exact = 100 * (1 - (1 - delta) / (1 + math.exp(epsilon)))
            assert exact <= risk_profile.right_of_promise(epsilon, delta) <= exact + 1 + 1e-9


@pytest.mark.parametrize("strategy", ["uniform", "sample", "scale", "sequential"])
def test_a_plan_s_odds_are_at_most_those_of_its_promise(strategy):
    made = plan(Budgets.from_shares({0.5: 0.5, 2.0: 0.5}, records=1000), Recipe(40, 100, 1.0), strategy, "pld")
    promised = [risk_profile.right_of_promise(*one) for one in zip(made.epsilons, made.delta, strict=True)]
    found = risk_profile.right_guesses(made)
    assert (found > 50).all()
    assert (found <= promised).all()
    assert found.tolist() == [risk_profile.right_of_advantage(one.advantage) for one in risk(made)]


def test_all_runs_of_a_plan_count():
    budgets = Budgets.from_shares({1.0: 1.0}, records=1000)
    one = plan(budgets, Recipe(40, 100, 1.0), "uniform", "pld")
    assert risk_profile.history(plan(budgets, Recipe(40, 100, 1.0), "uniform", "pld", runs=3), 0)[0].steps == 120
    assert risk_profile.history(one, 0)[0].steps == 40


def test_who_is_never_drawn_is_guessed_by_tossing_a_coin():
    budgets = Budgets.from_shares({0.05: 0.5, 2.0: 0.5}, records=1000)
    made = plan(budgets, Recipe(20, 50, 1.0), "exclude", "rdp", threshold=1.0)
    assert risk_profile.right_guesses(made)[0] == 50


def test_suppressed_odds_do_not_depend_on_what_the_few_chose():
    def shown(few: float) -> tuple[int | None, ...]:
        made = plan(Budgets([1.0] * 500 + [few] * 3 + [4.0] * 500), Recipe(40, 50, 1.0), "sample", "pld")
        return risk_profile.of_rows(made, display_rows(made.groups, None, True), suppressed=True)

    assert shown(2.0) == shown(3.5) == (risk_profile.right_of_promise(1.0, 1e-5), None)


def test_a_merged_row_has_odds_that_bound_each_of_its_budgets():
    levels = np.linspace(0.5, 4.0, 60)
    made = plan(Budgets(np.repeat(levels, 20)), Recipe(20, 100, 1.0), "sample", "rdp")
    rows = display_rows(made.groups, None, release=False)
    assert any(row.merged for row in rows)
    exact = risk_profile.right_guesses(made)
    for row, right in zip(rows, risk_profile.of_rows(made, rows, suppressed=False), strict=True):
        assert right is not None
        assert right >= exact[row.groups].max()


def test_the_sentence_asks_what_the_unit_and_the_neighbours_allow():
    person = risk_profile.sentence(63, shares_declared=False, unit="person")
    assert person == (
        "Someone who knows the list and everyone else's data, and guesses at even odds whether your data were used, is "
        "right at most 63 of 100 times; 50 by tossing a coin."
    )
    assert "whether you are in the data, is" in risk_profile.sentence(63, shares_declared=True, unit="person")
    assert "the list" not in risk_profile.sentence(63, shares_declared=True, unit="person")
    assert "whether your row was used, is" in risk_profile.sentence(63, shares_declared=False)
    assert "whether your row is in the data, is" in risk_profile.sentence(63, shares_declared=True)


# ==== Risks: held to the exact Gaussian's trade-off curve, to numbers found with other code, and to one another.


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
    assert "at most 56 of 100 times" in risk_profile.GroupRisk({}, 0.105, {}, 0, 0).odds
    assert "at most 50 of 100 times" in risk_profile.GroupRisk({}, 0.0, {}, 0, 0).odds
    assert "at most 100 of 100 times" in risk_profile.GroupRisk({}, 0.999, {}, 0, 0).odds


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
