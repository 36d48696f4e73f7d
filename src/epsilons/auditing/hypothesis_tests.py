"""Verdict: can these scores come from the plan? Every test has the plan's own numbers as its hypothesis.

    threshold  canaries above (or below) a score that was fixed beforehand: more of those in and fewer of those out than
               any mechanism with the plan's trade-off curve allows. Exact for independent scores of any distribution
    mean       the distance of in and out in pooled standard deviations, against the plan's own: noncentral t, which is
               exact for normal scores (everyone drawn in every step), and widened where the plan's first four cumulants
               say so. Elsewhere at most 1.3 times its level in what was measured (tests/test_auditing_scores.py)
    one run    the f-DP one-run test against the plan's curve: holds for scores that depend on one another, too
    certified  the one-run bound against the epsilon that the plan certifies: assumes nothing about scores or curve

Bonferroni over all tests of all groups: an honest run is called violated with a chance of at most alpha.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.stats import binom, nct, norm

from ..accounting.profile import FINE_GRID, Profile
from ..mechanism import SampledGaussian
from . import one_run
from .scores import FloatArray, Moments, Scores, planned_moments

#: Planned rates of false alarms at which thresholds are set, in either direction.
FALSE_ALARMS = (0.5, 0.1, 0.02)
#: Rates at which a threshold test looks for the best excuse; between two of them it takes the better of both ends.
_EXCUSES = np.unique(np.concatenate([[0.0], np.geomspace(1e-5, 1, 400), np.linspace(0, 1, 1601)]))


@dataclass(frozen=True)
class Test:
    """name: which test; p_value: how likely a run under the plan looks at least so bad, before Bonferroni."""

    __test__ = False  # not a test of ours

    name: str
    p_value: float


def tests(
    scores: Scores, group: int, history: Sequence[SampledGaussian], epsilon_spent: float, delta: float
) -> tuple[Test, ...]:
    """All tests of one group, which goes through `history` and for which the plan certifies (spends, delta).

    None for a group without canaries, and but the last for one that is never drawn or has hardly any.
    """
    mine = scores.group == group
    if not mine.any():
        return ()
    certified = Test(
        "certified", one_run.bound_p_value(scores.score[mine], scores.included[mine], epsilon_spent, delta)
    )
    inside, outside = scores.of(group)
    if all(m.is_silent for m in history) or len(inside) < 2 or len(outside) < 2:
        return (certified,)
    allowed, (planned_in, planned_out) = Profile(history, FINE_GRID), planned_moments(history)
    return (
        *_thresholds(inside, outside, planned_in, planned_out, allowed),
        Test("mean", _mean(inside, outside, planned_in, planned_out)),
        *_one_run(scores, group, allowed),
        certified,
    )


def _thresholds(
    inside: FloatArray, outside: FloatArray, planned_in: Moments, planned_out: Moments, allowed: Profile
) -> Iterator[Test]:
    for rate in FALSE_ALARMS:
        # Any fixed place will do; these are near the planned quantiles.
        place = float(norm.isf(rate))
        high = planned_out.mean + place * math.sqrt(planned_out.variance)
        low = planned_in.mean - place * math.sqrt(planned_in.variance)
        yield Test(f"in above, {rate:.0%}", threshold_p_value(inside > high, outside > high, allowed))
        yield Test(f"out below, {rate:.0%}", threshold_p_value(outside < low, inside < low, allowed))


def threshold_p_value(hits: np.ndarray, alarms: np.ndarray, allowed: Profile) -> float:
    """How likely so many hits and so few false alarms are, at most, if the curve holds.

    At a true rate a of false alarms, hits have a rate of at most power(a). Two binomial p-values, combined by
    Fisher's product; a is unknown, so that the largest result over all a counts.
    """
    hit, alarm = int(hits.sum()), int(alarms.sum())
    low, high = _EXCUSES[:-1], _EXCUSES[1:]
    product = binom.sf(hit - 1, len(hits), allowed.power(high)) * binom.cdf(alarm, len(alarms), low)
    worst = float(np.max(product))
    return min(worst * (1 - math.log(worst)), 1.0) if worst > 0 else 0.0


def _mean(inside: FloatArray, outside: FloatArray, planned_in: Moments, planned_out: Moments) -> float:
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
    found = float(nct.sf(distance * unit * math.sqrt((total - 2) / total), total - 2, center * unit))
    return found if math.isfinite(found) else 1.0


def planned_distance(planned_in: Moments, planned_out: Moments, n: int, m: int) -> tuple[float, float]:
    """What the distance of n canaries in from m out should be, in pooled standard deviations, and its own deviation.

    The delta method on (difference of means, pooled variance), with the plan's third and fourth cumulants.
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


def _one_run(scores: Scores, group: int, allowed: Profile) -> Iterator[Test]:
    mine = scores.group == group
    for part in one_run.GUESSED:
        found = one_run.guess(scores.score[mine], scores.included[mine], part)
        if found.guesses:
            yield Test(f"one run, {part:.0%} guessed", one_run.fdp_p_value(found, allowed.cost))
