"""Tests of whether groups differ: by relabeling records, and the paper's own, which is kept for comparison.

The randomisation test is exact if groups were dealt at random: under the hypothesis that the group of a record has no
effect, every relabeling is equally likely, and p = (1 + number at least as extreme)/(1 + relabelings) (Phipson and
Smyth, "Permutation p-values should never be zero", arXiv 1603.05766). Its statistic is Welch's t between groups of each
record's mean score as a member minus its mean score as a non-member. The AUC of one record is no statistic here:
references by leave-one-out bias it, to about .45 without any signal.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy.stats import ttest_ind

from ...errors import InputError
from ...mechanism import FloatArray, IntArray
from .signals import BoolArray, Float32Array

RELABELINGS = 9_999
#: Labels that are shuffled at once.
_AT_ONCE = 2**22

PAPER_TEST_INVALID = (
    "Not valid: Student's t compares all scores of two groups, members and non-members together, and takes them as "
    "independent. Scores of non-members differ between groups, too, and records without any exposure count as evidence."
)


@dataclass(frozen=True)
class PaperTest:
    """Outcome of the paper's test on one target. `validity` says why it is shown for comparison only."""

    t: float
    p_value: float
    validity: str = PAPER_TEST_INVALID


def paper_test(scores_of_target: npt.ArrayLike, group: IntArray, groups: tuple[int, int] = (0, 1)) -> PaperTest:
    """Student's t-test of the second group against the first, as in Boenisch et al., arXiv 2303.17046, section 4.3.

    scores_of_target  (records,) of members and non-members
    group             (records,) index of each record's group

    Raises InputError where a group has fewer than two records.

    >>> round(paper_test([0, 1, 2, 2, 3, 4], np.array([0, 0, 0, 1, 1, 1])).t, 3)
    2.449
    """
    scores = np.asarray(scores_of_target, dtype=np.float64)
    strict, loose = (scores[group == one] for one in groups)
    if min(len(strict), len(loose)) < 2:
        raise InputError(f"The test needs two records in each group, got {len(strict)} and {len(loose)}.")
    test = ttest_ind(loose, strict)
    return PaperTest(float(test.statistic), float(test.pvalue))


def record_gaps(scores: Float32Array, member: BoolArray) -> FloatArray:
    """(records,) mean score as a member minus mean score as a non-member; NaN where a record was never one of them.

    scores, member: (shadows, records) each. The result names the most exposed people: it must not be shown.
    """
    inside = member.sum(axis=0)
    outside = len(member) - inside
    of_members = np.einsum("tr,tr->r", scores, member, dtype=np.float64)
    of_others = scores.sum(axis=0, dtype=np.float64) - of_members
    with np.errstate(divide="ignore", invalid="ignore"):
        gaps: FloatArray = of_members / inside - of_others / outside
    return gaps


def randomisation_test(
    gaps: FloatArray, is_looser: BoolArray, rng: np.random.Generator, relabelings: int = RELABELINGS
) -> FloatArray:
    """(attacks,) two-sided p-values of a difference between two groups.

    gaps       (attacks, records) of `record_gaps`; records with a NaN are left out
    is_looser  (records,) which of the two groups each record is in

    NaN where a group has fewer than two records left.
    """
    kept = ~np.isnan(gaps).any(axis=0)
    labels, values = is_looser[kept], gaps[:, kept]
    if min(labels.sum(), (~labels).sum()) < 2:
        return np.full(len(gaps), math.nan)
    values = values - values.mean(axis=1, keepdims=True)
    observed = np.abs(_welch(labels[None], values))
    extreme = np.zeros(len(values))
    for block in _shuffled(labels, relabelings, rng):
        extreme += (np.abs(_welch(block, values)) >= observed * (1 - 1e-9)).sum(axis=0)
    p_values: FloatArray = (1 + extreme) / (1 + relabelings)
    return p_values


def _shuffled(labels: BoolArray, relabelings: int, rng: np.random.Generator) -> Iterator[BoolArray]:
    size = max(1, _AT_ONCE // len(labels))
    for start in range(0, relabelings, size):
        yield rng.permuted(np.tile(labels, (min(size, relabelings - start), 1)), axis=1)


def _welch(labels: BoolArray, values: FloatArray) -> FloatArray:
    """(relabelings, attacks) Welch's t of values (attacks, records) under labels (relabelings, records)."""
    weights, n = labels.astype(np.float64), int(labels[0].sum())
    m = labels.shape[1] - n
    sums, squares = weights @ values.T, weights @ np.square(values).T
    others, other_squares = values.sum(axis=1) - sums, np.square(values).sum(axis=1) - squares
    error = (squares / n - (sums / n) ** 2) / (n - 1) + (other_squares / m - (others / m) ** 2) / (m - 1)
    gap = sums / n - others / m
    t: FloatArray = np.divide(gap, np.sqrt(np.maximum(error, 0.0)), out=np.zeros_like(gap), where=error > 0)
    return t
