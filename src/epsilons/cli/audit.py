"""`epsilons audit`, `attack` and `consent check`: test what was promised, and who may take part."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from ..configs.config import Config
from ..configs.consent import Consent, stated
from ..errors import BudgetError, InputError, PromiseError, json_text, printable
from . import stopped_by_sigterm
from .options import AsJson, Quiet, SetKeys, console, option, parse_groups, show_table, with_flags
from .plan_inputs import AttackFlags, RecipeFlags, settings_of
from .train import check_free, next_free

if TYPE_CHECKING:
    from ..configs.registry_train import Members

AUDIT_EXAMPLES = """
[bold]Examples[/bold]

epsilons audit runs/first

epsilons audit runs/first --canaries 2000

epsilons audit plan.json -o audit.json --json | jq .verdict
"""


@dataclass(frozen=True)
class AuditFlags:
    """The flags of `epsilons audit`."""

    attack: Annotated[str, option("The attack to use.")] = "canaries"
    canaries: Annotated[int, option("Canaries per group. More canaries detect smaller violations.", min=10)] = 1000
    canary_rows: Annotated[int | None, option("Rows of each canary under a plan of persons. Default: 10.", min=1)] = (
        None
    )
    groups: Annotated[str | None, option("Groups, as 0,2. Default: those of 20 or more records, at most 8.")] = None
    engine: Annotated[str | None, option("The engine to test. Default: the engine of the run.")] = None
    alpha: Annotated[float, option("Probability of a false alarm: an honest run called violated.")] = 0.05
    seed: Annotated[int | None, option("Makes the audit repeatable.")] = None
    output: Annotated[Path | None, option("Also write the result here, as JSON.", "--output", "-o")] = None
    picture: Annotated[Path | None, option("Also draw promise, spend and bounds here, as .svg.")] = None
    as_json: AsJson = False
    quiet: Quiet = False


@with_flags
def audit_command(
    run: Annotated[Path, typer.Argument(help="The folder of one run, or a saved plan.", show_default=False)],
    flags: AuditFlags,
) -> None:
    """Train once more under a run's plan, with canaries among the records, and test the result.

    Canaries are synthetic records; under a plan of persons, persons with 10 rows each. They pass through the same draw,
    clip, sum and noise as all others. The audit compares their scores with what the plan promises, and computes epsilon
    again from the recorded run. The result goes into the run's folder: audit.json and audit.svg. An audit can show that
    a promise is broken, never that it is kept.

    Exit code 3 if the result contradicts the plan. An audit takes as long as training a small model for as many steps.
    """
    from .. import auditing  # torch is imported here
    from ..training import Performance

    out = console(quiet=flags.quiet or flags.as_json)
    result = auditing.audit(
        run,
        flags.attack,
        canaries=flags.canaries,
        canary_rows=flags.canary_rows,
        groups=None if flags.groups is None else parse_groups(flags.groups),
        performance=None if flags.engine is None else Performance(engine=flags.engine),
        seed=flags.seed,
        alpha=flags.alpha,
        progress=not flags.quiet,
    )
    if flags.output is not None:
        result.save(flags.output)
    if flags.picture is not None:
        auditing.draw(result, flags.picture)
    if flags.as_json:
        print(json_text(result.to_dict()))
    out.print(printable(f"{result.setting['trained']}, {result.setting['steps']:,} steps"), style="bold")
    show_table(result.table(), out)
    show_table(result.trace_table(), out, left=1)
    for sentence in result.sentences:
        out.print(printable(sentence))
    if not result.holds:
        raise PromiseError("The audit contradicts the plan: " + " ".join(result.sentences[:2]))


# -- `epsilons attack`: what an attacker learns about members of each group, by shadow models

ATTACK_EXAMPLES = """
[bold]Examples[/bold]

epsilons attack people.toml --shadows 64

epsilons attack runs/people-1 -o attacks/first

epsilons attack people.toml -o attacks/first --resume   # continue an interrupted attack

epsilons attack people.toml --attacks lira-shrunk,lira-offline,rmia,loss --placebo

