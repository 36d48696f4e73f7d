"""The documentation builds without a warning, every link in it leads somewhere, and nothing is fetched for it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from pages import ROOT

pytest.importorskip("mkdocs", reason="the documentation's tools are in the dependency group dev")

#: Attributes by which a page makes a browser load something.
LOADS = {("script", "src"), ("img", "src"), ("iframe", "src"), ("source", "src"), ("link", "href"), ("use", "href")}


class Page(HTMLParser):
    """What a built page offers as anchors, links to, and loads."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.anchors: set[str] = {""}
        self.links: list[str] = []
        self.loads: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        held = {name: value for name, value in attrs if value is not None}
        self.anchors |= {held[name] for name in ("id", "name") if name in held}
        if tag == "a" and "href" in held:
            self.links.append(held["href"])
        self.loads += [held[name] for kind, name in LOADS if tag == kind and name in held]


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> dict[Path, Page]:
    folder = tmp_path_factory.mktemp("site")
    # Not --quiet: it would keep warnings from being counted, and --strict from refusing them.
    build = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    quiet = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(build, cwd=ROOT, env=quiet, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return {file: Page(file.read_text(encoding="utf-8")) for file in folder.rglob("*.html") if file.name != "404.html"}


def test_every_link_and_anchor_of_the_built_site_leads_somewhere(site):
    broken = []
    for file, page in site.items():
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = (file.parent / unquote(parts.path)).resolve() if parts.path else file
            if not target.is_file() or (target in site and unquote(parts.fragment) not in site[target].anchors):
                broken.append(f"{file.name} → {link}")
    assert not broken
    assert sum(len(page.links) for page in site.values()) > 500  # the pages were really read


def test_the_site_loads_nothing_from_elsewhere(site):
    assert not {load for page in site.values() for load in page.loads if urlsplit(load).netloc}
    for file, page in site.items():
        assert all((file.parent / urlsplit(load).path).is_file() for load in page.loads if not load.startswith("data:"))


def test_docstrings_are_set_as_lists_and_code_and_not_run_together(site):
    """Aligned columns in one paragraph, and doctests as quotations, are what plain Markdown would make of them."""
    pages = [file.read_text(encoding="utf-8") for file in site if file.parent.name == "api"]
    assert len(pages) >= 6
    for page in pages:
        assert not re.findall(r"<p>[^<]*\S {3,}\S", page)
        assert "<blockquote>" not in page
    assert sum(page.count("<dt>") for page in pages) > 50


def test_every_public_name_has_a_place_in_the_reference(site):
    import epsilons

    anchors = {anchor.rsplit(".", 1)[-1] for page in site.values() for anchor in page.anchors if "epsilons." in anchor}
    assert set(epsilons.__all__) - {"__version__", "data", "errors"} <= anchors
    listed = {name for name, held in vars(epsilons.errors).items() if isinstance(held, type)}
    assert listed <= anchors
