"""Columns of .csv and .parquet files, with errors that quote no row: a row is one person's data."""

from __future__ import annotations

import math
import re
from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from .errors import InputError

TABLES = (".csv", ".parquet")

#: A number as text: ASCII digits, a point, an exponent. 0x10, 1_0, 1,5, inf and nan do not match.
DECIMAL = r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?"

#: Cells of a .csv file that count as empty.
EMPTY = (
    *("", "#N/A", "#N/A N/A", "#NA", "-1.#IND", "-1.#QNAN", "-NaN", "-nan", "1.#IND", "1.#QNAN"),
    *("N/A", "NA", "NULL", "NaN", "n/a", "nan", "null"),
)


def read_table(path: Path, what: str, error: type[InputError], texts: Collection[str] = ()) -> Any:
    """The pyarrow.Table in a .csv or .parquet file, one row per record. Raises `error`, without quoting a row.

    what   the kind of file, for messages ("budgets", "training data")
    texts  columns of a .csv file that are read as text, so that 007 and true stay as they are
    """
    import pyarrow
    from pyarrow import csv, parquet

    if path.suffix not in TABLES:
        raise error(f"The {what} file must be {' or '.join(TABLES)}, with one row per record; {path} is neither.")
    if not path.is_file():
        raise error(f"No {what} file at {path}. Give a .csv or .parquet file with one row per record.")
    try:
        if path.suffix == ".parquet":
            return parquet.read_table(path)
        # A blank line is a record without a value. Dropping it would shift all records after it.
        parse = csv.ParseOptions(ignore_empty_lines=False, newlines_in_values=True)
        convert = csv.ConvertOptions(column_types=dict.fromkeys(texts, pyarrow.string()))
        table = csv.read_csv(path, parse_options=parse, convert_options=convert)
        names = table.column_names
    except (pyarrow.ArrowException, OSError, UnicodeError):
        if path.suffix == ".csv" and not _is_utf8(path):
            raise not_utf8(path, error) from None
        # pyarrow's message quotes the row it failed on, which is one person's data.
        raise error(
            f"{path} cannot be read as {path.suffix[1:]}: expected a table with the same columns in every row."
        ) from None
    if len(names) == 1:
        for mark, name in ((";", "semicolons"), ("\t", "tabs")):
            if mark in names[0]:
                raise error(
                    f"{path} is separated by {name}, and commas are needed. Convert it, for instance in Python with "
                    f"pandas: pandas.read_csv({str(path)!r}, sep={mark!r}).to_csv('commas.csv', index=False)."
                )
    if _has_no_header(table):
        raise error(
            f"The first line of {path} looks like a record, not like the names of columns. Put a line with their names "
            "above it. (If these are names, rename a column that is called like one of its own values.)"
        )
    return table


def _has_no_header(table: Any) -> bool:
    """Whether the first line is a record: a number above every numeric column, or a text repeated in its column.

    The names 0, 1, 2, …, which pandas gives to columns without names, count as names.
    """
    import pyarrow.compute as pc
    from pyarrow import types

    names = table.column_names
    if names == [str(column) for column in range(len(names))]:
        return False
    kinds = table.schema.types
    above = [
        name
        for column, (name, kind) in enumerate(zip(names, kinds, strict=True))
        if types.is_integer(kind) or types.is_floating(kind) or _holds_numbers(table.column(column))
    ]
    if above:
        filled = [name for name in above if name]
        return bool(filled) and all(decimal(name) is not None for name in filled)
    texts = [column for column, kind in enumerate(kinds) if names[column] and types.is_string(kind)]
    return any(pc.any(pc.equal(table.column(column), names[column])).as_py() for column in texts)


def _holds_numbers(cells: Any) -> bool:
    """Whether a column of text holds numbers only, and at least one."""
    import pyarrow.compute as pc

    if not _is_text(cells):
        return False
    filled = pc.drop_null(emptied(cells))
    return len(filled) > 0 and bool(pc.all(_are_decimal(pc.utf8_trim(filled, " \t"))).as_py())