epsilons attack runs/people-1 --json | jq .groups
"""


@with_flags
def attack_command(
    target: Annotated[Path, typer.Argument(help="A .toml config, or the folder of a run.", metavar="CONFIG|RUN")],
    flags: AttackFlags,
) -> None:
    """Measure how well an attacker recognises the training records of each group.

    Shadow models are trained under the plan of the config or run, each on a random half of the records. Known attacks
    then guess the members of each shadow by its outputs on the records, and the result shows how often they are right,
    beside what the plan certifies that no attack can exceed. Test data are needed for the attack rmia.

    The shadows are trained on the real records, and no guarantee covers them or the result: keep it internal, and do
    not choose a plan by it. The result cannot show that a promise is kept; to test the promise, use epsilons audit.

    If people chose their budgets, add --placebo: groups may differ in their records, and the placebo shows by how much.
    An interrupted attack continues with --resume to the same result; SIGTERM ends it with exit code 75. To continue
    with more shadows, attack with --keep-scores.
    """
    folder = flags.output or _default_folder(target, flags.resume)
    if not flags.resume:
        check_free(folder)
    elif not folder.is_dir():
        raise InputError(f"{folder} holds no attack to continue. Leave out --resume to start one there.")
    from . import attack_config  # torch is imported here

    with stopped_by_sigterm():
        attack_config.attack(target, folder, flags)


def _default_folder(target: Path, resume: bool) -> Path:
    name = target.stem if target.is_file() else target.resolve().name
    free = next_free(Path("attacks"), name)
    number = int(free.name.rpartition("-")[2])
    return free.with_name(f"{name}-{number - 1}") if resume and number > 1 else free


# -- `epsilons consent check`: who takes part and who does not, file by file, before anything is trained

CONSENT_HELP = (
    "Say who takes part and who does not, file by file, before anything is trained.\n\nCounts follow the rule of 20: "
    "small ones are joined. The exit code is 2 if training needs a decision that is missing: about people without an "
    "entry, cells that are no budget, or ids in several spellings. Nothing is written or charged."
)
CONSENT_EXAMPLES = "[bold]Example[/bold]\n\nepsilons consent check people.toml --registry sqlite:///people.db --json"

SAME_ROSTER = "as many people as these files allow, with the same budgets in the same order"

app = typer.Typer(name="consent", help="Who takes part, by a list or a registry.", no_args_is_help=True)


@app.command("check", help=CONSENT_HELP, epilog=CONSENT_EXAMPLES)
def check(
    config: Annotated[Path, typer.Argument(help="The .toml file of the run.", show_default=False)],
    registry: Annotated[str | None, option("The URL of the registry of these people. Or EPSILONS_REGISTRY.")] = None,
    pepper: Annotated[Path | None, option("The key of its pseudonyms. Default: beside a SQLite file.")] = None,
    run: Annotated[Path | None, option("A run of this config: also check that its roster is of these people.")] = None,
    settings: SetKeys = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    from ..configs.config_file import read_config
    from ..configs.prepare import budgets_to_train, joined
    from ..configs.registry_train import VARIABLE

    found = read_config(config, settings_of(RecipeFlags(), settings))
    url = registry or (os.environ.get(VARIABLE) if found.registry is not None else None)
    if run is not None and url is not None:
        raise InputError(
            "The registry knows its rosters: epsilons registry export URL --excluded DAY. Leave out --run."
        )
    with _members(url, pepper, found) as members:
        joins = joined(found, config.parent, members)
    rows = list(chain.from_iterable(join.table() for join in joins))
    missing = list(chain.from_iterable(join.problems for join in joins))
    evidence = {} if run is None or missing else {"run": _of_run(found, config.parent, run, joins)}
    if as_json:
        print(json.dumps({"table": rows, "missing": missing, **evidence}, indent=1))
    else:
        _show(rows, "" if found.budgets.shares is None else "SIMULATED budgets", console(quiet=quiet))
    if missing:
        raise BudgetError(missing[0])
    if url is None:
        budgets_to_train(found, config.parent)  # refuses what training would refuse
    if evidence:
        console(quiet=quiet or as_json).print(f"The roster of {printable(str(run))}: {SAME_ROSTER}.")


@contextmanager
def _members(url: str | None, pepper: Path | None, config: Config) -> Iterator[Members | None]:
    """The people of a registry; None without its URL."""
    from ..configs.registry_train import Members, opened
    from ..training.distributed import Ranks

    if url is None:
        yield None
        return
    with opened(url, pepper, config.data.ids) as held:
        yield Members(held.id, held, Ranks(), 1.0, "", rule=held.spelling)


def _show(rows: list[dict[str, Any]], what: str, out: Console) -> None:
    if not rows:
        out.print("All records take part: the config leaves out none.")
        return
    show_table((["file", what, "count"], [list(row.values()) for row in rows]), out, left=2)
    out.print("Internal: a count before and one after show that somebody left.")


def _of_run(config: Config, folder: Path, run: Path, joins: list[Consent]) -> dict[str, Any]:
    """What the ledger of a run is evidence of. Raises PromiseError if its roster is not of the people of these files.

    Who people are is not compared: no file of a run tells.
    """
    from ..configs.prepare import budgets_to_train
    from ..reporting.load_run import load_run
    from ..training.opening import hash_of_groups
    from ..training.validation import groups_of

    record, budgets, kept = load_run(run), budgets_to_train(config, folder), stated(config, *joins)
    group = groups_of(budgets, record.plan, len(budgets)) if len(budgets) == record.plan.records else budgets.group
    if (hash_of_groups(group), kept) != (record.settings.roster, record.settings.metadata.consent):
        raise PromiseError(
            f"The roster of {run} is not of the people whom these files allow: files, config or day are others than "
            "when it began, or it trained on other people. Restore them, or train again."
        )
    return {"ledger": record.last_hash, "as_of": kept and kept["as_of"], "roster": SAME_ROSTER}
