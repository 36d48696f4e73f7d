"""The command line: what it prints, and its exit codes."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
import time
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from epsilons import Budgets, Plan, Private, Recipe, cli, errors, plan
from epsilons.cli import demo, options, train_config
from program import CONFIG, change, epsilons, files, people, python
from small_runs import lines

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


def test_a_plan_is_not_saved_under_the_name_of_a_page(tmp_path):
    outcome = epsilons("plan", *SHARES, *RECIPE, "-o", "plan.html")
    assert (outcome.code, "--html plan.html" in outcome.err, list(tmp_path.iterdir())) == (2, True, [])


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


def test_train_compares_strategies_and_shows_what_each_tier_spent(tmp_path, monkeypatch):
    monkeypatch.setattr(demo, "RECIPE", replace(demo.RECIPE, steps=20))
    words = ("SIMULATED", "everyone at the strictest", "looser tiers", "Scale", "Sample", "±", "one run alone")
    epsilons("train", "--seeds", "2", "--run-dir", "runs/demo").succeeded(*words)
    runs = {folder.name for folder in (tmp_path / "runs/demo").iterdir()}
    assert runs == {f"{strategy}-{seed}" for strategy in ("exclude", "sample", "scale", "uniform") for seed in (0, 1)}
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
shown = epsilons.Training(progress=True)
assert epsilons.fit(torch.nn.Linear(4, 2), data, made, budgets=budgets, training=shown).charged == (3,)
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
        assert str(error).endswith("in the extra `app`: pip install '.[app]' in a clone of epsilons"), error
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
    assert ran.stderr == (
        f"epsilons: {absent} is not installed. It is in the extra `app`: pip install '.[app]' in a clone of epsilons\n"
    )


def test_the_extra_app_is_what_the_package_says_it_is():
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
    named = {re.split("[>=]", one)[0] for one in project["optional-dependencies"]["app"]}
    assert named == {{"PIL": "pillow", "sklearn": "scikit-learn"}.get(name, name) for name in errors.APP}
    needed = {"torch", "numpy", "scipy", "safetensors", "cryptography"}
    assert {re.split("[>=]", one)[0] for one in project["dependencies"]} == needed


# -- the list of commands ----------------------------------------------------------------------------------------------


def test_the_list_of_commands_imports_nothing_heavy():
    absent = "assert not {'torch', 'numpy', 'scipy', 'pydantic', 'pyarrow', 'sklearn'} & {*sys.modules}"
    code = "import sys; from epsilons.cli import app; app(['--help'], standalone_mode=False); "
    assert "attack" in python(code + absent)


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_no_word_of_the_help_is_taken_for_markup(name):
    """rich leaves out [about] as an unknown style."""
    assert not re.search(r"\[/?[a-z]", cli.loaded(name).help)


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_the_list_of_commands_shows_the_first_sentence_of_each(name):
    assert cli.loaded(name).help.split("\n\n")[0] == cli.COMMANDS[name][-1]


# -- messages ----------------------------------------------------------------------------------------------------------


SHORT = ["--batch-size", "10", "--steps", "10", "--accountant", "rdp"]
TWO_TIERS = ["--shares", "1:50%,4:50%", "--records", "100", "--delta", "1e-3"]
MODEL = 'name = "mlp"\noptions = { hidden = [4] }'
TIERS = ["plan", "--budgets", "wishes.csv", "--column", "tier", "--delta", "1e-3", *SHORT]


@pytest.fixture
def here(tmp_path, monkeypatch):
    """The current folder, which is empty."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def folder(here):
    """The current folder, with a config, its table of 60 people, and 20 people to test on."""
    Path("people.csv").write_text(people(60))
    Path("held-out.csv").write_text(people(20, seed=1))
    Path("people.toml").write_text(CONFIG.replace("test_share = 0.25", 'test = "held-out.csv"'))
    return here


