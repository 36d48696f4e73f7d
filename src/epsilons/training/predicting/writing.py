"""Predictions into a .csv or .parquet file, part by part: whole or not at all, and readable by the owner alone."""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from ...core.files import for_owner
from ...core.progress_line import live_line
from ...errors import DataError, InputError
from ...ledger.model_file import TableInputs
from ...tabular import UNSTATED, Marks, are_decimal, is_text
from ...tabular.arrow import csv, parquet, pc, pyarrow
from ...tabular.cells import Unread
from .predictor import Predictor
from .table_parts import check_columns, parts_of


def write(predictor: Predictor, table: Path, output: Path, keep: list[str], quiet: bool, mark: bool) -> tuple[int, int]:
    """Predict every row of the table in a file, and write the predictions. Returns the numbers of rows: all, and bad.

    keep  columns of the table that are copied in front of the predictions
    mark  True to leave the predictions of rows with unreadable cells empty, with the reason in a last column

    Raises DataError for a table that does not fit, InputError if the output cannot be written.
    """
    rows = bad = 0
    unread: Unread = [] if mark else None
    rules = predictor.description.inputs
    kept = _kept(table, keep, rules.features.marks if isinstance(rules, TableInputs) else UNSTATED)
    with _written(output) as temporary, ExitStack() as stack:
        hidden, writer = quiet or not sys.stderr.isatty(), None
        show = stack.enter_context(live_line(["{task.completed:,.0f} rows predicted"], hidden=hidden))
        for part in predictor.stream(table, unread):
            columns = part.to_table() if unread is None else _marked(part.to_table(), unread)
            bad += columns.column(0).null_count
            if keep:
                columns = _beside(next_rows(kept, len(part)), columns)
            columns = inert(columns) if output.suffix == ".csv" else columns
            if writer is None:  # the first part has the columns of all
                writer = stack.enter_context(_opened(temporary, output.suffix == ".csv", columns.schema))
            writer.write_table(columns)
            rows += len(part)
            show(completed=rows)
        if not rows:
            raise DataError(f"{table} has no rows to predict.")
    return rows, bad


def _marked(columns: Any, unread: list[Any]) -> Any:
    """The predictions of one part, empty for rows with such cells, and why. The next part begins without any."""
    reasons = ["; ".join(why for bad, why in unread if bad[row]) for row in range(len(columns))]
    unread.clear()
    good = pyarrow.array([not reason for reason in reasons])
    cells = [pc.if_else(good, column, pyarrow.scalar(None, column.type)) for column in columns.columns]
    return pyarrow.table([*cells, reasons], [*columns.column_names, "not_predicted"])


# -- columns that are kept ---------------------------------------------------------------------------------------------


def _kept(table: Path, keep: Sequence[str], marks: Marks) -> Iterator[Any]:
    """Parts of the columns to keep."""
    if not keep:
        return iter(())
    path, names, parts = parts_of(table, keep, marks)
    check_columns(keep, names, path, "which --keep names")
    return (part.select(list(keep)) for part in parts)


def next_rows(parts: Iterator[Any], rows: int) -> Any:
    """The next rows of these parts, which are cut as those of the inputs. Raises DataError if they are not."""
    part = next(parts, None)
    if part is None or len(part) != rows:
        raise DataError("The table changed while it was read. Predict again.")
    return part


def _beside(kept: Any, columns: Any) -> Any:
    for name in kept.column_names:
        if name in columns.column_names:
            raise InputError(f"--keep {name!r}: the output has a column of this name. Rename it in the table.")
    for index, name in enumerate(columns.column_names):
        kept = kept.append_column(columns.schema.field(index), columns.column(name))
    return kept


# -- the file ----------------------------------------------------------------------------------------------------------


def inert(columns: Any) -> Any:
    """Columns for a .csv file that is safe in a spreadsheet program: no text, and no name, is taken for a formula.

    An apostrophe is written before = + - @ where a text begins, or after a mark that may separate cells there. Texts
    that are numbers, such as -5.2, stay as they are.
    """

    def of(texts: Any) -> Any:
        changed = pc.replace_substring_regex(texts, "(^|[;|\t\r\n])([ \u00a0]*)([=+@＝＋－＠-])", r"\1\2'\3")
        return pc.if_else(pc.or_(are_decimal(texts), are_decimal(texts, ",")), texts, changed)

    cells = [of(column) if is_text(column) else column for column in columns.columns]
    return pyarrow.table(cells, of(pyarrow.array(columns.column_names)).to_pylist())


def _opened(path: Path, is_csv: bool, schema: Any) -> Any:
    if is_csv:
        return csv.CSVWriter(path, schema, write_options=csv.WriteOptions(quoting_style="needed"))
    return parquet.ParquetWriter(path, schema)


@contextmanager
def _written(output: Path) -> Iterator[Path]:
    """A temporary file, which gets its name when all is written."""
    temporary = output.with_name(f".{output.name}.{secrets.token_hex(4)}")
    try:
        os.close(for_owner(str(temporary), os.O_WRONLY | os.O_CREAT | os.O_EXCL))
        yield temporary
        os.replace(temporary, output)
    except OSError as error:
        raise InputError(f"{output} cannot be written: {error.strerror or error}. Choose another place.") from None
    finally:
        temporary.unlink(missing_ok=True)
