"""The content as one HTML page, rendered by report.html.jinja; the page of a membership attack, by attack.html.jinja.

Positions in the pictures are in percent of the width and in pixels of the height, so a picture fits any page while its
text keeps its size.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined, Template
from markupsafe import Markup, escape

from ..core.disclosure import of_unit
from ..core.files import write_text
from ..errors import RunError, printable
from ..planning import Plan, advice, display
from .content import Content
from .membership import Estimate, GroupAttack, MembershipResult, Power
from .plan_page import About, PlanPage, SideBySide, make_page
from .plan_words import Curve
from .statements import approved, stated

# -- Tables for narrow screens: every cell knows the header of its column, and the style sheet stacks them
#
# The markup is that of this folder's templates, where every text from data is escaped, so a tag is a tag.

_TABLE = re.compile(r"<thead>(.*?)</thead>(.*?)</table>", re.S)
_HEADER = re.compile(r"<t[hd]\b[^>]*>(.*?)</t[hd]>", re.S)
_ROW = re.compile(r"(<tr\b[^>]*>)(.*?)</tr>", re.S)
_CELL = re.compile(r"<t([hd])\b([^>]*)>")
_TAG = re.compile(r"<[^>]*>")


def labelled(page: str) -> str:
    """The page, with the header of its column in every cell of a table's body.

    >>> labelled('<thead><tr><td></td><th>δ</th></tr></thead><tbody><tr><th>a</th><td>0.1</td></tr></tbody></table>')
    '<thead><tr><td></td><th>δ</th></tr></thead><tbody><tr><th>a</th><td data-label="δ">0.1</td></tr></tbody></table>'
    """
    return _TABLE.sub(_with_labels, page)


def _with_labels(table: re.Match[str]) -> str:
    headers = [_TAG.sub("", header).replace('"', "&quot;") for header in _HEADER.findall(table[1])]

    def row(match: re.Match[str]) -> str:
        names = iter(headers)

        def cell(match: re.Match[str]) -> str:
            name = next(names, "")
            return f'<t{match[1]}{match[2]} data-label="{name}">' if name else match[0]

        return f"{match[1]}{_CELL.sub(cell, match[2])}</tr>"

    return f"<thead>{table[1]}</thead>{_ROW.sub(row, table[2])}</table>"


# -- The content as one HTML page, rendered by report.html.jinja; the page of a membership attack, by
# attack.html.jinja

#: At the beginning of every page, so that a report is recognized.
MARK = '<meta name="generator" content="epsilons report">'
#: The same for the page of a plan.
PLAN_MARK = '<meta name="generator" content="epsilons plan">'

HEIGHT = 260  # pixels of the curve's plot
LABEL_HEIGHT = 17  # pixels between two labels


def page(content: Content) -> str:
    """The complete page."""
    stopped_at = content.status.charged if content.status.state != "finished" else None
    rendered = _template("report.html.jinja").render(
        content=content,
        mark=Markup(MARK),
        curve=drawn(content.curve, stopped_at) if content.curve else None,
        height=HEIGHT,
        influence=display.INFLUENCE,
        membership=content.membership,
        membership_picture=roc_picture(content.membership) if content.membership else None,
        guarantee=_parts_of_guarantee(content.guarantee),
    )
    return labelled(rendered)


def _parts_of_guarantee(text: str) -> tuple[list[str], list[str]]:
    """The lines for everyone, and the formal ones."""
    lines = text.split("\n")
    plain = lines[:1] if lines[0].startswith("In words: ") and len(lines) > 1 else []
    words = [line.removeprefix("In words: ") for line in plain]
    return [word[:1].upper() + word[1:] for word in words], lines[len(plain) :]


def attack_page(result: MembershipResult) -> str:
    """The page of a membership attack. It is internal."""
    rendered = _template("attack.html.jinja").render(
        result=result, picture=roc_picture(result), facts=_facts_of_attack(result)
    )
    return labelled(rendered)


def _facts_of_attack(result: MembershipResult) -> dict[str, str]:
    """How the shadows were made, by name."""
    setting = result.setting
    named = {
        "shadow models": f"{result.shadows:,}, each trained on a random half of {result.records:,} {result.unit}s",
        "how": setting.get("why"),
        "model": setting.get("model"),
        "steps": setting.get("steps"),
        "seed": setting.get("seed"),
        "population": setting.get("population"),
        "mean accuracy": None if result.accuracy is None else f"{_in_percent(result.accuracy)} on the population",
        "budgets": "assigned at random" if result.dealt_at_random else "chosen, or not known to be assigned at random",
        "placebo": None if result.placebo is None else "DP-SGD at the strictest budget, with the same coins",
    }
    return {name: f"{value:,}" if isinstance(value, int) else str(value) for name, value in named.items() if value}


def plan_page(content: PlanPage) -> str:
    """The page of a plan, before training. It is internal."""
    return _template("plan.html.jinja").render(
        page=content, mark=Markup(PLAN_MARK), guarantee=_parts_of_guarantee(content.plan.guarantee)
    )


def compare_page(content: SideBySide) -> str:
    """The page of plans side by side. It is internal."""
    return _template("compare.html.jinja").render(page=content, mark=Markup(PLAN_MARK), model=advice.MODEL)


def serve_page(nonce: str, values: Mapping[str, Any]) -> str:
    """The page of `epsilons plan --serve`. It is internal. values: what the script begins with, as JSON."""
    return _template("serve.html.jinja").render(nonce=nonce, values=values)


def sheet_page(mark: str, language: str, right: int, texts: Mapping[str, Any], sections: Mapping[str, Any]) -> str:
    """A sheet for the people of a tier. sections: name -> paragraphs"""
    template = _template("sheet.html.jinja")
    return template.render(mark=Markup(mark), language=language, right=right, texts=texts, sections=sections)


def annex_page(heads: Mapping[str, str], parts: Mapping[str, Any]) -> str:
    """An annex. heads: title, form, note and date; parts: title -> answered questions"""
    return _template("annex.html.jinja").render(heads=heads, parts=parts)


@cache
def _template(name: str) -> Template:
    return template(name, _FILTERS, autoescape=True, finalize=_without_control_characters)


def template(name: str, filters: Mapping[str, Callable[..., Any]], **options: Any) -> Template:
    """A template of this package."""
    environment = Environment(
        loader=PackageLoader(__package__, "templates"),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        **options,
    )
    environment.filters |= filters
    return environment.get_template(name)


def _without_control_characters(value: Any) -> Any:
    """Applied to every value on the page: names of tiers, classes and versions are text from data."""
    return printable(value) if isinstance(value, str) and not isinstance(value, Markup) else value


# -- values as text --------------------------------------------------------------------------------


def _or_dash(show: Callable[[float], str]) -> Callable[[float | None], str]:
    """The filter that shows a number, or a dash where there is none."""
    return lambda value: "–" if value is None or math.isnan(value) else show(value)


def _spent(value: float | None, promised: float | None) -> str:
    """A spend, rounded up but not beyond its promise. Of merged groups only that each keeps its promise."""
    return "≤ budget" if value is None or promised is None else display.rounded_spend(value, promised)


def _count(value: int | None) -> str:
    return "fewer than 20" if value is None else f"{value:,}"


def _in_percent(value: float) -> str:
    return f"{100 * value:.3g} %"


def _bound(value: float) -> str:
    """An upper bound between 0 and 1, rounded up to three places.

    >>> _bound(0.5401), _bound(1.0)
    ('0.541', '1.000')
    """
    return f"{math.ceil(1000 * value - 1e-9) / 1000:.3f}"


def _bound_percent(rate: float) -> str:
    """An upper bound on a rate in percent, rounded up to three digits.

    >>> _bound_percent(0.0843123), _bound_percent(0.0)
    ('8.44 %', '0 %')
    """
    return f"{display.round_up(100 * rate, 3):.3g} %"


def _interval(estimate: Estimate, show: str = "places") -> str:
    """The interval of an estimate in words; show: the filter of its ends."""
    if math.isnan(estimate.low) or math.isnan(estimate.high):
        return "no interval"
    return f"{_FILTERS[show](estimate.low)} to {_FILTERS[show](estimate.high)}"


def _formula(text: Any) -> Markup:
    """ε_i and e^{ε_i} with subscripts and superscripts."""
    safe = re.sub(r"([εδ])_i", r"\1<sub>i</sub>", str(escape(printable(text))))
    return Markup(re.sub(r"\^\{(.*?)\}", r"<sup>\1</sup>", safe))


def _used(part: tuple[float, float]) -> str:
    """The least and the most that people used of their budgets, or have left.

    >>> _used((0.0, 0.25)), _used((0.2504, 0.2501))
    ('0 to 25 %', '25 %')
    """
    least, most = (f"{100 * one:.3g}" for one in part)
    return f"{most} %" if least == most else f"{least} to {most} %"


_FILTERS: dict[str, Callable[..., Any]] = {
    "number": _or_dash(display.number),
    "percent": _or_dash(lambda value: f"{100 * value:.1f} %"),
    "floor3": _or_dash(lambda value: f"{math.floor(1000 * value) / 1000:g}"),
    "places": _or_dash(lambda value: f"{value:.4f}"),
    "signed": _or_dash(lambda value: f"{value:+.4f}".replace("-", "−")),
    "p_value": _or_dash(lambda value: f"{value:.2g}"),
    "in_percent": _or_dash(_in_percent),
    "bound": _bound,
    "up5": _or_dash(lambda value: display.number(display.round_up(value, 5))),
    "bound_percent": _bound_percent,
    "interval": _interval,
    "count": _count,
    "formula": _formula,
    "spent": _spent,
    "used": _used,
    "of_unit": of_unit,
    "approved": approved,
    "stated": stated,
}


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
        DrawnLine(
            re.sub("(, odds .*), TPR .*", r"\1", line.label), _stairs(curve.steps, line.epsilon_spent, top), at, end
        )
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


#: More groups than this are not drawn: evenly spaced ones are, from the strictest to the loosest.
MOST_DRAWN = 4
ROC_HEIGHT = 320  # pixels


@dataclass(frozen=True)
class DrawnRoc:
    """One group's lines, as paths in a box of 1000 x 1000. certified and declared are "" where there is none."""

    label: str
    attacked: str
    interval: str
    certified: str
    declared: str


