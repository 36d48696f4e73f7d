"""Accuracy at the end of a run, with the uncertainty of its test set.

Wilson's interval (Wilson 1927, JASA 22(158), 209-212, in the form of Brown, Cai and DasGupta 2001, Statist. Sci.
16(2), eq. 4) keeps its coverage near 0 and 1 and in small cells.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from ..disclosure import PRIVATE_SUPPRESSED, SMALL_SUPPRESSED, SMALLEST_SHOWN, DisplayRow
from . import sentences
from .load_run import MetricsRow, RunRecord

#: Two-sided 95 %: the 97.5 % quantile of the standard normal distribution.
Z95 = 1.959963984540054


@dataclass(frozen=True)
class Accuracy:
    """Accuracy on one slice of the test records.

    records    None if it was not recorded; then there is no interval
    accuracy   None if there are no records
    low, high  95 % confidence interval
    """

    label: str
    records: int | None
    accuracy: float | None = None
    low: float | None = None
    high: float | None = None

    @classmethod
    def of(cls, label: str, right: float, records: int) -> Accuracy:
        """From counts; `right` may be accuracy · records."""
        return cls(label, records, right / records, *wilson(right, records)) if records else cls(label, 0)


@dataclass(frozen=True)
class Errors:
    """Errors of predicted numbers.

    mean_absolute_error, rmse  in the unit of the target
    r2                         part of the target's variance that is explained, at most 1; None if all targets are equal
    """

    mean_absolute_error: float
    rmse: float
    r2: float | None

    @classmethod
    def of(cls, last: MetricsRow) -> Errors | None:
        """None if no numbers were predicted."""
        if last.mean_absolute_error is None or last.rmse is None:
            return None
        return cls(last.mean_absolute_error, last.rmse, last.r2)


@dataclass(frozen=True)
class Evaluation:
    """The last evaluation of a run, and whether its test data were public.

    balanced_accuracy  mean of the accuracies of the classes that have test records; None if these are not shown
    majority           accuracy of always naming the most frequent class; None likewise
    auc                area under the ROC curve, of several classes the mean of one against the rest; None likewise
    errors             of numbers that were predicted; None for classes
    """

    step: int
    data: Literal["public", "private"]
    declared: bool
    loss: float | None
    overall: Accuracy
    classes: tuple[Accuracy, ...]
    groups: tuple[Accuracy, ...]
    balanced_accuracy: float | None = None
    majority: float | None = None
    auc: float | None = None
    errors: Errors | None = None

    @property
    def is_as_bad_as_the_majority(self) -> bool:
        """True if always naming the most frequent class is as accurate."""
        return self.majority is not None and (self.overall.accuracy or 0.0) <= self.majority


def wilson(right: float, records: int, z: float = Z95) -> tuple[float, float]:
    """(low, high): all p for which `right` of `records` lies within z standard errors of p.

    >>> [round(end, 4) for end in wilson(0, 20)]
    [0.0, 0.1611]
    """
    rate, total = right / records, records + z**2
    middle = (right + z**2 / 2) / total
    half = z * math.sqrt(records) / total * math.sqrt(rate * (1 - rate) + z**2 / (4 * records))
    return max(0.0, middle - half), min(1.0, middle + half)


def last_evaluation(
    record: RunRecord, rows: Sequence[DisplayRow], release: bool
) -> tuple[Evaluation | None, dict[str, str]]:
    """(the last evaluation as far as it may be shown, reasons for what is suppressed by section)."""
    if not record.metrics:
        return None, {"accuracy": sentences.NOTHING_MEASURED}
    last, eval_data = record.metrics[-1], record.settings.eval_data
    is_public = eval_data.data == "public"
    if release and not is_public:
        return None, {"accuracy": PRIVATE_SUPPRESSED}
    overall, classes, groups = _overall(last, eval_data.records), _classes(last, eval_data.classes), _groups(last, rows)
    suppressed = {}
    if release:
        if _is_small([overall]):
            return None, {"accuracy": SMALL_SUPPRESSED}
        # A single small cell could be computed from the total, so the whole table is suppressed.
        if _is_small(classes):
            classes, suppressed["accuracy_per_class"] = (), SMALL_SUPPRESSED
        if _is_small(groups):
            groups, suppressed["accuracy_per_group"] = (), SMALL_SUPPRESSED
    data: Literal["public", "private"] = "public" if is_public else "private"
    declared = eval_data.data is not None
    auc = last.auc if classes else None  # suppressed with the table of classes: it depends on every class
    balanced, majority = _of_classes(classes)
    found = Evaluation(
        last.step, data, declared, last.loss, overall, classes, groups, balanced, majority, auc, Errors.of(last)
    )
    return found, suppressed


def _is_small(cells: Sequence[Accuracy]) -> bool:
    return any((cell.records or 0) < SMALLEST_SHOWN for cell in cells)


def _overall(last: MetricsRow, records: int | None) -> Accuracy:
    if last.per_class is not None:
        right, total = (sum(column) for column in zip(*last.per_class, strict=True))
        return Accuracy.of("all", right, total)
    if last.accuracy is None or records is None:
        return Accuracy("all", records, last.accuracy)
    return Accuracy.of("all", last.accuracy * records, records)


def _classes(last: MetricsRow, names: Sequence[str] | None) -> tuple[Accuracy, ...]:
    if not last.per_class:
        return ()
    labels = names if names is not None else [f"class {number}" for number in range(len(last.per_class))]
    return tuple(Accuracy.of(label, *cell) for label, cell in zip(labels, last.per_class, strict=True))


def _of_classes(classes: Sequence[Accuracy]) -> tuple[float | None, float | None]:
    """Balanced accuracy, and the accuracy of always naming the most frequent class."""
    counts = [one.records or 0 for one in classes]
    rates = [one.accuracy for one in classes if one.accuracy is not None]
    return (sum(rates) / len(rates), max(counts) / sum(counts)) if rates else (None, None)


def _groups(last: MetricsRow, rows: Sequence[DisplayRow]) -> tuple[Accuracy, ...]:
    if last.per_group is None:
        return ()
    cells = np.array(last.per_group)  # (groups, 2) right, records
    named = [(f"{row.tier} ({row.label})" if row.tier else row.label, cells[row.groups]) for row in rows]
    return tuple(Accuracy.of(name, *map(int, found.sum(axis=0))) for name, found in named)
