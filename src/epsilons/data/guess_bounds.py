"""Bounds for the draft that `epsilons init` writes: round values beyond the smallest and the largest cell."""

from __future__ import annotations

import math
from datetime import date
from pathlib import Path

import numpy as np

from ..errors import DataError
from ..tabular.dates import DateRule, days, is_day_first
from .guess_values import Values

_EPOCH = date(1970, 1, 1)


def number_bounds(values: Values) -> tuple[float, float, bool]:
    """(low, high, log): round numbers beyond the smallest and largest cell."""
    cells, counts = values.numbers, values.counts
    is_finite = np.isfinite(cells)
    cells, counts = cells[is_finite], counts[is_finite]
    if not len(cells):
        return 0.0, 1.0, False
    low, high = float(cells.min()), float(cells.max())
    log = max(abs(low), abs(high)) > 20 * (float(np.quantile(np.repeat(np.abs(cells), counts), 0.9)) + 1)
    low, high = outward(low, down=True), outward(high, down=False)
    return low, high if low < high else low + 1, log


def outward(value: float, down: bool) -> float:
    """The next round number (1, 2, 3, 5, 10 times a power of ten) away from the data.

    >>> outward(17, down=True), outward(90, down=False), outward(-8, down=True), outward(0, down=True)
    (10.0, 100.0, -10.0, 0.0)
    """
    if value == 0:
        return 0.0
    power = 10.0 ** math.floor(math.log10(abs(value)))
    sizes = [factor * power for factor in (1, 2, 3, 5, 10)]
    if (value < 0) == down:  # away from zero
        size = next(size for size in sizes if size >= abs(value) * (1 - 1e-12))
    else:
        size = next(size for size in reversed(sizes) if size <= abs(value) * (1 + 1e-12))
    return math.copysign(size, value)


def date_bounds(values: Values) -> tuple[str, ...]:
    """(first, last) day of whole years around a column's dates, and the order of day and month where it must be stated.

    Empty if the dates cannot be read: an order that the cells do not show, or years of two digits.
    """
    order = is_day_first(values.cells)
    try:
        found = days(values.cells, values.name, Path(), DataError, DateRule(_EPOCH, _EPOCH, order))
    except DataError:
        return ()
    if np.isnan(found).all():
        return ()
    first, last = (np.datetime64(int(end), "D").astype(date) for end in (np.nanmin(found), np.nanmax(found)))
    bounds = date(first.year, 1, 1).isoformat(), date(last.year, 12, 31).isoformat()
    return bounds if order is None else (*bounds, "day first" if order else "month first")
