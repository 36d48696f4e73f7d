"""Bad input through the command line: one short message, the right exit code, no traceback, nothing half-written."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from epsilons import Private, cli
from epsilons.cli import console, train_config

RECIPE = ["--batch-size", "10", "--steps", "10", "--accountant", "rdp"]
SHARES = ["--shares", "1:50%,4:50%", "--records", "100", "--delta", "1e-3"]

CONFIG = """
[data]
train = "people.csv"
test = "held-out.csv"
target = "label"
classes = ["no", "yes"]
[data.numeric]
age = [0, 100]
[data.categorical]
town = ["north", "south"]
[budgets]
delta = 1e-3
[model]
name = "logistic"
[training]
steps = 5
batch_size = 10
[privacy]
accountant = "rdp"
"""


def table(records: int = 60, *, seed: int = 0, extra: str = "") -> str:
    """A CSV of people: age, town, label, epsilon."""
    rng = np.random.default_rng(seed)
    rows = [
        f"{rng.integers(18, 90)},{rng.choice(['north', 'south'])},{rng.choice(['no', 'yes'])},{rng.choice([1, 4])}"
        for _ in range(records)
    ]
    return "age,town,label,epsilon\n" + "\n".join(rows) + "\n" + extra


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder with a config, its two tables, and nothing else; we are in it."""
    (tmp_path / "people.csv").write_text(table())
    (tmp_path / "held-out.csv").write_text(table(20, seed=1))
    (tmp_path / "people.toml").write_text(CONFIG)
    monkeypatch.chdir(tmp_path)
    return tmp_path


class Outcome:
    def __init__(self, code: int, run_dir: str, err: str) -> None:
        self.code, self.out, self.err = code, run_dir, err

    def is_refused(self, code: int, *words: str) -> None:
        assert self.code == code, self.err + self.out
        assert self.err.startswith("epsilons: "), self.err
        assert self.err.count("\n") == 1, self.err
        assert len(self.err) < 600, self.err
        for word in words:
            assert word in self.err, self.err


@pytest.fixture
def epsilons(monkeypatch, capsys):
    """The program, in this process: what it prints and how it ends."""

    def run(*arguments: object) -> Outcome:
        monkeypatch.setattr(sys, "argv", ["epsilons", *map(str, arguments)])
        monkeypatch.setattr(sys, "path", list(sys.path))
        with pytest.raises(SystemExit) as ended:
            cli.main()
        printed = capsys.readouterr()
        return Outcome(int(ended.value.code or 0), printed.out, printed.err)

    return run


def files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


# -- budgets ---------------------------------------------------------------------------------------------------------


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
        ("a,b\n1\n2,3,4\n", "epsilon", ["cannot be read as csv"]),
    ],
    ids=["missing", "wrong column", "text", "negative", "NaN", "infinite", "empty cell", "ragged"],
)
def test_budgets_that_cannot_be_read(content, column, words, tmp_path, monkeypatch, epsilons):
    monkeypatch.chdir(tmp_path)
    if content is not None:
        (tmp_path / "wishes.csv").write_text(content)
    before = files(tmp_path)
    outcome = epsilons("plan", "--budgets", "wishes.csv", "--column", column, *RECIPE, "-o", "plan.json")
    outcome.is_refused(2, *words)
    assert "plenty" not in outcome.err
    assert files(tmp_path) == before


def test_tiers_by_name_are_read_and_an_unknown_one_is_refused_without_being_quoted(tmp_path, monkeypatch, epsilons):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "wishes.csv").write_text("tier\n" + "strict\nopen\n" * 30)
    given = ["plan", "--budgets", "wishes.csv", "--column", "tier", "--delta", "1e-3", *RECIPE]
    assert epsilons(*given, "--tiers", "strict:1,open:4", "-o", "plan.json").code == 0
    assert [row["epsilon"] for row in json.loads((tmp_path / "plan.json").read_text())["groups"]] == [1.0, 4.0]
    (tmp_path / "wishes.csv").write_text("tier\nstrict\nsecretive\n")
    outcome = epsilons(*given, "--tiers", "strict:1,open:4")
    outcome.is_refused(2, "Fewer than 20 cells", "'strict', 'open'", "No record holds: 'open'")
    assert "secretive" not in outcome.err
    epsilons(*given, "--tiers", "strict").is_refused(2, "name:epsilon")


