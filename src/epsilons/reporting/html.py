"""Page: the contents as one HTML file, set by report.html.jinja."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined, Template
from markupsafe import Markup, escape

from ..escaping import printable
from ..planning import display
from .content import Contents
from .pictures import HEIGHT, bars, drawn
from .words import CAVEAT, CURVE, UNKNOWN_DATA

#: Stands near the beginning of every page, so that a report is known as one.
MARK = '<meta name="generator" content="epsilons report">'


def page(made: Contents) -> str:
    """The whole page."""
    stopped = made.charged if made.state != "finished" else None
    return _template().render(
        made=made,
        mark=Markup(MARK),
        bars=bars(made),
        curve=drawn(made.curve, stopped) if made.curve else None,
        height=HEIGHT,
        caveat=CAVEAT,
        curve_words=CURVE,
        unknown_data=UNKNOWN_DATA,
        influence=display.INFLUENCE,
    )


@cache
def _template() -> Template:
    environment = Environment(
        loader=PackageLoader(__package__, "."),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_shown,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "number": _number,
        "count": _count,
        "percent": _percent,
        "formula": _formula,
        "spent": _spent,
    }
    return environment.get_template("report.html.jinja")


def _shown(value: Any) -> Any:
    """Whatever stands in the page goes through here: names of tiers, classes and versions are text from data."""
    return printable(value) if isinstance(value, str) and not isinstance(value, Markup) else value


def _number(value: float | None) -> str:
    return "–" if value is None else display.number(value)


def _spent(value: float | None, promised: float | None) -> str:
    """A spend, rounded up but never beyond its promise; of merged groups only that each keeps to its own."""
    return "≤ own" if value is None or promised is None else display.spent(value, promised)


def _count(value: int | None) -> str:
    return "fewer than 20" if value is None else f"{value:,}"


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.1f} %"


def _formula(text: Any) -> Markup:
    """ε_i and e^{ε_i} as they are written by hand."""
    safe = re.sub(r"([εδ])_i", r"\1<sub>i</sub>", str(escape(printable(text))))
    return Markup(re.sub(r"\^\{(.*?)\}", r"<sup>\1</sup>", safe))
