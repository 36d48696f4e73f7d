"""The section and the figure of the table class_balance: ten budgets, one per class, and the gap between classes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from epsilons.mechanism import FloatArray

from .classes import CLASSES, accuracies
from .comparing import Expected, runs_of
from .membership_report import markdown
from .results import Line
from .settings import Cell, Table


def section(table: Table, theirs: Expected, done: Mapping[str, Line]) -> str:
    """A row of the paper's accuracies per cell, and one of ours: means over seeds, and the gap of these means."""
    budgets = next(cell.settings.class_epsilon for cell in table.cells if cell.settings.class_epsilon)
    rows = [["the ten budgets", *(f"{budgets[str(number)]:g}" for number in range(CLASSES)), "", ""]]
    for cell in table.cells:
        runs = list(runs_of(cell, done).values())
        rows.append([f"{cell.title}: paper", *(f"{row.mean:.2f}" for row in theirs.cells[cell.name]), ""])
        seeds = f"{len(runs)} of {len(cell.seeds)}"
        rows.append([f"{cell.title}: ours", *_ours(runs), seeds])
    parts = [
        f"## {table.title}",
        f"`{table.name}` · paper: {theirs.source} · {theirs.unit}",
        table.note.strip(),
        markdown(["class", *map(str, range(CLASSES)), "gap", "seeds"], rows),
        "The gap is that of the means, as in the paper. The gap of a single run is larger.",
    ]
    return "\n\n".join(parts)


def _ours(runs: Sequence[Line]) -> list[str]:
    """The mean accuracy of each class, and the gap."""
    if not runs:
        return ["**not run**"] * (CLASSES + 1)
    means = np.mean([accuracies(line) for line in runs], axis=0)
    return [*(f"{mean:.2f}" for mean in means), f"{np.ptp(means):.2f}"]


def histories(table: Table, done: Mapping[str, Line], axes: Axes) -> None:
    """One panel per cell in the place of `axes`: the test accuracy of each class over training, mean over seeds."""
    figure = axes.figure
    assert isinstance(figure, Figure)
    axes.remove()
    figure.set_size_inches(8.0, 5.6)
    rows = list(dict.fromkeys(_group(cell) for cell in table.cells))
    places = figure.subplots(len(rows), -(-len(table.cells) // len(rows)), sharey="row", sharex="row")
    for cell, place in zip(table.cells, np.ravel(places), strict=True):
        runs = list(runs_of(cell, done).values())
        said = f"{len(runs)} of {len(cell.seeds)} seeds" if runs else "not run"
        place.set_title(f"{cell.title.replace(', ', chr(10), 1)} ({said})", fontsize=8)
        if runs:
            steps, curves = _curves(runs)
            for number in range(CLASSES):
                place.plot(steps, curves[:, number], color=f"C{number}", linewidth=1, label=f"class {number}")
            place.set_ylim(*_limits(curves))
    figure.supxlabel("steps")
    figure.supylabel("test accuracy of the class, %")
    shown = next((place for place in np.ravel(places) if place.lines), None)
    if shown is not None:
        figure.legend(*shown.get_legend_handles_labels(), loc="outside right upper", fontsize=8)


def _group(cell: Cell) -> str:
    return cell.name.partition("-")[0]


def _curves(runs: Sequence[Line]) -> tuple[list[int], FloatArray]:
    """(points,) steps and (points, classes) accuracies in %, the mean over runs."""
    steps = [row["step"] for row in runs[0]["curve"]]
    return steps, np.mean([[accuracies(row) for row in line["curve"]] for line in runs], axis=0)


def _limits(curves: FloatArray) -> tuple[float, float]:
    """From the worst class after a third of the training to the best: the start would hide the gap at the end."""
    settled = curves[len(curves) // 3 :]
    margin = 0.08 * float(np.ptp(settled))
    return float(settled.min()) - margin, float(settled.max()) + margin
