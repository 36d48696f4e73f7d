"""RDP: held to 50-digit quadrature, to Opacus, and to values recorded with other programs."""

from __future__ import annotations

import functools
import itertools
import math

import mpmath
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import oracles
from epsilons import SampledGaussian
from epsilons.accounting import rdp
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


def test_silent_parts_cost_nothing_and_change_nothing():
    loud = SampledGaussian(0.02, 1.5, 200)
    silent = [SampledGaussian(0.0, 1.0, 10), SampledGaussian(0.1, 1.0, 0), SampledGaussian(0.1, math.inf, 5)]
    assert rdp.epsilon(silent, 1e-5) == 0
    assert rdp.epsilon([*silent, loud], 1e-5) == rdp.epsilon([loud], 1e-5)
    assert rdp.epsilon([loud, loud], 1e-5) == pytest.approx(rdp.epsilon([SampledGaussian(0.02, 1.5, 400)], 1e-5))


@pytest.mark.parametrize(("delta", "floor"), [(1e-5, 0.103), (1e-6, 0.140), (1e-8, 0.214)])
def test_more_orders_certify_less_than_the_floor_of_opacus_orders(delta, floor):
    hardly = [SampledGaussian(1e-6, 100.0, 1)]
    assert rdp.epsilon(hardly, delta) == pytest.approx(floor, abs=5e-4)
    assert rdp.epsilon(hardly, delta, orders=rdp.EXTENDED_ORDERS) < floor / 15
