"""Records to predict become inputs by the rules of training. A record's inputs depend on no other record."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ...core.disclosure import SMALLEST_SHOWN
from ...data.images import IMAGE_COLUMNS, image_inputs
from ...data.sources import array_inputs, is_folder_of_tensors, tensor_inputs
from ...data.tables import ROW, record_inputs
from ...errors import DataError
from ...ledger.model_file import ImageInputs, ModelFile, TableInputs
from ...tabular import UNSTATED, Marks
from ...tabular.cells import Unread
from ...tabular.reading import read_parts, slices
from ...tabular.table_files import pyarrow, types
from ..features import FixedFeatures

# -- The table to predict, in parts of bounded size: a file, a pyarrow.Table, a dict of columns, or a DataFrame

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
    values = values.numpy() if hasattr(values, "numpy") and not hasattr(values, "to_numpy") else values
    return pyarrow.array(values, from_pandas=True)


def _plain(table: Any) -> Any:
    """The same table with texts in place of codes."""
    for index, field in enumerate(table.schema):
        if types.is_dictionary(field.type):
            table = table.set_column(index, field.name, table.column(index).cast(field.type.value_type))
    return table


# -- Records to predict become inputs by the rules of training. A record's inputs depend on no other record

Inputs = npt.NDArray[Any]
#: (inputs, texts) before fixed features.
Raw = tuple[Inputs, npt.NDArray[np.object_] | None]


def inputs_of(table: Any, model: ModelFile, features: FixedFeatures | None, unread: Unread = None) -> Iterator[Inputs]:
    """The inputs (records, …) of at most ROWS records at a time.

    unread  takes note of cells that cannot be an input, before their records; without it, they are refused

    Raises DataError if the table lacks a column, or a cell cannot be an input.
    """
    for inputs, texts in _raw(table, model, unread):
        computed = inputs if features is None else features.in_place_of(inputs, texts)
        expected = None if model.model is None else model.model.shape
        if expected is not None and computed.shape[1:] != expected:
            raise DataError(
                f"The model was trained on records of shape {expected}, got {computed.shape[1:]}. Give records as they "
                "were in training."
            )
        yield computed


def _raw(table: Any, model: ModelFile, unread: Unread) -> Iterator[Raw]:
    if isinstance(model.inputs, TableInputs):
        return _of_table(table, model.inputs, unread)
    if isinstance(model.inputs, ImageInputs):
        return ((inputs, None) for inputs in _of_images(table, model.inputs))
    inputs = _array(table)
    starts = range(0, len(inputs), ROWS)
    return ((array_inputs(inputs[start : start + ROWS], "the records"), None) for start in starts)


# -- tables ------------------------------------------------------------------------------------------------------------


def _of_table(table: Any, rules: TableInputs, unread: Unread) -> Iterator[Raw]:
    features = rules.features
    path, names, parts = parts_of(table, features.names, features.marks)
    check_columns(features.names, names, path)
    start = 0
    for part in parts:
        try:
            inputs, texts = record_inputs(part, "", features, path, unread)
            yield np.asarray(inputs), texts
        except DataError as error:
            message = ROW.sub(lambda row: f"{int(row[0].replace(',', '')) + start:,}", str(error))  # noqa: B023
            raise DataError(re.sub(f"^([0-9,]+) of {len(part):,} cells", r"\1 or more cells", message)) from None
        start += len(part)


def check_columns(
    needed: Sequence[str], names: Sequence[str], path: Path, why: str = "which the model was trained on"
) -> None:
    """Raise DataError that names all needed columns that are missing, or occur twice.

    why  what needs the columns
    """
    if missing := [name for name in needed if name not in names]:
        if len(names) == 1 and len([name for name in needed if name in names[0]]) == len(needed):
            raise DataError(
                f"{path} has one column, with the names of all others in its first line: its cells are not separated "
                "as those of training. Save it with the separator of the training table, or as .parquet."
            )
        close = difflib.get_close_matches(missing[0], names, n=1)
        hint = f"Did you mean {close[0]!r}?" if close else f"It has: {_listed(names)}."
        raise DataError(
            f"{path} has no column {_listed(missing)}, {why}. {hint} Columns may be in any order, and others are "
            "ignored."
        )
    if twice := [name for name in needed if list(names).count(name) > 1]:
        raise DataError(f"{path} has several columns called {twice[0]!r}; rename all but one.")


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(map(repr, names[:SMALLEST_SHOWN]))
    return f"{shown}, and {len(names) - SMALLEST_SHOWN} more" if len(names) > SMALLEST_SHOWN else shown


# -- images and arrays -------------------------------------------------------------------------------------------------


def _of_images(table: Any, rules: ImageInputs) -> Iterator[Inputs]:
    path, names, parts = parts_of(table, IMAGE_COLUMNS)
    if not {*IMAGE_COLUMNS} & {*names}:
        raise DataError(f"{path} has no column {' or '.join(map(repr, IMAGE_COLUMNS))} of encoded images.")
    return (image_inputs(part, path, rules.mean, rules.std) for part in parts)


def _array(table: Any) -> Inputs:
    """(records, …) as they are given: an array, a tensor, an .npy file, or a folder with `inputs`."""
    if isinstance(table, str | Path):
        return _array_of_file(Path(table))
    if hasattr(table, "detach"):
        table = table.detach().cpu()
    if hasattr(table, "__array__") and not hasattr(table, "columns"):
        array = np.asarray(table)
        if array.ndim and array.dtype.kind in "biuf":
            return array
    raise DataError(
        "This model was trained on arrays, not on a table: give an array (records, …) of numbers, an .npy file, or a "
        f"folder with `inputs` as in training, got a {type(table).__name__}."
    )


def _array_of_file(path: Path) -> Inputs:
    if is_folder_of_tensors(path):
        return tensor_inputs(path, "records")
    if path.suffix == ".npy" and path.is_file():
        try:
            return np.asarray(np.load(path, mmap_mode="r", allow_pickle=False))
        except (OSError, ValueError, EOFError) as error:
            raise DataError(f"{path} cannot be read as an array ({type(error).__name__}).") from None
    raise DataError(
        f"{path} is neither an .npy file nor a folder with `inputs`. This model was trained on arrays, not on a table."
    )
