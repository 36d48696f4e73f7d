"""Large files in the place of their pyarrow.Table: columns are read when they are asked for, and few are kept.

A text file is parsed once for each group of columns. So it takes longer to read, and no copy of it is made.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import InputError
from .cells import EMPTY
from .reading import check_header, ends_without_a_record, header, read_columns, read_table, reader
from .table_files import UNSTATED, Marks, TextFile, check_is_file, is_parquet, parquet, pyarrow, text_file, with_marks

#: Files with more bytes are read by column.
LARGE = 1 << 26
#: Bytes of the columns of a text file that are read at once.
GROUP = 1 << 27


class ByColumn:
    """A file that offers what is used of a pyarrow.Table. The columns that were read last are kept.

    schema  names and types of the columns. Those of a text file count as text
    sizes   columns -> bytes in memory, in the order in which they will be asked for; others are read alone
    read    names -> the pyarrow.Table of these columns
    used    (rows of the file,) which rows are in the table
    """

    def __init__(
        self,
        schema: Any,
        sizes: Mapping[str, int],
        read: Callable[[Sequence[str]], Any],
        used: npt.NDArray[np.bool_],
    ) -> None:
        self.schema, self.column_names, self.num_rows = schema, list(schema.names), int(used.sum())
        self._sizes, self._read, self._used = dict(sizes), read, used
        self._latest: Any = None

    def __len__(self) -> int:
        return self.num_rows

    def column(self, name: str | int) -> Any:
        """The pyarrow.ChunkedArray of a column."""
        name = name if isinstance(name, str) else self.column_names[name]
        if self._latest is None or name not in self._latest.column_names:
            self.forget()
            found = self._read(self._group(name))
            self._latest = found if self._used.all() else found.filter(pyarrow.array(self._used))
        return self._latest.column(name)

    def forget(self) -> None:
        """Free the columns that are kept."""
        self._latest = None
        release()

    def select(self, names: Sequence[str]) -> Any:
        """The pyarrow.Table of these columns."""
        table = pyarrow.table({name: self.column(name) for name in names})
        return table.replace_schema_metadata(self.schema.metadata)

    def filter(self, mask: Any) -> ByColumn:
        """The same of the rows where `mask` (rows,) is True."""
        used = self._used.copy()
        used[used] = np.asarray(mask)
        return ByColumn(self.schema, self._sizes, self._read, used)

    def _group(self, name: str) -> list[str]:
        """This column and those that will be asked for next, as far as they fit."""
        order = list(self._sizes)
        group, room = [name], GROUP - self._sizes.get(name, GROUP)
        for other in order[order.index(name) + 1 :] if name in order else ():
            room -= self._sizes[other]
            if room < 0:
                break
            group.append(other)
        return group


def release() -> None:
    """Give memory that is free back to the system, which allocators keep otherwise: of pyarrow, and malloc."""
    for pool in (pyarrow.default_memory_pool(), pyarrow.system_memory_pool()):
        pool.release_unused()


def open_table(
    path: Path, what: str, error: type[InputError], texts: Collection[str] = (), marks: Marks = UNSTATED
) -> Any:
    """The table in a file as `read_table` reads it; a large file as `ByColumn`. Raises `error` as `read_table` does.

    texts  in the order in which they will be asked for
    """
    check_is_file(path, what, error)
    before = path.stat()
    found = _examined(path, what, error, texts, marks) if before.st_size > LARGE else None
    if found is None:
        return read_table(path, what, error, texts, marks)
    source, schema, rows, sizes = found

    def read(names: Sequence[str]) -> Any:
        table, now = read_columns(source, error, names, texts), path.stat()
        is_same = (now.st_size, now.st_mtime_ns) == (before.st_size, before.st_mtime_ns)
        if not is_same or len(table) != rows or {*table.column_names} != {*names}:
            raise error(f"{path} changed while it was read. Start again.")
        return table

    table = ByColumn(schema, sizes, read, np.ones(rows, dtype=bool))
    if source is not path:
        check_header(table, path, error)
    return table


def _examined(
    path: Path, what: str, error: type[InputError], texts: Collection[str], marks: Marks
) -> tuple[Path | TextFile, Any, int, dict[str, int]] | None:
    """(what `read_columns` takes, schema, rows, sizes of columns) of a file; None if it is to be read whole.

    That is a file that is damaged, whose last row may be no record, with very long rows, or two columns of one name.
    """
    source: Path | TextFile = path
    rows, last, sizes = 0, None, Counter[str]()
    try:
        if is_parquet(path):
            schema, rows = parquet.read_schema(path), parquet.read_metadata(path).num_rows
        else:
            source = text_file(path, error, marks)
            names = header(source, what, error)
            with reader(source, names) as parts:
                for last in filter(len, parts):
                    rows += len(last)
                    sizes.update({name: last.column(name).nbytes for name in texts if names.count(name) == 1})
                schema = with_marks(parts.schema.empty_table(), source.marks).schema
    except (pyarrow.ArrowException, OSError, UnicodeError, EOFError):
        return None
    if not rows or len({*schema.names}) < len(schema.names) or (last is not None and _may_be_no_record(last, source)):
        return None
    return source, schema, rows, sizes


def _may_be_no_record(last: Any, file: Any) -> bool:
    """Whether the last row of a text file is empty, or follows a quotation mark that is not closed."""
    return all(cells[-1].as_py() in EMPTY for cells in last.columns) or ends_without_a_record(last, file)
