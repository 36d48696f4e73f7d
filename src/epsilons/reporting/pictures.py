"""Pictures: where the marks of a figure stand; the template draws them.

Widths are in percent and heights in pixels, so that a picture fits any page while its text stays as large as it is.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from .content import Contents, Curve, Group

HEIGHT = 260  # pixels of the curve's plot
APART = 17  # pixels between two labels


@dataclass(frozen=True)
class Bar:
    """promised, spent: percent of the picture's width; spent is None where it is not told."""

    group: Group
    promised: float | None
    spent: float | None


@dataclass(frozen=True)
class Tick:
    """A mark on an axis, at this place, in percent or pixels."""

    at: float
    text: str


@dataclass(frozen=True)
class DrawnLine:
    """path: of stairs, in a box of 1000 x 1000; label at this height in pixels, end of the line at `end`."""

    label: str
    path: str
    at: float
    end: float


@dataclass(frozen=True)
class DrawnCurve:
    """The curve's lines, axes, ends of phases and the charge so far (percent of the width)."""

    lines: tuple[DrawnLine, ...]
    across: tuple[Tick, ...]
    up: tuple[Tick, ...]
    phases: tuple[float, ...]
    charged: float | None

    @property
    def wide(self) -> bool:
        """True if a label needs more room beside the plot."""
        return any(len(line.label) > 8 for line in self.lines)


def bars(made: Contents) -> tuple[Bar, ...]:
    """One bar per row: its outline is the promise, its filling the spend."""
    top = max((group.row.at_most or 0.0 for group in made.groups), default=0.0)
    return tuple(
        Bar(
            group,
            100 * group.row.at_most / top if group.row.at_most else None,
            100 * group.epsilon_spent / top if group.epsilon_spent is not None and top else None,
        )
        for group in made.groups
    )


def drawn(curve: Curve, charged: int | None) -> DrawnCurve:
    """Stairs, not slopes: between two points the bound of the later one holds."""
    steps, highest = curve.steps[-1], max(max(line.epsilon_spent) for line in curve.lines)
    ticks = _ticks(highest)
    top = max(highest, ticks[-1]) * 1.04
    ends = [line.epsilon_spent[-1] for line in curve.lines]
    heights = [HEIGHT * (1 - end / top) for end in ends]
    lines = tuple(
        DrawnLine(line.label, _stairs(curve.steps, line.epsilon_spent, top), at, end)
        for line, at, end in zip(curve.lines, _pushed_apart(heights), heights, strict=True)
    )
    return DrawnCurve(
        lines=lines,
        across=tuple(Tick(100 * value / steps, f"{round(value):,}") for value in _ticks(steps, whole=True)),
        up=tuple(Tick(HEIGHT * (1 - value / top), f"{value:.4g}") for value in ticks),
        phases=tuple(100 * end / steps for end in curve.phase_ends[:-1]),
        charged=None if charged is None else 100 * charged / steps,
    )


def _stairs(steps: Sequence[int], epsilon_spent: Sequence[float], top: float) -> str:
    def x(step: int) -> str:
        return f"{1000 * step / steps[-1]:.1f}"

    def y(spent: float) -> str:
        return f"{1000 * (1 - spent / top):.1f}"

    parts = [f"M{x(0)},{y(0)}"]
    parts += [f"V{y(spent)}H{x(step)}" for step, spent in zip(steps[1:], epsilon_spent[1:], strict=True)]
    return "".join(parts)


def _ticks(highest: float, whole: bool = False) -> list[float]:
    """0 and up to five round numbers, none above `highest`.

    >>> _ticks(2.0), _ticks(9375, whole=True)
    ([0.0, 0.5, 1.0, 1.5, 2.0], [0.0, 2000.0, 4000.0, 6000.0, 8000.0])
    """
    if highest <= 0:
        return [0.0]
    power = 10.0 ** math.floor(math.log10(highest))
    for step in (power / 5, power / 2, power, 2 * power):
        if highest / step <= 5 + 1e-9 and not (whole and step < 1):
            break
    return [round(i * step, 12) for i in range(math.floor(highest / step * (1 + 1e-4)) + 1)]


def _pushed_apart(heights: Sequence[float]) -> list[float]:
    """The same heights, moved so that no two labels lie on one another and none outside.

    >>> _pushed_apart([100.0, 100.0, 5.0])
    [100.0, 83.0, 8.0]
    """
    placed = list(heights)
    order = sorted(range(len(heights)), key=lambda i: -heights[i])  # from the bottom up
    limit = float(HEIGHT)
    for i in order:
        placed[i] = min(placed[i], limit)
        limit = placed[i] - APART
    limit = APART / 2 - 0.5
    for i in reversed(order):
        placed[i] = max(placed[i], limit)
        limit = placed[i] + APART
    return placed