# -- budgets ---------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(
    ("content", "column", "words"),
    [
        (None, "epsilon", ["No budgets file"]),
        ("epsilon\n1\n2\n", "eps", ["no column 'eps'", "'epsilon'", "--column"]),
        ("epsilon\n1\nplenty\n", "epsilon", ["1 of 2", "not numbers", "row 1"]),
        ("epsilon\n1\n-2\n", "epsilon", ["1 of 2", "positive", "row 1"]),
        ("epsilon\nnan\n2\n", "epsilon", ["1 of 2", "empty or NaN", "row 0"]),
        ("epsilon\n1\ninf\n", "epsilon", ["1 of 2", "finite", "row 1"]),
        ("epsilon\n1\n\n3\n", "epsilon", ["1 of 3", "empty", "row 1"]),
        ("a,b\n1\n2,3,4\n", "epsilon", ["cannot be read as CSV", "2 rows have another number"]),
    ],
    ids=["missing", "wrong column", "text", "negative", "NaN", "infinite", "empty cell", "ragged"],
)
def test_budgets_that_cannot_be_read_are_refused(content, column, words, here):
    if content is not None:
        Path("wishes.csv").write_text(content)
    before = files(here)
    outcome = epsilons("plan", "--budgets", "wishes.csv", "--column", column, *SHORT, "-o", "plan.json")
    outcome.is_refused(2, *words)
    assert "plenty" not in outcome.err
    assert files(here) == before


@pytest.mark.usefixtures("here")
def test_an_unknown_tier_is_refused_without_being_quoted():
    Path("wishes.csv").write_text("tier\n" + "strict\nopen\n" * 30)
    epsilons(*TIERS, "--tiers", "strict:1,open:4", "-o", "plan.json").succeeded()
    assert [row["epsilon"] for row in json.loads(Path("plan.json").read_text())["groups"]] == [1.0, 4.0]
    Path("wishes.csv").write_text("tier\nstrict\nsecretive\n")
    outcome = epsilons(*TIERS, "--tiers", "strict:1,open:4")
    outcome.is_refused(2, "Fewer than 20 cells", "'strict', 'open'", "No record holds: 'open'")
    assert "secretive" not in outcome.err
    epsilons(*TIERS, "--tiers", "strict").is_refused(2, "name:epsilon")


@pytest.mark.usefixtures("here")
def test_names_for_numbers_and_numbers_for_names_are_told_apart():
    """What 20 or more cells hold is quoted, and nothing that fewer hold."""

    def message(cells: list[str], *flags: str) -> str:
        Path("wishes.csv").write_text("\n".join(["tier", *cells]) + "\n")
        outcome = epsilons(*TIERS, *flags)
        outcome.is_refused(2)
        return outcome.err

    names = message(["strict", "open"] * 30 + ["secret"] * 19)
    assert "20 or more cells each hold 'open', 'strict'. If they are tiers" in names
    assert "[budgets] tiers = { NAME = 0.5 }" in names
    assert "secret" not in names
    given = ("--tiers", "strict:1,open:4")
    numbers = message(["1", "4"] * 30 + ["open"], *given)
    assert "20 or more of these are numbers, and tiers are names." in numbers
    assert "leave tiers out" in numbers
    assert "numbers, and tiers" not in message(["1"] * 19 + ["open"] * 30, *given)
    few = message(["strictt", "open"] * 30 + ["secret"] * 19, *given)
    assert "20 or more cells each hold 'strictt'." in few
    assert "secret" not in few
    assert "If they are tiers" not in message(["1", "inf"] * 30)


