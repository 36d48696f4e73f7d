"""The README and the pages in docs/ are true: code runs, commands print what is shown, links lead to files."""

from __future__ import annotations

import ast
import re
import tomllib
from pathlib import Path

import pytest

from epsilons import planning
from epsilons.cli import results
from epsilons.configs.config import Config
from pages import PAGES, ROOT, blocks, commands, outputs, outside_of_fences, run_epsilons, run_python

#: The kinds of fenced block. `text` is an output (checked below) or a diagram.
LANGUAGES = {"python", "console", "text", "toml"}

#: For commands other than `epsilons …`: what must be true for them to work.
SETUP = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
EXTRAS = SETUP["project"]["optional-dependencies"]
OPTIONAL = {requirement for extra in EXTRAS.values() for requirement in extra}
CODE = sorted((ROOT / "src").rglob("*.py"))
TARGETS = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.M))


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


every_page = pytest.mark.parametrize("page", PAGES, ids=name_of)


@every_page
def test_every_block_of_a_page_is_of_a_kind_that_is_checked(page):
    assert {f"line {b.line}: {b.language!r}" for b in blocks(page) if b.language not in LANGUAGES} == set()
    for block in blocks(page, "console"):
        assert block.text.startswith("$ "), f"line {block.line}: a console block begins with a command"
        for line in commands(block):
            assert line.startswith("epsilons ") or other_command_works(line), line
    for block in blocks(page, "text"):
        assert not re.search(r"^(\$|>>>|import |from \w+ import)", block.text, flags=re.M), f"line {block.line}: code"


@every_page
def test_no_code_of_a_page_is_hidden_from_these_tests_by_indentation(page):
    """Four spaces make a code block in Markdown, too: only lists and the body of a note may be indented."""
    lines, opening = outside_of_fences(page), ""
    for before, line in zip(["", *lines], lines, strict=False):
        if line[:4] == "    " and not before:
            assert re.match(r"^([*-]|\d+\.|!!!|:::|:) ", opening), line
        elif line and line[0] != " ":
            opening = line


def other_command_works(command: str) -> bool:
    if command.startswith("make "):
        return command.split()[1] in TARGETS
    if re.match(r"\.venv/bin/python -m experiments (report|list|run)\b", command):
        return True  # experiments/tests/test_pages.py has their tables and cells
    if re.fullmatch(r"torchrun --nproc-per-node 2 (train\.py|-m epsilons train people\.toml)", command):
        return True  # test_ranks.py runs both
    if re.match(r"TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 torchrun --nnodes 2 ", command):
        return True  # test_nodes.py runs it
    if command == "accelerate launch --multi_gpu --num_processes 2 train.py":
        return True  # test_ranks.py runs it
    if command == "pip wheel --no-deps --wheel-dir dist .":
        return True  # test_words.py has the wheel's name; it takes a network, so no test builds it
    if optional := re.fullmatch(r'pip install "([^"\[]+)"', command):
        return optional[1] in OPTIONAL
    cloned = re.fullmatch(
        r"pip install (?:\.|[\"']\.\[(\w+)\][\"'])", command
    )  # never by name: no index has the package
    return bool(cloned) and cloned[1] in {None, *EXTRAS}


#: test_recipes.py runs docs/recipes.md, with stand-ins for the trackers that are not installed.
RUN_HERE = [
    p for p in PAGES if any(blocks(p, kind) for kind in ("python", "console", "toml")) and p.name != "recipes.md"
]


@pytest.mark.parametrize("page", RUN_HERE, ids=name_of)
def test_a_page_runs_from_top_to_bottom(page, tmp_path, monkeypatch):
    """Python and commands in turn, in one folder; a `text` block after a command is a part of what it prints."""
    if page.name == "federated.md":
        pytest.importorskip("flwr")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "120")
    names: dict[str, object] = {"__name__": "page"}
    if page.name == "README.md":  # it uses the reader's table; the quickstart makes one
        quickstart = ROOT / "docs" / "quickstart.md"
        run_python(blocks(quickstart, "python")[0], quickstart, {})
    printed: str | None = None
    for block in blocks(page):
        if block.language == "python":
            if not block.text.startswith("import ray."):  # test_ranks.py runs it, where Ray is installed
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


def test_the_config_for_hospital_files_is_one_that_training_reads():
    (stated,) = [block for block in blocks(ROOT / "docs" / "tables.md", "toml") if "\nperson" in block.text]
    config = Config.model_validate(tomllib.loads(stated.text))
    assert (config.data.person, config.budgets.file) == ("Patient", "consent.csv")


def was_printed(line: str, output: str) -> bool:
    """True if the line is one of the output's; "…" matches anything, spaces at the ends and rules do not count."""
    pattern = re.escape(line.strip()).replace("…", ".*")
    return not line.strip(" ─") or any(re.fullmatch(pattern, printed.strip()) for printed in output.splitlines())


@every_page
def test_every_relative_link_of_a_page_leads_to_a_file(page):
    targets = re.findall(r"\]\((?!https?:)([^)#]*)(?:#[^)]*)?\)", "\n".join(outside_of_fences(page)))
    assert [t for t in targets if t and not (page.parent / t).exists()] == []


def test_blocks_are_found_whatever_their_fence():
    """The reference of the tests above: they would skip an overlooked block without a message."""
    page = ROOT / "docs" / "extending.md"
    fences = [line for line in page.read_text(encoding="utf-8").split("\n") if line.lstrip().startswith("```")]
    assert len(fences) == 2 * len(blocks(page))
    assert all(block.text.strip() for block in blocks(page))


def test_messages_name_pages_that_the_command_prints_and_no_file():
    """An installed package holds no docs/; docstrings may name its pages."""
    named = set()
    for file in CODE:
        tree = ast.parse(file.read_text(encoding="utf-8"))
        expressions = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        texts = [str(n.value) for n in ast.walk(tree) if isinstance(n, ast.Constant) and id(n) not in expressions]
        assert [text for text in texts if "docs/" in text.replace("epsilons/docs", "")] == [], file
        if file.name != results.__name__.rpartition(".")[2] + ".py":
            named |= {page for text in texts for page in re.findall(r"epsilons docs (\S+)", text)}
    assert {"concepts", "persons"} <= named
    assert named <= results.pages().keys()


def test_the_command_prints_pages():
    listed = run_epsilons("epsilons docs").split("\n")
    page = (ROOT / "docs" / "concepts.md").read_text(encoding="utf-8")
    assert any(line.split() == ["concepts", *page.split("\n")[0].removeprefix("# ").split()] for line in listed)
    assert page.strip() in run_epsilons("epsilons docs concepts")


@pytest.mark.parametrize("name", planning.STRATEGIES)
def test_every_strategy_has_its_row_and_its_place_in_the_reference(name: str):
    make = planning.STRATEGIES[name]
    assert f"`{name}`" in (ROOT / "docs/concepts.md").read_text(encoding="utf-8")
    assert f"::: {make.__module__}.{make.__name__}\n" in (ROOT / "docs/api/planning.md").read_text(encoding="utf-8")
