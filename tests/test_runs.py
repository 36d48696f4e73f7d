"""A run's folder holds one run, and only its owner can read it, above all the key."""

from __future__ import annotations

import errno
import io
import json
import math
import multiprocessing
import os
import random
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from torch import nn

import epsilons
from epsilons import Budgets, Plan, Recipe, plan
from epsilons.core import files
from epsilons.core.files import NAME, FolderLock
from epsilons.errors import EpsilonsError, LedgerError, RunError
from epsilons.ledger import plan_folder
from epsilons.ledger.ledger import Ledger, read_account, read_charges
from epsilons.ledger.run_folder import KEY_BYTES, RunFolder, read_metrics
from epsilons.training.fitting.fit_loop import Run
from options import make_flat
from small_runs import lines

KEY = bytes(range(1, KEY_BYTES + 1))


@pytest.fixture(scope="module")
def made() -> Plan:
    budgets = Budgets.from_shares({1.0: 0.5, 3.0: 0.5}, records=1000)
    return plan(budgets, Recipe(steps=20, batch_size=50, clip_norm=1.0), "scale", "rdp")


@pytest.fixture
def folder(tmp_path, made) -> RunFolder:
    return RunFolder.create(tmp_path / "runs" / "first", made, {"engine": "loop", "seed": None})


def mode(path) -> int:
    return stat.S_IMODE(os.stat(path).st_mode)


def test_a_new_folder_holds_the_plan_and_the_settings(folder, made):
    assert Plan.load(folder.plan) == made
    settings = json.loads(folder.settings.read_text())
    assert settings["engine"] == "loop"
    assert settings["seed"] is None
    assert set(settings["versions"]) == {"epsilons", "python", "torch", "numpy", "scipy"}
    assert sorted(os.listdir(folder.path)) == ["plan.json", "run.json"]


def test_an_empty_folder_is_used(tmp_path, made):
    (tmp_path / "empty").mkdir()
    assert RunFolder.create(tmp_path / "empty", made, {}).plan.exists()


@pytest.mark.parametrize("name", ["ledger.jsonl", "holiday.jpg", ".hidden"])
def test_an_occupied_folder_is_refused_and_left_alone(tmp_path, made, name):
    (tmp_path / name).write_text("precious")
    with pytest.raises(RunError, match="not empty"):
        RunFolder.create(tmp_path, made, {})
    assert os.listdir(tmp_path) == [name]
    assert (tmp_path / name).read_text() == "precious"


def test_a_second_run_is_not_started_in_the_folder_of_the_first(folder, made):
    with pytest.raises(RunError, match="not empty"):
        RunFolder.create(folder.path, made, {})


def test_a_path_that_cannot_be_a_folder_is_refused(tmp_path, made):
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(RunError, match="cannot be used"):
            RunFolder.create(path, made, {})


@pytest.mark.skipif(os.name != "posix", reason="file modes are POSIX")
def test_only_its_owner_can_read_the_key(folder):
    before = os.umask(0)  # also under the widest umask
    try:
        folder.write_key(KEY)
    finally:
        os.umask(before)
    assert folder.key.read_bytes() == KEY
    assert mode(folder.key) == 0o600
    assert mode(folder.key.parent) == 0o700


def test_a_new_key_replaces_the_old_one_and_stays_secret(folder):
    folder.write_key(KEY)
    folder.write_key(bytes(reversed(KEY)))
    assert folder.read_key() == bytes(reversed(KEY))
    assert mode(folder.key) == 0o600
    assert [file.name for file in folder.key.parent.iterdir()] == ["key"]
    folder.key.write_bytes(KEY[:5])
    assert folder.read_key() is None
    folder.key.unlink()
    assert folder.read_key() is None


def test_the_key_is_durable_before_it_is_used(folder, monkeypatch):
    synced = []
    real = os.fsync
    monkeypatch.setattr(os, "fsync", lambda handle: (synced.append(os.fstat(handle).st_ino), real(handle)))
    folder.write_key(KEY)
    assert os.stat(folder.key).st_ino in synced


def test_the_key_is_overwritten_and_then_removed(folder, monkeypatch):
    folder.write_key(KEY)
    os.link(folder.key, folder.path / "witness")  # another name for the same bytes on disk
    folder.destroy_key()
    assert not folder.key.exists()
    assert not folder.key.parent.exists()
    assert (folder.path / "witness").read_bytes() == bytes(KEY_BYTES)
    folder.destroy_key()  # nothing left to destroy is not an error


