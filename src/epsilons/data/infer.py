"""Guesses about a table's columns, for the draft that `epsilons init` writes.

Bounds and lists of values are read off the data here, so no guarantee covers them; the draft says so.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from ..disclosure import SMALLEST_SHOWN
from ..errors import DataError
from ..tabular import column_of, emptied, numbers, read_table
from .guess_text import SAMPLE, are_short, holds_texts
from .images import image_labels, is_image_table
from .tables import check_texts, holds_dates, is_bytes
from .tensors import tensor_targets

#: Usual names of the column to predict, and of the column of budgets.
TARGETS = ("label", "target", "class", "outcome", "y")
BUDGETS = ("epsilon", "eps", "budget", "privacy", "consent", "tier")

MOST_CLASSES = 100
MOST_VALUES = 50  # a text column with more values is hashed
BUCKETS = 64

#: Names of columns that identify a person or a record. They are dropped.
IDENTIFIERS = re.compile(
    r"(.*[_\W])?(ids?|mrn|ssn|uuid|guid|pid|uid)"
    r"|(patient|person|people|subject|participant|respondent|member|customer|client|user|employee|student|pupil"
    r"|individual|household)s?([_\W]?(ids?|no|nr|num|number|key|code|ref|name))?"
)
#: Names of columns of digits that are codes, and not quantities: a larger one is not more of anything.
CODES = re.compile(r"(.*[_\W])?(zip|zip_?codes?|postal|postal_?codes?|post_?codes?|plz|codes?)([_\W]?[45])?")
_PERSONS = re.compile(
    r"person|people|patient|subject|participant|respondent|member|customer|client|user|employee|student|pupil"
)
_ROW_NUMBERS = re.compile(r"(.*[_\W])?(no|nr|number|index|key)")
#: This many different whole numbers, in more than half of the rows, may be codes or quantities.
MANY_NUMBERS = 1000


@dataclass(frozen=True)
class Column:
    """How one column may become an input.

    kind    "numeric", "categorical", "text" or "drop"
    bounds  (low, high, log) of a numeric column; log if a few numbers are far larger than most
    values  of a categorical column: those that at least 20 records hold; empty if the column should be hashed
    code    for numbers: "code" if they look like codes, "either" if they may be codes or quantities
    dates   True if the column holds dates
    repeats (values, filled cells) of an identifier that several records share
    short   True for texts of few words, such as names
    """

    name: str
    kind: Literal["numeric", "categorical", "text", "drop"]
    bounds: tuple[float, float, bool] | None = None
    values: tuple[Any, ...] = ()
    code: Literal["code", "either"] | None = None
    dates: bool = False
    repeats: tuple[int, int] | None = None
    short: bool = False


@dataclass(frozen=True)
class TableGuess:
    """What the columns of a table may be for.

    records  rows of the table
    target   the column to predict
    classes  its values; None if it is a number
    budget   the column of budgets; None if there is none
    tiers    the values of the column of budgets, if they are names; None if they are numbers
    columns  all other columns, in the table's order, and then the target if it is a number
    """

    records: int
    target: str
    classes: tuple[Any, ...] | None
    budget: str | None
    tiers: tuple[Any, ...] | None
    columns: tuple[Column, ...]

    def names(self, kind: str) -> list[str]:
        """The columns of this kind."""
        return [column.name for column in self.columns if column.kind == kind]

    @property
    def read_off(self) -> list[str]:
        """The columns whose bounds, values or classes were read off the table; the target last."""
        listed = [column.name for column in self.columns if column.bounds is not None or column.values]
        return listed if self.classes is None else [*listed, self.target]


def guess_table(path: Path, target: str | None, budget: str | None) -> TableGuess:
    """What the columns of the table at `path` may be for.

    target, budget  the columns of these roles; None to guess them by their names

    Raises DataError if the table cannot be used, or a named column is not there.
    """
    is_csv = path.suffix == ".csv"
    table = read_table(path, "data", DataError)
    if table.num_rows == 0:
        raise DataError(f"{path} has a header but no rows.")
    names: list[str] = list(table.column_names)
    for name in names:
        column_of(table, name, path, DataError)  # refuses two columns of one name
    if is_csv:  # in a .parquet file, columns of bytes are allowed and dropped
        check_texts(table, names, path)
    budget = _choose(budget, names, BUDGETS, path, "--budget")
    if target is not None and target == budget:
        raise DataError(f"Column {target!r} of {path} cannot be both --target and --budget; name two columns.")
    as_written = read_table(path, "data", DataError, names) if is_csv else table
    if is_csv:  # texts in the draft are spelled as in the file; only inputs may be true or false
        for index, name in enumerate(names):
            if not _is_number(table, name) and (name == budget or not _is_bool(table, name)):
                table = table.set_column(index, name, as_written.column(name))
    target = _choose(target, [name for name in names if name != budget], TARGETS, path, "--target")
    if target is None:  # most tables have their target in the last column
        others = [name for name in reversed(names) if name != budget]
        if not others:
            raise DataError(f"{path} has no column to predict besides that of the budgets, {budget!r}.")
        target = next((name for name in others if not is_identifier(name)), others[0])
    check_texts(table, [target, *([budget] if budget else [])], path)
    is_number = _is_number(table, target) and len(_distinct(table, target)) > 20
    classes = None if is_number else _names(table, target, path, "--target")
    tiers = None if budget is None or _is_number(table, budget) else _names(table, budget, path, "--budget")
    columns = [
        _guess_column(table, name, as_written.column(name), path) for name in names if name not in (target, budget)
    ]
    if classes is None:
        columns.append(Column(target, "numeric", _bounds(table, target, path)))
    guess = TableGuess(table.num_rows, target, classes, budget, tiers, tuple(columns))
    budgets = [budget] if budget is not None and tiers is None else []
    for name in guess.names("numeric") + budgets:  # `epsilons train` refuses 0x10, which pyarrow's reader takes for 16
        numbers(as_written.column(name), name, path, DataError)
    return guess


def repeated_identifiers(table: Any) -> list[str]:
    """The columns of a pyarrow.Table that identify persons or records, by their names, and hold repeated values.

    Those with the name of persons are first.
    """
    names: list[str] = sorted(dict.fromkeys(table.column_names), key=lambda name: not names_persons(name))
    return [name for name in names if _repeats(table, name) is not None]


def names_persons(name: str) -> bool:
    """Whether the name of a column says that it is about persons, and not about other things with ids.

    >>> [name for name in ("Patient", "customer_id", "visit_id", "id") if names_persons(name)]
    ['Patient', 'customer_id']
    """
    return _PERSONS.search(name.lower()) is not None


def count_classes(path: Path) -> int | None:
    """The number of classes in an image file or a folder of tensors; None if the target is a number."""
    targets = image_labels(path) if is_image_table(path) else tensor_targets(path, "training data")
    is_number = np.issubdtype(targets.dtype, np.floating) or targets.size == 0
    return None if is_number else max(2, int(targets.max()) + 1)


def _choose(requested: str | None, names: Sequence[str], usual: Sequence[str], path: Path, flag: str) -> str | None:
    """The requested column, or the first with a usual name, or with a usual word in its name."""
    if requested is not None:
        if requested not in names:
            raise DataError(f"{path} has no column {requested!r} for {flag}; it has: {', '.join(map(repr, names))}.")
        return requested
    lower = {name.lower(): name for name in reversed(names)}
    exact = [lower[name] for name in usual if name in lower]
    partly = [name for name in names for word in usual if len(word) > 2 and word in re.split(r"[^a-z]+", name.lower())]
    return (exact + partly + [None])[0]


def _names(table: Any, name: str, path: Path, flag: str) -> tuple[Any, ...]:
    """The values of a column of classes or tiers."""
    values = _distinct(table, name)
    cells = table.column(name).slice(0, SAMPLE).to_pylist() if _is_text(table, name) else []
    if len(values) > MOST_CLASSES or (cells and holds_texts(name, cells)):
        raise DataError(f"Column {name!r} of {path} holds {len(values):,} different texts; name another {flag}.")
    return tuple(values)


def _guess_column(table: Any, name: str, as_written: Any, path: Path) -> Column:
    """as_written: the column's cells as the file spells them, 007 and not 7."""
    values = _distinct(table, name)
    dates = holds_dates(table.column(name))
    if len(values) <= 1 or is_identifier(name) or is_bytes(table.schema.field(name).type) or dates:
        return Column(name, "drop", dates=dates, repeats=_repeats(table, name))
    if _is_number(table, name):
        if len(values) == table.num_rows and _ROW_NUMBERS.fullmatch(name.lower()):
            return Column(name, "drop")
        code = _likely_code(values, name, as_written)
        if code == "code":
            return Column(name, "categorical", code=code)
        return Column(name, "numeric", _bounds(table, name, path), code=code)
    if _is_text(table, name):
        cells = table.column(name).slice(0, SAMPLE).to_pylist()
        if holds_texts(name, cells):
            return Column(name, "text", short=are_short(cells))
    if len(values) > max(MOST_VALUES, 0.5 * table.num_rows):
        return Column(name, "drop")
    counts = Counter(table.column(name).to_pylist())
    common = tuple(value for value in values if counts[value] >= SMALLEST_SHOWN)
    return Column(name, "categorical", values=common if len(common) <= MOST_VALUES else ())


