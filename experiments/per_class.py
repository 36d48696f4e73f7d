"""The sections and heat maps of the tables in which one class has another epsilon than all others."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from epsilons.core.mechanism import FloatArray

from .classes import BASELINE, CLASSES, cell_name, changes, others, own
from .comparing import Expected, markdown, runs_of, value
from .results import Line
from .settings import Table

#: (strategy, epsilon of the class): each has a heat map.
PANELS = (("sample", 3), ("scale", 3), ("sample", 1), ("scale", 1))

STRATEGIES = ("sample", "scale")

#: Names of classes, by data set; elsewhere the number is the name.
NAMES = {"cifar10": ("airplane", "car", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")}


# -- page ----------------------------------------------------------------------------------------------------------


def body(table: Table, theirs: Expected, done: Mapping[str, Line]) -> str:
    """The accuracies of each class and of all others, at the other epsilon and at 2; then who gains and loses."""
    rows = [
        [name, *_subgroup(table, theirs, done, quantity, number)]
        for number in range(CLASSES)
        for name, quantity in ((str(number), "class_accuracy"), (f"all but {number}", "others_accuracy"))
    ]
    parts = [markdown(["class", *_header(theirs)], rows), gains(table, done)]
    return "\n\n".join(part for part in parts if part)


def _header(theirs: Expected) -> list[str]:
    """Columns for the class at ε = 3, at 2 like all others, and at 1."""
    columns = []
    for epsilon in (3, 2, 1):
        columns += [f"ε = {epsilon}, paper"] if theirs.cells else []
        columns += ["ε = 2"] if epsilon == 2 else [f"ε = {epsilon}, {strategy.title()}" for strategy in STRATEGIES]
    return columns


def _subgroup(table: Table, theirs: Expected, done: Mapping[str, Line], quantity: str, number: int) -> list[str]:
    """One row: the printed numbers, if there are any, and ours."""
    quantity = f"{quantity}[{number}]"
    row = []
    for epsilon in (3, 2, 1):
        cells = [BASELINE] if epsilon == 2 else [cell_name(strategy, number, epsilon) for strategy in STRATEGIES]
        row += _printed(theirs, cells[0], quantity) if theirs.cells else []
        row += [_ours(table, done, cell, quantity) for cell in cells]
    return row


def _printed(theirs: Expected, cell: str, quantity: str) -> list[str]:
    return [f"{row.mean:g} ± {row.sd:g}" for row in theirs.cells[cell] if row.quantity == quantity]


def _ours(table: Table, done: Mapping[str, Line], cell: str, quantity: str) -> str:
    run = runs_of(table.by_name[cell], done).get(0)
    return "**not run**" if run is None else f"{value(run, quantity):.1f}"


def gains(table: Table, done: Mapping[str, Line]) -> str:
    """The changes per class as Markdown; "" without any finished pair."""
    found = {panel: changes(table, done, *panel) for panel in PANELS}
    if all(np.isnan(own(matrix)).all() for matrix in found.values()):
        return ""
    titles = [f"{strategy.title()}, ε = {epsilon}" for strategy, epsilon in PANELS]
    rows = [[str(number), *(_cell(matrix, number) for matrix in found.values())] for number in range(CLASSES)]
    return (
        "### Points gained and lost, by the class with another budget\n\nThe change of the class itself, and in "
        "brackets the mean change of the nine other classes, against all classes at ε = 2. One seed.\n\n"
        + markdown(["class", *titles], rows)
    )


def _cell(matrix: FloatArray, number: int) -> str:
    if np.isnan(own(matrix)[number]):
        return "**not run**"
    return f"{own(matrix)[number]:+.1f} ({others(matrix)[number]:+.2f})"


# -- figure --------------------------------------------------------------------------------------------------------


def heat_maps(table: Table, done: Mapping[str, Line], axes: Axes) -> None:
    """Four heat maps in the place of `axes`: the changes of all classes, by the class with another budget."""
    figure = axes.figure
    assert isinstance(figure, Figure)
    axes.remove()
    figure.set_size_inches(7.2, 6.2)
    found = [changes(table, done, *panel) for panel in PANELS]
    most = max((float(np.abs(m[~np.isnan(m)]).max()) for m in found if not np.isnan(m).all()), default=1.0)
    places = figure.subplots(2, 2, sharex=True, sharey=True).flat
    for panel, matrix, place in zip(PANELS, found, places, strict=True):
        image = place.imshow(matrix, cmap=plt.get_cmap("RdBu").with_extremes(bad="0.88"), vmin=-most, vmax=most)
        runs = int((~np.isnan(own(matrix))).sum())
        grey = f" ({runs} of {CLASSES}; grey: not run)" if runs < CLASSES else ""
        place.set_title(f"{panel[0].title()}, ε = {panel[1]}{grey}")
        place.set_xticks(range(CLASSES))
        place.set_yticks(range(CLASSES), _names(table))
        _own_numbers(place, own(matrix), most)
    figure.supxlabel("class with another budget")
    figure.supylabel("class tested")
    figure.colorbar(image, ax=figure.axes, label="points above all classes at ε = 2", shrink=0.6)


def _names(table: Table) -> list[str]:
    """Labels of the rows: the number of the class, and its name if it has one."""
    names = NAMES.get(table.cells[0].settings.dataset, ("",) * CLASSES)
    return [f"{name} {number}".strip() for number, name in enumerate(names)]


def _own_numbers(place: Axes, changed: FloatArray, most: float) -> None:
    """The change of the class itself, written into the diagonal; white on dark cells."""
    for number in map(int, np.flatnonzero(~np.isnan(changed))):
        points = changed[number]
        colour = "white" if abs(points) > 0.6 * most else "black"
        digits = 0 if most > 10 else 1
        place.text(number, number, f"{points:+.{digits}f}", ha="center", va="center", fontsize=6, color=colour)
