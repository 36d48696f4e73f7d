"""Who asked for what: the options that say it, the same in every command, and the budgets that they come to."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..budgets import Budgets
from ..errors import BudgetError
from .values import parse_shares, parse_tiers

WHO, HOW, OUT = "Who asked for what", "How to train", "What to print"

Steps = Annotated[int, typer.Option(help="Noisy updates.", rich_help_panel=HOW)]
BatchSize = Annotated[float, typer.Option(help="EXPECTED records per update.", rich_help_panel=HOW)]
Shares = Annotated[
    str | None, typer.Option(help='Tiers as epsilon:share, e.g. "1:34%,2:43%,3:23%".', rich_help_panel=WHO)
]
Records = Annotated[int | None, typer.Option(help="Number of records, with --shares.", rich_help_panel=WHO)]
BudgetsFile = Annotated[
    Path | None, typer.Option(help="A .csv or .parquet file with one row per record.", rich_help_panel=WHO)
]
Column = Annotated[str, typer.Option(help="Its column of budgets.", rich_help_panel=WHO)]
Tiers = Annotated[str | None, typer.Option(help='If the column holds names: "strict:0.5,open:8".', rich_help_panel=WHO)]
Delta = Annotated[float, typer.Option(help="delta for all records.", rich_help_panel=WHO)]


def who_asked(
    shares: str | None,
    records: int | None,
    budgets: Path | None,
    column: str,
    tiers: str | None,
    delta: float,
    delta_column: str | None = None,
    declared: dict[float, float] | None = None,
    public_records: int | None = None,
) -> Budgets:
    """The budgets that these options describe, together. Raises BudgetError if they do not fit together."""
    if budgets is not None and (shares is not None or records is not None):
        raise BudgetError("Give either --budgets, or --shares with --records, not both.")
    if budgets is not None:
        names = None if tiers is None else parse_tiers(tiers)
        return Budgets.from_csv(budgets, column=column, delta=delta, delta_column=delta_column, tiers=names)
    if shares is not None and records is not None:
        return Budgets.from_shares(parse_shares(shares), records=records, delta=delta)
    if declared is not None and public_records is not None and shares is None and records is None:
        return Budgets.from_shares(declared, records=public_records, delta=delta)
    raise BudgetError(
        "Say who asked for what: --budgets FILE, or --shares with --records, or --public-shares with --public-records."
    )
