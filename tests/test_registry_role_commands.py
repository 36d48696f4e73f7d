"""Commands as each role of PostgreSQL: what works, and that a refusal is one sentence that names nobody."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import program
from epsilons.registry import Registry
from houses import IDS, build
from registries import VISITS

#: command -> arguments, without the URL. "own" and "other" are runs of a project of the runner's, and of another's.
COMMANDS = {
    "show": ["show"],
    "person": ["show", "--person", "p7", "--json"],
    "import": ["import", "wishes.csv", "--person", "id"],
    "change": ["change", "--person", "p7", "--epsilon", "2"],
    "withdraw": ["withdraw", "--person", "p8"],
    "quota": ["quota", "oncology", "0.6"],
    "admit": ["admit", "sam", "--person", "p9"],
    "carry-out": ["carry-out"],
    "verify": ["verify"],
    "export": ["export", "-o", "export.json"],
    "backup": ["backup", "-o", "copy.db"],
    "repair": ["repair"],
    "settle": ["settle", "--cancel", "theirs"],
    "approve": ["approve", "theirs"],
    "limit": ["limit", "0.5"],
    "quarantine": ["quarantine", "--event", "3", "--reason", "why"],
    "dry run": ["--dry-run"],
    "own": ["--project", "cardiology", "-o", "own"],
    "other": ["--project", "oncology", "-o", "other"],
}
MAY = {
    "anna": {"show", "person", "dry run", "own"},
    "otto": COMMANDS.keys() - {"settle", "own", "other", "limit", "quarantine", "repair"},
    "rita": {"show", "person", "verify", "export", "backup", "dry run"},
    "sue": set(),
    "nick": set(),
}


@pytest.fixture
def house(postgres, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    made = build(postgres, tmp_path / "pepper")
    made.sql("owner", "delete from subject where role = 'sam'")
    Path("wishes.csv").write_text("id,epsilon\nnew1,1\nnew2,4\n")
    rows = [f"{one},{20 + i},{('no', 'yes')[i % 3 % 2]}" for i, one in enumerate(IDS)]
    Path("visits.csv").write_text("\n".join(["id,age,label", *rows]) + "\n")
    Path("people.toml").write_text(VISITS.replace("steps = 20", "steps = 5"))
    return made


@pytest.mark.parametrize("login", MAY)
def test_each_role_may_use_these_commands_and_no_other(house, login):
    url, pepper = house.server.url(house.schema, user=login), ["--pepper", house.pepper]
    with house.registry("owner") as registry:
        before = registry.head
    worked = set()
    for name, arguments in COMMANDS.items():
        if arguments[0].startswith("--"):
            call = ["train", "people.toml", "--registry", url, "--share", "0.1", "-q", *pepper, *arguments]
        else:
            needs_none = arguments[0] in ("approve", "limit", "quarantine")
            call = ["registry", arguments[0], url, *arguments[1:], *([] if needs_none else pepper)]
        outcome = program.epsilons(*call)
        if outcome.code == 0:
            worked.add(name)
            continue
        assert outcome.code in (2, 3), (name, outcome)
        assert re.search(r"right to do this|your role may see|No run 'theirs'", outcome.err), (name, outcome)
        assert len(outcome.err.splitlines()) <= 3, (name, outcome)
        assert not re.search(rf"\bp\d|Traceback|{house.server.password}", outcome.err + outcome.out), (name, outcome)
    assert worked == MAY[login]
    with house.registry("owner") as registry:
        assert registry.verify().is_right
        assert (registry.head != before) == bool(MAY[login] & {"own", "change"}), "a refused command changed something"


@pytest.mark.slow
def test_a_run_of_a_runner_is_settled_and_seen_by_the_others(house):
    url = house.server.url(house.schema, user="anna")
    run = ["train", "people.toml", "--registry", url, "--pepper", house.pepper, "--share", "0.1", "-q"]
    program.epsilons(*run, "--project", "cardiology", "-o", "own").succeeded()
    with Registry(house.server.url(house.schema, user="rita")) as registry:
        assert {run.project: run.state for run in registry.summary().runs} == {
            "cardiology": "settled",
            "oncology": "reserved",
        }
    with Registry(url) as registry:
        assert [run.project for run in registry.summary().runs] == ["cardiology"]
