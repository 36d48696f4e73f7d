"""One process at a time in a run's folder: from before it is looked at until the run ends, whatever is interleaved."""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import random
import shutil
import signal
import stat
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import epsilons
from epsilons import locks
from epsilons.errors import EpsilonsError, LedgerError, RunError
from epsilons.ledger import Ledger, read_account, read_charges
from epsilons.locks import NAME, FolderLock
from epsilons.run_folder import RunFolder

RECORDS, WIDTH, STEPS = 40, 4, 20
BUSY = "Another process is training in"

posix = pytest.mark.skipif(os.name != "posix", reason="locks and modes are POSIX")
pytestmark = [posix, pytest.mark.usefixtures("one_thread")]


def a_plan() -> tuple[epsilons.Budgets, epsilons.Plan]:
    budgets = epsilons.Budgets(np.resize([4.0, 8.0], RECORDS), delta=1e-5)
    recipe = epsilons.Recipe(steps=STEPS, batch_size=10, clip_norm=1.0)
    return budgets, epsilons.plan(budgets, recipe, "scale", "rdp")


PLANNED = a_plan()


def begun(run_dir: Path, **options: Any) -> tuple[nn.Linear, epsilons.Private]:
    torch.manual_seed(0)
    model = nn.Linear(WIDTH, 1)
    budgets, plan = PLANNED
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = (torch.randn(RECORDS, WIDTH),)
    return model, epsilons.make_private(model, optimizer, data, plan, budgets=budgets, run_dir=run_dir, **options)


def train(model: nn.Linear, private: epsilons.Private, until: int | None = None) -> None:
    for (x,) in private.batches:
        private.backward(model(x)[:, 0])
        private.step()
        if private.updates == until:
            break


def contents(folder: Path) -> dict[str, tuple[bytes, int, int]]:
    """Everything in it: bytes, inode and time of the last change."""
    found = {}
    for path in sorted(folder.rglob("*")):
        of = path.lstat()
        found[str(path.relative_to(folder))] = (path.read_bytes() if path.is_file() else b"", of.st_ino, of.st_mtime_ns)
    return found


# -- the lock -----------------------------------------------------------------------------------------------------


def test_a_held_folder_is_refused_and_left_as_it_is(tmp_path):
    first = FolderLock(tmp_path / "run")
    (tmp_path / "run" / "plan.json").write_text("{")
    before = contents(tmp_path)
    for _ in range(3):
        with pytest.raises(RunError, match=BUSY):
            FolderLock(tmp_path / "run")
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
        with pytest.raises(RunError, match=BUSY):
            FolderLock(name)
    lock.release()


def in_a_child(do: Callable[[], None]) -> int:
    """Fork, do it, and stop there; its process id."""
    child = os.fork()
    if child == 0:
        try:
            do()
        finally:
            os._exit(1)
    return child


def test_a_process_that_is_killed_lets_go_and_its_file_is_no_obstacle(tmp_path):
    ready, told = os.pipe()

    def hold() -> None:
        lock = FolderLock(tmp_path / "run")
        os.write(told, b"x")
        time.sleep(600)
        lock.release()

    child = in_a_child(hold)
    os.read(ready, 1)
    with pytest.raises(RunError, match=BUSY):
        FolderLock(tmp_path / "run")
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    assert (tmp_path / "run" / NAME).exists()
    _, private = begun(tmp_path / "run")  # not resumed: a lock's file alone is no run
    private.close()


def test_a_lock_that_its_holder_removed_after_it_was_opened_here_is_not_taken_for_the_folder_s(tmp_path, monkeypatch):
    """The second opens the file, the first removes it and lets go, a third makes another one: one of them has it."""
    first, real = FolderLock(tmp_path / "run"), locks.hold
    (tmp_path / "run" / "kept").touch()
    thirds: list[FolderLock] = []

    def late(handle: int, folder: Path) -> None:
        monkeypatch.setattr(locks, "hold", real)
        first.release()
        thirds.append(FolderLock(tmp_path / "run"))
        real(handle, folder)

    monkeypatch.setattr(locks, "hold", late)
    with pytest.raises(RunError, match=BUSY):
        FolderLock(tmp_path / "run")
    thirds[0].release()


