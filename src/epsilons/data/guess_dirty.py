"""What the other cells are in a column of numbers or dates, for the draft that `epsilons init` writes.

Marks of missing values, units and marks between thousands are read off the data here. The draft states them, and
training reads cells by what is stated alone (`tabular.numbers`).
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from ..disclosure import SMALLEST_SHOWN, how_many
from ..tabular import are_decimal, encoded, holds_dates
from ..tabular.cells import BLANKS, PLAIN, THOUSANDS, CellRule, bare
from ..tabular.dates import is_date

#: A column of numbers has them in this share of its filled cells. With fewer, but half of them, the draft says so.
MOST, HALF = 0.9, 0.5
#: Letters and digits of usual marks of missing values, such as n.b., and of units, such as g/dl, in lower case.
MISSING = "na nb nd ka km su nv x div none value wert missing unknown unbekannt fehlt entfällt keineangabe notdone"
UNITS = "g kg mg µg l ml cm mm h min bpm gl gdl mgl mgdl µgl ngml pgml mmoll µmoll nmoll ul iul mmhg 109l 1012l fl pg"
#: A number, and a unit that begins with no digit, or with 10^.
_CELL = re.compile(rf"[-+0-9.,'’{BLANKS}]*?[0-9.,][{BLANKS}]*((?![eE][+-]?[0-9])[^\s0-9.,+'’-].{{0,15}}|10\^.{{0,13}})")


@dataclass(frozen=True, eq=False)
class Dirty:
    """A column of texts in which at least half of the filled cells are numbers or dates.

    cells  the column with the numbers or dates alone, if they are MOST of the filled cells; others are empty
    rule   how its cells are read
    said   what its cells are, by the rule of 20
    """

    cells: Any
    rule: CellRule
    said: str


def dirty(column: Any, decimal: str | None) -> Dirty | None:
    """What a column of texts holds; None if it is clean, or holds no numbers or dates in half of its cells.

    decimal  the mark that is stated, if one is
    """
    import pyarrow
    import pyarrow.compute as pc

    texts, codes = encoded(column.cast(pyarrow.string()))
    counts, cells = np.bincount(codes, minlength=len(texts)), bare(texts, PLAIN)
    filled = int(counts[np.asarray(pc.is_valid(cells))].sum())
    plain = [_are(cells, mark) for mark in ".,"]
    if not filled or any(counts[is_number].sum() == filled for is_number in plain):
        return None
    rule, good = _rule(cells, counts, decimal)
    if holds_dates(column):
        rule, good = PLAIN, np.array([is_date(text or "") for text in cells.to_pylist()])
    read = int(counts[good].sum())
    if read < MOST * filled:
        said = f"{how_many(read, filled).lower()} are numbers or dates"
        return Dirty(column, PLAIN, said) if read >= HALF * filled else None
    rest = {c: n for c, n, is_good in zip(cells.to_pylist(), counts.tolist(), good, strict=True) if c and not is_good}
    usual = {cell: n for cell, n in rest.items() if _is_usual(cell, n)}
    beside, marked = " or ".join(map(repr, filter(None, (rule.unit, rule.thousands)))), sum(usual.values())
    found = {
        f"have {beside} beside their digits": int(counts[good & ~(plain[0] | plain[1])].sum()) if beside else 0,
        f"are marks of missing values ({', '.join(usual)})": marked,
        "cannot be read, and training refuses them unless data.missing names them": sum(rest.values()) - marked,
    }
    said = "; ".join(f"{how_many(n, filled).lower()} {what}" for what, n in found.items() if n)
    clean = pc.if_else(pyarrow.array(good), bare(cells, rule), "").take(pyarrow.array(codes))
    return Dirty(clean, replace(rule, missing=tuple(usual)), said) if said else None


def _rule(cells: Any, counts: npt.NDArray[np.int64], decimal: str | None) -> tuple[CellRule, npt.NDArray[np.bool_]]:
    """The unit and the mark between thousands that read the most cells, and (cells,) which these are."""
    units = Counter(form[1] for cell in cells.to_pylist() if (form := _CELL.fullmatch(cell or "")))
    unit = next((u for u, n in units.most_common(1) if n >= SMALLEST_SHOWN or _is_usual(u, n)), None)
    rules = [(CellRule((), unit, t), m) for t in (None, *THOUSANDS) for m in (decimal or ".,").replace(t or " ", "")]
    found = [(rule, _are(bare(cells, rule), mark)) for rule, mark in rules]
    plain = np.any([read for rule, read in found if rule.thousands is None], axis=0)
    # 1.234 may have three decimals, 1.234,5 has not.
    shown = [(rule, read) for rule, read in found if rule.thousands is None or (read & ~plain).any()]
    return max(shown, key=lambda one: int(counts[one[1]].sum()))


def _are(cells: Any, mark: str) -> npt.NDArray[np.bool_]:
    return np.asarray(are_decimal(cells, mark).fill_null(False), dtype=bool)


def _is_usual(text: str, count: int) -> bool:
    """Whether a text is a usual mark or unit, has no letter or digit, or is in many cells and has no digit."""
    letters = re.sub(r"[\W_]", "", text.lower())
    is_common = count >= SMALLEST_SHOWN and not re.search("[0-9]", text)
    return is_common or not letters or letters in f"{MISSING} {UNITS}".split()
