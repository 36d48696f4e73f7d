"""The command line: what it prints, and its exit codes."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from epsilons import Budgets, Plan, Recipe, cli, errors, plan
from epsilons.cli import demo
from program import epsilons, python

SHARES = ["--shares", "1:34%,2:43%,3:23%", "--records", "6000"]
RECIPE = ["--batch-size", "300", "--steps", "100", "--clip-norm", "0.5", "--accountant", "rdp"]


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_plan_prints_each_tier_and_the_guarantee():
    epsilons("plan", *SHARES, *RECIPE).succeeded(
        "sample_rate", "noise_multiplier", "2,040", "This run alone", "Not covered"
    )


def test_plan_as_json_is_the_saved_plan_and_has_the_documented_keys(tmp_path):
    values = json.loads(epsilons("plan", *SHARES, *RECIPE, "--json", "-o", "plan.json").out)
    assert values == json.loads((tmp_path / "plan.json").read_text())
    top = "schema epsilons_version strategy options accountant adjacency records batch_size steps groups phases"
    assert set(top.split()) <= set(values)
    row = {"sample_rate", "clip_norm", "weight", "noise_multiplier"}
    assert {"epsilon", "delta", "records", "epsilon_spent"} | row == set(values["groups"][0])
    assert row == set(values["phases"][0]["groups"][0])
    assert {"noise_std", "expected_batch"} <= set(values) & set(values["phases"][0])


def test_planning_imports_no_torch_in_a_process_of_its_own():
    code = f"import sys; from epsilons.cli import app; app({['plan', *SHARES, *RECIPE]}, standalone_mode=False); "
    code += "assert 'epsilons.planning' in sys.modules; assert 'torch' not in sys.modules"
    python(code)


def test_plan_from_a_file_is_the_plan_of_the_same_budgets(tmp_path):
    wishes = np.repeat([1.0, 4.0], [100, 200])
    (tmp_path / "wishes.csv").write_text("id,eps\n" + "".join(f"{i},{w}\n" for i, w in enumerate(wishes)))
    recipe = ["--batch-size", "30", "--steps", "50", "--accountant", "rdp", "--strategy", "sample"]
    epsilons("plan", "--budgets", "wishes.csv", "--column", "eps", *recipe, "-o", "plan.json").succeeded()
    assert Plan.load("plan.json") == plan(
        Budgets(wishes), Recipe(steps=50, batch_size=30, clip_norm=1.0), "sample", "rdp"
    )


def test_declared_shares_need_no_other_budgets():
    shares = ["--public-shares", "1:50%,2:50%", "--public-records", "5000"]
    result = epsilons("plan", *shares, "--batch-size", "100", "--steps", "10", "--accountant", "rdp", "--json")
    assert json.loads(result.out)["adjacency"] == "add-or-remove, shares declared"


def test_train_compares_three_strategies_and_shows_what_each_tier_spent(tmp_path, monkeypatch):
    monkeypatch.setattr(demo, "RECIPE", replace(demo.RECIPE, steps=20))
    words = ("SIMULATED", "everyone at the strictest", "Scale", "Sample", "±", "one run alone")
    epsilons("train", "--seeds", "2", "--run-dir", "runs/demo").succeeded(*words)
    runs = sorted(folder.name for folder in (tmp_path / "runs/demo").iterdir())
    assert runs == ["sample-0", "sample-1", "scale-0", "scale-1", "uniform-0", "uniform-1"]
    epsilons("train", "--run-dir", "runs/demo").is_refused(2, "another run")


def test_train_under_a_saved_plan_writes_a_run_folder(tmp_path):
    tiers = ["--shares", "1:50%,4:50%", "--records", "1437", "--batch-size", "200", "--steps", "30"]
    epsilons("plan", *tiers, "-o", "plan.json").succeeded()
    epsilons("train", "--plan", "plan.json").succeeded("30 of 30 steps charged")
    names = {file.name for file in (tmp_path / "runs/digits-1").iterdir()}
    kept = {"plan.json", "run.json", "ledger.jsonl", "metrics.jsonl", "model.safetensors", "model.json"}
    assert names == kept


def test_train_refuses_a_plan_for_other_data_and_one_that_was_edited(tmp_path):
    tiers = ["--shares", "1:50%,4:50%", "--records", "1000", "--batch-size", "200", "--steps", "30"]
    epsilons("plan", *tiers, "-o", "plan.json").succeeded()
    epsilons("train", "--plan", "plan.json").is_refused(2, "1,437")
    values = json.loads((tmp_path / "plan.json").read_text())
    values["steps"] = values["phases"][0]["steps"] = 3000
    (tmp_path / "plan.json").write_text(json.dumps(values))
    epsilons("train", "--plan", "plan.json").is_refused(3, "would spend more")


# -- without the extra `app` -------------------------------------------------------------------------------------------

WITHOUT_APP = """
import importlib.abc, sys
from importlib.machinery import PathFinder
from epsilons.errors import APP