def test_a_misspelt_tier_is_named_and_who_chose_it_is_not_pointed_at(tmp_path, monkeypatch, epsilons):
    monkeypatch.chdir(tmp_path)
    given = ["plan", "--budgets", "wishes.csv", "--column", "tier", "--delta", "1e-3", *RECIPE]

    def told(research: int, tiers: str = "strict:1,open:4,resarch:8") -> str:
        cells = ["strict", "open"] * 100
        cells[37:37] = ["research"] * research
        (tmp_path / "wishes.csv").write_text("\n".join(["tier", *cells]) + "\n")
        outcome = epsilons(*given, "--tiers", tiers)
        outcome.is_refused(2, "are not the name of a tier")
        return outcome.err

    for few in (1, 19):
        assert "Fewer than 20 cells of column 'tier'" in told(few)
        assert "No record holds: 'resarch'." in told(few)
        assert "the first is" not in told(few)
    assert told(1) == told(19)
    assert "20 of 220 cells" in told(20)
    assert "the first is row 37" in told(20)
    assert "No record holds: 'resarch'." in told(20)
    assert "No record holds" not in told(20, "strict:1,open:4")


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["--shares", "1:50%,2:40%", "--records", "100"], 2, ["add up to 1", "0.9"]),
        ([*SHARES, "--budgets", "x.csv"], 2, ["not both"]),
        ([*SHARES, "--batch-size", "101"], 2, ["101", "larger than the data", "100"]),
        ([*SHARES, "--steps", "0"], 2, ["at least 1", "0 arrived"]),
        ([*SHARES, "--delta", "0"], 2, ["delta must lie between 1e-09 and 1"]),
        ([*SHARES, "--delta", "1"], 2, ["delta must lie between 1e-09 and 1"]),
        ([*SHARES, "--delta", "1e-10"], 2, ["delta must lie between 1e-09 and 1"]),
        ([*SHARES, "--delta", "tiny"], 2, ["'--delta'", "number", "See: epsilons plan --help"]),
        (["--shares", "0.01:100%", "--records", "1000"], 3, ["out of reach", "less than epsilon ="]),
        ([*SHARES, "--strategy", "scales"], 2, ["'scales'", "uniform, sample, scale"]),
        ([*SHARES, "--no-such-flag"], 2, ["--no-such-flag", "epsilons plan --help"]),
        ([*SHARES, "--records", "many"], 2, ["'--records'", "integer"]),
    ],
)
def test_what_cannot_be_planned(arguments, code, words, tmp_path, monkeypatch, epsilons):
    monkeypatch.chdir(tmp_path)
    epsilons("plan", *RECIPE, *arguments, "-o", "plan.json").is_refused(code, *words)
    assert not files(tmp_path)


def test_the_smallest_budget_in_reach_that_the_message_names_can_be_reached(epsilons):
    told = epsilons("plan", "--shares", "0.01:100%", "--records", "1000", *RECIPE).err
    floor = float(told.partition("epsilon = ")[2].split()[0])
    assert epsilons("plan", "--shares", f"{floor * 1.01}:100%", "--records", "1000", *RECIPE).code == 0


@pytest.mark.filterwarnings("default::epsilons.errors.EpsilonsWarning")
def test_a_delta_of_one_in_the_number_of_records_is_warned_of_in_one_line(epsilons):
    outcome = epsilons("plan", "--shares", "1:100%", "--records", "1000", "--delta", "1e-3", *RECIPE)
    assert outcome.code == 0
    assert outcome.err.startswith("epsilons: warning: delta is not below 1/records")
    assert outcome.err.count("\n") == 1


