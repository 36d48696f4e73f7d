"""`epsilons audit`: test the promise of a run or a plan, with canaries among its records."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from ..errors import InputError, PromiseError, json_text, printable
from . import stopped_by_sigterm
from .options import AsJson, Quiet, console, option, parse_groups, show_table, with_flags
from .plan_inputs import AttackFlags
from .train import check_free, next_free

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
