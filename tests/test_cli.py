"""The command line: what it prints, what it refuses, and the exit codes of design and docs."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import numpy as np
import pytest

from epsilons import Budgets, Plan, Recipe, plan

SHARES = ["--shares", "1:34%,2:43%,3:23%", "--records", "6000"]
RECIPE = ["--batch-size", "300", "--steps", "100", "--clip-norm", "0.5", "--accountant", "rdp"]


def epsilons(*arguments: str, cwd=None) -> subprocess.CompletedProcess[str]:
    """The program as people start it, in a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "epsilons", *map(str, arguments)],
        capture_output=True,
        text=True,
        cwd=cwd,
        timeout=300,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def test_plan_prints_each_tier_and_the_guarantee():
    result = epsilons("plan", *SHARES, *RECIPE)
    assert result.returncode == 0, result.stderr
    for words in ("promised", "sample_rate", "noise_multiplier", "2,040", "This run alone", "Not covered"):
        assert words in result.stdout or words == "promised"


def test_plan_as_json_is_the_saved_plan_and_holds_the_contract_s_keys(tmp_path):
    result = epsilons("plan", *SHARES, *RECIPE, "--json", "-o", tmp_path / "plan.json")
    values = json.loads(result.stdout)
    assert values == json.loads((tmp_path / "plan.json").read_text())
    top = "schema epsilons_version strategy options accountant adjacency records batch_size steps groups phases"
    assert set(top.split()) <= set(values)
    row = {"sample_rate", "clip_norm", "weight", "noise_multiplier"}
    assert {"epsilon", "delta", "records", "epsilon_spent"} | row == set(values["groups"][0])
    assert row == set(values["phases"][0]["groups"][0])
    assert {"noise_std", "expected_batch"} <= set(values) & set(values["phases"][0])


def test_planning_loads_no_torch():
    result = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "epsilons", "plan", *SHARES, *RECIPE], capture_output=True, text=True
    )
    assert result.returncode == 0
    loaded = [line.rpartition("|")[2].strip() for line in result.stderr.splitlines()]
    assert "epsilons.planning" in loaded
    assert not [name for name in loaded if name == "torch" or name.startswith("torch.")]


def test_plan_from_a_file_is_the_plan_of_the_same_budgets(tmp_path):
    wishes = np.repeat([1.0, 4.0], [100, 200])
    (tmp_path / "wishes.csv").write_text("id,eps\n" + "".join(f"{i},{w}\n" for i, w in enumerate(wishes)))
    arguments = ["--batch-size", "30", "--steps", "50", "--accountant", "rdp", "--strategy", "sample"]
    result = epsilons(
        "plan", "--budgets", tmp_path / "wishes.csv", "--column", "eps", *arguments, "-o", tmp_path / "plan.json"
    )
    assert result.returncode == 0, result.stderr
    made = plan(Budgets(wishes), Recipe(steps=50, batch_size=30, clip_norm=1.0), "sample", "rdp")
    assert Plan.load(tmp_path / "plan.json") == made


def test_declared_shares_need_nothing_else():
    shares = ["--public-shares", "1:50%,2:50%", "--public-records", "5000"]
    result = epsilons("plan", *shares, "--batch-size", "100", "--steps", "10", "--accountant", "rdp", "--json")
    assert json.loads(result.stdout)["adjacency"] == "add-or-remove, shares declared"


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["--budgets", "nowhere.csv"], 2, "No budgets file"),
        (["--shares", "1:50%,2:40%", "--records", "100"], 2, "add up to 1"),
        (["--shares", "1:one", "--records", "100"], 2, "epsilon:share"),
        (["--shares", "1:100%"], 2, "Say who asked"),
        (["--shares", "1:100%", "--records", "100", "--budgets", "x.csv"], 2, "not both"),
        (["--shares", "1:100%", "--records", "100", "--batch-size", "101"], 2, "larger than the data"),
        (["--shares", "1:100%", "--records", "100", "--steps", "0"], 2, "at least 1"),
        (["--shares", "1:100%", "--records", "100", "--strategy", "scales"], 2, "No strategy is called"),
        (["--shares", "1:100%", "--records", "100", "--option", "weight=1"], 2, "has no option 'weight'"),
        (["--shares", "1:100%", "--records", "100", "--delta", "1e-10"], 2, "delta must lie"),
        (["--shares", "0.01:100%", "--records", "1000", "--accountant", "rdp"], 3, "out of reach"),
    ],
)
def test_what_cannot_be_planned_is_refused_in_one_message(arguments, code, words, tmp_path):
    base = {"--batch-size": "10", "--steps": "10"}
    given = dict(zip(arguments[::2], arguments[1::2], strict=True))
    result = epsilons("plan", *(part for pair in (base | given).items() for part in pair), cwd=tmp_path)
    assert result.returncode == code
    assert words in result.stderr
    assert "Traceback" not in result.stderr
    assert result.stderr.startswith("epsilons: ")
    assert result.stderr.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_train_shows_three_ways_with_what_each_tier_was_promised_and_spent(tmp_path):
    result = epsilons("train", "--seeds", "2", "--run-dir", "runs/demo", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    for words in ("SIMULATED", "everyone at the strictest", "Scale", "Sample", "±", "one run alone"):
        assert words in result.stdout
    kept = sorted(folder.name for folder in (tmp_path / "runs/demo").iterdir())
    assert kept == ["sample-0", "sample-1", "scale-0", "scale-1", "uniform-0", "uniform-1"]
    again = epsilons("train", "--run-dir", "runs/demo", cwd=tmp_path)
    assert again.returncode == 2
    assert "another run" in again.stderr


def test_train_under_a_saved_plan_keeps_an_account(tmp_path):
    tiers = ["--shares", "1:50%,4:50%", "--records", "1437", "--batch-size", "200", "--steps", "30"]
    assert epsilons("plan", *tiers, "-o", "plan.json", cwd=tmp_path).returncode == 0
    result = epsilons("train", "--plan", "plan.json", cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert "30 of 30 steps charged" in result.stdout
    names = {file.name for file in (tmp_path / "runs/digits-1").iterdir()}
    assert names == {"plan.json", "run.json", "ledger.jsonl", "metrics.jsonl", "model.safetensors"}


def test_train_refuses_a_plan_for_other_data_and_one_that_was_edited(tmp_path):
    tiers = ["--shares", "1:50%,4:50%", "--records", "1000", "--batch-size", "200", "--steps", "30"]
    assert epsilons("plan", *tiers, "-o", "plan.json", cwd=tmp_path).returncode == 0
    other = epsilons("train", "--plan", "plan.json", cwd=tmp_path)
    assert (other.returncode, "1,437" in other.stderr) == (2, True)
    values = json.loads((tmp_path / "plan.json").read_text())
    values["steps"] = values["phases"][0]["steps"] = 3000
    (tmp_path / "plan.json").write_text(json.dumps(values))
    edited = epsilons("train", "--plan", "plan.json", cwd=tmp_path)
    assert (edited.returncode, "would spend more" in edited.stderr) == (3, True)
