"""Figures: the one place that loads matplotlib and writes its pictures, atomically and for their owner alone."""

from __future__ import annotations

from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING

from .errors import InputError
from .files import write_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FORMATS = (".png", ".svg", ".pdf")


def new_figure(width: float, height: float) -> tuple[Figure, Axes]:
    """A figure of so many inches with one pair of axes, without a frame at the top and on the right."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.subplots()
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def save_figure(figure: Figure, path: Path, formats: tuple[str, ...] = FORMATS) -> Path:
    """Write the figure to `path`, whole or not at all. Raises InputError unless it ends in one of the formats."""
    if path.suffix not in formats:
        raise InputError(f"A picture's name ends in {' or '.join(formats)}, got {path.name!r}.")
    dates = {"Date": None} if path.suffix == ".svg" else {"CreationDate": None} if path.suffix == ".pdf" else {}
    content = BytesIO()
    figure.savefig(content, format=path.suffix[1:], metadata={"Creator": None, **dates} if dates else None)
    return write_bytes(path, content.getvalue())
