"""Hostile files of every kind: they run no code, write nowhere else, and end in one line or in the right answer."""

from __future__ import annotations

import base64
import contextlib
import io
import json
import os
import random
import re
import shutil
import subprocess
import sys
import zlib
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import numpy as np
import pyarrow as pa
import torch
from PIL import Image
from pyarrow import csv, parquet
from safetensors.torch import load_file

import hostile
import some_models
from epsilons import Predictor
from epsilons.cli import train_config
from epsilons.data.images import image_inputs
from epsilons.errors import DataError, parsed_json
from epsilons.ledger.account import packed, unpacked
from program import CONFIG, epsilons, people
from registries import VISITS
from shares import share

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
    epsilons(*IMPORT).succeeded()
    epsilons("registry", "export", URL, "-o", "export.json").succeeded()


#: Everybody's consent is in force on this day.
IMPORT = ["registry", "import", URL, "wishes.csv", "--person", "id", "--as-of", "2026-01-15"]
IMPORT += ["--valid-from", "begins", "--withdrawn-on", "withdrawn"]

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
        [["consent", "check", "visits.toml"], IMPORT],
    ),
    "export of a registry": (["export.json"], [["registry", "verify", URL, "--since", "export.json"]]),
    "attack": (
        [f"{ATTACK}/{name}" for name in ("attack.json", "plan.json", "membership.json", "secret/*/*")],
        [["attack", RUN, "-o", ATTACK, "--shadows", "8", "--jobs", "1", "-q", "--keep-scores", "--resume"]],
    ),
}

#: Mutations of each kind that CI examines.
FIXED = 8


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


@pytest.mark.parametrize("kind", share(KINDS, 7))
def test_hostile_files_end_in_one_line_or_in_an_answer(kind, genuine, tmp_path):
    codes = set()
    for seed in range(FIXED):
        codes.add(examine(kind, seed, genuine, tmp_path))
        shutil.rmtree(tmp_path / f"{kind} {seed}")
    assert codes - {0}, "no mutation was noticed"


#: Each once filled a terminal with what the file holds.
LONG = [("model.json", 265), ("list of people", 283)]


@pytest.mark.parametrize(("kind", "seed"), LONG)
def test_a_message_shows_the_beginning_and_the_end_of_what_is_long(kind, seed, genuine, tmp_path):
    assert examine(kind, seed, genuine, tmp_path) == 2


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_many_hostile_files_end_in_one_line_or_in_an_answer(kind, genuine, tmp_path):
    for seed in range(FIXED, 300):
        examine(kind, seed, genuine, tmp_path)
        shutil.rmtree(tmp_path / f"{kind} {seed}")


# -- code --------------------------------------------------------------------------------------------------------------

#: What a config or run names, in the place of the library's own.
NAMED = {
    "model": ('name = "mlp"\noptions = { hidden = [4] }', 'name = "evilmod:go"'),
    "strategy": ('strategy = "scale"', 'strategy = "evilmod:go"'),
}
#: Every command that reads a config or a run, without --trust.
READERS = [
    ["plan", "people.toml"],
    ["plan", "people.toml", "--compare", "evilmod:go"],
    ["plan", "--shares", "1:1", "--records", "100", "--batch-size", "9", "--steps", "2", "--strategy", "evilmod:go"],
    ["train", "people.toml"],
    ["train", "people.toml", "--dry-run"],
    ["train", "people.toml", "-o", STOPPED, "--resume"],
    ["train", "people.toml", "--set", 'privacy.strategy="evilmod:go"'],
    ["attack", "people.toml", "--shadows", "8", "--jobs", "1"],
    ["attack", RUN, "--shadows", "8", "--jobs", "1"],
    ["consent", "check", "people.toml"],
    ["report", RUN],
    ["audit", RUN, "--canaries", "10"],
    ["predict", RUN, "people.csv", "-o", "scored.csv"],
    ["release", RUN, "-o", "given"],
]


def name_code(folder: Path, what: str) -> None:
    """Let config and run name a module that lies in every folder."""
    old, new = NAMED[what]
    config = (folder / "people.toml").read_text()
    assert old in config
    (folder / "people.toml").write_text(config.replace(old, new))
    for run in (RUN, STOPPED):
        values = json.loads((folder / run / "run.json").read_text())
        section, key = ("model", "name") if what == "model" else ("privacy", "strategy")
        values["metadata"]["config"][section][key] = "evilmod:go"
        values["metadata"]["config"][section].pop("options", None)
        (folder / run / "run.json").write_text(json.dumps(values))


