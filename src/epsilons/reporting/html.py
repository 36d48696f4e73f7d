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
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined, Template
from markupsafe import Markup, escape

from ..core.disclosure import of_unit
from ..core.files import write_text
from ..errors import RunError, printable
from ..planning import Plan, display
from . import membership, sentences
from .content import Content
from .plan_page import About, PlanPage, make_page
from .plan_words import Curve

# -- Tables for narrow screens: every cell knows the header of its column, and the style sheet stacks them

_TABLE = re.compile(r"<thead>(.*?)</thead>(.*?)</table>", re.S)
_HEADER = re.compile(r"<t[hd]\b[^>]*>(.*?)</t[hd]>", re.S)
_ROW = re.compile(r"<tr>(.*?)</tr>", re.S)
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

        return f"<tr>{_CELL.sub(cell, match[1])}</tr>"

    return f"<thead>{table[1]}</thead>{_ROW.sub(row, table[2])}</table>"


# -- The words of a report, each in one plain sentence. A page explains those that it uses

_ALWAYS = (
    (
        "ε",
        "The limit on what anyone can learn about one member of the list: no conclusion about them becomes more than "
        "e^{ε} times as likely because their data were used. Smaller protects more.",
    ),
    ("δ", "A small probability with which that limit may fail, such as 1 in 100,000."),
    ("budget", "The ε (and δ) that was promised. Each tier is a group of members with the same budget."),
    ("plan", "The table, fixed before training, of how often members are drawn and how much noise is added."),
    ("ledger", "The file that counts the training steps, each before it is made, so that none is forgotten."),
    ("release", "Everything that leaves the training: the model, and every noisy update that made it."),
)
_NUMBERS = (
    ("sample_rate", "The chance of one member to be drawn in one training step, by an independent coin (Poisson)."),
    ("clip_norm", "The largest length of one member’s contribution to a step; a longer one is shortened to it."),
    ("noise", "Random numbers added to every step. noise_multiplier compares them with a member’s contribution."),
    ("influence", "How far one member can move the model over the whole training, compared with the noise."),
)
_PLD = (
    "PLD",
    "Privacy loss distribution: a method that adds up the privacy loss of all steps exactly, and rounds up.",
)
_RDP = ("RDP", "Rényi differential privacy: a method that adds up the privacy loss of all steps, and rounds up.")
_PHILOX = ("Philox", "A generator of random numbers that are computed from the run’s secret key.")
_CHACHA = ("ChaCha20", "A cipher; here it makes random numbers from the run’s secret key.")
_SETS = (
    "Pr[M(D)∈S]",
    "The probability that the training M with the data D releases one of the results in the collection S. The "
    "statement holds for every collection, so for every question that one could ask.",
)
_INTERVAL = ("95 % interval", "The range of accuracies that fit the size of the test set (Wilson’s interval).")
_AUC = ("AUC", "How often an attacker tells a person in the data from one outside: 0.5 is guessing, 1 is always.")


def words_of(content: Content) -> tuple[tuple[str, str], ...]:
    """(word, meaning) of those that the page uses."""
    bound = str(content.made_with.get("accountant", ""))
    source = str(content.made_with.get("randomness", ""))
    chosen = [
        (True, _ALWAYS),
        (content.phases is not None, _NUMBERS),
        ("PLD" in bound, (_PLD,)),
        ("RDP" in bound, (_RDP,)),
        ("Philox" in source, (_PHILOX,)),
        ("ChaCha20" in source, (_CHACHA,)),
        ("Pr[" in content.guarantee, (_SETS,)),
        (content.accuracy is not None, (_INTERVAL,)),
        (content.membership is not None, (_AUC,)),
    ]
    return tuple(word for is_used, words in chosen if is_used for word in words)


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
        words=words_of(content),
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
        loader=PackageLoader(__package__, "templates"),
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
    try:
        with path.open(encoding="utf-8") as opened:
            beginning = opened.read(400)
    except FileNotFoundError:
        return
    except (OSError, UnicodeDecodeError):
        beginning = ""
    if PLAN_MARK not in beginning:
        raise RunError(f"{path} exists and is not the page of a plan, so it is not replaced. Choose another name.")
