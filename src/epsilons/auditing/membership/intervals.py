"""ROC of a group over all targets, with intervals that hold for other shadows and other records.

Scores are dependent in two ways: all scores of a shadow share its model, and all scores of a record share the record.
The variance is that of a bootstrap over shadows plus that of a bootstrap over records minus that of a bootstrap over
single scores, which the first two both contain (Cameron, Gelbach, Miller, "Robust Inference With Multiway Clustering",
Journal of Business & Economic Statistics 29 (2011) 238-249, two-way case). One bootstrap with products of weights
counts the third part three times (Owen and Eckles, "Bootstrapping data arrays of arbitrary order", Annals of Applied
Statistics 6 (2012), arXiv 1106.2125: conservative), which is too wide where false alarms are rare.

Weights are Exponential(1) with mean and variance 1 (Rubin, "The Bayesian Bootstrap", Annals of Statistics 9 (1981)
130-134), so no replicate is empty. Scores are replaced by their positions among thresholds at RATES, so a replicate is
a product of matrices, and its cost does not grow with the number of scores.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from scipy.special import expit, logit

from ...mechanism import FloatArray, IntArray
from .signals import BoolArray, Float32Array
from .statistics import CONFIDENCE, Estimate, clopper_pearson, student_quantile, target_blocks

#: False-positive rates at which the ROC is evaluated: eight in each power of ten up to .1, then every .05.
RATES: FloatArray = np.concatenate([10.0 ** (np.arange(-40, -7) / 8), np.arange(15, 91, 5) / 100])

#: No true-positive rate is given where fewer false alarms are observed.
FEWEST_ALARMS = 10

_REPLICATES = 400
_BINS = len(RATES) + 1


@dataclass(frozen=True, eq=False)
class Roc:
    """The ROC of one attack on one group. Arrays are (points,), at those of RATES with 10 or more false alarms.

    rate          false-positive rates
    false_alarms  number of non-members above the threshold, over all targets
    found         true-positive rates
    low, high     their 95 % intervals, each on its own; Clopper-Pearson if there is one target
    band          lower bounds on them that hold together with 95 % confidence
    auc_variance  of the AUC, due to the choice of records
    """

    rate: FloatArray
    false_alarms: IntArray
    found: FloatArray
    low: FloatArray = field(repr=False)
    high: FloatArray = field(repr=False)
    band: FloatArray = field(repr=False)
    auc_variance: float = field(repr=False)

    def at(self, rate: float) -> Estimate | None:
        """The true-positive rate at one of RATES; None if there are fewer than 10 false alarms."""
        points = np.flatnonzero(np.isclose(self.rate, rate, rtol=1e-9))
        if not len(points):
            return None
        point = points[0]
        return Estimate(float(self.found[point]), float(self.low[point]), float(self.high[point]))


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