@pytest.mark.parametrize("what", NAMED)
def test_no_command_imports_what_a_config_or_run_names(what, genuine, tmp_path):
    refused = set()
    for number, command in enumerate(READERS):
        folder = hostile.hostile_copy(genuine, tmp_path, f"{number}")
        name_code(folder, what)
        with contextlib.chdir(folder):
            outcome = hostile.read_hostile(folder, *command)
        if "--trust" in outcome.err:
            refused.add(number)
            assert str(folder / "evilmod.py") in outcome.err
            assert "'evilmod:go'" in outcome.err
    assert refused == set(range(1 if what == "model" else 0, 9))  # a plan needs no model


@pytest.mark.parametrize("command", [["train", "people.toml", "--dry-run"], ["attack", RUN, "--shadows", "8"]])
def test_the_same_commands_import_it_with_trust(command, genuine, tmp_path, monkeypatch):
    """The module that the other tests look for does notice its import."""
    folder = hostile.hostile_copy(genuine, tmp_path, "copy")
    name_code(folder, "model")
    monkeypatch.delitem(sys.modules, "evilmod", raising=False)
    with contextlib.chdir(folder):
        epsilons(*command, "--trust").is_refused(2, "returned a NoneType")
    assert (folder / "IMPORTED").exists()
    monkeypatch.delitem(sys.modules, "evilmod")


#: Modules that the commands import, of the library's dependencies and of Python.
SHADOWED = "torch numpy scipy json pickle typer rich pydantic pyarrow tomllib matplotlib joblib safetensors random"