def is_identifier(name: str) -> bool:
    """Whether the name of a column says that it identifies a person or a record.

    >>> [name for name in ("mrn", "Patient", "patientId", "visit_id", "aid", "subjective") if is_identifier(name)]
    ['mrn', 'Patient', 'patientId', 'visit_id']
    """
    return IDENTIFIERS.fullmatch(name.strip().lower()) is not None


def _likely_code(values: Sequence[Any], name: str, as_written: Any) -> Literal["code", "either"] | None:
    """Whether the numbers of a column are codes: by the column's name, by leading zeros, or perhaps by their count."""
    if not all(float(value).is_integer() for value in values):
        return None
    texts = as_written.to_pylist()
    is_padded = any(isinstance(text, str) and re.fullmatch(r"0\d+", text.strip()) for text in texts)
    if is_padded or CODES.fullmatch(name.strip().lower()):
        return "code"
    return "either" if len(values) >= MANY_NUMBERS and len(values) > len(texts) / 2 else None


def _repeats(table: Any, name: str) -> tuple[int, int] | None:
    """(values, filled cells) if the column is an identifier that several records share.

    Blanks around a value do not make another one.
    """
    import pyarrow.compute as pc

    cells = table.column(table.column_names.index(name))
    if not is_identifier(name) or not (_is_number(table, name) or _is_text(table, name)):
        return None
    if _is_text(table, name):
        cells = pc.utf8_trim(emptied(cells.cast("string")), " \t")
    filled = pc.drop_null(cells)
    values = pc.count_distinct(filled).as_py()
    return (values, len(filled)) if 1 < values < len(filled) else None


