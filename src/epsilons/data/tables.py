"""A user's own table as arrays, by rules that the user states; nothing is fitted to the data here.

A scale or a vocabulary that was learned from private data is an output of the data, and no budget covers it. So numbers
are scaled between stated bounds, categories are one-hot encoded by a stated list or hashed into buckets, and a column
that no rule names is an error.
"""

from __future__ import annotations

import difflib
import hashlib
import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ..core.disclosure import SMALLEST_SHOWN
from ..errors import DataError
from ..tabular import UNSTATED, DateRule, Marks, days, holds_dates, marks_of, not_utf8, open_table
from ..tabular.cells import CellRule, Unread, as_text, by_meaning, column_of, encoded, numbers
from ..tabular.table_files import pyarrow, types
from .arrays import Arrays, Encoded, Source
from .texts import Tokens, texts_of, token_ids

#: pyarrow.Table -> (rows,) which records are used, for `table`.
Kept = Callable[[Any], npt.NDArray[np.bool_]]

#: Inputs with more bytes are not made at once.
LARGE = 1 << 28
#: Rows whose cells are read at once.
PART = 1 << 18

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
    inputs_first = [*features.free_text, *features.numeric, *features.dates, *features.categorical]
    written = [name for name in inputs_first if name not in (*features.drop, target)]
    written = list(dict.fromkeys([*written, target, *aside, *features.texts]))
    records = open_table(path, what, DataError, written, features.marks)
    if records.num_rows == 0:
        raise DataError(f"The {what} file {path} has a header but no rows.")
    used = np.ones(len(records), dtype=bool) if kept is None else kept(records)
    records = chosen(records, used, path)
    try:
        _check_columns(records.column_names, path, target, features, aside)
        check_texts(records, {target, *rules, *features.free_text}, path)
        inputs, texts = record_inputs(records, target, features, path, is_whole=True)
        cells = column_of(records, target, path, DataError)
        if classes is not None:
            coded = _coded(cells, None if target in features.texts else classes, features.marks)
            targets = class_indices(*coded, classes, target, path)
            return Source(Arrays(inputs, targets), tuple(classes), records, texts)
        if target in features.numeric:
            _check_no_dates(cells, target, path)
        values = _target_numbers(records, target, features, path)
        scaled = _scaled(values, *features.numeric[target]) if target in features.numeric else values
        return Source(Arrays(inputs, scaled.astype(np.float32)[:, None]), None, records, texts)
    except DataError as error:  # which counts the rows that are used
        rows = [*np.flatnonzero(used).tolist(), len(used)]  # the last is for names that look like a row
        message = ROW.sub(lambda found: f"{rows[min(int(found[0].replace(',', '')), len(rows) - 1)]:,}", str(error))
        raise DataError(message) from None


def record_inputs(
    table: Any, target: str, features: Features, path: Path, unread: Unread = None, is_whole: bool = False
) -> tuple[npt.NDArray[Any] | Encoded, npt.NDArray[np.object_] | None]:
    """(inputs, texts) of the records of a table, as in `Source`. A record's inputs depend on no other record.

    path      the table's file, for messages
    unread    takes note of cells that are no numbers or dates, which then count as empty; without it, they are refused
    is_whole  True for all records that are trained or tested on: rules that fit none of them are then refused, and many
              inputs are not made at once

    Raises DataError for a column that is missing, and for a cell that is not a number.
    """
    texts = _free_texts(table, features, path)
    if features.tokens is not None and texts is not None:
        return token_ids(texts[:, 0].tolist(), features.tokens), None
    inputs = _inputs(table, target, features, path, unread, is_whole)
    return inputs if is_whole and 4 * math.prod(inputs.shape) > LARGE else np.asarray(inputs), texts


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


def _check_no_dates(cells: Any, name: str, path: Path) -> None:
    """Refuse dates as numbers, which they are not, and as hashed values, because a bucket would hold unrelated days.

    A list of values is allowed.
    """
    if holds_dates(cells):
        raise DataError(
            f"Column {name!r} of {path} holds dates, which are neither numbers nor categories. State bounds in "
            f'[data.dates], like {name} = ["2010-01-01", "2024-12-31"], or list the column in data.drop.'
        )