def not_utf8(path: Path, error: type[InputError], where: str = "") -> InputError:
    """The error for a file that is not UTF-8. It says how to convert the file."""
    how = f", for instance by: iconv -f latin1 -t utf-8 {path} > utf-8.csv" if path.suffix == ".csv" else "."
    return error(f"{where}{path} is not UTF-8 text. Convert it{how}")


def _is_utf8(path: Path) -> bool:
    try:
        with path.open(encoding="utf-8", newline="") as file:
            while file.read(1 << 20):
                pass
    except UnicodeDecodeError:
        return False
    return True


def column_of(table: Any, column: str, path: Path, error: type[InputError], hint: str = "") -> Any:
    """The column of that name. Raises `error` if there is none, or more than one."""
    if column not in table.column_names:
        raise error(f"{path} has no column {column!r}; it has: {', '.join(map(repr, table.column_names))}.{hint}")
    if table.column_names.count(column) > 1:
        raise error(f"{path} has {table.column_names.count(column)} columns called {column!r}; rename all but one.")
    return table.column(column)


def as_text(value: object) -> str:
    """A value as TOML writes it. Whole numbers look the same as int and as float.

    >>> as_text(True), as_text(7), as_text(7.0), as_text(7.5), as_text("007")
    ('true', '7', '7', '7.5', '007')
    """
    if isinstance(value, bool):
        return str(value).lower()
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)


def by_meaning(text: str) -> str:
    """A cell of a .csv file that is a number, true, false or empty, as `as_text` writes it; other texts as they are.

    >>> [by_meaning(text) for text in ("01", "1.0", "TRUE", "NA", "1e2", "x")]
    ['1', '1', 'true', '', '100', 'x']
    """
    stripped = text.strip(" \t")
    if stripped in EMPTY:
        return ""
    if re.fullmatch("[+-]?[0-9]+", stripped):
        return str(int(stripped))
    number = decimal(stripped)
    if number is not None and math.isfinite(number):
        return as_text(number)
    return stripped.lower() if stripped.lower() in ("true", "false") else text


def emptied(cells: Any) -> Any:
    """The cells of a text column, with null for those listed in EMPTY. Other columns are returned unchanged."""
    import pyarrow
    import pyarrow.compute as pc

    if not _is_text(cells):
        return cells
    nothing = pc.is_in(pc.utf8_trim(cells, " \t"), value_set=pyarrow.array(EMPTY, type=cells.type))
    return pc.if_else(nothing, pyarrow.scalar(None, type=cells.type), cells)


def numbers(cells: Any, column: str, path: Path, error: type[InputError]) -> npt.NDArray[np.float64]:
    """A column's cells as floats, NaN where a cell is empty. Raises `error` for cells that are not decimal numbers."""
    import pyarrow
    import pyarrow.compute as pc

    if _is_text(cells):
        cells = pc.utf8_trim(emptied(cells), " \t")
        bad = np.asarray(pc.fill_null(pc.invert(_are_decimal(cells)), False))
        if bad.any():
            raise error(
                f"{bad.sum():,} of {len(cells):,} cells of column {column!r} in {path} are not numbers (first at row "
                f"{int(bad.argmax()):,}, counted from 0 below the header). Numbers are decimal and finite, like 12, "
                "0.5 or 1e-5; 0x10, 1_000 and 1,000 are not accepted."
            )
    try:
        values: npt.NDArray[np.float64] = cells.cast(pyarrow.float64(), safe=False).to_numpy()
        return values
    except pyarrow.ArrowException:
        raise error(f"Column {column!r} in {path} holds {cells.type}, not numbers.") from None


def _is_text(cells: Any) -> bool:
    from pyarrow import types

    return bool(types.is_string(cells.type) or types.is_large_string(cells.type))


def _are_decimal(cells: Any) -> Any:
    import pyarrow.compute as pc

    return pc.match_substring_regex(cells, rf"\A(?:{DECIMAL})\z")


def decimal(text: str) -> float | None:
    """The decimal number that a text holds, or None.

    >>> decimal("1e-5"), decimal(" .5"), decimal("0x10"), decimal("1_0"), decimal("inf"), decimal("１")
    (1e-05, 0.5, None, None, None, None)
    """
    stripped = text.strip(" \t")
    return float(stripped) if re.fullmatch(DECIMAL, stripped) else None
