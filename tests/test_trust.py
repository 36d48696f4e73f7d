"""Hostile files of every kind: they run no code, write nowhere else, and end in one line or in the right answer."""

from __future__ import annotations

import contextlib
import random
import shutil
from pathlib import Path

import pytest

pytest.importorskip("torch")

import numpy as np
import torch
from pyarrow import csv, parquet

import hostile
import some_models
from epsilons.cli import train_config
from program import CONFIG, epsilons, people
from registries import VISITS

DECLARED = CONFIG.replace('drop = ["id"]', 'drop = ["id"]\nread_off = []')
RUN, STOPPED, TEXTS, RELEASE, ATTACK = "runs/first", "runs/stopped", "runs/texts", "release", "attacks/first"
URL = "sqlite:///people.db"
TENSORS = """
[data]
train = "tensors"
classes = 2
[budgets]
shares = { "1" = 0.5, "4" = 0.5 }
[training]
steps = 4
batch_size = 10
"""


@pytest.fixture(scope="module")
def genuine(tmp_path_factory) -> Path:
    """A folder with genuine files of every kind, which no test changes."""
    folder: Path = tmp_path_factory.mktemp("genuine")
    with contextlib.chdir(folder), pytest.MonkeyPatch.context() as patch:
        Path("people.csv").write_text(people())
        Path("people.toml").write_text(DECLARED)
        epsilons("plan", "people.toml", "-o", "plan.json", "-q").succeeded()
        epsilons("train", "people.toml", "-o", RUN, "-q").succeeded()
        epsilons("release", RUN, "-o", RELEASE).succeeded()
        epsilons("attack", RUN, "-o", ATTACK, "--shadows", "8", "--jobs", "1", "-q", "--keep-scores").succeeded()
        Path("texts.toml").write_text(some_models.hashed_text())
        epsilons("train", "texts.toml", "-o", TEXTS, "-q").succeeded()
        parquet.write_table(csv.read_csv("people.csv"), "people.parquet")
        Path("columns.toml").write_text(DECLARED.replace("people.csv", "people.parquet"))
        _write_lists()
        Path("tensors").mkdir()
        np.save("tensors/inputs.npy", np.zeros((80, 8), dtype=np.float32))
        torch.save(torch.arange(80) % 2, "tensors/targets.pt")
        Path("tensors.toml").write_text(TENSORS)
        fit = train_config.fit

        def stop(private):
            if private.updates == 2:
                raise KeyboardInterrupt

        patch.setattr(train_config, "fit", lambda *a, callbacks, **k: fit(*a, callbacks=[*callbacks, stop], **k))
        assert epsilons("train", "people.toml", "-o", STOPPED, "-q").code == 130
    return folder


def _write_lists() -> None:
    """A registry, an export of it, and a list of people with budgets and days of consent."""
    lines = [f"p{i},{1 + 3 * (i % 2)},2026-01-01,{'2026-02-01' if i % 3 else ''}" for i in range(60)]
    Path("wishes.csv").write_text("id,epsilon,begins,withdrawn\n" + "\n".join(lines) + "\n")
    Path("visits.csv").write_text(
        "id,age,label\n" + "".join(f"p{i},{20 + i},{'yes' if i % 3 else 'no'}\n" for i in range(60))
    )
    stated = 'file = "wishes.csv"\nas_of = "2026-01-15"\nvalid_from = "begins"\nwithdrawn_on = "withdrawn"\n'
    Path("visits.toml").write_text(f"{VISITS}[budgets]\n{stated}")
    epsilons("registry", "create", URL).succeeded()
    epsilons("registry", "import", URL, "wishes.csv", "--person", "id").succeeded()
    epsilons("registry", "export", URL, "-o", "export.json").succeeded()


