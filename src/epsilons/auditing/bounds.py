"""Lower bounds on epsilon from canary scores, without and with an assumption about their distribution.

One-run bounds hold for any scores, also if canaries influence one another. The canaries with the highest scores are
guessed in, as many with the lowest scores are guessed out, and the rest is left open.

    guarantee (ε, δ)  Steinke, Nasr, Jagielski, "Privacy Auditing with One (1) Training Run", arXiv 2305.08846v1,
                      Theorem 5.2: correct guesses rarely exceed Binomial(guesses, e^ε/(1 + e^ε))
    guarantee f       Mahloujifar, Melis, Chaudhuri, "Auditing f-Differential Privacy in One Run", arXiv 2410.22235v1,
                      Algorithm 3: the same for a trade-off curve f, here that of a Gaussian or of the plan

The numbers of guesses are fixed beforehand (`GUESSED`), and each of them is tested at its share of alpha.

The Gaussian bound assumes that the scores of in and out are normal with one width. Let µ be their distance in standard
deviations. The mechanism is µ-Gaussian-DP (Dong, Roth, Su, arXiv 1905.02383v3, Definition 6), and so (ε, δ(ε))-DP with
δ(ε) = Φ(µ/2 − ε/µ) − e^ε·Φ(−µ/2 − ε/µ) (Corollary 1). With little noise and low rates scores are far from normal.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
import numpy.typing as npt
from scipy.special import log_ndtr, nctdtr, nctdtrinc, ndtr, ndtri
from scipy.stats import binom, nct, norm

from ..accounting.calibration import bisected
from ..accounting.profile import FINE_GRID, Profile
from ..core.mechanism import SampledGaussian

# -- Canary scores, one number per canary, and the moments that a plan gives them
#
# The score of a canary in group p is the log-likelihood ratio of "in" against "out" after all updates,
#
#     Σ_t log(1 + q_p·(e^{(2·z_t − 1)/2σ_p²} − 1)),   z_t its coordinate of the noisy sum, in units of weight_p · c_p
#
# (Mironov, Talwar, Zhang, arXiv 1908.10530v1, Section 3: in is (1−q)·N(0, σ²) + q·N(1, σ²), out is N(0, σ²)). By the
# Neyman-Pearson lemma no other test of the same numbers separates in from out better.

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]

#: Range (standard deviations beyond both means) and number of points of the integral over one step's score.
_TAIL, _POINTS = 12.0, 20_001


@dataclass(frozen=True, eq=False)
class CanaryScores:
    """The scores of an attack, one per canary. A higher score is evidence for "in".

    group     (canaries,) index into the plan's groups
    included  (canaries,) True for in
    score     (canaries,) finite numbers
    """

    group: IntArray = field(repr=False)
    included: BoolArray = field(repr=False)
    score: FloatArray = field(repr=False)

    def of(self, group: int) -> tuple[FloatArray, BoolArray]:
        """Scores of one group's canaries, and which of them are in."""
        members = self.group == group
        return self.score[members], self.included[members]


def log_likelihood_ratio(z: npt.ArrayLike, sample_rate: npt.ArrayLike, noise_multiplier: npt.ArrayLike) -> FloatArray:
    """One step's part of the score. The three arguments are broadcast; the result does not overflow.

    z: in units of the record's largest contribution.
    """
    q = np.asarray(sample_rate, dtype=np.float64)
    exponent = (2 * np.asarray(z, dtype=np.float64) - 1) / (2 * np.square(noise_multiplier))
    with np.errstate(divide="ignore"):  # log 0 is −inf for q = 0 and q = 1, as it should be
        ratio: FloatArray = np.logaddexp(np.log1p(-q), np.log(q) + exponent)
    return ratio


@dataclass(frozen=True)
class Moments:
    """The first four cumulants of a score."""

    mean: float
    variance: float
    third: float
    fourth: float


