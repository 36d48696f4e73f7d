"""`epsilons consent check`: who takes part and who does not, file by file, before anything is trained."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from ..configs.config import Config
from ..configs.consent import Consent, stated
from ..errors import BudgetError, InputError, PromiseError, printable
from .options import AsJson, Quiet, SetKeys, console, option, show_table
from .plan_inputs import RecipeFlags, settings_of

if TYPE_CHECKING:
    from ..configs.registry_train import Members

HELP = (
    "Say who takes part and who does not, file by file, before anything is trained.\n\nCounts follow the rule of 20: "
    "small ones are joined. The exit code is 2 if training needs a decision that is missing: about people without an "
    "entry, cells that are no budget, or ids in several spellings. Nothing is written or charged."
)
EXAMPLES = "[bold]Example[/bold]\n\nepsilons consent check people.toml --registry sqlite:///people.db --json"

SAME_ROSTER = "as many people as these files allow, with the same budgets in the same order"

app = typer.Typer(name="consent", help="Who takes part, by a list or a registry.", no_args_is_help=True)


@app.command("check", help=HELP, epilog=EXAMPLES)
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