@dataclass(frozen=True)
class RocPicture:
    """ROCs of one attack on logarithmic axes."""

    attack: str
    lines: tuple[DrawnRoc, ...]
    x_ticks: tuple[Tick, ...]
    y_ticks: tuple[Tick, ...]
    guessing: str
    height: int = ROC_HEIGHT


def roc_picture(result: MembershipResult) -> RocPicture:
    """The ROC of each group under the first attack, beside its certified curve."""
    outcomes = [one for one in result.attacks if one.attack == result.names[0]]
    most = min(len(outcomes), MOST_DRAWN)
    chosen = sorted({round(index * (len(outcomes) - 1) / max(most - 1, 1)) for index in range(most)})
    lowest = min((rate for index in chosen for rate in outcomes[index].roc.rate), default=0.1)
    power = math.floor(math.log10(min(lowest, 0.1)))
    ticks = [(one / power, f"{100 * 10.0**one:g} %") for one in range(power, 1)]
    ends = [10.0**power, 1.0]
    return RocPicture(
        attack=result.names[0],
        lines=tuple(_drawn_roc(outcomes[index], result, power) for index in chosen),
        x_ticks=tuple(Tick(100 * (1 - part), text) for part, text in ticks),
        y_ticks=tuple(Tick(ROC_HEIGHT * part, text) for part, text in ticks),
        guessing=_log_path(power, ends, ends),
    )


