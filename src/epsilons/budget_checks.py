"""Checks of epsilons and deltas, whichever source they are from; messages give counts and rows, never values."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from .errors import BudgetError
from .mechanism import SMALLEST_DELTA, FloatArray, Unit


def as_budgets(epsilon: npt.ArrayLike, delta: npt.ArrayLike, unit: str) -> tuple[FloatArray, FloatArray]:
    """(records,) epsilons and (records,) deltas. Raises BudgetError for values that no record can have."""
    values = as_floats(epsilon, "budgets")
    if values.ndim != 1 or len(values) == 0:
        raise BudgetError(
            f"Budgets must be a flat list with one epsilon per {unit}, got an array of shape {values.shape}."
        )
    check(usable(values), "budgets", "positive, finite numbers")
    deltas = as_floats(delta, "deltas")
    if deltas.ndim > 1 or (deltas.ndim == 1 and len(deltas) != len(values)):
        raise BudgetError(
            f"delta must be one number or one per {unit}, got {len(values):,} budgets and deltas of shape "
            f"{deltas.shape}."
        )
    _check_deltas(deltas, len(values), unit)
    return values, np.broadcast_to(deltas, values.shape)


def as_starts(starts: npt.ArrayLike, records: int) -> FloatArray:
    """(records, orders) what was spent before. Raises BudgetError for another shape, or numbers that are not finite."""
    values = as_floats(starts, "starts")
    if values.ndim != 2 or len(values) != records or not np.isfinite(values).all():
        raise BudgetError(f"starts must be finite numbers, one row per record, got shape {values.shape}.")
    return values


def as_floats(values: npt.ArrayLike, what: str) -> FloatArray:
    if np.ma.is_masked(values):
        raise BudgetError(f"Some {what} are masked. Every record needs one; fill them in, or drop those records.")
    try:
        return np.array(values, dtype=np.float64)
    except (TypeError, ValueError):
        raise BudgetError(f"The {what} are not all numbers: expected a flat list of numbers.") from None


def usable(values: FloatArray) -> npt.NDArray[np.bool_]:
    return np.isfinite(values) & (values > 0)


def check(good: npt.NDArray[np.bool_], what: str, expected: str) -> None:
    bad = ~np.atleast_1d(good)
    if bad.any():
        raise BudgetError(
            f"{bad.sum():,} of {bad.size:,} {what} are not {expected} (first at row {int(bad.argmax()):,}, counted "
            "from 0). To leave records out, drop their rows before planning and training, or say in a config what "
            'means that: [budgets] zero = "left out".'
        )


def _check_deltas(deltas: FloatArray, records: int, unit: str) -> None:
    # Negated, so that NaN is refused, too.
    if not ((deltas >= SMALLEST_DELTA) & (deltas < 1)).all():
        raise BudgetError(
            f"delta must be between {SMALLEST_DELTA:g} and 1 (1 excluded): double precision cannot certify a smaller "
            f"one. Usual values are well below 1/{unit}s = {1 / records:.2g}."
        )


def large_delta(records: int, unit: Unit) -> str:
    """The warning for a delta that protects little."""
    what = "record" if unit == "record" else "rows"
    return (
        f"delta is not below 1/{unit}s = {1 / records:.2g}: a mechanism that publishes one person's {what} would pass. "
        "Choose a smaller delta."
    )


def is_large(deltas: FloatArray, records: int) -> bool:
    """Whether some delta allows a mechanism that publishes one of the records."""
    return records > 1 and bool((deltas >= 1 / records).any())


def outlier(values: FloatArray, few: int) -> str | None:
    """The warning for less than a tenth of the epsilons, and than `few`, above 100 and above 100 times all others."""
    ordered = np.sort(values)[len(values) - min(few, len(values) // 10) :]
    found = f"Fewer than {few} epsilons are more than 100 times as large as all others, and protect nobody."
    is_far = (ordered[1:] > 100 * np.maximum(ordered[:-1], 1)).any()
    return f"{found} If they are slips, such as 1E5 for 1.5, correct them." if is_far else None
