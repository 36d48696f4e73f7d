"""Several runs of one plan on the command line: epsilons plan --runs, [privacy] runs, epsilons train --plan FOLDER."""

from __future__ import annotations

from pathlib import Path

import pytest

from epsilons import PlanFolder
from program import CONFIG, epsilons, people

SHARES = ["--shares", "1:50%,4:50%", "--records", "600", "--batch-size", "60", "--steps", "5", "--accountant", "rdp"]
COUNTED = CONFIG + 'runs = 2\nplan_folder = "tuning"\n'


@pytest.fixture(autouse=True)
def _in_a_folder_of_people(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("people.csv").write_text(people())


def config(text: str, name: str = "people.toml") -> str:
    Path(name).write_text(text)
    return name


def test_a_plan_for_several_runs_is_saved_as_a_folder_that_counts_them():
    epsilons("plan", *SHARES, "--runs", "3", "-o", "tuning").succeeded("3 runs of 5 steps", "3 runs together", "counts")
    assert PlanFolder("tuning").left == 3
    epsilons("plan", *SHARES, "--runs", "3", "-o", "tuning.json").is_refused(2, "kept in a folder")
    epsilons("plan", *SHARES, "--runs", "0").is_refused(2)


def test_a_config_trains_as_many_runs_as_it_asks_for_whatever_their_learning_rate():
    epsilons("train", config(COUNTED)).succeeded("Run 1 of 2", "All 2 runs of the plan together")
    epsilons("train", config(COUNTED.replace("lr = 0.2", "lr = 0.4"), "other.toml")).succeeded("Run 2 of 2")
    epsilons("train", "people.toml").is_refused(2, "2 have begun")
    assert PlanFolder("tuning").left == 0


@pytest.mark.parametrize(
    "change", [("steps = 4", "steps = 5"), ("batch_size = 10", "batch_size = 12"), ('"scale"', '"sample"')], ids=str
)
def test_a_config_that_asks_for_another_table_is_refused(change):
    epsilons("train", config(COUNTED)).succeeded()
    epsilons("train", config(COUNTED.replace(*change))).is_refused(2, "another than the config asks for")
    assert PlanFolder("tuning").begun == 1


def test_every_seed_is_a_run_of_the_plan():
    seeds = COUNTED.replace("lr = 0.2", "lr = 0.2\nseeds = [0, 1, 2]")
    epsilons("train", config(seeds)).is_refused(2, "3 cannot begin")
    epsilons("train", config(seeds.replace("[0, 1, 2]", "[0, 1]"))).succeeded("Runs 1 to 2 of 2")
    assert PlanFolder("tuning").left == 0


def test_an_interrupted_run_continues_without_another_slot():
    epsilons("train", config(COUNTED), "--run-dir", "run").succeeded()
    epsilons("train", "people.toml", "--run-dir", "run", "--resume").succeeded()
    assert PlanFolder("tuning").begun == 1


def test_a_plan_s_folder_is_given_in_place_of_a_plan():
    epsilons("train", config(COUNTED)).succeeded()
    Path("tuning").rename("moved")
    epsilons("train", config(CONFIG), "--plan", "moved").succeeded("Run 2 of 2")
    epsilons("train", config(CONFIG), "--plan", "moved/plan.json").is_refused(2, "PlanFolder")
    epsilons("train", config(CONFIG), "--plan", "moved").is_refused(2, "2 have begun")


@pytest.mark.parametrize("lines", ["runs = 2", 'plan_folder = "tuning"', 'runs = 0\nplan_folder = "tuning"'])
def test_a_number_of_runs_and_the_folder_that_counts_them_belong_together(lines):
    epsilons("train", config(CONFIG + lines + "\n")).is_refused(2, "runs")
