"""A pytest plugin: lists the examples of docs/extending.md in the library's tables and keeps their contract tests only.

Used by tests/test_extending.py as `pytest -p newcomers tests/contracts`, in a process of its own, because the contract
tests read the tables when they are collected.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from epsilons.accounting import ACCOUNTANTS
from epsilons.clipping import ENGINES
from epsilons.planning import STRATEGIES
from pages import ROOT, blocks, run_python

PAGE = ROOT / "docs" / "extending.md"

NAMES = {"weigh", "moments", "batched"}


def takes_long(item: pytest.Item, ids: set[str]) -> bool:
    """The new accountant with every other strategy, and Opacus' PRV as an oracle: with --slow only."""
    return "prv" in item.name or ("moments" in ids and bool(ids & set(STRATEGIES) - {"uniform"}))


def pytest_configure(config: pytest.Config) -> None:
    names: dict[str, object] = {"__name__": "extending"}
    here = Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            for block in blocks(PAGE, "python"):
                run_python(block, PAGE, names)
        finally:
            os.chdir(here)
    STRATEGIES["weigh"] = names["weigh"]
    ACCOUNTANTS["moments"] = names["moments"]
    ENGINES["batched"] = names["Batched"]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    kept, left = [], []
    for item in items:
        ids = set(item.callspec.id.split("-")) if hasattr(item, "callspec") else set()
        wanted = bool(ids & NAMES) and (config.getoption("--slow") or not takes_long(item, ids))
        (kept if wanted else left).append(item)
    items[:] = kept if config.getoption("--slow") else kept[::3]  # a third in every run
    config.hook.pytest_deselected(items=[*left, *(item for item in kept if item not in items)])