# -- plans and folders -----------------------------------------------------------------------------------------------


def test_a_plan_for_other_data_is_refused(folder, epsilons):
    shares = ["--shares", "1:50%,4:50%", "--records", "60000"]
    assert epsilons("plan", *shares, "--batch-size", "512", "--steps", "5", "-o", "plan.json").code == 0
    before = files(folder)
    outcome = epsilons("train", "people.toml", "--plan", "plan.json", "--quiet")
    outcome.is_refused(2, "60,000 records", "60 budgets", "Plan again")
    assert files(folder) == before


def test_a_plan_that_is_cut_off_or_newer_is_refused(folder, epsilons):
    epsilons("plan", *SHARES, *RECIPE, "-o", "plan.json")
    whole = Path("plan.json").read_text()
    Path("plan.json").write_text(whole[: len(whole) // 2])
    epsilons("train", "people.toml", "--plan", "plan.json").is_refused(2, "not whole JSON")
    Path("plan.json").write_text(json.dumps(json.loads(whole) | {"schema": 99}))
    epsilons("train", "people.toml", "--plan", "plan.json").is_refused(2, "newer", "schema 99", "upgrade")
    epsilons("train", "people.toml", "--plan", "nowhere.json").is_refused(2, "No plan at nowhere.json")


def test_a_folder_that_cannot_be_written_or_holds_another_run_is_refused(folder, epsilons):
    before = files(folder)
    epsilons("train", "people.toml", "--run-dir", "people.csv/run").is_refused(2, "people.csv/run", "cannot be used")
    epsilons("train", "people.toml", "--run-dir", "people.csv").is_refused(2, "holds something already")
    assert files(folder) == before
    assert epsilons("train", "people.toml", "--run-dir", "runs/one", "--quiet").code == 0
    after = files(folder)
    epsilons("train", "people.toml", "--run-dir", "runs/one").is_refused(2, "another run", "does not exist yet")
    assert files(folder) == after


# -- configs ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("steps = 5", "stepz = 5", ["[training] has no key 'stepz'", "did you mean 'steps'"]),
        ("[privacy]", "[privaci]", ["no key 'privaci'", "did you mean 'privacy'"]),
        ("steps = 5", "steps = 0", ["training.steps", "greater than or equal to 1", "0 arrived"]),
        ("steps = 5", "steps = 5\nepochs = 2", ["either steps or epochs"]),
        ("steps = 5", "", ["either steps or epochs"]),
        ("batch_size = 10", "", ["training.batch_size is missing"]),
        ("batch_size = 10", "batch_size = 61", ["larger than the data", "60"]),
        ("batch_size = 10", 'batch_size = "ten"', ["training.batch_size", "number", "'ten' arrived"]),
        ("steps = 5", "steps = = 5", ["not TOML", "line"]),
        ('target = "label"', 'target = "labels"', ["'label'", "data."]),
        ('target = "label"', 'target = "epsilon"', ["'epsilon' cannot be both data.target and budgets.column"]),
        ('classes = ["no", "yes"]', "", ["data.classes"]),
        ('classes = ["no", "yes"]', 'classes = ["no"]', ["people.csv", "not among the 1 classes"]),
        ("age = [0, 100]", "", ["'age'", "[data.numeric]"]),
        ("age = [0, 100]", "age = [100, 0]", ["data.numeric", "low < high"]),
        ("age = [0, 100]", "age = [0, 100]\nepsilon = [0, 10]", ["'epsilon'", "cannot be an input"]),
        ('town = ["north", "south"]', "town = 0", ["data.categorical"]),
        ("[budgets]", '[budgets]\ncolumn = "eps"', ["'eps'"]),
        ("[budgets]", "[budgets]\ntiers = { open = 0.0 }", ["budgets.tiers.open", "greater than 0"]),
        ("[budgets]", '[budgets]\nfile = "held-out.csv"', ["20 budgets", "60 records"]),
        ("[budgets]", "[budgets]\nshares = { a = 1 }", ["'a' is no number"]),
        ('train = "people.csv"', 'train = "nowhere.csv"', ["No training data file"]),
        ('train = "people.csv"', 'train = "imagenet"', ["'imagenet'", "digits, mnist"]),
        ('test = "held-out.csv"', 'test = "held-out.csv"\ntest_share = 0.5', ["either test or test_share"]),
        ('name = "logistic"', 'name = "logistics"', ["'logistics'", "logistic, mlp", "package.module:callable"]),
        ('name = "logistic"', 'name = "nowhere:Model"', ["nowhere:Model", "cannot be imported", "config's folder"]),
        ('name = "logistic"', 'name = "json:Model"', ["json has no callable 'Model'"]),
        ('name = "logistic"', 'name = "json:dumps"\noptions = {obj = 1}', ["returned a str", "nn.Module"]),
        ('name = "logistic"', 'name = "logistic"\noptions = {depth = 2}', ["no option 'depth'"]),
        ('name = "logistic"', 'name = "mlp"\noptions = {hidden = "wide"}', ["hidden", "[64, 64]"]),
        ('name = "logistic"', 'name = "mnist-cnn"', ["(1, 28, 28)", "(3,)"]),
        ("steps = 5", 'steps = 5\ndevice = "abacus"', ["'abacus'", "auto"]),
        ("[data]", '[performance]\nengine = "steam"\n\n[data]', ["'steam'", "loop"]),
        ("steps = 5", 'steps = 5\nloss = "mse"', ["predicts a number", "leave out data.classes"]),
        ('accountant = "rdp"', 'accountant = "abacus"', ["'abacus'", "pld"]),
        ('accountant = "rdp"', 'strategy = "scaled"', ["'scaled'", "scale"]),
        ('accountant = "rdp"', 'options = {strategy = "scale"}', ["'strategy' is not", "in a config a key"]),
        ("steps = 5", "steps = 5\nseeds = [0, 0]", ["one seed twice"]),
        ('test = "held-out.csv"', 'test = "people.csv"', ["data.test is data.train"]),
        ('test = "held-out.csv"', "test_share = 0.999", ["test_share = 0.999", "none of the 60 records"]),
        ("[budgets]", '[budgets]\nshares = { "1" = 1 }\ndelta_column = "d"', ["leave out delta_column"]),
        ('town = ["north", "south"]', 'town = ["North"]', ["'town'", "'North'", "Spell them"]),
    ],
)
def test_a_config_that_is_wrong_is_told_apart(old, new, words, folder, epsilons):
    text = Path("people.toml").read_text()
    assert old in text
    Path("people.toml").write_text(text.replace(old, new, 1))
    before = files(folder)
    epsilons("train", "people.toml", "--quiet").is_refused(2, *words)
    assert files(folder) == before