FAILING = [(os, "stat"), (io, "open"), (os, "fsync"), (os, "unlink"), (os, "rmdir")]


@pytest.mark.parametrize("number", [errno.EIO, errno.EACCES, errno.ENOSPC, errno.EROFS])
@pytest.mark.parametrize(("module", "name"), FAILING, ids=[name for _, name in FAILING])
def test_a_key_that_cannot_be_destroyed_is_one_message_and_is_tried_again(folder, monkeypatch, module, name, number):
    folder.write_key(KEY)
    real = getattr(module, name)

    def failing(path, *arguments, **options):
        if isinstance(path, int) or str(folder.key.parent) in str(path):
            raise OSError(number, os.strerror(number), path)
        return real(path, *arguments, **options)

    with monkeypatch.context() as patched:
        patched.setattr(module, name, failing)
        if name == "rmdir":
            folder.destroy_key()  # an empty folder tells nothing
        else:
            with pytest.raises(RunError, match=f"cannot be destroyed.*: {os.strerror(number)}"):
                folder.destroy_key()
    assert folder.key.exists() == (name != "rmdir")
    folder.destroy_key()
    assert not folder.key.exists()


def test_no_other_file_holds_the_key(folder, made):
    folder.write_key(KEY)
    folder.append_metrics({"step": 1, "loss": 0.5})
    others = [path for path in folder.path.rglob("*") if path.is_file() and path != folder.key]
    assert others
    for path in others:
        content = path.read_bytes()
        assert KEY not in content
        assert KEY.hex().encode() not in content


def test_an_incomplete_line_of_metrics_is_written_again(folder):
    folder.append_metrics({"step": 1, "loss": 0.5})
    folder.append_metrics({"step": 2, "loss": 0.25})
    folder.metrics.write_bytes(folder.metrics.read_bytes()[:-9])
    assert [row["step"] for row in read_metrics(folder)] == [1]
    folder.append_metrics({"step": 2, "loss": 0.25})
    assert [row["step"] for row in read_metrics(folder)] == [1, 2]
    folder.metrics.write_text('{"step": 1\n{"step": 2}\n')
    with pytest.raises(RunError, match=r"Line 1 of .* is damaged"):
        read_metrics(folder)


@pytest.mark.parametrize("left", [[".plan.json.0a1b2c3d"], ["plan.json", ".run.json.0a1b2c3d"], ["secret/key.new"]])
def test_a_folder_of_a_run_that_was_cut_off_before_it_began_can_be_used(left, tmp_path, made):
    for name in left:
        (tmp_path / "run" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "run" / name).write_text("{")
    assert not RunFolder(tmp_path / "run").has_begun
    (tmp_path / "run" / "notes.txt").write_text("mine")
    assert RunFolder(tmp_path / "run").has_begun
    (tmp_path / "run" / "notes.txt").unlink()
    if not (tmp_path / "run" / "secret").exists():
        RunFolder.create(tmp_path / "run", made, {})


def test_settings_that_json_cannot_hold_leave_no_folder(tmp_path, made):
    with pytest.raises(RunError, match="cannot hold"):
        RunFolder.create(tmp_path / "run", made, {"metadata": {"rate": float("nan")}})
    assert not (tmp_path / "run").exists()


def test_metrics_come_back_in_order(folder):
    assert read_metrics(folder) == ()
    rows = [{"step": step, "loss": 0.1 * step, "accuracy": None} for step in range(5)]
    for row in rows:
        folder.append_metrics(row)
    assert list(read_metrics(folder)) == rows


def test_a_metric_that_is_not_a_number_does_not_break_the_file(folder):
    for value in (math.nan, math.inf, -math.inf):
        folder.append_metrics({"step": 1, "loss": value})
    for line in folder.metrics.read_text().splitlines():
        json.loads(line, parse_constant=pytest.fail)  # NaN is not JSON, and other readers refuse it
    assert len(read_metrics(folder)) == 3


def test_no_file_but_the_plan_names_a_budget(tmp_path):
    odd = plan(Budgets([7.7777, 1.0] * 500, delta=1e-5), Recipe(steps=5, batch_size=50, clip_norm=1.0), "scale", "rdp")
    folder = RunFolder.create(tmp_path / "run", odd, {"engine": "loop"})
    assert "7.77" not in folder.settings.read_text()
    assert "7.77" not in repr(Run(folder.path, odd, (5,), ()))


