"""The pages about experiments are true: commands name tables and cells, links and names of files lead to a place."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from experiments.settings import HERE, tables
from pages import ROOT, blocks, commands, outside_of_fences

PAGES = sorted((HERE / "pages").glob("*.md"))
RUN = r"run (\w+)(?: --only (\S+))?(?: --seeds \d+)?(?: --again)?"


def anchors(page: Path) -> set[str]:
    """The headings of a page and its own anchors, as those of links, and the link to the page itself."""
    own = re.findall(r'<a id="([^"]+)">', page.read_text(encoding="utf-8"))
    headings = [line.lstrip("# ").lower() for line in outside_of_fences(page) if line.startswith("#")]
    return {"", *own, *(re.sub(r"[^\w -]", "", heading).replace(" ", "-") for heading in headings)}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_and_files_that_a_page_names_are_there(page):
    text = "\n".join(outside_of_fences(page))
    for target, anchor in re.findall(r"\]\((?!https?:)([^)#]*)(?:#([^)]*))?\)", text):
        assert anchor in anchors(page.parent / target if target else page), f"{target}#{anchor}"
    assert [file for file in re.findall(r"`((?:\w+/)+\w+\.py)`", text) if not (ROOT / file).exists()] == []


@pytest.mark.parametrize("page", [*PAGES, ROOT / "docs" / "results-reading.md"], ids=lambda page: page.name)
def test_the_commands_of_a_page_name_a_table_and_a_cell_of_it(page):
    for command in [command for block in blocks(page, "console") for command in commands(block)]:
        if found := re.fullmatch(rf"\.venv/bin/python -m experiments (?:report|list|{RUN})", command):
            assert found[1] is None or found[2] in {None, *tables()[found[1]].by_name}, command
        else:
            assert command == "make setup"
