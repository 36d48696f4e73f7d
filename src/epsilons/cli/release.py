"""`epsilons release`: the folder with a trained model that may be given away."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..escaping import printable
from .console import console
from .options import Quiet, option

EXAMPLES = """
[bold]Examples[/bold]

epsilons release runs/people-1                  # writes runs/people-1/release

epsilons predict runs/people-1/release new.csv -o scored.csv

epsilons release runs/people-1 -o model --undeclared    # for a test; marked NOT COVERED
"""


def command(
    run: Annotated[Path, typer.Argument(help="The folder of one finished run.", show_default=False)],
    output: Annotated[Path | None, option("A new folder. Default: RUN/release.", "--output", "-o")] = None,
    undeclared: Annotated[
        bool, option("Release in spite of the reasons against it. Every file then says NOT COVERED.", "--undeclared")
    ] = False,
    quiet: Quiet = False,
) -> None:
    """Write the folder to copy: the model, its preprocessing, a model card, the guarantee, and checksums.

    `epsilons predict` needs no other file. The folder holds no budget that fewer than 20 share, no score but on data
    that were declared public, no path of this machine, and no key.

    It is refused while a bound, a category list or the classes were read off the data (data.read_off in the config),
    because the guarantee does not cover them, and for runs with a seed, because the seed shows the noise.
    """
    from .. import reporting

    folder = reporting.release(run, output, undeclared)
    if not quiet:
        out = console()
        out.print(f"{printable(folder)}  may be given away, whole. Its README.md is the model card.", soft_wrap=True)
        out.print(f"Next: epsilons predict {printable(folder)} NEW.csv -o scored.csv", soft_wrap=True)