def _inputs(table: Any, target: str, features: Features, path: Path, unread: Unread, is_whole: bool) -> Encoded:
    """The numeric columns, the dates, and then the categorical ones; no features beside texts alone.

    Columns are read one after another, part by part, so that few cells are in memory beside the inputs.
    """
    rows, named = table.num_rows, [name for name in features.numeric if name != target]
    widths = [values if isinstance(values, int) else len(values) for values in features.categorical.values()]
    if not any((named, features.dates, widths, features.free_text)):
        raise DataError(
            f"No column of {path} is an input. List them in [data.numeric], [data.dates], [data.categorical] and "
            "data.text."
        )
    numeric = np.empty((rows, len(named) + len(features.dates)), dtype=np.float32)
    codes = np.empty((rows, len(widths)), dtype=np.min_scalar_type(-max([1, *widths])))
    into: tuple[tuple[Iterable[str], npt.NDArray[Any], Callable[..., npt.NDArray[Any]]], ...] = (
        (named, numeric, _scaled_numbers),
        (features.dates, numeric[:, len(named) :], _scaled_days),
        (features.categorical, codes, _places),
    )
    marks = replace(marks_of(table), decimal=features.marks.decimal)
    for names, made, read in into:
        for place, name in enumerate(names):
            cells, own = column_of(table, name, path, DataError), features.categorical.get(name, ())
            if is_whole and (read is _scaled_numbers or isinstance(own, int)):
                _check_no_dates(cells, name, path)
            how = partial(read, name=name, features=features, path=path, marks=marks, unread=unread)
            _fill(made[:, place], cells, how, PART if unread is None else rows)
            if is_whole and read is _places:
                _check_some_known(made[:, place], name, path, own)
    return Encoded(numeric, codes, tuple(widths))


def _check_some_known(places: npt.NDArray[Any], name: str, path: Path, values: Sequence[str] | int) -> None:
    """Raise DataError if many cells of a column hold none of the listed values: the list is probably misspelt."""
    if not isinstance(values, int) and len(places) >= SMALLEST_SHOWN and (places < 0).all():
        raise DataError(
            f"None of the {len(places):,} cells of column {name!r} in {path} is one of the values listed in "
            f"[data.categorical] ({', '.join(map(repr, values))}). Spell them as in the file, or list the column "
            "in data.drop."
        )


def _fill(made: npt.NDArray[Any], cells: Any, read: Callable[[Any], npt.NDArray[Any]], size: int) -> npt.NDArray[Any]:
    """(records,) what `read` makes of a column, in parts. Where it refuses a part, it reads all: errors count all rows.

    made  takes the values
    """
    with suppress(DataError):
        for first in range(0, max(len(cells), 1), max(size, 1)):
            made[first : first + size] = read(cells.slice(first, size))
        return made
    made[:] = read(cells)
    return made


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


def _places(
    cells: Any, name: str, features: Features, path: Path, marks: Marks, unread: Unread
) -> npt.NDArray[np.int64]:
    """(records,) the place of each cell's value among those listed, -1 for another one; or its bucket."""
    values = features.categorical[name]
    if isinstance(values, int):
        texts, codes = _coded(cells, None, marks)
        places = [_bucket(name, text, values) for text in texts]
    else:
        texts, codes = _coded(cells, None if name in features.texts else values, marks)
        index = {value: number for number, value in enumerate(values)}
        places = [index.get(text, -1) for text in texts]
    return np.array(places, dtype=np.int64)[codes]


def _scaled_numbers(
    cells: Any, name: str, features: Features, path: Path, marks: Marks, unread: Unread
) -> npt.NDArray[np.float64]:
    """(records,) in -1..1."""
    values = numbers(cells, name, path, DataError, marks, features.rule(name, unread))
    return _scaled(values, *features.numeric[name])


def _scaled_days(
    cells: Any, name: str, features: Features, path: Path, marks: Marks, unread: Unread
) -> npt.NDArray[np.float64]:
    """(records,) in -1..1."""
    rule = features.dates[name]
    values = days(cells, name, path, DataError, rule, features.rule(name, unread))
    return _scaled(values, 0.0, float((rule.last - rule.first).days), log=False)


def _target_numbers(table: Any, name: str, features: Features, path: Path) -> npt.NDArray[np.float64]:
    """(records,) all finite: a target has no default."""
    marks, rule = replace(marks_of(table), decimal=features.marks.decimal), features.rule(name)
    cells = column_of(table, name, path, DataError)
    values = _fill(np.empty(len(cells)), cells, lambda part: numbers(part, name, path, DataError, marks, rule), PART)
    bad = ~np.isfinite(values)
    if bad.any():
        raise DataError(
            f"{bad.sum():,} of {len(values):,} cells of the target column {name!r} in {path} are empty or not finite "
            f"(first at row {int(bad.argmax()):,}, counted from 0 below the header)."
        )
    return values


def _scaled(values: npt.NDArray[np.float64], low: float, high: float, log: bool) -> npt.NDArray[np.float64]:
    """(records,) in -1..1."""
    ends = np.array([low, high])
    if log:
        values, ends = np.arcsinh(values), np.arcsinh(ends)
    scaled = np.clip(2 * (values - ends[0]) / (ends[1] - ends[0]) - 1, -1, 1)
    return np.asarray(np.where(np.isnan(scaled), 0.0, scaled))


def _bucket(name: str, text: str, buckets: int) -> int:
    digest = hashlib.blake2b(f"{name}={text}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") % buckets