def test_a_number_to_predict_that_is_none_is_refused(folder, epsilons):
    text = CONFIG.replace('classes = ["no", "yes"]\n', "").replace("steps = 5", 'steps = 5\nloss = "mse"')
    Path("people.toml").write_text(text)
    epsilons("train", "people.toml").is_refused(2, "people.csv", "not numbers")


def test_a_new_class_in_the_test_data_is_refused_by_row_and_not_by_its_name(folder, epsilons):
    Path("held-out.csv").write_text(table(20, seed=1, extra="33,north,perhaps,1\n"))
    outcome = epsilons("train", "people.toml")
    outcome.is_refused(2, "1 of 21 rows of held-out.csv", "'label'", "row 20", "data.classes")
    assert "perhaps" not in outcome.err


def test_a_missing_config_leads_to_init(folder, epsilons):
    epsilons("train", "nowhere.toml").is_refused(2, "No config at nowhere.toml", "epsilons init")


def test_init_refuses_what_it_cannot_read_and_what_exists(folder, epsilons):
    epsilons("init", "people.csv").is_refused(2, "people.toml exists already", "-o")
    epsilons("init", "nowhere.csv", "-o", "new.toml").is_refused(2, "No data file at nowhere.csv")
    epsilons("init", "people.xlsx", "-o", "new.toml").is_refused(2, "people.xlsx", "neither")
    epsilons("init", "people.csv", "--target", "lable", "-o", "new.toml").is_refused(2, "'lable'", "'label'")
    assert not Path("new.toml").exists()


