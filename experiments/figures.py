"""The figures of the results page, as SVG, without randomness and dates: they change with the results only."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

from .balance import histories
from .comparing import Compared, expected, runs_of, value
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


def draw(all_tables: Mapping[str, Table], done: Mapping[str, Line], folder: Path) -> dict[str, str]:
    """Write the figures for which there are runs; returns file name -> caption."""
    folder.mkdir(parents=True, exist_ok=True)
    captions: dict[str, str] = {}
    with plt.rc_context(STYLE):
        for name, plot in PLOTS.items():
            table = all_tables.get(name)
            if table is None or not any(runs_of(cell, done) for cell in table.cells):
                continue
            figure, axes = plt.subplots(figsize=(6.4, 3.6), layout="constrained")
            plot(table, done, axes)
            figure.savefig(folder / f"{name}.svg", metadata={"Date": None})
            plt.close(figure)
            captions[f"{name}.svg"] = table.title
    return captions


def _named(cell: Cell, runs: int) -> str:
    """The title of a cell, and how many of its seeds were run."""
    return f"{cell.title} ({f'{runs} of {len(cell.seeds)} seeds' if runs else 'not run'})"


def _rows(axes: Axes, names: list[str]) -> None:
    """One labelled row per name, from the top, also for rows without data."""
    axes.set_yticks([-i for i in range(len(names))], names)
    axes.set_ylim(0.6 - len(names), 0.6)


def _differences(table: Table, done: Mapping[str, Line], axes: Axes) -> None:
    theirs = expected(table.name)
    names: list[str] = []
    axes.use_sticky_edges = False  # otherwise bars end at the frame
    for cell in table.cells:
        if cell.name not in theirs.cells:
            continue
        runs = runs_of(cell, done)
        y = -len(names)
        names.append(_named(cell, len(runs)))
        if not runs:
            continue
        compared = Compared(theirs.cells[cell.name][0], tuple(value(line, "accuracy") for line in runs.values()))
        axes.barh(y, 2 * (compared.printed.sd or 0), left=-(compared.printed.sd or 0), color="0.85")
        axes.errorbar(compared.difference, y, xerr=compared.sd, fmt="o", color="C0", capsize=3)
    axes.axvline(0, color="0.5", linewidth=0.8)
    _rows(axes, names)
    axes.set(xlabel="points above the paper's mean (grey: ± its sd)")


def _accuracy(table: Table, done: Mapping[str, Line], axes: Axes) -> None:
    printed = {
        cell: [(None, number.mean) for number in numbers] for cell, numbers in expected(table.name).cells.items()
    }
    _curves(table, done, axes, "curve", lambda row, steps: row["step"], lambda row: row["accuracy"], 100, printed)
    axes.set(xlabel="steps", ylabel="test accuracy, % (x: the paper's)", ylim=(90, 99))
    axes.legend()


def _losses(table: Table, done: Mapping[str, Line], axes: Axes) -> None:
    printed = {
        cell: [(float(n.quantity.partition("@")[2]), n.mean) for n in numbers if n.quantity.startswith("group_loss")]
        for cell, numbers in expected(table.name).cells.items()
    }
    _curves(table, done, axes, "groups", lambda row, steps: row["step"] / steps, lambda row: row["loss"][0], 1, printed)
    top = 1.05 * axes.get_ylim()[1]
    axes.set(xlabel="part of the steps", ylabel="training loss of ε = 1 (x: the paper's)", ylim=(0, top))
    axes.set_xticks([0.25, 0.5, 0.75, 1.0])
    axes.legend()


def _curves(
    table: Table,
    done: Mapping[str, Line],
    axes: Axes,
    rows: str,
    place: Callable[[Any, int], float],
    score: Callable[[Any], float],
    scale: int,
    printed: Mapping[str, Sequence[tuple[float | None, float]]],
) -> None:
    """One curve per cell, the mean over its runs, and the paper's points (place, score); place None is the end."""
    for number, cell in enumerate(table.cells):
        colour, runs = f"C{number}", list(runs_of(cell, done).values())
        if not runs:
            axes.plot([], color=colour, label=_named(cell, 0))
            continue
        places = [place(row, runs[0]["steps"]) for row in runs[0][rows]]
        mean = [scale * sum(score(run[rows][i]) for run in runs) / len(runs) for i in range(len(places))]
        axes.plot(places, mean, color=colour, label=_named(cell, len(runs)))
        if points := printed.get(cell.name):
            at = [places[-1] if x is None else x for x, _ in points]
            axes.plot(at, [y for _, y in points], "x", color=colour)


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


def _momenta(table: Table, done: Mapping[str, Line], axes: Axes) -> None:
    """The accuracy of each method at both momenta: means over the seeds that both have."""
    names: list[str] = []
    for cell in table.cells:
        half, none = (
            {s: value(r, "accuracy") for s, r in runs_of(c, done).items()} for c in (cell.but(momentum=0.5), cell)
        )
        common = sorted(set(half) & set(none))
        y = -len(names)
        names.append(_named(cell, len(common)))
        if not common:
            continue
        ends = [sum(scores[seed] for seed in common) / len(common) for scores in (half, none)]
        axes.plot(ends, [y, y], color="0.7", zorder=1)
        for end, colour, label in zip(ends, ("C1", "C0"), ("momentum 0.5", "momentum 0"), strict=True):
            axes.plot(end, y, "o", color=colour, label=label if y == 0 else None)
    _rows(axes, names)
    axes.set(xlabel="test accuracy, %")
    axes.legend()


#: table -> the function that draws it. The caption is the title of the table.
PLOTS: dict[str, Callable[[Table, Mapping[str, Line], Axes], None]] = {
    "table_2": _differences,
    "table_untuned": _differences,
    "figure_advantage": _accuracy,
    "momentum": _momenta,
    "consumption": _spent,
    "convergence": _losses,
    "baselines": _differences,
    "individual_accounting": active_records,
    "per_class": heat_maps,
    "per_class_mnist": heat_maps,
    "class_balance": histories,
}
