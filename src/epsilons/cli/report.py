"""`epsilons report`: what a run promised, spent and reached, for internal use and for release."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..errors import InputError
from ..escaping import printable
from .console import console
from .options import Quiet, option

EXAMPLES = """
[bold]Examples[/bold]

epsilons report runs/first

epsilons report runs/first -o papers/first.html

epsilons report runs/first --json | jq .status
"""


def command(
    run: Annotated[Path, typer.Argument(help="The folder of one run.", show_default=False)],
    output: Annotated[Path | None, option("The internal page. Default: RUN/report.html.", "--output", "-o")] = None,
    as_json: Annotated[bool, option("Print the internal report as JSON, and write no file.", "--json")] = False,
    quiet: Quiet = False,
) -> None:
    """Write a run's report: a page and its JSON for internal use, and a page and its JSON for release.

    The plan is verified and the ledger checked again. The internal files are confidential: they show every budget that
    was chosen. In the files for release, budgets shared by fewer than 20 records are merged, and nothing is shown that
    was measured on private data.
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
        raise InputError(f"--output names the internal page, which ends in .html; got {page.name!r}.")
    release = reporting.report(run, release=True)
    files = {
        page: (internal, "internal page: CONFIDENTIAL, do not publish"),
        page.with_suffix(".json"): (internal, "the same as JSON: CONFIDENTIAL, do not publish"),
        page.with_name(f"{page.stem}-release.html"): (release, "page for release: may be published"),
        page.with_name(f"{page.stem}-release.json"): (release, "the same as JSON: may be published"),
    }
    for file in files:
        reporting.check_replaceable(file)
    for file, (report, description) in files.items():
        report.save(file)
        if not quiet:
            console().print(f"{printable(file)}  {description}", soft_wrap=True)
