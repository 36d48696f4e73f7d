"""Aligned plain-text tables, for places without a terminal: `print(plan)`, logs, tests."""

from __future__ import annotations

from collections.abc import Sequence


def table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Right-aligned columns, two spaces apart.

    >>> print(table(["epsilon", "records"], [["1", "20,400"], ["2", "25,800"]]))
    epsilon  records
          1   20,400
          2   25,800
    """
    widths = [max(len(cell) for cell in column) for column in zip(headers, *rows, strict=True)]
    return "\n".join(
        "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in [headers, *rows]
    )
