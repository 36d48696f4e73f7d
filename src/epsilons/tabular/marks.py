"""What separates the cells of a text file, and what marks the decimals of its numbers: stated, or found by a rule.

The rule looks at the first rows. A mark may separate the cells if it occurs in the first line, and if it cuts each of
these rows into as many cells as the first line. If exactly one mark does, it is the separator. Several marks are
ambiguous, and are refused.
"""

from __future__ import annotations

import csv
import io
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ..errors import InputError

Separator = Literal[",", ";", "\t", "|"]
Decimal = Literal[".", ","]

SEPARATORS: dict[str, str] = {",": "commas", ";": "semicolons", "\t": "tabs", "|": "vertical bars"}

#: The first rows, which decide on the separator.
ROWS = 50

#: Keys of a table's schema, under which the reader keeps the marks.
_SEPARATOR, _DECIMAL = b"epsilons.separator", b"epsilons.decimal"


@dataclass(frozen=True)
class Marks:
    """separator: between cells; decimal: in numbers, "." or ",". None where it is not stated."""

    separator: str | None = None
    decimal: str | None = None


#: Nothing is stated.
UNSTATED = Marks()


def separator_of(start: str, path: Path, stated: Marks, error: type[InputError], is_whole: bool = True) -> str:
    """The separator of a text file. Raises `error` if several are possible.

    start     the first lines of the file
    is_whole  True if these are all lines; else the last row may be cut off

    >>> separator_of("a;b\\n1,5;2,5\\n", Path("a.csv"), UNSTATED, InputError)
    ';'
    """
    if stated.separator is not None:
        return stated.separator
    rows = {mark: _rows(start, mark) for mark in SEPARATORS if _cuts_all_rows(start, mark, is_whole)}
    # Cut by a wrong mark, a quotation mark may begin a cell that holds the lines below.
    possible = [mark for mark in rows if len(rows[mark]) == max(map(len, rows.values()))]
    is_tsv = path.name.lower().endswith((".tsv", ".tsv.gz"))
    if is_tsv and (not possible or "\t" in possible):
        return "\t"
    if len(possible) > 1 or is_tsv:
        named, first = " or ".join(SEPARATORS[mark] for mark in possible), possible[0].replace("\t", "\\t")
        raise error(
            f'The cells of {path} may be separated by {named}. State which: separator = "{first}" in the '
            f"[data] or [budgets] of a config, --separator for `epsilons init`, separator=… in Python."
        )
    if possible:
        return possible[0]
    widths = {mark: len(next(iter(_rows(start, mark)), [])) for mark in SEPARATORS}
    widest = max(SEPARATORS, key=lambda mark: widths[mark])
    return ";" if widths[widest] == 1 and stated.decimal == "," else widest


def _rows(start: str, mark: str) -> list[list[str]]:
    """The first rows without blank lines; none if the file cannot be cut by this mark."""
    try:
        rows = [row for _, row in zip(range(ROWS + 1), csv.reader(io.StringIO(start), delimiter=mark), strict=False)]
    except csv.Error:
        return []
    return [row for row in rows if row]


def _cuts_all_rows(start: str, mark: str, is_whole: bool) -> bool:
    rows = _rows(start, mark)
    rows = rows if is_whole or len(rows) > ROWS or len(rows) < 2 else rows[:-1]
    return bool(rows) and len(rows[0]) > 1 and all(len(row) == len(rows[0]) for row in rows)


def declared_by_excel(line: str) -> str | None:
    """The separator that a first line like `sep=;` declares, as Excel writes and reads it.

    >>> declared_by_excel("sep=;"), declared_by_excel("sepal,petal")
    (';', None)
    """
    match = re.fullmatch(r'"?sep=([^"])"?', line.rstrip("\r\n"), re.IGNORECASE)
    return match[1] if match else None


def with_marks(table: Any, marks: Marks) -> Any:
    """The same pyarrow.Table, which keeps the marks that its file was read by."""
    values = {_SEPARATOR: marks.separator, _DECIMAL: marks.decimal}
    kept = {key: value.encode() for key, value in values.items() if value is not None}
    return table.replace_schema_metadata({**(table.schema.metadata or {}), **kept})


def marks_of(table: Any) -> Marks:
    """The marks that a table's file was read by."""
    kept = table.schema.metadata or {}
    separator, mark = kept.get(_SEPARATOR), kept.get(_DECIMAL)
    return Marks(None if separator is None else separator.decode(), None if mark is None else mark.decode())
