"""`epsilons plan`: what each tier costs, before any training, from flags or from a config."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from .. import planning
from ..budgets.budgets import DEFAULT_DELTA
from ..core.disclosure import ADVICE_SUPPRESSED, has_small_cells, of_unit
from ..core.files import write_text
from ..core.notebook import new_figure, save_figure
from ..errors import InputError, PlanError, json_text, printable
from ..ledger.plan_folder import PlanFolder
from ..ledger.run_folder import RunFolder
from ..planning import Advice, Recipe, advise, balance, plan_file, risk_profile
from ..planning.class_balance import TIED, Classes
from ..planning.display import runs_of
from ..planning.plan_file import sealed
from ..reporting.html import check_replaceable, compare_page, save_page
from ..reporting.load_run import settings_of
from ..reporting.plan_page import PlanPage, advised, side_by_side
from . import options as opt
from . import plan_inputs
from .options import console, show_classes, show_comparison, show_plan, show_risk, show_table
from .plan_inputs import Asked, BudgetFlags, RecipeFlags, budgets_of

PLAN_EXAMPLES = """
[bold]Examples[/bold]

epsilons plan people.toml                                 # what `epsilons train people.toml` would train under

epsilons plan people.toml --set privacy.strategy=sample --epochs 20 --html plan.html

epsilons plan people.toml --serve -o plan.json            # a page on which tiers, steps and strategy can be moved

epsilons plan --shares 1:34%,2:43%,3:23% --records 60000 --batch-size 512 --steps 9375 --clip-norm 0.2

epsilons plan --budgets wishes.csv --column epsilon --batch-size 512 --epochs 30 -o plan.json

epsilons plan --budgets visits.csv --person patient_id --batch-size 512 --steps 2000   # one budget per person

epsilons plan --budgets wishes.csv --column tier --risks strict:odds=55 --tail 4,1e-5 --batch-size 512 --steps 2000

epsilons plan --shares 1:50%,8:50% --records 10000 --batch-size 256 --steps 1000 --compare sample --compare uniform

epsilons plan --budgets wishes.csv --batch-size 512 --steps 2000 --runs 10 -o tuning   # a folder that counts the runs
"""


@dataclass(frozen=True)
class PlanFlags:
    """What is shown of a plan, and where it is saved."""

    compare: Annotated[list[str] | None, opt.option("Also show this strategy. Repeatable.")] = None
    risk: Annotated[bool, opt.option("Also show what attacks could gain, by group.", "--risk")] = False
    registry: plan_inputs.Url = field(default=None, repr=False)
    share: plan_inputs.Share = None
    pepper: plan_inputs.Pepper = None
    trust: opt.Trust = False
    as_json: opt.AsJson = False
    output: Annotated[Path | None, opt.option("Save the plan here.", "--output", "-o")] = None
    html: Annotated[Path | None, opt.option("Also write a page for those who decide, e.g. plan.html.")] = None
    serve: Annotated[bool, opt.option("Move tiers, steps and strategy on a page of this machine.", "--serve")] = False
    quiet: opt.Quiet = False

    @property
    def charged(self) -> list[str]:
        """The key of [registry] that is given, as --set writes it."""
        return [] if self.share is None else [f"registry.share={self.share!r}"]


@opt.with_flags
def plan_command(
    recipe: RecipeFlags,
    budgets: BudgetFlags,
    flags: PlanFlags,
    config: Annotated[Path | None, typer.Argument(help="A .toml config, in place of flags for the budgets.")] = None,
    settings: opt.SetKeys = None,
) -> None:
    """Show what each tier of budgets gives and gets, before any training. Needs no torch.

    With a config, this is the plan that `epsilons train` would train under. Of the data, only the budgets are read.
    Under a registry it is the plan on what people have left now: torch and all data are read, and nothing is charged.
    Saved and signed, it is for epsilons train --plan, which refuses it once what is left has changed.
    """
    names, folder = [recipe.strategy or "", *(flags.compare or [])], Path() if config is None else config.parent
    plan_inputs.check_trusted(names, folder, flags.trust)
    if config is None:
        _check_no_registry(flags)
        asked = plan_inputs.of_flags(budgets, recipe, settings)
    else:
        texts = [*(settings or []), *flags.charged]
        asked = plan_inputs.of_config(config, budgets, recipe, texts, flags.trust, flags.registry, flags.pepper)
    _check_files(flags)
    if flags.serve:
        _serve(asked, flags)
        return
    plan = asked.plan()
    others = [asked.plan(name) for name in flags.compare or []]
    if flags.output:
        _save(plan, flags.output, asked.about.tiers)
    if flags.html:
        save_page(plan, asked.about, flags.html)
    if flags.as_json:
        risks = {"risk": [asdict(one) for one in planning.risk(plan)]} if flags.risk else {}
        print(json_text(sealed(plan.to_dict(asked.about.tiers) | risks), allow_nan=True))
    else:
        _show([plan, *others], asked, flags, is_config=config is not None)


def _check_no_registry(flags: PlanFlags) -> None:
    if flags.registry or flags.pepper or flags.charged:
        raise InputError("--registry, --share and --pepper need a config of people's data.")


def _check_files(flags: PlanFlags) -> None:
    if flags.output and flags.output.suffix == ".html":
        raise InputError(f"-o saves the plan itself, as JSON or as a folder. For its page: --html {flags.output}.")
    if flags.html:
        check_replaceable(flags.html)


def _serve(asked: Asked, flags: PlanFlags) -> None:
    from .serve import serve_plan  # needs starlette and uvicorn

    if flags.as_json or flags.risk or flags.compare:
        raise InputError("--serve shows odds and comparisons on its page; leave out --json, --risk and --compare.")
    save = partial(_save, output=flags.output, tiers=asked.about.tiers) if flags.output else None
    serve_plan(asked, save, flags.output, flags.html)


def _show(plans: list[planning.Plan], asked: Asked, flags: PlanFlags, is_config: bool) -> None:
    out, plan, about = console(quiet=flags.quiet), plans[0], asked.about
    show_plan(plan, out, about.tiers)
    if asked.classes is not None:
        show_classes(plan, asked.classes, asked.names, out)
    if len(plans) > 1:
        show_comparison(plans, out)
    if flags.risk:
        show_risk(plan, out)
    out.print(plan.guarantee, style="dim")
    if "registry" in about.facts:
        out.print(f"\nRegistry: {about.facts['registry']}.", style="bold yellow", soft_wrap=True)
    if about.read_off:
        out.print(f"\n{plan_inputs.not_covered(about)}", style="bold yellow")
    if is_config and not (flags.risk or flags.html):
        out.print("\nOdds of each tier: --risk. A page about it for those who decide: --html plan.html.", style="dim")
    if flags.output:
        out.print(f"\nSaved as {printable(flags.output)}" + ("/, which counts the runs" if runs_of(plan) else ""))
    if flags.html:
        out.print(f"\nThe page is {printable(flags.html)}. It is internal, confidential.")


def _save(plan: planning.Plan, output: Path, tiers: Mapping[str, float] | None = None) -> None:
    """As a file, or, for several runs, as the folder that counts them. Raises RunError if what is there is signed."""
    from ..ledger.signatures import check_unsigned  # only here: planning alone needs no cryptography

    check_unsigned(output)
    if not runs_of(plan):
        plan.save(output, tiers)
    elif output.suffix == ".json":
        raise InputError(
            f"A plan for several runs is kept in a folder, which counts them: -o {output.with_suffix('')}, without "
            f"{output.suffix}."
        )
    else:
        PlanFolder.create(output, plan, tiers)


# -- `epsilons compare`: plans side by side

COMPARE_EXAMPLES = """
[bold]Examples[/bold]

