"""The section of the table visits: a row per way to count people, a column per method."""

from __future__ import annotations

from collections.abc import Mapping

from .comparing import Expected, by_seed, markdown, spread
from .results import Line
from .settings import Cell, Table


def body(table: Table, theirs: Expected, done: Mapping[str, Line]) -> str:
    """Mean accuracies over seeds, under a heading for each data set and list of epsilons."""
    headings = list(dict.fromkeys(cell.title.partition(": ")[0] for cell in table.cells))
    parts = []
    for heading in headings:
        cells = [cell for cell in table.cells if cell.title.startswith(heading + ": ")]
        parts += [f"**{heading}**", accuracies(cells, done)]
    return "\n\n".join(parts)


def accuracies(cells: list[Cell], done: Mapping[str, Line]) -> str:
    """Markdown: a row per way, a column per method."""
    by_way: dict[str, dict[str, str]] = {}
    for cell in cells:
        way, _, method = cell.title.partition(": ")[2].rpartition(", ")
        by_way.setdefault(way, {})[method] = _mean(cell, done)
    methods = list(next(iter(by_way.values())))
    return markdown(["budget of a", *methods], [[way, *(row[m] for m in methods)] for way, row in by_way.items()])


def _mean(cell: Cell, done: Mapping[str, Line]) -> str:
    scores = list(by_seed(cell, done).values())
    return spread(scores) if len(scores) == len(cell.seeds) else "**not run**"