def test_a_run_claims_the_whole_plan_however_early_it_stopped(made):
    for charged in (0, 3, 20):
        np.testing.assert_array_equal(Run(None, made, (charged,), ()).epsilon_spent(), made.epsilon_spent())


# -- Runs of one machine with the same budgets are counted, and counting never stops a run ---------------------------


ONE, OTHER = (b"\x01" * 80, b"delta"), (b"\x02" * 80, b"delta")


@pytest.fixture
def state(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.delenv(plan_folder.VARIABLE)
    return tmp_path / "state" / "epsilons"


def test_two_runs_of_one_roster_count_two_and_another_counts_one(state):
    first, second = plan_folder.begin(ONE, "data"), plan_folder.begin(ONE, "other data")
    alone = plan_folder.begin(OTHER, "data")
    assert plan_folder.count(first) == plan_folder.Count(2, 1, 1, 0)
    assert plan_folder.count(second) == plan_folder.Count(2, 1, 0, 0)
    assert plan_folder.count(alone) == plan_folder.Count(1, 1, 1, 0)
    assert plan_folder.count(plan_folder.begin(ONE, "data")) == plan_folder.Count(3, 2, 1, 0)


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
    assert plan_folder.count(tags) == plan_folder.Count(1, 1, 0, 6)


def test_runs_that_begin_at_once_share_the_secret_and_lose_no_line(state):
    code = (
        "from epsilons.ledger import plan_folder\n"
        "for _ in range(20): assert 'run' in plan_folder.begin((b'x',), 'data')\n"
        "print(plan_folder.begin((b'x',), 'data')['key'])"
    )
    with ThreadPoolExecutor(3) as pool:
        words = [sys.executable, "-c", code]
        made = list(pool.map(lambda _: subprocess.run(words, capture_output=True, text=True, check=True), range(3)))
    assert len({one.stdout for one in made}) == 1
    assert plan_folder.count(plan_folder.begin((b"x",), "data")) == plan_folder.Count(64, 64, 0, 0)


# -- One process at a time in a run's folder, from before the folder is read until the run ends ----------------------


RECORDS, WIDTH, STEPS = 40, 4, 20
BUSY = "Another process is training in"

posix = pytest.mark.skipif(os.name != "posix", reason="locks and modes are POSIX")
pytestmark = [posix, pytest.mark.usefixtures("one_thread")]


BUDGETS = epsilons.Budgets(np.resize([4.0, 8.0], RECORDS), delta=1e-5)
PLAN = epsilons.plan(BUDGETS, epsilons.Recipe(steps=STEPS, batch_size=10, clip_norm=1.0), "scale", "rdp")


def begun(run_dir: Path, **options: Any) -> tuple[nn.Linear, epsilons.Private]:
    torch.manual_seed(0)
    model = nn.Linear(WIDTH, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = (torch.randn(RECORDS, WIDTH),)
    return model, make_flat(model, optimizer, data, PLAN, budgets=BUDGETS, run_dir=run_dir, **options)


def train(model: nn.Linear, private: epsilons.Private, until: int | None = None) -> None:
    for (x,) in private.batches:
        private.backward(model(x)[:, 0])
        private.step()
        if private.updates == until:
            break


def contents(folder: Path) -> dict[str, tuple[bytes, int, int]]:
    """Bytes, inode and time of the last change of everything in it."""
    paths = sorted(folder.rglob("*"))
    return {str(p): (p.read_bytes() if p.is_file() else b"", p.lstat().st_ino, p.lstat().st_mtime_ns) for p in paths}


def assert_held(run_dir: Path) -> None:
    with pytest.raises(RunError, match=BUSY):
        FolderLock(run_dir)


# -- the lock -----------------------------------------------------------------------------------------------------


def test_a_held_folder_is_refused_and_left_as_it_is(tmp_path):
    first = FolderLock(tmp_path / "run")
    (tmp_path / "run" / "plan.json").write_text("{")
    before = contents(tmp_path)
    for _ in range(3):
        assert_held(tmp_path / "run")
    assert contents(tmp_path) == before
    first.release()
    FolderLock(tmp_path / "run").release()
    assert sorted(os.listdir(tmp_path / "run")) == ["plan.json"]


def test_the_lock_is_its_owner_s_alone_and_leaves_nothing_behind(tmp_path):
    before = os.umask(0)
    try:
        lock = FolderLock(tmp_path / "runs" / "first")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "runs" / "first" / NAME).stat().st_mode) == 0o600
    assert stat.S_IMODE((tmp_path / "runs" / "first").stat().st_mode) == 0o700
    lock.release()
    lock.release()
    assert not (tmp_path / "runs" / "first").exists()


