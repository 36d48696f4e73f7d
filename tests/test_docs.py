"""The README and the pages in docs/ tell the truth: code runs, commands print what is shown, links lead somewhere."""

from __future__ import annotations

import ast
import re
import tomllib
from pathlib import Path

import pytest

from epsilons._links import DOCS
from experiments.settings import tables
from pages import PAGES, ROOT, Block, blocks, commands, outputs, outside_of_fences, run_epsilons, run_python

#: What each kind of fenced block is for. `text` is an output (checked below) or a diagram.
LANGUAGES = {"python", "console", "text", "toml"}

#: Commands that are not `epsilons …`: what must be true of each for it to work.
SETUP = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
EXTRAS = SETUP["project"]["optional-dependencies"]
OPTIONAL = {requirement for extra in EXTRAS.values() for requirement in extra}
TABLES = tables()
TARGETS = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.M))


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


every_page = pytest.mark.parametrize("page", PAGES, ids=name_of)


@every_page
def test_every_block_of_a_page_is_of_a_kind_that_is_checked(page):
    unknown = {f"line {block.line}: {block.language!r}" for block in blocks(page) if block.language not in LANGUAGES}
    assert not unknown
    for block in blocks(page, "console"):
        assert block.text.startswith("$ "), f"line {block.line}: a console block begins with a command"
        for line in commands(block):
            assert line.startswith("epsilons ") or other_command_works(line), line
    for block in blocks(page, "text"):
        assert not re.search(r"^(\$|>>>|import |from \w+ import)", block.text, flags=re.M), f"line {block.line}: code"


@every_page
def test_no_code_of_a_page_is_hidden_from_these_tests_by_indentation(page):
    """Four spaces make a code block in Markdown, too: only lists and the body of a note may be indented."""
    lines = outside_of_fences(page)
    indented = [line for before, line in zip(["", *lines], lines, strict=False) if line[:4] == "    " and not before]
    assert not [line for line in indented if not within_a_list_or_note(line, lines)]


def within_a_list_or_note(line: str, lines: list[str]) -> bool:
    above = lines[: lines.index(line)]
    opening = next((text for text in reversed(above) if text and text[0] != " "), "")
    return bool(re.match(r"^([*-]|\d+\.|!!!|:::|:) ", opening))


def other_command_works(command: str) -> bool:
    if command.startswith("make "):
        return command.split()[1] in TARGETS
    experiment = re.fullmatch(
        r"\.venv/bin/python -m experiments "
        r"(?:report|list|run (\w+)(?: --only (\S+))?(?: --seeds \d+)?(?: --again)?)",
        command,
    )
    if experiment:
        table, cell = experiment.groups()
        return table is None or cell in {None, *TABLES[table].by_name}
    if re.fullmatch(r"torchrun --nproc-per-node 2 (train\.py|-m epsilons train people\.toml)", command):
        return True  # test_ranks.py runs both
    if command == "pip wheel --no-deps --wheel-dir dist .":
        return True  # test_words.py has the wheel's name; it takes a network, so no test builds it
    if optional := re.fullmatch(r'pip install "([^"\[]+)"', command):
        return optional[1] in OPTIONAL
    cloned = re.fullmatch(r'pip install (?:\.|"\.\[(\w+)\]")', command)  # never by name: no index has the package
    return bool(cloned) and cloned[1] in {None, *EXTRAS}


@pytest.mark.parametrize("page", [p for p in PAGES if blocks(p, "python") or blocks(p, "console")], ids=name_of)
def test_a_page_runs_from_top_to_bottom(page, tmp_path, monkeypatch):
    """Python and commands in turn, in one folder; a `text` block after a command is a part of what it prints."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "120")
    names: dict[str, object] = {"__name__": "page"}
    if page.name == "README.md":  # it speaks of a table of the reader's own; the quickstart makes one
        quickstart = ROOT / "docs" / "quickstart.md"
        run_python(next(block for block in blocks(quickstart) if block.language == "python"), quickstart, {})
    printed: str | None = None
    for block in blocks(page):
        if block.language == "python":
            run_python(block, page, names)
        elif block.language == "console":
            printed = "".join(run_epsilons(command) for command in commands(block) if command.startswith("epsilons "))
        elif block.language == "toml":
            tomllib.loads(block.text)
        if block.language in ("console", "text") and printed is not None:
            missing = [line for line in outputs(block) if not was_printed(line, printed)]
            assert not missing, f"line {block.line}: not printed by the command"
        if block.language != "console":
            printed = None


def was_printed(line: str, output: str) -> bool:
    """True if the line is one of the output's; "…" stands for anything, spaces at the ends and rules do not count."""
    pattern = re.escape(line.strip()).replace("…", ".*")
    return not line.strip(" ─") or any(re.fullmatch(pattern, printed.strip()) for printed in output.splitlines())


@every_page
def test_every_relative_link_of_a_page_leads_somewhere(page):
    targets = re.findall(r"\]\((?!https?:)([^)#]*)(?:#[^)]*)?\)", "\n".join(outside_of_fences(page)))
    missing = [t for t in targets if t and not (page.parent / t).exists()]
    assert not missing


def test_blocks_are_found_whatever_their_fence():
    """The oracle of the tests above: were a block overlooked here, it would be skipped in silence there."""
    page = ROOT / "docs" / "extending.md"
    fences = [line for line in page.read_text(encoding="utf-8").split("\n") if line.lstrip().startswith("```")]
    assert len(fences) == 2 * len(blocks(page))
    assert all(isinstance(block, Block) and block.text.strip() for block in blocks(page))


def test_messages_give_the_address_of_the_documentation_and_name_no_file():
    """An installed package holds no docs/; docstrings may name its pages."""
    assert SETUP["project"]["urls"]["Documentation"] == DOCS
    assert {"Documentation", "Source", "Changelog"} <= SETUP["project"]["urls"].keys()
    for file in (ROOT / "src").rglob("*.py"):
        tree = ast.parse(file.read_text(encoding="utf-8"))
        expressions = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in expressions:
                assert "docs/" not in node.value.replace("/docs/", ""), f"{file}: {node.value}"


def test_every_page_that_a_message_gives_is_there():
    for file in (ROOT / "src").rglob("*.py"):
        for page, section in re.findall(
            r'docs_page\(["\'](.+?)["\'](?:, ["\'](.+?)["\'])?\)', file.read_text(encoding="utf-8")
        ):
            text = (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8")
            headings = re.findall(r"^#+ (.+)$", text, flags=re.M)
            assert not section or section in {heading.lower().replace(" ", "-") for heading in headings}, file
