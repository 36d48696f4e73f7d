"""`epsilons attack`: what an attacker learns about members of each group, by shadow models."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..errors import InputError
from .options import AsJson, Quiet, Trust, option
from .train import check_free, next_free

EXAMPLES = """
[bold]Examples[/bold]

epsilons attack people.toml --shadows 64

epsilons attack runs/people-1 -o attacks/first

epsilons attack people.toml -o attacks/first --resume   # continue an interrupted attack

epsilons attack people.toml --attacks lira-shrunk,lira-offline,rmia,loss --placebo

epsilons attack runs/people-1 --json | jq .groups
"""


def command(
    target: Annotated[Path, typer.Argument(help="A .toml config, or the folder of a run.", metavar="CONFIG|RUN")],
    shadows: Annotated[int, option("Number of shadow models. More give narrower intervals.", min=8)] = 128,
    attacks: Annotated[str | None, option("Names, with commas. Default: lira-shrunk,rmia.")] = None,
    output: Annotated[
        Path | None, option("A new folder. Default: a free attacks/NAME-1, -2, …", "--output", "-o")
    ] = None,
    placebo: Annotated[
        bool, option("Also train DP-SGD shadows, to tell privacy from chance. Doubles the time.", "--placebo")
    ] = False,
    method: Annotated[str, option("stacked (64 shadows as one program), alone, or auto.")] = "auto",
    seed: Annotated[int, option("Seed of coins, draws and noise.", min=0)] = 0,
    jobs: Annotated[int | None, option("Processes. Default: one per core.", min=1)] = None,
    resume: Annotated[bool, option("Continue the attack in --output, or the last one.", "--resume")] = False,
    keep_scores: Annotated[
        bool,
        option("Keep the scores of single records, in secret/. They name the most exposed people.", "--keep-scores"),
    ] = False,
    trust: Trust = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Measure how well an attacker recognises the training records of each group.

    Shadow models are trained under the plan of the config or run, each on a random half of the records. Known attacks
    then guess the members of each shadow by its outputs on the records, and the result shows how often they are right,
    beside what the plan certifies that no attack can exceed. Test data are needed for the attack rmia.

    The shadows are trained on the real records, and no guarantee covers them or the result: keep it internal, and do
    not choose a plan by it. The result cannot show that a promise is kept; to test the promise, use epsilons audit.

    If people chose their budgets, add --placebo: groups may differ in their records, and the placebo shows by how much.
    An interrupted attack continues with --resume to the same result. To continue with more shadows, attack with
    --keep-scores.
    """
    folder = output or _default_folder(target, resume)
    if not resume:
        check_free(folder)
    elif not folder.is_dir():
        raise InputError(f"{folder} holds no attack to continue. Leave out --resume to start one there.")
    from . import attack_config  # torch is imported here

    names = None if attacks is None else tuple(name.strip() for name in attacks.split(","))
    flags = attack_config.AttackFlags(
        shadows, names, placebo, method, seed, jobs, resume, keep_scores, trust, as_json, quiet
    )
    attack_config.attack(target, folder, flags)


def _default_folder(target: Path, resume: bool) -> Path:
    name = target.stem if target.is_file() else target.resolve().name
    free = next_free(Path("attacks"), name)
    number = int(free.name.rpartition("-")[2])
    return free.with_name(f"{name}-{number - 1}") if resume and number > 1 else free
