"""`epsilons train`: by a config; without one, the embedded digits, three ways or under a plan."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..errors import InputError
from . import launched

EXAMPLES = """
[bold]Examples[/bold]

epsilons init people.csv            # drafts people.toml: read it, mend it

epsilons train people.toml          # trains, into runs/people-1

epsilons report runs/people-1       # what was promised and spent, as a page

epsilons train people.toml --resume # goes on with the last one, if it was cut off

torchrun --nproc-per-node 4 -m epsilons train people.toml   # in four processes

epsilons train                      # the demonstration: 1,437 digits, simulated tiers, three ways

epsilons train --plan plan.json     # the digits under a plan made with: epsilons plan … --records 1437 -o plan.json
"""


def command(
    config: Annotated[
        Path | None, typer.Argument(help="A .toml file; `epsilons init` drafts one. Without it: the demonstration.")
    ] = None,
    plan: Annotated[
        Path | None, typer.Option(help="Train under this saved plan, not one made from the config.")
    ] = None,
    run_dir: Annotated[
        Path | None,
        typer.Option("--run-dir", "-o", help="A new folder for the run; by default the next free runs/NAME-1, -2, …"),
    ] = None,
    seeds: Annotated[
        int | None, typer.Option(help="Of the demonstration: runs per way, seeds 0, 1, … (default 5).", min=1)
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with the run in --run-dir, or with the last one of this config.")
    ] = False,
    tensorboard: Annotated[
        bool, typer.Option("--tensorboard", help="Write scores and epsilon charged for TensorBoard, beside the run.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the outcome as JSON.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print nothing but errors.")] = False,
) -> None:
    """Train under individual budgets: on your data, by a config, or the demonstration without one.

    The demonstration trains the same small model on handwritten digits three ways, with SIMULATED tiers of privacy:
    everyone at the strictest budget, Scale, and Sample. What comes out is the test accuracy of each, and what every
    tier was promised and spent.
    """
    if config is not None and seeds is not None:
        raise InputError("--seeds belongs to the demonstration; with a config, write seeds in its [training].")
    if config is None and (tensorboard or as_json or resume):
        raise InputError("--tensorboard, --json and --resume need a config; the demonstration only prints its table.")
    if config is None and launched.processes() > 1:
        raise InputError(
            "torchrun started several processes, and the demonstration needs one. Give a config, or leave out torchrun."
        )
    if plan is not None and resume:
        raise InputError("A run goes on under its own plan; leave out --plan, or --resume.")
    folder = run_dir or _default(config, resume)
    if not resume:
        check_free(folder)

    if config is not None:
        from . import train_config  # torch loads here

        train_config.train(config, folder, train_config.Wishes(plan, run_dir, quiet, as_json, tensorboard, resume))
        return
    from . import demo

    if plan is None:
        demo.three_ways(folder, range(seeds or 5), quiet)
    else:
        demo.under_plan(plan, folder, quiet)


def _default(config: Path | None, resume: bool) -> Path:
    if config is None:
        return next_free(Path("runs"), "digits")
    if config.is_file():
        from .config import read

        named = read(config).output.folder
        if named is not None:
            return Path(named)
    free = next_free(Path("runs"), config.stem)
    number = int(free.name.rpartition("-")[2])
    return free.with_name(f"{config.stem}-{number - 1}") if resume and number > 1 else free


def check_free(folder: Path) -> None:
    """Raise InputError if the folder holds anything, or its parents cannot be written."""
    try:
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise InputError(
                f"{folder} holds something already; it may be another run. Choose a folder that does not exist yet."
            )
    except OSError as error:
        raise InputError(f"{folder} cannot be used: {error.strerror or error}. Choose another folder.") from None


def next_free(parent: Path, name: str) -> Path:
    """runs/digits-1, or the first number that is not taken."""
    number = 1
    while (parent / f"{name}-{number}").exists():
        number += 1
    return parent / f"{name}-{number}"