@pytest.mark.parametrize(
    "arguments",
    [
        ["train", "people.toml", "--dry-run", "--trust"],
        ["plan", "people.toml", "--trust", "--set", 'privacy.strategy="beside:own"'],
        pytest.param(["attack", "people.toml", "--shadows", "8", "--jobs", "2"], marks=pytest.mark.slow),
    ],
)
def test_a_file_in_the_folder_is_not_imported_as_an_installed_module(arguments, genuine, tmp_path):
    folder = tmp_path / "copy"
    folder.mkdir()
    for name in ("people.csv", "people.toml"):
        shutil.copy(genuine / name, folder)
    for name in SHADOWED.split():
        (folder / f"{name}.py").write_text("open('IMPORTED', 'w')\nraise SystemExit('imported')\n")
    own = "from epsilons.planning import STRATEGIES\nown = STRATEGIES['scale']\n"
    (folder / "beside.py").write_text(own)
    code = "from epsilons.cli import main; main()"  # -P: as the installed command, without the current folder
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    environment.pop("PYTHONSAFEPATH", None)
    done = subprocess.run(
        [sys.executable, "-P", "-c", code, *arguments], cwd=folder, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert not (folder / "IMPORTED").exists()


# -- sizes -------------------------------------------------------------------------------------------------------------

SIZES: list[tuple[str, Any]] = [
    ("model.options.hidden", [8] * 200_000),
    ("model.options.hidden", [10**9]),
    ("model.options.hidden", [10**5] * 900),
    ("model.options.hidden", 1e30),
    ("model.shape", [10**9]),
    ("model.shape", [2] * 10**5),
    ("model.outputs", 10**12),
    ("inputs.features.categorical.job", 10**9),
    ("inputs.features.categorical.job", 0),
    ("inputs.features.numeric.age", [0, 1e400, False]),
    ("inputs.features.categorical.town", ["x"] * 10**5),
]


@pytest.mark.parametrize(("key", "value"), SIZES)
def test_sizes_in_model_json_are_refused_before_they_take_memory(key, value, genuine, tmp_path):
    folder = hostile.hostile_copy(genuine, tmp_path, "copy")
    file = folder / RUN / "model.json"
    values = inner = json.loads(file.read_text())
    *sections, last = key.split(".")
    for section in sections:
        inner = inner[section]
    assert last in inner
    inner[last] = value
    file.write_text(json.dumps(values))
    with contextlib.chdir(folder):
        outcome = hostile.read_hostile(folder, "predict", RUN, "people.csv", "-o", "scored.csv", "-q")
    outcome.is_refused(2)


@pytest.mark.parametrize(
    "options",
    [
        'name = "mlp"\noptions = { hidden = [' + "8," * 200_000 + "] }",
        'name = "mlp"\noptions = { hidden = [100000, 100000] }',
        'name = "mlp"\noptions = { hidden = [1' + "0" * 30 + "] }",
        'name = "mlp"\noptions = { hidden = [nan] }',
        'name = "mlp"\noptions = { hidden = "wide" }',
        'name = "mlp"\noptions = { ' + ".".join("a" * 3_000) + " = 1 }",
    ],
)
def test_sizes_in_a_config_are_refused_before_they_take_memory(options, genuine, tmp_path):
    folder = hostile.hostile_copy(genuine, tmp_path, "copy")
    config = (folder / "people.toml").read_text()
    (folder / "people.toml").write_text(config.replace(NAMED["model"][0], options))
    with contextlib.chdir(folder):
        hostile.read_hostile(folder, "train", "people.toml", "--dry-run").is_refused(2)


def test_a_model_that_was_built_without_memory_has_the_weights_of_its_file(genuine):
    """Its outputs are those of a network by hand."""
    predictor = Predictor.load(genuine / RUN)
    weights = load_file(genuine / RUN / "model.safetensors")
    inputs = torch.linspace(-1, 1, 32).reshape(4, 8)
    first, second = (weights[f"{layer}.weight"].double() for layer in (1, 3))
    hidden = torch.tanh(inputs.double() @ first.T + weights["1.bias"])
    by_hand = hidden @ second.T + weights["3.bias"]
    assert torch.allclose(predictor.model(inputs).double(), by_hand, atol=1e-6)
    assert all(p.dtype == torch.float32 and not p.is_meta for p in predictor.model.parameters())


def test_a_small_file_cannot_stand_for_a_large_array(tmp_path, genuine):
    folder = hostile.hostile_copy(genuine, tmp_path, "copy")
    (folder / "tensors/inputs.npy").unlink()
    torch.save(torch.zeros(1).expand(10**9, 8), folder / "tensors/inputs.pt")
    with contextlib.chdir(folder):
        hostile.read_hostile(folder, "train", "tensors.toml", "--dry-run").is_refused(2, "inputs.pt")


def test_a_line_of_a_ledger_cannot_unpack_to_more_people_than_the_plan_has():
    bomb = base64.b64encode(zlib.compress(bytes(10**8))).decode()
    with hostile.limits(), pytest.raises(ValueError, match="buffer size"):
        unpacked(bomb, 100)
    places = np.array([3, 5, 99])
    assert unpacked(packed(places), 100).tolist() == [3, 5, 99]


def test_an_image_of_too_many_pixels_is_refused(tmp_path):
    content = io.BytesIO()
    Image.new("1", (20_000, 20_000)).save(content, "PNG")
    table = pa.table({"image": [content.getvalue()]})
    with hostile.limits(), pytest.raises(DataError, match="row 0"):
        image_inputs(table, tmp_path / "images.parquet", (0.5,), (0.5,))


@pytest.mark.parametrize("depth", [101, 300, 450, 900, 990, 5_000, 100_000])
def test_json_that_is_nested_deeply_is_refused_at_every_depth(depth):
    with pytest.raises(ValueError, match="nested"):
        parsed_json("[" * depth + "]" * depth)
    assert parsed_json("[" * 100 + "]" * 100) is not None


# -- places ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("link", ["checkpoints", "secret", "secret/key"])
def test_a_run_with_links_is_not_resumed_and_what_they_name_stays(link, genuine, tmp_path):
    folder, outside = hostile.hostile_copy(genuine, tmp_path, "copy"), tmp_path / "outside"
    shutil.move(folder / STOPPED / link, outside)
    (folder / STOPPED / link).symlink_to(outside)
    before = hostile.fingerprints(tmp_path)
    with contextlib.chdir(folder):
        epsilons("train", "people.toml", "-o", STOPPED, "--resume", "-q").is_refused(2, "is a link")
    assert hostile.fingerprints(tmp_path) == before


def test_an_attack_with_links_is_not_continued(genuine, tmp_path):
    folder, outside = hostile.hostile_copy(genuine, tmp_path, "copy"), tmp_path / "outside"
    shutil.move(folder / ATTACK / "secret", outside)
    (folder / ATTACK / "secret").symlink_to(outside)
    before = hostile.fingerprints(outside)
    with contextlib.chdir(folder):
        outcome = epsilons("attack", RUN, "-o", ATTACK, "--shadows", "8", "--jobs", "1", "-q", "--resume")
    outcome.is_refused(2, "is a link")
    assert hostile.fingerprints(outside) == before


def test_the_page_on_trust_lists_every_kind_with_its_test():
    """Each kind has a row in docs/trust.md, which names tests that exist."""
    page = (Path(__file__).parents[1] / "docs/trust.md").read_text()
    rows = [line for line in page.splitlines() if line.startswith("| ") and "`test_" in line]
    named = {name for row in rows for name in re.findall(r"`(test_\w+)(?:\[[^]]*\])?`", row)}
    source = "".join(path.read_text() for path in Path(__file__).parent.glob("test_*.py"))
    assert named
    assert all(f"def {name}(" in source for name in named)
    assert {kind for row in rows for kind in re.findall(r"\[([^]]+)\]`", row)} == set(KINDS)
