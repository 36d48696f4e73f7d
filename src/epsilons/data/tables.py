"""One's own table (.csv, .parquet) as arrays, by rules that are stated beforehand and never fitted here.

A scale or a vocabulary learnt from private data is an output of those data that no budget covers. So numbers are
scaled between bounds that the caller states, categories are one-hot by a list that the caller states, or hashed
into buckets, and a column about which nothing was said is an error.
"""

from __future__ import annotations

import difflib
import hashlib
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ..budgets import SMALLEST_SHOWN
from ..errors import DataError
from ..tabular import as_text, column_of, not_utf8, numbers, read_table
from .arrays import Arrays, Source

#: So many cells are looked at to tell whether a column of texts holds dates.
DATES_LOOKED_AT = 10_000
_DATE = re.compile(r"(\d{1,4})([-/.])(\d{1,2})\2(\d{1,4})(?:[T ]\d{1,2}:\d{2}.*)?")


@dataclass(frozen=True)
class Features:
    """How columns become inputs.

    numeric      column -> (low, high, log): scaled to -1..1 and cut off there; log: on the scale of asinh. An empty
                 cell becomes 0, the middle
    categorical  column -> values (one-hot, others all zero), or a number of buckets that any value is hashed into
    drop         columns that are left out
    texts        columns whose cells are compared as they are written in a .csv file, 007 or true, not as what they mean
    """

    numeric: Mapping[str, tuple[float, float, bool]] = field(default_factory=dict)
    categorical: Mapping[str, Sequence[str] | int] = field(default_factory=dict)
    drop: Sequence[str] = ()
    texts: Collection[str] = ()

    @property
    def names(self) -> list[str]:
        """All columns that something was said about."""
        return [*self.numeric, *self.categorical, *self.drop]


def table(
    path: Path, what: str, target: str, classes: Sequence[str] | None, features: Features, aside: Sequence[str]
) -> Source:
    """The records of a table.

    classes  names of the target's classes, in order; None if the target is a number
    aside    columns that are never inputs, such as the budgets; they need not be there

    Raises DataError for columns that are missing or unspoken of, cells that are not numbers, and unknown classes.
    """
    chosen = sorted({*features.numeric, *features.categorical} & {*aside, *([] if classes is None else [target])})
    if chosen:
        raise DataError(
            f"Column {chosen[0]!r} is the target or somebody's budget, and cannot be an input. Take it out of "
            "[data.numeric] and [data.categorical]."
        )
    # Numbers are parsed here, for the reader of .csv files takes 0x10 for 16.
    as_written = {*features.texts, *features.numeric, *([target] if classes is None else [])}
    read = read_table(path, what, DataError, as_written)
    if read.num_rows == 0:
        raise DataError(f"The {what} file {path} has a header but no rows.")
    unspoken = [name for name in read.column_names if name not in {target, *aside, *features.names}]
    _check_named(read.column_names, unspoken, path, target, features, aside)
    if unspoken:
        absent = [name for name in aside if name not in read.column_names]
        hint = f" (Budgets are looked for in {absent[0]!r}, and there is no such column.)" if absent else ""
        raise DataError(
            f"Nothing is said about these columns of {path}: {', '.join(map(repr, unspoken))}.{hint} List each in "
            "[data.numeric] with its bounds, in [data.categorical] with its values, or in data.drop; `epsilons init` "
            "writes such lists."
        )
    check_texts(read, {target, *features.numeric, *features.categorical}, path)
    _check_dates(read, features, path)
    cells = column_of(read, target, path, DataError)
    scales = {name: bounds for name, bounds in features.numeric.items() if name != target}
    parts: list[npt.NDArray[Any]] = [_scaled(_numbers(read, name, path), *scales[name]) for name in scales]
    parts += [
        _one_hot(_texts(column_of(read, name, path, DataError)), name, values, path)
        for name, values in features.categorical.items()
    ]
    if not parts:
        raise DataError(f"No column of {path} is an input. List them in [data.numeric] and [data.categorical].")
    inputs = np.concatenate(parts, axis=1).astype(np.float32)
    if classes is None:
        if target in features.numeric:
            values = _scaled(_whole(read, target, path), *features.numeric[target])
        else:
            values = _whole(read, target, path)[:, None]
        return Source(Arrays(inputs, values.astype(np.float32)), None, read)
    return Source(Arrays(inputs, class_indices(_texts(cells), classes, target, path)), tuple(classes), read)


def check_texts(read: Any, names: Collection[str], path: Path) -> None:
    """Raise DataError if one of these columns holds bytes: what pyarrow makes of text that is not UTF-8."""
    for column in read.schema:
        if column.name in names and is_bytes(column):
            raise not_utf8(path, DataError, f"Column {column.name!r} of ")


def is_bytes(column: Any) -> bool:
    """Whether a column, a field of a pyarrow.Schema, holds bytes."""
    from pyarrow import types

    return bool(types.is_binary(column.type) or types.is_large_binary(column.type))


def holds_dates(cells: Any) -> bool:
    """Whether a column holds dates: by its type, or because nine in ten of its texts are written like one.

    Such texts are year-month-day, day.month.year or month/day/year, and a time may follow: 2024-03-31, 31.3.24 10:15.
    """
    from pyarrow import types

    if types.is_date(cells.type) or types.is_timestamp(cells.type):
        return True
    if not (types.is_string(cells.type) or types.is_large_string(cells.type)):
        return False
    texts = [text for text in cells.slice(0, DATES_LOOKED_AT).to_pylist() if text]
    return len(texts) > 0 and sum(map(_is_date, texts)) >= 0.9 * len(texts)