class Present(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        return None if name.partition(".")[0] in APP else PathFinder.find_spec(name, path, target)

sys.meta_path[:] = [Present() if finder is PathFinder else finder for finder in sys.meta_path]
"""

TENSORS = """
import epsilons, torch
assert not {*APP} & {*sys.modules}
budgets = epsilons.Budgets.from_shares({1.0: 0.5, 4.0: 0.5}, records=200)
made = epsilons.plan(budgets, epsilons.Recipe(steps=3, batch_size=20, clip_norm=1.0), accountant="rdp")
made.save("plan.json")
print(made, epsilons.advise(budgets, epsilons.Recipe(steps=3, batch_size=20, clip_norm=1.0), "rdp").verdict)
data = torch.utils.data.TensorDataset(torch.randn(200, 4), torch.arange(200) % 2)
model = torch.nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
private = epsilons.make_private(model, optimizer, data, made, budgets=budgets)
for inputs, targets in private.batches:
    private.backward(torch.nn.functional.cross_entropy(model(inputs), targets, reduction="none"))
    private.step()
private.close()
assert epsilons.fit(torch.nn.Linear(4, 2), data, made, budgets=budgets, progress=True).charged == (3,)
"""

MISSING = """
import epsilons
for use in (
    lambda: epsilons.report("run"),
    lambda: epsilons.Plan.load("plan.json"),
    lambda: epsilons.Budgets.from_csv("wishes.csv"),
    lambda: epsilons.data.load("digits", "train"),
    lambda: epsilons.Predictor,
    lambda: __import__("epsilons.sklearn"),
    lambda: __import__("epsilons.auditing"),
):
    try:
        use()
    except ImportError as error:
        assert isinstance(error, epsilons.EpsilonsError)
        assert str(error).endswith("is not installed. It is in an extra: pip install 'epsilons[app]'"), error
    else:
        raise AssertionError("it needs no package of the extra")
"""


def test_planning_and_training_on_tensors_need_no_package_of_the_extra_app(tmp_path):
    python(WITHOUT_APP + TENSORS, tmp_path)


def test_whatever_needs_the_extra_app_says_how_to_install_it(tmp_path):
    (tmp_path / "wishes.csv").write_text("epsilon\n1\n")
    python(WITHOUT_APP + MISSING, tmp_path)


@pytest.mark.parametrize(("absent", "words"), [("typer", ["--version"]), ("rich", ["plan", "--help"])])
def test_the_command_line_without_its_packages_prints_one_line(absent, words, tmp_path):
    hidden = WITHOUT_APP.replace("in APP", f"== {absent!r}")
    code = hidden + f"sys.argv = ['epsilons', *{words}]\nfrom epsilons.__main__ import main\nmain()"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, check=False)
    assert (ran.returncode, ran.stdout) == (2, "")
    assert ran.stderr == f"epsilons: {absent} is not installed. It is in an extra: pip install 'epsilons[app]'\n"


def test_the_extra_app_is_what_the_package_says_it_is():
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
    named = {re.split("[>=]", one)[0] for one in project["optional-dependencies"]["app"]}
    assert named == {{"PIL": "pillow", "sklearn": "scikit-learn"}.get(name, name) for name in errors.APP}
    assert {re.split("[>=]", one)[0] for one in project["dependencies"]} == {"torch", "numpy", "scipy", "safetensors"}


# -- the list of commands ----------------------------------------------------------------------------------------------


def test_the_list_of_commands_imports_nothing_heavy():
    absent = "assert not {'torch', 'numpy', 'scipy', 'pydantic', 'pyarrow', 'sklearn'} & {*sys.modules}"
    code = "import sys; from epsilons.cli import app; app(['--help'], standalone_mode=False); "
    assert "attack" in python(code + absent)


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_the_list_of_commands_shows_the_first_sentence_of_each(name):
    assert cli.loaded(name).help.split("\n\n")[0] == cli.COMMANDS[name][-1]
