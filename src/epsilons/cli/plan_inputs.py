"""What plan, train and attack are asked for: flags, or a config with settings of the command line."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Annotated, Any

from .. import planning
from ..accounting import ACCOUNTANTS
from ..accounting.selection import Selection
from ..budgets.budgets import DEFAULT_DELTA, Budgets
from ..budgets.ids import as_conflict, as_unit
from ..configs.config import Config
from ..configs.config_file import Setting, environment_settings, parse_settings, read_config, strategy_options
from ..configs.config_training import VARIABLE
from ..core.disclosure import at_least
from ..data.arrays import in_words
from ..errors import BudgetError, InputError, PlanError, printable
from ..planning import Plan, Recipe
from ..planning.planner import is_import_path
from ..reporting.plan_page import About
from . import options as opt

REGISTRY = "Lifetime budgets"

PUBLIC_SHARES = """Shares declared as NOT derived from these data. The plan follows from them alone and also protects
presence. Goes with --public-records."""


@dataclass(frozen=True)
class BudgetFlags:
    """The flags that describe budgets; None if they were not given."""

    shares: opt.Shares = None
    records: opt.Records = None
    budgets: opt.BudgetsFile = None
    column: Annotated[str | None, opt.option("Its column of budgets. Default: epsilon.", panel=opt.BUDGETS)] = None
    tiers: opt.Tiers = None
    risks: opt.Risks = None
    tail: opt.Tail = None
    delta: Annotated[float | None, opt.option("The delta of all records. Default: 1e-05.", panel=opt.BUDGETS)] = None
    delta_column: Annotated[str | None, opt.option("A column of deltas, in place of --delta.", panel=opt.BUDGETS)] = (
        None
    )
    person: opt.Person = None
    conflict: opt.Conflict = None
    unit: opt.UnitOption = None
    classes: opt.Classes = None
    public_shares: Annotated[str | None, opt.option(PUBLIC_SHARES, panel=opt.BUDGETS)] = None
    public_records: Annotated[int | None, opt.option("The declared number of records.", panel=opt.BUDGETS)] = None


@dataclass(frozen=True)
class RecipeFlags:
    """The flags that describe training; None if they were not given."""

    steps: Annotated[int | None, opt.option("Number of noisy updates.", panel=opt.TRAINING)] = None
    epochs: opt.Epochs = None
    batch_size: Annotated[float | None, opt.option("EXPECTED number of records per update.", panel=opt.TRAINING)] = None
    runs: Annotated[
        int | None,
        opt.option("Runs that share the budgets; -o then makes a folder. Default: 1.", panel=opt.TRAINING, min=1),
    ] = None
    select: opt.Select = None
    clip_norm: Annotated[
        float | None, opt.option("Average of the tiers' clip norms (L2). Default: 1.", panel=opt.TRAINING)
    ] = None
    strategy: opt.Strategy = None
    option: Annotated[
        list[str] | None, opt.option("A strategy's option, name=value. Repeatable.", panel=opt.TRAINING)
    ] = None
    accountant: Annotated[str | None, opt.one_of(ACCOUNTANTS, "Default: pld.")] = None

    def settings(self) -> list[Setting]:
        """The same as settings of a config."""
        if self.steps is not None and self.epochs is not None:
            raise InputError("Give either --steps or --epochs, not both.")
        keys = [("training", name) for name in ("steps", "epochs", "batch_size", "clip_norm")]
        keys += [("privacy", name) for name in ("strategy", "accountant", "runs", "select")]
        found = [Setting(key, value) for key in keys if (value := getattr(self, key[1])) is not None]
        if self.strategy is not None:  # options belong to one strategy
            found.append(Setting(("privacy", "options"), {}))
        options = opt.parse_options(self.option or [])
        return found + [Setting(("privacy", "options", name), value) for name, value in options.items()]


Url = Annotated[
    str | None, opt.option("The URL of the registry that the run is charged to. Or EPSILONS_REGISTRY.", panel=REGISTRY)
]
Share = Annotated[float | None, opt.option("The part of what people have left that it may use.", panel=REGISTRY)]
Pepper = Annotated[
    Path | None, opt.option("The key of the registry's pseudonyms. Default: beside a SQLite file.", panel=REGISTRY)
]


@dataclass(frozen=True)
class TrainFlags:
    """The flags of `epsilons train`."""

    plan: Annotated[Path | None, opt.option("A saved plan, or a folder that counts its runs, to train under.")] = None
    run_dir: Annotated[
        Path | None, opt.option("A new folder. Default: a free runs/NAME-1, -2, …", "--run-dir", "-o")
    ] = None
    seeds: Annotated[int | None, opt.option("Demonstration: runs per strategy, seeds 0, 1, … (default 5).", min=1)] = (
        None
    )
    resume: Annotated[bool, opt.option("Continue the run in --run-dir, or the config's last run.", "--resume")] = False
    starts_or_resumes: Annotated[
        bool, opt.option("Begin or continue the run in --run-dir, output.folder, or runs/NAME-1.", "--continue")
    ] = False
    settings: opt.SetKeys = None
    epochs: opt.Epochs = None
    strategy: opt.Strategy = None
    dry_run: Annotated[
        bool,
        opt.option("Read the data, build plan and model, and say what would be trained. Writes nothing.", "--dry-run"),
    ] = False
    registry: Url = field(default=None, repr=False)
    share: Share = None
    project: Annotated[str | None, opt.option("The project whose quota counts.", panel=REGISTRY)] = None
    pepper: Pepper = None
    trust: opt.Trust = False
    tensorboard: Annotated[bool, opt.option("Also write scores and spends for TensorBoard.", "--tensorboard")] = False
    mlflow: Annotated[bool, opt.option("Also log spends of tiers to MLflow, and no scores.", "--mlflow")] = False
    as_json: opt.AsJson = False
    quiet: opt.Quiet = False

    @property
    def charged(self) -> list[Setting]:
        """The keys of [registry] that are given."""
        given = {"share": self.share, "project": self.project}
        return [Setting(("registry", name), value) for name, value in given.items() if value is not None]

    @property
    def changed(self) -> tuple[Setting, ...]:
        """The keys of the config that are given."""
        recipe = RecipeFlags(epochs=self.epochs, strategy=self.strategy)
        return (*settings_of(recipe, self.settings), *self.charged)

    def check_resumed(self) -> None:
        """Raise InputError for flags that go with no run to continue."""
        if self.dry_run and (self.resume or self.starts_or_resumes):
            raise InputError("A dry run is for a new run; leave out --resume and --continue.")
        if self.resume and (self.plan is not None or self.starts_or_resumes):
            raise InputError("A run continues under its own plan; leave out --plan and --continue, or --resume.")

    def check_demonstration(self) -> None:
        """Raise InputError for flags that need a config."""
        trackers = self.tensorboard or self.mlflow
        if trackers or self.as_json or self.resume or self.dry_run or self.starts_or_resumes:
            raise InputError(
                "--tensorboard, --mlflow, --json, --resume, --continue and --dry-run need a config; the demonstration "
                "only prints its table."
            )
        if self.settings or self.epochs is not None or self.strategy is not None:
            raise InputError("--set, --epochs and --strategy change a config; give one. epsilons init drafts it.")
        if self.registry or self.pepper or self.charged:
            raise InputError("--registry, --share, --project and --pepper need a config of people's data.")


@dataclass(frozen=True)
class AttackFlags:
    """The flags of `epsilons attack`."""

    shadows: Annotated[int, opt.option("Number of shadow models. More give narrower intervals.", min=8)] = 128
    attacks: Annotated[str | None, opt.option("Names, with commas. Default: lira-shrunk,rmia.")] = None
    output: Annotated[
        Path | None, opt.option("A new folder. Default: a free attacks/NAME-1, -2, …", "--output", "-o")
    ] = None
    placebo: Annotated[
        bool, opt.option("Also train DP-SGD shadows, to tell privacy from chance. Doubles the time.", "--placebo")
    ] = False
    method: Annotated[str, opt.option("stacked (64 shadows as one program), alone, or auto.")] = "auto"
    seed: Annotated[int, opt.option("Seed of coins, draws and noise.", min=0)] = 0
    jobs: Annotated[int | None, opt.option("Processes. Default: one per core.", min=1)] = None
    resume: Annotated[bool, opt.option("Continue the attack in --output, or the last one.", "--resume")] = False
    keep_scores: Annotated[
        bool,
        opt.option(
            "Keep the scores of single records, in secret/. They name the most exposed people.", "--keep-scores"
        ),
    ] = False
    trust: opt.Trust = False
    as_json: opt.AsJson = False
    quiet: opt.Quiet = False

    @property
    def names(self) -> tuple[str, ...] | None:
        """The attacks that are named."""
        return None if self.attacks is None else tuple(name.strip() for name in self.attacks.split(","))


@dataclass(frozen=True)
class Asked:
    """What to plan.

    plan   None or the name of another strategy -> the plan
    about  what the page of the plan says beside the plan
    classes, names  how tiers and classes go together, and what the classes are called; None if it is not declared
    changed  of a config, with flags in the place of its keys: None or other budgets -> the plan
    budgets  of a config, those of its people
    """

    plan: Callable[..., Plan]
    about: About
    classes: Mapping[float, Sequence[float]] | None = None
    names: Sequence[str] = ()
    changed: Callable[[RecipeFlags, Budgets | None], Plan] | None = None
    budgets: Budgets | None = field(default=None, repr=False)


def of_config(
    file: Path,
    budgets: BudgetFlags,
    recipe: RecipeFlags,
    texts: Sequence[str] | None,
    trust: bool,
    registry: str | None = None,
    pepper: Path | None = None,
) -> Asked:
    """What a config asks for. Raises InputError for flags that describe other budgets.

    registry, pepper  as in `TrainFlags`: the plan is then on what people have left there, and charges nothing
    """
    from ..configs import prepare  # reads data

    given = [name for name, value in asdict(budgets).items() if value is not None]
    if given:
        flag = "--" + given[0].replace("_", "-")
        raise InputError(f"{flag} describes budgets, and those of a config are in its [budgets]: use --set budgets.….")
    config = read_config(file, settings_of(recipe, texts))
    check_trusted([config.privacy.strategy], file.parent, trust)
    if config.registry is not None or registry is not None:
        found, table = _on_accounts(config, file.parent, registry or os.environ.get(VARIABLE), pepper), []
    else:
        found = prepare.budgets_to_train(config, file.parent)
        table = [row for join in prepare.joined(config, file.parent, None, with_test=False) for row in join.table()]
    make = partial(prepare.plan_for, config, found, prepare.recipe_for(config, found))

    def changed(flags: RecipeFlags, moved: Budgets | None) -> Plan:
        other, people = read_config(file, (*settings_of(recipe, texts), *flags.settings())), moved or found
        return prepare.plan_for(other, people, prepare.recipe_for(other, people))

    return Asked(
        make, _about(config, file.stem, table), config.tied_classes, config.class_names, changed, budgets=found
    )


def _on_accounts(config: Config, folder: Path, url: str | None, pepper: Path | None) -> Budgets:
    """What people have left in a registry, of those who would take part in a run."""
    from ..configs.prepare import prepare
    from ..configs.registry_train import members_of
    from ..training.distributed import Ranks  # torch is imported here

    with members_of(url, pepper, config, folder, False, Ranks()) as members:
        return prepare(config, folder, members=members).budgets


def _about(config: Config, name: str, table: Sequence[dict[str, str]]) -> About:
    held_out = config.data.test_share or config.data.test_after or config.privacy.select
    if held_out:  # of a plan's number of people and an exact one, the difference would be theirs
        table = [row | _coarse(row["count"]) if row["what"] == "matched" else row for row in table]
    read_off = [entry for entry in config.data.provenance if entry.source == "read off the data"]
    model = {"model": config.model.name, "optimizer": f"{config.training.optimizer}, lr {config.training.lr:g}"}
    day = {} if config.budgets.as_of is None else {"entries of consent count as of": str(config.budgets.as_of)}
    facts = {"data": config.data.train, **model, **day}
    if os.environ.get(VARIABLE) and config.registry is None:
        facts["registry"] = NOT_CHARGED
    return About(
        name=name,
        tiers=config.budgets.levels if config.registry is None else None,  # levels of lifetimes are no tiers
        simulated=config.budgets.shares is not None,
        seeded=bool(config.training.seeds),
        stated=config.about,
        facts=facts | {f"{row['file']}: {row['what']}": row["count"] for row in table},
        read_off=in_words(read_off) if read_off else None,
        counted=bool(table),
    )


def _coarse(count: str) -> dict[str, str]:
    digits = count.replace(",", "")
    return {
        "what": "matched, also those to be held out",
        "count": at_least(int(digits)) if digits.isdecimal() else count,
    }


#: For a config without [registry], where the environment names one.
NOT_CHARGED = f"{VARIABLE} is set, but the config has no [registry], so neither plan nor run knows lifetime budgets"


def not_covered(about: About) -> str:
    """What the guarantee does not cover of a config, because it was read off the data."""
    return f"NOT COVERED by the guarantee, because they were read off the data: {printable(about.read_off or '')}."


def settings_of(recipe: RecipeFlags, texts: Sequence[str] | None) -> tuple[Setting, ...]:
    """The settings of the environment, then those of --set, and then those of other flags; later ones win."""
    return (*environment_settings(), *parse_settings(texts or ()), *recipe.settings())


def of_flags(budgets: BudgetFlags, recipe: RecipeFlags, texts: Sequence[str] | None) -> Asked:
    """What flags alone ask for. Raises InputError if something is missing."""
    if texts:
        raise InputError("--set changes keys of a config; give one, or use the flags (epsilons plan --help).")
    asked, named = budgets_of(budgets), budgets.risks is not None
    declared = opt.parse_shares(budgets.public_shares, named) if budgets.public_shares is not None else None
    make = partial(
        planning.plan,
        asked,
        _recipe(recipe, asked, budgets.public_records),
        accountant=recipe.accountant or "pld",
        runs=recipe.runs or 1,
        select=None if recipe.select is None else Selection.of(recipe.select),
        public_shares=declared,
        public_records=budgets.public_records,
    )
    options = strategy_options(opt.parse_options(recipe.option or []))

    def plan(strategy: str | None = None) -> Plan:
        return make(strategy=strategy) if strategy else make(strategy=recipe.strategy or "scale", **options)

    tiers = opt.parse_tiers(budgets.tiers) if budgets.tiers is not None else None
    tiers = tiers if asked.contract is None else asked.contract.levels
    return Asked(plan, About(tiers=tiers, simulated=budgets.shares is not None), *opt.parse_classes(budgets.classes))


def budgets_of(flags: BudgetFlags) -> Budgets:
    """The budgets that these flags describe. Raises BudgetError if they do not fit together."""
    unit, delta = as_unit(flags.unit or "record"), DEFAULT_DELTA if flags.delta is None else flags.delta
    shares, records = flags.shares, flags.records
    if flags.budgets is None and flags.person is not None:
        raise BudgetError("--person names a column of --budgets. For budgets by shares, give --unit person.")
    if flags.budgets is not None:
        if shares is not None or records is not None:
            raise BudgetError("Give either --budgets, or --shares with --records, not both.")
        if unit == "person" and flags.person is None:
            raise BudgetError("--unit person goes with --shares. With --budgets, name the column of ids: --person.")
        return _budgets_in(flags.budgets, flags, delta)
    if (shares, records) == (None, None):
        shares, records = flags.public_shares, flags.public_records
    if shares is None or records is None:
        raise BudgetError(
            "Give the budgets: --budgets FILE, or --shares with --records, or --public-shares with --public-records."
        )
    if by_risk := opt.parse_risks(flags.risks, flags.tail):
        risks, tail = by_risk
        return Budgets.by_risk(risks, opt.parse_shares(shares, named=True), tail=tail, records=records, unit=unit)
    return Budgets.from_shares(opt.parse_shares(shares), records=records, delta=delta, unit=unit)


def _budgets_in(file: Path, flags: BudgetFlags, delta: float) -> Budgets:
    columns: dict[str, Any] = {"column": flags.column or "epsilon", "delta_column": flags.delta_column}
    tiers, conflict = flags.tiers, as_conflict(flags.conflict or "refuse")
    columns |= {"tiers": None if tiers is None else opt.parse_tiers(tiers), "person": flags.person}
    if by_risk := opt.parse_risks(flags.risks, flags.tail):
        if tiers is not None:
            raise BudgetError("Give either --tiers or --risks.")
        columns["tiers"], (_, delta) = by_risk
    return Budgets.from_csv(file, delta=delta, conflict=conflict, **columns)


def check_trusted(names: Sequence[str], folder: Path, trust: bool) -> None:
    """Raise InputError if a model or strategy is named by import path, and --trust was not given.

    With --trust, modules are found in the current folder and in `folder`, too: last, so that none of their files is
    imported in the place of an installed module.
    """
    named = [name for name in names if is_import_path(name)]
    places = [str(Path().resolve()), str(folder.resolve())] if named else []
    if named and not trust:
        module = named[0].partition(":")[0]
        found = PathFinder.find_spec(module.partition(".")[0], [*sys.path, *places])  # imports nothing
        where = "is nowhere" if found is None else f"is in {found.origin or 'a folder without __init__.py'}"
        raise InputError(
            f"{named[0]!r} names code, and nothing was imported. The module {module!r} {where}. It can do whatever you "
            "can. If you trust its author and that of the file which names it, add --trust."
        )
    sys.path += [place for place in places if place not in sys.path]


def _recipe(flags: RecipeFlags, budgets: Budgets, declared: int | None) -> Recipe:
    if flags.batch_size is None or (flags.steps is None and flags.epochs is None):
        missing = "--batch-size" if flags.batch_size is None else "--steps, or --epochs"
        raise PlanError(f"Give a config, or {missing}. For a config drafted from your data: epsilons init DATA.csv")
    if flags.steps is not None and flags.epochs is not None:
        raise PlanError("Give either --steps or --epochs, not both.")
    sizes: dict[str, Any] = {"batch_size": flags.batch_size, "clip_norm": 1.0}
    if flags.clip_norm is not None:
        sizes["clip_norm"] = flags.clip_norm
    if flags.steps is not None:
        return Recipe(steps=flags.steps, **sizes)
    return Recipe.of_epochs(flags.epochs or 0.0, records=declared or budgets.records, **sizes)
