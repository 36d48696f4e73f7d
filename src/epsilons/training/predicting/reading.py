"""The table to predict, in parts of bounded size: a file, a pyarrow.Table, a dict of columns, or a DataFrame."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ...errors import DataError
from ...tabular import UNSTATED, Marks
from ...tabular.parts import read_parts, slices

#: Rows of one part. The features of so many records must fit in memory.
ROWS = 1024

#: Where a table in memory comes from, for messages.
IN_MEMORY = Path("the table")


def parts_of(table: Any, columns: Sequence[str], marks: Marks = UNSTATED) -> tuple[Path, list[str], Iterator[Any]]:
    """(where the table is, names of its columns, parts of at most ROWS rows as pyarrow.Table).

    columns  the columns that are needed; others may be left out of the parts. Those of a text file are read as text
    marks    the separator and the decimal mark of text files, as stated in training

    Raises DataError for something that is no table, and for a file that cannot be read.
    """
    if isinstance(table, str | Path):
        names, parts = read_parts(Path(table), "table", DataError, columns, ROWS, marks)
        return Path(table), names, map(_plain, parts)
    whole = _in_memory(table)
    return IN_MEMORY, list(whole.column_names), slices(whole, ROWS)


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
            f"The table cannot be read ({type(error).__name__}). Every column needs one value per row, of one type."
        ) from None
    raise DataError(
        "The table must be a path to a .csv, .tsv or .parquet file, a pyarrow.Table, a dict of columns or a DataFrame, "
        f"got a {type(table).__name__}."
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
