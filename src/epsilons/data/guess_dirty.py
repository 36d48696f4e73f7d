"""What the other cells are in a column of numbers or dates, for the draft that `epsilons init` writes.

Marks of missing values, units, marks of decimals and of thousands are read off the data here. The draft states them,
and training reads cells by what is stated alone (`tabular.numbers`).
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from ..disclosure import SMALLEST_SHOWN, how_many
from ..tabular import CellRule, are_decimal, encoded, holds_dates
from ..tabular.cells import BLANKS, THOUSANDS, bare

#: A column of numbers has them in this share of its filled cells. With fewer, but half of them, the draft says so.
MOST, HALF = 0.9, 0.5
#: What many exports write where nothing was measured: in lower case, letters alone.
USUAL = (
    "na nb nd ka km su x none unknown missing unbekannt fehlt entf entfällt keineangabe nichtbestimmt nichtbestimmbar "
    "nichtmessbar notdone nottested notmeasured pending folgt ausstehend hämolytisch lipämisch wert value ref nv div"
)
_GROUPED = "[+-]?[1-9][0-9]{{0,2}}(?:(?:[{mark}][0-9]{{3}}){{{least},}}|(?:[{mark}][0-9]{{3}})+[{other}][0-9]+)"
_NUMBER = r"[+-]?(?:[1-9][0-9]{0,2}(?:[.,'’ \u00a0\u202f][0-9]{3})+(?:[.,][0-9]*)?|[0-9]+[.,]?[0-9]*|[.,][0-9]+)"
_CELL = re.compile(
    rf"({_NUMBER})(?:[{BLANKS}]*((?![eE][+-]?[0-9])[^\s0-9.,+'’-].{{0,15}})|[{BLANKS}]+([0-9].{{0,15}}))"
)
#: Units that say nothing of a person: g/dl, mmHg, %, 10^9/l.
_PART = (
    "(?:%|‰|°|10\\^?[0-9]+|[kdcmuµμnpfMGT]?(?:[gGlLmsUVAJCF]|mol|IU|IE|Eq|val|kat|osm|mHg|Hz|Pa|cal|min|h|d)[²³23]?)"
)
_UNIT = re.compile(f"(?:{_PART}+)(?:[/·*.]{_PART}+)*")


@dataclass(frozen=True, eq=False)
class Dirty:
    """A column of texts in which at least half of the filled cells are numbers or dates.

    cells  the column with the numbers or dates alone; others are empty
    rule   how its cells are read
    mark   the decimal mark that reads the most cells: "." or "," or "both"
    is_number  True if at least MOST of the filled cells are numbers or dates
    said   what its cells are, by the rule of 20
    """

    cells: Any
    rule: CellRule
    mark: str
    is_number: bool
    said: str


def dirty(column: Any, decimal: str | None) -> Dirty | None:
    """What a column of texts holds; None if it is clean, or holds no numbers or dates in half of its cells.

    decimal  the mark that is stated, if one is
    """
    import pyarrow
    import pyarrow.compute as pc

    texts, codes = encoded(column.cast(pyarrow.string()))
    counts, cells = np.bincount(codes, minlength=len(texts)), bare(texts, CellRule())
    filled = int(counts[np.asarray(pc.is_valid(cells))].sum())
    if not filled or any(pc.all(are_decimal(pc.drop_null(cells), mark)).as_py() for mark in (".", ",")):
        return None
    is_date = holds_dates(column)
    rule = CellRule() if is_date else _rule(cells, counts)
    read = bare(cells, rule)
    marks = [decimal] if decimal else {".": [","], ",": ["."]}.get(rule.thousands, [".", ",", "both"])
    found = {mark: np.asarray(are_decimal(read, mark).fill_null(False), dtype=bool) for mark in marks}
    mark = max(found, key=lambda mark: int(counts[found[mark]].sum()))
    good = np.array([holds_dates(pyarrow.array([text])) for text in texts]) if is_date else found[mark]
    if counts[good].sum() < HALF * filled:
        return None
    plain, kept = bare(cells, CellRule((), rule.unit)), pyarrow.array(good)
    rest = {cell: n for cell, n, is_good in zip(cells.to_pylist(), counts.tolist(), good, strict=True) if not is_good}
    rest.pop(None, None)
    missing = tuple(cell for cell, count in rest.items() if _means_missing(cell, count))

    def count(which: Any) -> int:
        return int(counts[np.asarray(pc.and_(kept, which).fill_null(False))].sum())

    said = {
        f"have the unit {rule.unit}": count(pc.not_equal(cells, plain)),
        f"have {rule.thousands!r} between thousands": count(pc.not_equal(plain, read)),
        "have decimal commas, and others points": count(pc.match_substring(read, ",")) if mark == "both" else 0,
        f"are marks of missing values ({', '.join(missing)})": sum(rest[cell] for cell in missing),
        "cannot be read: training refuses them, or name them in data.missing": sum(
            n for cell, n in rest.items() if cell not in missing
        ),
    }
    words = "; ".join(f"{how_many(n, filled).lower()} {what}" for what, n in said.items() if n)
    if counts[good].sum() < MOST * filled:
        return Dirty(column, rule, mark, False, f"{how_many(counts[good].sum(), filled).lower()} are numbers or dates")
    clean = pc.if_else(kept, read, "").take(pyarrow.array(codes))
    return Dirty(clean, replace(rule, missing=missing), mark, True, words)


def _rule(cells: Any, counts: npt.NDArray[np.int64]) -> CellRule:
    """The unit and the mark between thousands that numbers show: one of each, or none."""
    units: Counter[str] = Counter()
    for cell, count in zip(cells.to_pylist(), counts.tolist(), strict=True):
        form = _CELL.fullmatch(cell or "")
        units.update({form[2] or form[3]: count} if form else {})
    unit = next((u for u, n in units.most_common(1) if n >= SMALLEST_SHOWN or _UNIT.fullmatch(u)), "")
    plain = [text or "" for text in bare(cells, CellRule((), unit)).to_pylist()]
    thousands = [mark for mark in THOUSANDS if any(map(_grouped(mark).fullmatch, plain))]
    return CellRule((), unit, thousands[0] if len(thousands) == 1 else "")


def _grouped(mark: str) -> re.Pattern[str]:
    """Numbers that show a mark between thousands: 1.234,5 or 1.234.567, and not 1.234."""
    least = 2 if mark in ".," else 1
    return re.compile(_GROUPED.format(mark=THOUSANDS[mark], least=least, other=".,".replace(mark, "")))


def _means_missing(cell: str, count: int) -> bool:
    """Whether a text means a missing value: a usual mark such as n.b., no letter or digit, or no digit in 20 cells."""
    letters = re.sub(r"[\W_]", "", cell.lower())
    is_frequent = count >= SMALLEST_SHOWN and re.search("[0-9]", cell) is None
    return letters in USUAL.split() or not letters or is_frequent
