"""What a cell of a column of budgets may mean, in the place of a budget: blank, 0, infinite, or a name."""

from __future__ import annotations

import re

from .cells import EMPTY, as_text

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