def planned_moments(history: Sequence[SampledGaussian]) -> tuple[Moments, Moments]:
    """Cumulants of the score of a canary that is in, and of one that is out, under `history`. Steps add up."""
    inside, outside = np.zeros(4), np.zeros(4)
    for mechanism in history:
        if mechanism.is_silent:
            continue
        step_in, step_out = _one_step(mechanism.sample_rate, mechanism.noise_multiplier)
        inside, outside = inside + mechanism.steps * step_in, outside + mechanism.steps * step_out
    return Moments(*map(float, inside)), Moments(*map(float, outside))


def _one_step(q: float, s: float) -> tuple[FloatArray, FloatArray]:
    z = np.linspace(-_TAIL * s, 1 + _TAIL * s, _POINTS)
    score = log_likelihood_ratio(z, q, s)
    density = np.exp(-0.5 * np.square(z / s)) / (s * math.sqrt(2 * math.pi)) * (z[1] - z[0])
    present = np.exp(-0.5 * np.square((z - 1) / s)) / (s * math.sqrt(2 * math.pi)) * (z[1] - z[0])
    return _cumulants(score, (1 - q) * density + q * present), _cumulants(score, density)


def _cumulants(values: FloatArray, mass: FloatArray) -> FloatArray:
    mean = float(values @ mass)
    second, third, fourth = (float((values - mean) ** k @ mass) for k in (2, 3, 4))
    return np.array([mean, second, third, fourth - 3 * second**2])


# -- Lower bounds on epsilon from canary scores, without and with an assumption about their distribution

#: Shares of the canaries that are guessed, from all to the most certain ones.
GUESSED = (1.0, 0.2, 0.04)

#: For a trade-off curve: true-positive rate -> the least false-positive rate.
Cost = Callable[[float], float]

_HIGHEST_ONE_RUN = 64.0  # the search for a one-run bound ends here, in nats or in µ
_HIGHEST_GAUSSIAN = 1e6  # nats
_LARGEST_T = 1000.0


@dataclass(frozen=True)
class Guesses:
    """Numbers of canaries, of guesses among them, and of correct guesses."""

    canaries: int
    guesses: int
    correct: int


def guess(score: FloatArray, included: BoolArray, share: float) -> Guesses:
    """Guess this share of the canaries by rank, half of them in and half of them out.

    Canaries with equal scores keep their order, which is independent of the coins.
    """
    order = np.argsort(score, kind="stable")
    half = int(share * len(score) / 2)
    correct = int((~included[order[:half]]).sum() + included[order[len(order) - half :]].sum())
    return Guesses(len(score), 2 * half, correct)


def one_run_bound(score: FloatArray, included: BoolArray, delta: float, alpha: float) -> float:
    """Epsilon that every (ε, delta) guarantee exceeds, with confidence 1 − alpha; 0 if nothing can be said."""
    share = alpha / len(GUESSED)
    return max(_one_run_epsilon(guess(score, included, part), delta, share) for part in GUESSED)


def fdp_bound(score: FloatArray, included: BoolArray, delta: float, alpha: float) -> float:
    """The same for mechanisms with the trade-off curve of a Gaussian: ε at `delta` of the largest µ rejected."""
    share = alpha / len(GUESSED)
    return gaussian_epsilon(max(_fdp_mu(guess(score, included, part), share) for part in GUESSED), delta)


# -- guarantee (epsilon, delta) --------------------------------------------------------------------


def one_run_p_value(score: FloatArray, included: BoolArray, epsilon: float, delta: float) -> float:
    """The alpha at which `one_run_bound` reaches epsilon."""
    smallest = min(guesses_p_value(guess(score, included, part), epsilon, delta) for part in GUESSED)
    return min(len(GUESSED) * smallest, 1.0)


