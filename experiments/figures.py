"""The figures of the results page, as SVG, without randomness and dates: they change with the results only."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np

matplotlib.use("svg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from .balance import histories
from .comparing import SEEDS, expected, runs_of
from .individual_accounting.page import active_records
from .per_class import heat_maps
from .results import Line
from .settings import Cell, Table

STYLE: dict[Any, Any] = {
    "svg.hashsalt": "epsilons",
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
}


def pictures(table: Table, done: Mapping[str, Line]) -> list[tuple[str, str]]:
    """(file name, caption) of the figure of a table, if there are runs for it."""
    if table.name not in PLOTS or not any(runs_of(cell, done) for cell in table.cells):
        return []
    return [(f"{table.name}.svg", CAPTIONS.get(table.name, table.title))]


def draw(all_tables: Mapping[str, Table], done: Mapping[str, Line], folder: Path) -> None:
    """Write the figures for which there are runs."""
    folder.mkdir(parents=True, exist_ok=True)
    with plt.rc_context(STYLE):
        for table in all_tables.values():
            for file, _ in pictures(table, done):
                figure, axes = plt.subplots(figsize=(6.4, 3.6), layout="constrained")
                PLOTS[table.name](table, done, axes)
                figure.savefig(folder / file, metadata={"Date": None})
                plt.close(figure)


def _named(cell: Cell, runs: int) -> str:
    """The title of a cell, and how many of its seeds were run."""
    return f"{cell.title} ({runs} of {len(cell.seeds)} seeds)"


def _advantage(table: Table, done: Mapping[str, Line], axes: Axes) -> None:
    """A colour per budgets, a line per method, and a band: the mean ± the standard deviation over seeds."""
    figure = axes.figure
    assert isinstance(figure, Figure)
    figure.set_size_inches(7.2, 4.6)
    colours, ends = {"dpsgd": "0.35", "a": "C0", "b": "C1", "3": "C2"}, expected(table.name).cells
    lowest = 100.0
    for cell in table.cells:
        if not (runs := list(runs_of(cell, done).values())):
            continue
        scores = 100 * np.array([[row["accuracy"] for row in run["curve"]] for run in runs])  # (seeds, points)
        steps, mean = [row["step"] for row in runs[0]["curve"]], scores.mean(axis=0)
        colour = colours[cell.name.rpartition("-")[2]]
        style = "--" if "scale" in cell.name else "-"
        axes.plot(steps, mean, style, color=colour, linewidth=1.4, label=_named(cell, len(runs)))
        if len(runs) >= SEEDS:
            spread = scores.std(axis=0, ddof=1)
            axes.fill_between(steps, mean - spread, mean + spread, color=colour, alpha=0.13, linewidth=0)
        if cell.name in ends:
            axes.plot(steps[-1], ends[cell.name][0].mean, "x", color=colour)
        lowest = min(lowest, float(mean[len(mean) // 4]))
    axes.set(xlabel="steps", ylabel="test accuracy, % (x: the paper's end)", ylim=(lowest - 0.6, 98.6))
    axes.grid(axis="y", alpha=0.3)
    axes.legend(loc="lower right", fontsize=8)


def _losses(table: Table, done: Mapping[str, Line], axes: Axes) -> None:
    """The loss of the strictest group, the mean over runs, and the paper's points."""
    theirs = expected(table.name).cells
    for number, cell in enumerate(table.cells):
        if not (runs := list(runs_of(cell, done).values())):
            continue
        parts = [row["step"] / runs[0]["steps"] for row in runs[0]["groups"]]
        mean = np.mean([[row["loss"][0] for row in run["groups"]] for run in runs], axis=0)
        axes.plot(parts, mean, color=f"C{number}", label=_named(cell, len(runs)))
        losses = [printed for printed in theirs[cell.name] if printed.quantity.startswith("group_loss")]
        at = [float(printed.quantity.partition("@")[2]) for printed in losses]
        axes.plot(at, [printed.mean for printed in losses], "x", color=f"C{number}")
    top = 1.05 * axes.get_ylim()[1]
    axes.set(xlabel="part of the steps", ylabel="training loss of ε = 1 (x: the paper's)", ylim=(0, top))
    axes.set_xticks([0.25, 0.5, 0.75, 1.0])
    axes.legend()


def _spent(table: Table, done: Mapping[str, Line], axes: Axes) -> None:
    # a thin line on a wide one, so that both are visible
    widths: tuple[dict[str, Any], ...] = ({"linewidth": 5, "alpha": 0.35}, {"linewidth": 1.2})
    for cell, width in zip(table.cells, widths, strict=False):
        for line in runs_of(cell, done).values():
            for group, level in enumerate(line["levels"]):
                spent = [row[group] for row in line["spent_at"]]
                axes.plot(line["at"], spent, **width, color=f"C{group}", label=f"{cell.title}, ε = {level:g}")
    axes.set(xlabel="steps", ylabel="ε spent", xlim=(0, None), ylim=(0, None))
    axes.legend()


#: table -> its caption; without one, the title of the table.
CAPTIONS = {
    "figure_advantage": "Figure 1: mean over seeds, with a band of one standard deviation",
    "individual_accounting": "Figure 3: records that still contribute",
    "consumption": "Figure 4: privacy spent over training",
    "per_class": "Figure 5: points gained and lost by each class",
    "per_class_mnist": "Figure 6: points gained and lost by each class",
    "class_balance": "Figure 7: test accuracy of each class over training",
}

#: table -> the function that draws it.
PLOTS: dict[str, Callable[[Table, Mapping[str, Line], Axes], None]] = {
    "figure_advantage": _advantage,
    "consumption": _spent,
    "convergence": _losses,
    "individual_accounting": active_records,
    "per_class": heat_maps,
    "per_class_mnist": heat_maps,
    "class_balance": histories,
}