epsilons compare careful.json bold.json

epsilons compare careful.json bold.json runs/people-1 --html compare.html
"""


def compare_command(
    plans: Annotated[list[Path], typer.Argument(metavar="PLAN...", help="plan.json, or a folder that holds one.")],
    html: Annotated[Path | None, opt.option("Also write a page for those who decide, e.g. compare.html.")] = None,
    as_json: opt.AsJson = False,
    quiet: opt.Quiet = False,
) -> None:
    """Show two or three plans side by side: odds, noise and influence of each tier, and a verdict.

    Tiers have the names of the config that the plan was saved from. The plans may have other budgets, steps, batches,
    strategies or accountants. Each is verified. Where fewer than 20 hold some budget of a plan, it is shown by its
    promises alone; --json holds the numbers, for readers who may see them.
    """
    if not 2 <= len(set(plans)) == len(plans) <= 3:
        raise InputError(f"Compare two or three different plans, got {len(plans)}.")
    stems = [path.stem for path in plans]
    names = stems if len(set(stems)) == len(stems) else map(str, plans)
    files = [path / "plan.json" if path.is_dir() else path for path in plans]
    loaded = {name: planning.Plan.load(file) for name, file in zip(names, files, strict=True)}
    tiers = {name: found for name, path in zip(loaded, plans, strict=True) if (found := _tiers(path))}
    content = side_by_side(loaded, tiers)
    out = console(quiet=quiet or as_json)
    for table in (content.facts, *content.tables):
        show_table(([table.title, *content.names], [[label, *cells] for label, cells in table.rows]), out, left=1)
    out.print(risk_profile.ODDS, style="dim")
    out.print(printable(content.verdict), soft_wrap=True)
    for page in content.pages:
        verdict = page.verdict or of_unit(ADVICE_SUPPRESSED, page.plan.unit)
        out.print(f"{printable(page.about.name)}: {verdict}", soft_wrap=True)
    if html:
        check_replaceable(html)
        write_text(html, compare_page(content))
        out.print(f"\nThe page is {printable(html)}. It is internal, confidential.")
    if as_json:
        values = {"document": "epsilons comparison", "schema": 1, "verdict": content.verdict}
        print(json_text(values | {"plans": list(map(_values, content.pages))}))


def _tiers(path: Path) -> Mapping[str, float] | None:
    """The tiers of a plan, from its file, or of a run, from run.json."""
    run = RunFolder(path)
    if run.settings.is_file():
        settings = settings_of(run)
        return None if settings.registry else settings.metadata.tiers  # levels of lifetimes are no tiers
    return plan_file.read(run.plan if path.is_dir() else path)[0].tiers


def _values(page: PlanPage) -> dict[str, Any]:
    """A plan as it is saved, with the odds and influence of each group, and the verdict."""
    values, rights = page.plan.to_dict(), risk_profile.right_guesses(page.plan).tolist()
    for group, right, influence in zip(values["groups"], rights, page.plan.influence.tolist(), strict=True):
        group |= {"right_guesses": right, "influence": influence}
    return {"name": page.about.name, **values, "verdict": page.verdict}


# -- `epsilons advise`: compare the strategies for some budgets

ADVISE_EXAMPLES = """
[bold]Examples[/bold]

