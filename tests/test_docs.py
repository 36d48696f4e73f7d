"""The README and the pages in docs/ tell the truth: code runs, commands work, links lead somewhere."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from epsilons.cli import app

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(encoding="utf-8"), flags=re.M | re.S)


def name_of(page: Path) -> str:
    return page.name


@pytest.mark.parametrize("page", [p for p in PAGES if blocks(p, "python")], ids=name_of)
def test_the_code_of_a_page_runs_from_top_to_bottom(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    for block in blocks(page, "python"):
        exec(compile(block, str(page), "exec"), names)


def commands() -> list[str]:
    text = [line for page in PAGES for block in blocks(page, "console") for line in block.splitlines()]
    return [line.removeprefix("$ ") for line in text if line.startswith("$ epsilons plan")]


@pytest.mark.parametrize("command", commands())
def test_the_commands_of_a_page_work(command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, shlex.split(command)[1:])
    assert result.exit_code == 0, result.output


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_relative_link_of_a_page_leads_somewhere(page):
    targets = re.findall(r"\]\((?!https?:)([^)#]*)(?:#[^)]*)?\)", page.read_text(encoding="utf-8"))
    missing = [t for t in targets if t and not (page.parent / t).exists()]
    assert not missing


def test_the_readme_prints_the_plan_as_the_program_does():
    command = next(command for command in commands() if "--compare" in command)
    result = CliRunner().invoke(app, shlex.split(command)[1:])
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    shown = [line.strip() for line in result.output.splitlines() if line.strip().startswith(("1 ", "2 ", "3 "))]
    assert len(shown) == 6
    assert all(line in readme for line in shown)
