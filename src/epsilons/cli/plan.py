"""`epsilons plan`: what each tier costs, before any training."""

from __future__ import annotations

import dataclasses
from functools import partial
from pathlib import Path
from typing import Annotated

from .. import planning
from ..budgets import DEFAULT_DELTA
from ..errors import InputError
from ..escaping import json_text, printable
from ..plan_folder import PlanFolder
from ..planning import Recipe
from ..planning.plan_file import sealed
from . import options as opt
from .console import console, show_comparison, show_plan, show_risk

EXAMPLES = """
[bold]Examples[/bold]

epsilons plan --shares 1:34%,2:43%,3:23% --records 60000 --batch-size 512 --steps 9375 --clip-norm 0.2

epsilons plan --budgets wishes.csv --column epsilon --batch-size 512 --steps 2000 -o plan.json

epsilons plan --budgets visits.csv --person patient_id --batch-size 512 --steps 2000   # one budget per person

epsilons plan --shares 1:50%,8:50% --records 10000 --batch-size 256 --steps 1000 --compare sample --compare uniform

epsilons plan --budgets wishes.csv --batch-size 512 --steps 2000 --runs 10 -o tuning   # a folder that counts the runs
"""

PUBLIC_SHARES = """Shares declared as NOT derived from these data. The plan follows from them alone and also protects
presence. Goes with --public-records."""


def command(
    steps: opt.Steps,
    batch_size: opt.BatchSize,
    shares: opt.Shares = None,
    records: opt.Records = None,
    budgets: opt.BudgetsFile = None,
    column: opt.Column = "epsilon",
    tiers: opt.Tiers = None,
    delta: opt.Delta = DEFAULT_DELTA,
    delta_column: Annotated[
        str | None, opt.option("A column of deltas, in place of --delta.", panel=opt.BUDGETS)
    ] = None,
    person: opt.Person = None,
    conflict: opt.Conflict = "refuse",
    unit: opt.UnitOption = "record",
    public_shares: Annotated[str | None, opt.option(PUBLIC_SHARES, panel=opt.BUDGETS)] = None,
    public_records: Annotated[int | None, opt.option("The declared number of records.", panel=opt.BUDGETS)] = None,
    runs: Annotated[
        int,
        opt.option("Runs that share the budgets; -o then makes a folder.", panel=opt.TRAINING, min=1),
    ] = 1,
    clip_norm: Annotated[float, opt.option("Average of the tiers' clip norms (L2).", panel=opt.TRAINING)] = 1.0,
    strategy: opt.Strategy = "scale",
    option: Annotated[
        list[str] | None, opt.option("A strategy's option, name=value. Repeatable.", panel=opt.TRAINING)
    ] = None,
    accountant: opt.Accountant = "pld",
    compare: Annotated[list[str] | None, opt.option("Also show this strategy. Repeatable.")] = None,
    risk: Annotated[bool, opt.option("Also show what attacks could gain, by group.", "--risk")] = False,
    as_json: opt.AsJson = False,
    output: Annotated[Path | None, opt.option("Save the plan here.", "--output", "-o")] = None,
    quiet: opt.Quiet = False,
) -> None:
    """Show what each tier of budgets gives and gets, before any training. Needs no torch and no data."""
    recipe = Recipe(steps=steps, batch_size=batch_size, clip_norm=clip_norm)
    declared = opt.parse_shares(public_shares) if public_shares is not None else None
    asked = opt.budgets_from_options(
        shares,
        records,
        budgets,
        column,
        tiers,
        delta,
        delta_column,
        declared,
        public_records,
        person=person,
        conflict=conflict,
        unit=unit,
    )
    make = partial(planning.plan, asked, recipe, runs=runs, public_shares=declared, public_records=public_records)
    plan = make(strategy, accountant, **opt.strategy_options(opt.parse_options(option or [])))
    others = [make(name, accountant) for name in compare or []]
    if output:
        _save(plan, output)
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
    if output:
        out.print(f"\nSaved as {printable(output)}" + ("/, which counts the runs" if runs > 1 else ""))


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
