"""Plans on the terminal: the tables of `planning.display`, printed by rich."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

from .. import planning
from ..disclosure import has_small_cells, of_unit
from ..escaping import printable
from ..planning import Plan, display, risk_profile

WIDTH_WITHOUT_TERMINAL = 120


def console(stderr: bool = False, quiet: bool = False) -> Console:
    """A console as wide as the terminal, or 120 columns wide without a terminal."""
    stream = sys.stderr if stderr else sys.stdout
    return _console(stderr=stderr, quiet=quiet, width=None if stream.isatty() else WIDTH_WITHOUT_TERMINAL)


def _console(**settings: Any) -> Console:
    """Printed text may hold names from data, so rich must read no markup and no emoji in it."""
    return Console(highlight=False, markup=False, emoji=False, **settings)


def show_table(content: display.Table, out: Console, left: int = 0) -> None:
    """Print a table without cutting off a number; all columns but the first `left` are right-aligned.

    On a terminal that is too narrow, columns become rows, if that is narrower. Without a terminal the table is as wide
    as it needs to be.
    """
    table, width = _layout(content, left)
    if width > out.width and out.is_terminal:
        headers, rows = content
        first, *others = map(list, zip(headers, *rows, strict=True))
        turned, turned_width = _layout((first, others), 1)
        if turned_width < width:
            table, width = turned, turned_width
    if width <= out.width:
        out.print(table)
    else:
        _console(file=out.file, quiet=out.quiet, width=width).print(table)


def _layout(content: display.Table, left: int) -> tuple[Table, int]:
    """The table, and its width in characters."""
    headers, rows = content
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for number, header in enumerate(headers):
        table.add_column(printable(header), justify="left" if number < left else "right", no_wrap=True)
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
    """What attacks could gain from each group, and how much of it comes from the other groups' budgets."""
    if has_small_cells(plan.groups):  # show_plan has printed why
        show_table(risk_profile.risk_table(plan, ()), out)
        return
    risks = planning.risk(plan)
    show_table(risk_profile.risk_table(plan, risks), out)
    out.print(max(risks, key=lambda risk: risk.advantage).odds)
    out.print(risk_profile.EXCESS + "\n", style="dim")


def show_comparison(plans: Sequence[Plan], out: Console) -> None:
    """Several plans for the same budgets, side by side."""
    show_table(display.comparison_table(plans), out)
    if not has_small_cells(plans[0].groups):
        out.print(of_unit(display.INFLUENCE, plans[0].unit) + "\n", style="dim")
