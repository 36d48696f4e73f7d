"""Cells of a column: as text, as numbers, or empty."""

from __future__ import annotations

import math
import re
import unicodedata
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import InputError
from .table_files import UNSTATED, Marks, pc, pyarrow, types

#: A number as text: ASCII digits, a point, an exponent. 0x10, 1_0, 1,5, inf and nan do not match.
DECIMAL = r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?"
#: The same with a comma.
_WITH_COMMA = DECIMAL.replace(r"\.", ",")
#: Digits in groups of three, which a mark separates: thousands, or three decimals.
_GROUPS = r"[+-]?[1-9][0-9]{0,2}([.][0-9]{3})+"

#: Blanks before units.
BLANKS = " \t\u00a0\u202f"
#: Marks between thousands -> the characters that are read as this mark.
THOUSANDS = {".": ".", ",": ",", "'": "'’", " ": " \u00a0\u202f"}

#: Cells of a .csv file that count as empty.
EMPTY = (
    *("", "#N/A", "#N/A N/A", "#NA", "-1.#IND", "-1.#QNAN", "-NaN", "-nan", "1.#IND", "1.#QNAN"),
    *("N/A", "NA", "NULL", "NaN", "n/a", "nan", "null"),
)

#: What to do about cells of inputs that are no numbers.
STATE = " State marks of missing values in data.missing, units in data.units, marks of thousands in data.thousands."

#: A list that takes note of cells that cannot be read: (rows,) which, and why. Without it, they are refused.
Unread = list[tuple[npt.NDArray[np.bool_], str]] | None


@dataclass(frozen=True)
class CellRule:
    """What cells of numbers and dates may hold beside plain ones, as the user states it.

    missing    cells that count as empty, as texts; a number among them means every cell of its value
    unit       what may follow a number, such as g/dl
    thousands  the mark between groups of three digits, which is not that of decimals
    unread     takes note of cells that cannot be read, which then count as empty
    """

    missing: tuple[str, ...] = ()
    unit: str | None = None
    thousands: str | None = None
    unread: Unread = None


#: Nothing is stated.
PLAIN = CellRule()


def column_of(table: Any, column: str, path: Path, error: type[InputError], hint: str = "") -> Any:
    """The column of that name. Raises `error` if there is none, or more than one."""
    if column not in table.column_names:
        raise error(f"{path} has no column {column!r}; it has: {', '.join(map(repr, table.column_names))}.{hint}")
    if table.column_names.count(column) > 1:
        called = "without a name; give each a name, or remove" if not column else f"called {column!r}; rename"
        raise error(f"{path} has {table.column_names.count(column)} columns {called} all but one.")
    return table.column(column)


def as_text(value: object) -> str:
    """A value as TOML writes it. Whole numbers look the same as int and as float.

    >>> as_text(True), as_text(7), as_text(7.0), as_text(7.5), as_text("007")
    ('true', '7', '7', '7.5', '007')
    """
    if isinstance(value, bool):
        return str(value).lower()
    return str(int(value)) if isinstance(value, float) and value.is_integer() else str(value)


def alike(name: str) -> str:
    """What all spellings of a name share that differ in case, outer blanks or Unicode form.

    >>> alike("STRENG ") == alike("streng"), alike("o\u0308") == alike("\u00d6"), alike("a b") == alike("ab")
    (True, True, False)
    """
    return unicodedata.normalize("NFD", unicodedata.normalize("NFD", name.strip()).casefold())


def speller(names: Iterable[str]) -> Callable[[str], str]:
    """text -> the one of these names that it spells; a text that spells none, as it is.

    Outer blanks and Unicode form are ignored, and then case, each only where all names stay different. So no two of the
    names become one.

    >>> find = speller(["strict", "open"])
    >>> find(" Strict "), find("none"), speller(["strict", "Strict"])("STRICT")
    ('strict', 'none', 'STRICT')
    """
    declared = [str(name) for name in names]
    for way in (alike, _bare):
        known = {way(name): name for name in declared}
        if len(known) == len(declared):
            return lambda text: text if text.strip() in EMPTY else known.get(way(text), text)
    return lambda text: text


def _bare(name: str) -> str:
    return unicodedata.normalize("NFC", name.strip())


