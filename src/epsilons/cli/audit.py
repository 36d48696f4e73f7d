"""`epsilons audit`: put a run or a plan to the test, with canaries among its records."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import typer

from ..errors import InputError, PromiseError
from ..escaping import json_text, printable
from .console import console, show_table

EXAMPLES = """
[bold]Examples[/bold]

epsilons audit runs/first

epsilons audit runs/first --canaries 2000

epsilons audit plan.json -o audit.json --json | jq .verdict
"""


def command(
    run: Annotated[Path, typer.Argument(help="The folder of one run, or a saved plan.", show_default=False)],
    attack: Annotated[str, typer.Option(help="Which attack.")] = "canaries",
    canaries: Annotated[int, typer.Option(help="Canaries per group; more of them see more.", min=10)] = 1000,
    groups: Annotated[
        str | None,
        typer.Option(help="Which groups of the plan, as 0,2; by default those of 20 or more records, at most 8."),
    ] = None,
    engine: Annotated[str | None, typer.Option(help="Which engine; by default the run's own.")] = None,
    alpha: Annotated[float, typer.Option(help="Chance of calling an honest run violated.")] = 0.05,
    seed: Annotated[int | None, typer.Option(help="Repeat an audit.")] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Write the result there too, as JSON.")] = None,
    picture: Annotated[Path | None, typer.Option(help="Draw promise, spend and bounds there, as .svg.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Print nothing but errors and the exit code.")] = False,
) -> None:
    """Audit: train once more under a run's plan, with canaries among the records, and test the result.

    Canaries are synthetic records; they go through the same draw, clip, sum and noise as all others. Their scores are
    compared with what the plan promises, and epsilon is computed again from the recorded run. The result goes into the
    run's folder: audit.json and audit.svg. An audit can show that a promise is broken, never that it is kept.

    Exit code 3 if the result contradicts the plan. An audit takes as long as training a small model for as many steps.
    """
    from .. import auditing  # torch loads here
    from ..training import Performance

    out = console(quiet=quiet or as_json)
    result = auditing.audit(
        run,
        attack,
        canaries=canaries,
        groups=None if groups is None else _numbers(groups),
        performance=None if engine is None else Performance(engine=engine),
        seed=seed,
        alpha=alpha,
        progress=not quiet,
    )
    if output is not None:
        result.save(output)
    if picture is not None:
        auditing.draw(result, picture)
    if as_json:
        print(json_text(result.to_dict()))
    out.print(printable(f"{result.setting['trained']}, {result.setting['steps']:,} steps"), style="bold")
    show_table(result.table(), out)
    show_table(result.trace_table(), out, left=1)
    for sentence in result.sentences:
        out.print(printable(sentence))
    if not result.holds:
        raise PromiseError("The audit contradicts the plan: " + " ".join(result.sentences[:2]))


def _numbers(text: str) -> list[int]:
    if not re.fullmatch(r" *[0-9]{1,9} *(, *[0-9]{1,9} *)*", text):
        raise InputError(f"--groups takes the numbers of groups, like 0,2, got {text!r}.")
    return [int(part) for part in text.split(",")]
