"""Test accuracies by class, and how they move if one class has another budget than all others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from epsilons.core.mechanism import FloatArray

from .results import Line
from .settings import Table

CLASSES = 10
BASELINE = "all-2"

#: Quantities of a run that `of_classes` computes.
QUANTITIES = ("class_accuracy", "others_accuracy", "gap")


def accuracies(line: Line) -> FloatArray:
    """(classes,) test accuracy of each class, in %."""
    right, records = np.transpose(line["per_class"])
    shares: FloatArray = 100.0 * right / records
    return shares


def of_classes(line: Line, quantity: str, number: int) -> float:
    """One of QUANTITIES, in %: of class `number`, of all test records of other classes, or best minus worst class."""
    if quantity == "gap":
        return float(np.ptp(accuracies(line)))
    if quantity == "class_accuracy":
        return float(accuracies(line)[number])
    right, records = np.delete(np.asarray(line["per_class"], dtype=float), number, axis=0).sum(axis=0)
    return float(100 * right / records)


def cell_name(strategy: str, number: int, epsilon: int) -> str:
    """The name of the cell in which class `number` has `epsilon`."""
    return f"{strategy}-{number}-at-{epsilon}"


def changes(table: Table, done: Mapping[str, Line], strategy: str, epsilon: int) -> FloatArray:
    """(classes, classes) points by which the accuracy of the row's class changes if the column's class has `epsilon`.

    A column whose run is missing is NaN.
    """
    matrix = np.full((CLASSES, CLASSES), np.nan)
    before = _run_of(table, done, BASELINE)
    for column in range(CLASSES):
        after = _run_of(table, done, cell_name(strategy, column, epsilon))
        if before is not None and after is not None:
            matrix[:, column] = accuracies(after) - accuracies(before)
    return matrix


def _run_of(table: Table, done: Mapping[str, Line], cell: str) -> Line | None:
    return done.get(table.by_name[cell].settings.named(0))


def own(matrix: FloatArray) -> FloatArray:
    """(classes,) the change of each class if it has the other epsilon itself."""
    changed: FloatArray = np.diagonal(matrix)
    return changed


def others(matrix: FloatArray) -> FloatArray:
    """(classes,) by the class that has the other epsilon: the mean change of the nine others."""
    changed: FloatArray = (matrix.sum(axis=0) - own(matrix)) / (CLASSES - 1)
    return changed


def moved(claim: Mapping[str, Any], table: Table, done: Mapping[str, Line]) -> tuple[FloatArray, FloatArray]:
    """The changes that a claim is about, in points, and the same times the sign that the claim gives them.

    Both have a number for each class whose run is there. The claim's keys: strategy, epsilon (of one class; 2 for all
    others), who ("itself", or "others": the mean of the nine).
    """
    matrix = changes(table, done, claim["strategy"], claim["epsilon"])
    raised = 1 if claim["epsilon"] > 2 else -1
    points, sign = (own(matrix), raised) if claim["who"] == "itself" else (others(matrix), -raised)
    points = points[~np.isnan(points)]
    return points, sign * points