@pytest.mark.usefixtures("here")
def test_a_misspelt_tier_is_named_without_a_hint_to_the_few_who_chose_it():
    def message(research: int, tiers: str = "strict:1,open:4,resarch:8") -> str:
        cells = ["strict", "open"] * 100
        cells[37:37] = ["research"] * research
        Path("wishes.csv").write_text("\n".join(["tier", *cells]) + "\n")
        outcome = epsilons(*TIERS, "--tiers", tiers)
        outcome.is_refused(2, "are not the name of a tier")
        return outcome.err

    for few in (1, 19):
        assert "Fewer than 20 cells of column 'tier'" in message(few)
        assert "No record holds: 'resarch'." in message(few)
        assert "the first is" not in message(few)
    assert message(1) == message(19)
    for words in ("20 of 220 cells", "the first is row 37", "No record holds: 'resarch'."):
        assert words in message(20)
    assert "No record holds" not in message(20, "strict:1,open:4")
    # Where every tier has records, a row says only that its cell is a slip, and not which tier was meant.
    for few in (1, 19):
        said = " ".join(message(few, "strict:1,open:4").split())
        assert "Fewer than 20 cells of column 'tier'" in said
        assert "the first is row 37, counted from 0 below the header." in said
        assert "research" not in said


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["--shares", "1:50%,2:40%", "--records", "100"], 2, ["add up to 1", "0.9"]),
        (["--shares", "1:one", "--records", "100"], 2, ["epsilon:share", "got '1:one'"]),
        (["--shares", "1:50%,1:50%", "--records", "100"], 2, ["'1' is given twice"]),
        (["--shares", "1:100%"], 2, ["Give the budgets", "--shares with --records"]),
        ([*TWO_TIERS, "--budgets", "x.csv"], 2, ["not both"]),
        ([*TWO_TIERS, "--batch-size", "101"], 2, ["101", "larger than the data", "100"]),
        ([*TWO_TIERS, "--steps", "0"], 2, ["at least 1", "0"]),
        ([*TWO_TIERS, "--delta", "0"], 2, ["delta must be between 1e-09 and 1"]),
        ([*TWO_TIERS, "--delta", "1"], 2, ["delta must be between 1e-09 and 1"]),
        ([*TWO_TIERS, "--delta", "1e-10"], 2, ["delta must be between 1e-09 and 1"]),
        ([*TWO_TIERS, "--delta", "tiny"], 2, ["'--delta'", "'tiny' is not a valid", "See: epsilons plan --help"]),
        (["--shares", "0.01:100%", "--records", "1000"], 3, ["out of reach", "less than epsilon ="]),
        ([*TWO_TIERS, "--strategy", "scales"], 2, ["No strategy is called 'scales'", "uniform, sample, scale"]),
        ([*TWO_TIERS, "--option", "weight"], 2, ["name=value", "got 'weight'"]),
        ([*TWO_TIERS, "--option", "weight=1"], 2, ["has no option 'weight'"]),
        ([*TWO_TIERS, "--no-such-flag"], 2, ["--no-such-flag", "epsilons plan --help"]),
        ([*TWO_TIERS, "--records", "many"], 2, ["'--records'", "integer"]),
    ],
)
def test_what_cannot_be_planned_is_refused(arguments, code, words, here):
    epsilons("plan", *SHORT, *arguments, "-o", "plan.json").is_refused(code, *words)
    assert not files(here)


@pytest.mark.usefixtures("here")
def test_the_smallest_budget_in_reach_that_the_message_names_can_be_reached():
    message = epsilons("plan", "--shares", "0.01:100%", "--records", "1000", *SHORT).err
    floor = float(message.partition("epsilon = ")[2].split()[0])
    epsilons("plan", "--shares", f"{floor * 1.01}:100%", "--records", "1000", *SHORT).succeeded()


@pytest.mark.usefixtures("here")
@pytest.mark.filterwarnings("default::epsilons.errors.EpsilonsWarning")
def test_a_delta_of_one_in_the_number_of_records_gives_a_warning_of_one_line():
    outcome = epsilons("plan", "--shares", "1:100%", "--records", "1000", "--delta", "1e-3", *SHORT)
    assert outcome.code == 0
    assert outcome.err.startswith("epsilons: warning: delta is not below 1/records")
    assert outcome.err.count("\n") == 1


# -- plans and folders -----------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("here")
def test_a_plan_for_other_data_is_refused(folder):
    shares = ["--shares", "1:50%,4:50%", "--records", "60000"]
    epsilons("plan", *shares, "--batch-size", "512", "--steps", "5", "-o", "plan.json").succeeded()
    before = files(folder)
    outcome = epsilons("train", "people.toml", "--plan", "plan.json", "--quiet")
    outcome.is_refused(2, "60,000 records", "60 budgets", "Plan again")
    assert files(folder) == before