def test_two_names_of_one_folder_have_one_lock(tmp_path, monkeypatch):
    lock = FolderLock(tmp_path / "run")
    (tmp_path / "link").symlink_to(tmp_path / "run")
    monkeypatch.chdir(tmp_path)
    for name in (Path("run"), Path("link"), tmp_path / "run" / ".." / "link"):
        assert_held(name)
    lock.release()


def test_a_killed_process_releases_its_lock_and_its_file_does_not_matter(tmp_path):
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            lock = FolderLock(tmp_path / "run")
            os.write(writing, b"x")
            time.sleep(600)
            lock.release()
        finally:
            os._exit(1)
    os.read(reading, 1)
    assert_held(tmp_path / "run")
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    assert (tmp_path / "run" / NAME).exists()
    _, private = begun(tmp_path / "run")  # a new run: a lock's file alone is no run
    private.close()


@pytest.mark.parametrize("is_taken", [True, False])
def test_a_lock_file_that_was_removed_after_it_was_opened_is_no_lock(tmp_path, monkeypatch, is_taken):
    """The second process opens the file, then the first removes it, and a third may create another one."""
    run_dir = tmp_path / "run"
    first, real = FolderLock(run_dir), files.hold
    if is_taken:
        (run_dir / "kept").touch()  # otherwise its holder removes the folder, too
    thirds: list[FolderLock] = []

    def late(handle: int, folder: Path) -> None:
        monkeypatch.setattr(files, "hold", real)
        first.release()
        if is_taken:
            thirds.append(FolderLock(run_dir))
        real(handle, folder)

    monkeypatch.setattr(files, "hold", late)
    if is_taken:
        assert_held(run_dir)
    holder = thirds[0] if is_taken else FolderLock(run_dir)
    assert_held(run_dir)
    holder.release()


def test_a_file_system_without_locks_is_named(tmp_path, monkeypatch):
    import fcntl

    monkeypatch.setattr(fcntl, "flock", Mock(side_effect=OSError(errno.ENOLCK, "No locks available")))
    with pytest.raises(RunError, match=r"cannot be locked: No locks available.*Choose a folder"):
        FolderLock(tmp_path / "run")


def test_a_path_that_cannot_be_a_folder_has_no_lock(tmp_path):
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(RunError, match="cannot be used"):
            FolderLock(path)


# -- a run holds it -------------------------------------------------------------------------------------------------


def nothing(run_dir: Path) -> None:
    pass


def empty(run_dir: Path) -> None:
    run_dir.mkdir()


def cut_off_before_its_ledger(run_dir: Path) -> None:
    RunFolder.create(run_dir, PLAN, {})


def stopped(run_dir: Path) -> None:
    model, private = begun(run_dir)
    train(model, private, 5)
    private.close()


def finished(run_dir: Path) -> None:
    model, private = begun(run_dir)
    with private:
        train(model, private)


@pytest.mark.parametrize("resume", [True, False], ids=["resume", "new"])
@pytest.mark.parametrize("state", [nothing, empty, cut_off_before_its_ledger, stopped, finished])
def test_nothing_in_a_held_folder_is_read_or_removed(state, resume, tmp_path):
    run_dir = tmp_path / "run"
    state(run_dir)
    lock = RunFolder(run_dir).lock()
    before = contents(tmp_path)
    with pytest.raises(RunError, match=BUSY):
        begun(run_dir, resume=resume)
    assert contents(tmp_path) == before
    lock.release()


