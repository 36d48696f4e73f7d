"""The statistics of an attack: the AUC of every target, the ROC of each group, and what the plan certifies for it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
import numpy.typing as npt
from scipy.special import betainccinv, betaincinv, expit, logit, stdtrit
from scipy.stats import rankdata

from ...accounting.profile import Profile
from ...core.mechanism import FloatArray, Groups, IntArray, SampledGaussian
from ...planning import Plan
from ...planning.risk_profile import dominating
from ...reporting.membership import Estimate, Roc
from .attacks import BoolArray, Float32Array

# -- AUC of every target, and intervals over targets
#
# The AUC of a target is the Mann-Whitney statistic of its members' scores against those of its non-members, with
# midranks for ties (Hanley and McNeil, Radiology 143 (1982) 29-36). Coins are independent between targets, so the AUCs
# of targets give an interval for the mean, for these records. `intervals` adds what another sample of records would
# change.

#: The confidence of all intervals.
CONFIDENCE = 0.95

#: Scores that are ranked or counted at once; the temporary arrays need about 50 bytes for each.
_AT_ONCE = 2**21


def target_auc(
    scores: Float32Array, member: BoolArray, group: IntArray, groups: Sequence[int]
) -> FloatArray:  # (shadows, groups)
    """AUC of each target for the records of each group.

    scores  (shadows, records) larger for a likely member
    member  (shadows, records) the coins
    group   (records,) index of each record's group
    groups  the groups to evaluate

    NaN where all records of a group are members, or none is.

    >>> scores, member = np.float32([[3, 2, 1, 2]]), np.array([[True, True, False, False]])
    >>> target_auc(scores, member, np.array([0, 0, 0, 0]), [0])
    array([[0.875]])
    """
    columns = [np.flatnonzero(group == one) for one in groups]
    blocks = [
        np.stack([_auc(scores[block][:, records], member[block][:, records]) for records in columns], axis=1)
        for block in target_blocks(scores.shape)
    ]
    return np.concatenate(blocks)


def target_blocks(shape: tuple[int, ...]) -> Iterator[slice]:
    """Slices of the targets of a (shadows, records) array, so that a block is small."""
    shadows, records = shape
    size = max(1, _AT_ONCE // max(records, 1))
    return (slice(start, min(start + size, shadows)) for start in range(0, shadows, size))


def _auc(scores: Float32Array, member: BoolArray) -> FloatArray:
    """(targets,) from (targets, records)."""
    ranks = rankdata(scores, axis=1)
    inside = member.sum(axis=1)
    pairs = inside * (member.shape[1] - inside)
    above = np.einsum("tr,tr->t", ranks, member) - inside * (inside + 1) / 2
    auc: FloatArray = np.divide(above, pairs, out=np.full(len(pairs), np.nan), where=pairs > 0)
    return auc


def over_targets(values: npt.ArrayLike) -> Estimate:
    """Mean over targets, with Student's interval; targets without a value (NaN) are left out.

    >>> print(over_targets([0.5, 0.6, 0.7]))
    0.6000 [0.3516, 0.8484]
    """
    kept = np.asarray(values, dtype=np.float64)
    kept = kept[~np.isnan(kept)]
    value = float(kept.mean()) if len(kept) else math.nan
    half = student_quantile(len(kept)) * standard_error(kept)
    return Estimate(value, value - half, value + half)


def standard_error(values: FloatArray) -> float:
    """Of the mean; NaN for fewer than two values."""
    return float(values.std(ddof=1) / math.sqrt(len(values))) if len(values) > 1 else math.nan


def student_quantile(count: int, error: float = 1 - CONFIDENCE) -> float:
    """Half the width, in standard errors, of the interval of a mean of `count` values; NaN for fewer than two."""
    return float(stdtrit(count - 1, 1 - error / 2)) if count > 1 else math.nan


def clopper_pearson(
    hits: npt.ArrayLike, trials: npt.ArrayLike, error: float = 1 - CONFIDENCE
) -> tuple[FloatArray, FloatArray]:
    """The exact interval of a probability from independent trials (Clopper and Pearson, Biometrika 26 (1934) 404-413).

    It holds for one target. The scores of several targets are dependent, because they share records; there it is
    two to three times too narrow.

    >>> low, high = clopper_pearson(0, 10)
    >>> float(low), round(float(high), 4)
    (0.0, 0.3085)
    """
    hit, miss = np.asarray(hits, dtype=np.float64), np.subtract(trials, hits, dtype=np.float64)
    low = np.where(hit > 0, betaincinv(np.maximum(hit, 1), miss + 1, error / 2), 0.0)
    high = np.where(miss > 0, betainccinv(hit + 1, np.maximum(miss, 1), error / 2), 1.0)
    return low, high


# -- ROC of a group over all targets, with intervals that hold for other shadows and other records
#
# Scores are dependent in two ways: all scores of a shadow share its model, and all scores of a record share the record.
# The variance is that of a bootstrap over shadows plus that of a bootstrap over records minus that of a bootstrap over
# single scores, which the first two both contain (Cameron, Gelbach, Miller, "Robust Inference With Multiway
# Clustering",
# Journal of Business & Economic Statistics 29 (2011) 238-249, two-way case). One bootstrap with products of weights
# counts the third part three times (Owen and Eckles, "Bootstrapping data arrays of arbitrary order", Annals of Applied
# Statistics 6 (2012), arXiv 1106.2125: conservative), which is too wide where false alarms are rare.
#
# Weights are Exponential(1) with mean and variance 1 (Rubin, "The Bayesian Bootstrap", Annals of Statistics 9 (1981)
# 130-134), so no replicate is empty. Scores are replaced by their positions among thresholds at RATES, so a replicate
# is a product of matrices, and its cost does not grow with the number of scores.

#: False-positive rates at which the ROC is evaluated: eight in each power of ten up to .1, then every .05.
RATES: FloatArray = np.concatenate([10.0 ** (np.arange(-40, -7) / 8), np.arange(15, 91, 5) / 100])

#: No true-positive rate is given where fewer false alarms are observed.
FEWEST_ALARMS = 10

_REPLICATES = 400
_BINS = len(RATES) + 1


def roc(scores: Float32Array, member: BoolArray, rng: np.random.Generator) -> Roc:
    """The ROC of the scores of one group, (shadows, records) each; every shadow is a target.

    The threshold at rate a is the lowest at which at most a share a of all non-members is above it, so ties never
    raise the rate.
    """
    counts = _count(scores, member, _thresholds(scores[~member]))
    pooled = counts.by_target.sum(axis=0)  # (2, bins)
    hits, alarms = np.cumsum(pooled, axis=1)[:, :-1]
    shown = alarms >= FEWEST_ALARMS
    inside = int(pooled[0].sum())
    spread, auc_variance = _spread(counts, rng)
    units = min(scores.shape)
    low, high = _interval(hits, inside, spread, units, 1 - CONFIDENCE)
    one_sided = 2 * (1 - CONFIDENCE)
    band, _ = _interval(hits, inside, spread, units, one_sided / max(int(shown.sum()), 1))  # Bonferroni
    return Roc(
        rate=RATES[shown],
        false_alarms=alarms[shown].astype(np.int64),
        found=hits[shown] / inside,
        low=low[shown],
        high=high[shown],
        band=band[shown],
        auc_variance=auc_variance,
    )


def _thresholds(outside: Float32Array) -> Float32Array:
    """(rates,) falling; at most a share RATES of `outside` is above."""
    falling = np.sort(outside)[::-1]
    return falling[np.floor(RATES * len(outside) + 1e-9).astype(np.int64)]


@dataclass(frozen=True, eq=False)
class _Counts:
    """How many scores lie in each bin: bin b holds those above threshold b and not above threshold b − 1.

    by_target  (shadows, 2, bins) of members, and of non-members
    by_record  (records, 2, bins)
    """

    by_target: FloatArray
    by_record: FloatArray


def _count(scores: Float32Array, member: BoolArray, thresholds: Float32Array) -> _Counts:
    shadows, records = scores.shape
    cells = 2 * _BINS
    by_target, by_record = np.empty((shadows, cells)), np.zeros(records * cells)
    for block in target_blocks(scores.shape):
        position = len(thresholds) - np.searchsorted(thresholds[::-1], scores[block], side="left")
        cell = position + _BINS * ~member[block]  # (targets, records)
        targets = len(cell)
        counted = np.bincount((cell + cells * np.arange(targets)[:, None]).ravel(), minlength=targets * cells)
        by_target[block] = counted.reshape(targets, cells)
        by_record += np.bincount((cell + cells * np.arange(records)).ravel(), minlength=records * cells)
    return _Counts(by_target.reshape(shadows, 2, _BINS), by_record.reshape(records, 2, _BINS))


def _spread(counts: _Counts, rng: np.random.Generator) -> tuple[FloatArray, float]:
    """(rates,) standard errors of log odds of the true-positive rate; variance of the AUC due to records."""
    of_targets, of_records = _resampled(counts.by_target, rng), _resampled(counts.by_record, rng)
    pooled = counts.by_target.sum(axis=0)
    of_scores = rng.gamma(np.broadcast_to(pooled, (_REPLICATES, *pooled.shape)))  # a sum of Exponential(1) weights
    inside = pooled[0].sum()
    variances = [_log_odds(one, inside).var(axis=0, ddof=1) for one in (of_targets, of_records, of_scores)]
    both = variances[0] + variances[1] - variances[2]
    auc = [float(_pooled_auc(one).var(ddof=1)) for one in (of_records, of_scores)]
    spread: FloatArray = np.sqrt(np.maximum.reduce([both, *variances[:2]]))
    return spread, max(auc[0] - auc[1], 0.0)


def _resampled(counts: FloatArray, rng: np.random.Generator) -> FloatArray:
    """(replicates, 2, bins) weighted sums of counts (units, 2, bins); the small-sample factor n/(n − 1) included."""
    units = len(counts)
    flat = counts.reshape(units, -1)
    replicates = [rng.standard_exponential((_REPLICATES // 8, units)) @ flat for _ in range(8)]
    sums = np.concatenate(replicates).reshape(_REPLICATES, *counts.shape[1:])
    widening = (units / max(units - 1, 1)) ** 0.5
    mean = flat.sum(axis=0).reshape(counts.shape[1:])
    widened: FloatArray = np.maximum(mean + widening * (sums - mean), 0.0)
    return widened


def _log_odds(replicates: FloatArray, inside: float) -> FloatArray:
    """(replicates, rates) log odds of the true-positive rate at RATES, by linear interpolation."""
    hits, alarms = np.moveaxis(np.cumsum(replicates, axis=-1), 1, 0)
    curves = zip(_from_zero(alarms), _from_zero(hits), strict=True)
    found = np.array([np.interp(RATES, *curve) for curve in curves])
    return np.asarray(logit((found * inside + 0.5) / (inside + 1)), dtype=np.float64)


def _from_zero(sums: FloatArray) -> FloatArray:
    """(replicates, 1 + bins) cumulated shares."""
    shares: FloatArray = np.pad(sums / sums[:, -1:], ((0, 0), (1, 0)))
    return shares


def _pooled_auc(replicates: FloatArray) -> FloatArray:
    """(replicates,) area under the pooled ROC with straight lines between the thresholds."""
    inside, outside = np.moveaxis(replicates, 1, 0)
    above = np.cumsum(inside, axis=1) - inside / 2
    area: FloatArray = np.einsum("rb,rb->r", outside, above) / (inside.sum(axis=1) * outside.sum(axis=1))
    return area


def _interval(
    hits: FloatArray, trials: int, spread: FloatArray, units: int, error: float
) -> tuple[FloatArray, FloatArray]:
    """From standard errors in log odds; never narrower than Clopper-Pearson, which is all there is for one target."""
    center, half = logit((hits + 0.5) / (trials + 1)), student_quantile(units, error) * spread
    exact_low, exact_high = clopper_pearson(hits, trials, error)
    low: FloatArray = np.fmin(expit(center - half), exact_low)
    high: FloatArray = np.fmax(expit(center + half), exact_high)
    return low, high


# -- The certified curve of a group: no attack on what the plan releases has a higher true-positive rate
#
# It is the largest power of a test at each false-positive rate (`accounting.profile`; Dong, Roth, Su, arXiv
# 1905.02383v3,
# Proposition 6). It holds for each record, each choice of the other members and, because such a curve is concave, for
# averages over records, over targets with independent coins and over thresholds.

#: False-positive rates between which the area is summed.
_STEPS = np.unique(np.concatenate([[0.0], np.geomspace(1e-9, 1e-3, 300), np.linspace(1e-3, 1, 4000)]))


@dataclass(frozen=True, eq=False)
class Certified:
    """Upper bounds for one group.

    area   of the area under any attack's ROC
    power  (rates,) of its true-positive rate at each of intervals.RATES
    """

    area: float
    power: FloatArray = field(repr=False)


def certified(plan: Plan, groups: IntArray) -> Certified:
    """The bounds that hold for every record of these groups of the plan; groups: their indices."""
    return _certified(dominating(plan, groups))


def declared(groups: Groups, group: int) -> FloatArray:
    """(rates,) the curve that a tier by risk declares at each of RATES: the smallest of what its limits allow.

    An advantage a allows f + a. Where (f₁, t₁) is declared, a curve that is concave and begins at 0 or above is at most
    t₁ · max(1, f/f₁). The tail (ε, δ) allows the smaller of e^ε·f + δ and 1 − e^−ε·(1 − δ − f).
    """
    delta, epsilon, advantage, rate, power = groups.terms[group]
    by_rate = power * np.maximum(1.0, RATES / rate) if rate > 0 else np.ones(len(RATES))
    tail = np.minimum(np.exp(epsilon) * RATES + delta, 1 - np.exp(-epsilon) * (1 - delta - RATES))
    limits: FloatArray = np.array([RATES + advantage, by_rate, tail, np.ones(len(RATES))])
    return np.asarray(limits.min(axis=0))


@lru_cache(maxsize=256)
def _certified(history: tuple[SampledGaussian, ...]) -> Certified:
    profile = Profile(history)
    return Certified(_area(profile), profile.power(RATES))


def _area(profile: Profile) -> float:
    """An upper sum: the curve never falls, so each step has the height of its right end. At most .0003 too much."""
    return float(np.diff(_STEPS) @ profile.power(_STEPS[1:]))