@pytest.mark.usefixtures("here")
def test_a_plan_that_is_cut_off_or_newer_is_refused(folder):
    epsilons("plan", *TWO_TIERS, *SHORT, "-o", "plan.json")
    whole = Path("plan.json").read_text()
    Path("plan.json").write_text(whole[: len(whole) // 2])
    epsilons("train", "people.toml", "--plan", "plan.json").is_refused(2, "not complete JSON")
    Path("plan.json").write_text(json.dumps(json.loads(whole) | {"schema": 99}))
    epsilons("train", "people.toml", "--plan", "plan.json").is_refused(2, "newer", "schema 99", "upgrade")
    epsilons("train", "people.toml", "--plan", "nowhere.json").is_refused(2, "No plan at nowhere.json")


@pytest.mark.usefixtures("here")
def test_a_folder_that_cannot_be_written_or_holds_another_run_is_refused(folder):
    before = files(folder)
    epsilons("train", "people.toml", "--run-dir", "people.csv/run").is_refused(2, "people.csv/run", "cannot be used")
    epsilons("train", "people.toml", "--run-dir", "people.csv").is_refused(2, "is not empty")
    assert files(folder) == before
    epsilons("train", "people.toml", "--run-dir", "runs/one", "--quiet").succeeded()
    after = files(folder)
    epsilons("train", "people.toml", "--run-dir", "runs/one").is_refused(2, "another run", "does not exist yet")
    assert files(folder) == after


# -- configs ---------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("steps = 4", "stepz = 5", ["[training] has no key 'stepz'", "did you mean 'steps'"]),
        ("[privacy]", "[privaci]", ["no key 'privaci'", "did you mean 'privacy'"]),
        ("steps = 4", "steps = 0", ["training.steps", "greater than or equal to 1", "got 0"]),
        ("steps = 4", "steps = 4\nepochs = 2", ["either steps or epochs"]),
        ("steps = 4", "", ["either steps or epochs"]),
        ("batch_size = 10", "", ["training.batch_size is missing"]),
        ("batch_size = 10", "batch_size = 61", ["larger than the data", "60"]),
        ("batch_size = 10", 'batch_size = "ten"', ["training.batch_size", "number", "got 'ten'"]),
        ("steps = 4", "steps = = 4", ["not TOML", "line"]),
        ('target = "label"', 'target = "labels"', ["'label'", "data."]),
        ('target = "label"', 'target = "epsilon"', ["'epsilon' cannot be both data.target and budgets.column"]),
        ('classes = ["no", "yes"]', "", ["data.classes"]),
        ('classes = ["no", "yes"]', 'classes = ["no"]', ["data.classes", "one class", "name all classes"]),
        ("age = [0, 100]", "", ["'age'", "[data.numeric]"]),
        ("age = [0, 100]", "age = [100, 0]", ["data.numeric", "low < high"]),
        ("age = [0, 100]", "age = [0, 100]\nepsilon = [0, 10]", ["'epsilon'", "cannot be an input"]),
        ('town = ["north", "south"]', "town = 0", ["data.categorical"]),
        ('column = "epsilon"', 'column = "eps"', ["'eps'"]),
        ("[budgets]", "[budgets]\ntiers = { open = 0.0 }", ["budgets.tiers.open", "greater than 0"]),
        ("[budgets]", '[budgets]\nfile = "held-out.csv"', ["20 budgets", "60 records"]),
        ("[budgets]", "[budgets]\nshares = { a = 1 }", ["must be a number, got 'a'"]),
        ('train = "people.csv"', 'train = "nowhere.csv"', ["No training data file"]),
        ('train = "people.csv"', 'train = "imagenet"', ["'imagenet'", "digits, mnist"]),
        ('test = "held-out.csv"', 'test = "held-out.csv"\ntest_share = 0.5', ["either test or test_share"]),
        (MODEL, 'name = "logistics"', ["'logistics'", "logistic, mlp", "package.module:callable"]),
        (MODEL, 'name = "nowhere:Model"', ["nowhere:Model", "cannot be imported", "config's folder"]),
        (MODEL, 'name = "json:Model"', ["json has no function 'Model'"]),
        (MODEL, 'name = "json:dumps"\noptions = {obj = 1}', ["returned a str", "nn.Module"]),
        (MODEL, 'name = "mlp"\noptions = {depth = 2}', ["no option 'depth'"]),
        (MODEL, 'name = "mlp"\noptions = {hidden = "wide"}', ["hidden", "[64, 64]"]),
        (MODEL, 'name = "mnist-cnn"', ["(1, 28, 28)", "(8,)"]),
        ("steps = 4", 'steps = 4\ndevice = "abacus"', ["'abacus'", "auto"]),
        ("[data]", '[performance]\nengine = "steam"\n[data]', ["'steam'", "loop"]),
        ("steps = 4", 'steps = 4\nloss = "mse"', ["predicts a number", "leave out data.classes"]),
        ('accountant = "rdp"', 'accountant = "abacus"', ["'abacus'", "pld"]),
        ('strategy = "scale"', 'strategy = "scaled"', ["'scaled'", "scale"]),
        ('accountant = "rdp"', 'options = {strategy = "scale"}', ["'strategy' is not", "in a config a key"]),
        ("steps = 4", "steps = 4\nseeds = [0, 0]", ["one seed twice"]),
        ('test = "held-out.csv"', 'test = "people.csv"', ["data.test is data.train"]),
        ('test = "held-out.csv"', "test_share = 0.999", ["test_share = 0.999", "none of the 60 records"]),
        ("[budgets]", '[budgets]\nshares = { "1" = 1 }\ndelta_column = "d"', ["leave out delta_column"]),
        ('town = ["north", "south"]', 'town = ["North"]', ["'town'", "'North'", "Spell them"]),
    ],
)
def test_a_wrong_config_is_refused_with_its_key(old, new, words, folder):
    change(old, new)
    before = files(folder)
    epsilons("train", "people.toml", "--quiet", "--trust").is_refused(2, *words)
    assert files(folder) == before


