"""Stop and go on: whatever instant a run is cut off at, it comes out as if it had not been, and is charged once."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import random
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from itertools import product
from pathlib import Path
from random import SystemRandom
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import epsilons
from epsilons.core.mechanism import SampledGaussian
from epsilons.draws import persons_rows, randomness
from epsilons.draws.randomness import sample_hash
from epsilons.errors import CallOrderError, DataError, LedgerError, RunError
from epsilons.ledger import plan_folder
from epsilons.ledger.ledger import line_hash, read_charges
from epsilons.training import checkpoints
from functional import Model
from options import fit_flat, make_flat
from shares import share
from small_runs import (
    Training,
    blocks_of,
    dropping_model,
    epochs,
    lines,
    losses_of,
    points,
    private_over,
    rows,
    sampled,
    some_plan,
    three_levels,
    train,
)

STEPS, BLOCK, EVERY = 40, 16, 7  # more than two blocks of the ledger; checkpoints at other steps than blocks
RESERVED = 2 * BLOCK  # steps that a run of 20 steps has reserved


@pytest.fixture(autouse=True, scope="module")
def small_blocks() -> Iterator[None]:
    with blocks_of(BLOCK):
        yield


class Trained(Training):
    """A run with checkpoints at other steps than blocks; noisy: one draw in ten is never twice the same."""

    def __init__(self, run_dir: Path | None, *, noisy: bool = False, **options: Any) -> None:
        super().__init__(run_dir, **({"checkpoint_every": EVERY} | options))
        self.noisy = noisy
        self.private.on_update(lambda _: self.schedule.step())

    def run(self, until: int | None = None, is_cut: bool = False) -> Trained:
        """is_cut: end as a process does that is killed, without a checkpoint on the way out."""
        if is_cut:
            self.private._leave_checkpoint = lambda: None
        with self.private as private:
            if private.updates != until:
                for x, y in private.batches:
                    losses = F.cross_entropy(self.model(x), y, reduction="none")
                    if self.noisy and private.updates % 10 == 9:
                        losses = losses * (1 + SystemRandom().random())  # never twice the same
                    private.backward(losses)
                    private.step()
                    if private.updates == until:
                        break
        return self


@cache
def uninterrupted() -> bytes:
    """Without a folder, and so without checkpoints: the oracle."""
    return Trained(None).run().bits()


def check_account(run_dir: Path, keys: list[int]) -> None:
    """Every step was charged once, under these key epochs."""
    assert read_charges(run_dir / "ledger.jsonl", sampled()) == (STEPS,)
    assert epochs(run_dir) == keys


# -- power cuts -----------------------------------------------------------------------------------------------------


class PowerCut(BaseException):
    """Everything that was not durable is gone."""


class Disk:
    """What of a folder would be left after a power cut: contents at their last fsync, names at their folder's.

    Counts the instants at which something becomes durable, visible or applied, and cuts the power at one of them.
    """

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch, cut_at: int | None) -> None:
        self.root, self.cut_at, self.instants = root, cut_at, 0
        self.contents: dict[int, bytes] = {}
        self.names: dict[Path, dict[str, int]] = {}
        for path in [root, *root.rglob("*")]:  # what was there before stays there
            if path.is_dir():
                self.names[path] = {p.name: p.stat().st_ino for p in path.iterdir()}
            elif path.exists():
                self.contents[path.stat().st_ino] = path.read_bytes()
        real_sync, real_replace, real_step = os.fsync, os.replace, torch.optim.SGD.step

        def sync(handle: int) -> None:
            self.instant()
            path = Path(os.readlink(f"/proc/self/fd/{handle}"))
            real_sync(handle)
            if path.is_dir():
                self.names[path] = {p.name: p.stat().st_ino for p in path.iterdir()}
            elif path.exists():
                self.contents[os.fstat(handle).st_ino] = path.read_bytes()
            self.instant()

        def replaced(source: Any, target: Any) -> None:
            self.instant()
            real_replace(source, target)
            self.instant()

        def step(optimizer: torch.optim.SGD, *arguments: Any) -> Any:
            self.instant()
            assert self.paid() > self.applied, "an update before its charge was durable"
            self.applied += 1
            return real_step(optimizer, *arguments)

        self.applied = 0
        # After a power cut the key is in the same file on the same disk; here it is in a copy.
        monkeypatch.setattr(
            epsilons.ledger.run_folder.RunFolder,
            "key_file",
            lambda folder: hashlib.sha256(folder.read_key() or b"").hexdigest(),
        )
        monkeypatch.setattr(os, "fsync", sync)
        monkeypatch.setattr(os, "replace", replaced)
        monkeypatch.setattr(torch.optim.SGD, "step", step)

    def instant(self) -> None:
        self.instants += 1
        if self.instants == self.cut_at:
            raise PowerCut

    def paid(self) -> int:
        """Steps that the durable part of the ledger has paid for."""
        inode = self.names.get(self.root, {}).get("ledger.jsonl", -1)
        whole = self.contents.get(inode, b"").decode().split("\n")[:-1]
        return max([line["to"] for line in map(json.loads, whole) if "to" in line], default=0)

    def left(self, target: Path) -> Path:
        """The folder as it is found when the power is back."""
        shutil.rmtree(target, ignore_errors=True)
        target.mkdir()
        for folder, names in self.names.items():
            if not folder.is_relative_to(self.root):
                continue
            place = target / folder.relative_to(self.root)
            place.mkdir(parents=True, exist_ok=True)
            for name, inode in names.items():
                if inode in self.contents:
                    (place / name).write_bytes(self.contents[inode])
        return target


def cut_and_gone_on(tmp_path: Path, cut_at: int) -> tuple[bytes, Path, bool]:
    """A run whose power is cut at one instant and again later, and then goes on to its end."""
    left, was_cut = tmp_path / "left-0", False
    options: dict[str, Any] = {}
    for attempt, instant in enumerate([cut_at, 2 * cut_at // 3 + 1, None]):
        with pytest.MonkeyPatch.context() as patch:
            run_dir = tmp_path / f"run-{attempt}"
            if attempt:
                shutil.copytree(left, run_dir)
                options = {"resume": True}
            disk = Disk(run_dir, patch, instant)
            disk.applied = 0 if not attempt else -(10**6)  # replayed steps were paid for before
            try:
                trained = Trained(run_dir, **options).run()
            except PowerCut:
                was_cut = True
                left = disk.left(tmp_path / f"left-{attempt + 1}")
                continue
            return trained.bits(), run_dir, was_cut
    raise AssertionError("the last attempt was not cut")


def instants_of_a_whole_run(tmp_path: Path) -> int:
    expected = uninterrupted()
    with pytest.MonkeyPatch.context() as patch:
        disk = Disk(tmp_path / "whole", patch, None)
        assert Trained(tmp_path / "whole").run().bits() == expected
    return disk.instants


@pytest.mark.parametrize("number", [4, pytest.param(100, marks=pytest.mark.slow)])
def test_a_run_after_a_power_cut_has_the_same_bits_and_is_charged_once(number, tmp_path):
    """Cut at so many of its instants, one after the other."""
    total = instants_of_a_whole_run(tmp_path)
    assert total > 100
    for place, cut_at in enumerate(random.Random(1).sample(range(1, total), number)):
        folder = tmp_path / f"{place}"
        folder.mkdir()
        bits, run_dir, was_cut = cut_and_gone_on(folder, cut_at)
        assert was_cut
        assert bits == uninterrupted(), f"cut at instant {cut_at} of {total}"
        check_account(run_dir, [0])
        shutil.rmtree(folder)


def _train_until_killed(run_dir: Path) -> None:
    Trained(run_dir, resume=True).run()


def kill_and_go_on(run_dir: Path, delays: list[float]) -> int:
    """Train in a process of its own that is killed again and again; how often it was."""
    killed = 0
    context = multiprocessing.get_context("fork")
    for delay in delays:
        process = context.Process(target=_train_until_killed, args=(run_dir,))
        process.start()
        process.join(delay)
        if process.is_alive():
            os.kill(process.pid, signal.SIGKILL)
            killed += 1
        process.join()
        if process.exitcode == 0:
            break
    return killed


@pytest.mark.slow
def test_a_run_that_is_killed_a_hundred_times_comes_out_the_same(tmp_path):
    torch.set_num_threads(1)
    expected, killed, run = uninterrupted(), 0, 0
    rng = random.Random(2)
    while killed < 100:
        run_dir = tmp_path / f"run-{run}"
        killed += kill_and_go_on(run_dir, [rng.uniform(0.01, 0.6) for _ in range(6)])
        assert Trained(run_dir, resume=True).run().bits() == expected
        check_account(run_dir, [0])
        run += 1


# -- going on -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("until", "is_cut"), share(product([1, 6, 7, BLOCK, STEPS - 1], [False, True]), 4))
def test_a_run_that_was_stopped_goes_on_with_schedule_average_and_momentum(until, is_cut, tmp_path):
    Trained(tmp_path / "run").run(until, is_cut)
    assert (tmp_path / "run" / "secret" / "key").exists()
    assert Trained(tmp_path / "run", resume=True).run().bits() == uninterrupted()
    check_account(tmp_path / "run", [0])
    assert not (tmp_path / "run" / "secret").exists()


def test_resume_begins_a_run_that_is_not_there_and_shows_one_that_is_finished(tmp_path):
    first = Trained(tmp_path / "run", resume=True).run()
    assert first.bits() == uninterrupted()
    before = (tmp_path / "run" / "ledger.jsonl").read_bytes()
    again = Trained(tmp_path / "run", resume=True)
    assert again.private.is_finished
    assert again.private.ledger.charged == (STEPS,)
    assert again.run().bits() == uninterrupted()
    assert (tmp_path / "run" / "ledger.jsonl").read_bytes() == before


def flipped(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


DAMAGE: dict[str, Callable[[Path], Any]] = {
    "a bit": flipped,
    "missing": Path.unlink,
    "cut": lambda file: file.write_bytes(file.read_bytes()[:100]),
}


def test_a_damaged_checkpoint_is_passed_over_for_the_one_before(tmp_path):
    Trained(tmp_path / "run").run(30)
    *_, last = sorted((tmp_path / "run" / "checkpoints").glob("*.safetensors"))
    flipped(last)
    assert Trained(tmp_path / "run", resume=True).run().bits() == uninterrupted()


def test_a_checkpoint_holds_no_pickle_and_few_are_kept(tmp_path):
    Trained(tmp_path / "run").run(30)
    files = sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir())
    assert len(files) == 2 * checkpoints.KEPT
    assert {Path(name).suffix for name in files} == {".json", ".safetensors"}


def partly_frozen(run_dir: Path, until: int | None = None, spoil: bool = False, **options: Any) -> bytes:
    """A run with a frozen table, tied under two names, to this update; the bits of its weights."""
    torch.manual_seed(0)
    table = nn.Embedding(5_000, 16).requires_grad_(False)
    forward = lambda model, x: model.layer(model.table(x).mean(1))  # noqa: E731
    model = Model(forward, table=table, again=table, layer=nn.Linear(16, 3))
    data = torch.randint(5_000, (60, 4)), torch.randint(3, (60,))
    if not options.pop("is_given", True):
        nn.init.zeros_(table.weight)
    options |= {"optimizer": torch.optim.SGD(model.layer.parameters(), lr=0.1, momentum=0.9)}
    with private_over(model, data, some_plan(steps=12), run_dir=run_dir, checkpoint_every=4, **options) as private:
        train(private, model, until)
        if spoil:
            table.weight.data[7] += 1
    return b"".join(t.detach().numpy().tobytes() for t in model.state_dict().values())


@pytest.mark.parametrize("spoil", [False, True])
@pytest.mark.parametrize("until", [3, 4, 6])
def test_frozen_weights_are_saved_once_and_go_on(until, spoil, tmp_path):
    """What is written to them after the last update is not resumed from."""
    whole = partly_frozen(tmp_path / "whole")
    partly_frozen(tmp_path / "run", until, spoil=spoil)
    files = [*(tmp_path / "run" / "checkpoints").glob("*.safetensors")]
    (frozen,) = [file for file in files if file.name.startswith("frozen")]
    written, size = frozen.stat().st_mtime_ns, 5_000 * 16 * 4
    assert size <= frozen.stat().st_size <= size + 2_000
    assert all(file.stat().st_size < 20_000 for file in files if file != frozen)
    assert partly_frozen(tmp_path / "run", resume=True, is_given=False) == whole
    assert len({*(tmp_path / "run" / "checkpoints").glob("frozen*")} - {frozen}) == 0
    assert not frozen.exists() or frozen.stat().st_mtime_ns == written


@pytest.mark.parametrize("damage", DAMAGE)
def test_damaged_frozen_weights_are_those_at_hand_or_named(damage, tmp_path):
    whole = partly_frozen(tmp_path / "whole")
    partly_frozen(tmp_path / "run", 6)
    folder = tmp_path / "run" / "checkpoints"
    (frozen,) = folder.glob("frozen*")
    genuine = frozen.read_bytes()
    DAMAGE[damage](frozen)
    with pytest.raises(RunError, match=rf"No checkpoint .*: {frozen.name}\. Restore"):
        partly_frozen(tmp_path / "run", resume=True, is_given=False)
    (tmp_path / "run" / "frozen-other.safetensors").write_bytes(genuine)
    for file in folder.glob("*.json"):
        facts = json.loads(file.read_text())
        outside = [f"../{frozen.name}", hashlib.sha256(genuine).hexdigest()]
        file.write_text(json.dumps(facts | {"frozen": outside}))
        with pytest.raises(RunError, match="No checkpoint"):
            checkpoints.latest(folder)
        file.write_text(json.dumps(facts))
    assert partly_frozen(tmp_path / "run", resume=True) == whole
    assert epochs(tmp_path / "run") == [0]
    assert frozen.read_bytes() == genuine


@pytest.mark.parametrize("damage", DAMAGE)
def test_frozen_weights_that_were_damaged_during_a_run_are_written_again(damage, tmp_path):
    table = torch.randn(5_000, 16)
    checkpoints.save(tmp_path, {"table": table}, [table])
    (frozen,) = tmp_path.glob("frozen*")
    DAMAGE[damage](frozen)
    checkpoints.save(tmp_path, {"table": table}, [table])
    assert torch.equal(checkpoints.latest(tmp_path)["table"], table)


def test_a_run_whose_checkpoints_are_all_damaged_does_not_begin_again(tmp_path):
    """Unless they are removed: then it begins again with the steps that are left, under another key."""
    run_dir = tmp_path / "run"
    Trained(run_dir).run(20)
    charged = (run_dir / "ledger.jsonl").read_bytes()
    for file in (run_dir / "checkpoints").glob("*.safetensors"):
        flipped(file)
    with pytest.raises(RunError, match=r"No checkpoint .*: 000004\.safetensors, 000003\.safetensors\. Restore"):
        Trained(run_dir, resume=True)
    assert (run_dir / "ledger.jsonl").read_bytes() == charged
    shutil.rmtree(run_dir / "checkpoints")
    assert Trained(run_dir, resume=True).run().private.updates == STEPS - RESERVED
    check_account(run_dir, [0, 1])


# -- optimizers that go through memory in order -----------------------------------------------------------------------

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "SGD": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "Adam": partial(torch.optim.Adam, lr=0.01, eps=0.01, amsgrad=True),
    "AdamW": partial(torch.optim.AdamW, lr=0.01, eps=0.01),
    "Adagrad": partial(torch.optim.Adagrad, lr=0.05, eps=0.01),
}


def a_net(layout: str) -> nn.Module:
    """ "auto": its convolutions get channels_last when private training begins, and have it until it ends."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 6, 3, padding=1), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(24, 5), nn.Linear(5, 3)
    )
    if layout == "channels last":
        model.to(memory_format=torch.channels_last)
    if layout == "transposed":
        model[3].weight = nn.Parameter(model[3].weight.detach().T.contiguous().T)
    return model


