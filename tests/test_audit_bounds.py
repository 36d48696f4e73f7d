"""Bounds and tests of an audit: against slower twins, closed forms and simulation, and how often they may be wrong."""

from __future__ import annotations

import functools
import math
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from scipy.special import ndtr, ndtri
from scipy.stats import beta, binom, norm

from epsilons import SampledGaussian
from epsilons.accounting import pld
from epsilons.accounting.profile import FINE_GRID, Profile
from epsilons.auditing import bounds
from epsilons.auditing.bounds import CanaryScores, Guesses, log_likelihood_ratio, planned_moments
from oracles import gaussian as exact_gaussian_epsilon
from oracles import one_step_divergence

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


@pytest.mark.parametrize("mu", [0.268, pytest.param(1.5, marks=pytest.mark.slow)])
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


# ==== Scores, their planned moments and the planned curve, against direct formulas, closed forms and simulation.


RATES = np.array([0.001, 0.01, 0.1, 0.3, 0.5, 0.9])


def test_the_score_is_the_logarithm_of_the_two_densities_ratio():
    z = np.linspace(-8, 9, 400)
    for q in (0.001, 0.02, 0.5, 1.0):
        for s in (0.6, 1.3, 5.0):
            inside = (1 - q) * norm.pdf(z, 0, s) + q * norm.pdf(z, 1, s)
            expected = np.log(inside / norm.pdf(z, 0, s))
            np.testing.assert_allclose(log_likelihood_ratio(z, q, s), expected, rtol=1e-9, atol=1e-12)


def test_the_score_does_not_overflow_and_is_0_for_rate_0():
    assert log_likelihood_ratio(np.array([1e4]), 0.01, 0.05) == pytest.approx(2e4 / (2 * 0.0025), rel=1e-3)
    assert log_likelihood_ratio(np.array([-1e6, 0.3, 1e6]), 0.0, 1.0).tolist() == [0.0, 0.0, 0.0]


HISTORY = (SampledGaussian(0.1, 1.0, 10), SampledGaussian(0.3, 2.0, 5))
DELTA = 1e-5


@functools.cache
def certified(history) -> float:
    return pld.epsilon(list(history), DELTA)


def p_value_of(scores: CanaryScores, history=HISTORY) -> float:
    """The p-value of all tests together, after Bonferroni."""
    tests = bounds.run_tests(scores, 0, history, certified(history), DELTA)
    return min(1.0, len(tests) * min(test.p_value for test in tests))


def simulated_scores(history, canaries: int, rng: np.random.Generator, quieter: float = 1.0) -> CanaryScores:
    """Canaries' scores by the definition of the sampled Gaussian; noise may be quieter than planned."""
    included = rng.random(canaries) < 0.5
    score = np.zeros(canaries)
    for m in history:
        drawn = (rng.random((m.steps, canaries)) < m.sample_rate) & included
        z = drawn + quieter * m.noise_multiplier * rng.standard_normal((m.steps, canaries))
        score += log_likelihood_ratio(z, m.sample_rate, m.noise_multiplier).sum(0)
    return CanaryScores(np.zeros(canaries, dtype=np.int64), included, score)


def test_planned_moments_are_those_of_simulated_scores():
    score, included = simulated_scores(HISTORY, 400_000, np.random.default_rng(0)).of(0)
    for values, moments in zip((score[included], score[~included]), planned_moments(HISTORY), strict=True):
        n, centered = len(values), values - values.mean()
        second, third, fourth = (np.mean(centered**k) for k in (2, 3, 4))
        # five standard errors each, by the moments themselves
        assert values.mean() == pytest.approx(moments.mean, abs=5 * math.sqrt(second / n))
        assert second == pytest.approx(moments.variance, abs=5 * math.sqrt(fourth / n))
        sixth, eighth = np.mean(centered**6), np.mean(centered**8)
        assert third == pytest.approx(moments.third, abs=5 * math.sqrt(sixth / n))
        assert fourth - 3 * second**2 == pytest.approx(moments.fourth, abs=6 * math.sqrt(eighth / n))


def test_the_unsampled_score_has_the_moments_of_a_gaussian():
    inside, outside = planned_moments([SampledGaussian(1.0, 2.0, 8)])
    assert inside.mean == pytest.approx(1.0, rel=1e-9)  # T/2σ²
    assert outside.mean == pytest.approx(-1.0, rel=1e-9)
    assert inside.variance == pytest.approx(2.0, rel=1e-9)
    assert abs(inside.fourth) < 1e-6


