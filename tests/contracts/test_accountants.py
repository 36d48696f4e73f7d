"""Every accountant is an upper bound, and moves the way a cost must; what ACCOUNTANTS lists is examined.

The bounds it may never be below are closed forms and a quadrature (oracles.py), not a finer grid of its own kind.
"""

from __future__ import annotations

import math

import dp_accounting
import pytest
from dp_accounting.pld import PLDAccountant
from dp_accounting.rdp import RdpAccountant
from hypothesis import given
from hypothesis import strategies as st

import oracles
from epsilons import SampledGaussian
from epsilons.accounting import ACCOUNTANTS, rdp
from shares import examples

#: PLD's grid moves with its arguments, and its epsilon by at most this much (relative).
JITTER = 5e-4

every = pytest.mark.parametrize("accountant", ACCOUNTANTS.values(), ids=ACCOUNTANTS)
rates = st.floats(math.log(2e-3), 0.0).map(math.exp)
noises = st.floats(math.log(0.7), math.log(30)).map(math.exp)
counts = st.floats(0.0, math.log(3000)).map(lambda x: round(math.exp(x)))
deltas = st.sampled_from([1e-7, 1e-5, 1e-3])
bounded = examples(8, 25)


@every
@bounded
@given(rates, noises, counts, deltas, st.floats(1.001, 3.0), st.sampled_from(["rate", "steps", "noise", "delta"]))
def test_more_of_anything_never_costs_less(accountant, q, sigma, steps, delta, factor, what):
    base = accountant([SampledGaussian(q, sigma, steps)], delta)
    more = {
        "rate": lambda: accountant([SampledGaussian(min(q * factor, 1.0), sigma, steps)], delta),
        "steps": lambda: accountant([SampledGaussian(q, sigma, math.ceil(steps * factor))], delta),
        "noise": lambda: accountant([SampledGaussian(q, sigma / min(factor, sigma / 0.6), steps)], delta),
        "delta": lambda: accountant([SampledGaussian(q, sigma, steps)], max(delta / factor, 1e-9)),
    }[what]()
    assert more >= base * (1 - JITTER)


# Narrower than above: two mechanisms whose losses differ a hundredfold in width share one fine, wide and slow grid.
similar_rates = st.floats(math.log(0.02), 0.0).map(math.exp)
similar_noises = st.floats(math.log(1.0), math.log(10)).map(math.exp)


@every
@examples(6, 20)
@given(similar_rates, similar_noises, counts, deltas, similar_rates, similar_noises, counts)
def test_a_longer_history_never_costs_less(accountant, q, sigma, steps, delta, q2, sigma2, steps2):
    first, second = SampledGaussian(q, sigma, steps), SampledGaussian(q2, sigma2, steps2)
    both = accountant([first, second], delta)
    assert both >= max(accountant([first], delta), accountant([second], delta)) * (1 - JITTER)


@every
@bounded
@given(noises, counts, deltas)
def test_without_sampling_it_is_never_below_the_exact_gaussian_curve(accountant, sigma, steps, delta):
    assert accountant([SampledGaussian(1.0, sigma, steps)], delta) >= oracles.gaussian(sigma, steps, delta)


@every
@bounded
@given(noises, counts, noises, counts, deltas)
def test_unsampled_phases_are_never_below_the_exact_gaussian_of_both(accountant, sigma, steps, sigma2, steps2, delta):
    # Gaussian losses add up: T₁/σ₁² + T₂/σ₂² is one step with 1/σ² of that much.
    together = 1 / math.sqrt(steps / sigma**2 + steps2 / sigma2**2)
    ours = accountant([SampledGaussian(1.0, sigma, steps), SampledGaussian(1.0, sigma2, steps2)], delta)
    assert ours >= oracles.gaussian(together, 1, delta)


@every
@pytest.mark.parametrize("history", [[], [(0.0, 1.0, 100)], [(0.1, 1.0, 0)], [(0.0, 0.1, 5), (1.0, 1.0, 0)]])
def test_who_never_takes_part_spends_exactly_nothing(accountant, history):
    assert accountant([SampledGaussian(*part) for part in history], 1e-5) == 0


@every
def test_silent_parts_and_the_order_of_a_history_change_nothing(accountant):
    loud = [SampledGaussian(0.02, 1.5, 200), SampledGaussian(1.0, 40.0, 7)]
    silent = [SampledGaussian(0.0, 1.0, 10), SampledGaussian(0.1, 1.0, 0), SampledGaussian(0.1, math.inf, 5)]
    assert accountant(silent, 1e-5) == 0
    assert accountant([*silent, *loud], 1e-5) == accountant(loud, 1e-5)
    assert accountant(loud[::-1], 1e-5) == pytest.approx(accountant(loud, 1e-5), rel=1e-12)


