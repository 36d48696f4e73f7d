"""`epsilons plan`: what each tier costs, before any training, from flags or from a config."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated

import typer

from .. import planning
from ..accounting import ACCOUNTANTS
from ..budgets.budgets import DEFAULT_DELTA
from ..core.disclosure import ADVICE_SUPPRESSED, has_small_cells, of_unit
from ..core.notebook import new_figure, save_figure
from ..errors import InputError, PlanError, json_text, printable
from ..ledger.plan_folder import PlanFolder
from ..planning import Advice, Recipe, advise
from ..planning.plan_file import sealed
from ..reporting.html import check_replaceable, save_page
from . import options as opt
from . import plan_inputs
from .options import console, show_comparison, show_plan, show_risk, show_table
from .plan_inputs import BudgetFlags, budgets_of

PLAN_EXAMPLES = """
[bold]Examples[/bold]

epsilons plan people.toml                                 # what `epsilons train people.toml` would train under

epsilons plan people.toml --set privacy.strategy=sample --epochs 20 --html plan.html

epsilons plan --shares 1:34%,2:43%,3:23% --records 60000 --batch-size 512 --steps 9375 --clip-norm 0.2

epsilons plan --budgets wishes.csv --column epsilon --batch-size 512 --epochs 30 -o plan.json

epsilons plan --budgets visits.csv --person patient_id --batch-size 512 --steps 2000   # one budget per person

epsilons plan --shares 1:50%,8:50% --records 10000 --batch-size 256 --steps 1000 --compare sample --compare uniform

epsilons plan --budgets wishes.csv --batch-size 512 --steps 2000 --runs 10 -o tuning   # a folder that counts the runs
"""

PUBLIC_SHARES = """Shares declared as NOT derived from these data. The plan follows from them alone and also protects
presence. Goes with --public-records."""


def plan_command(
    config: Annotated[Path | None, typer.Argument(help="A .toml config, in place of flags for the budgets.")] = None,
    steps: Annotated[int | None, opt.option("Number of noisy updates.", panel=opt.TRAINING)] = None,
    epochs: opt.Epochs = None,
    batch_size: Annotated[
        float | None, opt.option("EXPECTED number of records per update.", panel=opt.TRAINING)
    ] = None,
    shares: opt.Shares = None,
    records: opt.Records = None,
    budgets: opt.BudgetsFile = None,
    column: Annotated[str | None, opt.option("Its column of budgets. Default: epsilon.", panel=opt.BUDGETS)] = None,
    tiers: opt.Tiers = None,
    delta: Annotated[float | None, opt.option("The delta of all records. Default: 1e-05.", panel=opt.BUDGETS)] = None,
    delta_column: Annotated[
        str | None, opt.option("A column of deltas, in place of --delta.", panel=opt.BUDGETS)
    ] = None,
    person: opt.Person = None,
    conflict: opt.Conflict = None,
    unit: opt.UnitOption = None,
    public_shares: Annotated[str | None, opt.option(PUBLIC_SHARES, panel=opt.BUDGETS)] = None,
    public_records: Annotated[int | None, opt.option("The declared number of records.", panel=opt.BUDGETS)] = None,
    runs: Annotated[
        int | None,
        opt.option("Runs that share the budgets; -o then makes a folder. Default: 1.", panel=opt.TRAINING, min=1),
    ] = None,
    clip_norm: Annotated[
        float | None, opt.option("Average of the tiers' clip norms (L2). Default: 1.", panel=opt.TRAINING)
    ] = None,
    strategy: opt.Strategy = None,
    option: Annotated[
        list[str] | None, opt.option("A strategy's option, name=value. Repeatable.", panel=opt.TRAINING)
    ] = None,
    accountant: Annotated[str | None, opt.one_of(ACCOUNTANTS, "Default: pld.")] = None,
    settings: opt.SetKeys = None,
    compare: Annotated[list[str] | None, opt.option("Also show this strategy. Repeatable.")] = None,
    risk: Annotated[bool, opt.option("Also show what attacks could gain, by group.", "--risk")] = False,
    trust: opt.Trust = False,
    as_json: opt.AsJson = False,
    output: Annotated[Path | None, opt.option("Save the plan here.", "--output", "-o")] = None,
    html: Annotated[Path | None, opt.option("Also write a page for those who decide, e.g. plan.html.")] = None,
    quiet: opt.Quiet = False,
) -> None:
    """Show what each tier of budgets gives and gets, before any training. Needs no torch.

    With a config, this is the plan that `epsilons train` would train under. Of the data, only the budgets are read.
    """
    columns = (column, tiers, delta, delta_column, person, conflict, unit)
    of_budgets = plan_inputs.BudgetFlags(shares, records, budgets, *columns, public_shares, public_records)
    of_recipe = plan_inputs.RecipeFlags(
        steps, epochs, batch_size, clip_norm, strategy, accountant, runs, tuple(option or ())
    )
    plan_inputs.check_trusted([strategy or "", *(compare or [])], Path() if config is None else config.parent, trust)
    if config is None:
        asked = plan_inputs.of_flags(of_budgets, of_recipe, settings)
    else:
        asked = plan_inputs.of_config(config, of_budgets, of_recipe, settings, trust)
    if html:
        check_replaceable(html)
    plan = asked.plan()
    others = [asked.plan(name) for name in compare or []]
    if output:
        _save(plan, output)
    if html:
        save_page(plan, asked.about, html)
    if as_json:
        risks = {"risk": [dataclasses.asdict(one) for one in planning.risk(plan)]} if risk else {}
        print(json_text(sealed(plan.to_dict() | risks), allow_nan=True))
        return
    out = console(quiet=quiet)
    show_plan(plan, out)
    if others:
        show_comparison([plan, *others], out)
    if risk:
        show_risk(plan, out)
    out.print(plan.guarantee, style="dim")
    if asked.about.read_off:
        out.print(f"\n{plan_inputs.not_covered(asked.about)}", style="bold yellow")
    if config is not None and not (risk or html):
        out.print("\nOdds of each tier: --risk. A page about it for those who decide: --html plan.html.", style="dim")
    if output:
        out.print(f"\nSaved as {printable(output)}" + ("/, which counts the runs" if plan.runs > 1 else ""))
    if html:
        out.print(f"\nThe page is {printable(html)}. It is internal, confidential.")


def _save(plan: planning.Plan, output: Path) -> None:
    """As a file, or, for several runs, as the folder that counts them."""
    if plan.runs == 1:
        plan.save(output)
    elif output.suffix == ".json":
        raise InputError(
            f"A plan for several runs is kept in a folder, which counts them: -o {output.with_suffix('')}, without "
            f"{output.suffix}."
        )
    else:
        PlanFolder.create(output, plan)


# -- `epsilons advise`: compare the strategies for some budgets

ADVISE_EXAMPLES = """
[bold]Examples[/bold]

epsilons advise --shares 1:34%,2:43%,3:23% --records 50000 --batch-size 1024 --steps 1465

epsilons advise --budgets wishes.csv --batch-size 512 --steps 2000 --picture advice.svg
"""


def advise_command(
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
