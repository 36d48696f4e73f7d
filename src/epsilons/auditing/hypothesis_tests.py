"""Hypothesis tests: can these scores come from the plan? Each test uses the plan's numbers as its hypothesis.

    threshold  canaries above (or below) a score fixed beforehand: more of those in and fewer of those out than any
               mechanism with the plan's trade-off curve allows. Exact for independent scores of any distribution
    mean       the distance of in and out in pooled standard deviations, against the plan's distance: noncentral t,
               which is exact for normal scores (every record drawn in every step), and widened by the plan's first four
               cumulants. Otherwise at most 1.3 times its level in simulations (tests/test_auditing_scores.py)
    one run    the f-DP one-run test against the plan's curve; it also holds for dependent scores
    certified  the one-run bound against the epsilon that the plan certifies; it assumes nothing about scores or curve

Bonferroni over all tests of all groups: an honest run is called violated with a probability of at most alpha.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.stats import binom, nct, norm

from ..accounting.profile import FINE_GRID, Profile
from ..mechanism import SampledGaussian
from . import bounds
from .scores import BoolArray, CanaryScores, FloatArray, Moments, planned_moments

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
    certified = HypothesisTest("certified", bounds.one_run_p_value(score, included, epsilon_spent, delta))
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
    for share in bounds.GUESSED:
        guesses = bounds.guess(score, included, share)
        if guesses.guesses:
            yield HypothesisTest(f"one run, {share:.0%} guessed", bounds.fdp_p_value(guesses, allowed.cost))