# -- the curve -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("multiplier", "steps"), [(2.0, 1), (5.0, 30)])
def test_the_curve_of_unsampled_gaussians_is_the_exact_one_from_above(multiplier, steps):
    found = Profile([SampledGaussian(1.0, multiplier, steps)], FINE_GRID).power(RATES)
    exact = ndtr(ndtri(RATES) + math.sqrt(steps) / multiplier)
    assert (found >= exact - 1e-12).all()
    np.testing.assert_allclose(found, exact, rtol=5e-3)


def test_the_curve_of_one_sampled_step_is_the_better_of_both_directions():
    q, s = 0.2, 0.8
    allowed = Profile([SampledGaussian(q, s, 1)], FINE_GRID)
    for direction, sign in (("remove", 1), ("add", -1)):
        for z in np.linspace(-1.5, 3, 12):
            tails = ndtr(-sign * z / s), (1 - q) * ndtr(-sign * z / s) + q * ndtr(-sign * (z - 1) / s)
            alarms, hits = tails if direction == "remove" else tails[::-1]
            assert allowed.power(alarms) >= hits - 1e-12
    # and no more than the hockey-stick divergences, from another implementation, allow
    grid = np.linspace(-3, 3, 61)
    for rate in RATES:
        least = min(
            max(_divergence(q, s, e, direction) for direction in ("remove", "add")) + math.exp(e) * rate for e in grid
        )
        assert allowed.power(rate) <= min(least, 1.0) + 2e-3


@functools.cache
def _divergence(q: float, s: float, epsilon: float, direction: str) -> float:
    if epsilon >= 0:
        return one_step_divergence(q, s, epsilon, direction)
    other = "add" if direction == "remove" else "remove"
    # H_{e^ε}(P‖Q) = 1 − e^ε + e^ε·H_{e^−ε}(Q‖P)
    return 1 - math.exp(epsilon) + math.exp(epsilon) * one_step_divergence(q, s, -epsilon, other)


def test_power_and_cost_undo_one_another():
    allowed = Profile(HISTORY, FINE_GRID)
    for rate in RATES:
        assert allowed.cost(float(allowed.power(rate))) == pytest.approx(rate, abs=4e-3)
    assert allowed.cost(0.0) == 0.0


def test_a_record_that_is_never_drawn_gives_nothing_away():
    np.testing.assert_allclose(Profile([SampledGaussian(0.0, 1.0, 100)], FINE_GRID).power(RATES), RATES, rtol=1e-6)
    assert Profile([], FINE_GRID).cost(0.4) == pytest.approx(0.4)


# -- the verdict ---------------------------------------------------------------------------------------------------


def test_a_threshold_test_takes_the_maximum_over_the_false_alarm_rate():
    """It must reach the maximum of a fine search, and hardly exceed it."""
    allowed = Profile(HISTORY, FINE_GRID)
    rates, power = np.linspace(0, 1, 20_001), allowed.power(bounds.ALARM_RATES[1:])
    for hits, alarms in ((330, 200), (300, 250), (500, 0), (250, 250), (20, 2), (0, 0), (500, 500)):
        product = binom.sf(hits - 1, 500, allowed.power(rates)) * binom.cdf(alarms, 500, rates)
        worst = product.max()
        fine = min(worst * (1 - math.log(worst)), 1.0) if worst > 0 else 0.0
        p_value = bounds.threshold_p_value(np.arange(500) < hits, np.arange(500) < alarms, power)
        assert fine <= p_value * (1 + 1e-9)
        assert fine == 0 or math.log(p_value) <= 0.995 * math.log(fine) + 0.25


@pytest.mark.parametrize("runs", [100, pytest.param(2000, marks=pytest.mark.slow)])
def test_scores_under_the_plan_are_called_violated_as_rarely_as_promised(runs, monkeypatch):
    """Binomial at 5 %, with a chance of 1e-4 to fail by luck for each count, for all tests and for each test."""
    most, least = binom.isf(1e-4, runs, 0.05), binom.ppf(1e-4, runs, 0.05)
    rng = np.random.default_rng(4)
    allowed, cached = Profile(HISTORY, FINE_GRID), functools.cache(bounds.fdp_p_value)
    power = allowed.power(bounds.ALARM_RATES[1:])
    cost = allowed.cost  # one object, so that equal guesses are looked up
    monkeypatch.setattr(bounds, "fdp_p_value", lambda guesses, _: cached(guesses, cost))
    monkeypatch.setattr(bounds, "Profile", lambda *_: SimpleNamespace(power=lambda _: power, cost=cost))
    violated, low = 0, Counter()
    for _ in range(runs):
        tests = bounds.run_tests(simulated_scores(HISTORY, 600, rng), 0, HISTORY, certified(HISTORY), DELTA)
        violated += min(test.p_value for test in tests) * len(tests) < 0.05
        low.update({test.name: int(test.p_value < 0.05) for test in tests})
    assert violated <= most
    assert max(low.values()) <= most
    assert len(low) == 11
    assert low["mean"] >= least  # not too cautious either


