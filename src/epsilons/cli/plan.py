"""`epsilons plan`: what each tier costs, before anything is trained."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import typer

from .. import planning
from ..accounting import ACCOUNTANTS
from ..budgets import DEFAULT_DELTA
from ..escaping import json_text, printable
from ..planning import STRATEGIES, Recipe
from ..planning.plan_file import sealed
from .console import console, show_comparison, show_plan, show_risk
from .options import HOW, OUT, WHO, BatchSize, BudgetsFile, Column, Delta, Records, Shares, Steps, Tiers, who_asked
from .values import parse_options, parse_shares, strategy_options

EXAMPLES = """
[bold]Examples[/bold]

epsilons plan --shares 1:34%,2:43%,3:23% --records 60000 --batch-size 512 --steps 9375 --clip-norm 0.2

epsilons plan --budgets wishes.csv --column epsilon --batch-size 512 --steps 2000 -o plan.json

epsilons plan --shares 1:50%,8:50% --records 10000 --batch-size 256 --steps 1000 --compare sample --compare uniform
"""


def _named(words: str, known: Iterable[str]) -> Any:
    """An option whose value is a name in a table; the shell completes it."""
    return typer.Option(help=f"{words}: {', '.join(known)}.", rich_help_panel=HOW, autocompletion=lambda: list(known))


def command(
    steps: Steps,
    batch_size: BatchSize,
    shares: Shares = None,
    records: Records = None,
    budgets: BudgetsFile = None,
    column: Column = "epsilon",
    tiers: Tiers = None,
    delta: Delta = DEFAULT_DELTA,
    delta_column: Annotated[
        str | None, typer.Option(help="A column with a delta per record, instead.", rich_help_panel=WHO)
    ] = None,
    public_shares: Annotated[
        str | None,
        typer.Option(
            help="Shares declared as NOT derived from these data: the plan follows from them alone and protects "
            "presence, too. With --public-records.",
            rich_help_panel=WHO,
        ),
    ] = None,
    public_records: Annotated[int | None, typer.Option(help="Declared number of records.", rich_help_panel=WHO)] = None,
    clip_norm: Annotated[
        float, typer.Option(help="L2 norm that the tiers' clip norms average to.", rich_help_panel=HOW)
    ] = 1.0,
    strategy: Annotated[
        str,
        typer.Option(
            help=f"One of: {', '.join(STRATEGIES)}.", rich_help_panel=HOW, autocompletion=lambda: [*STRATEGIES]
        ),
    ] = "scale",
    option: Annotated[
        list[str] | None, typer.Option(help="A strategy's option as name=value; repeatable.", rich_help_panel=HOW)
    ] = None,
    accountant: Annotated[
        str,
        typer.Option(
            help=f"One of: {', '.join(ACCOUNTANTS)}.", rich_help_panel=HOW, autocompletion=lambda: [*ACCOUNTANTS]
        ),
    ] = "pld",
    compare: Annotated[
        list[str] | None, typer.Option(help="Another strategy to show beside it; repeatable.", rich_help_panel=OUT)
    ] = None,
    risk: Annotated[
        bool, typer.Option(help="Also show what attacks could gain, group by group.", rich_help_panel=OUT)
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the plan as JSON.", rich_help_panel=OUT)] = False,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Save the plan here.", rich_help_panel=OUT)
    ] = None,
    quiet: Annotated[
        bool, typer.Option("--quiet", "-q", help="Print nothing but errors.", rich_help_panel=OUT)
    ] = False,
) -> None:
    """Show, before training, what each tier of budgets gives and gets. Needs no torch and no data."""
    recipe = Recipe(steps=steps, batch_size=batch_size, clip_norm=clip_norm)
    declared = parse_shares(public_shares) if public_shares is not None else None
    who = who_asked(shares, records, budgets, column, tiers, delta, delta_column, declared, public_records)

    def make(way: str, options: dict[str, Any]) -> planning.Plan:
        return planning.plan(
            who, recipe, way, accountant, public_shares=declared, public_records=public_records, **options
        )

    options = strategy_options(parse_options(option or []))
    plan = make(strategy, options)
    others = [make(way, {}) for way in compare or []]
    if output:
        plan.save(output)
    if as_json:
        told = {"risk": [dataclasses.asdict(one) for one in planning.risk(plan)]} if risk else {}
        print(json_text(sealed(plan.to_dict() | told), allow_nan=True))
        return
    out = console(quiet=quiet)
    show_plan(plan, out)
    if others:
        show_comparison([plan, *others], out)
    if risk:
        show_risk(plan, out)
    out.print(plan.guarantee, style="dim")
    if output:
        out.print(f"\nSaved as {printable(output)}")
