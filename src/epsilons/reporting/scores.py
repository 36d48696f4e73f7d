"""Scores: accuracy with the uncertainty of its test set.

Wilson's interval (Wilson 1927, JASA 22(158), 209-212, in the form of Brown, Cai and DasGupta 2001, Statist. Sci.
16(2), eq. 4) keeps its coverage near 0 and 1 and in small cells, where the usual ± does not.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

#: Two-sided 95 %: the 97.5 % quantile of the standard normal distribution.
Z95 = 1.959963984540054


@dataclass(frozen=True)
class Score:
    """Accuracy on one slice of the test records.

    records    None where it was not written down; then there is no interval
    accuracy   None where there is no record to be right about
    low, high  95 % confidence interval
    """

    label: str
    records: int | None
    accuracy: float | None
    low: float | None
    high: float | None

    @classmethod
    def of(cls, label: str, right: float, records: int) -> Score:
        """From counts; `right` may be accuracy · records."""
        if records == 0:
            return cls(label, 0, None, None, None)
        low, high = wilson(right, records)
        return cls(label, records, right / records, low, high)


def wilson(right: float, records: int, z: float = Z95) -> tuple[float, float]:
    """(low, high): all p for which `right` of `records` lies within z standard errors of p.

    >>> [round(end, 4) for end in wilson(0, 20)]
    [0.0, 0.1611]
    """
    rate, total = right / records, records + z**2
    middle = (right + z**2 / 2) / total
    half = z * math.sqrt(records) / total * math.sqrt(rate * (1 - rate) + z**2 / (4 * records))
    return max(0.0, middle - half), min(1.0, middle + half)
