"""What a file is, by its name and its first bytes: a table as text, a .parquet table, or no table."""

from __future__ import annotations

import codecs
import io
import re
import zlib
from csv import Error, reader
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal

from ..errors import InputError, Package

# -- pyarrow, which is imported when a table is first read: it is in the extra `app`

pyarrow, pc, types = Package("pyarrow"), Package("pyarrow.compute"), Package("pyarrow.types")
csv, parquet = Package("pyarrow.csv"), Package("pyarrow.parquet")


# -- What separates the cells of a text file, and what marks the decimals of its numbers: stated, or found by a rule
#
# The rule looks at the first rows. A mark may separate the cells if it occurs in the first line, and if it cuts each of
# these rows into as many cells as the first line. If exactly one mark does, it is the separator. Several marks are
# ambiguous, and are refused.

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
        rows = [row for _, row in zip(range(ROWS + 1), reader(io.StringIO(start), delimiter=mark), strict=False)]
    except Error:
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


# -- What a file is, by its name and its first bytes: a table as text, a .parquet table, or no table

#: The endings of the names of tables.
TABLES = (".csv", ".tsv", ".csv.gz", ".tsv.gz", ".parquet")

GZIP = b"\x1f\x8b"
#: The first bytes of a file that is examined.
HEAD = 1 << 16

#: First bytes of files that are no tables as text: what they are, and what to do.
_EXPORT = "Open it in a spreadsheet program and export the sheet as CSV (UTF-8)."
_OTHERS: tuple[tuple[bytes, str, str], ...] = (
    (b"PAR1", "a Parquet file", "Give it a name that ends in .parquet."),
    (b"PK\x03\x04", "a zip archive or a workbook (.xlsx, .ods)", f"{_EXPORT} Files in an archive must be unpacked."),
    (b"\xd0\xcf\x11\xe0", "a workbook of an old Excel (.xls)", _EXPORT),
    (b"\x89PNG", "a PNG image", "Name a table."),
    (b"\xff\xd8\xff", "a JPEG image", "Name a table."),
    (b"GIF8", "a GIF image", "Name a table."),
    (b"%PDF", "a PDF document", "Name a table."),
    (b"SQLite format 3", "an SQLite data base", "Export its table as CSV."),
    (b"\x89HDF", "an HDF5 file", "Export its table as CSV or Parquet."),
    (b"ARROW1", "an Arrow or Feather file", "Save it as Parquet, with pyarrow.parquet.write_table."),
    (b"BZh", "compressed by bzip2", "Unpack it, or compress it by gzip and name it .csv.gz."),
    (b"\xfd7zXZ", "compressed by xz", "Unpack it, or compress it by gzip and name it .csv.gz."),
    (b"(\xb5/\xfd", "compressed by zstd", "Unpack it, or compress it by gzip and name it .csv.gz."),
    (b"\x80\x04\x95", "a Python pickle", "Save it as CSV or Parquet."),
    (b"\x80\x05\x95", "a Python pickle", "Save it as CSV or Parquet."),
)
#: Byte-order marks; that of UTF-32 begins like that of UTF-16.
_ENCODINGS: tuple[tuple[bytes, str], ...] = (
    (codecs.BOM_UTF8, "utf-8"),
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)


@dataclass(frozen=True)
class TextFile:
    """How a text file is read.

    is_gzip    True if it is compressed
    encoding   as its byte-order mark says; UTF-8 without one
    skip       lines before the header: 1 if the first line is Excel's `sep=;`
    marks      its separator, and the decimal mark if it is stated
    start      its first lines, for checks
    """

    path: Path
    is_gzip: bool
    encoding: str
    skip: int
    marks: Marks
    start: str

    def open(self) -> BinaryIO | io.BufferedReader:
        """The bytes of the file, decompressed."""
        return opened(self.path, self.is_gzip)


def opened(path: Path, is_gzip: bool) -> BinaryIO | io.BufferedReader:
    """A stream of the bytes in a file, decompressed."""
    import gzip

    return gzip.open(path, "rb") if is_gzip else path.open("rb")  # type: ignore[return-value]  # both are binary


def is_table(path: Path) -> bool:
    """Whether the name of a file is that of a table.

    >>> is_table(Path("people.CSV")), is_table(Path("people.csv.gz")), is_table(Path("people.xlsx"))
    (True, True, False)
    """
    return path.name.lower().endswith(TABLES)


def is_parquet(path: Path) -> bool:
    """Whether the name of a file is that of a .parquet table."""
    return path.name.lower().endswith(".parquet")


def stem(path: Path) -> str:
    """The name of a file without its endings.

    >>> stem(Path("data/people.csv.gz")), stem(Path("people.v2.csv"))
    ('people', 'people.v2')
    """
    ending = next((ending for ending in sorted(TABLES, key=len, reverse=True) if is_named(path, ending)), path.suffix)
    return path.name[: len(path.name) - len(ending)]


def is_named(path: Path, ending: str) -> bool:
    """Whether the name of a file has this ending."""
    return path.name.lower().endswith(ending)


