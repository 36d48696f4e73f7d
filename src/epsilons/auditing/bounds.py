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
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from scipy.special import log_ndtr, nctdtr, nctdtrinc, ndtr, ndtri
from scipy.stats import binom

from .scores import BoolArray, FloatArray

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
    while high - low > 1e-6:
        middle = (low + high) / 2
        low, high = (middle, high) if rejected(middle) else (low, middle)
    return low


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
    low, high = math.log(1e-12), 0.0
    if not fdp_rejects(guesses, cost, 1.0):
        return 1.0
    if fdp_rejects(guesses, cost, math.exp(low)):
        return math.exp(low)
    while high - low > 1e-2:
        middle = (low + high) / 2
        low, high = (low, middle) if fdp_rejects(guesses, cost, math.exp(middle)) else (middle, high)
    return math.exp(high)


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
    while high - low > 1e-9 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if _divergence(middle, mu) > delta else (low, middle)
    return low


def _divergence(epsilon: float, mu: float) -> float:
    return float(ndtr(mu / 2 - epsilon / mu) - np.exp(epsilon + log_ndtr(-mu / 2 - epsilon / mu)))
