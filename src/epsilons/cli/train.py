"""`epsilons train`: the embedded digits under simulated tiers, three ways, or under a plan of one's own."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..errors import InputError

EXAMPLES = """
[bold]Examples[/bold]

epsilons train

epsilons plan --shares 1:50%,4:50% --records 1437 --batch-size 256 --steps 100 -o plan.json

epsilons train --plan plan.json --out runs/first
"""


def command(
    plan: Annotated[
        Path | None, typer.Option(help="Train once, under this plan for the 1,437 training digits.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="A new folder for the run; by default the next free runs/digits-1, -2, …")
    ] = None,
    seeds: Annotated[int, typer.Option(help="Runs per way, seeds 0, 1, …; without --plan.", min=1)] = 5,
) -> None:
    """Train on the embedded handwritten digits, with SIMULATED tiers of privacy.

    Without --plan, the same small model is trained three ways: everyone at the strictest budget, Scale, and Sample;
    what comes out is the test accuracy of each and what every tier was promised and spent.
    """
    from . import demo  # torch loads here

    if out is not None and out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise InputError(
            f"{out} holds something already; it may be another run. Choose a folder that does not exist yet."
        )
    folder = out or demo.next_free(Path("runs"))
    if plan is None:
        demo.three_ways(folder, range(seeds))
    else:
        demo.under_plan(plan, folder)
