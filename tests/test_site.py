"""The documentation builds without a warning, every link in it leads to a place, and nothing is fetched for it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import get_args
from urllib.parse import unquote, urlsplit

import pytest

from epsilons.configs.config import Config
from pages import ROOT

pytest.importorskip("mkdocs", reason="the documentation's tools are in the dependency group dev")

#: Attributes by which a page makes a browser load something.
LOADS = {("script", "src"), ("img", "src"), ("iframe", "src"), ("source", "src"), ("link", "href"), ("use", "href")}


class Page(HTMLParser):
    """The anchors of a built page, its links, and what it loads."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.anchors: set[str] = {""}
        self.links: list[str] = []
        self.loads: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name in ("id", "name"):
                self.anchors.add(value or "")
            if (tag, name) == ("a", "href"):
                self.links.append(value or "")
            if (tag, name) in LOADS:
                self.loads.append(value or "")


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> dict[Path, Page]:
    folder = tmp_path_factory.mktemp("site")
    # Not --quiet: it would keep warnings from being counted, and --strict from refusing them.
    build = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    done = subprocess.run(
        build, cwd=ROOT, env=os.environ | {"NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return {file: Page(file.read_text(encoding="utf-8")) for file in folder.rglob("*.html") if file.name != "404.html"}


def test_every_link_and_anchor_of_the_built_site_leads_to_a_place(site):
    broken = []
    for file, page in site.items():
        for parts in map(urlsplit, page.links):
            if parts.scheme or parts.netloc:
                continue
            target = (file.parent / unquote(parts.path)).resolve() if parts.path else file
            if not target.is_file() or (target in site and unquote(parts.fragment) not in site[target].anchors):
                broken.append(f"{file.name} → {parts.geturl()}")
    assert broken == []
    assert sum(len(page.links) for page in site.values()) > 500  # the pages were really read


def test_the_site_loads_nothing_from_elsewhere(site):
    assert not {load for page in site.values() for load in page.loads if urlsplit(load).netloc}
    for file, page in site.items():
        assert all((file.parent / urlsplit(load).path).is_file() for load in page.loads if not load.startswith("data:"))


def test_docstrings_become_lists_and_code_and_are_not_run_together(site):
    """Plain Markdown would set aligned columns in one paragraph, and doctests as quotations."""
    pages = [file.read_text(encoding="utf-8") for file in site if file.parent.name == "api"]
    assert len(pages) >= 6
    assert [re.findall(r"<p>[^<]*\S {3,}\S", page) for page in pages] == [[]] * len(pages)
    assert not any("<blockquote>" in page for page in pages)
    assert sum(page.count("<dt>") for page in pages) > 50


def test_the_page_of_configs_has_every_section_and_key(site):
    ((page, _),) = [(file, parsed) for file, parsed in site.items() if file.name == "config.html"]
    text = page.read_text(encoding="utf-8")
    for name, field in Config.model_fields.items():
        kinds = [kind for kind in (field.annotation, *get_args(field.annotation)) if hasattr(kind, "model_fields")]
        assert f"[{name}]" in text
        assert [key for kind in kinds for key in kind.model_fields if f"<dt><code>{key}</code>" not in text] == []
