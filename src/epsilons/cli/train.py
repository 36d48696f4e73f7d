"""`epsilons train`: train by a config, or run the demonstration on the handwritten digits."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..errors import InputError
from .options import AsJson, Quiet, option

EXAMPLES = """
[bold]Examples[/bold]

epsilons train people.toml             # drafted by: epsilons init people.csv

epsilons train people.toml --resume    # continue an interrupted run

torchrun --nproc-per-node 4 -m epsilons train people.toml

epsilons train                         # the demonstration

epsilons train --plan plan.json        # the digits, under a plan for 1437 records
"""


def command(
    config: Annotated[Path | None, typer.Argument(help="A .toml file. Without it, the demonstration runs.")] = None,
    plan: Annotated[Path | None, option("A saved plan, or a folder that counts its runs, to train under.")] = None,
    run_dir: Annotated[
        Path | None, option("A new folder. Default: a free runs/NAME-1, -2, …", "--run-dir", "-o")
    ] = None,
    seeds: Annotated[int | None, option("Demonstration: runs per strategy, seeds 0, 1, … (default 5).", min=1)] = None,
    resume: Annotated[bool, option("Continue the run in --run-dir, or the config's last run.", "--resume")] = False,
    tensorboard: Annotated[bool, option("Also write scores and spends for TensorBoard.", "--tensorboard")] = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Train under individual budgets: on your data, by a config, or on the digits as a demonstration.

    The demonstration trains the same small model on handwritten digits three times, with SIMULATED tiers: with all
    records at the strictest budget, with Scale, and with Sample. It prints the test accuracy of each, and what each
    tier was promised and spent.
    """
    if config is not None and seeds is not None:
        raise InputError("--seeds is for the demonstration; with a config, write seeds in its [training].")
    if config is None and (tensorboard or as_json or resume):
        raise InputError("--tensorboard, --json and --resume need a config; the demonstration only prints its table.")
    if plan is not None and resume:
        raise InputError("A run continues under its own plan; leave out --plan, or --resume.")
    folder = run_dir or _default_folder(config, resume)
    if not resume:
        check_free(folder)
    if config is not None:
        from . import train_config  # torch is imported here

        train_config.train(config, folder, train_config.TrainFlags(plan, quiet, as_json, tensorboard, resume))
        return
    from ..training.distributed import launched_processes
    from . import demo

    if launched_processes() > 1:
        raise InputError("The demonstration runs in one process, got several from torchrun. Give a config.")
    if plan is None:
        demo.three_strategies(folder, range(seeds or 5), quiet)
    else:
        demo.under_plan(plan, folder, quiet)


def _default_folder(config: Path | None, resume: bool) -> Path:
    if config is None:
        return next_free(Path("runs"), "digits")
    if config.is_file():
        from .config import read_config

        folder = read_config(config).output.folder
        if folder is not None:
            return Path(folder)
    free = next_free(Path("runs"), config.stem)
    number = int(free.name.rpartition("-")[2])
    return free.with_name(f"{config.stem}-{number - 1}") if resume and number > 1 else free


def check_free(folder: Path) -> None:
    """Raise InputError if the folder is not empty, or cannot be used."""
    try:
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
