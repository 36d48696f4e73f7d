"""Reading a file in parts of bounded size, by the same rules as `read_table`."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..errors import InputError
from .files import TextFile, check_is_file, count_quotes, is_parquet, text_file
from .marks import UNSTATED, Marks, with_marks
from .reading import read_table

#: Bytes that the reader parses at once; a row must fit. pyarrow reads up to 32 of them ahead.
BLOCK = 1 << 22


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
    return _header(file, what, error), _of_text(file, what, error, rows)


def slices(table: Any, rows: int) -> Iterator[Any]:
    """The parts of a table in memory."""
    return (table.slice(start, rows) for start in range(0, table.num_rows, rows))


def _of_parquet(
    path: Path, what: str, error: type[InputError], columns: Collection[str], rows: int
) -> tuple[list[str], Iterator[Any]]:
    import pyarrow
    from pyarrow import parquet

    try:
        file = parquet.ParquetFile(path)
        names = list(file.schema_arrow.names)
    except (pyarrow.ArrowException, OSError):
        raise _reason(path, what, error) from None

    def parts() -> Iterator[Any]:
        try:
            for batch in file.iter_batches(rows, columns=[name for name in columns if name in names]):
                yield from slices(pyarrow.Table.from_batches([batch]), rows)
        except (pyarrow.ArrowException, OSError):
            raise _reason(path, what, error) from None

    return names, parts()


def _header(file: TextFile, what: str, error: type[InputError]) -> list[str]:
    import pyarrow

    try:
        with _reader(file, ()) as reader:
            return list(reader.schema.names)
    except (pyarrow.ArrowException, OSError, UnicodeError, EOFError):
        raise _reason(file.path, what, error, file.marks) from None


def _of_text(file: TextFile, what: str, error: type[InputError], rows: int) -> Iterator[Any]:
    import pyarrow

    names, marks, last = _header(file, what, error), file.marks, None
    try:
        with _reader(file, names) as reader:
            for batch in reader:
                for part in slices(pyarrow.Table.from_batches([batch]), rows):
                    last = part
                    yield with_marks(part, marks)
                    marks = replace(marks, decimal=marks.decimal or ".")
    except (pyarrow.ArrowException, OSError, UnicodeError, EOFError):
        raise _reason(file.path, what, error, file.marks) from None
    if last is not None and _ends_without_a_record(last, file):
        raise _reason(file.path, what, error, file.marks)


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
def _reader(file: TextFile, names: Collection[str]) -> Iterator[Any]:
    """A reader of all columns, these as text.

    pyarrow reads ahead in threads of its own. A thread that calls Python while the process ends aborts it, so the
    stream is ended, and what was read ahead is consumed, also if the caller stops early.
    """
    import pyarrow
    from pyarrow import csv

    with file.open() as raw:
        stream = _Bytes(raw)
        reader = csv.open_csv(
            stream,
            csv.ReadOptions(encoding=file.encoding, skip_rows=file.skip, block_size=BLOCK),
            csv.ParseOptions(delimiter=file.marks.separator, ignore_empty_lines=False, newlines_in_values=True),
            csv.ConvertOptions(column_types=dict.fromkeys(names, pyarrow.string()), strings_can_be_null=False),
        )
        try:
            yield reader
        finally:
            stream.close()
            with suppress(pyarrow.ArrowException, OSError, UnicodeError, EOFError, ValueError):
                for _ in reader:
                    pass


def _ends_without_a_record(part: Any, file: TextFile) -> bool:
    """Whether the last row may be a blank line, or hold all that follows a quotation mark that is not closed."""
    cells = [column[-1].as_py() for column in part.columns]
    if len(cells) > 1 and not any(cells):
        return True
    return any("\n" in cell or "\r" in cell for cell in cells if cell) and count_quotes(file) % 2 == 1


def _reason(path: Path, what: str, error: type[InputError], marks: Marks = UNSTATED) -> InputError:
    """Why a file cannot be read: what `read_table` says of it as a whole."""
    try:
        read_table(path, what, error, (), marks)
    except InputError as problem:
        return problem
    return error(
        f"{path} cannot be read in parts: a row has more than {BLOCK >> 20} MiB, or the file changed meanwhile. "
        "Shorten its texts, or save it as Parquet."
    )
