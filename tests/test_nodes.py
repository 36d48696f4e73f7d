"""Several torchruns that train one model, as those of several machines do, and what is left when some of them die."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from epsilons import Plan
from epsilons.ledger.ledger import read_account
from pages import ROOT, blocks, commands
from ranked import wait_until
from small_runs import epochs, lines

pytestmark = [pytest.mark.usefixtures("one_thread"), pytest.mark.slow]

STEPS, KILLS, BLOCK = 300, 12, 64  # BLOCK: steps that the ledger reserves at once

SCRIPT = f"""
import json, os, signal, threading, time
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

import epsilons
from epsilons.ledger import run_folder
from epsilons.ledger.ledger import Ledger
from epsilons.training import RunFolder, checkpoints
from epsilons.training.distributed import Ranks
from epsilons.training.noisy_update import NoisyUpdate

dist.init_process_group("gloo", timeout=timedelta(seconds=60))
rank, size = dist.get_rank(), dist.get_world_size()
Path(f"pid-{{os.environ.get('NODE', rank)}}").write_text(str(os.getpid()))
kills = json.loads(Path("kills.json").read_text()) if Path("kills.json").exists() else []
done = len(Path("killed").read_text().splitlines()) if Path("killed").exists() else 0


def die(what):
    with open("killed", "a") as file:
        file.write(f"{{what}}\\n")
    os.kill(os.getpid(), signal.SIGKILL)


def die_at(owner, name, count):
    real, calls = getattr(owner, name), []

    def counted(*arguments, **named):
        calls.append(1)
        if len(calls) == count:
            die(name)
        return real(*arguments, **named)

    setattr(owner, name, counted)


OWNERS = {{
    "write_key": run_folder.RunFolder, "charge": Ledger, "_sync": Ledger, "record": Ledger, "all_reduce": Ranks,
    "apply": NoisyUpdate, "save": checkpoints, "_write": checkpoints, "sync_folder": checkpoints,
}}
if done < len(kills) and kills[done][0] == rank:
    victim, what, when = kills[done]
    if what in OWNERS:
        die_at(OWNERS[what], what, when)
    else:
        timer = threading.Timer(when, die, [what])
        timer.daemon = True
        timer.start()

