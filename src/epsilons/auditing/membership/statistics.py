"""AUC of every target, and intervals over targets.

The AUC of a target is the Mann-Whitney statistic of its members' scores against those of its non-members, with midranks
for ties (Hanley and McNeil, Radiology 143 (1982) 29-36). Coins are independent between targets, so the AUCs of targets
give an interval for the mean, for these records. `intervals` adds what another sample of records would change.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy.special import betainccinv, betaincinv, stdtrit
from scipy.stats import rankdata

from ...mechanism import FloatArray, IntArray
from .signals import BoolArray, Float32Array

#: The confidence of all intervals.
CONFIDENCE = 0.95

#: Scores that are ranked or counted at once; the temporary arrays need about 50 bytes for each.
_AT_ONCE = 2**21


@dataclass(frozen=True)
class Estimate:
    """A value and its 95 % interval; low and high are NaN where nothing can be said."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.4f} [{self.low:.4f}, {self.high:.4f}]"


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
