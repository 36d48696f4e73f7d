"""What every test may ask for. No torch at import: the planner's tests must run where torch is absent."""

from __future__ import annotations

import functools
import gc
import json
import os
import sys
import warnings
from collections.abc import Generator, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import hypothesis
import pytest

import repeatable

ROOT = Path(__file__).resolve().parent

#: Real data sets may lie beside the repository; tests that need them skip where they do not.
BESIDE = ROOT.parent / "shared" / "data"
if BESIDE.is_dir():
    os.environ.setdefault("EPSILONS_DATA", str(BESIDE))


#: Tests fork, and torch hangs in the child of a process that computed with several threads.
os.environ.setdefault("OMP_NUM_THREADS", "1")

#: Modules of extras that are not installed have no examples to run.
EXTRAS = {"nvflare": "src/epsilons/nvflare", "starlette": "src/epsilons/cli/serve.py"}
collect_ignore = [path for package, path in EXTRAS.items() if find_spec(package) is None]

#: Runs of tests are not counted in the home folder of the person who runs them.
os.environ["EPSILONS_COUNT_RUNS"] = "0"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="also run the tests marked slow")
    parser.addoption(
        "--trainer",
        choices=["epsilons", "opacus"],
        default="epsilons",
        help="the library that tests/conformance examines",
    )


def pytest_configure(config: pytest.Config) -> None:
    # The same examples every time, so that a failure is about a change and not about luck; --slow tries new ones.
    hypothesis.settings.register_profile("epsilons", derandomize=not config.getoption("--slow"), deadline=None)
    hypothesis.settings.load_profile("epsilons")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Keep the garbage collector away from the tests and the libraries that they import, now and later.

    They stay until the end, and each search through them takes up to a second.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """After each file, also what its tests imported."""
    if nextitem is None or item.path != nextitem.path:
        gc.collect()
        gc.freeze()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the slow tests: to skip thousands of them one by one takes a quarter of a minute."""
    if config.getoption("--slow"):
        return
    # Keywords would also hold the name of the folder of the repository.
    slow = [item for item in items if item.get_closest_marker("slow")]
    config.hook.pytest_deselected(items=slow)
    items[:] = [item for item in items if not item.get_closest_marker("slow")]


def pytest_collection_finish() -> None:
    """Build the command line once per process: for each call anew, it was a third of the time of its tests."""
    if testing := sys.modules.get("typer.testing"):
        vars(testing)["_get_command"] = functools.cache(vars(testing)["_get_command"])


@pytest.fixture(scope="session")
def postgres() -> Iterator[Any]:
    """A PostgreSQL server (tests/servers.py). Tests skip without one, and the summary of the run says so."""
    import servers

    if servers.programs() is None:
        warnings.warn(servers.MISSING, stacklevel=1)
        pytest.skip(servers.MISSING)
    server = servers.Server()
    yield server
    server.stop()


@pytest.fixture(params=["sqlite", "postgresql"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, Path]:
    """Where a registry can be made: (URL, file of the pepper), on each of the two databases."""
    pepper = tmp_path / "people.db.pepper"
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/people.db", pepper
    return request.getfixturevalue("postgres").place(), pepper


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef: Any, request: pytest.FixtureRequest) -> Generator[None, object, object]:
    """What several tests share is made alike whichever of them comes first."""
    shared = fixturedef.scope != "function" and not request.config.getoption("--slow")
    if shared:
        repeatable.begin(f"{fixturedef.baseid} {fixturedef.argname} {getattr(request, 'param', '')}")
    made = yield
    if shared:
        repeatable.begin(request.node.nodeid)
    return made


def pytest_runtest_setup(item: pytest.Item) -> None:
    if not item.config.getoption("--slow"):
        repeatable.begin(item.nodeid)
    if item.get_closest_marker("gpu") is None:
        return
    torch = pytest.importorskip("torch", reason="needs torch and a CUDA device")
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device, and there is none here")


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Sums in one order, whatever the machine."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def golden() -> dict[str, Any]:
    """Reference values made with other programs: `accountant` (40 settings) and `published` (the paper's six)."""
    values: dict[str, Any] = json.loads((ROOT / "tests" / "golden" / "accounting.json").read_text(encoding="utf-8"))
    return values
