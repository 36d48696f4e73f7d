"""`epsilons advise`: which way to plan, side by side."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..accounting import ACCOUNTANTS
from ..budgets import DEFAULT_DELTA
from ..disclosure import hides
from ..errors import PlanError
from ..escaping import json_text, printable
from ..figures import new_figure, save_figure
from ..planning import Advice, Recipe, advise
from ..planning.advice import WITHHELD
from .console import console, show_table
from .options import HOW, OUT, BatchSize, BudgetsFile, Column, Delta, Records, Shares, Steps, Tiers, who_asked

EXAMPLES = """
[bold]Example[/bold]

epsilons advise --shares 1:34%,2:43%,3:23% --records 50000 --batch-size 1024 --steps 1465
"""


def command(
    steps: Steps,
    batch_size: BatchSize,
    shares: Shares = None,
    records: Records = None,
    budgets: BudgetsFile = None,
    column: Column = "epsilon",
    tiers: Tiers = None,
    delta: Delta = DEFAULT_DELTA,
    accountant: Annotated[str, typer.Option(help=f"One of: {', '.join(ACCOUNTANTS)}.", rich_help_panel=HOW)] = "pld",
    picture: Annotated[
        Path | None, typer.Option(help="Draw the comparison into this .png, .svg or .pdf.", rich_help_panel=OUT)
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print as JSON.", rich_help_panel=OUT)] = False,
) -> None:
    """Compare uniform, exclude, scale, mix and sample for these budgets, before anything is trained."""
    who = who_asked(shares, records, budgets, column, tiers, delta)
    advice = advise(who, Recipe(steps=steps, batch_size=batch_size, clip_norm=1.0), accountant)
    withheld = hides(advice.plan)
    if picture and withheld:
        raise PlanError(f"The picture is not drawn. {WITHHELD}")
    if picture:
        _draw(advice, picture)
    if as_json:
        print(json_text(advice.to_dict(), allow_nan=True))
        return
    out = console()
    if withheld:
        out.print(WITHHELD)
        return
    show_table(advice.table(), out, left=1)
    out.print(advice.verdict)
    out.print(advice.model, style="dim")
    if picture:
        out.print(f"\nDrawn in {printable(picture)}")


def _draw(advice: Advice, path: Path) -> None:
    figure, axes = new_figure(7, 0.5 * len(advice.ways) + 1.2)
    names, signals = [way.name for way in advice.ways], [way.signal for way in advice.ways]
    bars = axes.barh(names, signals, color="#4c72b0")
    axes.axvline(advice.best, color="#c44e52", linestyle="--", label="best at this batch size")
    axes.axvline(advice.full_batch, color="#8172b2", linestyle=":", label="everyone in every step")
    axes.bar_label(bars, fmt="%.2f", padding=2)
    axes.invert_yaxis()
    axes.set_xlabel("signal to noise of a step, relative to uniform (a model)")
    axes.legend(loc="lower right", frameon=False)
    save_figure(figure, path if path.suffix else path.with_suffix(".png"))
