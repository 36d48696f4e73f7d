"""Files: written whole or not at all (a temporary file beside them, made durable and renamed), and tables read."""

from __future__ import annotations

import json
import math
import os
import secrets
from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from .errors import InputError, RunError

TABLES = (".csv", ".parquet")


def write_json(path: Path, values: Any) -> Path:
    """Write JSON to `path`; no half-written file is ever seen there. Raises RunError if it cannot be written."""
    return write_text(path, json.dumps(values, indent=1, ensure_ascii=False, allow_nan=False) + "\n")


def write_text(path: Path, text: str) -> Path:
    """Write text to `path`; no half-written file is ever seen there. Raises RunError if it cannot be written."""
    temporary: Path | None = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        unique = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
        with unique.open("x", encoding="utf-8") as file:  # for whom it is readable, the umask says
            temporary = unique
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        temporary = None
        sync_folder(path.parent)
    except OSError as error:
        raise RunError(f"{path} cannot be written: {error.strerror or error}. Choose another place.") from None
    finally:
        if temporary:
            temporary.unlink(missing_ok=True)
    return path


def unfinished_writes(path: Path) -> list[Path]:
    """What `write_text` to this path left behind where it was cut off."""
    return list(path.parent.glob(f".{path.name}.*"))


def sync_folder(path: Path) -> None:
    """Make a folder's entries durable: a file's own fsync does not say that it can be found again."""
    if os.name == "nt":  # where folders cannot be opened, and need not be
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def read_table(path: Path, what: str, error: type[InputError], texts: Collection[str] = ()) -> Any:
    """The pyarrow.Table in a .csv or .parquet file, one row per record; raises `error`, never quoting a row.

    what   the kind of file, for messages ("budgets", "training data")
    texts  columns of a .csv file that are read as they are written: 007, true
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
        # A blank line is a record without a value; dropping it would shift everybody after it.
        parse = csv.ParseOptions(ignore_empty_lines=False, newlines_in_values=True)
        convert = csv.ConvertOptions(column_types=dict.fromkeys(texts, pyarrow.string()))
        table = csv.read_csv(path, parse_options=parse, convert_options=convert)
        names = table.column_names
    except (pyarrow.ArrowException, OSError, UnicodeError):
        if path.suffix == ".csv" and not _is_utf8(path):
            raise not_utf8(path, error) from None
        # pyarrow's own message quotes the row it failed on, and with it a person's data.
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
    """Whether the names are somebody's row: numbers above all columns of numbers; without any, a text that is repeated.

    pandas' own names for columns without any, 0, 1, 2, …, are names.
    """
    import pyarrow.compute as pc
    from pyarrow import types

    names = table.column_names
    if names == [str(place) for place in range(len(names))]:
        return False
    kinds = table.schema.types
    above = [name for name, kind in zip(names, kinds, strict=True) if types.is_integer(kind) or types.is_floating(kind)]
    if above:
        filled = [name for name in above if name]
        return bool(filled) and all(_number(name) is not None for name in filled)
    texts = [place for place, kind in enumerate(kinds) if names[place] and types.is_string(kind)]
    return any(pc.any(pc.equal(table.column(place), names[place])).as_py() for place in texts)


def not_utf8(path: Path, error: type[InputError], where: str = "") -> InputError:
    """The error for a file in another encoding, and how to convert it."""
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
    """The one column of that name; raises `error` if there is none, or several."""
    if column not in table.column_names:
        raise error(f"{path} has no column {column!r}; it has: {', '.join(map(repr, table.column_names))}.{hint}")
    if table.column_names.count(column) > 1:
        raise error(f"{path} has {table.column_names.count(column)} columns called {column!r}; rename all but one.")
    return table.column(column)


def as_text(value: object) -> str:
    """A value as TOML and most tables write it; whole numbers alike whatever their type.

    >>> as_text(True), as_text(7), as_text(7.0), as_text(7.5), as_text("007")
    ('true', '7', '7', '7.5', '007')
    """
    if isinstance(value, bool):
        return str(value).lower()
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)


def numbers(cells: Any, column: str, path: Path, error: type[InputError]) -> npt.NDArray[np.float64]:
    """A column's cells as floats, NaN where a cell is empty; raises `error` for cells that are not numbers."""
    import pyarrow

    try:
        values: npt.NDArray[np.float64] = cells.cast(pyarrow.float64()).to_numpy()
        return values
    except pyarrow.ArrowNotImplementedError:
        raise error(f"Column {column!r} in {path} holds {cells.type}, not numbers.") from None
    except pyarrow.ArrowInvalid:
        parsed = [_number(cell.as_py()) for cell in cells]
        bad = np.array([value is None for value in parsed])
        if bad.any():
            raise error(
                f"{bad.sum():,} of {len(cells):,} cells of column {column!r} in {path} are not numbers (first at row "
                f"{int(bad.argmax()):,}, counted from 0 below the header)."
            ) from None
        return np.array(parsed, dtype=np.float64)


def _number(cell: Any) -> float | None:
    if cell is None:
        return math.nan
    if "_" in str(cell):  # 1_0 is ten to Python alone
        return None
    try:
        return float(cell)
    except (TypeError, ValueError):
        return None