def fused(kind: str, how: str, layout: str, run_dir: Path | None = None, until: int | None = None) -> Tensor:
    """Weights after three public steps, private ones to this number or to the end, and three more public steps."""
    model = a_net(layout)
    optimizer = OPTIMIZERS[kind](model.parameters(), **({how: True} if how else {}))
    data = torch.randn(60, 3, 4, 4), torch.randint(3, (60,))
    options = {"optimizer": optimizer, "channels_last": "auto" if layout == "auto" else False}
    options |= {"run_dir": run_dir, "resume": run_dir is not None}

    def public() -> None:
        for _ in range(3):
            optimizer.zero_grad()
            losses_of(model, data).mean().backward()
            optimizer.step()

    public()
    with private_over(model, data, some_plan(steps=12), **options) as private:
        train(private, model, until)
    public()
    return torch.cat([p.detach().flatten() for p in model.parameters()])


LAYOUTS = ["auto", "channels last", "transposed"]
IN_ORDER = share(product(OPTIMIZERS, ["fused"], LAYOUTS), 4)


@pytest.mark.parametrize(("kind", "how", "layout"), IN_ORDER + share(product(OPTIMIZERS, ["foreach", ""], LAYOUTS), 2))
def test_state_follows_the_layout_of_weights_that_it_belongs_to(kind, how, layout, tmp_path):
    """Fused optimizers pair state, gradient and weight by place in memory: in no layout are other numbers paired."""
    whole = fused(kind, how, layout)
    assert torch.allclose(whole, fused(kind, "", "usual"), rtol=0, atol=1e-4)
    fused(kind, how, layout, tmp_path / "run", 5)
    assert torch.equal(fused(kind, how, layout, tmp_path / "run"), whole)
    assert epochs(tmp_path / "run") == [0]


