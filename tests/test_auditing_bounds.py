"""Bounds from an audit's scores, against slower twins, closed forms, and how often they may be wrong."""

from __future__ import annotations

import functools
import math

import numpy as np
import pytest
from scipy.special import ndtr, ndtri
from scipy.stats import beta, binom

from epsilons.auditing import bounds
from epsilons.auditing.bounds import Guesses
from oracles import gaussian as exact_gaussian_epsilon

ALPHA = 0.05


def may_be(count: int, trials: int, chance: float, error: float = 1e-3) -> tuple[bool, bool]:
    """Is `chance` within Clopper and Pearson's interval of this count, from above and from below?"""
    low = beta.ppf(error / 2, count, trials - count + 1) if count else 0.0
    high = beta.ppf(1 - error / 2, count + 1, trials - count) if count < trials else 1.0
    return bool(low <= chance), bool(chance <= high)


# -- twins -------------------------------------------------------------------------------------------------------


def naive_p_value(m: int, guesses: int, correct: int, epsilon: float, delta: float) -> float:
    """Theorem 5.2 of arXiv 2305.08846, term by term, from binomial coefficients."""
    p = 1 / (1 + math.exp(-epsilon))

    def mass(k: int) -> float:
        return math.comb(guesses, k) * p**k * (1 - p) ** (guesses - k)

    tail = sum(mass(k) for k in range(correct, guesses + 1))
    worst = max(
        (sum(mass(k) for k in range(max(correct - i, 0), correct)) / i for i in range(1, correct + 1)), default=0.0
    )
    return min(tail + 2 * m * delta * worst, 1.0)


@pytest.mark.parametrize("counts", [(100, 20, 17), (60, 60, 40), (50, 10, 10), (50, 10, 0), (40, 2, 1)])
@pytest.mark.parametrize("epsilon", [0.0, 0.3, 1.0, 4.0])
@pytest.mark.parametrize("delta", [0.0, 1e-5, 1e-2])
def test_the_one_run_p_value_is_the_theorem_s(counts, epsilon, delta):
    assert bounds.guesses_p_value(Guesses(*counts), epsilon, delta) == pytest.approx(
        naive_p_value(*counts, epsilon, delta), rel=1e-9
    )


def randomized_response_cost(epsilon: float):
    """Cost of the trade-off curve of an (epsilon, 0) guarantee, which randomized response attains."""
    growth = math.exp(epsilon)
    return lambda y: max(y / growth, 1 - growth * (1 - y), 0.0)


def naive_rejects(guesses: Guesses, cost, alpha: float) -> bool:
    """Algorithm 3 of arXiv 2410.22235 as it is printed: two lists, filled from the last entry to the first."""
    j, m = guesses.correct, guesses.guesses
    h, r = [0.0] * (j + 1), [0.0] * (j + 1)
    h[j], r[j] = alpha * (m - j) / guesses.canaries, alpha * j / guesses.canaries
    for i in range(j - 1, -1, -1):
        h[i] = max(h[i + 1], cost(min(r[i + 1], 1.0)))
        r[i] = r[i + 1] + i / (m - i) * (h[i] - h[i + 1])
    return r[0] + h[0] > m / guesses.canaries


@pytest.mark.parametrize("counts", [(200, 200, 130), (200, 200, 150), (200, 40, 33), (200, 8, 8), (100, 100, 50)])
@pytest.mark.parametrize("alpha", [1e-4, 0.01, 0.05])
def test_the_f_dp_test_is_the_paper_s_algorithm(counts, alpha):
    found = Guesses(*counts)
    costs = [bounds.gaussian_cost(mu) for mu in (0.0, 0.2, 0.5, 1.0, 2.0)]
    costs += [randomized_response_cost(epsilon) for epsilon in (0.0, 0.3, 1.0, 2.0)]
    verdicts = [bounds.fdp_rejects(found, cost, alpha) for cost in costs]
    assert verdicts == [naive_rejects(found, cost, alpha) for cost in costs]


def test_the_f_dp_p_value_is_where_rejection_begins():
    guesses, cost = Guesses(200, 200, 128), bounds.gaussian_cost(0.2)
    p = bounds.fdp_p_value(guesses, cost)
    assert 1e-6 < p < 0.2
    assert bounds.fdp_rejects(guesses, cost, p)
    assert not bounds.fdp_rejects(guesses, cost, p * 0.97)
    assert not bounds.fdp_rejects(Guesses(200, 200, 150), bounds.gaussian_cost(0.6), 0.05)


@pytest.mark.parametrize("mu", [0.1, 0.5, 1.0, 4.0])
@pytest.mark.parametrize("delta", [1e-9, 1e-5, 1e-2])
def test_epsilon_of_a_gaussian_is_the_closed_form_with_fifty_digits_from_below(mu, delta):
    exact = exact_gaussian_epsilon(1 / mu, 1, delta)
    epsilon = bounds.gaussian_epsilon(mu, delta)
    assert epsilon == pytest.approx(exact, rel=1e-6, abs=1e-9)
    assert epsilon <= exact * (1 + 1e-7)


def test_the_gaussian_cost_is_the_curve_of_two_gaussians():
    for y in (0.0, 0.01, 0.3, 0.9, 1.0):
        assert bounds.gaussian_cost(1.3)(y) == pytest.approx(float(ndtr(ndtri(y) - 1.3)))