epsilons advise --shares 1:34%,2:43%,3:23% --records 50000 --batch-size 1024 --steps 1465

epsilons advise --budgets wishes.csv --batch-size 512 --steps 2000 --picture advice.svg

epsilons advise --shares 1:30%,3:70% --records 9000 --batch-size 512 --steps 400 --classes "1:80/20,3:10/90" --runs 10
  --html advice.html   # strategies, odds, classes and tuning on one page
"""


#: The flags of `epsilons advise` that describe budgets.
OF_BUDGETS = ("shares", "records", "budgets", "column", "tiers", "risks", "tail", "delta", "person", "conflict", "unit")


@dataclass(frozen=True)
class AdviseFlags:
    """The flags of `epsilons advise`."""

    steps: opt.Steps
    batch_size: opt.BatchSize
    shares: opt.Shares = None
    records: opt.Records = None
    budgets: opt.BudgetsFile = None
    column: opt.Column = "epsilon"
    tiers: opt.Tiers = None
    risks: opt.Risks = None
    tail: opt.Tail = None
    delta: opt.Delta = DEFAULT_DELTA
    person: opt.Person = None
    conflict: opt.Conflict = "refuse"
    unit: opt.UnitOption = "record"
    classes: opt.Classes = None
    runs: Annotated[int, opt.option("Runs that share the budgets.", panel=opt.TRAINING, min=1)] = 1
    accountant: opt.Accountant = "pld"
    picture: Annotated[Path | None, opt.option("Draw the comparison into this .png, .svg or .pdf file.")] = None
    html: Annotated[Path | None, opt.option("Also write a page with odds, noise and classes, e.g. advice.html.")] = None
    proxy: Annotated[
        str | None, opt.option("With --html: accuracy of PUBLIC data at these signals, 0.5:88%,1:91%,2:93%.")
    ] = None
    as_json: opt.AsJson = False


@opt.with_flags
def advise_command(flags: AdviseFlags) -> None:
    """Compare the strategies uniform, exclude, scale, mix and sample for your budgets, before any training.

    The comparison is a model: the signal-to-noise ratio of one step under each strategy, relative to uniform. It uses
    no training data.
    """
    asked = budgets_of(BudgetFlags(**{name: getattr(flags, name) for name in OF_BUDGETS}))
    recipe = Recipe(steps=flags.steps, batch_size=flags.batch_size, clip_norm=1.0)
    classes, names = opt.parse_classes(flags.classes)
    advice = advise(asked, recipe, flags.accountant, runs=flags.runs)
    suppressed = has_small_cells(advice.plan.groups)
    _write(advice, flags, classes, names, suppressed)
    if flags.as_json:
        print(json_text(advice.to_dict(), allow_nan=True))
        return
    out = console()
    if suppressed:
        out.print(of_unit(ADVICE_SUPPRESSED, asked.unit))
        return
    show_table(advice.table(), out, left=1)
    if classes is not None:
        parts = [[f"{part:.2f}" for part in balance(plan, classes).relative] for plan in advice.plans]
        rows = [[way.name, *row] for way, row in zip(advice.ways, parts, strict=True)]
        show_table((["weight / people", *(f"class {name}" for name in names)], rows), out, left=1)
        out.print(TIED)
    out.print(advice.verdict)
    if advice.of_tuning:
        out.print(f"{advice.of_tuning} epsilons docs tuning")
    out.print(advice.model, style="dim")
    out.print(advice.inputs, soft_wrap=True)
    for file in filter(None, (flags.picture, flags.html)):
        out.print(f"\nWritten: {printable(file)}. It is internal, confidential.")


def _write(
    advice: Advice, flags: AdviseFlags, classes: Classes | None, names: Sequence[str], is_suppressed: bool
) -> None:
    """The picture and the page that were asked for."""
    if (flags.picture or flags.html) and is_suppressed:
        raise PlanError(f"The picture or page is not made. {of_unit(ADVICE_SUPPRESSED, advice.plan.unit)}")
    if flags.html:
        check_replaceable(flags.html)
        proxy = None if flags.proxy is None else opt.parse_shares(flags.proxy)
        write_text(flags.html, compare_page(advised(advice, classes, names, proxy)))
    if flags.picture:
        _draw(advice, flags.picture)


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