def by_meaning(text: str, mark: str | None = None) -> str:
    """A cell of a .csv file that is a number, true, false or empty, as `as_text` writes it; other texts as they are.

    mark  the decimal mark; a point without it

    >>> [by_meaning(text) for text in ("01", "1.0", "TRUE", "NA", "1e2", "x")]
    ['1', '1', 'true', '', '100', 'x']
    """
    stripped = text.strip(" \t")
    if stripped in EMPTY:
        return ""
    if re.fullmatch("[+-]?[0-9]{1,4000}", stripped):  # Python converts no more digits
        return str(int(stripped))
    # With a decimal comma, a point becomes a comma, which no number has.
    number = decimal(stripped.translate(str.maketrans(",.", ".,")) if mark == "," else stripped)
    if number is not None and math.isfinite(number):
        return as_text(number)
    return stripped.lower() if stripped.lower() in ("true", "false") else text


def encoded(cells: Any) -> tuple[Any, npt.NDArray[np.int64]]:
    """(different cells, (records,) the index of each cell among them); the last of the different cells is null."""
    cells = resolved(cells)
    chunks = cells.chunks if isinstance(cells, pyarrow.ChunkedArray) else [cells]
    whole = pyarrow.concat_arrays(chunks) if chunks else pyarrow.array([], cells.type)
    try:
        coded = whole.dictionary_encode()
    except pyarrow.ArrowNotImplementedError:  # lists and structs
        return whole, np.arange(len(whole))
    values = pyarrow.concat_arrays([coded.dictionary, pyarrow.nulls(1, coded.dictionary.type)])
    return values, np.asarray(coded.indices.fill_null(len(values) - 1), dtype=np.int64)


def different(cells: Any) -> Any:
    """The different cells of a column, in one array; dictionaries are resolved."""
    return pc.unique(resolved(cells))


def resolved(cells: Any) -> Any:
    """The cells themselves, where a column holds numbers into a dictionary, such as a category of pandas."""
    return cells.cast(cells.type.value_type) if types.is_dictionary(cells.type) else cells


def emptied(cells: Any, missing: tuple[str, ...] = ()) -> Any:
    """The cells of a text column, with null for those listed in EMPTY, or as missing. Other columns are unchanged."""
    cells = resolved(cells)
    if not is_text(cells):
        return cells
    nothing = pc.is_in(pc.utf8_trim(cells, " \t"), value_set=pyarrow.array(EMPTY + missing, type=cells.type))
    return pc.if_else(nothing, pyarrow.scalar(None, type=cells.type), cells)


def numbers(
    cells: Any, column: str, path: Path, error: type[InputError], marks: Marks = UNSTATED, rule: CellRule = PLAIN
) -> npt.NDArray[np.float64]:
    """A column's cells as floats, NaN where a cell is empty. Raises `error` for cells that are not decimal numbers
    of 64 bits.

    marks  the marks of the file; without a decimal mark, it is the point, and digits that may be thousands are refused
           where a comma is more usual: 1.234 in a file that semicolons separate
    rule   what cells of inputs may hold beside plain numbers
    """
    read = cells
    if is_text(cells):
        cells = bare(cells, rule)
        read = pc.if_else(are_decimal(cells, marks.decimal), cells, pyarrow.scalar(None, cells.type))
    try:
        plain = pc.replace_substring(read, ",", ".") if is_text(cells) else cells
        values: npt.NDArray[np.float64] = plain.cast(pyarrow.float64(), safe=False).to_numpy()
    except pyarrow.ArrowException:
        raise error(f"Column {column!r} in {path} holds {cells.type}, not numbers.") from None
    if is_text(cells):
        bad = np.asarray(pc.is_valid(cells)) & ~np.isfinite(values)
        if bad.any():
            if rule.unread is None:
                raise error(_not_numbers(cells, bad, column, path, marks) + STATE * (rule is not PLAIN))
            rule.unread.append((bad, f"{column} is not a number"))
            values = np.where(bad, np.nan, values)
        _check_groups(read, column, path, error, marks)
    return np.where(np.isin(values, [float(t) for t in rule.missing if decimal(t) is not None]), np.nan, values)


def bare(cells: Any, rule: CellRule) -> Any:
    """Texts without blanks around them, units and marks between thousands; null where they are missing."""
    cells = pc.utf8_trim(emptied(cells, rule.missing), " \t")
    if rule.unit:
        blanks = f"[{BLANKS}]{'+' if rule.unit[0].isdigit() else '*'}"  # 5 10^9/l
        cells = pc.replace_substring_regex(cells, rf"{blanks}{re.escape(rule.unit)}\z", "")
    if rule.thousands:
        mark = THOUSANDS[rule.thousands]
        groups = _GROUPS.replace("[.]", f"[{mark}]") + f"([{'.,'.replace(mark, '')}][0-9]*)?"
        cells = pc.if_else(_match(cells, groups), pc.replace_substring_regex(cells, f"[{mark}]", ""), cells)
    return cells