def test_what_cannot_be_kept_without_pickle_is_refused(tmp_path):
    class Odd:
        def state_dict(self) -> dict[str, Any]:
            return {"place": Path("nowhere")}

        def load_state_dict(self, state: Any) -> None: ...

    trained = Trained(tmp_path / "run")
    trained.private.register_for_checkpointing(odd=Odd())
    with pytest.raises(RunError, match="without pickle"):
        trained.run()


def test_what_was_kept_must_be_given_back(tmp_path):
    first = Trained(tmp_path / "run").run(20)
    options = {"budgets": three_levels(), "run_dir": tmp_path / "run", "seed": 5, "engine": "vmap", "resume": True}
    private = make_flat(first.model, first.optimizer, points(), sampled(), **options)
    with pytest.raises(RunError, match="schedule, average"), private:
        next(iter(private.batches))


def test_no_checkpoint_is_left_in_the_middle_of_a_draw(tmp_path):
    trained = Trained(tmp_path / "run")
    with trained.private as private:
        for x, y in private.batches:
            if private.updates == 3:
                with pytest.raises(CallOrderError, match="between draws"):
                    private.checkpoint()
                break
            private.backward(F.cross_entropy(trained.model(x), y, reduction="none"))
            private.step()


# -- new key epochs ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "change",
    [
        {"lr": 0.1},
        {"data": points(seed=1)},
        {"engine": "loop"},
        {"max_physical_batch": 3},
        {"data": TensorDataset(points()[0] * 2, points()[1])},
    ],
    ids=["learning rate", "data", "engine", "physical batches", "features"],
)
def test_what_changes_the_sum_changes_the_key_and_is_charged_again(change, tmp_path):
    run_dir = tmp_path / "run"
    assert Trained(run_dir).run(20).private.updates == 20
    second = Trained(run_dir, resume=True, **change).run()
    check_account(run_dir, [0, 1])
    # 32 steps were reserved under the first key, and all of them stay charged; it goes on from the last draw's start.
    assert second.private.ledger.charged == (STEPS,)
    assert second.private.updates == 19 + STEPS - RESERVED
    assert second.bits() != uninterrupted()


