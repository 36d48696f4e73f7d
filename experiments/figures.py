"""The figures of the results page, as SVG; no randomness and no date in them, so that they change only with results."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import matplotlib

matplotlib.use("svg")
from matplotlib import pyplot as plt

from .comparing import expected, runs_of
from .results import Line
from .settings import Table

STYLE = {"svg.hashsalt": "epsilons", "font.size": 9, "axes.spines.top": False, "axes.spines.right": False}


def draw(all_tables: Mapping[str, Table], done: Mapping[str, Line], folder: Path) -> dict[str, str]:
    """Write what can be drawn from these runs; returns file name -> caption."""
    folder.mkdir(parents=True, exist_ok=True)
    made: dict[str, str] = {}
    with plt.rc_context(STYLE):
        for name, plot in (("figure_advantage", _accuracy), ("consumption", _spent), ("convergence", _losses)):
            if name not in all_tables:
                continue
            figure, axes = plt.subplots(figsize=(6.4, 3.6), layout="constrained")
            if plot(all_tables[name], done, axes):
                figure.savefig(folder / f"{name}.svg", metadata={"Date": None})
                made[f"{name}.svg"] = all_tables[name].title
            plt.close(figure)
    return made


def _accuracy(table: Table, done: Mapping[str, Line], axes: plt.Axes) -> bool:
    theirs = expected(table.name)
    for number, cell in enumerate(table.cells):
        runs = list(runs_of(cell, done).values())
        if not runs:
            continue
        steps = [row["step"] for row in runs[0]["curve"]]
        mean = [100 * sum(run["curve"][i]["accuracy"] for run in runs) / len(runs) for i in range(len(steps))]
        axes.plot(steps, mean, color=f"C{number}", label=f"{cell.title} ({len(runs)} of {len(cell.seeds)} seeds)")
        for printed in theirs.cells.get(cell.name, ()):
            axes.plot(steps[-1], printed.mean, "x", color=f"C{number}")
    axes.set(xlabel="steps", ylabel="test accuracy, % (x: the paper's)", ylim=(90, 99))
    return bool(axes.lines and axes.legend())


def _spent(table: Table, done: Mapping[str, Line], axes: plt.Axes) -> bool:
    for cell, dashes in zip(table.cells, ("-", "--"), strict=False):
        for line in runs_of(cell, done).values():
            for group, level in enumerate(line["levels"]):
                spent = [row[group] for row in line["spent_at"]]
                axes.plot(line["at"], spent, dashes, color=f"C{group}", label=f"{cell.title}, ε = {level:g}")
    axes.set(xlabel="steps", ylabel="ε spent", ylim=(0, None))
    return bool(axes.lines and axes.legend())


def _losses(table: Table, done: Mapping[str, Line], axes: plt.Axes) -> bool:
    theirs = expected(table.name)
    for number, cell in enumerate(table.cells):
        runs = list(runs_of(cell, done).values())
        if not runs:
            continue
        parts = [row["step"] / runs[0]["steps"] for row in runs[0]["groups"]]
        mean = [sum(run["groups"][i]["loss"][0] for run in runs) / len(runs) for i in range(len(parts))]
        axes.plot(parts, mean, color=f"C{number}", label=f"{cell.title} ({len(runs)} of {len(cell.seeds)} seeds)")
        losses = [p for p in theirs.cells[cell.name] if p.quantity.startswith("group_loss")]
        axes.plot([float(p.quantity.partition("@")[2]) for p in losses], [p.mean for p in losses], "x", color=f"C{number}")
    axes.set(xlabel="part of the steps", ylabel="training loss of ε = 1 (x: the paper's)", ylim=(0, None))
    return bool(axes.lines and axes.legend())