def _not_numbers(cells: Any, bad: npt.NDArray[np.bool_], column: str, path: Path, marks: Marks) -> str:
    """What is wrong with cells that are no numbers, in words that quote none."""
    found = (
        f"{bad.sum():,} of {len(cells):,} cells of column {column!r} in {path} are not numbers (first at row "
        f"{int(bad.argmax()):,}, counted from 0 below the header)."
    )
    wrong = pc.drop_null(cells.filter(pyarrow.array(bad)))
    if marks.decimal == ",":
        return (
            f'{found} With decimal = ",", numbers are like 12, 0,5 or 1e-5: a point, marks between thousands, and '
            "numbers beyond 64 bits, are not accepted."
        )
    if pc.all(_match(wrong, _GROUPS.replace("[.]", ","))).as_py():
        return f'{found} They look like 1,234: write 1234 if the comma is between thousands, or state decimal = ",".'
    if pc.all(are_decimal(wrong, ",")).as_py():
        return f'{found} They have decimal commas, like 0,5. State that by decimal = "," (--decimal, decimal=…).'
    return f"{found} Numbers are decimal, within 64 bits, like 12, 0.5 or 1e-5; 0x10, 1_000, 1,000 and 1e400 are not."


def _check_groups(cells: Any, column: str, path: Path, error: type[InputError], marks: Marks) -> None:
    """Refuse numbers like 1.234 that may be thousands: with a separator that goes with decimal commas, and no stated
    decimal mark, if no cell of the column shows what the point means.
    """
    if marks.decimal is not None or marks.separator in (None, ","):
        return
    with_point = cells.filter(pc.fill_null(pc.match_substring(cells, "."), False))
    if len(with_point) and pc.all(_match(with_point, _GROUPS)).as_py():
        raise error(
            f"Column {column!r} in {path} holds numbers like 1.234, and the point may be between thousands. State "
            'decimal = "." if it marks the decimals (--decimal, decimal=…); else write 1234.'
        )


def is_text(cells: Any) -> bool:
    """Whether a column holds texts, perhaps as a dictionary."""
    kind = cells.type.value_type if types.is_dictionary(cells.type) else cells.type
    return bool(types.is_string(kind) or types.is_large_string(kind))


def are_decimal(cells: Any, mark: str | None = None) -> Any:
    """Which texts are decimal numbers with this mark, a point without one."""
    return _match(cells, _WITH_COMMA if mark == "," else DECIMAL)


def _match(cells: Any, pattern: str) -> Any:
    return pc.match_substring_regex(cells, rf"\A(?:{pattern})\z")


def decimal(text: str) -> float | None:
    """The decimal number that a text holds, or None.

    >>> decimal("1e-5"), decimal(" .5"), decimal("0x10"), decimal("1_0"), decimal("inf"), decimal("１")
    (1e-05, 0.5, None, None, None, None)
    """
    stripped = text.strip(" \t")
    return float(stripped) if re.fullmatch(DECIMAL, stripped) else None


# -- What a cell of a column of budgets may mean, in the place of a budget: blank, 0, infinite, or a name

INFINITE = ("inf", "+inf", "infinity", "+infinity", "∞")


def meanings(cell: object, mark: str | None = None) -> tuple[str, str]:
    """("blank", "zero", "infinite" or "", the text in quotes): what can leave a record out. mark: the decimal mark

    >>> meanings(None), meanings(" 0.0e5"), meanings("Inf"), meanings(1e-400), meanings("1e-400"), meanings("no")
    (('blank', "''"), ('zero', "'0.0e5'"), ('infinite', "'Inf'"), ('zero', "'0'"), ('', "'1e-400'"), ('', "'no'"))
    """
    text, point = "" if cell is None else as_text(cell).strip(" \t"), "," if mark == "," else r"\."
    is_zero = re.fullmatch(rf"[+-]?(0+{point}?0*|{point}0+)([eE][+-]?[0-9]+)?", text)  # all digits are 0
    kind = "blank" if text in EMPTY else "zero" if is_zero else "infinite" if text.lower() in INFINITE else ""
    return kind, repr(text)
