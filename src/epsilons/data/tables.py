"""A user's own table as arrays, by rules that the user states; nothing is fitted to the data here.

A scale or a vocabulary that was learned from private data is an output of the data, and no budget covers it. So numbers
are scaled between stated bounds, categories are one-hot encoded by a stated list or hashed into buckets, and a column
that no rule names is an error.
"""

from __future__ import annotations

import difflib
import hashlib
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ..core.disclosure import SMALLEST_SHOWN
from ..errors import DataError
from ..tabular import UNSTATED, DateRule, Marks, days, holds_dates, marks_of, not_utf8, read_table
from ..tabular.cells import CellRule, Unread, as_text, by_meaning, column_of, encoded, numbers
from ..tabular.table_files import pyarrow, types
from .arrays import Arrays, Source
from .texts import Tokens, texts_of, token_ids

#: pyarrow.Table -> (rows,) which records are used, for `table`.
Kept = Callable[[Any], npt.NDArray[np.bool_]]

#: The number of a row in an error.
ROW = re.compile("(?<= row )[0-9][0-9,]*(?=, counted from 0 below the header)")


@dataclass(frozen=True)
class Features:
    """How the columns of a table become inputs.

    numeric      column -> (low, high, log): clipped to low..high and scaled to -1..1; with log, scaled as asinh. An
                 empty cell becomes 0, the middle
    categorical  column -> values (one-hot; other values give zeros), or a number of buckets to hash any value into
    drop         columns that are left out
    texts        columns of a .csv file that are compared as written: 007 is not 7, and true is a text
    free_text    columns of texts
    dates        column -> rule: days since its first date, clipped and scaled like numbers
    marks        the separator and the decimal mark of text files, where they are stated
    missing      cells of numbers and dates that count as empty
    units        column -> what may follow its numbers
    thousands    the mark between groups of three digits, where it is stated
    tokens       how the texts of the one such column become ids, which are then the only inputs; None if fixed features
                 take the texts
    """

    numeric: Mapping[str, tuple[float, float, bool]] = field(default_factory=dict)
    categorical: Mapping[str, Sequence[str] | int] = field(default_factory=dict)
    drop: Sequence[str] = ()
    texts: Sequence[str] = ()
    free_text: Sequence[str] = ()
    tokens: Tokens | None = None
    dates: Mapping[str, DateRule] = field(default_factory=dict)
    marks: Marks = UNSTATED
    missing: tuple[str, ...] = ()
    units: Mapping[str, str] = field(default_factory=dict)
    thousands: str | None = None

    def rule(self, name: str, unread: Unread = None) -> CellRule:
        """What the cells of this column of numbers or dates may hold."""
        return CellRule(self.missing, self.units.get(name), self.thousands, unread)

    @property
    def names(self) -> list[str]:
        """All columns that a rule names."""
        return [*self.numeric, *self.dates, *self.categorical, *self.drop, *self.free_text]


@dataclass(frozen=True)
class Columns:
    """What the columns of a table are.

    target    the column to predict
    features  how the other columns become inputs
    aside     column -> the key that names it: columns that are never inputs, such as the budgets; they may be absent
    kept      which records are used; all without it. The other cells of the others are not looked at
    """

    target: str = "label"
    features: Features = field(default_factory=Features)
    aside: Mapping[str, str] = field(default_factory=dict)
    kept: Kept | None = None


