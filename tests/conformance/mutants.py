"""Planted privacy bugs: does the suite notice? Each changes a few functions, in memory only.

    python -m tests.conformance.mutants [NAME …] [--suite]

prints what fails with each bug: of the test that must fail, or of all of tests/conformance. pytest checks the first
(test_mutants.py).

The bugs are in planted/*.toml, by the test that must fail; `edits` says how they are written.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import resource
import signal
import sys
import tempfile
import tomllib
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import pytest
import torch

from .edits import apply, functions

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent.parent


@dataclass(frozen=True)
class Mutant:
    """One planted bug.

    bug     what is wrong, in words
    killer  a test that must fail: file::function, from the repository's root
    edits   `scope: pattern -> replacement` each
    """

    bug: str
    killer: str
    edits: tuple[str, ...]


def _read() -> dict[str, Mutant]:
    tables = [tomllib.loads(path.read_text("utf-8")) for path in sorted((HERE / "planted").glob("*.toml"))]
    return {
        name: Mutant(row["bug"], killer if killer.startswith("tests/") else f"tests/conformance/{killer}", row["edits"])
        for table in tables
        for killer, bugs in table.items()
        for name, row in bugs.items()
    }


MUTANTS = _read()

#: Those that every run of pytest checks: one or two of each kind, the quick ones.
ALWAYS = (
    "no-noise", "noise-3-percent-small", "empty-draws-skipped", "divisor-drawn", "clip-norms-swapped",
    "clipped-a-thousandth-long", "group-by-place-in-batch", "charge-after-update", "ledger-allows-one-more",
    "one-step-more", "guard-gone", "mixing-not-looked-for",
)  # fmt: skip


@dataclass(eq=False)
class Outcome:
    """What tests say with a mutant in the library.

    failed  their names
    passed  how many
    why     the message of the first failure
    """

    failed: list[str] = field(default_factory=list)
    passed: int = 0
    why: str = ""

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.failed.append(report.nodeid)
            self.why = self.why or " ".join(report.longreprtext.split())[-160:]
        self.passed += report.when == "call" and report.passed


@dataclass(frozen=True)
class _Planting:
    """A pytest plugin: the tests are collected once, and run for every mutant in a copy of the process that has it."""

    edits: Mapping[str, Sequence[str]]
    tests: Mapping[str, Sequence[str]]
    results: Path
    limit: int

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        if session.testsfailed:  # in collecting them
            return False
        for name, edits in self.edits.items():
            items = [item for item in session.items if {*_names(item)} & {*self.tests[name]}]
            pid = os.fork()
            if pid == 0:
                self._run(name, edits, items)
            status = os.waitpid(pid, 0)[1]
            if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGXCPU:
                self._write(name, Outcome(["(stopped: it did not end)"], why="it did not end"))
        return True

    def _run(self, name: str, edits: Sequence[str], items: Sequence[pytest.Item]) -> None:
        try:
            resource.setrlimit(resource.RLIMIT_CPU, (self.limit, self.limit + 5))
            apply(edits)
            outcome = Outcome()
            items[0].config.pluginmanager.register(outcome)
            for item, following in zip(items, [*items[1:], None], strict=True):
                item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
                if outcome.failed and len(self.tests[name]) == 1:
                    break
            self._write(name, outcome)
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(0)

    def _write(self, name: str, outcome: Outcome) -> None:
        (self.results / f"{name}.json").write_text(json.dumps(asdict(outcome)))


def _names(item: pytest.Item) -> tuple[str, str]:
    """Of an item's file, and of its function."""
    function = item.nodeid.partition("[")[0]
    return function.partition("::")[0], function


def outcomes(
    edits: Mapping[str, Sequence[str]], tests: Mapping[str, Sequence[str]], limit: int = 120
) -> dict[str, Outcome]:
    """What these tests (of one: until its first failure) say with these edits in the library.

    limit  seconds of processor time per name

    Raises RuntimeError if some tests cannot be run.
    """
    torch.set_num_threads(1)  # a copy of a process has none of its threads
    # Every copy would do this again: an optimizer imports the first (2 s), and edits read the second (1 s).
    importlib.import_module("torch._dynamo")
    functions()
    with tempfile.TemporaryDirectory() as folder:
        pid = os.fork()
        if pid == 0:
            try:
                os.chdir(ROOT)
                log = os.open(f"{folder}/log", os.O_WRONLY | os.O_CREAT)
                os.dup2(log, 1)
                os.dup2(log, 2)
                paths = sorted({test for its in tests.values() for test in its})
                planting = _Planting(edits, tests, Path(folder), limit)
                pytest.main(["-qs", "--no-header", "-p", "no:cacheprovider", *paths], plugins=[planting])
            finally:
                os._exit(0)
        os.waitpid(pid, 0)
        written = {name: Path(folder, f"{name}.json") for name in edits}
        if not all(path.exists() for path in written.values()):
            raise RuntimeError(f"The tests did not end:\n{Path(folder, 'log').read_text()[-2000:]}")
        return {name: Outcome(**json.loads(path.read_text())) for name, path in written.items()}


def noticed(names: Sequence[str]) -> dict[str, Outcome]:
    """What the test that must fail says of each of these mutants."""
    return outcomes({name: MUTANTS[name].edits for name in names}, {name: [MUTANTS[name].killer] for name in names})


def main() -> None:
    parser = argparse.ArgumentParser(description="Which planted bugs does the suite notice, and by what?")
    parser.add_argument("names", nargs="*", choices=[*MUTANTS, []], help="default: all")
    parser.add_argument("--suite", action="store_true", help="run all of tests/conformance with each bug")
    given = parser.parse_args()
    suite = [str(path.relative_to(ROOT)) for path in sorted(HERE.glob("test_*.py")) if path.name != "test_mutants.py"]
    print("| planted bug | tests that fail |\n|---|---|")
    for name in given.names or MUTANTS:
        mutant = MUTANTS[name]
        tests = {name: [*suite, mutant.killer] if given.suite else [mutant.killer]}
        outcome = outcomes({name: mutant.edits}, tests, limit=1200)[name]
        failed = sorted({test.partition("[")[0].removeprefix("tests/") for test in outcome.failed})
        print(f"| {mutant.bug} | {', '.join(failed) or '**nothing**'} |", flush=True)


if __name__ == "__main__":
    main()
