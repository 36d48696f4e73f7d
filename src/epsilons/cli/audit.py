"""`epsilons audit`: test the promise of a run or a plan, with canaries among its records."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..errors import PromiseError
from ..escaping import json_text, printable
from .console import console, show_table
from .options import AsJson, Quiet, option, parse_groups

EXAMPLES = """
[bold]Examples[/bold]

epsilons audit runs/first

epsilons audit runs/first --canaries 2000

epsilons audit plan.json -o audit.json --json | jq .verdict
"""


def command(
    run: Annotated[Path, typer.Argument(help="The folder of one run, or a saved plan.", show_default=False)],
    attack: Annotated[str, option("The attack to use.")] = "canaries",
    canaries: Annotated[int, option("Canaries per group. More canaries detect smaller violations.", min=10)] = 1000,
    canary_rows: Annotated[
        int | None, option("Rows of each canary under a plan of persons. Default: 10.", min=1)
    ] = None,
    groups: Annotated[str | None, option("Groups, as 0,2. Default: those of 20 or more records, at most 8.")] = None,
    engine: Annotated[str | None, option("The engine to test. Default: the engine of the run.")] = None,
    alpha: Annotated[float, option("Probability of a false alarm: an honest run called violated.")] = 0.05,
    seed: Annotated[int | None, option("Makes the audit repeatable.")] = None,
    output: Annotated[Path | None, option("Also write the result here, as JSON.", "--output", "-o")] = None,
    picture: Annotated[Path | None, option("Also draw promise, spend and bounds here, as .svg.")] = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
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

    out = console(quiet=quiet or as_json)
    result = auditing.audit(
        run,
        attack,
        canaries=canaries,
        canary_rows=canary_rows,
        groups=None if groups is None else parse_groups(groups),
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
