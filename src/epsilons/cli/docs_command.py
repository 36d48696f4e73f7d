"""`epsilons docs`: the pages of the documentation, which messages name."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..errors import named

DOCS_EXAMPLES = """
[bold]Examples[/bold]

epsilons docs

epsilons docs concepts
"""


def pages() -> dict[str, Path]:
    """The pages by name: of an installed package those in epsilons/docs, of a checkout those in docs."""
    package = Path(__file__).parents[1]
    folder = package / "docs" if (package / "docs").is_dir() else package.parents[1] / "docs"
    return {file.stem: file for file in sorted([*folder.glob("*.md"), *folder.glob("doors/*.md")])}


def docs_command(
    page: Annotated[str | None, typer.Argument(help="A page. Without it, all are listed.")] = None,
) -> None:
    """Print a page of the documentation, as Markdown, or the names and titles of all pages."""
    if page is not None:
        print(named(pages(), page, "page of the documentation").read_text(encoding="utf-8"))
        return
    for name, file in pages().items():
        title = next(line for line in file.read_text(encoding="utf-8").split("\n") if line.startswith("# "))
        print(f"{name:<24} {title[2:]}")