def table(path: Path, what: str, classes: Sequence[str] | None, columns: Columns) -> Source:
    """The records of a table, inputs (records, features).

    what     "training data" or "test data", for messages
    classes  names of the target's classes, in order; None if the target is a number

    Raises DataError for a column that is missing or in no rule, a cell that is not a number, and an unknown class.
    """
    target, features, aside, kept = columns.target, columns.features, columns.aside, columns.kept
    never_inputs = {*aside, *([] if classes is None else [target])}
    no_texts = {*features.free_text} & {*aside, target}
    rules = {*features.numeric, *features.dates, *features.categorical}
    if wrong := sorted(rules & never_inputs | {*features.dates} & {target} | no_texts):
        raise DataError(
            f"Column {wrong[0]!r} is the target or a budget, and cannot be an input. Remove it from [data.numeric], "
            "[data.dates], [data.categorical] and data.text."
        )
    # pyarrow's reader of .csv files takes 0x10 for 16, and lets one cell decide how the others of its column are read.
    # So columns are read as text, and each cell is parsed alone.
    # `drop` does not change how ids, budgets and the target are read: an id that is read as a number is another id.
    written = {*features.names} - {*features.drop} | {*features.texts, *aside, target}
    records = read_table(path, what, DataError, written, features.marks)
    if records.num_rows == 0:
        raise DataError(f"The {what} file {path} has a header but no rows.")
    used = np.ones(len(records), dtype=bool) if kept is None else kept(records)
    records = chosen(records, used, path)
    try:
        _check_columns(records.column_names, path, target, features, aside)
        check_texts(records, {target, *rules, *features.free_text}, path)
        _check_dates(records, features, path)
        _check_categories(records, features, path)
        cells = column_of(records, target, path, DataError)
        inputs, texts = record_inputs(records, target, features, path)
        if classes is not None:
            coded = _coded(cells, None if target in features.texts else classes, features.marks)
            targets = class_indices(*coded, classes, target, path)
            return Source(Arrays(inputs, targets), tuple(classes), records, texts)
        values = _target_numbers(records, target, features, path)
        scaled = _scaled(values, *features.numeric[target]) if target in features.numeric else values[:, None]
        return Source(Arrays(inputs, scaled.astype(np.float32)), None, records, texts)
    except DataError as error:  # which counts the rows that are used
        rows = [*np.flatnonzero(used).tolist(), len(used)]  # the last is for names that look like a row
        message = ROW.sub(lambda found: f"{rows[min(int(found[0].replace(',', '')), len(rows) - 1)]:,}", str(error))
        raise DataError(message) from None


def record_inputs(
    table: Any, target: str, features: Features, path: Path, unread: Unread = None
) -> tuple[npt.NDArray[Any], npt.NDArray[np.object_] | None]:
    """(inputs, texts) of the records of a pyarrow.Table, as in `Source`. A record's inputs depend on no other record.

    path    the table's file, for messages
    unread  takes note of cells that are no numbers or dates, which then count as empty; without it, they are refused

    Raises DataError for a column that is missing, and for a cell that is not a number.
    """
    texts = _free_texts(table, features, path)
    if features.tokens is not None and texts is not None:
        return token_ids(texts[:, 0].tolist(), features.tokens), None
    return _inputs(table, target, features, path, unread), texts


def check_texts(table: Any, names: Collection[str], path: Path) -> None:
    """Raise DataError if one of these columns holds bytes, as which pyarrow reads text that is not UTF-8."""
    for column in table.schema:
        if column.name in names and is_bytes(column.type):
            raise not_utf8(path, DataError, f"Column {column.name!r} of ")


def is_bytes(kind: Any) -> bool:
    """Whether columns of this pyarrow type hold bytes."""
    return bool(types.is_binary(kind) or types.is_large_binary(kind))


def chosen(records: Any, kept: npt.NDArray[np.bool_], path: Path) -> Any:
    """The rows of these records. Raises DataError if there are none."""
    if not kept.any():
        raise DataError(f"All {len(kept):,} rows of {path} are left out, so no record remains.")
    return records if kept.all() else records.filter(pyarrow.array(kept))


def class_indices(
    texts: Sequence[str], codes: npt.NDArray[np.int64], classes: Sequence[str], target: str, path: Path
) -> npt.NDArray[Any]:
    """(records,) index of each record's text among the classes. Raises DataError for a text that is no class.

    texts  the different texts
    codes  (records,) the index of each record's text
    """
    index = {name: number for number, name in enumerate(classes)}
    indices = np.array([index.get(text, -1) for text in texts], dtype=np.int64)[codes]
    unknown = indices < 0
    if unknown.any():
        new = {texts[code] for code in np.unique(codes[unknown])}
        which = "an empty cell" if new == {""} else f"{len(new)} value(s)"
        raise DataError(
            f"{unknown.sum():,} of {len(indices):,} rows of {path} hold {which} in the target column {target!r} "
            f"that are not among the {len(classes)} classes ({', '.join(map(repr, classes))}); the first is row "
            f"{int(unknown.argmax()):,}, counted from 0 below the header. Add the class to data.classes, or correct "
            "the rows."
        )
    return indices