def test_another_number_of_threads_changes_the_key(one_thread, tmp_path):
    Trained(tmp_path / "run").run(20)
    torch.set_num_threads(2)
    Trained(tmp_path / "run", resume=True).private.close()
    assert epochs(tmp_path / "run") == [0, 1]


def test_noise_with_other_last_bits_changes_the_key(tmp_path, monkeypatch):
    """Another processor, or version of NumPy or torch: the step would be released again, with other last bits."""
    Trained(tmp_path / "same").run(20)
    sample_hash.cache_clear()
    Trained(tmp_path / "same", resume=True).private.close()
    assert epochs(tmp_path / "same") == [0]
    Trained(tmp_path / "run").run(20)
    sample_hash.cache_clear()
    true = randomness.fill

    def fill(words, values):
        true(words, values)
        values[::500] = np.nextafter(values[::500], 0)

    monkeypatch.setattr(randomness, "fill", fill)
    Trained(tmp_path / "run", resume=True).private.close()
    sample_hash.cache_clear()
    assert epochs(tmp_path / "run") == [0, 1]


def test_draws_by_counts_are_replayed_and_another_method_changes_the_key(tmp_path, monkeypatch):
    by_coins, whole_by_coins = tmp_path / "coins", uninterrupted()
    Trained(by_coins).run(20)
    monkeypatch.setattr(persons_rows, "MOST_COINS", 10)
    whole = Trained(None).run().bits()
    assert whole != whole_by_coins
    Trained(tmp_path / "counts").run(20)
    assert Trained(tmp_path / "counts", resume=True).run().bits() == whole
    assert epochs(tmp_path / "counts") == [0]
    Trained(by_coins, resume=True).private.close()
    assert epochs(by_coins) == [0, 1]


