"""`epsilons tune`: try settings within the budgets, by a private selection."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from ..configs.config_file import Setting, parse_settings, read_config
from ..configs.prepare import prepare
from ..errors import InputError, printable
from . import options as opt
from . import stopped_by_sigterm
from .options import console, show_plan
from .plan_inputs import RecipeFlags, check_trusted, settings_of

TUNE_EXAMPLES = """
[bold]Examples[/bold]

epsilons tune people.toml --grid lr=0.1,0.3,1,3

epsilons tune people.toml --grid lr=0.1,1 --grid momentum=0,0.9 --select poisson:4 -o runs/tuned   # again: it goes on

epsilons tune people.toml --grid model.name=logistic,mlp --grid lr=0.1,1 --dry-run   # what it costs; makes no run

epsilons advise --shares 1:50%,3:50% --records 10000 --batch-size 256 --steps 1000 --runs 10   # what tuning costs
"""

#: What a grid may change: a plan depends on none of these. Of [training], keys are written without the section.
KEYS = ("training.lr", "training.momentum", "training.optimizer", "model")
DEFAULT = "poisson:10"


@dataclass(frozen=True)
class TuneFlags:
    """The flags of `epsilons tune`."""

    grid: Annotated[list[str], opt.option("Values of a key to choose among, e.g. lr=0.1,1. Repeatable.")]
    output: Annotated[
        Path | None, opt.option("The folder of the selection. Default: runs/NAME-tuned.", "--output", "-o")
    ] = None
    select: opt.Select = None
    held_out: Annotated[float | None, opt.option("The part of the people that the runs are scored on.")] = None
    settings: opt.SetKeys = None
    dry_run: Annotated[bool, opt.option("Show the plan, and make no run.", "--dry-run")] = False
    trust: opt.Trust = False
    as_json: opt.AsJson = False
    quiet: opt.Quiet = False


@opt.with_flags
def tune_command(flags: TuneFlags, config: Annotated[Path, typer.Argument(help="A .toml file.")]) -> None:
    """Try settings within the budgets: make a secret number of runs, and keep the best.

    Each run draws its settings from the grid, and gets a score with noise on people who are held out. The worse of two
    runs is destroyed. All of it together spends each person's budget once, and needs more noise than one run: up to
    twice as much for ten runs, where ten runs that are all looked at need three times as much. Called again after an
    interruption, it goes on. SIGTERM ends it as it ends epsilons train --continue: a checkpoint, and exit code 75.
    """
    settings = _settings(config, flags)
    candidates = {", ".join(f"{s.name} = {s.value}" for s in one): one for one in _grid(flags.grid)}
    configs = {name: read_config(config, [*settings, *one]) for name, one in candidates.items()}
    first = next(iter(configs.values()))
    check_trusted([made.model.name for made in configs.values()] + [first.privacy.strategy], config.parent, flags.trust)
    from ..training.fitting.fit_loop import Run
    from . import train_config  # torch is imported here

    out = console(quiet=flags.quiet or flags.as_json)
    prepared = prepare(first, config.parent)
    train_config.show_data(prepared, out)
    show_plan(prepared.plan(), out)
    if flags.dry_run:
        return
    with stopped_by_sigterm(), out.status("Making a secret number of runs …"):
        found = train_config.tune(config, prepared, configs, flags.output or Path("runs") / f"{config.stem}-tuned")
    if found.path is None:
        out.print("The number of runs was drawn as 0, so there is no model. This is a result like others, and charged.")
        return
    selected = list(candidates)[found.candidate or 0]
    out.print(f"Selected: {printable(selected)}")
    out.print(f"Its share of right answers among the held-out, with noise: {found.score:.1%}")
    out.print(train_config.score(Run.load(found.path)).removeprefix("; ").capitalize())
    out.print(f"\nSaved in {printable(found.path)}/. Next: epsilons report {printable(found.path)}", soft_wrap=True)
    if flags.as_json:
        values = {one.name: one.value for one in candidates[selected]}
        print(json.dumps({"path": str(found.path), "selected": values, "score": found.score}, indent=1))


def _settings(config: Path, flags: TuneFlags) -> list[Setting]:
    """The settings of all runs. Raises InputError for a config that no selection takes."""
    settings = [*settings_of(RecipeFlags(), flags.settings)]
    settings += [Setting(("privacy", "held_out"), flags.held_out)] if flags.held_out is not None else []
    asked = read_config(config, settings)
    if asked.registry is not None or asked.training.seeds:
        raise InputError("A selection goes with neither [registry] nor training.seeds. Leave them out.")
    return [*settings, Setting(("privacy", "select"), flags.select or asked.privacy.select or DEFAULT)]


def _grid(texts: Sequence[str]) -> list[tuple[Setting, ...]]:
    """Every combination of the values. Raises InputError for keys that a grid cannot have."""
    axes = []
    for text in texts:
        key, equals, values = text.partition("=")
        name = key if "." in key else f"training.{key}"
        if not equals or not name.startswith(KEYS):
            raise InputError(
                f"--grid is written lr=0.1,1, for one of the keys {', '.join(KEYS)}.…; got {printable(text)!r}. A plan "
                "depends on all others."
            )
        axes.append(parse_settings([f"{name}={value}" for value in values.split(",")]))
    return list(itertools.product(*axes))
