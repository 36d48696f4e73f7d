"""The different values of a column and how often each occurs, for guesses. One column is looked at at a time."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from ..errors import DataError
from ..tabular import Marks, are_decimal, emptied, holds_dates, is_text, meanings, numbers, resolved
from ..tabular.table_files import pc, pyarrow, types
from .tables import is_bytes

# -- Which columns of a table hold texts, for the draft that `epsilons init` writes: a guess, by names and cells

#: Words in the names of columns of texts. They make texts of a few words, such as titles, recognised.
NAMES = re.compile(
    "texts?|reviews?|comments?|notes?|messages?|descriptions?|summary|sentences?|premise|hypothesis|questions?|answers?"
    "|abstract|body|content|feedback|titles?|headlines?|tweets?|posts?|utterances?|remarks?|complaints?|narrative"
    "|transcript"
)
#: Words in the names of columns that say who or where somebody is, or where something is stored. They are no texts.
CONTACTS = re.compile("address|addresses|street|e?mails?|phone|urls?|uri|links?|files?|paths?|authors?|username")
#: The first cells of a column that are examined.
SAMPLE = 10_000
#: A text has this many words; fewer, down to one, in a column with a name in NAMES.
LEAST_WORDS = 5
#: In scripts that have no spaces between words, a text has this many characters.
LEAST_CHARACTERS = 12
_WORD = re.compile(r"[^\W\d_]{2,}")
_WITHOUT_SPACES = re.compile(r"[\u0e00-\u0eff\u1000-\u109f\u3040-\u30ff\u3400-\u9fff]")


def holds_texts(name: str, cells: Sequence[str | None]) -> bool:
    """Whether a column seems to hold texts: mostly different cells, of several words.

    >>> holds_texts("note", ["a cough for two weeks", "pain in the left knee", None])
    True
    >>> holds_texts("note", ["A17-003", "B22-901", "C03-117"]), holds_texts("street", ["12 High Street, Old Town"] * 2)
    (False, False)
    """
    filled = [cell for cell in cells[:SAMPLE] if cell and cell.strip()]
    different = len(set(filled))
    if different <= max(0.1 * len(filled), min(50, 0.5 * len(filled))) or _has_word(name, CONTACTS):
        return False
    if _has_word(name, NAMES) and not _are_codes(filled):
        return True
    return median(map(_size, filled)) >= LEAST_WORDS


def are_short(cells: Sequence[str | None]) -> bool:
    """Whether texts are so short that their characters say more than their words: names, titles."""
    filled = [cell for cell in cells[:SAMPLE] if cell and cell.strip()]
    return bool(filled) and median(map(_size, filled)) < LEAST_WORDS


def _has_word(name: str, words: re.Pattern[str]) -> bool:
    return any(words.fullmatch(word) for word in re.split(r"[^a-z]+", name.lower()))


def _size(cell: str) -> float:
    """Pieces between spaces that hold a word. In scripts without spaces, characters count as parts of words."""
    start = cell[:1000]
    characters = len(_WITHOUT_SPACES.findall(start))
    return max(
        sum(_WORD.search(piece) is not None for piece in start.split()), LEAST_WORDS * characters / LEAST_CHARACTERS
    )


def _are_codes(filled: Sequence[str]) -> bool:
    """Whether most cells are one piece with a digit in it, or have no word."""
    codes = [not _WORD.search(cell) or (len(cell.split()) == 1 and bool(re.search(r"\d", cell))) for cell in filled]
    return sum(codes) > len(codes) / 2


# -- The different values of a column and how often each occurs, for guesses. One column is looked at at a time

Kind = Literal["number", "bool", "date", "text", "bytes", "other"]


@dataclass(frozen=True, eq=False)
class Values:
    """A column's different values, without empty cells.

    cells    the different cells, as the file spells them
    counts   how often each occurs
    sample   the first cells
    missing  what cells that are no budget hold, for a column of budgets
    """

    name: str
    kind: Kind
    cells: Any
    counts: npt.NDArray[np.int64]
    sample: list[Any]
    marks: Marks
    missing: tuple[str, ...] = ()

    @property
    def filled(self) -> int:
        """The number of cells that are not empty."""
        return int(self.counts.sum())

    @cached_property
    def numbers(self) -> npt.NDArray[np.float64]:
        """The cells as numbers."""
        return numbers(_chunked(self.cells), self.name, Path(), DataError, self.marks)

    @cached_property
    def _index(self) -> tuple[npt.NDArray[Any], npt.NDArray[np.int64]]:
        """(different values, their counts): of numbers, 7 and 7.0 are one value."""
        if self.kind not in ("number", "bool"):
            return np.empty(0), self.counts
        cells = self.numbers if self.kind == "number" else _truths(self.cells)
        values, place = np.unique(cells, return_inverse=True)
        return values, np.bincount(place, weights=self.counts, minlength=len(values)).astype(np.int64)

    def __len__(self) -> int:
        return len(self._index[1])

    def common(self, least: int) -> int:
        """How many values occur this often."""
        return int((self._index[1] >= least).sum())

    def sorted(self, least: int = 1) -> list[Any]:
        """The values that occur this often, sorted: numbers, true and false as such, and others as they are spelled."""
        values, counts = self._index
        if self.kind == "bool":
            return [bool(value) for value in values[counts >= least]]
        if self.kind == "number":
            return [int(v) if self.are_whole and abs(v) < 2**53 else float(v) for v in values[counts >= least].tolist()]
        kept = self.cells.filter(pyarrow.array(counts >= least)).to_pylist()
        return sorted(kept, key=lambda value: (str(type(value)), value))

    @property
    def are_whole(self) -> bool:
        """Whether all numbers are whole, and spelled so: 7, and not 7.0."""
        if is_text(self.cells):
            return bool(pc.all(pc.match_substring_regex(_trimmed(self.cells), r"\A[+-]?[0-9]+\z")).as_py())
        return bool((self.numbers == np.floor(self.numbers)).all())

    @property
    def has_leading_zeros(self) -> bool:
        """Whether some number begins with a zero, like 007."""
        return is_text(self.cells) and bool(pc.any(pc.match_substring_regex(_trimmed(self.cells), r"\A0[0-9]")).as_py())


def values_of(table: Any, name: str, path: Path, marks: Marks, budgets: bool = False) -> Values:
    """The different values of a column.

    budgets  True for the column of budgets: 0, infinite and empty cells are no budgets, but may mean something
    """
    column = resolved(table.column(name))
    if is_bytes(column.type) or types.is_nested(column.type):
        kind: Kind = "bytes" if is_bytes(column.type) else "other"
        return Values(name, kind, pyarrow.array([], pyarrow.string()), np.empty(0, dtype=np.int64), [], marks)
    sample = column.slice(0, SAMPLE).to_pylist()
    counted = pc.value_counts(column)
    cells, counts = counted.field("values"), np.asarray(counted.field("counts"), dtype=np.int64)
    is_filled = pc.is_valid(emptied(cells))
    if types.is_floating(cells.type):
        is_filled = pc.and_(is_filled, pc.invert(pc.is_nan(cells).fill_null(False)))
    missing = ["blank"] if pc.all(is_filled).as_py() is False else []
    cells, counts = cells.filter(is_filled), counts[np.asarray(is_filled)]
    if budgets:
        cells, counts, more = _offered(cells, counts, marks)
        missing += more
    kind = _kind(cells, sample, marks)
    if budgets and kind == "bool" and is_text(cells):
        kind = "text"  # tiers are compared as they are spelled
    found = Values(name, kind, cells, counts, sample, marks, tuple(missing))
    if kind == "number" or (kind == "text" and _are_thousands(cells)):  # refuses marks between thousands
        numbers(_chunked(cells) if budgets else column, name, path, DataError, marks)
    return found


def _offered(cells: Any, counts: npt.NDArray[np.int64], marks: Marks) -> tuple[Any, npt.NDArray[np.int64], list[str]]:
    """The cells that may be budgets, their counts, and what the others hold, if there are numbers among the rest."""
    if not (is_text(cells) or is_number(cells.type)):
        return cells, counts, []
    said = np.array([meanings(cell, marks.decimal)[0] for cell in cells.to_pylist()], dtype=object)
    rest = (said != "zero") & (said != "infinite")
    if is_text(cells) and not pc.all(are_decimal(_trimmed(cells.filter(rest)), marks.decimal)).as_py():
        return cells, counts, []  # names of tiers
    found = [name for name in ("zero", "infinite") if name in said]
    return cells.filter(rest), counts[rest], found


def is_number(kind: Any) -> bool:
    """Whether columns of this pyarrow type hold numbers."""
    return bool(types.is_integer(kind) or types.is_floating(kind) or types.is_decimal(kind))


def _kind(cells: Any, sample: list[Any], marks: Marks) -> Kind:
    kind = cells.type
    if is_number(kind):
        return "number"
    if types.is_boolean(kind):
        return "bool"
    if types.is_date(kind) or types.is_timestamp(kind):
        return "date"
    if not is_text(cells):
        return "other"
    texts = _trimmed(cells)
    if len(texts) and pc.all(are_decimal(texts, marks.decimal)).as_py():
        return "number"
    if len(texts) and set(map(str.lower, pc.unique(texts).slice(0, 9).to_pylist())) <= {"true", "false"}:
        return "bool"
    return "date" if holds_dates(pyarrow.chunked_array([pyarrow.array(sample, pyarrow.string())])) else "text"


def decimal_mark(table: Any, path: Path) -> str | None:
    """The decimal mark that a table's cells show; None if they show none. Raises DataError if they show both.

    table  with all cells as written
    """
    shown: dict[str, str] = {}
    for name in table.column_names:
        column = table.column(name)
        if not is_text(column):
            continue
        texts = pc.drop_null(emptied(_trimmed(pc.unique(column.cast("string")))))
        for mark in (".", ","):
            if _shows(texts, mark):
                shown.setdefault(mark, name)
    if len(shown) == 2:
        raise DataError(
            f"Columns of {path} have different decimal marks: {shown['.']!r} a point, {shown[',']!r} a comma. Write "
            "all numbers with one mark."
        )
    return next(iter(shown), None)


def _shows(texts: Any, mark: str) -> bool:
    """Whether all cells are numbers, and one of them shows that this mark is that of decimals."""
    with_mark = texts.filter(pc.match_substring(texts, mark))
    if not len(with_mark) or not pc.all(are_decimal(texts, mark)).as_py():
        return False
    thousands = rf"\A[+-]?[1-9][0-9]{{0,2}}([{mark}][0-9]{{3}})+\z"
    return not pc.all(pc.match_substring_regex(with_mark, thousands)).as_py()


def _are_thousands(texts: Any) -> bool:
    """Whether all texts are numbers with marks between thousands, like 1,234 or 1.234,56 or 12."""
    pattern = r"[0-9]{1,3}|[1-9][0-9]{0,2}(,[0-9]{3})+([.][0-9]+)?|[1-9][0-9]{0,2}([.][0-9]{3})+(,[0-9]+)?"
    return len(texts) > 0 and bool(pc.all(pc.match_substring_regex(_trimmed(texts), rf"\A[+-]?({pattern})\z")).as_py())


def _truths(cells: Any) -> npt.NDArray[np.bool_]:
    """Cells of true and false as such."""
    if not is_text(cells):
        return np.asarray(cells)
    return np.array([text.strip(" \t").lower() == "true" for text in cells.to_pylist()])


def _trimmed(cells: Any) -> Any:
    return pc.utf8_trim(cells, " \t")


def _chunked(cells: Any) -> Any:
    return pyarrow.chunked_array([cells])
