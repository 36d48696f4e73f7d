"""What was not run and what it costs, and where finished runs come from."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from itertools import takewhile

from .comparing import Expected, runs_of
from .results import DRAWS_VERSION, Line, is_complete
from .settings import Cell, Table

LIBRARIES = ("python", "torch", "numpy", "scipy", "scikit-learn")
HEADER = ("cells", "runs missing", "hours of one core", "why", "command")


def not_run(table: Table, theirs: Expected, done: Mapping[str, Line]) -> list[list[str]]:
    """Rows of cells with the same reason, by HEADER."""
    every = [cell for cell in table.cells if left(cell, done)]
    groups: dict[str, list[Cell]] = {}
    for cell in every:
        groups.setdefault(_pattern(cell, theirs), []).append(cell)
    rows = []
    for pattern, found in groups.items():
        cost = theirs.costs.get(pattern, {})
        others = [cell.name for cell in every if cell not in found]
        for cells, only in _commands(found, others):
            options = f" {cost['options']}" if "options" in cost else ""
            rows.append(
                [
                    "; ".join(cell.title for cell in cells),
                    str(sum(left(cell, done) for cell in cells)),
                    shown(sum(hours(cell, table, theirs, done) for cell in cells)),
                    cost.get("why", "time"),
                    f"`python -m experiments run {table.name}{only}{options}`",
                ]
            )
    return rows


def _commands(cells: Sequence[Cell], others: Sequence[str]) -> list[tuple[Sequence[Cell], str]]:
    """Cells, and the option that chooses them among the missing ones of their table."""
    if not others:
        return [(cells, "")]
    letters = zip(*(cell.name for cell in cells), strict=False)
    pattern = "".join(of_all[0] for of_all in takewhile(lambda of_all: len(set(of_all)) == 1, letters)) + "*"
    if len(cells) > 1 and not any(fnmatchcase(name, pattern) for name in others):
        return [(cells, f' --only "{pattern}"')]
    return [([cell], f" --only {cell.name}") for cell in cells]


def _pattern(cell: Cell, theirs: Expected) -> str:
    return next((pattern for pattern in theirs.costs if fnmatchcase(cell.name, pattern)), "")


def left(cell: Cell, done: Mapping[str, Line]) -> int:
    """Runs that are missing, or have fewer shadows than wanted."""
    return len(cell.seeds) - sum(map(is_complete, runs_of(cell, done).values()))


def hours(cell: Cell, table: Table, theirs: Expected, done: Mapping[str, Line]) -> float:
    """Hours of one core for what is left of a cell.

    A run takes what other seeds of its cell took; without them, what `costs` says; else the mean of the table.
    """
    runs = list(runs_of(cell, done).values())
    cost = theirs.costs.get(_pattern(cell, theirs), {}).get("hours")
    return (len(cell.seeds) - sum(map(_part, runs))) * (_mean(runs) or cost or _mean(_of(table, done)) or 0.0)


def shown(number: float) -> str:
    """Hours, with one digit if they are few."""
    return f"{number:,.1f}" if number < 100 else f"{number:,.0f}"


def _of(table: Table, done: Mapping[str, Line]) -> list[Line]:
    return [line for cell in table.cells for line in runs_of(cell, done).values()]


def _part(line: Line) -> float:
    """How much of a run is done: less than 1 for an attack with fewer shadows than wanted."""
    return 1.0 if is_complete(line) else line["shadows"] / line["settings"]["shadows"]


def _mean(lines: Iterable[Line]) -> float:
    """Mean hours of a whole run; 0 without any."""
    took = [line.get("processor_seconds", line.get("wall_seconds", 0.0)) / _part(line) for line in lines]
    return statistics.fmean(took) / 3600 if took else 0.0


def provenance(table: Table, done: Mapping[str, Line]) -> str:
    """Commits, version of the draws, hours and library versions of the finished runs of a table."""
    lines = _of(table, done)
    if not lines:
        return ""
    commits = dict.fromkeys(line.get("code", "").partition("+")[2] or "unknown" for line in lines)
    machines = [line.get("machine", {}) for line in lines]
    versions = sorted({f"{name} {machine[name]}" for machine in machines for name in LIBRARIES if name in machine})
    draws = sorted({int(line.get("draws_version", 1)) for line in lines})
    took = sum(line.get("wall_seconds", 0.0) for line in lines) / 3600
    repeats = "repeats to the digit" if draws == [DRAWS_VERSION] else "repeats to the digit at its commit, not today"
    return (
        f"*{len(lines)} runs · {took:.2f} hours · {'commit' if len(commits) == 1 else 'commits'} "
        f"{', '.join(commits)} · draws {' and '.join(map(str, draws))} (today {DRAWS_VERSION}): {repeats} · "
        f"{', '.join(versions)}*"
    )
