"""`epsilons train`: train by a config, or run the demonstration on the handwritten digits."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from ..configs.config import Config
from ..configs.config_file import read_config
from ..errors import InputError, printable
from ..ledger.run_folder import RunFolder, run_folders
from . import stopped_by_sigterm
from .options import console, with_flags
from .plan_inputs import TrainFlags

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
    if flags.plan is not None and url is not None:
        raise InputError("--plan is no plan on the accounts of the registry; leave out --plan, or --registry.")
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
    if any((one.get("metadata") or {}).get("config") != config.model_dump(mode="json") for one in found):
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