@pytest.mark.usefixtures("here")
def test_a_target_that_is_no_number_is_refused_as_a_number_to_predict(folder):
    change('classes = ["no", "yes"]\n', "")
    change("steps = 4", 'steps = 4\nloss = "mse"')
    epsilons("train", "people.toml").is_refused(2, "people.csv", "not numbers")


@pytest.mark.usefixtures("here")
def test_a_new_class_in_the_test_data_is_refused_by_row_and_not_by_its_name(folder):
    with Path("held-out.csv").open("a") as file:
        file.write("20,33,0,north,smith,perhaps,1\n")
    outcome = epsilons("train", "people.toml")
    outcome.is_refused(2, "1 of 21 rows of held-out.csv", "'label'", "row 20", "data.classes")
    assert "perhaps" not in outcome.err


@pytest.mark.usefixtures("here")
def test_a_missing_config_leads_to_init(folder):
    epsilons("train", "nowhere.toml").is_refused(2, "No config at nowhere.toml", "epsilons init")


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["people.csv"], ["people.toml exists already", "-o"]),
        (["nowhere.csv", "-o", "new.toml"], ["No data file at nowhere.csv"]),
        (["people.xlsx", "-o", "new.toml"], ["people.xlsx", "neither"]),
        (["people.csv", "-o", "new.toml", "--target", "lable"], ["'lable'", "'label'"]),
        (["people.csv", "-o", "new.toml", "--target", "epsilon"], ["both --target and --budget"]),
        (
            ["people.csv", "-o", "new.toml", "--target", "epsilon", "--budget", "epsilon"],
            ["'epsilon'", "both --target and --budget"],
        ),
        (["wishes.csv"], ["no column to predict"]),
    ],
)
def test_init_refuses_what_it_cannot_draft_and_writes_nothing(arguments, words, folder):
    Path("wishes.csv").write_text("epsilon\n1\n2\n")
    before = files(folder)
    epsilons("init", *arguments).is_refused(2, *words)
    assert files(folder) == before


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("mark", [";", "\t", "|"])
def test_a_table_without_commas_is_read_and_one_without_a_header_is_not_quoted(mark, folder):
    Path("people.csv").write_text(people(60).replace(",", mark))
    Path("held-out.csv").write_text(people(20, seed=1).replace(",", mark))
    epsilons("train", "people.toml").succeeded()
    headless = people(60).replace(",", mark).split("\n", 1)[1]
    Path("people.csv").write_text(headless)
    outcome = epsilons("init", "people.csv", "-o", "new.toml")
    outcome.is_refused(2, "looks like a record")
    assert headless.split("\n")[0] not in outcome.err
    assert not Path("new.toml").exists()


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("old", ["north", "town", "no,"], ids=["values", "name", "classes"])
def test_text_that_is_not_utf8_is_refused_with_a_way_to_convert_it(old, folder):
    Path("people.csv").write_bytes(people(60).replace(old, "ö" + old).encode("latin-1"))
    words = ["people.csv is not UTF-8", "iconv -f WINDOWS-1252 -t UTF-8 people.csv"]
    epsilons("train", "people.toml").is_refused(2, *words)
    epsilons("init", "people.csv", "-o", "new.toml").is_refused(2, *words)
    assert not Path("new.toml").exists()
    Path("people.csv").write_bytes(people(60).encode("utf-16"))
    epsilons("train", "people.toml").succeeded()


