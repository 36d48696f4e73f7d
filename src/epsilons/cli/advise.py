"""`epsilons advise`: compare the strategies for some budgets."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from ..budgets import DEFAULT_DELTA
from ..disclosure import ADVICE_SUPPRESSED, has_small_cells, of_unit
from ..errors import PlanError
from ..escaping import json_text, printable
from ..figures import new_figure, save_figure
from ..planning import Advice, Recipe, advise
from . import options as opt
from .console import console, show_table
from .plan_inputs import BudgetFlags, budgets_of

EXAMPLES = """
[bold]Examples[/bold]

epsilons advise --shares 1:34%,2:43%,3:23% --records 50000 --batch-size 1024 --steps 1465

epsilons advise --budgets wishes.csv --batch-size 512 --steps 2000 --picture advice.svg
"""


def command(
    steps: opt.Steps,
    batch_size: opt.BatchSize,
    shares: opt.Shares = None,
    records: opt.Records = None,
    budgets: opt.BudgetsFile = None,
    column: opt.Column = "epsilon",
    tiers: opt.Tiers = None,
    delta: opt.Delta = DEFAULT_DELTA,
    person: opt.Person = None,
    conflict: opt.Conflict = "refuse",
    unit: opt.UnitOption = "record",
    runs: Annotated[int, opt.option("Runs that share the budgets.", panel=opt.TRAINING, min=1)] = 1,
    accountant: opt.Accountant = "pld",
    picture: Annotated[Path | None, opt.option("Draw the comparison into this .png, .svg or .pdf file.")] = None,
    as_json: opt.AsJson = False,
) -> None:
    """Compare the strategies uniform, exclude, scale, mix and sample for your budgets, before any training.

    The comparison is a model: the signal-to-noise ratio of one step under each strategy, relative to uniform. It uses
    no training data.
    """
    flags = BudgetFlags(shares, records, budgets, column, tiers, delta, None, person, conflict, unit)
    asked = budgets_of(flags)
    advice = advise(asked, Recipe(steps=steps, batch_size=batch_size, clip_norm=1.0), accountant, runs=runs)
    suppressed = has_small_cells(advice.plan.groups)
    if picture and suppressed:
        raise PlanError(f"The picture is not drawn. {of_unit(ADVICE_SUPPRESSED, asked.unit)}")
    if picture:
        _draw(advice, picture)
    if as_json:
        print(json_text(advice.to_dict(), allow_nan=True))
        return
    out = console()
    if suppressed:
        out.print(of_unit(ADVICE_SUPPRESSED, asked.unit))
        return
    show_table(advice.table(), out, left=1)
    out.print(advice.verdict)
    out.print(advice.model, style="dim")
    out.print(advice.inputs, soft_wrap=True)
    if picture:
        out.print(f"\nDrawn in {printable(picture)}")


def _draw(advice: Advice, path: Path) -> None:
    figure, axes = new_figure(7, 0.5 * len(advice.ways) + 1.2)
    names, signals = [way.name for way in advice.ways], [way.signal for way in advice.ways]
    bars = axes.barh(names, signals, color="#4c72b0")
    axes.axvline(advice.full_batch, color="#8172b2", linestyle=":", label="all records in every step")
    axes.bar_label(bars, fmt="%.2f", padding=2)
    axes.invert_yaxis()
    axes.set_xlabel("signal to noise of a step, relative to uniform (a model)")
    figure.legend(loc="outside lower center", frameon=False)  # below the axes, where it covers no bar and no label
    save_figure(figure, path if path.suffix else path.with_suffix(".png"))
