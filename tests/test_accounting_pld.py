"""PLD: held to other programs' values, to Opacus' PRV, and to closed forms; more in contracts/."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import oracles
from epsilons import SampledGaussian
from epsilons.accounting import pld
from epsilons.budgets import SMALLEST_DELTA
from epsilons.errors import BudgetError

#: Where calibration grids differ, epsilon jitters by this much.
JITTER = 5e-4


def mechanism(row: dict) -> list[SampledGaussian]:
    return [SampledGaussian(row["q"], row["sigma"], row["steps"])]


def test_at_the_recorded_grid_the_golden_values_come_out(golden):
    for row in golden["accountant"]:
        ours = pld.epsilon(mechanism(row), row["delta"], grid=row["value_discretization_interval"])
        recorded = row["eps_pld_dp_accounting_upper"]
        # The recorded values were read at delta itself, ours at delta − 1e-12 (what the FFT's rounding may hide):
        # above by (1e-12 / delta) / (d ln 1/delta / d ln epsilon), which stays under 10 · 1e-12 / delta here.
        above = 1e-6 if row["delta"] >= 1e-6 else 1e-6 + 40 * pld.FLOAT_SLACK / row["delta"]
        assert recorded * (1 - 1e-9) <= ours <= recorded * (1 + above), row


def test_on_its_own_grid_the_golden_values_are_reached_and_hardly_exceeded(golden):
    for row in golden["accountant"]:
        ratio = pld.epsilon(mechanism(row), row["delta"]) / row["eps_pld_dp_accounting_upper"]
        assert 0.998 <= ratio <= 1.0005, (ratio, row)


def test_golden_values_are_never_below_either_direction(golden):
    for row in golden["accountant"]:
        ours = pld.epsilon(mechanism(row), row["delta"], grid=row["value_discretization_interval"])
        assert ours >= max(row["eps_pld_remove"], row["eps_pld_add"]) * (1 - 1e-9), row


# Sizes of people, rates and noise that training meets; the first three are the paper's.
SETTINGS = [
    (512 / 60_000, 3.1789, 9375, 1e-5),
    (1024 / 73_257, 1.5, 2146, 1e-5),
    (1024 / 50_000, 1.1, 1465, 1e-5),
    (0.001, 0.8, 5000, 1e-6),
    (0.1, 9.15, 500, 1e-5),
    (0.28, 7.6, 50, 1e-5),
    (0.77, 7.6, 50, 1e-5),
    (0.5, 20.0, 1000, 1e-6),
    (1.0, 26.4, 50, 1e-5),
    (0.05, 4.0, 4000, 1e-6),
    (0.02, 1.0, 1, 1e-5),
    (0.3, 72.0, 1000, 1e-4),
]


@pytest.mark.parametrize(("q", "sigma", "steps", "delta"), SETTINGS)
def test_epsilon_lies_within_the_bounds_of_opacus_prv(q, sigma, steps, delta):
    lower, estimate, upper = oracles.prv(((q, sigma, steps),), delta)
    ours = pld.epsilon([SampledGaussian(q, sigma, steps)], delta)
    assert lower <= ours <= upper
    # Its estimate is far better than its bounds: ours is above by no more than the grid's cost.
    assert estimate * (1 - 5e-5) <= ours <= estimate * (1 + JITTER)


def test_a_history_of_different_mechanisms_lies_within_the_bounds_of_opacus_prv():
    rows = ((0.02, 1.5, 200), (0.05, 3.0, 100), (0.01, 1.1, 400))
    lower, estimate, upper = oracles.prv(rows, 1e-5)
    ours = pld.epsilon([SampledGaussian(*row) for row in rows], 1e-5)
    assert lower <= ours <= upper
    assert estimate * (1 - 5e-5) <= ours <= estimate * (1 + JITTER)


@pytest.mark.slow
def test_epsilon_lies_within_the_bounds_of_opacus_prv_at_a_hundred_random_settings():
    random = np.random.default_rng(0)
    for _ in range(100):
        q = float(10 ** random.uniform(-3, 0))
        steps = int(10 ** random.uniform(0, 4))
        sigma = float(max(0.6, q * math.sqrt(steps) * 10 ** random.uniform(0, 1)))
        lower, _, upper = oracles.prv(((q, sigma, steps),), 1e-5)
        ours = pld.epsilon([SampledGaussian(q, sigma, steps)], 1e-5)
        assert lower <= ours <= upper, (q, sigma, steps)


@pytest.mark.parametrize("delta", [1e-9, 1e-8, 1e-7, 1e-5, 1e-3, 0.1])
@pytest.mark.parametrize(("sigma", "steps"), [(1.0, 1), (5.0, 10), (28.6, 50), (14.9321, 100)])
def test_without_sampling_it_is_never_below_the_exact_gaussian_and_within_a_thousandth(sigma, steps, delta):
    exact = oracles.gaussian(sigma, steps, delta)
    ours = pld.epsilon([SampledGaussian(1.0, sigma, steps)], delta)
    assert exact <= ours <= exact * 1.002 + 1e-6


@settings(max_examples=40)
@given(
    st.floats(math.log(1e-3), 0.0).map(math.exp),
    st.floats(math.log(0.5), math.log(20)).map(math.exp),
    st.floats(math.log(1e-8), math.log(1e-3)).map(math.exp),
)
def test_one_step_is_never_below_its_closed_form_and_close_to_it(q, sigma, delta):
    exact = max(oracles.one_step(q, sigma, delta, direction) for direction in oracles.DIRECTIONS)
    ours = pld.epsilon([SampledGaussian(q, sigma, 1)], delta)
    # Read at delta − 1e-12, and on a grid of 1/20 of the loss' deviation: both only ever above.
    nearly = max(oracles.one_step(q, sigma, delta - 1e-10, direction) for direction in oracles.DIRECTIONS)
    assert exact <= ours <= nearly * 1.02 + 1e-4


def test_a_coarser_grid_only_ever_raises_the_bound():
    # The doubled grids share their points with the finest, so each is a coarsening of the one before.
    history = [SampledGaussian(0.02048, 1.4006, 1465)]
    bounds = [pld.epsilon(history, 1e-5, grid=1e-4 * 2**k) for k in range(7)]
    assert bounds == sorted(bounds)


def test_the_order_of_the_history_is_irrelevant_to_the_last_bit():
    parts = [SampledGaussian(0.02, 1.5, 200), SampledGaussian(0.05, 3.0, 100), SampledGaussian(1.0, 40.0, 7)]
    assert len({pld.epsilon(order, 1e-5) for order in (parts, parts[::-1], [parts[1], parts[2], parts[0]])}) == 1


def test_two_halves_cost_what_the_whole_costs():
    whole = pld.epsilon([SampledGaussian(0.02048, 1.4006, 1464)], 1e-5)
    halves = pld.epsilon([SampledGaussian(0.02048, 1.4006, 732)] * 2, 1e-5)
    assert halves == pytest.approx(whole, rel=1e-6)


def test_silent_parts_cost_nothing_and_change_nothing():
    loud = SampledGaussian(0.02, 1.5, 200)
    silent = [SampledGaussian(0.0, 1.0, 10), SampledGaussian(0.1, 1.0, 0), SampledGaussian(0.1, math.inf, 5)]
    assert pld.epsilon(silent, 1e-5) == 0
    assert pld.epsilon([], 1e-5) == 0
    assert pld.epsilon([*silent, loud], 1e-5) == pld.epsilon([loud], 1e-5)


@pytest.mark.parametrize("delta", [SMALLEST_DELTA / 1.01, 0.0, -1e-5, 1.0, 2.0, math.nan])
def test_a_delta_beyond_double_precision_is_refused(delta):
    with pytest.raises(BudgetError, match="delta"):
        pld.epsilon([SampledGaussian(0.1, 1.0, 1)], delta)


@pytest.mark.parametrize(
    ("q", "sigma", "steps"),
    [
        pytest.param(1e-6, 0.5, 10, marks=pytest.mark.slow),  # the widest loss there is on the finest grid
        (1e-5, 0.3, 100),
        (1e-4, 0.4, 1000),
        (1e-9, 1.0, 1),
        (1.0, 0.05, 1),
        (0.5, 1e4, 10),
    ],
)
def test_at_the_edges_it_stays_an_upper_bound_on_one_step_and_finite_or_inf(q, sigma, steps):
    ours = pld.epsilon([SampledGaussian(q, sigma, steps)], 1e-5)
    exact = max(oracles.one_step(q, sigma, 1e-5, direction) for direction in oracles.DIRECTIONS)
    assert ours >= exact  # more steps never cost less than the first
    assert not math.isnan(ours)