def guesses_p_value(guesses: Guesses, epsilon: float, delta: float) -> float:
    """Upper bound on the probability of so many correct guesses under an (epsilon, delta) guarantee.

    Theorem 5.2: P(W >= v) + 2·m·delta·max_i P(v > W >= v − i)/i, W ~ Binomial(guesses, e^ε/(1 + e^ε)).
    """
    right = 1 / (1 + math.exp(-epsilon))
    tail = float(binom.sf(guesses.correct - 1, guesses.guesses, right))
    if delta == 0 or guesses.correct == 0:
        return min(tail, 1.0)
    just_below = np.cumsum(binom.pmf(np.arange(guesses.correct - 1, -1, -1), guesses.guesses, right))
    worst = float((just_below / np.arange(1, guesses.correct + 1)).max())
    return min(tail + 2 * guesses.canaries * delta * worst, 1.0)


@lru_cache(maxsize=65536)
def _one_run_epsilon(guesses: Guesses, delta: float, alpha: float) -> float:
    return _largest_rejected(lambda epsilon: guesses_p_value(guesses, epsilon, delta) <= alpha)


def _largest_rejected(rejected: Callable[[float], bool]) -> float:
    """The largest rejected parameter, from below; 0 if none. The rejected parameters are an interval from 0."""
    if not rejected(0.0):
        return 0.0
    low, high = 0.0, 0.5
    while rejected(high):
        low, high = high, 2 * high
        if low >= _HIGHEST_ONE_RUN:
            return low
    return bisected(rejected, low, high, width=1e-6)[0]


# -- guarantee f -----------------------------------------------------------------------------------


def fdp_rejects(guesses: Guesses, cost: Cost, alpha: float) -> bool:
    """True if an f-DP mechanism allows so many correct guesses with a probability of at most alpha.

    Algorithm 3 with one secret bit per canary. Let h be the probability that the last guess is wrong and r that it is
    right, given at least i correct guesses. If the probability exceeded alpha, h + r would exceed the total mass.
    """
    right = alpha * guesses.correct / guesses.canaries
    wrong = alpha * (guesses.guesses - guesses.correct) / guesses.canaries
    for i in range(guesses.correct - 1, -1, -1):
        more = max(wrong, cost(right))
        if more == wrong:
            break  # nothing grows any more
        right = min(right + i / (guesses.guesses - i) * (more - wrong), 1.0)
        wrong = more
    return right + wrong > guesses.guesses / guesses.canaries


def fdp_p_value(guesses: Guesses, cost: Cost) -> float:
    """The smallest alpha at which `fdp_rejects` is true, from above; 1 if there is none."""
    low = math.log(1e-12)
    if not fdp_rejects(guesses, cost, 1.0):
        return 1.0
    if fdp_rejects(guesses, cost, math.exp(low)):
        return math.exp(low)
    return math.exp(bisected(lambda log: not fdp_rejects(guesses, cost, math.exp(log)), low, 0.0, width=1e-2)[1])


def gaussian_cost(mu: float) -> Cost:
    """Cost of the trade-off curve between N(0, 1) and N(mu, 1)."""
    return lambda y: float(ndtr(ndtri(y) - mu))


@lru_cache(maxsize=65536)
def _fdp_mu(guesses: Guesses, alpha: float) -> float:
    return _largest_rejected(lambda mu: fdp_rejects(guesses, gaussian_cost(mu), alpha))


# -- normal scores ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class GaussianFit:
    """mu: estimated distance of the two means in standard deviations; mu_bound: its lower confidence bound."""

    mu: float
    mu_bound: float