def test_the_same_where_nobody_came_between(tmp_path, monkeypatch):
    first, real = FolderLock(tmp_path / "run"), locks.hold

    def late(handle: int, folder: Path) -> None:
        monkeypatch.setattr(locks, "hold", real)
        first.release()  # removes the file and the folder
        real(handle, folder)

    monkeypatch.setattr(locks, "hold", late)
    second = FolderLock(tmp_path / "run")
    with pytest.raises(RunError, match=BUSY):
        FolderLock(tmp_path / "run")
    second.release()


def test_a_file_system_without_locks_is_named(tmp_path, monkeypatch):
    import fcntl

    def unable(*_: Any) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", unable)
    with pytest.raises(RunError, match=r"cannot be locked: No locks available.*Choose a folder"):
        FolderLock(tmp_path / "run")


def test_a_path_that_cannot_be_a_folder_is_refused(tmp_path):
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
    RunFolder.create(run_dir, PLANNED[1], {})


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
def test_nothing_of_a_held_folder_is_looked_at_or_cleared_away(state, resume, tmp_path):
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
    with pytest.raises(RunError, match=BUSY):
        FolderLock(run_dir)
    train(model, private, 3)
    with pytest.raises(RunError, match=BUSY):
        FolderLock(run_dir)
    with pytest.raises(RunError, match=BUSY):
        begun(run_dir, resume=True)
    private.close()
    assert not (run_dir / NAME).exists()
    model, private = begun(run_dir, resume=True)
    with pytest.raises(RunError, match=BUSY):
        FolderLock(run_dir)
    train(model, private)
    assert private.is_finished
    FolderLock(run_dir).release()  # done, though it was not closed
    private.close()


def test_a_run_that_cannot_begin_lets_go_and_leaves_no_key(tmp_path, monkeypatch):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("mine")
    for _ in range(2):
        with pytest.raises(RunError, match="not empty"):
            begun(tmp_path / "mine")
        assert os.listdir(tmp_path / "mine") == ["notes.txt"]

    def broken(*_: Any, **__: Any) -> None:
        raise LedgerError("broken")

    monkeypatch.setattr(Ledger, "__init__", broken)
    with pytest.raises(LedgerError, match="broken"):
        begun(tmp_path / "run")
    assert not (tmp_path / "run" / "secret").exists()
    assert not (tmp_path / "run" / NAME).exists()


def test_a_run_that_was_cut_off_between_its_key_and_its_ledger_begins_anew(tmp_path):
    RunFolder.create(tmp_path / "run", PLANNED[1], {}).write_key(bytes(range(32)))
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


def begun_anew(run_dir: Path) -> None:
    shutil.rmtree(run_dir)
    begun(run_dir)[1].close()


LOSSES = [unlinked, renamed, replaced_by_its_copy, moved, removed_with_its_folder, begun_anew]


@pytest.mark.parametrize("at", ["between draws", "in a draw", "before the first"])
@pytest.mark.parametrize("lose", LOSSES)
def test_a_run_whose_ledger_is_lost_applies_no_update_more(lose, at, tmp_path):
    """In a draw: after its charge and before its update, which is refused by the ledger's record."""
    model, private = begun(tmp_path / "run", checkpoint_every=1000)
    chance = random.Random(f"{lose.__name__} {at}").randrange(2, STEPS - 2)
    turn = 0 if at == "before the first" else chance
    if at == "before the first":
        lose(tmp_path / "run")
    else:
        train(model, private, turn)
        if at == "between draws":
            lose(tmp_path / "run")
    before = [p.detach().clone() for p in model.parameters()]

    def go_on() -> None:
        with private:
            for (x,) in private.batches:
                private.backward(model(x)[:, 0])
                if at == "in a draw" and (tmp_path / "run" / "ledger.jsonl").exists():
                    lose(tmp_path / "run")
                private.step()

    with pytest.raises(LedgerError, match="removed, renamed or replaced"):
        go_on()
    assert private.updates == turn
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


