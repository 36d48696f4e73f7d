"""Dates in cells: are there any, and how many days after another day are they?"""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import InputError
from .cells import PLAIN, CellRule, different, emptied, encoded, is_text
from .table_files import pc, pyarrow, types

Days = npt.NDArray[np.float64]

#: The first cells of a column that are examined for dates.
SAMPLE = 10_000
_DATE = re.compile(r"(\d{1,4})([-/.])(\d{1,2})\2(\d{1,4})(?:[T ]\d{1,2}:\d{2}.*)?")
#: The orders that are read, for pyarrow: 2024-03-31, 2024/3/31; 31.3.2024; 3/31/2024, 31-3-2024 by a stated order.
_TIME = r"(?:[T ]\d{1,2}:\d{2}.*)?"
_MONTH = r"(?:-(?P<month>\d{1,2})-|/(?P<m2>\d{1,2})/|\.(?P<m3>\d{1,2})\.)"
_YEAR_FIRST = rf"\A(?P<year>\d{{4}}){_MONTH}(?P<day>\d{{1,2}}){_TIME}\z"
_WITH_POINTS = rf"\A(?P<first>\d{{1,2}})\.(?P<second>\d{{1,2}})\.(?P<year>\d{{4}}){_TIME}\z"
_WITH_SLASHES = rf"\A(?P<first>\d{{1,2}})[-/](?P<second>\d{{1,2}})[-/](?P<year>\d{{4}}){_TIME}\z"


@dataclass(frozen=True)
class DateRule:
    """How a column of dates becomes numbers of days.

    first, last  the bounds: the number is that of days since the first, scaled between both
    day_first    True for 31/3/2024, False for 3/31/2024, None if it is not stated
    """

    first: date
    last: date
    day_first: bool | None = None


def holds_dates(cells: Any) -> bool:
    """Whether a column holds dates: by its type, or because at least 90 % of its texts look like one.

    Recognised are year-month-day, day.month.year and month/day/year, with or without a time: 2024-03-31, 31.3.24 10:15.
    """
    if types.is_date(cells.type) or types.is_timestamp(cells.type):
        return True
    if not is_text(cells):
        return False
    texts = [text for text in cells.slice(0, SAMPLE).to_pylist() if text and text.strip()]
    return len(texts) > 0 and sum(map(is_date, texts)) >= 0.9 * len(texts)


def is_date(text: str) -> bool:
    """Whether a text looks like a date."""
    match = _DATE.fullmatch(text.strip())
    if match is None:
        return False
    first, _, second, third = match.groups()
    parts = sorted(int(part) for part in (first, second, third) if len(part) <= 2)
    if len(third) == 2 and len(first) == 2 and len(second) == 2:
        parts = sorted((int(first), int(second)))  # 31.12.99
    return len(parts) == 2 and 1 <= parts[0] <= 12 and 1 <= parts[1] <= 31


def is_day_first(cells: Any) -> bool | None:
    """Whether 3/4/2024 is the third of April in a column, by cells like 31/3/2024; None if none or both kinds occur."""
    if not is_text(cells):
        return None
    parts = pc.drop_null(pc.extract_regex(pc.utf8_trim_whitespace(different(cells)), _WITH_SLASHES))
    if not len(parts):
        return None
    first, second = (int(pc.max(_part(parts, name)).as_py()) for name in ("first", "second"))
    return None if (first > 12) == (second > 12) else first > 12