# -- no signal, much signal ----------------------------------------------------------------------------------------


def test_scores_without_a_signal_give_bound_0():
    included = np.arange(400) % 2 == 0
    for score in (np.zeros(400), np.repeat(np.arange(200.0), 2), -1.0 * included):
        assert bounds.one_run_bound(score, included, 1e-5, ALPHA) == 0.0
        assert bounds.fdp_bound(score, included, 1e-5, ALPHA) == 0.0
        fit = bounds.fit_gaussian(score[included], score[~included], ALPHA)
        assert fit.mu_bound == 0.0


def test_scores_that_separate_in_from_out_give_large_bounds():
    rng = np.random.default_rng(0)
    included = rng.random(1000) < 0.5
    score = included + 1e-3 * rng.standard_normal(1000)
    assert bounds.one_run_bound(score, included, 1e-5, ALPHA) > 3.5
    assert bounds.fdp_bound(score, included, 1e-5, ALPHA) > 6.0
    assert bounds.gaussian_epsilon(bounds.fit_gaussian(score[included], score[~included], ALPHA).mu_bound, 1e-5) > 100
    same = bounds.fit_gaussian(np.ones(50), np.zeros(50), ALPHA)
    assert same.mu == math.inf
    assert same.mu_bound > 10


def test_too_few_canaries_are_no_error():
    assert bounds.fit_gaussian(np.empty(0), np.ones(5), ALPHA).mu_bound == 0.0
    assert bounds.one_run_bound(np.ones(1), np.ones(1, dtype=bool), 1e-5, ALPHA) == 0.0


def test_guesses_are_right_where_ranks_and_coins_agree():
    included = np.array([True] * 5 + [False] * 5)
    assert bounds.guess(included * 1.0, included, 1.0) == Guesses(10, 10, 10)
    assert bounds.guess(included * -1.0, included, 1.0) == Guesses(10, 10, 0)
    assert bounds.guess(included * 1.0, included, 0.4) == Guesses(10, 4, 4)


# -- calibration ---------------------------------------------------------------------------------------------------

CANARIES = 1000


@pytest.fixture(params=[1_000, pytest.param(10_000, marks=pytest.mark.slow)])
def simulated(request) -> int:
    return request.param


@pytest.mark.parametrize("epsilon", [0.5, 2.0, *(pytest.param(e, marks=pytest.mark.slow) for e in (1.0, 3.0))])
def test_one_run_bounds_exceed_randomized_response_as_often_as_allowed(epsilon, simulated):
    """P(bound > ε) at most alpha, and more than alpha/5, within Clopper and Pearson's 99.9 %.

    Randomized response attains (ε, 0), so a bound that is never wrong there is a weak bound.
    """
    rng = np.random.default_rng(1)
    right = 1 / (1 + math.exp(-epsilon))

    @functools.cache
    def rejected(guesses: Guesses) -> bool:  # bound > ε, without the search for the bound
        cost = randomized_response_cost(epsilon)
        return bounds.fdp_rejects(guesses, cost, ALPHA / len(bounds.GUESSED))

    plain = curved = 0
    for _ in range(simulated):
        included = rng.random(CANARIES) < 0.5
        score = np.where((rng.random(CANARIES) < right) == included, 1.0, -1.0)
        plain += bounds.one_run_bound(score, included, 0.0, ALPHA) > epsilon
        curved += any(rejected(bounds.guess(score, included, part)) for part in bounds.GUESSED)
    for count in (plain, curved):
        assert may_be(count, simulated, ALPHA)[0]
        assert may_be(count, simulated, ALPHA / 5)[1] or count / simulated > ALPHA / 5
        if simulated == 10_000:
            assert count / simulated > ALPHA / 5


@pytest.mark.parametrize("mu", [0.268, 0.719, 1.5])
def test_the_gaussian_bound_exceeds_the_truth_as_often_as_it_says(mu, simulated):
    rng = np.random.default_rng(2)
    over = 0
    for _ in range(simulated):
        included = rng.random(CANARIES) < 0.5
        score = 3.0 * (rng.standard_normal(CANARIES) + mu * included) - 7.0
        over += bounds.fit_gaussian(score[included], score[~included], ALPHA).mu_bound > mu
    assert may_be(over, simulated, ALPHA) == (True, True)


@pytest.mark.parametrize("mu", [0.268, 1.5])
def test_one_run_bounds_exceed_the_exact_gaussian_at_most_as_often_as_allowed(mu):
    rng = np.random.default_rng(3)
    truth = bounds.gaussian_epsilon(mu, 1e-5)
    plain = curved = 0
    for _ in range(1_000):
        included = rng.random(CANARIES) < 0.5
        score = rng.standard_normal(CANARIES) + mu * included
        plain += bounds.one_run_bound(score, included, 1e-5, ALPHA) > truth
        curved += bounds.fdp_bound(score, included, 1e-5, ALPHA) > truth
    assert may_be(plain, 1_000, ALPHA)[0]
    assert may_be(curved, 1_000, ALPHA)[0]


def test_binomials_of_scipy_are_what_the_theorem_means():
    assert binom.sf(9, 10, 0.5) == pytest.approx(0.5**10)  # P(W >= 10), not P(W > 10)
