"""RDP: held to 50-digit quadrature, to Opacus, and to values recorded with other programs."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math

import mpmath
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import oracles
from adversaries import DELTA, EPSILON, conversion, exact_delta, random_tree, two_stages
from epsilons import SampledGaussian
from epsilons.accounting import ACCOUNTANTS, Accountant, pld, rdp
from epsilons.accounting import filter as filter_
from epsilons.accounting.calibration import TARGET, noise_for, rate_for
from epsilons.errors import EpsilonsError, InfeasibleBudgetError, PlanError
from experiments.individual_accounting import gaussian
from shares import examples, share


def check_one_step(q: float, sigma: float, orders: list[float]) -> None:
    """Divergences are those of the defining integral; _SLACK raises ln(A − 1) by 1e-9, and them by at most as much."""
    for alpha, ours in zip(orders, rdp.divergence(q, sigma, orders), strict=True):
        exact = oracles.renyi_divergence(q, sigma, alpha)
        assert exact * (1 - 1e-15) <= ours <= exact * (1 + 3e-9), alpha


GRID = itertools.product((1e-6, 1e-3, 0.02, 0.3, 0.999), (0.5, 1.1, 4.0, 60.0))


@pytest.mark.parametrize(("q", "sigma"), share(GRID, 6))
def test_one_step_is_the_defining_integral_and_never_below_it(q, sigma):
    check_one_step(q, sigma, [1.1, 1.5, 2.0, 5.0, 10.9, 63.0])


@examples(8, 40)
@given(
    st.floats(math.log(1e-7), math.log(0.99)).map(math.exp),
    st.floats(math.log(0.3), math.log(100)).map(math.exp),
    st.one_of(st.sampled_from(rdp.OPACUS_ORDERS), st.floats(1.001, 80.0)),
)
def test_one_step_at_any_rate_noise_and_order_is_the_defining_integral(q, sigma, alpha):
    check_one_step(q, sigma, [alpha])


@pytest.mark.parametrize(("q", "sigma"), share([(0.02, 4.0), (1e-6, 0.7), (1e-3, 0.31), (0.4, 60.0)], 2))
def test_orders_up_to_1024_are_the_defining_integral_too(q, sigma):
    check_one_step(q, sigma, [64.0, 256.0, 1024.0])


def _convex(argument: tuple[float, float, float], excess: tuple[mpmath.mpf, ...]) -> bool:
    """Whether the middle value lies on or below the chord of the outer two, with 50 digits."""
    with mpmath.workdps(oracles.DIGITS):
        a, b, c = (mpmath.mpf(x) for x in argument)
        return bool(excess[1] * (c - a) <= excess[0] * (c - b) + excess[2] * (b - a))


#: α − 2 < 0, between 0 and 1, and above: the three cases of the proof. Let w = exp((2z − 1)/2σ²), z ~ N(0, σ²), and
#: u = q(w − 1). A_α is convex in q, since ∂²A/∂q² = α(α − 1)·E[(w − 1)²·(1 + u)^{α−2}] ≥ 0. It is convex in x = 1/σ²,
#: too: w has the distribution of geometric Brownian motion at time x, so ∂/∂x E φ(w) = ½·E[w²φ''(w)] (Itô). Applied
#: twice to φ(w) = s^α, s = 1 − q + qw, with b = α − 2 > −1 and v = qw/s in [0, 1), ∂²A/∂x² = ¼·E[w²·(w²φ'')''] with
#: (w²φ'')'' = α(α − 1)·q²·s^b·g(v), g(v) = 2 + 4bv + b(b − 1)v². For b = 0 or b ≥ 1 no term of g is negative. For
#: 0 < b < 1 g is concave, so its minimum is at an end, g(0) = 2 or g(1) = (b + 1)(b + 2). For −1 < b < 0 it is convex
#: with its vertex at 2/(1 − b) > 1, so it falls to g(1) > 0. No plan uses chords; this shows that they would be bounds.
ORDERS_OF_THE_PROOF = (1.02, 1.6, 2.0, 2.7, 2.05, 3.0, 9.3)


@pytest.mark.parametrize("alpha", share(ORDERS_OF_THE_PROOF, 3))
@examples(1, 2)
@given(
    st.lists(st.floats(math.log(1e-5), math.log(0.999)).map(math.exp), min_size=3, max_size=3, unique=True).map(sorted),
    st.lists(st.floats(0.01, 3.0), min_size=3, max_size=3, unique=True).map(sorted),
)
def test_the_moment_is_convex_in_the_rate_and_in_the_inverse_variance(alpha, rates, inverse):
    sigma = inverse[1]
    assert _convex(tuple(rates), tuple(oracles.renyi_excess(q, sigma, alpha) for q in rates))
    # 1/σ as drawn; the argument is its square.
    noises = [1 / x for x in inverse]
    squares = tuple(1 / s**2 for s in noises)
    assert _convex(squares, tuple(oracles.renyi_excess(rates[1], s, alpha) for s in noises))


def test_many_mechanisms_at_once_are_each_one_alone():
    random = np.random.default_rng(0)
    q = np.concatenate([10 ** random.uniform(-9, 0, size=100), [0.0, 1.0]])
    sigma = np.concatenate([10 ** random.uniform(-1.5, 2.5, size=100), [1.0, 2.0]])
    orders = np.array(rdp.EXTENDED_ORDERS)
    together = rdp.divergences(q, sigma, orders)
    alone = np.array([rdp.divergence(a, b, orders) for a, b in zip(q, sigma, strict=True)])
    # Rows of a block share their points, so the quadrature's last digits move; both stay above the integral (_SLACK).
    np.testing.assert_allclose(together, alone, rtol=2e-10)
    assert (together[:-2] > 0).all()
    assert (together[-2] == 0).all()


def test_many_histories_at_once_are_each_one_alone():
    random = np.random.default_rng(1)
    rates = 10 ** random.uniform(-4, 0, size=(2, 50))
    rates[0, :5], rates[:, 7] = 0.0, 0.0
    noises, deltas = 10 ** random.uniform(-0.3, 1.5, size=(2, 50)), 10 ** random.uniform(-9, -3, size=50)
    together = rdp.batch_epsilon(rates, noises, [30, 200], deltas)
    for row in range(50):
        history = [SampledGaussian(rates[p, row], noises[p, row], n) for p, n in enumerate([30, 200])]
        assert together[row] == pytest.approx(rdp.epsilon(history, deltas[row]), rel=1e-9)


def test_the_oracle_s_quadrature_is_the_binomial_sum_at_whole_orders():
    # Mironov et al., 1908.10530v1, Section 3.3, whole orders: a finite sum, exact.
    for q, sigma, alpha in [(1e-6, 0.5, 2), (0.02, 1.1, 12), (0.3, 4.0, 63)]:
        with mpmath.workdps(oracles.DIGITS):
            rate, s = mpmath.mpf(q), mpmath.mpf(sigma)
            total = mpmath.fsum(
                mpmath.binomial(alpha, k) * (1 - rate) ** (alpha - k) * rate**k * mpmath.exp(k * (k - 1) / (2 * s * s))
                for k in range(alpha + 1)
            )
            excess = oracles.renyi_excess(q, sigma, float(alpha))
            assert abs(excess / (total - 1) - 1) < 1e-30


def test_without_sampling_it_is_the_gaussian_s_divergence():
    orders = np.array([1.1, 2.0, 10.5, 63.0])
    np.testing.assert_array_equal(rdp.divergence(1.0, 3.0, orders), orders / (2 * 3.0**2))
    np.testing.assert_array_equal(rdp.divergence(0.0, 3.0, orders), 0)


@pytest.mark.parametrize("sigma", [0.3, 1.0, 10.0])
@pytest.mark.parametrize("alpha", [1.5, 2.0, 12.0, 40.5])
def test_as_the_rate_approaches_one_the_gaussian_s_divergence_is_approached(sigma, alpha):
    nearly = rdp.divergence(1 - 1e-12, sigma, [alpha])[0]
    assert nearly == pytest.approx(alpha / (2 * sigma**2), rel=1e-8)


def test_the_golden_values_come_out_and_are_never_below_those_of_pld(golden):
    for row in golden["accountant"]:
        ours = rdp.epsilon([SampledGaussian(row["q"], row["sigma"], row["steps"])], row["delta"])
        # Ours is above by up to 1e-9 by design (_SLACK); Opacus' fractional orders are off by up to 2e-6 elsewhere.
        assert ours == pytest.approx(row["eps_rdp_opacus"], rel=1e-6), row
        assert ours >= row["eps_pld_dp_accounting_upper"], row


def test_the_golden_values_of_more_orders_come_out_or_are_beaten(golden):
    extended = functools.partial(rdp.epsilon, orders=rdp.EXTENDED_ORDERS)
    for row in golden["accountant"]:
        history = [SampledGaussian(row["q"], row["sigma"], row["steps"])]
        assert extended(history, row["delta"]) <= rdp.epsilon(history, row["delta"])
        if row["eps_rdp_extended_orders"] is not None:
            # The recorded orders were others, so near a budget's best order either may be a little better.
            assert extended(history, row["delta"]) <= row["eps_rdp_extended_orders"] * (1 + 1e-3), row


@pytest.mark.parametrize(
    "history",
    [
        [(0.02, 1.1, 1000)],
        [(512 / 60_000, 3.4358, 9375)],
        [(0.02, 1.5, 200), (0.05, 3.0, 100), (0.01, 1.1, 400)],
        [(1.0, 20.0, 50), (0.3, 9.0, 100)],
    ],
)
def test_epsilon_is_opacus_own_for_its_users(history):
    ours = rdp.epsilon([SampledGaussian(*part) for part in history], 1e-5)
    assert ours == pytest.approx(oracles.opacus_rdp(tuple(history), 1e-5), rel=3e-6)


def test_the_conversion_takes_the_best_order_and_none_better():
    parts = [(0.02, 1.5, 200), (0.05, 3.0, 100)]
    ours = rdp.epsilon([SampledGaussian(*part) for part in parts], 1e-5)
    each = [
        oracles.renyi_epsilon(sum(n * oracles.renyi_divergence(q, s, a) for q, s, n in parts), a, 1e-5)
        for a in rdp.OPACUS_ORDERS[::25]
    ]
    assert ours <= min(each) * (1 + 1e-8)
    alone = [rdp.epsilon([SampledGaussian(*part) for part in parts], 1e-5, orders=[a]) for a in rdp.OPACUS_ORDERS[::25]]
    np.testing.assert_allclose(alone, each, rtol=1e-8)


@pytest.mark.parametrize(("delta", "floor"), [(1e-5, 0.103), (1e-6, 0.140), (1e-8, 0.214)])
def test_more_orders_certify_less_than_the_floor_of_opacus_orders(delta, floor):
    hardly = [SampledGaussian(1e-6, 100.0, 1)]
    assert rdp.epsilon(hardly, delta) == pytest.approx(floor, abs=5e-4)
    assert rdp.epsilon(hardly, delta, orders=rdp.EXTENDED_ORDERS) < floor / 15


# -- SampledGaussian: only numbers that describe a mechanism become one ----------------------------------------------


def test_a_mechanism_is_a_value_that_can_be_compared_and_kept_in_sets():
    mechanism = SampledGaussian(sample_rate=0.01, noise_multiplier=1.1, steps=1000)
    assert mechanism == SampledGaussian(0.01, 1.1, 1000)
    assert len({mechanism, SampledGaussian(0.01, 1.1, 1000), SampledGaussian(0.01, 1.1, 999)}) == 2
    with pytest.raises(dataclasses.FrozenInstanceError):
        mechanism.steps = 5


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        *(({"sample_rate": rate}, "between 0 and 1") for rate in (-1e-9, 1 + 1e-9, math.nan, math.inf)),
        *(({"noise_multiplier": noise}, "positive") for noise in (0.0, -1.0, math.nan)),
        *(({"steps": steps}, "whole number") for steps in (-1, 0.5, math.nan, math.inf)),
    ],
)
def test_numbers_that_describe_no_mechanism_are_refused(wrong, words):
    with pytest.raises(PlanError, match=words):
        SampledGaussian(**{"sample_rate": 0.1, "noise_multiplier": 1.0, "steps": 1} | wrong)


@pytest.mark.parametrize(
    ("mechanism", "silent"),
    [
        (SampledGaussian(0.0, 1.0, 10), True),
        (SampledGaussian(0.1, 1.0, 0), True),
        (SampledGaussian(0.1, math.inf, 10), True),
        (SampledGaussian(1e-9, 1e6, 1), False),
        (SampledGaussian(1.0, 1.0, 1), False),
    ],
)
def test_only_a_record_that_never_takes_part_is_silent(mechanism, silent):
    assert mechanism.is_silent is silent


# -- Inverting an accountant: whatever the search meets, the end it returns was evaluated and kept the budget --------


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


# -- The weighted-orders filter against adversaries that choose each mechanism from the outputs of those before ------


def caps_of(orders, offsets):
    return {order: EPSILON - offset for order, offset in zip(orders, offsets, strict=True)}


def test_the_best_order_afterwards_is_no_filter():
    # What rdp.epsilon(past + run) <= epsilon would allow: the whole delta at each of two orders.
    leaves = two_stages(caps_of((32, 4), [conversion(order, DELTA) for order in (32, 4)]))
    assert sum(x for x, _ in leaves) == pytest.approx(1)
    assert exact_delta(leaves) == pytest.approx(1.76e-5, rel=0.01)


def test_the_same_adversary_stays_below_delta_under_the_filter():
    offsets = filter_.offsets(DELTA, filter_.home_orders(EPSILON, DELTA))[0]
    caps = caps_of(filter_.ORDERS, offsets)
    reached = [
        exact_delta(two_stages(caps, orders=(a, b)))
        for a in (4, 5, 6, 8, 32)
        for b in (4, 5, 6, 8)
        if min(caps[a], caps[b]) > 0.2
    ]
    assert 0.2 * DELTA < max(reached) <= DELTA


class Account:
    """What is left under these caps, in floating point."""

    def __init__(self, caps, sums=0.0):
        self.left = caps - sums

    def charge(self, channel_costs):
        assert (channel_costs <= self.left).any(), "the filter would refuse this channel"
        return Account(self.left, channel_costs), Account(self.left, channel_costs)


def reached(caps, trees, seed):
    rng = np.random.default_rng(seed)
    for _ in range(trees):
        leaves = random_tree(rng, Account(caps), int(rng.integers(1, 5)))
        assert sum(x for x, _ in leaves) == pytest.approx(1)
        yield exact_delta(leaves)


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 10))])
def test_random_adversaries_stay_below_delta(seed):
    caps = EPSILON - filter_.offsets(DELTA, filter_.home_orders(EPSILON, DELTA))[0]
    assert max(reached(caps, 20, seed)) <= DELTA


def test_random_adversaries_exceed_delta_where_the_best_order_counts_afterwards():
    caps = EPSILON - np.array([conversion(order, DELTA) for order in filter_.ORDERS])
    assert max(reached(caps, 40, seed=1)) > 1.1 * DELTA


def test_the_weights_of_all_orders_add_up_to_one():
    home = filter_.home_orders(np.geomspace(0.2, 12, 30), 1e-5)
    weighted = (
        np.exp(-(filter_.offsets(1e-5, home) - np.log1p(-1 / filter_.ORDERS)) * (filter_.ORDERS - 1)) / filter_.ORDERS
    )
    assert np.allclose(weighted.sum(axis=1), 1e-5, rtol=1e-9)
    assert np.allclose(weighted.max(axis=1), 0.9e-5, rtol=1e-9)


def test_an_epsilon_is_what_the_best_order_leaves():
    start = filter_.offsets(1e-5, [5])[0] + np.linspace(0, 1, 16)
    history = [SampledGaussian(0.01, 1.3, 200), SampledGaussian(0.5, 20.0, 3)]
    by_hand = min(
        start[i] + sum(m.steps * rdp.divergence(m.sample_rate, m.noise_multiplier, order)[0] for m in history)
        for i, order in enumerate(filter_.ORDERS)
    )
    assert filter_.epsilon(history, 1e-5, start) == pytest.approx(by_hand, rel=1e-12)


def test_a_history_of_two_runs_costs_what_both_cost_one_after_the_other():
    first, second = SampledGaussian(0.02, 2.0, 100), SampledGaussian(0.05, 3.0, 50)
    start = filter_.offsets(1e-5, filter_.home_orders(2.0, 1e-5))
    spent = filter_.sums(np.array([[0.02]]), np.array([[2.0]]), [100], 1)
    assert filter_.epsilon([first, second], 1e-5, start[0]) == pytest.approx(
        filter_.epsilon([second], 1e-5, (start + spent)[0]), rel=1e-12
    )


@pytest.mark.parametrize("is_begun", [True, False], ids=["from accounts", "from nothing"])
def test_many_histories_at_once_cost_what_each_costs_by_itself(is_begun):
    """Groups of one rate under other noise (Scale), and those that some phases never draw (Sequential).

    From nothing, each of 16 orders may use a sixteenth of delta.
    """
    rates = np.array([[0.02, 0.02, 0.02, 0.0, 0.0], [0.05, 0.05, 0.0, 0.05, 0.0]])  # (phases, rows)
    noises = np.array([[1.5, 3.0, 1.5, np.inf, np.inf], [2.0, 2.0, np.inf, 4.0, np.inf]])
    steps, deltas = [100, 40], np.array([1e-5, 1e-5, 1e-6, 1e-5, 1e-5])
    starts = filter_.offsets(deltas, [3, 5, 7, 5, 5]) + np.linspace(0, 1, 16) if is_begun else None
    expected = []
    for row in range(5):
        costs = []
        for place, order in enumerate(filter_.ORDERS):
            begin = conversion(order, deltas[row] / 16) if starts is None else starts[row, place]
            costs.append(
                begin
                + sum(
                    count * rdp.divergence(rate, noise, order)[0]
                    for rate, noise, count in zip(rates[:, row], noises[:, row], steps, strict=True)
                    if rate > 0
                )
            )
        expected.append(min(costs))
    if not is_begun:
        expected[-1] = 0.0  # never drawn
    got = filter_.batch_epsilon(rates, noises, steps, deltas, starts)
    assert got == pytest.approx(expected, rel=1e-12)
    assert len(set(np.round(got, 9))) == 5


# -- experiments/individual_accounting/gaussian.py: the accountant of full batches -----------------------------------


@pytest.mark.parametrize("mu", [0.05, 0.3, 1.0, 4.0])
def test_the_gaussian_profile_is_below_pld_s_bound_and_close_to_it(mu):
    exact = float(gaussian.epsilon_of(mu, 1e-5)[0])
    bound = pld.epsilon([SampledGaussian(1.0, 2 / mu, 4)], 1e-5)
    assert exact <= bound <= exact * 1.005 + 1e-4
    assert gaussian.delta_of(exact, mu) <= 1e-5 <= gaussian.delta_of(exact * (1 - 1e-9), mu)
    assert gaussian.epsilon([SampledGaussian(1.0, 2 / mu, 4)], 1e-5) == pytest.approx(exact, rel=1e-12)


def test_the_gaussian_profile_is_for_full_batches_only():
    with pytest.raises(PlanError, match="full batches only"):
        gaussian.epsilon([SampledGaussian(0.5, 1.0, 1)], 1e-5)
