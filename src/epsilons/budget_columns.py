"""What budgets are read from: columns of epsilons, columns of tiers, classes, positions."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from .disclosure import SMALLEST_SHOWN, how_many
from .errors import BudgetError
from .mechanism import FloatArray, IntArray, Unit
from .tabular import as_text, column_of, emptied, encoded, marks_of, meanings, numbers

#: What to do about empty cells that have a meaning.
LEFT_OUT = 'If an empty cell leaves a record out, state [budgets] blank = "left out" (registry import: --left-out "").'

NAME_YOURS = " Name yours with column=… (--column, or [budgets] column in a config)."


INFINITE = 'If an infinite number means that its record is left out, a config says so: [budgets] infinite = "left out".'

#: What to do about tiers that have no epsilon.
NO_EPSILON = "Write down the epsilon of every tier; others go into [budgets] left_out (registry import: --left-out)."


def epsilon_column(table: Any, column: str, path: Path) -> FloatArray:
    cells = _full(table, column, path, numeric=True)
    try:
        return numbers(cells, column, path, BudgetError, marks_of(table))
    except BudgetError as error:
        holds_infinite = any("infinite" in meanings(cell) for cell in encoded(cells)[0].to_pylist())
        raise BudgetError(f"{error} {INFINITE}" if holds_infinite else str(error)) from None


def tier_column(table: Any, column: str, path: Path, tiers: Mapping[str, float]) -> FloatArray:
    """(records,) the epsilon of each cell's tier."""
    cells, index = encoded(_full(table, column, path))
    names = [as_text(cell) for cell in cells.to_pylist()]
    unknown = np.array([name not in tiers for name in names], dtype=bool)[index]
    if unknown.any():
        # A small count is suppressed, and so is its first row: both would show which records chose a misspelt tier.
        count = int(unknown.sum())
        few = count < SMALLEST_SHOWN
        first = "" if few else f"; the first is row {int(unknown.argmax()):,}, counted from 0 below the header"
        used = set(names)
        unused = [name for name in tiers if name not in used]
        spelling = f" No record holds: {', '.join(map(repr, unused))}. Is it spelt as in the file?" if unused else ""
        blank = f" Some are empty. {LEFT_OUT}" if "" in used else ""
        blank += f" {NO_EPSILON}" if count >= SMALLEST_SHOWN else ""
        raise BudgetError(
            f"{how_many(count, len(index))} cells of column {column!r} in {path} are not the name of a tier "
            f"({', '.join(map(repr, tiers))}){first}.{spelling}{blank}"
        )
    return np.array([tiers.get(name, np.nan) for name in names], dtype=np.float64)[index]


def _full(table: Any, column: str, path: Path, numeric: bool = False) -> Any:
    cells = column_of(table, column, path, BudgetError, NAME_YOURS)
    if numeric:
        cells = emptied(cells)
        if str(cells.type) == "bool":
            raise BudgetError(f"Column {column!r} in {path} holds true and false, which are no budgets.")
    if cells.null_count:
        first = int(np.asarray(cells.is_null()).argmax())
        raise BudgetError(
            f"{cells.null_count:,} of {len(cells):,} cells of column {column!r} in {path} are empty or NaN (first at "
            f"row {first:,}, counted from 0 below the header). Every record needs a budget. {LEFT_OUT}"
        )
    return cells


def classes_of(targets: npt.ArrayLike) -> tuple[list[Any], IntArray, IntArray]:
    """(classes,) the classes, (records,) the index of each record's class, (classes,) records. Raises BudgetError."""
    try:
        array = np.asarray(targets)
        if array.ndim != 1 or len(array) == 0:
            raise BudgetError(f"The targets must be a flat list of one class per record, got shape {array.shape}.")
        classes, index, counts = np.unique(array, return_inverse=True, return_counts=True)
    except (TypeError, ValueError):
        raise BudgetError("The targets must be a flat list of classes of one type, got a mixture.") from None
    return classes.tolist(), index, counts


def positions(chosen: npt.ArrayLike, records: int, unit: Unit) -> IntArray:
    """The indices that a list of indices or a (records,) mask of True and False selects."""
    try:
        array = np.asarray(chosen)
    except ValueError:  # lists of different lengths
        array = np.empty((), dtype=object)
    if array.dtype == bool and array.shape == (records,):
        return np.flatnonzero(array)
    if array.shape == (0,) and array.dtype != bool:
        return np.empty(0, dtype=np.int64)
    if array.ndim != 1 or not np.issubdtype(array.dtype, np.integer):
        raise BudgetError(
            f"A subset takes a flat list of {unit} indices, whole numbers counted from 0, or a mask of True and False "
            f"for each of the {records:,} {unit}s, got an array of {array.dtype} of shape {array.shape}."
        )
    outside = (array < 0) | (array >= records)
    if outside.any():
        raise BudgetError(
            f"A subset takes {unit} indices in 0..{records - 1:,}, but {outside.sum():,} of {len(array):,} are outside "
            f"(first at position {int(outside.argmax()):,})."
        )
    return array.astype(np.int64)