@every
@bounded
@given(rates, noises, deltas, st.sampled_from(oracles.DIRECTIONS))
def test_one_step_is_never_below_its_closed_form(accountant, q, sigma, delta, direction):
    assert accountant([SampledGaussian(q, sigma, 1)], delta) >= oracles.one_step(q, sigma, delta, direction)


STEPS = [(0.1, 1.0), (0.3, 0.7), (0.01, 0.5), (0.5, 3.0), (1.0, 5.0), (0.9, 1.5), (0.003, 2.0)]


@every
@pytest.mark.parametrize("direction", oracles.DIRECTIONS)
@pytest.mark.parametrize(
    ("first", "second"), [*zip(STEPS, STEPS, strict=True), *zip(STEPS, STEPS[1:] + STEPS[:1], strict=True)]
)
def test_two_steps_are_never_below_the_quadrature(accountant, first, second, direction):
    exact = oracles.two_steps(first, second, 1e-5, direction)
    assert accountant([SampledGaussian(*first, 1), SampledGaussian(*second, 1)], 1e-5) >= exact * (1 - 1e-8)


@pytest.mark.parametrize("step", STEPS)
def test_pld_is_within_a_percent_of_the_quadrature_at_two_steps(step):
    exact = max(oracles.two_steps(step, step, 1e-5, direction) for direction in oracles.DIRECTIONS)
    assert ACCOUNTANTS["pld"]([SampledGaussian(*step, 2)], 1e-5) <= exact * 1.01 + 1e-4


SETTINGS = [
    [(0.02048, 3.2989, 1465)],
    [(0.1, 9.1527, 500)],
    [(1.0, 14.9321, 100)],
    [(0.02, 1.0, 1)],
    [(0.02, 1.5, 200), (0.05, 3.0, 100)],
]

#: dp-accounting's own accountants, and how far apart each may be from ours: PLD there has a fixed grid of 1e-4,
#: RDP other orders than Opacus' (given the same ones here) and a series instead of a quadrature.
PEERS = {
    "pld": (lambda: PLDAccountant(), 2e-3),
    "rdp": (lambda: RdpAccountant(orders=list(rdp.OPACUS_ORDERS)), 1e-6),
}


@pytest.mark.parametrize("name", PEERS)
@pytest.mark.parametrize("history", SETTINGS)
def test_it_agrees_with_dp_accounting_s_own_accountant(name, history):
    make, tolerance = PEERS[name]
    theirs = make()
    for q, sigma, steps in history:
        step = dp_accounting.PoissonSampledDpEvent(q, dp_accounting.GaussianDpEvent(sigma))
        theirs.compose(dp_accounting.SelfComposedDpEvent(step, steps))
    ours = ACCOUNTANTS[name]([SampledGaussian(*part) for part in history], 1e-5)
    assert ours == pytest.approx(theirs.get_epsilon(1e-5), rel=tolerance)


# -- the oracles are held to each other ------------------------------------------------------------------------


@pytest.mark.parametrize("direction", oracles.DIRECTIONS)
def test_the_oracles_agree_where_they_meet(direction):
    # One and two unsampled steps are the exact Gaussian's.
    assert oracles.one_step(1.0, 2.0, 1e-5, direction) == pytest.approx(oracles.gaussian(2.0, 1, 1e-5), rel=1e-9)
    two = oracles.two_steps((1.0, 2.0), (1.0, 2.0), 1e-5, direction)
    assert two == pytest.approx(oracles.gaussian(2.0, 2, 1e-5), rel=1e-8)
    # A second step that reveals next to nothing leaves the first alone; and the order of the two is irrelevant.
    first, nothing = (0.1, 1.0), (1e-12, 50.0)
    alone = oracles.one_step(*first, 1e-5, direction)
    assert oracles.two_steps(first, nothing, 1e-5, direction) == pytest.approx(alone, rel=1e-7)
    assert oracles.two_steps(nothing, first, 1e-5, direction) == pytest.approx(alone, rel=1e-7)
    a, b = (0.3, 0.7), (0.05, 1.5)
    assert oracles.two_steps(a, b, 1e-5, direction) == pytest.approx(oracles.two_steps(b, a, 1e-5, direction), rel=1e-8)


def test_the_prv_oracle_s_estimate_is_near_the_exact_gaussian():
    _, estimate, _ = oracles.prv(((1.0, 5.0, 10),), 1e-6)
    assert estimate == pytest.approx(oracles.gaussian(5.0, 10, 1e-6), rel=2e-5)