def fit_gaussian(inside: FloatArray, outside: FloatArray, alpha: float) -> GaussianFit:
    """Cohen's d of in against out, and its lower bound with confidence 1 − alpha.

    d·√(nm/(n + m)) has a noncentral t distribution about µ·√(nm/(n + m)) (Hedges and Olkin 1985, chapter 5), so the
    bound is exact under the assumption. Both are 0 if there is nothing to compare.
    """
    n, m = len(inside), len(outside)
    if n < 2 or m < 2:
        return GaussianFit(0.0, 0.0)
    gap = float(inside.mean() - outside.mean())
    width = math.sqrt((inside.var(ddof=1) * (n - 1) + outside.var(ddof=1) * (m - 1)) / (n + m - 2))
    if gap <= 0:
        return GaussianFit(0.0, 0.0)
    mu = gap / width if width > 0 else math.inf
    root = math.sqrt(n * m / (n + m))
    t = min(mu * root, _LARGEST_T)  # a larger t would only raise the bound
    at_zero = float(nctdtr(n + m - 2, 0.0, t))
    mu_bound = float(nctdtrinc(n + m - 2, 1 - alpha, t)) / root if at_zero > 1 - alpha else 0.0
    return GaussianFit(mu, mu_bound if math.isfinite(mu_bound) else 0.0)


def gaussian_epsilon(mu: float, delta: float) -> float:
    """The smallest epsilon >= 0 at which a µ-Gaussian-DP mechanism has δ(ε) <= delta, from below.

    >>> round(gaussian_epsilon(1.0, 1e-5), 4)
    4.3772
    """
    if mu <= 0 or _divergence(0.0, mu) <= delta:
        return 0.0
    if not math.isfinite(mu) or _divergence(_HIGHEST_GAUSSIAN, mu) > delta:
        return math.inf
    low, high = 0.0, 1.0
    while _divergence(high, mu) > delta:
        low, high = high, 2 * high
    return bisected(lambda epsilon: _divergence(epsilon, mu) > delta, low, high, part=1e-9)[0]


def _divergence(epsilon: float, mu: float) -> float:
    return float(ndtr(mu / 2 - epsilon / mu) - np.exp(epsilon + log_ndtr(-mu / 2 - epsilon / mu)))


# -- Hypothesis tests: can these scores come from the plan? Each test uses the plan's numbers as its hypothesis
#
# threshold  canaries above (or below) a score fixed beforehand: more of those in and fewer of those out than any
#                mechanism with the plan's trade-off curve allows. Exact for independent scores of any distribution
#     mean       the distance of in and out in pooled standard deviations, against the plan's distance: noncentral t,
#                which is exact for normal scores (every record drawn in every step), and widened by the plan's first
#                four
#                cumulants. Otherwise at most 1.3 times its level in simulations (tests/test_auditing_scores.py)
#     one run    the f-DP one-run test against the plan's curve; it also holds for dependent scores
#     certified  the one-run bound against the epsilon that the plan certifies; it assumes nothing about scores or curve
#
# Bonferroni over all tests of all groups: an honest run is called violated with a probability of at most alpha.

#: Planned false-positive rates at which thresholds are set, in either direction.
FALSE_ALARMS = (0.5, 0.1, 0.02)
#: False-positive rates over which a threshold test takes its maximum; between two of them it takes the better of both.
ALARM_RATES = np.unique(np.concatenate([[0.0], np.geomspace(1e-5, 1, 400), np.linspace(0, 1, 1601)]))


@dataclass(frozen=True)
class HypothesisTest:
    """The outcome of one test: its name, and its p-value before Bonferroni."""

    name: str
    p_value: float


def run_tests(
    scores: CanaryScores, group: int, history: Sequence[SampledGaussian], epsilon_spent: float, delta: float
) -> tuple[HypothesisTest, ...]:
    """All tests of one group, which goes through `history` and for which the plan certifies (epsilon_spent, delta).

    There are none for a group without canaries, and only the last one for a group that is never drawn or has fewer
    than two canaries in or out.
    """
    score, included = scores.of(group)
    if not len(score):
        return ()
    certified = HypothesisTest("certified", one_run_p_value(score, included, epsilon_spent, delta))
    inside, outside = score[included], score[~included]
    if all(m.is_silent for m in history) or len(inside) < 2 or len(outside) < 2:
        return (certified,)
    allowed, (planned_in, planned_out) = Profile(history, FINE_GRID), planned_moments(history)
    return (
        *_thresholds(inside, outside, planned_in, planned_out, allowed),
        HypothesisTest("mean", mean_p_value(inside, outside, planned_in, planned_out)),
        *_one_run(score, included, allowed),
        certified,
    )


