"""PLD: held to other programs' values, to Opacus' PRV, and to closed forms; more in contracts/."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import fft

import oracles
from epsilons import SampledGaussian
from epsilons.accounting import pld
from epsilons.accounting.pld import Losses
from epsilons.core.mechanism import SMALLEST_DELTA
from epsilons.errors import BudgetError
from shares import examples, share

#: Where calibration grids differ, epsilon jitters by this much.
JITTER = 5e-4


def mechanism(row: dict) -> list[SampledGaussian]:
    return [SampledGaussian(row["q"], row["sigma"], row["steps"])]


def too_high(row: dict) -> float:
    """How much too high a recorded value may be: at one row it is by 7.84e-6, as fifty digits show below."""
    return 7.9e-6 if (row["q"], row["sigma"], row["steps"]) == (1e-4, 5.0, 100_000) else 1e-9


def test_at_the_recorded_grid_the_golden_values_come_out(golden):
    for row in golden["accountant"]:
        ours = pld.epsilon(mechanism(row), row["delta"], grid=row["value_discretization_interval"])
        recorded = row["eps_pld_dp_accounting_upper"]
        # The recorded values were read at delta itself, ours at delta − slack (what the FFT's rounding may hide):
        # above by (slack / delta) / (d ln 1/delta / d ln epsilon), which stays under 10 · slack / delta here.
        above = 1e-6 + 40 * pld.slack(mechanism(row)) / row["delta"] * (row["delta"] < 1e-6)
        above = max(above, 2 * pld.slack(mechanism(row)) / row["delta"])
        assert recorded * (1 - too_high(row)) <= ours <= recorded * (1 + above), row
        assert ours >= max(row["eps_pld_remove"], row["eps_pld_add"]) * (1 - too_high(row)), row


@pytest.mark.parametrize(
    ("q", "sigma", "steps", "grid"),
    [(1e-4, 5.0, 100_000, 1.01e-6), (512 / 60_000, 6.3943, 9375, 6.71e-5), (0.3, 2.0, 1000, 0.02)],
)
def test_one_step_s_probabilities_are_those_of_fifty_digits(q, sigma, steps, grid):
    # dp-accounting loses up to 5e-10 of each here, which adds 7.8e-6 to epsilon after 100,000 steps.
    one = pld.removing(SampledGaussian(q, sigma, steps), grid)
    exact, infinite = oracles.connected_dots(q, sigma, grid, one.lowest, len(one.probability))
    np.testing.assert_allclose(one.probability, exact, rtol=0, atol=1e-13)
    assert infinite <= one.infinite * (1 + 1e-9) + 1e-30
    composed = pld.self_composed(Losses(grid, one.lowest, exact, infinite), steps).epsilons(
        np.array([1e-5 - pld.slack([SampledGaussian(q, sigma, steps)])])
    )
    assert pld.epsilon([SampledGaussian(q, sigma, steps)], 1e-5, grid) == pytest.approx(composed[0], rel=1e-8)


@examples(12, 40)
@given(
    st.floats(math.log(1e-3), 0.0).map(math.exp),
    st.floats(math.log(0.4), math.log(20)).map(math.exp),
    st.floats(0.0, math.log(3000)).map(lambda x: round(math.exp(x))),
)
def test_epsilon_and_delta_are_those_of_dp_accounting_on_the_same_grid(q, sigma, steps):
    one = SampledGaussian(q, sigma, steps)
    grid = 4 * pld.fitted_grid(one)
    twin = oracles.dp_accounting_pld(q, sigma, steps, grid)
    deltas = np.array([1e-8, 1e-5, 1e-2])
    theirs = [twin.get_epsilon_for_delta(delta - pld.slack([one])) for delta in deltas]
    # At 1e-8 both carry the FFT's rounding, near 1e-13.
    np.testing.assert_allclose(pld.epsilon_at([one], deltas, grid), theirs, rtol=1e-5, atol=1e-9)
    epsilons = np.array([-0.3, 0.0, 0.5, 2.0])
    directions = pld.both_directions([one], grid)
    ours = np.maximum.reduce([losses.deltas(epsilons) for losses in directions])
    np.testing.assert_allclose(ours, [twin.get_delta_for_epsilon(float(e)) for e in epsilons], rtol=1e-5, atol=1e-9)


def test_several_deltas_at_once_are_the_same_one_by_one():
    history = [SampledGaussian(0.02, 1.5, 200), SampledGaussian(0.3, 9.0, 100)]
    deltas = np.geomspace(1e-9, 0.5, 30)
    together = pld.epsilon_at(history, deltas)
    np.testing.assert_array_equal(together, [pld.epsilon(history, delta) for delta in deltas])
    assert (np.diff(together) <= 0).all()


@pytest.mark.parametrize("steps", [7, 1000, 30_000])
def test_losses_outside_a_window_are_less_likely_than_what_counts_as_infinite(steps):
    # Slow twin: no window at all, or, where that is too long, one four times as wide.
    one = pld.adding(SampledGaussian(0.01, 0.8, steps), 0.01)
    first, last = pld.window(one.probability, steps)
    width = last - first
    length = min((len(one.probability) - 1) * steps + 1, 4 * width + len(one.probability))
    start = max(0, first - width)
    power = np.fft.irfft(np.fft.rfft(one.probability, length) ** steps, length)
    wide = np.roll(power, -(start % length))
    outside = wide[: first - start].sum() + wide[last + 1 - start :].sum()
    assert outside <= 1e-15 + 1e-13  # the second is what the transform's own rounding adds up to


def test_on_its_own_grid_the_golden_values_are_reached_and_hardly_exceeded(golden):
    for row in golden["accountant"]:
        ratio = pld.epsilon(mechanism(row), row["delta"]) / row["eps_pld_dp_accounting_upper"]
        assert 0.998 <= ratio <= 1.0005, (ratio, row)


def check_against_prv(rows: tuple[tuple[float, float, int], ...], delta: float) -> None:
    lower, estimate, upper = oracles.prv(rows, delta)
    ours = pld.epsilon([SampledGaussian(*row) for row in rows], delta)
    assert lower <= ours <= upper
    # Its estimate is far better than its bounds: ours is above by no more than the cost of the grid.
    assert estimate * (1 - 5e-5) <= ours <= estimate * (1 + JITTER)


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


@pytest.mark.parametrize(("q", "sigma", "steps", "delta"), share(SETTINGS, 5))
def test_epsilon_lies_within_the_bounds_of_opacus_prv(q, sigma, steps, delta):
    check_against_prv(((q, sigma, steps),), delta)


def test_a_history_of_different_mechanisms_lies_within_the_bounds_of_opacus_prv():
    check_against_prv(((0.02, 1.5, 200), (0.05, 3.0, 100), (0.01, 1.1, 400)), 1e-5)


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
def test_without_sampling_it_is_at_or_just_above_the_exact_gaussian(sigma, steps, delta):
    exact = oracles.gaussian(sigma, steps, delta)
    ours = pld.epsilon([SampledGaussian(1.0, sigma, steps)], delta)
    assert exact <= ours <= exact * 1.002 + 1e-6


@examples(12, 40)
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


@pytest.mark.parametrize(
    ("q", "sigma", "steps"), [(1e-4, 5.0, 100_000), (0.01, 4.0, 100_000), (512 / 60_000, 3.4, 9375)]
)
def test_what_rounding_takes_off_a_tail_stays_within_the_slack(q, sigma, steps):
    """Against the same transforms in 80-bit arithmetic."""
    one = SampledGaussian(q, sigma, steps)
    for discretise in (pld.removing, pld.adding):
        losses = discretise(one, pld.fitted_grid(one))
        composed = pld.self_composed(losses, steps)
        start, end = pld.window(losses.probability, steps)
        length = fft.next_fast_len(max(end - start + 1, len(losses.probability)), real=True)
        power = fft.irfft(pld.raised(fft.rfft(losses.probability.astype(np.longdouble), length), steps), length)
        exact = np.roll(power, -(start % length))[: end - start + 1]
        tails = [np.cumsum(p[::-1])[::-1] for p in (exact, composed.probability)]
        assert float((tails[0] - tails[1])[tails[0] < 0.1].max()) < pld.slack([one]) / 2