def test_a_lost_key_is_replaced_and_what_it_paid_for_stays_charged(tmp_path):
    run_dir = tmp_path / "run"
    Trained(run_dir, seed=None).run(20)
    (run_dir / "secret" / "key").write_bytes(b"too short")
    second = Trained(run_dir, seed=None, resume=True).run()
    assert epochs(run_dir) == [0, 1]
    assert second.private.updates == 19 + STEPS - RESERVED
    keys = [line["key"] for line in lines(run_dir) if line["kind"] == "key"]
    assert len(set(keys)) == 2


def test_a_replay_with_another_result_is_not_applied_and_changes_the_key(tmp_path):
    """Under one key the noise is the same: two sums with it give their difference away."""
    run_dir = tmp_path / "run"
    Trained(run_dir, noisy=True).run(20, is_cut=True)
    second = Trained(run_dir, noisy=True, resume=True)
    drawn: dict[int, set[tuple[int, int]]] = {}
    second.private.on_update(
        lambda p: drawn.setdefault(p.ledger.epoch, set()).add((p._position.phase, p._position.step))
    )
    second.run()
    check_account(run_dir, [0, 1])
    noted: dict[tuple[int, int, int], str] = {}
    for line in lines(run_dir):
        if line["kind"] == "update":
            assert noted.setdefault((line["epoch"], line["phase"], line["step"]), line["update"]) == line["update"]
    # steps 14 to 18 come out as before; at the tenth update, step 19, the replay differs
    (start,) = [line["start"] for line in lines(run_dir) if line["kind"] == "key" and line["epoch"] == 1]
    assert start == [19]
    assert second.private.updates == 19 + STEPS - RESERVED


@pytest.mark.parametrize(("tensor", "epoch"), share(product(range(4), [0, 1]), 4))
def test_a_replay_that_differs_in_any_tensor_of_its_update_is_not_applied(tensor, epoch, tmp_path):
    """Whichever tensor it is: the hash that is compared is of all of them."""
    run_dir = tmp_path / "run"
    loose = epsilons.plan(three_levels(), epsilons.Recipe(steps=STEPS, batch_size=6, clip_norm=1e6), "scale", "rdp")

    def odd(number: float, until: int | None, **options: Any) -> Trained:
        """At update 9 one tensor's gradients are shifted by a number, and none is clipped.

        The rate is so small that noise as large as this clip norm leaves the gradients small. If they were large, the
        shift would be a rounding error of theirs, which the engine's check finds for some of its random numbers only.
        """
        trained = Trained(run_dir, plan=loose, **({"lr": 3e-7} | options))
        shifted = [*trained.model.parameters()][tensor]
        trained.private._leave_checkpoint = lambda: None  # cut off: updates are made again
        with trained.private as private:
            for x, y in private.batches:
                losses = F.cross_entropy(trained.model(x), y, reduction="none")
                if private.updates == 9:
                    losses = losses + number * shifted.sum()
                private.backward(losses)
                private.step()
                if private.updates == until:
                    break
        return trained

    if epoch:
        odd(1.0, 7, lr=1e-7)  # continues from there at another rate, and so under another key
    for resume in (bool(epoch), True):  # the second time the same again
        odd(1.0, 12, resume=resume)
        assert epochs(run_dir) == [*range(epoch + 1)]
    second = odd(2.0, 12, resume=True)
    assert epochs(run_dir) == [*range(epoch + 2)]
    (start,) = [line["start"] for line in lines(run_dir) if line["kind"] == "key" and line["epoch"] == epoch + 1]
    assert start == [9]
    assert second.private.ledger.epoch == epoch + 1


# -- copies -----------------------------------------------------------------------------------------------------------


def command(*words: str) -> Callable[[Path, Path], None]:
    def run(source: Path, target: Path) -> None:
        if shutil.which(words[0]) is None:
            pytest.skip(f"needs {words[0]}")
        subprocess.run([*words, f"{source}/.", str(target)], check=True)

    return run


def packed_and_unpacked(source: Path, target: Path) -> None:
    shutil.make_archive(str(target), "tar", source)
    shutil.unpack_archive(f"{target}.tar", target)


