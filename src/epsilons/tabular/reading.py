"""Reading a file as a pyarrow.Table, with errors that state the reason and quote no row."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..errors import InputError
from .cells import are_decimal, decimal, different, emptied, is_text
from .table_files import (
    SEPARATORS,
    UNSTATED,
    Marks,
    TextFile,
    check_is_file,
    count_quotes,
    csv,
    is_decodable,
    is_parquet,
    not_utf8,
    parquet,
    pc,
    pyarrow,
    text_file,
    types,
    with_marks,
)

#: Bytes that the reader parses at once; a row must fit.
BLOCK = 1 << 24


def read_table(
    path: Path,
    what: str,
    error: type[InputError],
    texts: Collection[str] = (),
    marks: Marks = UNSTATED,
    as_written: bool = False,
    columns: Collection[str] | None = None,
) -> Any:
    """The pyarrow.Table in a .csv, .tsv or .parquet file, one row per record. Raises `error`, without quoting a row.

    what        the kind of file, for messages ("budgets", "training data")
    texts       columns of a text file that are read as text, so that 007 and true stay as they are
    marks       the separator and the decimal mark of a text file, where they are stated
    as_written  True to read all columns of a text file as text, as dictionaries of their different cells
    columns     those that are needed of a .parquet file; if it has all of them, others are not read

    Text is in UTF-8, or as its byte-order mark says, and may be compressed by gzip. `marks_of` says by which marks a
    table was read.
    """
    check_is_file(path, what, error)
    if is_parquet(path):
        return _parquet(path, error, columns)
    file = text_file(path, error, marks)
    table = _text(file, error, texts, as_written)
    _check_end(table, file, error)
    check_header(table, path, error)
    return with_marks(table, file.marks)


def check_header(table: Any, path: Path, error: type[InputError]) -> None:
    """Raise `error` if the first line of a text file is a record."""
    if _has_no_header(table):
        raise error(
            f"The first line of {path} looks like a record, not like the names of columns. Put a line with their names "
            "above it. (If these are names, rename a column that is called like one of its own values.)"
        )


def read_columns(
    file: Path | TextFile, error: type[InputError], names: Collection[str], texts: Collection[str] = ()
) -> Any:
    """The pyarrow.Table of these columns of a file, which has them; a Path is that of a .parquet file."""
    return _parquet(file, error, names) if isinstance(file, Path) else _text(file, error, texts, False, names)


def _parquet(path: Path, error: type[InputError], columns: Collection[str] | None) -> Any:
    try:
        has_all = columns is not None and set(columns) <= {*parquet.read_schema(path).names}
        return parquet.read_table(path, columns=columns if has_all else None)
    except (pyarrow.ArrowException, OSError):
        raise error(f"{path} cannot be read as Parquet: it is damaged, or another kind of file.") from None


def _text(
    file: TextFile, error: type[InputError], texts: Collection[str], as_written: bool, only: Collection[str] = ()
) -> Any:
    kind = pyarrow.dictionary(pyarrow.int32(), pyarrow.string()) if as_written else pyarrow.string()
    parse = {"delimiter": file.marks.separator, "ignore_empty_lines": False, "newlines_in_values": True}
    read = {"encoding": file.encoding, "skip_rows": file.skip, "block_size": BLOCK}
    if only:  # threads read far ahead of those that parse
        read |= {"block_size": PART_BLOCK, "use_threads": False}
    convert = {"decimal_point": file.marks.decimal or ".", "strings_can_be_null": False}
    convert["include_columns"] = list(only)  # none: all
    try:
        if as_written:
            with file.open() as stream:
                texts = csv.open_csv(stream, csv.ReadOptions(**read), csv.ParseOptions(**parse)).schema.names
        types = csv.ConvertOptions(column_types=dict.fromkeys(texts, kind), **convert)
        with file.open() as stream:
            table = csv.read_csv(stream, csv.ReadOptions(**read), csv.ParseOptions(**parse), types)
        _ = table.column_names  # names are decoded here
        return table
    except (pyarrow.ArrowException, OSError, UnicodeError, EOFError) as problem:
        # pyarrow's message quotes the row that it failed on, which is one person's data, so only its kind is used.
        if not is_decodable(file):
            damaged = f"{file.path} begins as {file.encoding.upper()} and is damaged. Save it again as CSV (UTF-8)."
            raise (not_utf8(file.path, error) if file.encoding == "utf-8" else error(damaged)) from None
        raise error(_reason(file, read, parse, problem)) from None


def _reason(file: TextFile, read: dict[str, Any], parse: dict[str, Any], problem: Exception) -> str:
    """Why a file cannot be read."""
    rows: list[tuple[int | None, int, int]] = []

    def note(row: Any) -> str:
        rows.append((row.number, row.actual_columns, row.expected_columns))
        return "skip"

    try:
        with file.open() as stream:  # in one thread, so that rows have numbers
            csv.read_csv(
                stream,
                csv.ReadOptions(**read, use_threads=False),
                csv.ParseOptions(**parse, invalid_row_handler=note),
            )
    except Exception:  # it failed before
        pass
    if not rows:
        if isinstance(problem, (OSError, EOFError)) and file.is_gzip:
            return f"{file.path} cannot be read: its compression is damaged."
        return (
            f"{file.path} cannot be read as CSV: expected a table with the same columns in every row, and rows of less "
            f"than {BLOCK >> 20} MiB. A quotation mark that is never closed joins rows."
        )
    number, actual, expected = rows[0]
    first = "" if number is None else f", first in row {number + file.skip:,} counted from 1 with the header"
    hint = ""
    if file.marks.separator == "," and actual > expected:
        hint = (
            " If its numbers have decimal commas, its cells need another separator, or quotation marks around numbers."
        )
    return (
        f"{file.path} cannot be read as CSV: the header has {expected:,} cells, separated by "
        f"{SEPARATORS[file.marks.separator or ',']}, and {len(rows):,} rows have another number (got {actual:,}"
        f"{first}). Every row needs the same columns; cells that hold a separator or a line break need quotation marks."
        f"{hint}"
    )


def _check_end(table: Any, file: TextFile, error: type[InputError]) -> None:
    """Refuse a last row that is no record: a blank line, or all that follows a quotation mark that is not closed."""
    if not table.num_rows:
        return
    last = [column[-1].as_py() if is_text(column) else column[-1].is_valid or None for column in table.columns]
    if any(isinstance(cell, str) and ("\n" in cell or "\r" in cell) for cell in last) and count_quotes(file) % 2:
        raise error(
            f"{file.path} cannot be read: a quotation mark is opened and never closed, so the lines after it are one "
            "cell. Close it; inside of a cell, write it twice."
        )
    if len(last) > 1 and all(cell is None or cell == "" for cell in last):
        raise error(
            f"{file.path} ends with blank lines or rows of empty cells. Remove them: they would count as records."
        )


def _has_no_header(table: Any) -> bool:
    """Whether the first line is a record: a number above every numeric column, or a text repeated in its column.

    The names 0, 1, 2, …, which pandas gives to columns without names, count as names.
    """
    names = table.column_names
    if names == [str(column) for column in range(len(names))]:
        return False
    above = []
    for place, name in enumerate(names):
        kind = (cells := table.column(place)).type
        if types.is_integer(kind) or types.is_floating(kind) or _holds_numbers(cells):
            if name and decimal(name.replace(",", ".", 1)) is None:
                return False
            above.append(name)
    if above:
        return any(above)
    texts = [column for column in range(len(names)) if names[column] and is_text(table.column(column))]
    return any(bool(pc.is_in(pyarrow.scalar(names[i]), value_set=different(table.column(i))).as_py()) for i in texts)


def _holds_numbers(cells: Any) -> bool:
    """Whether a column of text holds numbers only, and at least one."""
    if not is_text(cells):
        return False
    filled = pc.utf8_trim(pc.drop_null(emptied(different(cells))), " \t")
    return len(filled) > 0 and any(pc.all(are_decimal(filled, mark)).as_py() for mark in (".", ","))


# -- Reading a file in parts of bounded size, by the same rules as `read_table`

#: Bytes that the reader parses at once; a row must fit. pyarrow reads up to 32 of them ahead.
PART_BLOCK = 1 << 22


def read_parts(
    path: Path, what: str, error: type[InputError], columns: Collection[str], rows: int, marks: Marks = UNSTATED
) -> tuple[list[str], Iterator[Any]]:
    """(names of the columns, parts of at most `rows` rows as pyarrow.Table). Raises `error` as `read_table` does.

    columns  those that are needed; a .parquet file is not read beyond them. A text file is read as text

    What a point in a number means is judged by the first part of a text file, and holds for the others.
    """
    check_is_file(path, what, error)
    if is_parquet(path):
        return _of_parquet(path, what, error, columns, rows)
    file = text_file(path, error, marks)
    return header(file, what, error), _of_text(file, what, error, rows)


def slices(table: Any, rows: int) -> Iterator[Any]:
    """The parts of a table in memory."""
    return (table.slice(start, rows) for start in range(0, table.num_rows, rows))


def _of_parquet(
    path: Path, what: str, error: type[InputError], columns: Collection[str], rows: int
) -> tuple[list[str], Iterator[Any]]:
    try:
        file = parquet.ParquetFile(path)
        names = list(file.schema_arrow.names)
    except (pyarrow.ArrowException, OSError):
        raise _part_error(path, what, error) from None

    def parts() -> Iterator[Any]:
        try:
            for batch in file.iter_batches(rows, columns=[name for name in columns if name in names]):
                yield from slices(pyarrow.Table.from_batches([batch]), rows)
        except (pyarrow.ArrowException, OSError):
            raise _part_error(path, what, error) from None

    return names, parts()


def header(file: TextFile, what: str, error: type[InputError]) -> list[str]:
    """The names of a text file's columns."""
    try:
        with reader(file, ()) as parts:
            return list(parts.schema.names)
    except (pyarrow.ArrowException, OSError, UnicodeError, EOFError):
        raise _part_error(file.path, what, error, file.marks) from None