#: Kind -> the files that are changed, and the commands that read them.
KINDS = {
    "config": (["people.toml"], [["plan", "people.toml"], ["train", "people.toml", "--dry-run"]]),
    "plan": (["plan.json"], [["train", "people.toml", "--plan", "plan.json", "-o", "new", "-q"]]),
    "run folder": (
        [f"{RUN}/{name}" for name in ("run.json", "ledger.jsonl", "plan.json", "membership.json")],
        [["report", RUN, "-q"], ["release", RUN, "-o", "given", "-q"]],
    ),
    "run that is attacked": (
        [f"{RUN}/{name}" for name in ("run.json", "plan.json")],
        [["attack", RUN, "--shadows", "8", "--jobs", "1", "--attacks", "loss", "-o", "found", "-q"]],
    ),
    "run that is resumed": (
        [f"{STOPPED}/{name}" for name in ("run.json", "ledger.jsonl", "plan.json", "secret/key")],
        [["train", "people.toml", "-o", STOPPED, "--resume", "-q"]],
    ),
    "checkpoint": (
        [f"{STOPPED}/checkpoints/*.json", f"{STOPPED}/checkpoints/*.safetensors"],
        [["train", "people.toml", "-o", STOPPED, "--resume", "-q"]],
    ),
    "model.json": ([f"{RUN}/model.json"], [["predict", RUN, "people.csv", "-o", "scored.csv", "-q"]]),
    "weights": ([f"{RUN}/model.safetensors"], [["predict", RUN, "people.csv", "-o", "scored.csv", "-q"]]),
    "release": (
        [f"{RELEASE}/{name}" for name in ("model.json", "model.safetensors", "SHA256SUMS", "README.md")],
        [["predict", RELEASE, "people.csv", "-o", "scored.csv", "-q"]],
    ),
    "table": (
        ["people.csv"],
        [["plan", "people.toml"], ["train", "people.toml", "--dry-run"], ["predict", RUN, "people.csv", "-o", "s.csv"]],
    ),
    "fixed features": ([f"{TEXTS}/features.safetensors"], [["predict", TEXTS, "test.csv", "-o", "scored.csv", "-q"]]),
    "columns": (["people.parquet"], [["plan", "columns.toml"], ["train", "columns.toml", "--dry-run"]]),
    "tensors": (["tensors/*"], [["train", "tensors.toml", "--dry-run"]]),
    "list of people": (
        ["wishes.csv"],
        [["consent", "check", "visits.toml"], ["registry", "import", URL, "wishes.csv", "--person", "id"]],
    ),
    "export of a registry": (["export.json"], [["registry", "verify", URL, "--since", "export.json"]]),
    "attack": (
        [f"{ATTACK}/{name}" for name in ("attack.json", "plan.json", "membership.json", "secret/*/*")],
        [["attack", RUN, "-o", ATTACK, "--shadows", "8", "--jobs", "1", "-q", "--keep-scores", "--resume"]],
    ),
}

#: Mutations of each kind that CI examines.
FIXED = 12


def examine(kind: str, seed: int, genuine: Path, parent: Path) -> int:
    """One hostile copy, read by one command. Returns its exit code."""
    coins = random.Random(f"{kind} {seed}")
    patterns, commands = KINDS[kind]
    folder = hostile.hostile_copy(genuine, parent, f"{kind} {seed}")
    with contextlib.chdir(folder):
        file = coins.choice(sorted(Path().glob(coins.choice(patterns))))
        hostile.change(file, coins)
        if kind == "release" and coins.random() < 0.8 and file.name != "SHA256SUMS":
            hostile.seal(folder / RELEASE)
        return hostile.read_hostile(folder, *coins.choice(commands)).code


@pytest.mark.parametrize("kind", KINDS)
def test_genuine_files_are_read_by_every_command(kind, genuine, tmp_path):
    for number, command in enumerate(KINDS[kind][1]):
        folder = hostile.hostile_copy(genuine, tmp_path, f"{number}")
        with contextlib.chdir(folder):
            hostile.read_hostile(folder, *command).succeeded()


@pytest.mark.parametrize("kind", KINDS)
def test_hostile_files_end_in_one_line_or_in_an_answer(kind, genuine, tmp_path):
    codes = set()
    for seed in range(FIXED):
        codes.add(examine(kind, seed, genuine, tmp_path))
        shutil.rmtree(tmp_path / f"{kind} {seed}")
    assert codes - {0}, "no mutation was noticed"
