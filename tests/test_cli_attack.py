"""`epsilons attack`: on a config, on a run, continued, in the reports, and refused."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from epsilons import cli
from epsilons.auditing import membership
from epsilons.cli import attack_config, demo
from epsilons.ledger import signatures
from epsilons.ledger.run_folder import RunFolder
from program import CONFIG, change, epsilons, files, people

SHADOWS = ["--shadows", "8", "--jobs", "1"]
FILES = {"plan.json", "attack.json", "membership.json", "roc.svg", "attack.html"}


@pytest.fixture(autouse=True)
def _people(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("people.csv").write_text(people(120))
    Path("people.toml").write_text(CONFIG)


@pytest.fixture(scope="module")
def attacked(tmp_path_factory) -> Path:
    """A folder with a config, a run of it, and an attack on the run; tests only read it."""
    folder = tmp_path_factory.mktemp("attacked")
    (folder / "people.csv").write_text(people(120))
    (folder / "people.toml").write_text(CONFIG)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        epsilons("train", "people.toml", "-o", "runs/first", "-q").succeeded()
        epsilons("attack", "runs/first", "-o", "attacks/first", *SHADOWS).succeeded()
    return folder


def test_an_attack_on_a_config_prints_and_writes_the_result(tmp_path):
    outcome = epsilons("attack", "people.toml", *SHADOWS)
    outcome.succeeded("lira-shrunk", "rmia", "AUC", "certified", "no guarantee covers them", "attacks/people-1/")
    assert files(tmp_path / "attacks/people-1") == FILES
    page = (tmp_path / "attacks/people-1/attack.html").read_text()
    assert "Internal, confidential" in page
    assert "no guarantee covers them" in page
    assert "<script" not in page
    assert not re.search(r"(src|href)=", page)


def test_each_table_is_printed_once():
    outcome = epsilons("attack", "people.toml", *SHADOWS)
    assert outcome.out.count("TPR at 1 %") == 1
    assert outcome.out.count("AUC  ") == 1


def test_json_is_the_saved_result_and_nothing_else_is_printed(tmp_path):
    outcome = epsilons("attack", "people.toml", *SHADOWS, "--json", "--attacks", "loss,lira-offline", "-o", "a")
    outcome.succeeded()
    values = json.loads(outcome.out)
    assert values == json.loads((tmp_path / "a/membership.json").read_text())
    assert [one["attack"] for one in values["attacks"]] == ["loss", "loss", "lira-offline", "lira-offline"]
    assert values["dealt_at_random"] is False
    assert "no guarantee covers them" in values["not_covered"]


def test_rows_have_the_names_of_the_config_s_tiers():
    change('column = "epsilon"', 'column = "epsilon"\ntiers = { "1" = 1, "4" = 4 }')
    epsilons("attack", "people.toml", *SHADOWS, "--json", "--attacks", "loss", "-o", "a").succeeded()
    rows = json.loads(Path("a/membership.json").read_text())["groups"]
    assert [row["label"] for row in rows] == ["1 (1)", "4 (4)"]


def test_quiet_prints_nothing():
    outcome = epsilons("attack", "people.toml", *SHADOWS, "-q")
    outcome.succeeded()
    assert outcome.out == outcome.err == ""


def test_simulated_budgets_are_dealt_at_random():
    change('column = "epsilon"', 'shares = {"1" = 0.5, "4" = 0.5}')
    change('drop = ["id"]', 'drop = ["id", "epsilon"]')
    outcome = epsilons("attack", "people.toml", *SHADOWS, "--json")
    assert json.loads(outcome.out)["dealt_at_random"] is True


def test_folders_are_numbered_and_resume_means_the_last_one(tmp_path):
    for _ in range(2):
        epsilons("attack", "people.toml", *SHADOWS, "--attacks", "loss").succeeded()
    before = (tmp_path / "attacks/people-2/membership.json").read_bytes()
    again = epsilons("attack", "people.toml", *SHADOWS, "--attacks", "loss", "--resume")
    again.succeeded("attacks/people-2/")
    assert {folder.name for folder in (tmp_path / "attacks").iterdir()} == {"people-1", "people-2"}
    assert (tmp_path / "attacks/people-2/membership.json").read_bytes() == before
    epsilons("attack", "people.toml", *SHADOWS, "--resume", "--seed", "1", "--attacks", "loss").is_refused(2, "seed")
    epsilons("attack", "people.toml", "-o", "attacks/people-1").is_refused(2, "not empty")
    epsilons("attack", "people.toml", "-o", "nowhere", "--resume").is_refused(2, "no attack to continue")


@pytest.mark.parametrize("jobs", ["1", "2"])
def test_sigterm_keeps_finished_shadows_and_ends_with_code_75(jobs):
    change("steps = 4", "steps = 100")
    command = ["attack", "people.toml", "--shadows", "320", "--jobs", jobs, "-o", "a", "-q"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [sys.executable, "-m", "epsilons", *command], stderr=subprocess.PIPE, text=True, env=environment
    )
    deadline, blocks = time.monotonic() + 120, Path("a/secret/blocks")
    while not (blocks.is_dir() and any(blocks.rglob("*.npz"))) and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 75, err
    assert "terminated. Finished shadows are kept. To continue: epsilons attack people.toml -o a --resume" in err
    kept = {file: file.stat().st_mtime_ns for file in blocks.rglob("*.npz")}
    assert 0 < len(kept) < 5
    epsilons(*command, "--resume", "--keep-scores").succeeded()
    assert all(file.stat().st_mtime_ns == when for file, when in kept.items())


def test_an_interruption_says_how_to_continue(monkeypatch):
    def interrupt(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(membership, "attack", interrupt)
    epsilons("attack", "people.toml", *SHADOWS, "-o", "a").is_refused(130, "epsilons attack people.toml -o a --resume")


# -- a run -------------------------------------------------------------------------------------------------------


def test_a_run_is_attacked_under_its_own_plan_from_any_folder(attacked, tmp_path, monkeypatch):
    """The paths of a config start from its folder, which the run remembers. Mutant: planning again."""
    run = RunFolder(attacked / "runs/first")
    noted = run.read_settings()
    assert noted["attacked"]["shadows"] == 8
    assert (run.path / "membership.json").read_bytes() == (attacked / "attacks/first/membership.json").read_bytes()
    for name in ("membership.json", "membership.svg"):
        assert stat.S_IMODE((run.path / name).stat().st_mode) == 0o600
    shutil.copytree(run.path, tmp_path / "moved")
    for file in ("people.csv", "people.toml"):
        (tmp_path / file).unlink()
    monkeypatch.setattr(attack_config.Prepared, "plan", lambda _: pytest.fail("planned again"))
    epsilons("attack", "moved", *SHADOWS, "-o", "again").succeeded()
    assert (tmp_path / "again/membership.json").read_bytes() == (run.path / "membership.json").read_bytes()


def test_the_internal_report_shows_the_attack_and_the_release_does_not(attacked, tmp_path):
    run = shutil.copytree(attacked / "runs/first", tmp_path / "run")
    epsilons("report", "run", "-q").succeeded()
    internal, release = (run / f"report{part}.html" for part in ("", "-release"))
    values = json.loads((run / "membership.json").read_text())
    auc = f"{values['attacks'][0]['auc']['value']:.4f}"
    assert "Membership inference" in internal.read_text()
    assert auc in internal.read_text()
    assert "no guarantee covers" in internal.read_text()
    assert json.loads(internal.with_suffix(".json").read_text())["membership"]["shadows"] == 8
    for file in (release, release.with_suffix(".json")):
        text = file.read_text()
        assert not re.search(rf"Membership|lira|rmia|shadow|{auc}|{attacked}", text), file
    assert json.loads(release.with_suffix(".json").read_text())["membership"] is None


def test_the_release_is_the_same_with_and_without_an_attack(attacked, tmp_path):
    with_it = shutil.copytree(attacked / "runs/first", tmp_path / "run")
    epsilons("report", "run", "-q").succeeded()
    released = {file.name: file.read_bytes() for file in with_it.glob("report-release.*")}
    for name in ("membership.json", "membership.svg"):
        (with_it / name).unlink()
    epsilons("report", "run", "-q").succeeded()
    assert released == {file.name: file.read_bytes() for file in with_it.glob("report-release.*")}


def test_a_changed_result_is_not_reported(attacked, tmp_path):
    run = shutil.copytree(attacked / "runs/first", tmp_path / "run")
    text = (run / "membership.json").read_text()
    (run / "membership.json").write_text(text.replace('"shadows": 8', '"shadows": 9', 1))
    epsilons("report", "run").is_refused(2, "membership.json was changed")


def test_where_the_config_was_is_in_no_report(attacked, tmp_path):
    run = shutil.copytree(attacked / "runs/first", tmp_path / "run")
    assert RunFolder(run).read_settings()["metadata"]["folder"] == str(attacked.resolve())
    epsilons("report", "run", "-q").succeeded()
    assert not [file for file in run.glob("report*") if str(attacked) in file.read_text()]


def test_a_run_without_a_config_or_with_other_budgets_is_refused(attacked, tmp_path):
    run = RunFolder(Path(shutil.copytree(attacked / "runs/first", tmp_path / "run")))
    settings = run.read_settings()
    run.note(metadata={key: value for key, value in settings["metadata"].items() if key != "config"})
    epsilons("attack", "run", *SHADOWS).is_refused(2, "epsilons.auditing.membership.attack")
    run.note(metadata={key: value for key, value in settings["metadata"].items() if key != "folder"})
    epsilons("attack", "run", *SHADOWS).is_refused(2, "earlier version")
    run.note(metadata={**settings["metadata"], "folder": str(tmp_path)})
    Path("people.csv").write_text(swapped(people(120)))
    epsilons("attack", "run", *SHADOWS).is_refused(2, "other budgets")
    epsilons("attack", "people.csv").is_refused(2, "not TOML")
    (tmp_path / "empty").mkdir()
    epsilons("attack", "empty").is_refused(2, "holds no run")


def swapped(table: str) -> str:
    """The same table with the budgets of two people of different budgets exchanged."""
    lines = table.splitlines()
    one = next(i for i, line in enumerate(lines) if line.endswith(",1"))
    four = next(i for i, line in enumerate(lines) if line.endswith(",4"))
    lines[one], lines[four] = lines[one][:-1] + "4", lines[four][:-1] + "1"
    return "\n".join(lines) + "\n"


def test_a_folder_inside_a_run_is_refused(attacked, tmp_path):
    shutil.copytree(attacked / "runs/first", tmp_path / "run")
    before = files(tmp_path / "run")
    epsilons("attack", "run", "-o", "run/attack", *SHADOWS).is_refused(2, "outside of any run")
    assert files(tmp_path / "run") == before


# -- configs that cannot be attacked -----------------------------------------------------------------------------


def test_a_number_to_predict_is_refused_with_what_to_do():
    change('target = "label"\nclasses = ["no", "yes"]\ndrop = ["id"]', 'target = "age"\ndrop = ["id", "label"]')
    change("age = [0, 100]\n", "")
    change("lr = 0.2", 'lr = 0.2\nloss = "mse"')
    epsilons("attack", "people.toml", *SHADOWS).is_refused(2, "predicts a number", "classes")


def test_without_test_data_rmia_is_left_out_and_the_message_says_what_to_set():
    change("test_share = 0.25\n", "")
    outcome = epsilons("attack", "people.toml", *SHADOWS)
    outcome.succeeded("lira-shrunk")
    assert "data.test_share" in outcome.err
    assert "rmia" not in outcome.out
    epsilons("attack", "people.toml", *SHADOWS, "--attacks", "rmia").is_refused(2, "data.test_share")


def test_a_model_of_one_s_own_is_attacked_one_by_one(tmp_path):
    (tmp_path / "mine.py").write_text(
        "from torch import nn\n"
        "def net():\n"
        "    return nn.Sequential(nn.Linear(8, 4), nn.LayerNorm(4), nn.Tanh(), nn.Linear(4, 2))\n"
    )
    change('name = "mlp"\noptions = { hidden = [4] }', 'name = "mine:net"')
    outcome = epsilons("attack", "people.toml", *SHADOWS, "--json", "--trust")
    outcome.succeeded()
    setting = json.loads(outcome.out)["setting"]
    assert setting["method"] == "alone"
    assert "LayerNorm" in setting["why"]


@pytest.mark.slow
def test_a_model_of_one_s_own_is_attacked_by_several_processes(tmp_path):
    test_a_model_of_one_s_own_is_attacked_one_by_one(tmp_path)
    one = (tmp_path / "attacks/people-1/membership.json").read_bytes()
    epsilons("attack", "people.toml", "--shadows", "8", "--jobs", "2", "-q", "--trust").succeeded()
    assert (tmp_path / "attacks/people-2/membership.json").read_bytes() == one


def test_the_help_teaches_with_examples():
    outcome = epsilons("attack", "--help")
    outcome.succeeded("--placebo", "epsilons attack runs/people-1", "--resume", "no guarantee covers them")


def test_the_demonstration_has_a_line_of_membership(monkeypatch):
    monkeypatch.setattr(demo, "SHADOWS", 8)
    budgets = cli.demo.Budgets.from_shares(demo.SHARES, records=1437, seed=0)
    plan = demo.planning.plan(budgets, demo.Recipe(steps=3, batch_size=100, clip_norm=1.0), "sample", "rdp")
    line = demo.membership_line(demo.Digits.load(), plan)
    assert re.fullmatch(
        r"Membership inference .* 8 shadow models: AUC (0\.\d{3}, ){2}0\.\d{3} for ε = 0\.5, 1, 2; .*", line
    )


def test_an_attack_leaves_a_signed_run_as_it_is(attacked, tmp_path):
    run = shutil.copytree(attacked / "runs/first", tmp_path / "run")
    signatures.new_key(Path("officer.pem"))
    signatures.sign(run, Path("officer.pem"), "A. Meyer", "board")
    before = {file.name: file.read_bytes() for file in run.glob("*.*")}
    outcome = epsilons("attack", run, "-o", "attacks/second", *SHADOWS, "--attacks", "loss")
    outcome.succeeded()
    assert "is signed, so it stays as it is" in " ".join(outcome.err.split())
    assert {file.name: file.read_bytes() for file in run.glob("*.*")} == before
    epsilons("verify", run).succeeded("A. Meyer (board) signed the run on")
    assert files(tmp_path / "attacks/second") == FILES
    shown = json.loads(epsilons("report", run, "--json").out)["membership"]
    assert shown["attacks"][0]["attack"] != "loss"  # that of the first attack, which was signed
