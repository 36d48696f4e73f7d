"""Inverting an accountant: whatever the search meets, the end it returns was evaluated and kept the budget."""

from __future__ import annotations

import functools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import oracles
from epsilons import SampledGaussian
from epsilons.accounting import ACCOUNTANTS, Accountant, pld, rdp
from epsilons.accounting.calibration import TARGET, noise_for, rate_for
from epsilons.errors import EpsilonsError, InfeasibleBudgetError
from shares import examples

#: What may be left over of a budget: the search stops within 1e-5, and aims at 1 − 1e-6 of it.
LEFT_OVER = 2e-5

levels = st.floats(math.log(0.2), math.log(20)).map(math.exp)
rates = st.floats(math.log(1e-3), 0.0).map(math.exp)
counts = st.floats(0.0, math.log(20_000)).map(lambda x: round(math.exp(x)))


def check_noise_for(epsilon: float, q: float, steps: int, delta: float, accountant: Accountant) -> None:
    sigma = noise_for(epsilon, q, steps, delta, accountant)
    spent = accountant([SampledGaussian(q, sigma, steps)], delta)
    assert epsilon * (1 - LEFT_OVER) <= spent <= epsilon * TARGET


@examples(20, 60)
@given(levels, rates, counts, st.sampled_from([1e-6, 1e-5, 1e-3]))
def test_noise_for_spends_the_budget_and_no_more_under_rdp(epsilon, q, steps, delta):
    check_noise_for(epsilon, q, steps, delta, rdp.epsilon)


CASES = [
    (1.0, 512 / 60_000, 9375, 1e-5),
    (3.0, 0.02, 1465, 1e-5),
    (0.05, 0.02, 100, 1e-5),
    (20.0, 0.1, 500, 1e-6),
    (0.5, 1.0, 50, 1e-9),
    (8.0, 0.5, 1, 1e-3),
]


@pytest.mark.parametrize(("epsilon", "q", "steps", "delta"), CASES)
def test_noise_for_spends_the_budget_and_no_more_under_pld(epsilon, q, steps, delta):
    check_noise_for(epsilon, q, steps, delta, pld.epsilon)


@examples(20, 60)
@given(levels, rates, counts)
def test_rate_for_finds_the_rate_that_noise_for_answered_to(epsilon, q, steps):
    sigma = noise_for(epsilon, q, steps, 1e-5, rdp.epsilon)
    rate = rate_for(epsilon, sigma, steps, 1e-5, rdp.epsilon)
    spent = rdp.epsilon([SampledGaussian(rate, sigma, steps)], 1e-5)
    assert spent <= epsilon * TARGET
    assert rate == pytest.approx(q, rel=1e-3) or spent >= epsilon * (1 - LEFT_OVER)


@pytest.mark.parametrize("start", [1e-9, 1e-3, 0.0211, 1.0])
@pytest.mark.parametrize("name", ACCOUNTANTS)
def test_a_bad_first_guess_of_a_rate_only_costs_time(name, start):
    rate = rate_for(2.0, 2.0, 200, 1e-5, ACCOUNTANTS[name], start=start)
    spent = ACCOUNTANTS[name]([SampledGaussian(rate, 2.0, 200)], 1e-5)
    assert 2.0 * (1 - LEFT_OVER) <= spent <= 2.0 * TARGET


@pytest.mark.parametrize(("epsilon", "steps", "delta"), [(1.0, 1, 1e-5), (0.3, 100, 1e-6), (10.0, 10, 1e-3)])
def test_without_sampling_noise_for_is_the_exact_gaussian_s_and_never_less(epsilon, steps, delta):
    sigma = noise_for(epsilon, 1.0, steps, delta, pld.epsilon)
    assert oracles.gaussian(sigma, steps, delta) <= epsilon
    assert oracles.gaussian(sigma * 0.998, steps, delta) > epsilon


@pytest.mark.parametrize(("delta", "floor"), [(1e-5, "0.103"), (1e-6, "0.14"), (1e-8, "0.214")])
def test_a_budget_below_the_floor_is_refused_with_the_smallest_that_can_be_reached(delta, floor):
    with pytest.raises(InfeasibleBudgetError, match=rf"epsilon = {floor}\b") as caught:
        noise_for(float(floor) / 1.5, 0.01, 100, delta, rdp.epsilon)
    assert caught.value.exit_code == 3


@pytest.mark.parametrize("factor", [1.01, 1.03, 1.1, 1.5])
def test_just_above_the_floor_of_rdp_the_budget_is_kept(factor):
    floor = rdp.epsilon([SampledGaussian(0.01, 1e7, 100)], 1e-5)
    sigma = noise_for(floor * factor, 0.01, 100, 1e-5, rdp.epsilon)
    assert rdp.epsilon([SampledGaussian(0.01, sigma, 100)], 1e-5) <= floor * factor


