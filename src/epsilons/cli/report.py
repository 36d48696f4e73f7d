"""`epsilons report`: what a run promised, spent and reached, for the house and for release."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..errors import InputError
from ..escaping import printable
from .console import console

EXAMPLES = """
[bold]Examples[/bold]

epsilons report runs/first

epsilons report runs/first -o papers/first.html

epsilons report runs/first --json | jq .status
"""


def command(
    run: Annotated[Path, typer.Argument(help="The folder of one run.", show_default=False)],
    output: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", help="The internal page; the other three files stand beside it. [RUN/report.html]"
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the internal report as JSON; write nothing.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Say nothing but errors.")] = False,
) -> None:
    """Write a run's report: a page and its JSON for internal use, and both again for release.

    The plan is verified and the ledger checked once more. The internal files are confidential: they show every budget
    that was chosen. In the files for release, budgets shared by fewer than 20 records are merged, and nothing stands
    that was measured on private data.
    """
    from .. import reporting

    if as_json and output is not None:
        raise InputError("--json prints the report and writes no file; give either --json or --output.")
    internal = reporting.report(run)
    if as_json:
        print(reporting.dumps(internal))
        return
    page = output or run / "report.html"
    if page.suffix != ".html":
        raise InputError(f"--output names the internal page, which ends in .html; {page.name!r} arrived.")
    release = reporting.report(run, release=True)
    files = {
        page: (internal, "internal page: CONFIDENTIAL, must not leave the house"),
        page.with_suffix(".json"): (internal, "the same as JSON: CONFIDENTIAL, must not leave the house"),
        page.with_name(f"{page.stem}-release.html"): (release, "page for release: may leave the house"),
        page.with_name(f"{page.stem}-release.json"): (release, "the same as JSON: may leave the house"),
    }
    for file in files:
        reporting.check_replaceable(file)
    for file, (made, words) in files.items():
        made.save(file)
        if not quiet:
            console().print(f"{printable(file)}  {words}", soft_wrap=True)
