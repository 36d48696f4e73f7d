"""The figures of the results page, as SVG; no randomness and no date in them, so that they change only with results."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

from .comparing import Compared, expected, runs_of, value
from .results import Line
from .settings import Cell, Table

STYLE: dict[Any, Any] = {
    "svg.hashsalt": "epsilons",
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
}


def draw(all_tables: Mapping[str, Table], done: Mapping[str, Line], folder: Path) -> dict[str, str]:
    """Write what can be drawn from these runs; returns file name -> caption."""
    folder.mkdir(parents=True, exist_ok=True)
    made: dict[str, str] = {}
    with plt.rc_context(STYLE):
        for name, plot in PLOTS.items():
            table = all_tables.get(name)
            if table is None or not any(runs_of(cell, done) for cell in table.cells):
                continue
            figure, axes = plt.subplots(figsize=(6.4, 3.6), layout="constrained")
            plot(table, done, axes)
            figure.savefig(folder / f"{name}.svg", metadata={"Date": None})
            plt.close(figure)
            made[f"{name}.svg"] = table.title
    return made


def _named(cell: Cell, runs: int) -> str:
    """The cell, and how many of its seeds were run."""
    return f"{cell.title} ({f'{runs} of {len(cell.seeds)} seeds' if runs else 'not run'})"


def _rows(axes: Axes, names: list[str]) -> None:
    """One row each from the top, also where nothing is drawn."""
    axes.set_yticks([-i for i in range(len(names))], names)
    axes.set_ylim(0.6 - len(names), 0.6)


def _differences(table: Table, done: Mapping[str, Line], axes: Axes) -> None:
    theirs = expected(table.name)
    names: list[str] = []
    axes.use_sticky_edges = False  # bars would end at the frame, as if cut off
    for cell in table.cells:
        if cell.name not in theirs.cells:
            continue
        runs = runs_of(cell, done)
        place = -len(names)
        names.append(_named(cell, len(runs)))
        if not runs:
            continue
        compared = Compared(theirs.cells[cell.name][0], tuple(value(line, "accuracy") for line in runs.values()))
        axes.barh(place, 2 * (compared.printed.sd or 0), left=-(compared.printed.sd or 0), color="0.85")
        axes.errorbar(compared.difference, place, xerr=compared.sd, fmt="o", color="C0", capsize=3)
    axes.axvline(0, color="0.5", linewidth=0.8)
    _rows(axes, names)
    axes.set(xlabel="points above the paper's mean (grey: ± its sd)")


def _accuracy(table: Table, done: Mapping[str, Line], axes: Axes) -> None:
    theirs = expected(table.name)
    for number, cell in enumerate(table.cells):
        runs = list(runs_of(cell, done).values())
        if not runs:
            axes.plot([], color=f"C{number}", label=_named(cell, 0))
            continue
        steps = [row["step"] for row in runs[0]["curve"]]
        mean = [100 * sum(run["curve"][i]["accuracy"] for run in runs) / len(runs) for i in range(len(steps))]
        axes.plot(steps, mean, color=f"C{number}", label=_named(cell, len(runs)))
        for printed in theirs.cells.get(cell.name, ()):
            axes.plot(steps[-1], printed.mean, "x", color=f"C{number}")
    axes.set(xlabel="steps", ylabel="test accuracy, % (x: the paper's)", ylim=(90, 99))
    axes.legend()


def _spent(table: Table, done: Mapping[str, Line], axes: Axes) -> None:
    widths: tuple[dict[str, Any], ...] = (
        {"linewidth": 5, "alpha": 0.35},
        {"linewidth": 1.2},
    )  # where two coincide, both are seen
    for cell, width in zip(table.cells, widths, strict=False):
        for line in runs_of(cell, done).values():
            for group, level in enumerate(line["levels"]):
                spent = [row[group] for row in line["spent_at"]]
                axes.plot(line["at"], spent, **width, color=f"C{group}", label=f"{cell.title}, ε = {level:g}")
    axes.set(xlabel="steps", ylabel="ε spent", xlim=(0, None), ylim=(0, None))
    axes.legend()


def _losses(table: Table, done: Mapping[str, Line], axes: Axes) -> None:
    theirs = expected(table.name)
    for number, cell in enumerate(table.cells):
        runs = list(runs_of(cell, done).values())
        if not runs:
            axes.plot([], color=f"C{number}", label=_named(cell, 0))
            continue
        parts = [row["step"] / runs[0]["steps"] for row in runs[0]["groups"]]
        mean = [sum(run["groups"][i]["loss"][0] for run in runs) / len(runs) for i in range(len(parts))]
        axes.plot(parts, mean, color=f"C{number}", label=_named(cell, len(runs)))
        losses = [p for p in theirs.cells[cell.name] if p.quantity.startswith("group_loss")]
        axes.plot(
            [float(p.quantity.partition("@")[2]) for p in losses], [p.mean for p in losses], "x", color=f"C{number}"
        )
    top = 1.05 * axes.get_ylim()[1]
    axes.set(xlabel="part of the steps", ylabel="training loss of ε = 1 (x: the paper's)", ylim=(0, top))
    axes.set_xticks([0.25, 0.5, 0.75, 1.0])
    axes.legend()


def _momenta(table: Table, done: Mapping[str, Line], axes: Axes) -> None:
    """What each method makes of either momentum: means over the seeds that both have."""
    names: list[str] = []
    for cell in table.cells:
        half, none = (
            {s: value(r, "accuracy") for s, r in runs_of(c, done).items()} for c in (cell.but(momentum=0.5), cell)
        )
        common = sorted(set(half) & set(none))
        place = -len(names)
        names.append(_named(cell, len(common)))
        if not common:
            continue
        ends = [sum(scores[seed] for seed in common) / len(common) for scores in (half, none)]
        axes.plot(ends, [place, place], color="0.7", zorder=1)
        for end, colour, label in zip(ends, ("C1", "C0"), ("momentum 0.5", "momentum 0"), strict=True):
            axes.plot(end, place, "o", color=colour, label=label if place == 0 else None)
    _rows(axes, names)
    axes.set(xlabel="test accuracy, %")
    axes.legend()


#: table -> what draws it; the caption is the table's title.
PLOTS: dict[str, Callable[[Table, Mapping[str, Line], Axes], None]] = {
    "table_2": _differences,
    "table_untuned": _differences,
    "figure_advantage": _accuracy,
    "momentum": _momenta,
    "consumption": _spent,
    "convergence": _losses,
    "baselines": _differences,
}
