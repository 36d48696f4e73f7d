"""`epsilons train`: train by a config, or run the demonstration on the handwritten digits."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import typer

from ..configs.config import Config
from ..configs.config_file import Setting, parse_settings, read_config
from ..configs.plan_choice import last_config
from ..configs.prepare import prepare
from ..errors import InputError, printable
from ..ledger.run_folder import RunFolder, run_folders
from . import options as opt
from . import stopped_by_sigterm
from .options import console, show_plan, with_flags
from .plan_inputs import RecipeFlags, TrainFlags, check_trusted, settings_of

TRAIN_EXAMPLES = """
[bold]Examples[/bold]

epsilons train people.toml             # drafted by: epsilons init people.csv

epsilons train people.toml --dry-run   # what would be trained; writes nothing

epsilons train people.toml --set training.lr=0.5 --epochs 20

epsilons train people.toml --resume    # continue an interrupted run

epsilons train people.toml --run-dir runs/june --continue   # one line for a job: starts, goes on, or does nothing

epsilons train people.toml --registry sqlite:///people.db --share 0.25 --project cardiology

torchrun --nproc-per-node 4 -m epsilons train people.toml

epsilons train                         # the demonstration

epsilons train --plan plan.json        # the digits, under a plan for 1437 records
"""


@with_flags
def train_command(
    flags: TrainFlags,
    config: Annotated[Path | None, typer.Argument(help="A .toml file. Without it, the demonstration runs.")] = None,
) -> None:
    """Train under individual budgets: on your data, by a config, or on the digits as a demonstration.

    The demonstration trains the same small model on handwritten digits four times, with SIMULATED tiers: with all
    records at the strictest budget, without the strictest records, with Scale, and with Sample. It prints the test
    accuracy of each, and what each tier was promised and spent.

    With --continue, the command begins the run, goes on with it if it was interrupted, and does nothing if it is
    finished: repeat it until its exit code is 0. The run is in --run-dir, or else in output.folder of the config, or
    else in runs/NAME-1. On SIGTERM, the current step is finished, a checkpoint is saved, and the exit code is 75.
    """
    if config is not None and flags.seeds is not None:
        raise InputError("--seeds is for the demonstration; with a config, write seeds in its [training].")
    if config is None:
        flags.check_demonstration()
    flags.check_resumed()
    folder = flags.run_dir or _default_folder(config, flags)
    if not (flags.resume or flags.starts_or_resumes):
        check_free(folder)
    if config is None:
        _demonstrate(folder, flags)
        return
    if flags.starts_or_resumes:
        if _is_finished(read_config(config, flags.changed), folder, flags):
            return
        flags = replace(flags, resume=True)
    with stopped_by_sigterm():
        _train(config, folder, flags)


def _train(config: Path, folder: Path, flags: TrainFlags) -> None:
    from . import train_config  # torch is imported here

    url = train_config.registry_url(flags.registry, config, flags.changed, folder if flags.resume else None)
    if flags.dry_run:
        from .dry_run import dry_run as train_nothing

        train_nothing(config, folder, replace(flags, registry=url))
    else:
        train_config.train(config, folder, replace(flags, registry=url))


def _demonstrate(folder: Path, flags: TrainFlags) -> None:
    from ..training.distributed import launched_processes
    from . import demo

    if launched_processes() > 1:
        raise InputError("The demonstration runs in one process, got several from torchrun. Give a config.")
    if flags.plan is None:
        demo.all_strategies(folder, range(flags.seeds or 5), flags.quiet)
    else:
        demo.under_plan(flags.plan, folder, flags.quiet)


def _default_folder(config: Path | None, flags: TrainFlags) -> Path:
    if config is None:
        return next_free(Path("runs"), "digits")
    if config.is_file():
        folder = read_config(config, flags.changed).output.folder
        if folder is not None:
            return Path(folder)
    free = next_free(Path("runs"), config.stem)
    number = int(free.name.rpartition("-")[2])
    if flags.starts_or_resumes:
        number = 1
    elif flags.resume and number > 1:
        number -= 1
    return free.with_name(f"{config.stem}-{number}")


def _is_finished(config: Config, folder: Path, flags: TrainFlags) -> bool:
    """True, and said, if all runs of the config in this folder are finished."""
    runs = [RunFolder(path) for path in run_folders(folder, config.training.seeds).values()]
    found = [run.read_settings() for run in runs if run.settings.is_file()]
    if len(found) < len(runs) or not all("done" in settings for settings in found):
        return False
    text = f"{printable(folder)} is finished: nothing was done."
    if any(last_config(one) != config.model_dump(mode="json") for one in found):
        text += " It was trained by another config. To train by this one, name another folder: --run-dir."
    console(stderr=flags.as_json, quiet=flags.quiet).print(text, soft_wrap=True)
    if flags.as_json:
        print(json.dumps({"path": str(folder), "finished": True}))
    return True


def check_free(folder: Path) -> None:
    """Raise InputError if the folder is not empty, or cannot be used."""
    try:
        if (folder / "reservation.json").is_file() and not RunFolder(folder).has_ledger:
            raise InputError(
                f"{folder} holds a run that was reserved in a registry and never began. Begin it: --run-dir {folder} "
                f"--resume. Or give back what was reserved: epsilons registry settle URL {folder} --abandon."
            )
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise InputError(f"{folder} is not empty; it may be another run. Choose a folder that does not exist yet.")
    except OSError as error:
        raise InputError(f"{folder} cannot be used: {error.strerror or error}. Choose another folder.") from None


def next_free(parent: Path, name: str) -> Path:
    """runs/digits-1, or the first number that does not exist yet."""
    number = 1
    while (parent / f"{name}-{number}").exists():
        number += 1
    return parent / f"{name}-{number}"


# -- `epsilons tune`: try settings within the budgets, by a private selection

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
    if flags.dry_run and flags.as_json:
        raise InputError("A dry run shows the plan. As JSON: epsilons plan CONFIG --select … --json.")
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
        if flags.as_json:
            print(json.dumps({"path": None, "selected": None, "score": None}, indent=1))
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
        axes.append(parse_settings([f"{name}={value}" for value in re.split(r",(?![^\[]*\])", values)]))
    return list(itertools.product(*axes))