def _thresholds(
    inside: FloatArray, outside: FloatArray, planned_in: Moments, planned_out: Moments, allowed: Profile
) -> Iterator[HypothesisTest]:
    """Thresholds near the planned quantiles; the test holds for any that are fixed beforehand."""
    power = allowed.power(ALARM_RATES[1:])
    for rate in FALSE_ALARMS:
        quantile = float(norm.isf(rate))
        high = planned_out.mean + quantile * math.sqrt(planned_out.variance)
        low = planned_in.mean - quantile * math.sqrt(planned_in.variance)
        yield HypothesisTest(f"in above, {rate:.0%}", threshold_p_value(inside > high, outside > high, power))
        yield HypothesisTest(f"out below, {rate:.0%}", threshold_p_value(outside < low, inside < low, power))


def threshold_p_value(hits: BoolArray, alarms: BoolArray, power: FloatArray) -> float:
    """Upper bound on the probability of so many hits and so few false alarms.

    power: the largest true-positive rate at each false-positive rate of ALARM_RATES[1:]. Two binomial p-values
    are combined by Fisher's product. The rate is unknown, so the result is the maximum over all rates.
    """
    hit, alarm = int(hits.sum()), int(alarms.sum())
    product = binom.sf(hit - 1, len(hits), power) * binom.cdf(alarm, len(alarms), ALARM_RATES[:-1])
    worst = float(np.max(product))
    return min(worst * (1 - math.log(worst)), 1.0) if worst > 0 else 0.0


def mean_p_value(inside: FloatArray, outside: FloatArray, planned_in: Moments, planned_out: Moments) -> float:
    """p-value of the distance of in and out in pooled standard deviations."""
    n, m = len(inside), len(outside)
    total = n + m
    width2 = (inside.var() * n + outside.var() * m) / total
    gap = float(inside.mean() - outside.mean())
    if width2 == 0:
        return 0.0 if gap > 0 else 1.0
    center, spread = planned_distance(planned_in, planned_out, n, m)
    of_normal = math.sqrt(total / (n * m) + center**2 / (2 * total))
    distance = center + (gap / math.sqrt(width2) - center) * min(1.0, of_normal / spread)
    unit = math.sqrt(n * m / total)
    p_value = float(nct.sf(distance * unit * math.sqrt((total - 2) / total), total - 2, center * unit))
    return p_value if math.isfinite(p_value) else 1.0


def planned_distance(planned_in: Moments, planned_out: Moments, n: int, m: int) -> tuple[float, float]:
    """The planned distance of n canaries in from m out, in pooled standard deviations, and its standard deviation.

    By the delta method on (difference of means, pooled variance), with the plan's third and fourth cumulants.
    """
    total = n + m
    gap = planned_in.mean - planned_out.mean
    width2 = (n * planned_in.variance + m * planned_out.variance) / total
    of_gap = planned_in.variance / n + planned_out.variance / m
    of_width2 = (
        n * (planned_in.fourth + 2 * planned_in.variance**2) + m * (planned_out.fourth + 2 * planned_out.variance**2)
    ) / total**2
    together = (planned_in.third - planned_out.third) / total
    variance = of_gap / width2 + gap**2 * of_width2 / (4 * width2**3) - gap * together / width2**2
    return gap / math.sqrt(width2), math.sqrt(variance)


def _one_run(score: FloatArray, included: BoolArray, allowed: Profile) -> Iterator[HypothesisTest]:
    for share in GUESSED:
        guesses = guess(score, included, share)
        if guesses.guesses:
            yield HypothesisTest(f"one run, {share:.0%} guessed", fdp_p_value(guesses, allowed.cost))