def test_more_orders_reach_further_than_opacus_ones():
    extended = functools.partial(rdp.epsilon, orders=rdp.EXTENDED_ORDERS)
    sigma = noise_for(0.02, 0.01, 100, 1e-5, extended)
    assert extended([SampledGaussian(0.01, sigma, 100)], 1e-5) <= 0.02
    with pytest.raises(InfeasibleBudgetError):
        noise_for(0.02, 0.01, 100, 1e-5, rdp.epsilon)


def test_a_rate_is_at_most_one_and_zero_where_none_keeps_the_budget():
    assert rate_for(5.0, 100.0, 10, 1e-5, rdp.epsilon) == 1.0
    assert rate_for(0.09, 1.0, 10, 1e-5, rdp.epsilon) == 0.0


# -- accountants that are rough, or fail -------------------------------------------------------------------------


def rough(history, delta, *, amplitude=5e-4, seen=None):
    """A cost that jumps up and down by `amplitude` from one argument to the next, as a moving grid does."""
    spent = sum(m.steps * m.sample_rate / m.noise_multiplier for m in history)
    last = history[-1]
    wobble = math.sin(1e7 * math.log(last.noise_multiplier) + 3e6 * math.log(last.sample_rate))
    spent *= 1 + amplitude * wobble
    if seen is not None:
        seen[last] = spent
    return spent


@examples(40, 200)
@given(levels, rates, counts, st.sampled_from([1e-6, 5e-4, 0.05, 0.5]))
def test_a_rough_accountant_makes_the_search_stop_early_on_the_safe_side(epsilon, q, steps, amplitude):
    seen: dict[SampledGaussian, float] = {}
    accountant = functools.partial(rough, amplitude=amplitude, seen=seen)
    sigma = noise_for(epsilon, q, steps, 1e-5, accountant)
    assert seen[SampledGaussian(q, sigma, steps)] <= epsilon * TARGET
    rate = rate_for(epsilon, sigma, steps, 1e-5, accountant)
    assert rate == 0 or seen[SampledGaussian(rate, sigma, steps)] <= epsilon * TARGET


@pytest.mark.parametrize("failure", [math.inf, math.nan])
def test_where_an_accountant_fails_the_search_stays_where_it_did_not_or_gives_up(failure):
    def failing(history, delta):
        # Fails in the very region that the first guess falls in, and everywhere below.
        return failure if history[-1].noise_multiplier < 50 else rdp.epsilon(history, delta)

    try:
        sigma = noise_for(1.0, 0.02, 1465, 1e-5, failing)
    except EpsilonsError:
        assert math.isnan(failure)
    else:
        assert failing([SampledGaussian(0.02, sigma, 1465)], 1e-5) <= 1.0


@pytest.mark.parametrize("failure", [math.inf, math.nan])
def test_an_accountant_that_certifies_nothing_keeps_no_budget(failure):
    with pytest.raises(EpsilonsError):
        noise_for(1.0, 0.02, 1465, 1e-5, lambda history, delta: failure)
    try:
        assert rate_for(1.0, 2.0, 1465, 1e-5, lambda history, delta: failure) == 0.0
    except EpsilonsError:
        assert math.isnan(failure)


def test_no_search_takes_more_than_a_few_dozen_evaluations():
    for accountant in (rdp.epsilon, functools.partial(rough, amplitude=5e-4)):
        calls = 0

        def counted(history, delta, accountant=accountant):
            nonlocal calls
            calls += 1
            return accountant(history, delta)

        noise_for(1.0, 0.02, 1465, 1e-5, counted)
        assert calls <= 30


def test_what_a_search_finds_keeps_the_budget_whatever_its_last_bits_are():
    """A table's noise multiplier comes back from noise_std / clip_norm with other last bits.

    At 60,000 steps and a delta of 2e-9 the rounding of PLD's transforms then moves epsilon by 1e-4.
    """
    epsilon, rate, steps, delta = 3.310270124216805, 0.0009291014990587454, 60_426, 2.343837366432457e-09
    found = noise_for(epsilon, rate, steps, delta, pld.epsilon)
    beside = [found]
    for _ in range(4):
        beside = [float(np.nextafter(beside[0], 0)), *beside, float(np.nextafter(beside[-1], 2))]
    spent = [pld.epsilon([SampledGaussian(rate, noise, steps)], delta) for noise in beside]
    assert len(set(spent)) > 4  # rounding does move it
    assert max(spent) <= epsilon
    assert min(spent) >= epsilon * (1 - 1e-3)
