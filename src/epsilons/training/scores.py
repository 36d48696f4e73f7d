"""What outputs on test data are worth, beside the accuracy: recall, balanced accuracy, AUC, and errors of numbers."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.stats import rankdata

Floats = npt.NDArray[np.float64]
#: With more classes than this, no AUC is computed: the outputs of all test records would be kept.
MOST_CLASSES = 100


@dataclass(frozen=True)
class Scale:
    """How a number to predict was scaled: from low..high to -1..1; with log, as asinh.

    >>> float(Scale(0.0, 10.0).undone(np.array(0.5)))
    7.5
    """

    low: float
    high: float
    log: bool = False

    def undone(self, values: Floats) -> Floats:
        """Scaled values in their own unit."""
        low, high = (math.asinh(end) if self.log else end for end in (self.low, self.high))
        own = (values + 1) / 2 * (high - low) + low
        return np.asarray(np.sinh(own) if self.log else own)


def of_classes(tallies: list[list[int]]) -> dict[str, Any]:
    """{"recall": of each class, None without records, "balanced_accuracy": their mean, "majority": the accuracy of
    always naming the most frequent class}.

    tallies  [right, records] of each class

    >>> of_classes([[90, 90], [1, 10]])["balanced_accuracy"]
    0.55
    """
    recall = [right / records if records else None for right, records in tallies]
    found = [one for one in recall if one is not None]
    counts = [records for _, records in tallies]
    return {
        "recall": recall,
        "balanced_accuracy": math.fsum(found) / len(found),
        "majority": max(counts) / sum(counts),
    }


def auc(scores: Floats, is_positive: npt.NDArray[np.bool_]) -> float | None:
    """The chance that a positive record scores higher than a negative one; ties count half.

    scores  (records,)

    None without records of both kinds, and for scores that are NaN. (Mann and Whitney 1947, Ann. Math. Statist. 18(1);
    as the area under the ROC curve: Hanley and McNeil 1982, Radiology 143(1), p. 31.)

    >>> auc(np.array([0.1, 0.4, 0.35, 0.8]), np.array([False, False, True, True]))
    0.75
    """
    positives = int(is_positive.sum())
    negatives = len(is_positive) - positives
    if not positives or not negatives or np.isnan(scores).any():
        return None
    ranks = rankdata(scores)
    return float((ranks[is_positive].sum() - positives * (positives + 1) / 2) / (positives * negatives))


def mean_auc(logits: Floats, targets: npt.NDArray[np.int64]) -> float | None:
    """The AUC of two classes; of more, the mean over the classes of one against the rest. None if none can be computed.

    logits   (records, classes), compared by their softmax
    targets  (records,)
    """
    if np.isnan(logits).any():
        return None
    if logits.shape[1] == 2:
        return auc(logits[:, 1] - logits[:, 0], targets == 1)
    shifted = np.exp(logits - logits.max(axis=1, keepdims=True))
    shares = shifted / shifted.sum(axis=1, keepdims=True)
    found = [auc(shares[:, c], targets == c) for c in range(logits.shape[1])]
    areas = [area for area in found if area is not None]
    return math.fsum(areas) / len(areas) if areas else None


def of_numbers(outputs: Floats, targets: Floats, scale: Scale | None) -> dict[str, Any]:
    """{"mean_absolute_error", "rmse", "r2"}: errors in the target's own unit.

    outputs, targets  (values,) as the model sees them
    scale             how the targets were scaled; None if they were not

    r2 is None if all targets are equal.
    """
    if scale is not None:
        outputs, targets = scale.undone(outputs), scale.undone(targets)
    errors = outputs - targets
    spread = float(((targets - targets.mean()) ** 2).sum())
    squares = float((errors**2).sum())
    return {
        "mean_absolute_error": float(np.abs(errors).mean()),
        "rmse": math.sqrt(squares / len(errors)),
        "r2": 1 - squares / spread if spread > 0 else None,
    }