@pytest.mark.usefixtures("here")
def test_a_dropped_column_may_be_in_any_encoding(folder):
    text = "".join(f"{'name' if i == 0 else 'Jörg'},{line}\n" for i, line in enumerate(people(60).splitlines()))
    Path("people.csv").write_bytes(text.encode("latin-1"))
    change('drop = ["id"]', 'drop = ["id", "name"]')
    epsilons("train", "people.toml", "--quiet").succeeded()


# -- interrupted and resumed -----------------------------------------------------------------------------------------


@pytest.mark.usefixtures("here")
def test_ctrl_c_says_what_was_charged_and_how_to_continue(folder):
    change("steps = 4", "steps = 200000")
    process = subprocess.Popen(
        [sys.executable, "-m", "epsilons", "train", "people.toml", "--run-dir", "runs/one"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # ignored where tests run in the background
    )
    ledger = folder / "runs/one/ledger.jsonl"
    deadline = time.monotonic() + 120
    while not (ledger.exists() and "reserve" in ledger.read_text()) and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(0.3)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130, out + err
    assert "Traceback" not in err
    message = err.splitlines()[-1]
    assert message.startswith("epsilons: interrupted after ")
    assert "of 200,000 steps" in message
    assert "epsilons train people.toml --run-dir runs/one --resume" in message
    charged = int(message.split()[3].replace(",", ""))
    updates = [line for line in lines(ledger.parent) if line["kind"] == "update"]
    assert 0 <= charged - len(updates) <= 1  # the last step may be charged without an update


@pytest.mark.usefixtures("here")
def test_resume_without_a_run_is_refused_and_trains_nothing(folder):
    for flags in ((), ("--run-dir", "runs/mistyped")):
        epsilons("train", "people.toml", "--resume", *flags).is_refused(2, "holds no run to continue")
    assert not Path("runs").exists()


def interrupt(monkeypatch: pytest.MonkeyPatch, steps: int = 50, at: int = 30, *flags: str) -> None:
    """Train into runs/one, end after the 30th update; there is a checkpoint after the 20th.

    at, flags  of a run that goes on
    """
    if not flags:
        change("steps = 4", f"steps = {steps}\ncheckpoint_every = 20")

    def press(private: Private) -> None:
        if private.updates == at:
            raise KeyboardInterrupt

    def fit(*given: Any, callbacks: list[Any], **options: Any) -> Any:
        return real(*given, callbacks=[*callbacks, press], **options)

    real = train_config.fit
    with monkeypatch.context() as patched:
        patched.setattr(train_config, "fit", fit)
        assert epsilons("train", "people.toml", "--run-dir", "runs/one", *flags).code == 130


@pytest.mark.usefixtures("here")
def test_a_run_that_continues_under_another_config_says_so(folder, monkeypatch):
    interrupt(monkeypatch)
    change("steps = 50", "steps = 7")
    change("batch_size = 10", "batch_size = 11")
    outcome = epsilons("train", "people.toml", "--run-dir", "runs/one", "--resume")
    outcome.succeeded("The config asks for another: steps, batch_size")
    assert "new key" not in outcome.err


@pytest.mark.usefixtures("here")
def test_a_run_continues_even_if_the_plan_of_the_config_cannot_be_made(folder, monkeypatch):
    interrupt(monkeypatch)
    change("batch_size = 10", "batch_size = 5000")
    epsilons("train", "people.toml", "--run-dir", "runs/two").is_refused(2, "batch", "5000")
    outcome = epsilons("train", "people.toml", "--run-dir", "runs/one", "--resume")
    outcome.succeeded("The config asks for another: one that cannot be made.")


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(
    ("steps", "consequence"),
    [
        (100, "steps from 30 on are charged again"),
        (50, "all steps were charged already, so no update is left to make"),  # a block is reserved ahead
    ],
)
def test_a_warning_says_which_steps_are_charged_again(steps, consequence, folder, monkeypatch):
    interrupt(monkeypatch, steps)
    change("lr = 0.2", "lr = 0.01")
    outcome = epsilons("train", "people.toml", "--run-dir", "runs/one", "--resume")
    outcome.succeeded()
    assert f"The run continues under a new key; {consequence}." in " ".join(outcome.err.split())
    assert "Keys of the config that changed since the run began: training.lr." in " ".join(outcome.out.split())
    assert "The config asks for another" not in outcome.out
    assert ("changes" in json.loads(Path("runs/one/run.json").read_text())) == (steps == 100)


@pytest.mark.usefixtures("here")
def test_a_report_says_after_which_step_which_keys_changed_and_names_no_column_for_release(folder, monkeypatch):
    interrupt(monkeypatch, 400)
    interrupt(monkeypatch, 400, 40, "--resume")  # nothing changed
    change("lr = 0.2", "lr = 0.01")
    change("age = [0, 100]", "age = [0, 110]")
    interrupt(monkeypatch, 400, 50, "--resume")
    interrupt(monkeypatch, 400, 60, "--resume")  # nothing changed since
    change("lr = 0.01", "lr = 0.2")
    epsilons("train", "people.toml", "--run-dir", "runs/one", "--continue").succeeded()
    again = epsilons("train", "people.toml", "--run-dir", "runs/one", "--continue")
    assert "trained by another config" not in again.out
    epsilons("report", "runs/one", "-q").succeeded()
    for version, keys in (("", "data.numeric.age, training.lr"), ("-release", "data.numeric, training.lr")):
        made = json.loads(Path(f"runs/one/report{version}.json").read_text())["made_with"]
        assert {name: text for name, text in made.items() if name.startswith("changed")} == {
            "changed after step 39": f"{keys} (here are the values of the beginning)",
            "changed after step 59": "training.lr (here are the values of the beginning)",
        }
        assert f"<dt>changed after step 39</dt><dd>{keys}" in Path(f"runs/one/report{version}.html").read_text()
    epsilons("report", "runs/one", "--annexes", "annexes").succeeded()
    assert "changed after step 39: data.numeric, training.lr" in Path("annexes/ai-act.html").read_text()


# -- tables -------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("width", [200, 80, 30])
def test_a_table_on_the_terminal_loses_no_digit(width):
    headers = ["epsilon", "noise multiplier", "epsilon at 1e-9", "steps"]
    rows = [["1", "3.0832", "1.5179", "10,000"], ["2", "1.7701", "2.9817", "10,000"]]
    for is_terminal in (True, False):
        file = io.StringIO()
        options.show_table(
            (headers, rows), Console(file=file, width=width, force_terminal=is_terminal, color_system=None)
        )
        words = file.getvalue().split()
        assert "…" not in file.getvalue()
        assert all(cell in words for row in rows for cell in row)
        assert is_terminal is False or width == 30 or max(map(len, file.getvalue().splitlines())) <= width
