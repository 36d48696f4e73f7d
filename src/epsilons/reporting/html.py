"""The content as one HTML page, rendered by report.html.jinja; the page of a membership attack, by attack.html.jinja.

Positions in the pictures are in percent of the width and in pixels of the height, so a picture fits any page while its
text keeps its size.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined, Template
from markupsafe import Markup, escape

from ..disclosure import of_unit
from ..escaping import printable
from ..planning import display
from . import glossary, membership, sentences
from .content import Content
from .narrow import labelled
from .plan_numbers import Curve
from .plan_page import PlanPage

#: At the beginning of every page, so that a report is recognized.
MARK = '<meta name="generator" content="epsilons report">'
#: The same for the page of a plan.
PLAN_MARK = '<meta name="generator" content="epsilons plan">'

HEIGHT = 260  # pixels of the curve's plot
LABEL_HEIGHT = 17  # pixels between two labels


def page(content: Content) -> str:
    """The complete page."""
    stopped_at = content.status.charged if content.status.state != "finished" else None
    attacked = content.membership
    rendered = _template("report.html.jinja").render(
        content=content,
        mark=Markup(MARK),
        curve=drawn(content.curve, stopped_at) if content.curve else None,
        height=HEIGHT,
        sentences=sentences,
        influence=display.INFLUENCE,
        membership=attacked,
        membership_text=membership,
        membership_picture=membership.picture(attacked) if attacked else None,
        guarantee=_parts_of_guarantee(content.guarantee),
        words=glossary.words_of(content),
    )
    return labelled(rendered)


def _parts_of_guarantee(text: str) -> tuple[list[str], list[str]]:
    """The lines for everyone, and the formal ones."""
    lines = text.split("\n")
    plain = lines[:1] if lines[0].startswith("In words: ") and len(lines) > 1 else []
    words = [line.removeprefix("In words: ") for line in plain]
    return [word[:1].upper() + word[1:] for word in words], lines[len(plain) :]


def attack_page(values: Mapping[str, Any]) -> str:
    """The page of a membership attack, from the values of its JSON. It is internal."""
    result = membership.Result.model_validate(values)
    rendered = _template("attack.html.jinja").render(
        result=result, text=membership, picture=membership.picture(result), facts=membership.facts(result)
    )
    return labelled(rendered)


def plan_page(content: PlanPage) -> str:
    """The page of a plan, before training. It is internal."""
    return _template("plan.html.jinja").render(
        page=content, mark=Markup(PLAN_MARK), guarantee=_parts_of_guarantee(content.plan.guarantee)
    )


@cache
def _template(name: str) -> Template:
    environment = Environment(
        loader=PackageLoader(__package__, "."),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_without_control_characters,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "number": _number,
        "count": _count,
        "percent": _percent,
        "formula": _formula,
        "spent": _spent,
        "floor3": _lower,
        "of_unit": of_unit,
    }
    return environment.get_template(name)


def _without_control_characters(value: Any) -> Any:
    """Applied to every value on the page: names of tiers, classes and versions are text from data."""
    return printable(value) if isinstance(value, str) and not isinstance(value, Markup) else value


def _number(value: float | None) -> str:
    return "–" if value is None else display.number(value)


def _spent(value: float | None, promised: float | None) -> str:
    """A spend, rounded up but not beyond its promise. Of merged groups only that each keeps its promise."""
    return "≤ budget" if value is None or promised is None else display.rounded_spend(value, promised)


def _lower(value: float | None) -> str:
    """A lower bound, rounded down."""
    return "–" if value is None else f"{math.floor(1000 * value) / 1000:g}"


def _count(value: int | None) -> str:
    return "fewer than 20" if value is None else f"{value:,}"


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.1f} %"


def _formula(text: Any) -> Markup:
    """ε_i and e^{ε_i} with subscripts and superscripts."""
    safe = re.sub(r"([εδ])_i", r"\1<sub>i</sub>", str(escape(printable(text))))
    return Markup(re.sub(r"\^\{(.*?)\}", r"<sup>\1</sup>", safe))


# -- pictures --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Tick:
    """A mark on an axis, in percent or pixels."""

    at: float
    text: str


@dataclass(frozen=True)
class DrawnLine:
    """path: stairs in a box of 1000 x 1000. The label is at height `at`, and the line ends at `end`, in pixels."""

    label: str
    path: str
    at: float
    end: float


@dataclass(frozen=True)
class DrawnCurve:
    """Lines, ticks, ends of phases and the charge so far (percent of the width)."""

    lines: tuple[DrawnLine, ...]
    x_ticks: tuple[Tick, ...]
    y_ticks: tuple[Tick, ...]
    phases: tuple[float, ...]
    charged: float | None

    @property
    def is_wide(self) -> bool:
        """True if a label needs more room beside the plot."""
        return any(len(line.label) > 8 for line in self.lines)


def drawn(curve: Curve, charged: int | None) -> DrawnCurve:
    """Stairs, not slopes: between two points the bound of the later one holds."""
    steps, highest = curve.steps[-1], max(max(line.epsilon_spent) for line in curve.lines)
    ticks = _ticks(highest)
    top = max(highest, ticks[-1]) * 1.04
    heights = [HEIGHT * (1 - line.epsilon_spent[-1] / top) for line in curve.lines]
    lines = tuple(
        DrawnLine(line.label, _stairs(curve.steps, line.epsilon_spent, top), at, end)
        for line, at, end in zip(curve.lines, _pushed_apart(heights), heights, strict=True)
    )
    return DrawnCurve(
        lines=lines,
        x_ticks=tuple(Tick(100 * value / steps, f"{round(value):,}") for value in _ticks(steps, integers=True)),
        y_ticks=tuple(Tick(HEIGHT * (1 - value / top), f"{value:.4g}") for value in ticks),
        phases=tuple(100 * end / steps for end in curve.phase_ends[:-1]),
        charged=None if charged is None else 100 * charged / steps,
    )


def _stairs(steps: Sequence[int], epsilon_spent: Sequence[float], top: float) -> str:
    x = [f"{1000 * step / steps[-1]:.1f}" for step in steps]
    y = [f"{1000 * (1 - spent / top):.1f}" for spent in epsilon_spent]
    return f"M{x[0]},{y[0]}" + "".join(f"V{height}H{right}" for right, height in zip(x[1:], y[1:], strict=True))


def _ticks(highest: float, integers: bool = False) -> list[float]:
    """0 and up to five round numbers, none above `highest`.

    >>> _ticks(2.0), _ticks(9375, integers=True)
    ([0.0, 0.5, 1.0, 1.5, 2.0], [0.0, 2000.0, 4000.0, 6000.0, 8000.0])
    """
    if highest <= 0:
        return [0.0]
    power = 10.0 ** math.floor(math.log10(highest))
    for step in (power / 5, power / 2, power, 2 * power):
        if highest / step <= 5 + 1e-9 and not (integers and step < 1):
            break
    return [round(i * step, 12) for i in range(math.floor(highest / step * (1 + 1e-4)) + 1)]


def _pushed_apart(heights: Sequence[float]) -> list[float]:
    """The heights, moved so that no two labels overlap and none is outside the plot.

    >>> _pushed_apart([100.0, 100.0, 5.0])
    [100.0, 83.0, 8.0]
    """
    placed = list(heights)
    from_bottom = sorted(range(len(heights)), key=lambda i: -heights[i])
    limit = float(HEIGHT)
    for i in from_bottom:
        placed[i] = min(placed[i], limit)
        limit = placed[i] - LABEL_HEIGHT
    limit = LABEL_HEIGHT / 2 - 0.5
    for i in reversed(from_bottom):
        placed[i] = max(placed[i], limit)
        limit = placed[i] + LABEL_HEIGHT
    return placed