def check_is_file(path: Path, what: str, error: type[InputError]) -> None:
    """Raise `error` if there is no such file, or its name is not that of a table."""
    kinds = "a .csv, .tsv or .parquet file (.csv.gz, too)"
    if path.is_dir():
        raise error(f"{path} is a folder. The {what} file must be {kinds}, with one row per record.")
    if not is_table(path):
        export = f" {_EXPORT}" if path.suffix.lower() in (".xlsx", ".xls", ".ods") else ""
        raise error(f"The {what} file must be {kinds}, with one row per record; {path} is neither.{export}")
    if not path.is_file():
        raise error(f"No {what} file at {path}. Give {kinds}, with one row per record.")


def text_file(path: Path, error: type[InputError], stated: Marks = UNSTATED) -> TextFile:
    """How a text file is read. Raises `error` with the reason if it is no table as text."""
    try:
        with path.open("rb") as file:
            is_gzip = file.read(2) == GZIP
        with opened(path, is_gzip) as stream:
            head = stream.read(HEAD)
    except (OSError, EOFError, zlib.error) as problem:
        reason = problem.strerror if isinstance(problem, OSError) and problem.strerror else "its compression is damaged"
        raise error(f"{path} cannot be read: {reason}.") from None
    _check_kind(head, path, error)
    encoding = next((name for mark, name in _ENCODINGS if head.startswith(mark)), "utf-8")
    _check_zeros(head, encoding, path, error)
    start = _lines(head, encoding)
    if start.startswith("\ufeff"):
        raise error(f"{path} begins with two byte-order marks. Remove one, or export the table again as CSV (UTF-8).")
    if not start.strip():
        raise error(f"{path} holds only blank lines. Its first line must hold the names of its columns.")
    first, _, rest = start.partition("\n")
    declared = declared_by_excel(first)
    if declared is None:
        separator = separator_of(start, path, stated, error, is_whole=len(head) < HEAD)
        return TextFile(path, is_gzip, encoding, 0, Marks(separator, stated.decimal), start)
    if declared not in SEPARATORS or stated.separator not in (None, declared):
        raise error(
            f"The first line of {path} says that {declared!r} separates its cells, and "
            + ("the config or argument says another mark." if stated.separator else "that mark is not known.")
            + f" Known are {', '.join(SEPARATORS.values())}. Correct it, or remove that line."
        )
    return TextFile(path, is_gzip, encoding, 1, Marks(declared, stated.decimal), rest)


def _check_kind(head: bytes, path: Path, error: type[InputError]) -> None:
    if not head:
        raise error(f"{path} is empty. Its first line must hold the names of its columns.")
    for start, kind, advice in _OTHERS:
        if head.startswith(start):
            raise error(f"{path} is {kind}, and no table as text. {advice}")


def _check_zeros(head: bytes, encoding: str, path: Path, error: type[InputError]) -> None:
    """Text holds no bytes of zero, but in UTF-16 and UTF-32."""
    if encoding != "utf-8" or b"\0" not in head:
        return
    for name, odd in (("UTF-16LE", 1), ("UTF-16BE", 0)):
        if head[odd::2].count(0) > 0.4 * len(head) / 2:
            raise error(
                f"{path} seems to be {name} without a byte-order mark. Save it as UTF-8, for instance by: iconv -f "
                f"{name} -t UTF-8 {path} > utf-8.csv"
            )
    first = head.split(b"\n", 1)[0]
    if b"\0" in first or head.count(0) > len(head) / 10:
        raise error(
            f"{path} holds bytes of zero (NUL), so it is no table as text. Export the table again as CSV (UTF-8)."
        )


def _lines(head: bytes, encoding: str) -> str:
    """The first lines as text; bytes that cannot be decoded are replaced. A line that is cut off is left out."""
    decoder = codecs.getincrementaldecoder("utf-8-sig" if encoding == "utf-8" else encoding)("replace")
    text = decoder.decode(head).replace("\r\n", "\n").replace("\r", "\n")
    if len(head) < HEAD or "\n" not in text:
        return text
    return text[: text.rindex("\n") + 1]


def not_utf8(path: Path, error: type[InputError], where: str = "") -> InputError:
    """The error for text in another encoding. It says which are read, and how to convert the file."""
    if is_parquet(path):
        return error(f"{where}{path} is not UTF-8 text. Convert it.")
    return error(
        f"{where}{path} is not UTF-8 text, and has no byte-order mark of UTF-16 or UTF-32. Only these encodings are "
        f"read. Save it again as CSV (UTF-8). If it is of a Western European Windows, this converts it: iconv -f "
        f"WINDOWS-1252 -t UTF-8 {path} > utf-8.csv"
    )


def is_decodable(file: TextFile) -> bool:
    """Whether all of a text file is in its encoding."""
    decoder = codecs.getincrementaldecoder(file.encoding)()
    try:
        with file.open() as stream:
            while part := stream.read(1 << 20):
                decoder.decode(part)
            decoder.decode(b"", final=True)
    except UnicodeError:
        return False
    return True


def count_quotes(file: TextFile) -> int:
    """How many quotation marks a text file holds."""
    decoder, count = codecs.getincrementaldecoder(file.encoding)("replace"), 0
    with file.open() as stream:
        while part := stream.read(1 << 20):
            count += decoder.decode(part).count('"')
    return count
