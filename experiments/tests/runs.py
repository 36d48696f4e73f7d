"""Runs of a few steps, and the finished runs as the pages show them."""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Mapping
from typing import Any

from scipy import stats

from experiments import cells
from experiments.comparing import runs_of
from experiments.results import Line, finished
from experiments.settings import Cell, Settings, Table, tables

DONE, TABLES = finished(), tables()


def run_cell(settings: Settings, seed: int = 0, device: str = "cpu") -> dict[str, Any]:
    """The line of one run, which must not fail."""
    line = cells.run("table", "cell", settings, seed, device)
    assert "error" not in line, line["error"]
    return line


def with_cells(table: Table, *cells: Cell) -> Table:
    """The same table with other cells."""
    return Table(name=table.name, title=table.title, note=table.note, cells=cells)


def lines(table: str, cell: str) -> Mapping[int, Line]:
    return runs_of(TABLES[table].by_name[cell], DONE)


def scores_of(cell: Cell, run: int = 0) -> dict[int, float]:
    """Accuracies in % by seed; of the second of two models, if run is 1."""
    found = runs_of(cell, DONE).items()
    return {seed: 100 * line.get("accuracies", [line["accuracy"]])[run] for seed, line in found}


def scores(table: str, cell: str, run: int = 0) -> dict[int, float]:
    return scores_of(TABLES[table].by_name[cell], run)


def mean(table: str, cell: str, run: int = 0) -> float:
    return statistics.fmean(scores(table, cell, run).values())


def gains(table: str, cell: str, over: str) -> list[float]:
    """Differences with the same seeds."""
    ours, theirs = scores(table, cell), scores(table, over)
    return [ours[seed] - theirs[seed] for seed in sorted(set(ours) & set(theirs))]


def gain(table: str, cell: str, over: str) -> tuple[float, float]:
    """The mean difference, and half the width of its 95 % interval."""
    found = gains(table, cell, over)
    half = stats.t.ppf(0.975, len(found) - 1) * statistics.stdev(found) / math.sqrt(len(found))
    return statistics.fmean(found), float(half)


def spread(values: Collection[float]) -> str:
    return f"{statistics.fmean(values):.2f} ± {statistics.stdev(values):.2f}"
