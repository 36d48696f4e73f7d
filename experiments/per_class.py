"""The page and the figure of the table per_class: one class at another epsilon than all others."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from epsilons.mechanism import FloatArray

from .comparing import runs_of
from .results import Line
from .settings import Table

CLASSES = 10
BASELINE = "all-2"

#: (strategy, epsilon of the class): each has a heat map.
PANELS = (("sample", 3), ("scale", 3), ("sample", 1), ("scale", 1))


def accuracies(line: Line) -> FloatArray:
    """(classes,) test accuracy of each class, in %."""
    right, records = np.transpose(line["per_class"])
    shares: FloatArray = 100.0 * right / records
    return shares


def changes(table: Table, done: Mapping[str, Line], strategy: str, epsilon: int) -> FloatArray:
    """(classes, classes) points by which the accuracy of the row's class changes if the column's class has `epsilon`.

    A column whose run is missing is NaN.
    """
    matrix = np.full((CLASSES, CLASSES), np.nan)
    before = runs_of(table.by_name[BASELINE], done).get(0)
    for column in range(CLASSES):
        after = runs_of(table.by_name[f"{strategy}-{column}-at-{epsilon}"], done).get(0)
        if before is not None and after is not None:
            matrix[:, column] = accuracies(after) - accuracies(before)
    return matrix


def own(matrix: FloatArray) -> FloatArray:
    """(classes,) the change of each class if it has the other epsilon itself."""
    changed: FloatArray = np.diagonal(matrix)
    return changed


def others(matrix: FloatArray) -> FloatArray:
    """(classes,) by the class that has the other epsilon: the mean change of the nine others."""
    changed: FloatArray = (matrix.sum(axis=0) - own(matrix)) / (CLASSES - 1)
    return changed


# -- page ----------------------------------------------------------------------------------------------------------


def page(table: Table, done: Mapping[str, Line]) -> str:
    """The changes per class as Markdown; "" without any finished pair."""
    found = {panel: changes(table, done, *panel) for panel in PANELS}
    if all(np.isnan(own(matrix)).all() for matrix in found.values()):
        return ""
    titles = [f"{strategy.title()}, ε = {epsilon}" for strategy, epsilon in PANELS]
    lines = ["| class | " + " | ".join(titles) + " |", "|---" * (1 + len(PANELS)) + "|"]
    for number in range(CLASSES):
        lines.append(f"| {number} | " + " | ".join(_cell(matrix, number) for matrix in found.values()) + " |")
    counts = [_count(title, *panel, found[panel]) for title, panel in zip(titles, PANELS, strict=True)]
    return (
        "### Points gained and lost, by the class with another budget\n\nThe change of the class itself, and in "
        "brackets the mean change of the nine other classes, against all classes at ε = 2. One seed.\n\n"
        + "\n".join(lines)
        + "\n\n"
        + "\n".join(counts)
    )


def _cell(matrix: FloatArray, number: int) -> str:
    if np.isnan(own(matrix)[number]):
        return "**not run**"
    return f"{own(matrix)[number]:+.1f} ({others(matrix)[number]:+.1f})"


def _count(title: str, strategy: str, epsilon: int, matrix: FloatArray) -> str:
    """How many classes changed in the direction of their budget, and by how much at least."""
    run = ~np.isnan(own(matrix))
    if not run.any():
        return f"* {title}: not run"
    sign = 1 if epsilon == 3 else -1
    own_way, other_way = sign * own(matrix)[run], -sign * others(matrix)[run]
    word = "up" if sign > 0 else "down"
    return (
        f"* {title}: the class itself is {word} in {(own_way > 0).sum()} of {run.sum()} runs (by {own_way.min():.1f} "
        f"to {own_way.max():.1f} points), the mean of the others the other way in {(other_way > 0).sum()}"
    )


# -- figure --------------------------------------------------------------------------------------------------------


def heat_maps(table: Table, done: Mapping[str, Line], axes: Axes) -> None:
    """Four heat maps in the place of `axes`: the changes of all classes, by the class with another budget."""
    figure = axes.figure
    assert isinstance(figure, Figure)
    axes.remove()
    figure.set_size_inches(6.4, 6.0)
    for panel, place in zip(PANELS, figure.subplots(2, 2, sharex=True, sharey=True).flat, strict=True):
        matrix = changes(table, done, *panel)
        image = place.imshow(matrix, cmap="RdBu", vmin=-30, vmax=30)
        runs = int((~np.isnan(own(matrix))).sum())
        place.set_title(f"{panel[0].title()}, ε = {panel[1]}" + (f" ({runs} of {CLASSES})" if runs < CLASSES else ""))
        place.set_xticks(range(CLASSES))
        place.set_yticks(range(CLASSES))
    figure.supxlabel("class with another budget")
    figure.supylabel("class tested")
    figure.colorbar(image, ax=figure.axes, label="points above all classes at ε = 2", shrink=0.6)