@pytest.mark.parametrize(("mark", "name"), [(";", "semicolons"), ("\t", "tabs")])
def test_a_table_without_commas_is_refused_with_how_to_convert_it_and_no_row_is_quoted(mark, name, folder, epsilons):
    Path("people.csv").write_text(table().replace(",", mark))
    epsilons("train", "people.toml").is_refused(2, "people.csv", f"separated by {name}", "commas are needed", "to_csv")
    headless = table().replace(",", mark).split("\n", 1)[1]
    Path("people.csv").write_text(headless)
    outcome = epsilons("init", "people.csv", "-o", "new.toml")
    outcome.is_refused(2, "people.csv", f"separated by {name}", "commas are needed", "to_csv")
    assert headless.split("\n")[0] not in outcome.err
    assert not Path("new.toml").exists()


@pytest.mark.parametrize("old", ["north", "town", "no,"], ids=["values", "name", "classes"])
def test_text_that_is_not_utf8_is_refused_with_how_to_convert_it(old, folder, epsilons):
    Path("people.csv").write_bytes(table().replace(old, "ö" + old).encode("latin-1"))
    words = ["people.csv is not UTF-8", "iconv -f latin1 -t utf-8 people.csv"]
    epsilons("train", "people.toml").is_refused(2, *words)
    epsilons("init", "people.csv", "-o", "new.toml").is_refused(2, *words)
    Path("people.csv").write_bytes(table().encode("utf-16"))
    epsilons("init", "people.csv", "-o", "new.toml").is_refused(2, "not UTF-8")
    assert not Path("new.toml").exists()


def test_a_column_that_is_left_out_may_be_written_in_anything(folder, epsilons):
    text = "".join(f"{'name' if i == 0 else 'Jörg'},{line}\n" for i, line in enumerate(table().splitlines()))
    Path("people.csv").write_bytes(text.encode("latin-1"))
    Path("people.toml").write_text(CONFIG.replace("[data.numeric]", 'drop = ["name"]\n[data.numeric]'))
    assert epsilons("train", "people.toml", "--quiet").code == 0


def test_init_does_not_predict_the_budgets(folder, epsilons):
    both = ["--target", "epsilon", "--budget", "epsilon"]
    epsilons("init", "people.csv", "-o", "new.toml", *both).is_refused(2, "'epsilon'", "both --target and --budget")
    epsilons("init", "people.csv", "-o", "new.toml", "--target", "epsilon").is_refused(2, "both --target and --budget")
    Path("wishes.csv").write_text("epsilon\n1\n2\n")
    epsilons("init", "wishes.csv").is_refused(2, "no column to predict")
    assert not Path("new.toml").exists()
    assert not Path("wishes.toml").exists()


# -- Ctrl-C ----------------------------------------------------------------------------------------------------------


def test_ctrl_c_says_what_was_charged_and_how_to_go_on(folder):
    Path("people.toml").write_text(CONFIG.replace("steps = 5", "steps = 200000"))
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
    run_dir, err = process.communicate(timeout=60)
    assert process.returncode == 130, run_dir + err
    assert "Traceback" not in err
    told = err.splitlines()[-1]
    assert told.startswith("epsilons: interrupted after ")
    assert "of 200,000 steps" in told
    assert "epsilons train people.toml --run-dir runs/one --resume" in told
    charged = int(told.split()[3].replace(",", ""))
    updates = [line for line in map(json.loads, ledger.read_text().splitlines()) if line["kind"] == "update"]
    assert 0 <= charged - len(updates) <= 1  # the last one may have been charged and not made


# -- going on -----------------------------------------------------------------------------------------------