def days(cells: Any, column: str, path: Path, error: type[InputError], rule: DateRule, also: CellRule = PLAIN) -> Days:
    """(rows,) days since the rule's first date; NaN for empty cells. Times of a day are left out.

    also  what else counts as empty, and what takes note of cells that are no date

    Raises `error` for cells that are no date, or a date in an unknown order: 3/4/2024 without a stated order.
    """
    start = np.datetime64(rule.first, "D")
    if types.is_null(cells.type):  # a column of a Parquet file without a single date
        return np.full(len(cells), np.nan)
    if types.is_date(cells.type) or types.is_timestamp(cells.type):
        if types.is_timestamp(cells.type) and cells.type.tz is None:
            cells = cells.cast(pyarrow.timestamp("us"), safe=False)
        found = cells.cast(pyarrow.date32(), safe=False).to_numpy(zero_copy_only=False).astype("datetime64[D]")
        return _since(found, start)
    if not is_text(cells):
        raise error(f"Column {column!r} of {path} holds {cells.type}, and dates are needed.")
    texts, codes = encoded(cells)
    found, problem = _parsed(emptied(texts, also.missing), rule)
    if also.unread is not None:
        also.unread.append((problem[codes] == _NO_DATE, f"{column} is not a date"))
        problem[problem == _NO_DATE] = 0
    if problem.any():
        raise error(_not_dates(problem[codes], column, path))
    return _since(found[codes], start)


def _since(found: npt.NDArray[np.datetime64], start: np.datetime64) -> npt.NDArray[np.float64]:
    return np.where(np.isnat(found), np.nan, (found - start).astype(np.float64))


#: Problems of a cell: it is no date, or its order is not stated.
_NO_DATE, _NO_ORDER = 1, 2


def _not_dates(bad: npt.NDArray[np.int64], column: str, path: Path) -> str:
    first = f"first at row {int((bad > 0).argmax()):,}, counted from 0 below the header"
    if (bad == _NO_DATE).any():
        return (
            f"{(bad == _NO_DATE).sum():,} of {len(bad):,} cells of column {column!r} in {path} are not dates "
            f"({first}). Dates are like 2024-03-31, 31.3.2024 or 3/31/2024, with all four digits of the year, and are "
            "on the calendar."
        )
    return (
        f'Dates of {column!r} in {path} are like 3/4/2024, and their order is not stated. Write "day first" or "month '
        'first": the third item in [data.dates], the second in data.test_after, or dates = "day first" in [budgets].'
    )


def _parsed(texts: Any, rule: DateRule) -> tuple[npt.NDArray[np.datetime64], npt.NDArray[np.int64]]:
    """(texts,) the dates, and the problem of each text, 0 for none; an empty text is no problem, and no date."""
    texts = pc.utf8_trim_whitespace(emptied(texts)).cast(pyarrow.string())  # pandas 3 writes large strings
    year, month, day = (np.full(len(texts), -1) for _ in range(3))
    problem = np.where(np.asarray(pc.is_null(texts)), 0, _NO_DATE)
    for pattern, day_first in ((_YEAR_FIRST, None), (_WITH_POINTS, True), (_WITH_SLASHES, rule.day_first)):
        parts = pc.extract_regex(texts, pattern)
        matched = np.asarray(pc.is_valid(parts))
        if not matched.any():
            continue
        parts = pc.drop_null(parts)
        year[matched] = _part(parts, "year")
        if pattern is _YEAR_FIRST:
            joined = pc.binary_join_element_wise(*(pc.struct_field(parts, name) for name in ("month", "m2", "m3")), "")
            month[matched], day[matched] = _whole(joined), _part(parts, "day")
        else:
            names = ("second", "first") if day_first else ("first", "second")
            month[matched], day[matched] = (_part(parts, name) for name in names)
        problem[matched] = _NO_ORDER if pattern is _WITH_SLASHES and day_first is None else 0
    months = ((year - 1970) * 12 + np.clip(month, 1, 12) - 1).astype("datetime64[M]")
    dates = months.astype("datetime64[D]") + (day - 1)
    is_real = (year >= 1) & (month >= 1) & (month <= 12) & (day >= 1) & (dates.astype("datetime64[M]") == months)
    problem = np.where((year >= 0) & (problem != _NO_ORDER) & ~is_real, _NO_DATE, problem)
    found: npt.NDArray[np.datetime64] = np.where((problem == 0) & is_real, dates, np.datetime64("NaT", "D"))
    return found, problem


def _part(parts: Any, name: str) -> Any:
    return _whole(pc.struct_field(parts, name))


def _whole(texts: Any) -> Any:
    """Texts of digits as whole numbers, 0 for an empty one."""
    return np.asarray(pc.if_else(pc.equal(texts, ""), "0", texts).cast(pyarrow.int64()))
