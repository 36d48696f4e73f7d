"""The pages of documentation: their sentences and tables, their blocks of code, and how each kind of block is run."""

from __future__ import annotations

import functools
import re
import shlex
from dataclasses import dataclass
from pathlib import Path

from typer.testing import CliRunner

from epsilons.cli import app
from epsilons.errors import EpsilonsError

ROOT = Path(__file__).parent.parent
BESIDE_CODE = [ROOT / "benchmarks/README.md", ROOT / "tests/conformance/README.md"]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *BESIDE_CODE, *sorted((ROOT / "docs").rglob("*.md"))]


@dataclass(frozen=True)
class Block:
    """A fenced block: its language ("" if none is named), its text, and the line of the page it starts at."""

    language: str
    text: str
    line: int


def blocks(page: Path, language: str | None = None) -> list[Block]:
    """The fenced blocks of a page, of any indentation, in order."""
    found, lines = [], page.read_text(encoding="utf-8").split("\n")
    place = 0
    while place < len(lines):
        fence = re.match(r"^( *)(`{3,}|~{3,}) *([^`\s]*)", lines[place])
        place += 1
        if not fence:
            continue
        start = place
        while lines[place].strip() != fence[2]:  # an open fence runs past the end: IndexError
            place += 1
        text = "\n".join(line.removeprefix(fence[1]) for line in lines[start:place])
        found.append(Block(fence[3], text + "\n", start))
        place += 1
    return [block for block in found if language in (None, block.language)]


def outside_of_fences(page: Path) -> list[str]:
    """The lines of a page that stand in no fenced block."""
    text = page.read_text(encoding="utf-8")
    return re.sub(r"^( *)(`{3,}|~{3,})[^\n]*\n.*?^\1\2 *$", "", text, flags=re.M | re.S).split("\n")


def run_python(block: Block, page: Path, names: dict[str, object]) -> None:
    """Run a block as part of its page; tracebacks show the page's own lines."""
    exec(compile("\n" * block.line + block.text, str(page), "exec"), names)


def commands(block: Block) -> list[str]:
    """The commands of a console block; a line that ends in a backslash goes on in the next."""
    return [line.removeprefix("$ ") for line in _joined(block) if line.startswith("$ ")]


def outputs(block: Block) -> list[str]:
    """What a console block shows below its commands; of a `text` block, all of it."""
    return [line for line in _joined(block) if not line.startswith("$ ")]


def _joined(block: Block) -> list[str]:
    return re.sub(r"\\\n\s*", "", block.text).splitlines()


def run_epsilons(command: str) -> str:
    """What an `epsilons …` command prints; AssertionError unless it ends well."""
    result = CliRunner().invoke(app, shlex.split(command, comments=True)[1:])
    if isinstance(result.exception, EpsilonsError):
        raise AssertionError(f"{command}: {result.exception}") from result.exception
    assert result.exit_code == 0, f"{command}: {result.output}"
    return result.output


@functools.cache
def text_of(page: str) -> str:
    """A page's text with every run of white space as one space, so that lines may break anywhere."""
    return " ".join((ROOT / page).read_text(encoding="utf-8").split())


def assert_page_says(page: str, *sentences: str) -> None:
    assert [sentence for sentence in sentences if sentence not in text_of(page)] == []


def section(page: str, heading: str) -> str:
    """The text under this heading, up to the next heading of the same or a higher rank."""
    text = (ROOT / page).read_text(encoding="utf-8")
    match = re.search(rf"^(#+) {re.escape(heading)}$\n(.*?)(?=^#{{1,2}} |\Z)", text, flags=re.M | re.S)
    assert match, f"{page} has no section {heading!r}"
    return match[2]


def rows(text: str, cells: int | None = None) -> dict[str, list[str]]:
    """The table rows of a text, by their first cell, without rules; only those with so many cells, if given."""
    lines = [line.strip()[1:-1] for line in text.splitlines() if line.lstrip().startswith("|")]
    split = [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)] for line in lines]
    return {row[0]: row[1:] for row in split if cells in (None, len(row)) and not set("".join(row)) <= set("-: ")}
