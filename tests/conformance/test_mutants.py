"""The suite is worth something: each planted bug makes the test fail that was written for it."""

from __future__ import annotations

import hashlib

import pytest

from .mutants import ALWAYS, MUTANTS, ROOT, Mutant, apply, finish, node, start


@pytest.fixture(autouse=True)
def _only_ours(request: pytest.FixtureRequest) -> None:
    if request.config.getoption("--trainer") != "epsilons":
        pytest.skip("bugs are planted in epsilons")


@pytest.mark.parametrize(
    "name", [name if name in ALWAYS else pytest.param(name, marks=pytest.mark.slow) for name in MUTANTS]
)
def test_a_planted_bug_is_noticed(name: str):
    found = finish(start(MUTANTS[name], [node(MUTANTS[name].killer)], limit=120, stop_at_first=True))
    assert found["failed"], f"{MUTANTS[name].bug}: {MUTANTS[name].killer} passed"


def test_without_a_bug_the_same_tests_pass_in_a_copy_of_the_process():
    """So that a failure in there is the bug's doing."""
    tests = sorted({node(MUTANTS[name].killer) for name in ("no-noise", "charge-after-update", "guard-gone")})
    found = finish(start(None, tests, limit=120))
    assert not found["failed"]
    assert found["passed"] >= 9


def test_every_mutant_fits_the_library_as_it_is():
    """Each applied in a process of its own, with no test to run."""
    for mutant in MUTANTS.values():
        finish(start(mutant, [], limit=60))


def test_the_page_tells_of_every_mutant():
    page = (ROOT / "docs" / "conformance.md").read_text(encoding="utf-8")
    assert not [name for name, mutant in MUTANTS.items() if f"| {mutant.bug} |" not in page]
    assert f"[{len(MUTANTS)} planted privacy bugs]" in (ROOT / "README.md").read_text(encoding="utf-8")


def test_a_mutant_that_no_longer_fits_says_so():
    gone = [
        ("epsilons.ledger:Ledger.refund", "x", "y"),
        ("epsilons.ledger:Ledger.charge", "no such text", "y"),
        ("epsilons.ledger:Ledger.charge", "step", "y"),
    ]
    for edit in gone:
        with pytest.raises(LookupError, match="mend"):
            apply(Mutant("unfit", hashlib.__name__, (edit,)))