def _is_date(text: str) -> bool:
    found = _DATE.fullmatch(text.strip())
    if found is None:
        return False
    first, _, second, third = found.groups()
    parts = sorted(int(part) for part in (first, second, third) if len(part) <= 2)
    if len(third) == 2 and len(first) == 2 and len(second) == 2:
        parts = sorted((int(first), int(second)))  # 31.12.99
    return len(parts) == 2 and 1 <= parts[0] <= 12 and 1 <= parts[1] <= 31


def _check_dates(read: Any, features: Features, path: Path) -> None:
    """Refuse dates as numbers, which they are not, and hashed, where a bucket holds days that have nothing in common.

    A list of values is taken as it is.
    """
    hashed = [name for name, values in features.categorical.items() if isinstance(values, int)]
    for name in [*features.numeric, *hashed]:
        if name in read.column_names and holds_dates(column_of(read, name, path, DataError)):
            raise DataError(
                f"Column {name!r} of {path} holds dates, which are neither numbers nor categories. Put a number in its "
                "place before training (an age in years, days since a fixed date), or list it in data.drop."
            )


def class_indices(texts: Sequence[str], classes: Sequence[str], target: str, path: Path) -> npt.NDArray[Any]:
    """(records,) place of each text among the classes. Raises DataError if one is not there."""
    place = {name: index for index, name in enumerate(classes)}
    found = np.array([place.get(text, -1) for text in texts], dtype=np.int64)
    unknown = found < 0
    if unknown.any():
        new = len({text for text, bad in zip(texts, unknown, strict=True) if bad})
        raise DataError(
            f"{unknown.sum():,} of {len(found):,} rows of {path} carry {new} value(s) in the target column {target!r} "
            f"that are not among the {len(classes)} classes ({', '.join(map(repr, classes))}); the first is row "
            f"{int(unknown.argmax()):,}, counted from 0 below the header. Add the class to data.classes, or mend the "
            "rows."
        )
    return found


def _check_named(
    columns: Sequence[str], unspoken: Sequence[str], path: Path, target: str, features: Features, aside: Sequence[str]
) -> None:
    """Raise DataError for a named column that is not there, before anything is said about those that are left over.

    What is left out or aside need not be there; it is missed only where a column left over is spelt nearly so.
    """
    needed = {target: "data.target"}
    needed |= {name: "[data.numeric]" for name in features.numeric if name != target}
    needed |= dict.fromkeys(features.categorical, "[data.categorical]")
    for name, place in needed.items():
        if name not in columns:
            close = _nearest(name, unspoken) or _nearest(name, columns)
            meant = f"did you mean {close!r}?" if close else f"it has: {', '.join(map(repr, columns))}."
            raise DataError(f"{path} has no column {name!r}, which {place} names; {meant}")
    spare = dict.fromkeys(features.drop, "data.drop") | dict.fromkeys(aside, "[budgets]")
    for name, place in spare.items():
        close = None if name in columns else _nearest(name, unspoken)
        if close:
            raise DataError(f"{path} has no column {name!r}, which {place} names; did you mean {close!r}?")


def _nearest(name: str, columns: Sequence[str]) -> str | None:
    """The column that is spelt most like this, whatever its case."""
    lower = {column.lower(): column for column in columns}
    close = difflib.get_close_matches(name.lower(), lower, n=1)
    return lower[close[0]] if close else None


def _texts(cells: Any) -> list[str]:
    """Each cell as text; an empty one is the empty text, in .csv and .parquet alike."""
    return ["" if value is None else as_text(value) for value in cells.to_pylist()]


def _numbers(read: Any, name: str, path: Path) -> npt.NDArray[np.float64]:
    return numbers(column_of(read, name, path, DataError), name, path, DataError)


def _whole(read: Any, name: str, path: Path) -> npt.NDArray[np.float64]:
    values = _numbers(read, name, path)
    bad = ~np.isfinite(values)
    if bad.any():
        raise DataError(
            f"{bad.sum():,} of {len(values):,} cells of the target column {name!r} in {path} are empty or not finite "
            f"(first at row {int(bad.argmax()):,}, counted from 0 below the header)."
        )
    return values


def _scaled(values: npt.NDArray[np.float64], low: float, high: float, log: bool) -> npt.NDArray[np.float64]:
    """(records, 1) in -1..1."""
    ends = np.array([low, high])
    if log:
        values, ends = np.arcsinh(values), np.arcsinh(ends)
    placed = np.clip(2 * (values - ends[0]) / (ends[1] - ends[0]) - 1, -1, 1)
    return np.asarray(np.where(np.isnan(placed), 0.0, placed))[:, None]


def _one_hot(texts: Sequence[str], name: str, values: Sequence[str] | int, path: Path) -> npt.NDArray[np.float32]:
    """(records, values) with one 1 per row, or none for a value that is not listed.

    Raises DataError where many cells hold no listed value at all: then the list is spelt otherwise.
    """
    if isinstance(values, int):
        place = {text: _bucket(name, text, values) for text in set(texts)}
        width = values
    else:
        place = {value: index for index, value in enumerate(values)}
        width = len(values)
        if len(texts) >= SMALLEST_SHOWN and place.keys().isdisjoint(texts):
            raise DataError(
                f"None of the {len(texts):,} cells of column {name!r} in {path} is one of the values listed in "
                f"[data.categorical] ({', '.join(map(repr, values))}). Spell them as the file does, or put the column "
                "into data.drop."
            )
    rows = np.zeros((len(texts), width), dtype=np.float32)
    for row, text in enumerate(texts):
        if text in place:
            rows[row, place[text]] = 1.0
    return rows


def _bucket(name: str, text: str, buckets: int) -> int:
    digest = hashlib.blake2b(f"{name}={text}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") % buckets