def _of_text(file: TextFile, what: str, error: type[InputError], rows: int) -> Iterator[Any]:
    names, marks, last = header(file, what, error), file.marks, None
    try:
        with reader(file, names) as batches:
            for batch in batches:
                for part in slices(pyarrow.Table.from_batches([batch]), rows):
                    last = part
                    yield with_marks(part, marks)
                    marks = replace(marks, decimal=marks.decimal or ".")
    except (pyarrow.ArrowException, OSError, UnicodeError, EOFError):
        raise _part_error(file.path, what, error, file.marks) from None
    if last is not None and ends_without_a_record(last, file):
        raise _part_error(file.path, what, error, file.marks)


class _Bytes:
    """A stream that can be ended early: from then on it has no more bytes."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self.closed = False

    def read(self, size: int = -1) -> bytes:
        return b"" if self.closed else self._stream.read(size)

    def close(self) -> None:
        self.closed = True


@contextmanager
def reader(file: TextFile, names: Collection[str]) -> Iterator[Any]:
    """A reader of all columns, these as text.

    pyarrow reads ahead in threads of its own. A thread that calls Python while the process ends aborts it, so the
    stream is ended, and what was read ahead is consumed, also if the caller stops early.
    """
    with file.open() as raw:
        stream = _Bytes(raw)
        batches = csv.open_csv(
            stream,
            csv.ReadOptions(encoding=file.encoding, skip_rows=file.skip, block_size=PART_BLOCK),
            csv.ParseOptions(delimiter=file.marks.separator, ignore_empty_lines=False, newlines_in_values=True),
            csv.ConvertOptions(column_types=dict.fromkeys(names, pyarrow.string()), strings_can_be_null=False),
        )
        try:
            yield batches
        finally:
            stream.close()
            with suppress(pyarrow.ArrowException, OSError, UnicodeError, EOFError, ValueError):
                for _ in batches:
                    pass


def ends_without_a_record(part: Any, file: TextFile) -> bool:
    """Whether the last row may be a blank line, or hold all that follows a quotation mark that is not closed."""
    cells = [column[-1].as_py() for column in part.columns]
    if len(cells) > 1 and not any(cells):
        return True
    return any("\n" in cell or "\r" in cell for cell in cells if cell) and count_quotes(file) % 2 == 1


def _part_error(path: Path, what: str, error: type[InputError], marks: Marks = UNSTATED) -> InputError:
    """Why a file cannot be read: what `read_table` says of it as a whole."""
    try:
        read_table(path, what, error, (), marks)
    except InputError as problem:
        return problem
    return error(
        f"{path} cannot be read in parts: a row has more than {PART_BLOCK >> 20} MiB, or the file changed meanwhile. "
        "Shorten its texts, or save it as Parquet."
    )