def test_resume_where_there_is_nothing_to_go_on_with_trains_nobody(folder, epsilons):
    for options in ((), ("--run-dir", "runs/mistyped")):
        outcome = epsilons("train", "people.toml", "--resume", *options)
        assert outcome.code == 2
        assert "holds no run to go on with" in outcome.err
    assert not Path("runs").exists()


def cut_off(run: Callable[..., Outcome], monkeypatch: pytest.MonkeyPatch, steps: int = 50) -> None:
    """A run of runs/one that ended after its 30th update, with a checkpoint after the 20th."""
    changed = CONFIG.replace("steps = 5", f"steps = {steps}\ncheckpoint_every = 20")
    Path("people.toml").write_text(changed)

    def press(private: Private) -> None:
        if private.updates == 30:
            raise KeyboardInterrupt

    def fit(*given: Any, callbacks: list[Any], **options: Any) -> Any:
        return real(*given, callbacks=[*callbacks, press], **options)

    real = train_config.fit
    with monkeypatch.context() as patched:
        patched.setattr(train_config, "fit", fit)
        assert run("train", "people.toml", "--run-dir", "runs/one").code == 130


def test_a_run_that_goes_on_under_another_config_says_so(folder, epsilons, monkeypatch):
    cut_off(epsilons, monkeypatch)
    same = Path("people.toml").read_text()
    Path("people.toml").write_text(
        same.replace("steps = 50", "steps = 7").replace("batch_size = 10", "batch_size = 11")
    )
    outcome = epsilons("train", "people.toml", "--run-dir", "runs/one", "--resume")
    assert outcome.code == 0, outcome.err
    assert "The config asks for another: steps, batch_size" in " ".join(outcome.out.split())
    assert "new key" not in outcome.err


def test_a_run_goes_on_where_the_config_s_own_plan_cannot_be_made(folder, epsilons, monkeypatch):
    cut_off(epsilons, monkeypatch)
    Path("people.toml").write_text(Path("people.toml").read_text().replace("batch_size = 10", "batch_size = 5000"))
    epsilons("train", "people.toml", "--run-dir", "runs/two").is_refused(2, "batch", "5000")
    outcome = epsilons("train", "people.toml", "--run-dir", "runs/one", "--resume")
    assert outcome.code == 0, outcome.err
    assert "The config asks for another: one that cannot be made." in " ".join(outcome.out.split())


@pytest.mark.parametrize(
    ("steps", "consequence"),
    [
        (100, "steps from 30 on are charged again"),
        (50, "steps that were charged already leave none to make again"),  # a block is reserved ahead
    ],
)
def test_steps_that_are_charged_again_are_told_of(steps, consequence, folder, epsilons, monkeypatch):
    cut_off(epsilons, monkeypatch, steps)
    same = Path("people.toml").read_text()
    Path("people.toml").write_text(same.replace(f"steps = {steps}", f"steps = {steps}\nlr = 0.01"))
    outcome = epsilons("train", "people.toml", "--run-dir", "runs/one", "--resume")
    assert outcome.code == 0, outcome.err
    assert f"it goes on under a new key, and {consequence}." in " ".join(outcome.err.split())
    assert "The config asks for another" not in outcome.out


# -- tables -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [200, 80, 30])
def test_a_table_on_the_terminal_loses_no_digit(width):
    headers = ["epsilon", "noise multiplier", "epsilon at 1e-9", "steps"]
    rows = [["1", "3.0832", "1.5179", "10,000"], ["2", "1.7701", "2.9817", "10,000"]]
    for is_terminal in (True, False):
        file = io.StringIO()
        console.show_table(
            (headers, rows), Console(file=file, width=width, force_terminal=is_terminal, color_system=None)
        )
        words = file.getvalue().split()
        assert "…" not in file.getvalue()
        assert all(cell in words for row in rows for cell in row)
        assert is_terminal is False or width == 30 or max(map(len, file.getvalue().splitlines())) <= width
