"""One run: bounds that hold whatever the scores are distributed like, and however canaries influence one another.

The canaries with the highest scores are guessed in, as many with the lowest out, the rest is left open. Then

    guarantee (ε, δ)  Steinke, Nasr, Jagielski, "Privacy Auditing with One (1) Training Run", arXiv 2305.08846v1,
                      Theorem 5.2: correct guesses exceed Binomial(guesses, e^ε/(1 + e^ε)) hardly more often than chance
    guarantee f       Mahloujifar, Melis, Chaudhuri, "Auditing f-Differential Privacy in One Run", arXiv 2410.22235v1,
                      Algorithm 3: the same for a whole trade-off curve f, here that of a Gaussian or of the plan

How many to guess is fixed beforehand (`GUESSED`), and each number is tested at its share of alpha.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from scipy.special import ndtr, ndtri
from scipy.stats import binom

from .gaussian import epsilon_of
from .scores import BoolArray, FloatArray

#: Parts of the canaries that are guessed: all, and ever surer ones.
GUESSED = (1.0, 0.2, 0.04)

#: For a curve f and the power 1 − f: the least false-positive rate that a true-positive rate of y costs.
Cost = Callable[[float], float]

_HIGHEST = 64.0  # no bound above this is looked for, in nats or in µ


@dataclass(frozen=True)
class Guesses:
    """Of so many canaries so many were guessed, and so many of those rightly."""

    canaries: int
    guesses: int
    correct: int


def guess(score: FloatArray, included: BoolArray, part: float) -> Guesses:
    """Guess this part of the canaries, half of them in and half out, by rank.

    Equal scores keep the canaries' own order, which knows nothing of the coins.
    """
    order = np.argsort(score, kind="stable")
    half = int(part * len(score) / 2)
    right = int((~included[order[:half]]).sum() + included[order[len(order) - half :]].sum())
    return Guesses(len(score), 2 * half, right)


def bound(score: FloatArray, included: BoolArray, delta: float, alpha: float) -> float:
    """Epsilon that any (ε, delta) guarantee exceeds, with confidence 1 − alpha; 0 where nothing is found.

    At ε = 0 already, (0, delta) must be rejected for the bound to be positive.
    """
    each = alpha / len(GUESSED)
    return max(_epsilon(guess(score, included, part), delta, each) for part in GUESSED)


def fdp_bound(score: FloatArray, included: BoolArray, delta: float, alpha: float) -> float:
    """The same if the trade-off curve is that of some Gaussian mechanism: ε at `delta` of the sharpest one rejected."""
    each = alpha / len(GUESSED)
    return epsilon_of(max(_mu(guess(score, included, part), each) for part in GUESSED), delta)


# -- (epsilon, delta) ------------------------------------------------------------------------------


def bound_p_value(score: FloatArray, included: BoolArray, epsilon: float, delta: float) -> float:
    """The alpha at which `bound` reaches epsilon: at most so likely it does under an (epsilon, delta) guarantee."""
    return min(len(GUESSED) * min(p_value(guess(score, included, part), epsilon, delta) for part in GUESSED), 1.0)


def p_value(found: Guesses, epsilon: float, delta: float) -> float:
    """How likely so many correct guesses are, at most, under an (epsilon, delta) guarantee.

    Theorem 5.2: P(W >= v) + 2·m·delta·max_i P(v > W >= v − i)/i, W ~ Binomial(guesses, e^ε/(1 + e^ε)).
    """
    right = 1 / (1 + math.exp(-epsilon))
    tail = float(binom.sf(found.correct - 1, found.guesses, right))
    if delta == 0 or found.correct == 0:
        return min(tail, 1.0)
    just_below = np.cumsum(binom.pmf(np.arange(found.correct - 1, -1, -1), found.guesses, right))
    worst = float((just_below / np.arange(1, found.correct + 1)).max())
    return min(tail + 2 * found.canaries * delta * worst, 1.0)


@lru_cache(maxsize=65536)
def _epsilon(found: Guesses, delta: float, alpha: float) -> float:
    return _largest_rejected(lambda epsilon: p_value(found, epsilon, delta) <= alpha)


def _largest_rejected(rejected: Callable[[float], bool]) -> float:
    """The largest parameter found to be rejected, 0 if none; what is rejected is an interval from 0."""
    if not rejected(0.0):
        return 0.0
    low, high = 0.0, 0.5
    while rejected(high):
        low, high = high, 2 * high
        if low >= _HIGHEST:
            return low
    while high - low > 1e-6:
        middle = (low + high) / 2
        low, high = (middle, high) if rejected(middle) else (low, middle)
    return low


# -- f ---------------------------------------------------------------------------------------------


def rejects(found: Guesses, cost: Cost, alpha: float) -> bool:
    """True if an f-DP mechanism guesses so well with a chance of at most alpha.

    Algorithm 3, for one secret bit per canary. Were the chance larger, the probabilities h of guessing the last canary
    wrongly and r of guessing it rightly, with at least i right in all, would add up to more than there is.
    """
    right = alpha * found.correct / found.canaries
    wrong = alpha * (found.guesses - found.correct) / found.canaries
    for i in range(found.correct - 1, -1, -1):
        more = max(wrong, cost(right))
        if more == wrong:
            break  # nothing grows any more
        right = min(right + i / (found.guesses - i) * (more - wrong), 1.0)
        wrong = more
    return right + wrong > found.guesses / found.canaries


def fdp_p_value(found: Guesses, cost: Cost) -> float:
    """The smallest alpha at which `rejects`, from above; 1 if there is none."""
    low, high = math.log(1e-12), 0.0
    if not rejects(found, cost, 1.0):
        return 1.0
    if rejects(found, cost, math.exp(low)):
        return math.exp(low)
    while high - low > 1e-2:
        middle = (low + high) / 2
        low, high = (low, middle) if rejects(found, cost, math.exp(middle)) else (middle, high)
    return math.exp(high)


def gaussian_cost(mu: float) -> Cost:
    """Of the trade-off curve between N(0, 1) and N(mu, 1)."""
    return lambda y: float(ndtr(ndtri(y) - mu))


def randomized_response_cost(epsilon: float) -> Cost:
    """Of the trade-off curve of an (epsilon, 0) guarantee, which randomized response attains."""
    grow = math.exp(epsilon)
    return lambda y: max(y / grow, 1 - grow * (1 - y), 0.0)


@lru_cache(maxsize=65536)
def _mu(found: Guesses, alpha: float) -> float:
    return _largest_rejected(lambda mu: rejects(found, gaussian_cost(mu), alpha))
