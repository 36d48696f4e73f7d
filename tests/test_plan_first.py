"""Plan first: the plan of a config, settings on the command line, dry runs, strategies by import path."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from epsilons import Budgets, Plan, Recipe, plan
from epsilons.cli import dry_run, train_config
from epsilons.configs.config_file import parse_settings, with_settings
from epsilons.errors import InputError, PlanError
from program import CONFIG, change, epsilons, files, people, python

OWN = """
from epsilons.planning import STRATEGIES

def own(budgets, recipe, accountant, by="norm"):
    return STRATEGIES["scale"](budgets, recipe, accountant)

def nothing(budgets, recipe, accountant):
    pass

def two_arguments(budgets, recipe):
    pass

def broken(budgets, recipe, accountant):
    return {}[float(budgets.epsilons[0])]

def greedy(budgets, recipe, accountant):
    import dataclasses
    made = STRATEGIES["scale"](budgets, recipe, accountant)
    phase = dataclasses.replace(made.phases[0], noise_std=made.phases[0].noise_std / 2)
    return dataclasses.replace(made, phases=(phase,))

number = 3
"""


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """The current folder, with a table, a config and strategies."""
    (tmp_path / "people.csv").write_text(people())
    (tmp_path / "people.toml").write_text(CONFIG)
    (tmp_path / "own_ways.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "own_ways", raising=False)
    return tmp_path


def planned(*arguments: object) -> dict[str, Any]:
    outcome = epsilons("plan", "people.toml", *arguments, "--json")
    outcome.succeeded()
    values: dict[str, Any] = json.loads(outcome.out)
    return values


# -- the plan of a config ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("", ""),
        ("test_share = 0.25\n", ""),
        ('strategy = "scale"', 'strategy = "mix"\noptions = { weight = 0.3 }'),
        ('column = "epsilon"', 'shares = { "1" = 0.5, "3" = 0.5 }'),
        ("steps = 4", 'epochs = 3\nconvention = "authors-code"'),
    ],
)
def test_the_plan_of_a_config_is_the_one_that_train_trains_under(old, new):
    change(old, new)
    values = planned("-o", "plan.json")
    epsilons("train", "people.toml", "--run-dir", "run").succeeded()
    assert Plan.load("run/plan.json") == Plan.load("plan.json")
    assert json.loads(Path("run/plan.json").read_text()) == values


@pytest.mark.parametrize(("read_off", "is_said"), [('["age", "town"]', True), ("[]", False)])
def test_the_print_out_of_a_config_names_what_was_read_off_the_data(read_off, is_said):
    change('drop = ["id"]', f'drop = ["id"]\nread_off = {read_off}')
    outcome = epsilons("plan", "people.toml")
    outcome.succeeded("Odds of each tier: --risk.")
    said = " ".join(outcome.out.split())
    words = "NOT COVERED by the guarantee, because they were read off the data: the bounds of 'age', and the categories"
    assert (words in said) is is_said


def test_the_plan_of_a_config_imports_no_torch(folder):
    code = "import sys; from epsilons.cli import app; app(['plan', 'people.toml', '-q'], standalone_mode=False); "
    python(code + "assert 'epsilons.planning' in sys.modules; assert 'torch' not in sys.modules", folder)


def test_flags_for_training_change_the_plan_of_a_config():
    values = planned("--epochs", 2, "--batch-size", 20, "--clip-norm", 3, "--strategy", "sample", "--accountant", "pld")
    assert (values["steps"], values["batch_size"], values["strategy"], values["accountant"]) == (6, 20, "sample", "pld")
    assert values["groups"][0]["clip_norm"] == 3


def test_flags_for_budgets_are_refused_beside_a_config():
    epsilons("plan", "people.toml", "--shares", "1:100%", "--records", 9).is_refused(2, "--shares", "--set budgets")
    epsilons("plan", "people.toml", "--delta", "1e-6").is_refused(2, "--delta")


def test_plan_says_what_is_missing_without_a_config():
    epsilons("plan", "--shares", "1:100%", "--records", 9, "--batch-size", 3).is_refused(2, "--steps", "--epochs")
    epsilons("plan", "--shares", "1:100%", "--records", 9, "--steps", 3).is_refused(2, "--batch-size")
    flags = ("--shares", "1:100%", "--records", 9, "--batch-size", 3, "--steps", 3)
    epsilons("plan", *flags, "--epochs", 3).is_refused(2, "either")
    epsilons("plan", *flags, "--set", "training.steps=4").is_refused(2, "--set")


# -- epochs ------------------------------------------------------------------------------------------------------------


def test_epochs_of_flags_and_of_a_recipe_are_the_same_length():
    flags = ("--shares", "1:50%,4:50%", "--records", 1000, "--batch-size", 64, "--accountant", "rdp", "--json")
    values = json.loads(epsilons("plan", *flags, "--epochs", 2.5).out)
    recipe = Recipe.of_epochs(2.5, records=1000, batch_size=64, clip_norm=1.0)
    assert values["steps"] == recipe.steps == 39
    assert Recipe.of_epochs(0.001, records=10, batch_size=5, clip_norm=1.0).steps == 1


@pytest.mark.parametrize("wrong", [{"epochs": 0}, {"epochs": float("nan")}, {"batch_size": 0}, {"records": 0}])
def test_a_recipe_of_no_epochs_records_or_batch_is_refused(wrong):
    arguments = {"epochs": 1, "records": 10, "batch_size": 5, "clip_norm": 1.0} | wrong
    with pytest.raises(PlanError, match="positive, finite number"):
        Recipe.of_epochs(**arguments)


def test_epochs_under_declared_shares_do_not_depend_on_the_number_of_people():
    change("steps = 4", "epochs = 3")
    change("[privacy]", '[privacy]\npublic_shares = { "1" = 0.5, "4" = 0.5 }\npublic_records = 200')
    before = planned()
    Path("people.csv").write_text(people(120))
    assert planned() == before
    assert before["steps"] == 60


# -- settings ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "path", "value"),
    [
        ("training.lr=0.1", ("training", "lr"), 0.1),
        ("training.steps = 3", ("training", "steps"), 3),
        ("data.test_public=true", ("data", "test_public"), True),
        ('model.name="mlp"', ("model", "name"), "mlp"),
        ("model.name=mlp", ("model", "name"), "mlp"),
        ("model.options={hidden=[8, 8]}", ("model", "options"), {"hidden": [8, 8]}),
        ('budgets.tiers."very strict"=0.5', ("budgets", "tiers", "very strict"), 0.5),
        ("training.seeds=[1, 2]", ("training", "seeds"), [1, 2]),
        ("data.train=a=b.csv", ("data", "train"), "a=b.csv"),
        ("data.target=1\nb = 2", ("data", "target"), "1\nb = 2"),
    ],
)
def test_a_setting_is_typed_as_toml_and_its_flag_gives_it_again(text, path, value):
    (setting,) = parse_settings([text])
    assert (setting.path, setting.value) == (path, value)
    if "\n" not in text:
        flag, again = shlex.split(setting.flag)
        assert flag == "--set"
        assert parse_settings([again]) == (setting,)


@pytest.mark.parametrize("text", ["training.lr", "=3", "training.lr=", "a b=3", "[x]\na=1", "training..lr=1", ""])
def test_another_form_of_a_setting_is_refused(text):
    with pytest.raises(InputError, match=r"section\.key=value"):
        parse_settings([text])


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("lr=0.1", ["no key 'lr'", "'training.lr'"]),
        ("training.lrr=0.1", ["'lrr'", "'lr'"]),
        ("trainig.lr=0.1", ["'training'"]),
        ("training.lr=-1", ["training.lr", "greater than 0"]),
        ('training.steps="4"', ["training.steps", "integer"]),
        ("data.train.x=1", ["'train' is a value"]),
    ],
)
@pytest.mark.parametrize("command", ["plan", "train"])
def test_settings_that_no_config_has_are_refused_with_the_nearest_key(command, text, words):
    epsilons(command, "people.toml", "--set", text).is_refused(2, "--set", *words)


def test_settings_of_steps_and_epochs_replace_one_another():
    settings = parse_settings(["training.epochs=2", "training.lr=1", "training.lr=2"])
    assert with_settings({"training": {"steps": 4}}, settings) == {"training": {"epochs": 2, "lr": 2}}


def test_settings_train_the_run_and_are_recorded_in_it():
    epsilons("train", "people.toml", "--set", "training.lr=0.5", "--epochs", 1, "--run-dir", "run").succeeded()
    run = json.loads(Path("run/run.json").read_text())
    assert run["metadata"]["set"] == {"training.lr": 0.5, "training.epochs": 1.0}
    assert run["metadata"]["config"]["training"]["lr"] == run["training"]["lr"] == 0.5
    assert Plan.load("run/plan.json").steps == 6


def test_settings_need_a_config():
    for flags in (["--set", "training.lr=1"], ["--epochs", 2], ["--strategy", "scale"], ["--dry-run"]):
        epsilons("train", *flags).is_refused(2, "config")


# -- dry runs ----------------------------------------------------------------------------------------------------------


def test_a_dry_run_says_what_would_be_trained_and_writes_nothing(folder):
    before = files(folder)
    words = ("Would train mlp (46 parameters) with sgd, lr 0.2, for 4 steps", "expected batch of 10", "a step here")
    epsilons("train", "people.toml", "--dry-run").succeeded(*words, "runs/people-1/", "epsilon_spent")
    assert {name for name in files(folder) if "__pycache__" not in name} == before


def test_a_dry_run_as_json_has_its_numbers(folder):
    values = json.loads(epsilons("train", "people.toml", "--dry-run", "--json").out)
    assert (values["dry_run"], values["parameters"], values["steps"], values["expected_batch"]) == (True, 46, 4, 10)
    assert 0 < values["seconds_per_step"] < 60
    assert [row["records"] for row in values["groups"]] == [row["records"] for row in planned()["groups"]]


def test_a_dry_run_trains_on_no_record(monkeypatch):
    seen = []

    class Seeing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 2)

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            if self.training:
                seen.append(inputs.detach().abs().max().item())
            return self.layer(inputs)

    monkeypatch.setattr(dry_run, "build", lambda *_, **__: Seeing())
    epsilons("train", "people.toml", "--dry-run").succeeded()
    assert seen
    assert max(seen) == 0


def test_a_dry_run_neither_makes_nor_uses_the_folder_that_counts_runs(folder):
    change("[privacy]", '[privacy]\nruns = 2\nplan_folder = "tuning"')
    epsilons("train", "people.toml", "--dry-run").succeeded("Would train")
    assert not Path("tuning").exists()
    epsilons("train", "people.toml").succeeded()
    epsilons("train", "people.toml", "--dry-run").succeeded("1 of 2 runs of the plan", "left")
    assert len(list(Path("tuning/slots").iterdir())) == 1


def test_a_dry_run_finds_what_training_would_refuse():
    change("age = [0, 100]", "agee = [0, 100]")
    epsilons("train", "people.toml", "--dry-run").is_refused(2, "agee")
    epsilons("train", "people.toml", "--dry-run", "--resume").is_refused(2, "--resume")


# -- strategies by import path -----------------------------------------------------------------------------------------


def test_a_strategy_by_import_path_is_certified_and_recorded_by_name(folder):
    change('strategy = "scale"', 'strategy = "own_ways:own"\noptions = { by = "weight" }')
    values = planned("--trust")
    assert (values["strategy"], values["options"]) == ("own_ways:own", {"by": "weight"})
    epsilons("train", "people.toml", "--run-dir", "run", "--trust").succeeded("own_ways:own: 60 records")
    run = json.loads(Path("run/run.json").read_text())
    assert run["metadata"]["config"]["privacy"]["strategy"] == "own_ways:own"
    assert Plan.load("run/plan.json").strategy == "own_ways:own"
    epsilons("report", "run").succeeded()


def test_a_run_under_a_strategy_by_import_path_resumes(monkeypatch):
    flags = ("train", "people.toml", "--strategy", "own_ways:own", "--run-dir", "run", "--trust")
    with monkeypatch.context() as patched:
        fit = train_config.fit

        def stop(private: Any) -> None:
            if private.updates == 2:
                raise KeyboardInterrupt

        patched.setattr(train_config, "fit", lambda *a, callbacks, **k: fit(*a, callbacks=[*callbacks, stop], **k))
        outcome = epsilons(*flags)
        outcome.is_refused(130, "--resume", "privacy.strategy=", "--trust")
    epsilons(*flags, "--resume").succeeded("4 of 4 steps charged")
    assert Plan.load("run/plan.json").strategy == "own_ways:own"


def test_flags_and_python_take_a_strategy_by_import_path(folder):
    flags = ("--shares", "1:50%,4:50%", "--records", 1000, "--batch-size", 64, "--steps", 5, "--accountant", "rdp")
    values = json.loads(epsilons("plan", *flags, "--strategy", "own_ways:own", "--trust", "--json").out)
    budgets = Budgets.from_shares({1.0: 0.5, 4.0: 0.5}, records=1000)
    recipe = Recipe(steps=5, batch_size=64, clip_norm=1.0)
    sys.path.insert(0, str(folder))
    try:
        made = plan(budgets, recipe, "own_ways:own", "rdp")
    finally:
        sys.path.remove(str(folder))
    assert made.to_dict()["phases"] == values["phases"]
    epsilons("plan", *flags, "--compare", "own_ways:own", "--trust").succeeded("own_ways:own: influence")


@pytest.mark.parametrize(
    ("strategy", "code", "words"),
    [
        ("own_ways:nothing", 2, ["returned a NoneType", "Plan"]),
        ("own_ways:two_arguments", 2, ["three arguments"]),
        ("own_ways:broken", 2, ["raised KeyError in", "own_ways.py, line"]),
        ("own_ways:greedy", 3, ["would spend more"]),
        ("own_ways:number", 2, ["no function 'number'"]),
        ("own_ways:absent", 2, ["no function 'absent'"]),
        ("no_such_module:own", 2, ["No module named 'no_such_module'"]),
        (":own", 2, ["package.module:function"]),
        ("sampel", 2, ["sampel", "sample", "package.module:function"]),
    ],
)
def test_a_strategy_that_cannot_be_used_is_refused_in_one_line(strategy, code, words):
    epsilons("plan", "people.toml", "--trust", "--strategy", strategy).is_refused(code, *words)


def test_an_error_in_a_strategy_shows_no_value_of_it():
    outcome = epsilons("plan", "people.toml", "--trust", "--strategy", "own_ways:broken")
    assert "1.0" not in outcome.err


def test_a_module_that_fails_to_load_is_named_with_the_line():
    Path("failing_ways.py").write_text("x = 1\nraise RuntimeError('no')\n")
    epsilons("plan", "people.toml", "--trust", "--strategy", "failing_ways:own").is_refused(2, "RuntimeError", "line 2")
