"""`epsilons advise`: which way to plan, side by side."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from ..accounting import ACCOUNTANTS
from ..budgets import DEFAULT_DELTA
from ..planning import Advice, Recipe, advise, advising
from .plan import who_asked
from .show import console, show_table

EXAMPLES = """
[bold]Example[/bold]

epsilons advise --shares 1:34%,2:43%,3:23% --records 50000 --batch-size 1024 --steps 1465
"""

_WHO, _HOW, _OUT = "Who asked for what", "How to train", "What to print"


def command(
    steps: Annotated[int, typer.Option(help="Noisy updates.", rich_help_panel=_HOW)],
    batch_size: Annotated[float, typer.Option(help="EXPECTED records per update.", rich_help_panel=_HOW)],
    shares: Annotated[
        str | None, typer.Option(help='Tiers as epsilon:share, e.g. "1:34%,2:43%,3:23%".', rich_help_panel=_WHO)
    ] = None,
    records: Annotated[int | None, typer.Option(help="Number of records, with --shares.", rich_help_panel=_WHO)] = None,
    budgets: Annotated[
        Path | None, typer.Option(help="A .csv or .parquet file with one row per record.", rich_help_panel=_WHO)
    ] = None,
    column: Annotated[str, typer.Option(help="Its column of budgets.", rich_help_panel=_WHO)] = "epsilon",
    tiers: Annotated[
        str | None, typer.Option(help='If the column holds names: "strict:0.5,open:8".', rich_help_panel=_WHO)
    ] = None,
    delta: Annotated[float, typer.Option(help="delta for all records.", rich_help_panel=_WHO)] = DEFAULT_DELTA,
    accountant: Annotated[str, typer.Option(help=f"One of: {', '.join(ACCOUNTANTS)}.", rich_help_panel=_HOW)] = "pld",
    picture: Annotated[
        Path | None, typer.Option(help="Draw the comparison into this .png, .svg or .pdf.", rich_help_panel=_OUT)
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print as JSON.", rich_help_panel=_OUT)] = False,
) -> None:
    """Compare uniform, exclude, scale, mix and sample for these budgets, before anything is trained."""
    who = who_asked(shares, records, budgets, column, tiers, delta, None, None, None)
    advice = advise(who, Recipe(steps=steps, batch_size=batch_size, clip_norm=1.0), accountant)
    if picture:
        _draw(advice, picture)
    if as_json:
        print(json.dumps(advice.to_dict(), indent=1, ensure_ascii=False))
        return
    out = console()
    show_table(advice.table(), out, left=1)
    out.print(advice.verdict)
    out.print(advising.MODEL, style="dim")
    if picture:
        out.print(f"\nDrawn in {picture}")


def _draw(advice: Advice, path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 0.5 * len(advice.ways) + 1.2), layout="constrained")
    axes = figure.subplots()
    names, signals = [way.name for way in advice.ways], [way.signal for way in advice.ways]
    bars = axes.barh(names, signals, color="#4c72b0")
    axes.axvline(advice.best, color="#c44e52", linestyle="--", label="best at this batch size")
    axes.axvline(advice.full_batch, color="#8172b2", linestyle=":", label="everyone in every step")
    axes.bar_label(bars, fmt="%.2f", padding=2)
    axes.invert_yaxis()
    axes.set_xlabel("signal to noise of a step, relative to uniform (a model)")
    axes.legend(loc="lower right", frameon=False)
    figure.savefig(path)
