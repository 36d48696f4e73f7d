"""Plans on the terminal: the tables of `planning.tables`, set by rich."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

from .. import planning
from ..disclosure import hides
from ..escaping import printable
from ..planning import Plan, display, risk_profile

WIDTH_WITHOUT_TERMINAL = 120


def console(stderr: bool = False, quiet: bool = False) -> Console:
    """A console that wraps at the terminal's width, or at 120 columns where there is no terminal."""
    stream = sys.stderr if stderr else sys.stdout
    return _console(stderr=stderr, quiet=quiet, width=None if stream.isatty() else WIDTH_WITHOUT_TERMINAL)


def _console(**settings: Any) -> Console:
    """Names from data may stand in what is printed: rich must not take a part of them for markup or an emoji."""
    return Console(highlight=False, markup=False, emoji=False, **settings)


def show_table(content: display.Table, out: Console, left: int = 0) -> None:
    """A table with one line under its head, columns right-aligned but for the first `left`; no number is cut off.

    Where a terminal is too narrow for it, columns become rows; where that does not help either, the terminal breaks
    the lines. Without a terminal it is as wide as it needs.
    """
    table, width = _set(content, left)
    if width > out.width and out.is_terminal:
        headers, rows = content
        first, *others = map(list, zip(headers, *rows, strict=True))
        turned, its_width = _set((first, others), 1)
        table, width = (turned, its_width) if its_width < width else (table, width)
    if width <= out.width:
        out.print(table)
    else:
        _console(file=out.file, quiet=out.quiet, width=width).print(table)


def _set(content: display.Table, left: int) -> tuple[Table, int]:
    """The table, and how wide it is."""
    headers, rows = content
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for place, header in enumerate(headers):
        table.add_column(printable(header), justify="left" if place < left else "right", no_wrap=True)
    for row in rows:
        table.add_row(*map(printable, row))
    unlimited = _console(width=10_000)
    return table, Measurement.get(unlimited, unlimited.options, table).maximum


def show_plan(plan: Plan, out: Console) -> None:
    """What each group gives and gets, phase by phase."""
    out.print(plan.title, style="bold")
    for title, table in display.phase_tables(plan):
        out.print(title)
        show_table(table, out)
    for note in plan.notes:
        out.print(note)


def show_risk(plan: Plan, out: Console) -> None:
    """What attacks could gain from each group, and what that owes to the others' budgets."""
    if hides(plan):  # and show_plan has said so
        show_table(risk_profile.risk_table(plan, ()), out)
        return
    risks = planning.risk(plan)
    show_table(risk_profile.risk_table(plan, risks), out)
    out.print(max(risks, key=lambda one: one.advantage).odds)
    out.print(risk_profile.EXCESS + "\n", style="dim")


def show_comparison(plans: Sequence[Plan], out: Console) -> None:
    """Several plans for the same people, side by side."""
    show_table(display.comparison_table(plans), out)
    if not hides(plans[0]):
        out.print(display.INFLUENCE + "\n", style="dim")
