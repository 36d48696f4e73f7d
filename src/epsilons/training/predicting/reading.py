"""The table to predict, in parts of bounded size: a file, a pyarrow.Table, a dict of columns, or a DataFrame."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ...errors import DataError
from ...tabular import read_table

#: Rows of one part. The features of so many records must fit in memory.
ROWS = 1024
#: Bytes of a .csv file that are parsed at once.
BLOCK = 1 << 24

#: Where a table in memory comes from, for messages.
IN_MEMORY = Path("the table")


def parts_of(table: Any, columns: Sequence[str]) -> tuple[Path, list[str], Iterator[Any]]:
    """(where the table is, names of its columns, parts of at most ROWS rows as pyarrow.Table).

    columns  the columns that are needed; others may be left out of the parts. Those of a .csv file are read as text

    Raises DataError for something that is no table, and for a file that cannot be read.
    """
    if isinstance(table, str | Path):
        path = Path(table)
        if path.suffix == ".csv" and path.is_file():
            names = _header(path)
            return path, names, _of_csv(path, [name for name in columns if name in names])
        if path.suffix == ".parquet" and path.is_file():
            return path, *_of_parquet(path, columns)
        whole = read_table(path, "table", DataError, columns)
        return path, list(whole.column_names), _slices(whole)
    whole = _in_memory(table)
    return IN_MEMORY, list(whole.column_names), _slices(whole)


def _in_memory(table: Any) -> Any:
    """A pyarrow.Table of a table in memory."""
    import pyarrow

    try:
        if isinstance(table, pyarrow.Table):
            return _plain(table)
        if isinstance(table, pyarrow.RecordBatch):
            return _plain(pyarrow.Table.from_batches([table]))
        if isinstance(table, Mapping):
            return _plain(pyarrow.table({name: _column(values) for name, values in table.items()}))
        if hasattr(table, "to_arrow"):  # polars
            return _plain(table.to_arrow())
        if type(table).__module__.partition(".")[0] == "pandas":
            return _plain(pyarrow.Table.from_pandas(table, preserve_index=False))
    except (pyarrow.ArrowException, TypeError, ValueError) as error:
        raise DataError(
            f"The table cannot be read: {type(error).__name__}. Every column needs one value per row."
        ) from None
    raise DataError(
        "The table must be a path to a .csv or .parquet file, a pyarrow.Table, a dict of columns or a DataFrame, got a "
        f"{type(table).__name__}."
    )


def _column(values: Any) -> Any:
    """A column of a dict, with NaN as an empty cell. An array of numpy, a tensor or a list."""
    import pyarrow

    values = values.numpy() if hasattr(values, "numpy") and not hasattr(values, "to_numpy") else values
    return pyarrow.array(values, from_pandas=True)


def _plain(table: Any) -> Any:
    """The same table with texts in place of codes."""
    from pyarrow import types

    for index, field in enumerate(table.schema):
        if types.is_dictionary(field.type):
            table = table.set_column(index, field.name, table.column(index).cast(field.type.value_type))
    return table


def _slices(table: Any) -> Iterator[Any]:
    return (table.slice(start, ROWS) for start in range(0, table.num_rows, ROWS))


def _of_parquet(path: Path, columns: Sequence[str]) -> tuple[list[str], Iterator[Any]]:
    import pyarrow
    from pyarrow import parquet

    try:
        file = parquet.ParquetFile(path)
    except (pyarrow.ArrowException, OSError):
        raise _unreadable(path) from None
    names = list(file.schema_arrow.names)
    return names, _batches(path, file.iter_batches(ROWS, columns=[name for name in columns if name in names]))


def _of_csv(path: Path, columns: Sequence[str]) -> Iterator[Any]:
    import pyarrow
    from pyarrow import csv

    convert = csv.ConvertOptions(column_types=dict.fromkeys(columns, pyarrow.string()), include_columns=list(columns))
    read = csv.ReadOptions(block_size=BLOCK)
    try:
        reader = csv.open_csv(path, read, csv.ParseOptions(ignore_empty_lines=False, newlines_in_values=True), convert)
    except (pyarrow.ArrowException, OSError, UnicodeError):
        raise _unreadable(path) from None
    yield from _batches(path, reader)


def _header(path: Path) -> list[str]:
    """The names of the columns of a .csv file, by the checks of every table."""
    import pyarrow
    from pyarrow import csv

    try:
        parse = csv.ParseOptions(ignore_empty_lines=False, newlines_in_values=True)
        return list(csv.open_csv(path, parse_options=parse).schema.names)
    except (pyarrow.ArrowException, OSError, UnicodeError):
        return list(read_table(path, "table", DataError).column_names)  # it says what is wrong


def _batches(path: Path, batches: Any) -> Iterator[Any]:
    """Parts of at most ROWS rows. Raises DataError where the file cannot be read; no row is quoted."""
    import pyarrow

    left = iter(batches)
    while True:
        try:
            batch = next(left)
        except StopIteration:
            return
        except (pyarrow.ArrowException, OSError, UnicodeError):
            raise _unreadable(path) from None
        yield from _slices(_plain(pyarrow.Table.from_batches([batch])))


def _unreadable(path: Path) -> DataError:
    return DataError(
        f"{path} cannot be read as {path.suffix[1:]}: expected a table with the same columns in every row, in UTF-8."
    )
