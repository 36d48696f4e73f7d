"""Files: written whole or not at all (a temporary file beside them, made durable and renamed), and tables read.

What is written here is for its owner alone (mode 0600 from the first byte, also where it replaces a file that others
could read), unless the caller says that it is for release.
"""

from __future__ import annotations

import os
import re
import secrets
import stat
import warnings
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from .errors import EpsilonsWarning, InputError, RunError
from .plain import json_text

TABLES = (".csv", ".parquet")

#: A number as text: digits of ASCII, a point, an exponent. 0x10, 1_0, 1,5, inf and nan are none.
DECIMAL = r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?"

#: A cell of a .csv file that says that there is no value.
EMPTY = (
    *("", "#N/A", "#N/A N/A", "#NA", "-1.#IND", "-1.#QNAN", "-NaN", "-nan", "1.#IND", "1.#QNAN"),
    *("N/A", "NA", "NULL", "NaN", "n/a", "nan", "null"),
)


def write_json(path: Path, values: Any, release: bool = False) -> Path:
    """Write JSON to `path`, as `write_text` does. Raises RunError if it cannot be written."""
    return write_text(path, json_text(values) + "\n", release)


def write_text(path: Path, text: str, release: bool = False) -> Path:
    """Write text to `path`; no half-written file is ever seen there. Raises RunError if it cannot be written.

    release  False: only the owner may read it (mode 0600). True: the umask says who may
    """
    return write_bytes(path, text.replace("\n", os.linesep).encode("utf-8"), release)


def write_bytes(path: Path, content: bytes, release: bool = False) -> Path:
    """The same for bytes."""
    temporary: Path | None = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        unique = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
        with open(unique, "xb", opener=None if release else for_owner) as file:
            temporary = unique
            file.write(content)
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


def for_owner(path: str, flags: int) -> int:
    """An opener for `open`: a file that it creates has mode 0600 from the start."""
    return os.open(path, flags, 0o600)


def close_folder(path: Path) -> None:
    """Let nobody but its owner into an existing folder: mode 0700. Raises RunError where that cannot be done.

    A file system that keeps no modes is only warned about: there the mount says who may read.
    """
    if os.name == "nt" or not _is_open(path):
        return
    with suppress(OSError):  # what counts is the mode that it has then
        os.chmod(path, 0o700)
    if not _is_open(path):
        return
    if _keeps_modes(path):
        raise RunError(
            f"Others may read {path}, and its mode cannot be set to 0700: it may belong to another user. A run's files "
            "hold every budget and how many chose it. Choose a folder that does not exist yet."
        )
    warnings.warn(
        f"The file system of {path} keeps no modes, so how it is mounted says who may read a run's files: every budget "
        "and how many chose it. Where others have access to it, choose a folder elsewhere.",
        EpsilonsWarning,
        stacklevel=2,
    )


def _is_open(path: Path) -> bool:
    return bool(stat.S_IMODE(path.stat().st_mode) & 0o077)


def _keeps_modes(folder: Path) -> bool:
    probe = folder / f".modes.{secrets.token_hex(4)}"
    try:
        probe.mkdir(mode=0o700)
        try:
            return not _is_open(probe)
        finally:
            probe.rmdir()
    except OSError:
        return True


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
    above = [
        name
        for place, (name, kind) in enumerate(zip(names, kinds, strict=True))
        if types.is_integer(kind) or types.is_floating(kind) or _holds_numbers(table.column(place))
    ]
    if above:
        filled = [name for name in above if name]
        return bool(filled) and all(decimal(name) is not None for name in filled)
    texts = [place for place, kind in enumerate(kinds) if names[place] and types.is_string(kind)]
    return any(pc.any(pc.equal(table.column(place), names[place])).as_py() for place in texts)


def _holds_numbers(cells: Any) -> bool:
    """Whether a column that was read as it is written holds numbers, and at least one."""
    import pyarrow.compute as pc

    if not _is_text(cells):
        return False
    filled = pc.drop_null(emptied(cells))
    return len(filled) > 0 and bool(pc.all(_are_decimal(pc.utf8_trim(filled, " \t"))).as_py())


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


def emptied(cells: Any) -> Any:
    """Cells of text that were read as they are written, with null for those that hold no value, as EMPTY lists them."""
    import pyarrow
    import pyarrow.compute as pc

    if not _is_text(cells):
        return cells
    nothing = pc.is_in(pc.utf8_trim(cells, " \t"), value_set=pyarrow.array(EMPTY, type=cells.type))
    return pc.if_else(nothing, pyarrow.scalar(None, type=cells.type), cells)


def numbers(cells: Any, column: str, path: Path, error: type[InputError]) -> npt.NDArray[np.float64]:
    """A column's cells as floats, NaN where a cell is empty; raises `error` for cells that are not decimal numbers."""
    import pyarrow
    import pyarrow.compute as pc

    if _is_text(cells):
        cells = pc.utf8_trim(emptied(cells), " \t")
        bad = np.asarray(pc.fill_null(pc.invert(_are_decimal(cells)), False))
        if bad.any():
            raise error(
                f"{bad.sum():,} of {len(cells):,} cells of column {column!r} in {path} are not numbers (first at row "
                f"{int(bad.argmax()):,}, counted from 0 below the header). Numbers are decimal and finite, like 12, "
                "0.5 or 1e-5; 0x10, 1_000 and 1,000 are none."
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
    """The number that a text writes in decimal; None for any other text.

    >>> decimal("1e-5"), decimal(" .5"), decimal("0x10"), decimal("1_0"), decimal("inf"), decimal("１")
    (1e-05, 0.5, None, None, None, None)
    """
    stripped = text.strip(" \t")
    return float(stripped) if re.fullmatch(DECIMAL, stripped) else None