COPIES: dict[str, Callable[[Path, Path], Any]] = {
    "copytree": shutil.copytree,
    "cp -r": command("cp", "-r"),
    "cp -a": command("cp", "-a"),
    "rsync": command("rsync", "-a"),
    "tar": packed_and_unpacked,
}


@pytest.mark.parametrize(("how", "is_seeded"), share(product(COPIES, [True, False]), 2))
def test_a_copied_folder_gets_another_key_and_counts_and_the_original_keeps_its_bits(
    how, is_seeded, tmp_path, monkeypatch
):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.delenv(plan_folder.VARIABLE)
    seed = {} if is_seeded else {"seed": None}
    Trained(tmp_path / "original", **seed).run(20)
    key = (tmp_path / "original" / "secret" / "key").read_bytes()
    COPIES[how](tmp_path / "original", tmp_path / "copy")
    assert (tmp_path / "copy" / "secret" / "key").read_bytes() == key
    copied = Trained(tmp_path / "copy", resume=True, **seed).run(25)
    assert (tmp_path / "copy" / "secret" / "key").read_bytes() != key
    assert epochs(tmp_path / "copy") == [0, 1]
    assert copied.private.ledger.charged[0] >= RESERVED  # what the first key had reserved stays charged
    original = Trained(tmp_path / "original", resume=True, **seed).run()
    assert epochs(tmp_path / "original") == [0]
    if is_seeded:
        assert original.bits() == uninterrupted()
    counted = json.loads((tmp_path / "original" / "run.json").read_text())["counted"]
    assert plan_folder.count(counted) == plan_folder.Count(2, 2, 0, 0)
    again = Trained(tmp_path / "copy", resume=True, **seed).run()  # in its place it goes on as any run does
    assert epochs(tmp_path / "copy") == [0, 1]
    assert again.private.ledger.charged == (STEPS,)
    assert plan_folder.count(counted) == plan_folder.Count(2, 2, 0, 0)


def brought_back(run_dir: Path) -> None:
    """From a back-up, whatever was there before is gone: its inodes may be used again."""
    for _ in range(3):
        shutil.copytree(run_dir, run_dir.with_name("back-up"))
        shutil.rmtree(run_dir)
        run_dir.with_name("back-up").rename(run_dir)


def key_written_again(run_dir: Path) -> None:
    content = (run_dir / "secret" / "key").read_bytes()
    (run_dir / "secret" / "key").write_bytes(content)


def key_replaced(run_dir: Path) -> None:
    shutil.copy2(run_dir / "secret" / "key", run_dir / "secret" / "other")
    os.replace(run_dir / "secret" / "other", run_dir / "secret" / "key")


def key_linked(run_dir: Path) -> None:
    """As cp -al and back-ups by hard links do: two names, one inode."""
    os.link(run_dir / "secret" / "key", run_dir.with_name("linked"))


def noted_by_an_earlier_version(run_dir: Path) -> None:
    path, last = run_dir / "ledger.jsonl", "0" * 64
    written = []
    for line in lines(run_dir):
        body = {key: value for key, value in line.items() if key not in ("hash", "file")} | {"prev": last}
        last = line_hash(body)
        written.append(json.dumps(body | {"hash": last}) + "\n")
    path.write_text("".join(written))


CHANGES = [brought_back, key_written_again, key_replaced, key_linked, noted_by_an_earlier_version]


@pytest.mark.parametrize(("change", "is_seeded"), share(product(CHANGES, [True, False]), 5))
def test_a_key_that_is_no_longer_the_file_that_was_written_is_not_used_again(change, is_seeded, tmp_path):
    seed, run_dir = {} if is_seeded else {"seed": None}, tmp_path / "run"
    Trained(run_dir, **seed).run(20, is_cut=True)
    change(run_dir)
    second = Trained(run_dir, resume=True, **seed).run()
    check_account(run_dir, [0, 1])
    assert len({line["key"] for line in lines(run_dir) if line["kind"] == "key"}) == 2
    assert second.private.updates == 14 + STEPS - RESERVED


def test_a_moved_folder_keeps_its_key(tmp_path):
    Trained(tmp_path / "run").run(20)
    (tmp_path / "run").rename(tmp_path / "moved")
    (tmp_path / "moved").chmod(0o700)
    assert Trained(tmp_path / "moved", resume=True).run().bits() == uninterrupted()
    assert epochs(tmp_path / "moved") == [0]


@pytest.mark.parametrize("until", [0, 20], ids=["before its first step", "in mid-run"])
@pytest.mark.parametrize("kind", ["seed", "key", "neither"])
def test_copies_of_one_run_on_other_data_share_no_key(kind, until, tmp_path):
    own = {"seed": {"seed": 5}, "key": {"seed": None, "key": bytes(32)}, "neither": {"seed": None}}[kind]
    Trained(tmp_path / "run", **own).run(until)
    keys = set()
    for place, seed in enumerate([0, 1, 2]):
        shutil.copytree(tmp_path / "run", tmp_path / f"{place}")
        Trained(tmp_path / f"{place}", resume=True, data=points(seed=seed), **own).private.close()
        keys.add((tmp_path / f"{place}" / "secret" / "key").read_bytes())
    keys.add((tmp_path / "run" / "secret" / "key").read_bytes())
    assert len(keys) == 4