torch.manual_seed(0)
data = torch.randn(200, 4), torch.randint(2, (200,))
budgets = epsilons.Budgets(np.resize([1.0, 2.0, 8.0], 200), delta=1e-3)
plan = epsilons.plan(budgets, epsilons.Recipe({STEPS}, 20, clip_norm=0.5), "sample", "rdp")
model = nn.Sequential(nn.Linear(4, 5), nn.Dropout(0.3), nn.Linear(5, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
folder = RunFolder("run", resume=True, checkpoint_every=7)
with epsilons.make_private(model, optimizer, data, plan, budgets=budgets, run_dir=folder, seed=5) as private:
    for x, y in private.batches:
        private.backward(nn.functional.cross_entropy(model(x), y, reduction="none"))
        private.step()
        time.sleep(0.01)
torch.save(model.state_dict(), f"{{rank}}-of-{{size}}.pt")
dist.destroy_process_group()
"""
#: Else workers that are restarted read addresses of those before them (torch 2.13): pytorch/pytorch#135712.
OWN_STORES = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"


def folder_of(path: Path) -> Path:
    path.mkdir()
    (path / "train.py").write_text(SCRIPT)
    return path


def started(folder: Path, *words: str, **variables: str) -> subprocess.Popen[str]:
    """A torchrun in this folder; its output is in a file."""
    own = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "src"), OWN_STORES: "1"}
    environment = os.environ | own | variables
    log = folder / f"log-{variables.get('NODE', '')}"
    with log.open("w") as output:
        return subprocess.Popen(
            [sys.executable, "-m", "torch.distributed.run", *words, "train.py"],
            cwd=folder,
            env=environment,
            stdout=output,
            stderr=output,
        )


def ended(folder: Path, *torchruns: subprocess.Popen[str]) -> None:
    """Wait for them, and show what they said if one failed."""
    try:
        codes = [one.wait(500) for one in torchruns]
    finally:
        for one in torchruns:
            one.kill()
    assert not any(codes), "\n".join(log.read_text()[-3000:] for log in folder.glob("log-*"))


def nodes(folder: Path, number: str = "2") -> list[subprocess.Popen[str]]:
    """The page's command, as on two machines. number: of machines; "1:2" for one or two"""
    page = ROOT / "docs" / "several-processes.md"
    (command,) = [c for block in blocks(page, "console") for c in commands(block) if "--nnodes" in c]
    variable, program, *words, script = command.split()
    assert (variable, program, script) == (f"{OWN_STORES}=1", "torchrun", "train.py")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        given = {"first:29400": f"127.0.0.1:{free.getsockname()[1]}", "2": number}
    words = [given.get(word, word) for word in words]
    return [
        started(folder, *words, "--rdzv-conf", f"is_host={host},last_call_timeout=20", NODE=node)
        for node, host in (("0", "true"), ("1", "false"))
    ]


def results(folder: Path) -> dict[str, list[float]]:
    """The weights of each rank."""
    return {
        file.name: torch.cat([p.reshape(-1) for p in torch.load(file).values()]).tolist()
        for file in sorted(folder.glob("*.pt"))
    }


def account(folder: Path) -> Any:
    return read_account(folder / "run" / "ledger.jsonl", Plan.load(folder / "run" / "plan.json"))


def facts(folder: Path) -> list[dict[str, Any]]:
    """The ledger's lines, without what is of this folder, and without the marks of what is on disk."""
    own = ("file", "prev", "hash")
    kept = [{k: v for k, v in line.items() if k not in own} for line in lines(folder / "run")]
    return [line for line in kept if line["kind"] != "sync"]


def updates(folder: Path) -> list[dict[str, Any]]:
    return [line for line in facts(folder) if line["kind"] == "update"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run that one torchrun makes, with two processes that nothing kills."""
    folder = folder_of(tmp_path_factory.mktemp("nodes") / "whole")
    ended(folder, started(folder, "--nproc-per-node=2", "--standalone"))
    assert set(results(folder)) == {"0-of-2.pt", "1-of-2.pt"}
    return folder


def test_two_torchruns_reach_what_one_reaches_to_the_bit(whole, tmp_path):
    folder = folder_of(tmp_path / "two")
    ended(folder, *nodes(folder))
    assert results(folder) == results(whole)
    assert facts(folder) == facts(whole)


def some_kills(seed: int) -> list[tuple[int, str, float]]:
    """(rank, what it is about to do, for the how many-th time; or at any moment, after so many seconds)."""
    luck = random.Random(seed)
    places = {"charge": 12, "record": 12, "all_reduce": 12, "apply": 12, "_sync": 1, "save": 3, "_write": 3}
    before = [(what, 1.0 + luck.randrange(most)) for what, most in (places | {"sync_folder": 5}).items()]
    moments = [("any moment", luck.uniform(0.0, 0.6)) for _ in range(KILLS - 1 - len(before))]
    rest = [*before, *moments]
    luck.shuffle(rest)
    on_all = ("charge", "record", "all_reduce", "apply", "any moment")
    return [(luck.randrange(2) if what in on_all else 0, what, when) for what, when in [("write_key", 1.0), *rest]]


@pytest.mark.parametrize("seed", [0])
def test_workers_killed_again_and_again_are_restarted_and_come_out_as_if_nothing_had_been(seed, whole, tmp_path):
    """Before a charge, between charge and update, within a checkpoint, and at any moment."""
    folder = folder_of(tmp_path / "killed")
    kills = some_kills(seed)
    (folder / "kills.json").write_text(json.dumps(kills))
    ended(folder, started(folder, "--nproc-per-node=2", "--standalone", f"--max-restarts={KILLS}"))
    assert (folder / "killed").read_text().split("\n")[:-1] == [what for _, what, _ in kills]
    assert results(folder) == results(whole)
    assert account(folder).closed == (STEPS,)
    assert updates(folder) == updates(whole)
    assert epochs(folder / "run") == [0]


def test_a_worker_killed_on_one_machine_is_restarted_on_both(whole, tmp_path):
    folder = folder_of(tmp_path / "killed")
    (folder / "kills.json").write_text(json.dumps([(1, "apply", 100)]))
    ended(folder, *nodes(folder))
    assert (folder / "killed").read_text() == "apply\n"
    assert results(folder) == results(whole)
    assert facts(folder) == facts(whole)


def test_after_a_machine_is_lost_the_others_go_on_under_another_key_and_no_step_is_charged_twice(whole, tmp_path):
    folder = folder_of(tmp_path / "lost")
    first, second = nodes(folder, "1:2")
    wait_until(lambda: (folder / "run/checkpoints/000010.json").exists() or first.poll() is not None)
    second.kill()  # the torchrun, so that it restarts nothing, and its worker
    os.kill(int((folder / "pid-1").read_text()), signal.SIGKILL)
    ended(folder, first)
    assert set(results(folder)) == {"0-of-1.pt"}
    paid = account(folder)
    assert paid.closed == paid.charged == (STEPS,)
    assert epochs(folder / "run") == [0, 1]
    (start,), (before,) = paid.epoch_start, paid.previous_keys
    assert before % BLOCK == 0  # blocks that were paid for
    assert 0 < start <= before
    made = updates(folder)
    kept = [line for line in made if line["epoch"] == 0]
    assert kept == updates(whole)[: len(kept)]
    assert start <= len(kept) <= before
    assert [line["step"] for line in made if line["epoch"] == 1] == list(range(start, start + STEPS - before))