@pytest.mark.parametrize("resume", [True, False], ids=["resume", "new"])
def test_a_run_holds_its_folder_from_make_private_until_it_is_closed_or_done(resume, tmp_path):
    run_dir = tmp_path / "run"
    model, private = begun(run_dir, resume=resume)
    assert_held(run_dir)
    train(model, private, 3)
    assert_held(run_dir)
    with pytest.raises(RunError, match=BUSY):
        begun(run_dir, resume=True)
    private.close()
    assert not (run_dir / NAME).exists()
    model, private = begun(run_dir, resume=True)
    assert_held(run_dir)
    train(model, private)
    assert private.is_finished
    FolderLock(run_dir).release()  # done, though it was not closed
    private.close()


def test_a_run_that_cannot_begin_releases_its_folder_and_leaves_no_key(tmp_path, monkeypatch):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("mine")
    for _ in range(2):
        with pytest.raises(RunError, match="not empty"):
            begun(tmp_path / "mine")
        assert os.listdir(tmp_path / "mine") == ["notes.txt"]
    monkeypatch.setattr(Ledger, "__init__", Mock(side_effect=LedgerError("broken")))
    with pytest.raises(LedgerError, match="broken"):
        begun(tmp_path / "run")
    assert not (tmp_path / "run" / "secret").exists()
    assert not (tmp_path / "run" / NAME).exists()


def test_a_run_cut_off_between_its_key_and_its_ledger_begins_again(tmp_path):
    RunFolder.create(tmp_path / "run", PLAN, {}).write_key(bytes(range(32)))
    model, private = begun(tmp_path / "run", resume=True)
    with private:
        train(model, private)
    assert private.updates == STEPS
    assert private.ledger.epoch == 0


# -- a ledger that is lost ------------------------------------------------------------------------------------------


def unlinked(run_dir: Path) -> None:
    (run_dir / "ledger.jsonl").unlink()


def renamed(run_dir: Path) -> None:
    (run_dir / "ledger.jsonl").rename(run_dir / "ledger.old")


def replaced_by_its_copy(run_dir: Path) -> None:
    shutil.copy2(run_dir / "ledger.jsonl", run_dir / "copy")
    os.replace(run_dir / "copy", run_dir / "ledger.jsonl")


def moved(run_dir: Path) -> None:
    run_dir.rename(run_dir.with_name("elsewhere"))


def removed_with_its_folder(run_dir: Path) -> None:
    shutil.rmtree(run_dir)


def started_again(run_dir: Path) -> None:
    shutil.rmtree(run_dir)
    begun(run_dir)[1].close()


LOSSES = [unlinked, renamed, replaced_by_its_copy, moved, removed_with_its_folder, started_again]


@pytest.mark.parametrize("at", ["between draws", "in a draw", "before the first"])
@pytest.mark.parametrize("lose", LOSSES)
def test_a_run_with_a_lost_ledger_applies_no_further_update(lose, at, tmp_path):
    """In a draw: after its charge and before its update, which `Ledger.record` refuses."""
    run_dir = tmp_path / "run"
    model, private = begun(run_dir, checkpoint_every=1000)
    turn = 0 if at == "before the first" else random.Random(f"{lose.__name__} {at}").randrange(2, STEPS - 2)
    if turn:
        train(model, private, turn)
    if at != "in a draw":
        lose(run_dir)
    before = [p.detach().clone() for p in model.parameters()]

    def go_on() -> None:
        with private:
            for (x,) in private.batches:
                private.backward(model(x)[:, 0])
                if at == "in a draw" and (run_dir / "ledger.jsonl").exists():
                    lose(run_dir)
                private.step()

    with pytest.raises(LedgerError, match="removed, renamed or replaced"):
        go_on()
    assert private.updates == turn
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


USES: dict[str, Callable[[Ledger], Any]] = {
    "charge": lambda ledger: ledger.charge(0, 1),
    "charge again": lambda ledger: ledger.charge(0, 0),
    "record": lambda ledger: ledger.record(0, 0, "hash"),
    "epoch": lambda ledger: ledger.new_epoch("key", [1]),
    "sync": Ledger.sync,
    "close": Ledger.close,
}


@pytest.mark.parametrize("use", USES.values(), ids=USES.keys())
@pytest.mark.parametrize("lose", LOSSES[:3])
def test_every_use_of_a_ledger_detects_its_loss(lose, use, tmp_path):
    ledger = Ledger(PLAN, tmp_path / "ledger.jsonl")
    ledger.charge(0, 0)
    lose(tmp_path)
    with pytest.raises(LedgerError, match="removed, renamed or replaced"):
        use(ledger)
    assert ledger.is_closed
    with pytest.raises(LedgerError, match="closed"):
        ledger.charge(0, 0)
    ledger.suspend()