def _bounds(table: Any, name: str, path: Path) -> tuple[float, float, bool]:
    """(low, high, log): round numbers beyond the smallest and largest cell."""
    cells = numbers(table.column(name), name, path, DataError)
    cells = cells[np.isfinite(cells)]
    if not len(cells):
        return 0.0, 1.0, False
    low, high = float(cells.min()), float(cells.max())
    log = max(abs(low), abs(high)) > 20 * (float(np.quantile(np.abs(cells), 0.9)) + 1)
    low, high = _outward(low, down=True), _outward(high, down=False)
    return low, high if low < high else low + 1, log


def _outward(value: float, down: bool) -> float:
    """The next round number (1, 2, 3, 5, 10 times a power of ten) away from the data.

    >>> _outward(17, down=True), _outward(90, down=False), _outward(-8, down=True), _outward(0, down=True)
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


def _is_number(table: Any, name: str) -> bool:
    from pyarrow import types

    kind = table.schema.field(name).type
    return bool(types.is_integer(kind) or types.is_floating(kind) or types.is_decimal(kind))


def _is_text(table: Any, name: str) -> bool:
    from pyarrow import types

    kind = table.schema.field(name).type
    kind = kind.value_type if types.is_dictionary(kind) else kind
    return bool(types.is_string(kind) or types.is_large_string(kind))


def _is_bool(table: Any, name: str) -> bool:
    from pyarrow import types

    return bool(types.is_boolean(table.schema.field(name).type))


def _distinct(table: Any, name: str) -> list[Any]:
    """The values of a column, sorted, without empty cells."""
    return sorted({v for v in table.column(name).to_pylist() if v is not None}, key=lambda v: (str(type(v)), v))
