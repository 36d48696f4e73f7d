"""The section and the figure of the table class_balance: ten budgets, one per class, and the gap between classes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from epsilons.core.mechanism import FloatArray

from .classes import CLASSES, accuracies
from .comparing import Expected, markdown, runs_of
from .results import Line
from .settings import Cell, Table


def body(table: Table, theirs: Expected, done: Mapping[str, Line]) -> str:
    """By budgets, the paper's accuracies and those of our cells: means over seeds, and the gap of these means."""
    budgets = _budgets(table)
    rows = [["the ten budgets", *(f"{budgets[str(number)]:g}" for number in range(CLASSES)), "", ""]]
    for budget in dict.fromkeys(cell.name.partition("-")[2] for cell in table.cells):
        cells = [cell for cell in table.cells if cell.name.partition("-")[2] == budget]
        printed = theirs.cells[cells[0].name]
        rows.append([f"{cells[0].title.partition(', ')[2]}: paper", *(f"{row.mean:.2f}" for row in printed), ""])
        rows += [_row(cell, list(runs_of(cell, done).values())) for cell in cells]
    said = "The gap is that of the means, as in the paper. The gap of a single run is larger."
    return markdown(["class", *map(str, range(CLASSES)), "gap", "seeds"], rows) + f"\n\n{said}"


def _budgets(table: Table) -> Mapping[str, float]:
    """The ten budgets, by class."""
    return next(cell.settings.class_epsilon for cell in table.cells if cell.settings.class_epsilon)


def _row(cell: Cell, runs: Sequence[Line]) -> list[str]:
    """The mean accuracy of each class, and the gap of these means."""
    seeds = f"{len(runs)} of {len(cell.seeds)}"
    if not runs:
        return [cell.title, "**not run**", *[""] * CLASSES, seeds]
    return [cell.title, *(f"{mean:.2f}" for mean in _means(runs)), f"{gap(runs):.2f}", seeds]


def gap(runs: Sequence[Line]) -> float:
    """Points between the best and the worst class, by their mean accuracies over runs."""
    return float(np.ptp(_means(runs)))


def _means(runs: Sequence[Line]) -> FloatArray:
    """(classes,) mean accuracies in %."""
    means: FloatArray = np.mean([accuracies(line) for line in runs], axis=0)
    return means


def histories(table: Table, done: Mapping[str, Line], axes: Axes) -> None:
    """One panel per cell in the place of `axes`: the test accuracy of each class over training, mean over seeds.

    There is one row per model that was run.
    """
    figure = axes.figure
    assert isinstance(figure, Figure)
    axes.remove()
    models = dict.fromkeys(_model(cell) for cell in table.cells if runs_of(cell, done))
    rows = [[cell for cell in table.cells if _model(cell) == model] for model in models]
    figure.set_size_inches(8.4, 0.6 + 2.7 * len(rows))
    places = figure.subplots(len(rows), len(rows[0]), squeeze=False)
    for cells, panels in zip(rows, places, strict=True):
        for cell, panel in zip(cells, panels, strict=True):
            _history(cell, list(runs_of(cell, done).values()), panel)
        _one_scale([panel for panel in panels if panel.lines])
    figure.supxlabel("steps", fontsize=9)
    figure.supylabel("test accuracy of the class, %", fontsize=9)
    budgets = _budgets(table)
    lines = [Line2D([], [], color=f"C{number}") for number in range(CLASSES)]
    names = [f"{number}: {budgets[str(number)]:g}" for number in range(CLASSES)]
    figure.legend(lines, names, loc="outside right center", title="class: ε of\nthe ten budgets")


def _model(cell: Cell) -> str:
    """ "cnn" or "features": the start of the cell's name."""
    return cell.name.partition("-")[0]


def _history(cell: Cell, runs: Sequence[Line], panel: Axes) -> None:
    """One panel: a curve per class, (points, classes) accuracies in %, the mean over runs."""
    said = f"{len(runs)} of {len(cell.seeds)} seeds" if runs else "not run"
    panel.set_title(f"{cell.title.replace(', ', chr(10), 1)} ({said})", fontsize=8)
    if not runs:
        panel.set_axis_off()
        return
    steps = [row["step"] for row in runs[0]["curve"]]
    curves = np.mean([[accuracies(row) for row in line["curve"]] for line in runs], axis=0)
    for number in range(CLASSES):
        panel.plot(steps, curves[:, number], color=f"C{number}", linewidth=1)
    panel.tick_params(labelsize=8)


def _one_scale(panels: Sequence[Axes]) -> None:
    """One range for the panels of a row. It begins at the worst class after a third of the training: the start is far
    below, and would hide the gap at the end."""
    if not panels:
        return
    curves = [np.asarray(line.get_ydata()) for panel in panels for line in panel.lines]
    low, high = min(float(c[len(c) // 3 :].min()) for c in curves), max(float(c.max()) for c in curves)
    for panel in panels:
        panel.set_ylim(low - 0.04 * (high - low), high + 0.04 * (high - low))