def test_another_working_folder_is_no_loss(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    ledger = Ledger(PLAN, Path("ledger.jsonl"))
    (tmp_path / "below").mkdir()
    monkeypatch.chdir(tmp_path / "below")
    for step in range(STEPS):
        ledger.charge(0, step)
        assert ledger.record(0, step, f"{step}")
    ledger.close()
    assert read_charges(tmp_path / "ledger.jsonl", PLAN) == (STEPS,)


# -- two at once ------------------------------------------------------------------------------------------------------

#: Calls before and after which a process may sleep: (owner, name).
WINDOWS: list[tuple[Any, str]] = [
    *((os, name) for name in ("open", "mkdir", "replace", "fsync")),
    *((Path, name) for name in ("rglob", "iterdir", "is_file", "unlink")),
    *((FolderLock, name) for name in ("_is_current", "_opened")),
    *((RunFolder, name) for name in ("write_key", "key_file")),
    *((Ledger, name) for name in ("_open", "_add")),
    (files, "hold"),
]
WAIT = 120.0


def with_sleeps(chance: random.Random) -> None:
    """Put sleeps around some of the windows, in this process. Only the first three calls of each sleep."""

    def wrap(owner: Any, name: str) -> None:
        real, delays = getattr(owner, name), [0.1] * 6

        def slow(*arguments: Any, **named: Any) -> Any:
            time.sleep(chance.uniform(0, delays.pop() if delays else 0))
            outcome = real(*arguments, **named)
            time.sleep(chance.uniform(0, delays.pop() if delays else 0))
            return outcome

        setattr(owner, name, slow)

    for owner, name in chance.sample(WINDOWS, 6):
        wrap(owner, name)


def _one_of_two(run_dir: Path, seed: str, both: Any, other_is_done: Any, outcomes: Any) -> None:
    torch.set_num_threads(1)
    with_sleeps(random.Random(seed))
    both.wait(WAIT)
    try:
        model, private = begun(run_dir, resume=True)
        with private:
            train(model, private, 3)
            waited = other_is_done.wait(WAIT)
            train(model, private)
        outcomes.put(("trained", private.updates, private.ledger.charged, private.ledger.key, waited))
    except EpsilonsError as error:
        outcomes.put(("refused", type(error).__name__, str(error), "", True))
    finally:
        other_is_done.set()


def pair(run_dir: Path, seed: int) -> list[tuple[Any, ...]]:
    """The outcomes of two processes that begin at the same moment in one folder."""
    context = multiprocessing.get_context("fork")
    both, done, outcomes = context.Barrier(2), context.Event(), context.SimpleQueue()
    arguments = [(run_dir, f"{seed} {role}", both, done, outcomes) for role in "AB"]
    processes = [context.Process(target=_one_of_two, args=one) for one in arguments]
    for process in processes:
        process.start()
    for process in processes:
        process.join(2 * WAIT)
        assert process.exitcode == 0
    return sorted(outcomes.get() for _ in processes)


def check_pairs(tmp_path: Path, seeds: range) -> None:
    for seed in seeds:
        run_dir = tmp_path / f"{seed}" / "run"
        refused, trained = pair(run_dir, seed)
        assert refused[:2] == ("refused", "RunError"), (seed, refused)
        assert BUSY in refused[2], seed
        assert trained[:3] == ("trained", STEPS, (STEPS,)), (seed, trained)
        assert trained[4], "the other one did not report"
        account = read_account(run_dir / "ledger.jsonl", PLAN)
        assert (account.key, account.closed, account.charged) == (trained[3], (STEPS,), (STEPS,)), seed
        kinds = [line["kind"] for line in lines(run_dir) if line["kind"] != "sync"]
        assert kinds == ["open", "key", "reserve", *["update"] * STEPS, "close"], seed
        assert sorted(file.name for file in run_dir.iterdir()) == [
            "checkpoints",
            "ledger.jsonl",
            "plan.json",
            "run.json",
        ]


@pytest.mark.parametrize("seeds", [range(1), pytest.param(range(100, 122), marks=pytest.mark.slow)])
def test_of_two_processes_that_start_at_once_one_trains_and_one_is_refused(tmp_path, seeds):
    check_pairs(tmp_path, seeds)