@pytest.mark.parametrize("record", share([0, 7, 31, 59], 2))
@pytest.mark.parametrize("is_map_style", [True, False], ids=["map-style", "tensors"])
def test_the_difference_of_a_run_and_its_copy_on_neighbouring_data_is_noisy(is_map_style, record, tmp_path):
    """A coordinate that no record reaches tells: with one key on both, the difference there is nothing."""
    silent, whole = 300, torch.cat([points()[0], torch.zeros(60, 300)], 1)
    other = whole.clone()
    other[record, :3] = 100.0
    kind = rows if is_map_style else lambda *columns: columns

    def go(data: Tensor, run_dir: str, until: int, resume: bool) -> Tensor:
        value = nn.Parameter(torch.zeros(3 + silent))
        model = nn.ParameterList([value])
        optimizer = torch.optim.SGD([value], lr=1.0)
        options = {"run_dir": tmp_path / run_dir, "resume": resume, "checkpoint_every": 1, "budgets": three_levels()}
        with make_flat(model, optimizer, kind(data), sampled(), **options) as private:
            for batch in private.batches:
                private.backward(batch[0] @ value)
                private.step()
                if private.updates >= until:  # an update of an empty draw is not seen here
                    break
        return value.detach().clone()

    go(whole, "run", 5, False)
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    difference = go(whole, "run", 7, True) - go(other, "copy", 7, True)
    phase = sampled().phases[0]
    assert float(difference[3:].std()) > 0.8 * 2**0.5 * phase.noise_std / phase.expected_batch
    assert epochs(tmp_path / "copy") == [0, 1]
    assert epochs(tmp_path / "run") == [0]


def test_a_run_whose_charges_are_used_up_ends_early_and_breaks_no_promise(tmp_path):
    run_dir = tmp_path / "run"
    Trained(run_dir).run(STEPS - 1)
    second = Trained(run_dir, lr=0.1, resume=True).run()
    assert second.private.is_finished
    assert second.private.ledger.charged == (STEPS,)
    assert second.private.updates == STEPS - 2  # the start of the last draw; nothing was left for a step more
    assert lines(run_dir)[-1]["kind"] == "close"


def test_a_run_that_ends_without_its_replay_is_charged_for_all_possible_steps(tmp_path):
    """20 updates were made and the last checkpoint is of step 14: six of them are not made again."""
    run_dir = tmp_path / "run"
    Trained(run_dir).run(20, is_cut=True)
    second = Trained(run_dir, resume=True)
    assert second.private.ledger.charged == (RESERVED,)
    second.private.finish()
    assert lines(run_dir)[-1]["kind"] == "close"
    assert lines(run_dir)[-1]["charged"] == [RESERVED]
    assert read_charges(run_dir / "ledger.jsonl", sampled()) == (RESERVED,)


# -- refusals ------------------------------------------------------------------------------------------------------


def test_budgets_dealt_otherwise_are_refused(tmp_path):
    Trained(tmp_path / "run").run(10)
    other = epsilons.Budgets(np.repeat([8.0, 2.0, 1.0], 20), delta=1e-3)
    with pytest.raises(DataError, match="belong to other records"):
        Trained(tmp_path / "run", budgets=other, resume=True)


def test_another_plan_randomness_or_folder_is_refused(tmp_path):
    Trained(tmp_path / "run").run(10)
    with pytest.raises(RunError, match="another plan"):
        Trained(tmp_path / "run", plan=sampled(STEPS + 1), resume=True)
    with pytest.raises(RunError, match="'seeded'"):
        Trained(tmp_path / "run", seed=None, resume=True)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("mine")
    with pytest.raises(RunError, match="holds no run"):
        Trained(tmp_path / "mine", resume=True)
    with pytest.raises(RunError, match="not empty"):
        Trained(tmp_path / "run")


def test_a_run_whose_settings_were_edited_is_refused(tmp_path):
    """It began with a seed: its ledger says so, whatever run.json has been made to say."""
    run_dir = tmp_path / "run"
    Trained(run_dir).run(10)
    values = json.loads((run_dir / "run.json").read_text())
    assert lines(run_dir)[0]["rests_on"] == {name: values[name] for name in ("randomness", "roster", "guarantee")}
    (run_dir / "run.json").write_text(json.dumps(values | {"randomness": "chacha20"}))
    with pytest.raises(RunError, match="contradicts the ledger: its randomness"):
        Trained(run_dir, seed=None, resume=True)
    (run_dir / "run.json").write_text(json.dumps(values))
    Trained(run_dir, resume=True).private.close()


def test_a_torn_last_line_is_removed_and_a_changed_one_is_named(tmp_path):
    run_dir = tmp_path / "run"
    Trained(run_dir).run(20)
    path = run_dir / "ledger.jsonl"
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"kind": "upda')
    assert Trained(run_dir, resume=True).run().bits() == uninterrupted()
    kept = whole.split(b"\n")
    assert kept[4].startswith(b'"')
    path.write_bytes(b"\n".join([*kept[:4], kept[5], kept[4], *kept[6:]]))  # two updates exchanged
    with pytest.raises(LedgerError, match=r"does not continue"):
        Trained(run_dir, resume=True)
    path.write_bytes(b"\n".join(kept[:2] + kept[3:]))
    with pytest.raises(LedgerError, match=r"does not continue"):
        Trained(run_dir, resume=True)


