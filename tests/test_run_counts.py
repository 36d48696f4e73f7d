"""Runs of one machine with the same budgets are counted, and counting never stops a run."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from epsilons.ledger import plan_folder

ONE, OTHER = (b"\x01" * 80, b"delta"), (b"\x02" * 80, b"delta")


@pytest.fixture
def state(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.delenv(plan_folder.VARIABLE)
    return tmp_path / "state" / "epsilons"


def test_two_runs_of_one_roster_count_two_and_another_counts_one(state):
    first, second = plan_folder.begin(ONE, "data"), plan_folder.begin(ONE, "other data")
    alone = plan_folder.begin(OTHER, "data")
    assert plan_folder.count(first) == plan_folder.count(second) == plan_folder.Count(2, 1, 0)
    assert plan_folder.count(alone) == plan_folder.Count(1, 1, 0)
    assert plan_folder.count(plan_folder.begin(ONE, "data")) == plan_folder.Count(3, 2, 0)


def test_where_one_part_of_a_roster_ends_counts():
    secret = bytes(32)
    assert plan_folder._tag(secret, "roster", [b"ab", b"c"]) != plan_folder._tag(secret, "roster", [b"a", b"bc"])
    assert plan_folder._tag(secret, "roster", [b"a"]) != plan_folder._tag(secret, "data", [b"a"])


def test_only_the_owner_may_read_the_state(state):
    plan_folder.begin(ONE, "data")
    assert {stat.S_IMODE(file.stat().st_mode) for file in state.iterdir()} == {0o600}
    assert stat.S_IMODE(state.stat().st_mode) == 0o700
    assert sorted(file.name for file in state.iterdir()) == ["runs.jsonl", "secret"]


def test_tags_cannot_be_computed_without_the_secret(state, tmp_path, monkeypatch):
    here = plan_folder.begin(ONE, "data")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "another machine"))
    there = plan_folder.begin(ONE, "data")
    assert here.keys() == there.keys()
    assert all(here[name] != there[name] for name in here)
    assert plan_folder.count(here) is None  # a copy of the run's folder on another machine


def test_counting_can_be_turned_off(state, monkeypatch):
    monkeypatch.setenv(plan_folder.VARIABLE, "0")
    assert plan_folder.begin(ONE, "data") == {"reason": plan_folder.OFF}
    assert not state.exists()


def unwritable(state: Path) -> None:
    state.parent.mkdir()
    state.parent.joinpath("epsilons").write_text("a file where the folder must be")


def short_secret(state: Path) -> None:
    state.mkdir(parents=True)
    (state / "secret").write_bytes(b"short")


def open_secret(state: Path) -> None:
    plan_folder.begin(ONE, "data")
    (state / "secret").chmod(0o644)


def linked_secret(state: Path) -> None:
    state.mkdir(parents=True)
    (state / "secret").symlink_to("/nowhere")


def folder_of_lines(state: Path) -> None:
    (state / "runs.jsonl").mkdir(parents=True)


def pipe_of_lines(state: Path) -> None:
    state.mkdir(parents=True)
    os.mkfifo(state / "runs.jsonl")


@pytest.mark.parametrize(
    "break_it", [unwritable, short_secret, open_secret, linked_secret, folder_of_lines, pipe_of_lines]
)
def test_a_state_folder_that_cannot_be_used_is_a_reason_and_no_error(state, break_it):
    break_it(state)
    tags = plan_folder.begin(ONE, "data")
    assert tags.keys() == {"reason"}
    assert plan_folder.count(tags) is None


def test_no_home_folder_is_a_reason_and_no_error(state, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", "relative/paths/are/ignored")
    monkeypatch.setattr(Path, "home", lambda: (_ for _ in ()).throw(RuntimeError("no home")))
    assert plan_folder.begin(ONE, "data") == {"reason": plan_folder.UNUSABLE}


def test_damaged_lines_and_lines_of_another_secret_are_counted_as_unreadable(state):
    before = plan_folder.begin(ONE, "data")
    (state / "secret").unlink()
    with (state / "runs.jsonl").open("ab") as file:
        file.write(b'\xff\xfe\n[1, 2]\n{"run": 3}\n' + b"[" * 100_000 + b"\n" + json.dumps(before).encode()[:40])
    tags = plan_folder.begin(ONE, "data")
    assert plan_folder.count(tags) == plan_folder.Count(1, 1, 6)


def test_runs_that_begin_at_once_share_the_secret_and_lose_no_line(state):
    code = (
        "from epsilons import run_counts\n"
        "for _ in range(20): assert 'run' in run_counts.begin((b'x',), 'data')\n"
        "print(run_counts.begin((b'x',), 'data')['key'])"
    )
    with ThreadPoolExecutor(3) as pool:
        words = [sys.executable, "-c", code]
        made = list(pool.map(lambda _: subprocess.run(words, capture_output=True, text=True, check=True), range(3)))
    assert len({one.stdout for one in made}) == 1
    assert plan_folder.count(plan_folder.begin((b"x",), "data")) == plan_folder.Count(64, 64, 0)