def _check_columns(
    columns: Sequence[str], path: Path, target: str, features: Features, aside: Mapping[str, str]
) -> None:
    """Raise DataError for a column that a rule names and the table lacks, then for a column that no rule names.

    A dropped or set-aside column may be absent; it is an error only if a remaining column has nearly the same name.
    """
    remaining = [name for name in columns if name not in {target, *aside, *features.names}]
    needed = {target: "data.target"}
    needed |= {name: "[data.numeric]" for name in features.numeric if name != target}
    needed |= dict.fromkeys(features.dates, "[data.dates]")
    needed |= dict.fromkeys(features.categorical, "[data.categorical]") | dict.fromkeys(features.free_text, "data.text")
    for name, key in needed.items():
        if name not in columns:
            close = _nearest(name, remaining) or _nearest(name, columns)
            hint = f"did you mean {close!r}?" if close else f"it has: {', '.join(map(repr, columns))}."
            raise DataError(f"{path} has no column {name!r}, which {key} names; {hint}")
    optional = dict.fromkeys(features.drop, "data.drop") | dict(aside)
    for name, key in optional.items():
        close = None if name in columns else _nearest(name, remaining)
        if close:
            raise DataError(f"{path} has no column {name!r}, which {key} names; did you mean {close!r}?")
    if remaining:
        absent = [name for name in aside if name not in columns]
        hint = f" (The budgets are expected in {absent[0]!r}, and there is no such column.)" if absent else ""
        raise DataError(
            f"The config does not name these columns of {path}: {', '.join(map(repr, remaining))}.{hint} List each in "
            "[data.numeric] or [data.dates] with its bounds, in [data.categorical] with its values, in data.text, or "
            "in data.drop; `epsilons init` writes such lists."
        )


def _nearest(name: str, columns: Sequence[str]) -> str | None:
    """The column with the most similar name, regardless of case."""
    lower = {column.lower(): column for column in columns}
    close = difflib.get_close_matches(name.lower(), lower, n=1)
    return lower[close[0]] if close else None


def _check_dates(table: Any, features: Features, path: Path) -> None:
    """Refuse dates as numbers, which they are not, and as hashed values, because a bucket would hold unrelated days.

    A list of values is allowed.
    """
    hashed = [name for name, values in features.categorical.items() if isinstance(values, int)]
    for name in [*features.numeric, *hashed]:
        if name in table.column_names and holds_dates(column_of(table, name, path, DataError)):
            raise DataError(
                f"Column {name!r} of {path} holds dates, which are neither numbers nor categories. State bounds in "
                f'[data.dates], like {name} = ["2010-01-01", "2024-12-31"], or list the column in data.drop.'
            )


def _inputs(table: Any, target: str, features: Features, path: Path, unread: Unread) -> npt.NDArray[np.float32]:
    """(records, features): the numeric columns, then the categorical ones; no features beside texts alone."""
    found = {name: _numbers(table, name, features, path, unread) for name in features.numeric if name != target}
    parts: list[npt.NDArray[Any]] = [_scaled(values, *features.numeric[name]) for name, values in found.items()]
    parts += [
        _scaled_days(table, name, path, rule, features.rule(name, unread)) for name, rule in features.dates.items()
    ]
    parts += [
        _one_hot(*_categories(table, name, features, path), name, values)
        for name, values in features.categorical.items()
    ]
    if not parts and not features.free_text:
        raise DataError(
            f"No column of {path} is an input. List them in [data.numeric], [data.dates], [data.categorical] and "
            "data.text."
        )
    parts = [part.astype(np.float32, copy=False) for part in parts]
    return np.concatenate([np.empty((table.num_rows, 0), dtype=np.float32), *parts], axis=1)


