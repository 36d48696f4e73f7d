"""Copies of a run: a ledger that was cut, a forked process, a copied object, two threads. No noise is on two sums."""

from __future__ import annotations

import copy
import json
import os
import pickle
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from epsilons.core.files import FolderLock
from epsilons.errors import CallOrderError, EpsilonsError, InputError, LedgerError, RunError
from epsilons.ledger.ledger import Ledger, line_hash
from epsilons.training.noisy_update import NoisyUpdate
from epsilons.training.within_draws import Turns
from shares import share
from small_runs import a_model, blocks_of, epochs, everyone, lines, losses_of, parameters_of, private_over, same

pytestmark = pytest.mark.usefixtures("one_thread")
BLOCK = 4


@pytest.fixture(autouse=True, scope="module")
def small_blocks() -> Iterator[None]:
    with blocks_of(BLOCK):
        yield


class Sums:
    """The sums that updates were made of and applied, by key and step: the oracle of every test here."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.applied: dict[tuple[str, int, int], set[bytes]] = {}
        average, apply = NoisyUpdate.noisy_average, NoisyUpdate.apply

        def noted(update: NoisyUpdate, randomness: Any) -> list[Tensor]:
            at = update._position
            self.last = (randomness.commitment, at.phase, at.step), b"".join(t.numpy().tobytes() for t in update.sum)
            return average(update, randomness)

        def applied(update: NoisyUpdate, values: Any) -> None:
            self.applied.setdefault(self.last[0], set()).add(self.last[1])
            apply(update, values)

        monkeypatch.setattr(NoisyUpdate, "noisy_average", noted)
        monkeypatch.setattr(NoisyUpdate, "apply", applied)

    @property
    def shared(self) -> list[tuple[str, int, int]]:
        """Keys and steps whose noise is on two different sums."""
        return [where for where, sums in self.applied.items() if len(sums) > 1]


@pytest.fixture
def sums(monkeypatch: pytest.MonkeyPatch) -> Sums:
    return Sums(monkeypatch)


def run(run_dir: Path, until: int | None = None, scale: float = 1.0, is_killed: bool = False, **options: Any) -> Any:
    """Train until so many updates were made; with another scale, every sum is another one."""
    torch.manual_seed(0)
    model = a_model()
    options = {"plan": everyone(10), "run_dir": run_dir, "checkpoint_every": 3} | options
    private = private_over(model, **options)
    if is_killed:
        private._leave_checkpoint = lambda: None
    with private:
        for batch in private.batches:
            private.backward(scale * losses_of(model, batch))
            private.step()
            if private.updates == until:
                break
    return private


def cut(number: int) -> Callable[[Path, Path], None]:
    def act(ledger: Path, other: Path) -> None:
        ledger.write_text("".join(ledger.read_text().splitlines(True)[:-number]))

    return act


def cut_to_the_opening(ledger: Path, other: Path) -> None:
    ledger.write_text("".join(ledger.read_text().splitlines(True)[:2]))


def emptied(ledger: Path, other: Path) -> None:
    ledger.write_text("")


def doubled(ledger: Path, other: Path) -> None:
    whole = ledger.read_text().splitlines(True)
    ledger.write_text("".join([*whole, whole[-1]]))


def reordered(ledger: Path, other: Path) -> None:
    *whole, before, last = ledger.read_text().splitlines(True)
    ledger.write_text("".join([*whole, last, before]))


def of_another_run(ledger: Path, other: Path) -> None:
    shutil.copyfile(other / "ledger.jsonl", ledger)


def updates_removed(ledger: Path, other: Path) -> None:
    """With a new chain of hashes."""
    last, written = "0" * 64, []
    for line in lines(ledger.parent):
        if line["kind"] != "update":
            body = {key: value for key, value in line.items() if key != "hash"} | {"prev": last}
            last = line_hash(body)
            written.append(json.dumps(body | {"hash": last}) + "\n")
    ledger.write_text("".join(written))


TAMPERED = [
    cut(1), cut(2), cut(3), cut(7), cut_to_the_opening, emptied, doubled, reordered, of_another_run, updates_removed
]  # fmt: skip
NAMES = ["1 line cut", "2 lines cut", "3 lines cut", "7 lines cut", *(act.__name__ for act in TAMPERED[4:])]


@pytest.mark.parametrize("every", share([1, 3, 100], 1))
@pytest.mark.parametrize("tamper", TAMPERED, ids=NAMES)
def test_a_run_whose_ledger_was_cut_or_replaced_is_not_resumed(tamper, every, tmp_path, sums):
    """Charges are missing, and another loss would get the noise of steps that were made. Restored, the run goes on."""
    run(tmp_path / "other", until=2)
    run(tmp_path / "run", until=6, checkpoint_every=every)
    ledger = tmp_path / "run" / "ledger.jsonl"
    whole = ledger.read_bytes()
    tamper(ledger, tmp_path / "other")
    with pytest.raises((LedgerError, RunError), match=r"lacks lines|was altered|empty"):
        run(tmp_path / "run", resume=True, scale=0.3)
    assert not sums.shared
    ledger.write_bytes(whole)
    assert run(tmp_path / "run", resume=True).is_finished
    assert epochs(tmp_path / "run") == [0]
    assert not sums.shared


def test_a_killed_run_whose_ledger_lacks_the_checkpoint_s_lines_is_not_resumed(tmp_path, sums):
    run(tmp_path / "run", until=8, is_killed=True)  # with a checkpoint at update 6
    ledger = tmp_path / "run" / "ledger.jsonl"
    cut(5)(ledger, tmp_path)
    with pytest.raises(LedgerError, match=r"lacks lines .* count all steps of the plan as charged"):
        run(tmp_path / "run", resume=True, scale=0.3)
    assert not sums.shared


@pytest.mark.parametrize("is_killed", [True, False], ids=["killed", "closed"])
@pytest.mark.parametrize("scale", [1.0, 0.3])
def test_a_ledger_longer_than_the_checkpoint_s_is_replayed_or_gets_another_key(scale, is_killed, tmp_path, sums):
    run(tmp_path / "run", until=8, is_killed=is_killed)
    assert run(tmp_path / "run", resume=True, scale=scale).is_finished
    assert epochs(tmp_path / "run") == ([0] if scale == 1 else [0, 1])
    assert not sums.shared


@pytest.mark.parametrize("left", ["an older one", "none"])
@pytest.mark.parametrize("scale", [1.0, 0.3])
def test_a_run_without_its_last_checkpoints_puts_no_noise_on_two_sums(left, scale, tmp_path, sums):
    run(tmp_path / "run", until=4)
    shutil.copytree(tmp_path / "run" / "checkpoints", tmp_path / "back-up")
    run(tmp_path / "run", until=9, resume=True)
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    if left == "an older one":
        shutil.copytree(tmp_path / "back-up", tmp_path / "run" / "checkpoints")
    else:  # all ten steps are charged
        with pytest.raises(RunError, match=r"holds no checkpoint.*no training is left"):
            run(tmp_path / "run", resume=True, scale=scale)
        return
    run(tmp_path / "run", resume=True, scale=scale)
    assert epochs(tmp_path / "run") == ([0] if scale == 1 else [0, 1])
    assert not sums.shared


def test_a_checkpoint_of_an_earlier_version_names_no_line_and_is_resumed(tmp_path, sums):
    run(tmp_path / "run", until=5)
    for file in (tmp_path / "run" / "checkpoints").glob("*.json"):
        values = json.loads(file.read_text())
        values["state"]["$items"] = [pair for pair in values["state"]["$items"] if pair[0] != "ledger"]
        file.write_text(json.dumps(values))
    assert run(tmp_path / "run", resume=True).is_finished
    assert epochs(tmp_path / "run") == [0]


# -- processes ------------------------------------------------------------------------------------------------------


def in_a_fork(act: Callable[[], None]) -> str:
    """What a forked process raises there; "" for nothing."""
    reads, writes = os.pipe()
    pid = os.fork()
    if pid == 0:
        words = ""
        try:
            act()
        except BaseException as error:
            words = f"{type(error).__name__}: {error}"
        finally:
            os.write(writes, words.encode())
            os._exit(0)
    os.close(writes)
    os.waitpid(pid, 0)
    with os.fdopen(reads) as said:
        return said.read()


@pytest.mark.parametrize("at", [-1, 20, 21, 22], ids=lambda at: f"after batch {at}")
@pytest.mark.parametrize("is_on_disk", [True, False], ids=["with a folder", "in memory"])
def test_a_forked_process_releases_nothing_and_its_parent_goes_on(is_on_disk, at, tmp_path):
    """Three physical batches make a draw, after those that are only checked; before the first draw at -1."""
    options = {"plan": everyone(8), "max_physical_batch": 20}
    model, whole = a_model(), a_model()
    with private_over(whole, **options) as private:
        for batch in private.batches:
            private.backward(losses_of(whole, batch))
            private.step()
    private = private_over(model, run_dir=tmp_path / "run" if is_on_disk else None, **options)
    loop, before = private.batches, parameters_of(model)

    def other_sums() -> None:
        try:
            with private:
                if private._issued is not None:
                    private.step()
                for batch in loop:
                    private.backward(0.3 * losses_of(model, batch))
                    private.step()
        finally:
            assert same(parameters_of(model), before), "the fork has updated its model"

    def check_fork() -> None:
        assert in_a_fork(other_sums).startswith("LedgerError: This run was begun by another process")
        if is_on_disk:
            with pytest.raises(RunError, match="Another process is training"):
                FolderLock(tmp_path / "run")

    with private:
        if at == -1:
            check_fork()
        for number, batch in enumerate(loop):
            private.backward(losses_of(model, batch))
            if number == at:
                before = parameters_of(model)
                check_fork()
            private.step()
    assert private.is_finished
    assert same(parameters_of(model), parameters_of(whole))
    assert private.ledger.charged == (8,)


@pytest.mark.parametrize("is_on_disk", [True, False], ids=["with a folder", "in memory"])
def test_a_ledger_of_another_process_is_closed_there(is_on_disk, tmp_path):
    ledger = Ledger(everyone(8), tmp_path / "ledger.jsonl" if is_on_disk else None)
    ledger.charge(0, 0)

    def use() -> None:
        assert ledger.is_closed
        for act in (lambda: ledger.charge(0, 0), lambda: ledger.record(0, 0, "a"), lambda: ledger.new_epoch("b", [0])):
            with pytest.raises(LedgerError, match="another process"):
                act()

    assert in_a_fork(use) == ""
    assert not ledger.is_closed
    ledger.charge(0, 1)
    mirror = pickle.loads(pickle.dumps(ledger.mirror()))  # for another process, which it then belongs to
    assert mirror.charged == (2,)
    mirror.charge(0, 2)


# -- objects and threads ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_private_run_is_neither_copied_nor_pickled(copied):
    with private_over(a_model()) as private, pytest.raises(InputError, match="cannot be copied or pickled"):
        copied(private)


class SlowTurns(Turns):
    """Between reading whose turn it is and acting on it, another thread has time to read the same."""

    @property
    def turn(self) -> Any:
        read = self._turn
        time.sleep(0.01)
        return read

    @turn.setter
    def turn(self, turn: Any) -> None:
        self._turn = turn


@pytest.mark.parametrize("call", ["backward", "step"])
def test_of_two_threads_one_has_the_turn(call, sums):
    model, errors = a_model(), []
    with private_over(model, plan=everyone(1)) as private:
        private._turns.__class__ = SlowTurns
        private._turns.turn = "draw"
        del vars(private._turns)["turn"]
        for batch in private.batches:
            if private.is_check or call == "step":
                private.backward(losses_of(model, batch))
            start = threading.Barrier(2)

            def act() -> None:
                start.wait()  # noqa: B023
                try:
                    private.step() if call == "step" else private.backward(losses_of(model, batch))  # noqa: B023
                except EpsilonsError as error:
                    errors.append(error)

            if private.is_check:
                private.step()
                continue
            threads = [threading.Thread(target=act) for _ in range(2)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            if call == "backward":
                private.step()
    assert [type(error) for error in errors] == [CallOrderError]
    assert torch._C._len_torch_function_stack() == 0  # what a thread watched, it no longer watches
    assert private.updates == 1
    assert len(sums.applied) == 1
    assert not sums.shared
