"""Odds of a right guess, against integrals that know neither privacy loss distributions nor RDP."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
from scipy import integrate, stats

from epsilons import Budgets, Recipe, plan
from epsilons.core.disclosure import display_rows
from epsilons.core.mechanism import SampledGaussian
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