def test_a_full_disk_stops_training_before_the_next_update(tmp_path, monkeypatch):
    trained, real = Trained(tmp_path / "run"), os.fsync
    applied: list[int] = []
    trained.private.on_update(lambda private: applied.append(private.updates))

    def full(handle: int) -> None:
        if len(applied) >= BLOCK:
            raise OSError(28, "No space left on device")
        real(handle)

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises((LedgerError, RunError), match="No space left"):
        trained.run()
    assert max(applied) <= BLOCK + EVERY


# -- fit -----------------------------------------------------------------------------------------------------------


def fitted(run_dir: Path, stop_at: int | None = None, **options: Any) -> epsilons.Run:
    def stop(private: epsilons.Private) -> None:
        if private.updates == stop_at:
            raise KeyboardInterrupt

    torch.manual_seed(0)
    return fit_flat(
        dropping_model(),
        points(),
        sampled(),
        budgets=three_levels(),
        lr=0.3,
        momentum=0.5,
        seed=5,
        run_dir=run_dir,
        eval_data=points(seed=1),
        eval_every=9,
        callbacks=[stop],
        progress=False,
        **{"engine": "vmap"} | options,
    )


@pytest.fixture(scope="module")
def fitted_whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a fit that nothing stopped."""
    folder = tmp_path_factory.mktemp("fitted") / "whole"
    fitted(folder)
    return folder


@pytest.mark.parametrize("stop_at", share([10, 1, 9, 26, 40], 1))
def test_fit_goes_on_to_the_same_model_and_the_same_metrics(stop_at, fitted_whole, tmp_path):
    run_dir = tmp_path / "cut"
    with pytest.raises(KeyboardInterrupt):
        fitted(run_dir, stop_at)
    assert not (run_dir / "model.safetensors").exists()
    run = fitted(run_dir, resume=True)
    assert [row["step"] for row in run.metrics] == [9, 18, 27, 36, 40]
    assert not (run_dir / "checkpoints").exists()
    for _ in range(2):
        for name in ("model.safetensors", "metrics.jsonl"):
            assert (run_dir / name).read_bytes() == (fitted_whole / name).read_bytes()
        assert fitted(run_dir, resume=True).charged == (STEPS,)  # shown again


def test_no_score_is_written_before_its_checkpoint_is_durable(tmp_path, monkeypatch):
    saved: list[int] = []
    real = checkpoints.save

    def save(folder: Path, state: Any, *frozen: Any) -> Path:
        path = real(folder, state, *frozen)
        saved.append(state["updates"])
        return path

    monkeypatch.setattr(checkpoints, "save", save)
    seen: list[tuple[int, list[int]]] = []
    append = epsilons.ledger.run_folder.RunFolder.append_metrics

    def appended(folder: Any, row: dict[str, Any]) -> None:
        seen.append((row["step"], list(saved)))
        append(folder, row)

    monkeypatch.setattr(epsilons.ledger.run_folder.RunFolder, "append_metrics", appended)
    fitted(tmp_path / "run")
    assert len(seen) == 5
    assert all(step in before for step, before in seen)


def generous(history: Sequence[SampledGaussian], delta: float) -> float:
    """Somebody's own accountant."""
    return 0.5


def test_a_run_that_ones_own_accountant_certified_goes_on(tmp_path):
    recipe = epsilons.Recipe(steps=STEPS, batch_size=6, clip_norm=0.5)
    own = epsilons.plan(three_levels(), recipe, "uniform", generous)
    Trained(tmp_path / "run", plan=own).run(20)
    assert Trained(tmp_path / "run", plan=own, resume=True).run().private.updates == STEPS


def bent(bend: Callable[[Tensor], Tensor]) -> nn.Module:
    """Under asinh nothing that the engine ghost can prove."""

    def compute(model: nn.Module, x: Tensor) -> Tensor:
        return model.second(bend(model.first(x[:, None] * torch.arange(1.0, 60.0)[:, None]))).mean(1)

    return Model(compute, first=nn.Linear(3, 16), second=nn.Linear(16, 2))


@pytest.mark.parametrize("case", ["left to another engine", "a record that is not finite"])
def test_what_the_engine_learnt_of_a_model_does_not_part_a_run_from_its_whole(case, tmp_path):
    """Neither where batches are left to another engine, nor where one is compared and played again."""
    x, y = points()
    x, bend = x.clone(), torch.asinh
    if case == "a record that is not finite":
        x[3::10], bend = float("nan"), torch.tanh
    settings = {"model": lambda: bent(bend), "data": (x, y), "plan": sampled(12), "engine": "auto"}

    def trained(run_dir: str, until: int | None = None, **options: Any) -> Trained:
        return Trained(tmp_path / run_dir, lr=0.1, checkpoint_every=3, **settings, **options).run(until)

    whole = trained("whole").bits()
    for until in (5, 8, 11):
        trained(f"cut {until}", until)
        resumed = trained(f"cut {until}", resume=True)
        assert (resumed.private.updates, resumed.private.ledger.epoch) == (12, 0)
        assert resumed.bits() == whole
