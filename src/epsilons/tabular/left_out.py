"""Which records are left out, because their cell of the column of budgets says so: blank, 0, infinite, or a name."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import InputError
from .cells import are_decimal, as_text, column_of, emptied, is_text
from .marks import marks_of

INFINITE = ("inf", "+inf", "infinity", "+infinity", "∞")


@dataclass(frozen=True)
class LeftOut:
    """Which cells of a column of budgets mean that a record is left out.

    blank     empty cells
    zero      0
    infinite  inf and infinity
    names     these texts
    """

    blank: bool = False
    zero: bool = False
    infinite: bool = False
    names: Collection[str] = ()


def kept_rows(table: Any, column: str, path: Path, error: type[InputError], rule: LeftOut) -> npt.NDArray[np.bool_]:
    """(rows,) False for records that are left out by their cell of this column. Raises `error` if there is none."""
    cells = column_of(table, column, path, error)
    left_out = np.zeros(len(cells), dtype=bool)
    for found in _found(cells, rule, marks_of(table).decimal):
        left_out |= np.asarray(found.fill_null(False), dtype=bool)
    return ~left_out


def holds_infinite(cells: Any) -> bool:
    """Whether a text among the cells means an infinite number."""
    import pyarrow
    import pyarrow.compute as pc

    if not is_text(cells):
        return False
    lower = pc.utf8_lower(pc.utf8_trim(cells, " \t"))
    return bool(pc.any(pc.is_in(lower, value_set=pyarrow.array(INFINITE, lower.type))).as_py())


def _found(cells: Any, rule: LeftOut, mark: str | None) -> list[Any]:
    """(rows,) for each part of the rule, which cells it names."""
    import pyarrow
    import pyarrow.compute as pc

    found = []
    if not is_text(cells):
        is_float = pyarrow.types.is_floating(cells.type)
        if rule.blank:
            found.append(pc.is_null(cells, nan_is_null=is_float))
        if rule.zero and not pyarrow.types.is_boolean(cells.type):
            found.append(pc.equal(cells.cast(pyarrow.float64()), 0.0))
        if rule.infinite and is_float:
            found.append(pc.equal(cells, np.inf))
        texts = [as_text(cell) for cell in cells.to_pylist()] if rule.names else []
        return [*found, pyarrow.array([text in rule.names for text in texts])] if rule.names else found
    cells = pc.utf8_trim(cells, " \t")
    if rule.blank:
        found.append(pc.is_null(emptied(cells)))
    if rule.zero:
        found.append(_are_zero(cells, mark))
    if rule.infinite:
        found.append(pc.is_in(pc.utf8_lower(cells), value_set=pyarrow.array(INFINITE)))
    return [*found, pc.is_in(cells, value_set=pyarrow.array(list(rule.names), cells.type))] if rule.names else found


def _are_zero(cells: Any, mark: str | None) -> Any:
    """Which texts are the number 0, however it is written: all digits before an exponent are 0."""
    import pyarrow.compute as pc

    return pc.and_kleene(are_decimal(cells, mark), pc.match_substring_regex(cells, r"\A[+-]?[0.,]+([eE].*)?\z"))