@pytest.mark.parametrize("lose", LOSSES[:3])
def test_a_lost_ledger_is_noticed_by_whatever_is_asked_of_it(lose, tmp_path):
    plan = PLANNED[1]

    def made(name: str) -> Ledger:
        (tmp_path / name).mkdir()
        ledger = Ledger(plan, tmp_path / name / "ledger.jsonl")
        ledger.charge(0, 0)
        lose(tmp_path / name)
        return ledger

    asked: dict[str, Callable[[Ledger], Any]] = {
        "charge": lambda ledger: ledger.charge(0, 1),
        "charge again": lambda ledger: ledger.charge(0, 0),
        "record": lambda ledger: ledger.record(0, 0, "hash"),
        "epoch": lambda ledger: ledger.new_epoch("key", [1]),
        "sync": Ledger.sync,
        "close": Ledger.close,
    }
    for name, ask in asked.items():
        ledger = made(name)
        with pytest.raises(LedgerError, match="removed, renamed or replaced"):
            ask(ledger)
        assert ledger.is_closed
        with pytest.raises(LedgerError, match="closed"):
            ledger.charge(0, 0)
        ledger.suspend()


def test_another_working_folder_is_no_loss(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    ledger = Ledger(PLANNED[1], Path("ledger.jsonl"))
    (tmp_path / "below").mkdir()
    monkeypatch.chdir(tmp_path / "below")
    for step in range(STEPS):
        ledger.charge(0, step)
        assert ledger.record(0, step, f"{step}")
    ledger.close()
    assert read_charges(tmp_path / "ledger.jsonl", PLANNED[1]) == (STEPS,)


# -- two at once ------------------------------------------------------------------------------------------------------

#: Where a process may be stopped for a while: (owner, name), each before and after.
WINDOWS: list[tuple[Any, str]] = [
    (os, "open"),
    (os, "mkdir"),
    (os, "replace"),
    (os, "fsync"),
    (locks, "hold"),
    (FolderLock, "_is_at_its_place"),
    (FolderLock, "_opened"),
    (Path, "rglob"),
    (Path, "iterdir"),
    (Path, "is_file"),
    (Path, "unlink"),
    (RunFolder, "write_key"),
    (RunFolder, "key_file"),
    (Ledger, "_open"),
    (Ledger, "_append"),
]
WAIT = 120.0


def with_sleeps(chance: random.Random) -> None:
    """Put sleeps around some of the windows, in this process."""

    def wrap(owner: Any, name: str) -> None:
        real, left = getattr(owner, name), [3]

        def slow(*arguments: Any, **named: Any) -> Any:
            left[0] -= 1
            if left[0] >= 0:
                time.sleep(chance.uniform(0, 0.1))
            outcome = real(*arguments, **named)
            if left[0] >= 0:
                time.sleep(chance.uniform(0, 0.1))
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
    """What became of two processes that begin at the same moment in one folder."""
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
        assert trained[4], "the other one neither trained nor said so"
        account = read_account(run_dir / "ledger.jsonl", PLANNED[1])
        assert (account.key, account.closed, account.charged) == (trained[3], (STEPS,), (STEPS,)), seed
        kinds = [json.loads(line)["kind"] for line in (run_dir / "ledger.jsonl").read_text().splitlines()]
        assert kinds == ["open", "key", "reserve", *["update"] * STEPS, "close"], seed
        assert sorted(file.name for file in run_dir.iterdir()) == [
            "checkpoints",
            "ledger.jsonl",
            "plan.json",
            "run.json",
        ]


def test_of_two_processes_that_start_at_once_one_trains_and_the_other_says_so(tmp_path):
    check_pairs(tmp_path, range(3))


@pytest.mark.slow
def test_the_same_twenty_times(tmp_path):
    check_pairs(tmp_path, range(100, 120))