def _drawn_roc(one: GroupAttack, result: MembershipResult, power: int) -> DrawnRoc:
    roc, group = one.roc, result.groups[one.group]
    high, low = _log_path(power, roc.rate, roc.high), _log_path(power, roc.rate[::-1], roc.low[::-1])
    return DrawnRoc(
        label=group.label,
        attacked=_log_path(power, [*roc.rate, 1.0], [*roc.found, 1.0]) if len(roc.rate) else "",
        interval=f"{high}L{low[1:]}Z" if high else "",
        certified="" if result.suppressed else _log_curve(power, group.certified),
        declared="" if group.declared is None else _log_curve(power, group.declared),
    )


def _log_curve(power: int, curve: Power) -> str:
    drawn = curve.rate >= 10.0**power * 0.999
    return _log_path(power, [*curve.rate[drawn], 1.0], [*curve.power[drawn], 1.0])


def _log_path(power: int, rates: Iterable[float], values: Iterable[float]) -> str:
    """A path on axes from 10^power to 1."""

    def part(value: float) -> float:
        """0 at 1, 1 at the lowest value of the axis."""
        return math.log10(min(max(value, 10.0**power), 1.0)) / power

    points = [
        f"{1000 * (1 - part(rate)):.1f},{1000 * part(value):.1f}" for rate, value in zip(rates, values, strict=True)
    ]
    return "M" + "L".join(points) if points else ""


# -- Where the page of a plan is written: a new file, or in the place of another such page


def save_page(plan: Plan, about: About, path: Path) -> Path:
    """Write the page, whole or not at all, readable by its owner alone.

    Raises RunError for another ending, if the file cannot be written, and if it would replace something else.
    """
    check_replaceable(path)
    return write_text(path, plan_page(make_page(plan, about)))


def check_replaceable(path: Path) -> None:
    """Raise RunError unless the page of a plan may be written to this file."""
    if path.suffix != ".html":
        raise RunError(f"The page of a plan is saved as .html, got {path.name!r}.")
    check_marked(path, (PLAN_MARK,), "the page of a plan")


def check_marked(path: Path, marks: Sequence[str], what: str) -> None:
    """Raise RunError if there is another file than one that begins with one of these marks."""
    try:
        with path.open(encoding="utf-8") as opened:
            beginning = opened.read(400)
    except FileNotFoundError:
        return
    except (OSError, UnicodeDecodeError):
        beginning = ""
    if not any(mark in beginning for mark in marks):
        raise RunError(f"{path} exists and is not {what}, so it is not replaced. Choose another name.")