@pytest.mark.parametrize("canaries", [10, *(pytest.param(n, marks=pytest.mark.slow) for n in (20, 50)), 200])
@pytest.mark.parametrize(
    "mechanism",
    [SampledGaussian(1.0, 0.5, 1), SampledGaussian(1.0, 1 / 7, 1), SampledGaussian(0.05, 0.4, 10)],
    ids=["2 apart", "7 apart", "skew"],
)
def test_few_canaries_are_called_violated_as_rarely_as_promised(mechanism, canaries):
    """At a level of 5 % over eleven tests; by the central limit theorem it was up to fourteen times that."""
    runs, level, rng = 4000, 0.05 / 11, np.random.default_rng(canaries)
    moments, half = planned_moments([mechanism]), canaries // 2
    shape = (mechanism.steps, runs, canaries)
    drawn = (rng.random(shape) < mechanism.sample_rate) & (np.arange(canaries) < half)
    z = drawn + mechanism.noise_multiplier * rng.standard_normal(shape)
    scores = log_likelihood_ratio(z, mechanism.sample_rate, mechanism.noise_multiplier).sum(0)
    alarms = sum(bounds.mean_p_value(score[:half], score[half:], *moments) < level for score in scores)
    assert alarms <= binom.isf(1e-5, runs, 1.3 * level)


def test_scores_with_half_the_noise_are_called_violated():
    rng = np.random.default_rng(5)
    for _ in range(5):
        assert p_value_of(simulated_scores(HISTORY, 1000, rng, quieter=0.5)) < 1e-4


@pytest.mark.parametrize("rate", [0.01, 0.05])
def test_a_few_canaries_in_the_clear_are_called_violated_on_any_scale_of_scores(rate):
    """One in 25. All other scores carry no signal and are beyond, or within, all thresholds."""
    history = (SampledGaussian(rate, 1.2, 40),)
    for least, most in ((0.0, 0.01), (1000.0, 1100.0)):
        rng = np.random.default_rng(0)
        included = rng.random(1000) < 0.5
        score = rng.uniform(least, most, 1000)
        for coin, clear in ((True, most + 1), (False, least - 1)):
            score[np.flatnonzero(included == coin)[:20]] = clear
        assert bounds.one_run_bound(score, included, DELTA, 0.05) > certified(history)
        assert p_value_of(CanaryScores(np.zeros(1000, dtype=np.int64), included, score), history) < 0.01


@pytest.mark.parametrize("known", [0.5, 0.55, 0.7, 0.95])
def test_the_one_run_p_value_is_the_level_at_which_its_bound_exceeds_epsilon(known):
    rng = np.random.default_rng(7)
    included = rng.random(500) < 0.5
    score = np.where(rng.random(500) < known, included, ~included) + 0.1 * rng.random(500)
    for epsilon in (0.0, 0.26, 1.0, 3.0):
        p_value = bounds.one_run_p_value(score, included, epsilon, DELTA)
        if 0 < p_value < 1:
            assert bounds.one_run_bound(score, included, DELTA, 0.999 * p_value) <= epsilon
            assert bounds.one_run_bound(score, included, DELTA, 1.001 * p_value) >= epsilon - 1e-6
        else:
            assert p_value == (1.0 if bounds.one_run_bound(score, included, DELTA, 0.999) <= epsilon else 0.0)


@pytest.mark.parametrize("epsilon", [1.0, *(pytest.param(e, marks=pytest.mark.slow) for e in (0.0, 2.5))])
def test_an_attained_guarantee_is_called_violated_as_rarely_as_promised(epsilon):
    """Randomized response attains (ε, 0); Binomial at 5 %, with a chance of 1e-4 to fail by luck."""
    rng, runs = np.random.default_rng(8), 2000
    low = 0
    for _ in range(runs):
        included = rng.random(500) < 0.5
        score = np.where((rng.random(500) < 1 / (1 + math.exp(-epsilon))) == included, 1.0, -1.0)
        low += bounds.one_run_p_value(score + 0.1 * rng.random(500), included, epsilon, 0.0) < 0.05
    assert low <= binom.isf(1e-4, runs, 0.05)


def test_a_group_without_canaries_has_no_tests_and_one_never_drawn_has_one():
    scores = simulated_scores(HISTORY, 400, np.random.default_rng(6))
    never = [SampledGaussian(0.0, 1.0, 10)]
    assert bounds.run_tests(scores, 1, HISTORY, 1.0, DELTA) == ()
    for score, low, high in ((0 * scores.score, 0.05, 1.0), (scores.included + 0.0, 0.0, 1e-3)):
        (test,) = bounds.run_tests(replace(scores, score=score), 0, never, 0.0, DELTA)
        assert low <= test.p_value <= high
