"""Each planted bug makes the test fail that was written for it."""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Sequence

import pytest

from .edits import compiled, edited, matches
from .mutants import ALWAYS, HERE, MUTANTS, ROOT, noticed, outcomes

FILES = sorted({mutant.killer.partition("::")[0] for mutant in MUTANTS.values()})


@pytest.fixture(autouse=True)
def _only_ours(request: pytest.FixtureRequest) -> None:
    if request.config.getoption("--trainer") != "epsilons":
        pytest.skip("bugs are planted in epsilons")


def test_some_planted_bugs_of_every_kind_are_noticed():
    assert unnoticed(ALWAYS) == {}


@pytest.mark.slow
@pytest.mark.parametrize("file", FILES)
def test_the_planted_bugs_are_noticed(file: str):
    assert unnoticed([name for name, mutant in MUTANTS.items() if mutant.killer.startswith(f"{file}::")]) == {}


def unnoticed(names: Sequence[str]) -> dict[str, str]:
    """{mutant: the test that should have failed}"""
    return {name: MUTANTS[name].killer for name, outcome in noticed(names).items() if not outcome.failed}


@pytest.mark.parametrize(
    "names", [("no-noise", "charge-after-update"), pytest.param(tuple(MUTANTS), marks=pytest.mark.slow)], ids=len
)
def test_without_a_bug_the_same_tests_pass_in_a_copy_of_the_process(names: Sequence[str]):
    """So that a failure there is the bug's doing."""
    tests = sorted({MUTANTS[name].killer for name in names})
    outcome = outcomes({"no bug": []}, {"no bug": tests}, limit=1200)["no bug"]
    assert outcome.failed == []
    assert outcome.passed >= len(tests)


def test_every_mutant_fits_the_library_as_it_is():
    for mutant in MUTANTS.values():
        for function, tree in edited(mutant.edits).items():
            compiled(function, tree)


def test_the_test_that_notices_each_mutant_exists():
    tests = {
        f"{file}::{name}" for file in FILES for name in re.findall(r"^def (test_\w+)", (ROOT / file).read_text(), re.M)
    }
    assert [name for name, mutant in MUTANTS.items() if mutant.killer not in tests] == []


def test_the_pages_state_how_many_bugs_are_planted_in_all_and_in_each_file():
    page = (HERE / "README.md").read_text(encoding="utf-8")
    planted = {
        path.name: sum(map(len, tomllib.loads(path.read_text("utf-8")).values()))
        for path in (HERE / "planted").glob("*.toml")
    }
    assert {name: int(bugs) for name, bugs in re.findall(r"^\| `(\w+\.toml)` \| (\d+) \|", page, re.M)} == planted
    assert sum(planted.values()) == len(MUTANTS)
    assert f"{len(MUTANTS)} of {len(MUTANTS)} planted bugs are detected" in " ".join(page.split())
    assert f"[{len(MUTANTS)} planted privacy bugs]" in (ROOT / "README.md").read_text(encoding="utf-8")


def test_each_bug_that_the_whole_suite_ran_against_is_named_as_it_is_planted():
    page = (HERE / "README.md").read_text(encoding="utf-8")
    _, table = page.split("| planted bug | tests that fail |\n|---|---|\n")
    bugs = [row.strip("| ").split(" | ")[0] for row in table.partition("\n\n")[0].splitlines()]
    assert set(bugs) <= {mutant.bug for mutant in MUTANTS.values()}
    said = f"for the {len(bugs)} bugs below; for the other {len(MUTANTS) - len(bugs)} only"
    assert said in " ".join(page.split())


@pytest.mark.parametrize(
    "edit",
    ["Ledger.refund: x -> y", "Ledger.charge: no_such_name -> y", "Ledger.charge: step -> y", "Ledger.charge step y"],
)
def test_an_edit_that_does_not_fit_is_an_error(edit: str):
    with pytest.raises(LookupError, match="mend"):
        edited([edit])


@pytest.mark.parametrize("code", ["return phase.noise_std * own", "x = (\n  p.noise_std  # a comment\n  * draw(n)\n )"])
def test_an_edit_depends_on_neither_local_names_nor_formatting(code: str):
    (function,) = ast.parse("def update():\n " + code).body
    assert isinstance(function, ast.FunctionDef)
    assert len(matches("P.noise_std * N", function)) == 1