def _free_texts(table: Any, features: Features, path: Path) -> npt.NDArray[np.object_] | None:
    """(records, columns of texts); None without any."""
    if not features.free_text:
        return None
    columns = [texts_of(column_of(table, name, path, DataError), name, path) for name in features.free_text]
    return np.array(columns, dtype=object).T


def _coded(cells: Any, values: Collection[str] | None, marks: Marks) -> tuple[list[str], npt.NDArray[np.int64]]:
    """(different texts, (records,) the index of each cell's text); an empty cell is the empty text.

    values  None: texts are as the cells spell them. Else a cell that means one of these values is in its spelling: 1.0
            is listed as 1. Each cell is looked at alone
    """
    found, codes = encoded(cells)
    texts = ["" if value is None or value != value else as_text(value) for value in found.to_pylist()]
    if values is not None:
        texts = [text if text in values else by_meaning(text, marks.decimal) for text in texts]
    return texts, codes


def _categories(table: Any, name: str, features: Features, path: Path) -> tuple[list[str], npt.NDArray[np.int64]]:
    """The cells of a categorical column, as in `_coded`, as they are compared with the listed values or hashed."""
    cells, values = column_of(table, name, path, DataError), features.categorical[name]
    is_as_spelt = isinstance(values, int) or name in features.texts
    return _coded(cells, None if is_as_spelt else values, features.marks)  # type: ignore[arg-type]  # no int


def _numbers(table: Any, name: str, features: Features, path: Path, unread: Unread = None) -> npt.NDArray[np.float64]:
    cells, marks = column_of(table, name, path, DataError), replace(marks_of(table), decimal=features.marks.decimal)
    return numbers(cells, name, path, DataError, marks, features.rule(name, unread))


def _scaled_days(table: Any, name: str, path: Path, rule: DateRule, also: CellRule) -> npt.NDArray[np.float64]:
    """(records, 1) in -1..1."""
    values = days(column_of(table, name, path, DataError), name, path, DataError, rule, also)
    return _scaled(values, 0.0, float((rule.last - rule.first).days), log=False)


def _target_numbers(table: Any, name: str, features: Features, path: Path) -> npt.NDArray[np.float64]:
    """(records,) all finite: a target has no default."""
    values = _numbers(table, name, features, path)
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
    scaled = np.clip(2 * (values - ends[0]) / (ends[1] - ends[0]) - 1, -1, 1)
    return np.asarray(np.where(np.isnan(scaled), 0.0, scaled))[:, None]


def _one_hot(
    texts: Sequence[str], codes: npt.NDArray[np.int64], name: str, values: Sequence[str] | int
) -> npt.NDArray[np.float32]:
    """(records, values) with one 1 per row, or only zeros for a value that is not listed."""
    if isinstance(values, int):
        index, width = {text: _bucket(name, text, values) for text in texts}, values
    else:
        index, width = {value: number for number, value in enumerate(values)}, len(values)
    places = np.array([index.get(text, -1) for text in texts], dtype=np.int64)[codes]
    known = np.flatnonzero(places >= 0)
    rows = np.zeros((len(codes), width), dtype=np.float32)
    rows[known, places[known]] = 1.0
    return rows


def _check_categories(table: Any, features: Features, path: Path) -> None:
    """Raise DataError if many cells of a column hold none of the listed values: the list is probably misspelt."""
    for name, values in features.categorical.items():
        if isinstance(values, int) or len(table) < SMALLEST_SHOWN:
            continue
        texts, codes = _categories(table, name, features, path)
        if {*values}.isdisjoint(texts[code] for code in np.unique(codes)):
            raise DataError(
                f"None of the {len(table):,} cells of column {name!r} in {path} is one of the values listed in "
                f"[data.categorical] ({', '.join(map(repr, values))}). Spell them as in the file, or list the column "
                "in data.drop."
            )


def _bucket(name: str, text: str, buckets: int) -> int:
    digest = hashlib.blake2b(f"{name}={text}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") % buckets
