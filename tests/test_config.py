"""Training by a config, from a table to a run's folder; and configs and plans mangled in a thousand ways."""

from __future__ import annotations

import contextlib
import io
import json
import math
import shutil
import signal
import sys
import tempfile
import tomllib
import warnings
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file

import epsilons
from epsilons import cli
from epsilons.budgets import Budgets
from epsilons.cli import config as configs
from epsilons.cli.config import TrainingSection, reference
from epsilons.cli.prepare import prepare

ROOT = Path(__file__).parent.parent
CONFIG = """
[data]
train = "people.csv"
test_share = 0.25
target = "label"
classes = ["no", "yes"]
drop = ["id"]
[data.numeric]
age = [0, 100]
income = [0, 100000, "log"]
[data.categorical]
town = ["north", "south"]
job = 4
[budgets]
column = "epsilon"
delta = 1e-3
[model]
name = "mlp"
options = { hidden = [4] }
[training]
steps = 4
batch_size = 10
lr = 0.2
[privacy]
strategy = "scale"
accountant = "rdp"
"""


def people(records: int = 80) -> str:
    rng = np.random.default_rng(0)
    lines = ["id,age,income,town,job,label,epsilon"]
    for i in range(records):
        town, job = rng.choice(["north", "south", "east"]), rng.choice(["smith", "baker", "clerk"])
        label, epsilon = rng.choice(["no", "yes"]), rng.choice([1, 4])
        lines.append(f"{i},{rng.integers(18, 90)},{rng.integers(0, 10**5)},{town},{job},{label},{epsilon}")
    return "\n".join(lines) + "\n"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "people.csv").write_text(people())
    (tmp_path / "people.toml").write_text(CONFIG)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(*arguments: object) -> tuple[int, str, str]:
    """The program in this process: exit code, stdout, stderr. A second of Ctrl-C ends what goes on for too long."""
    run_dir, err = io.StringIO(), io.StringIO()
    argv, path, show = sys.argv, list(sys.path), warnings.showwarning
    sys.argv = ["epsilons", *map(str, arguments)]
    try:
        with contextlib.redirect_stdout(run_dir), contextlib.redirect_stderr(err), warnings.catch_warnings():
            warnings.simplefilter("default")
            cli.main()
    except SystemExit as ended:
        return int(ended.code or 0), run_dir.getvalue(), err.getvalue()
    finally:
        sys.argv, sys.path[:], warnings.showwarning = argv, path, show
    raise AssertionError("main() returned")


def changed(old: str, new: str) -> None:
    text = Path("people.toml").read_text()
    assert old in text
    Path("people.toml").write_text(text.replace(old, new, 1))


# -- what comes of a config ------------------------------------------------------------------------------------------


def test_a_config_trains_and_keeps_who_was_tested_and_what_was_asked(folder):
    code, run_dir, err = run("train", "people.toml")
    assert code == 0, err
    assert "4 of 4 steps charged; test accuracy" in run_dir
    assert "epsilons report runs/people-1" in run_dir
    kept = {path.name for path in (folder / "runs/people-1").iterdir()}
    assert kept == {"plan.json", "run.json", "ledger.jsonl", "metrics.jsonl", "model.safetensors"}
    values = json.loads((folder / "runs/people-1/run.json").read_text())
    assert values["training"] == {
        "model": "Sequential",
        "parameters": (2 + 2 + 4) * 4 + 4 + 4 * 2 + 2,
        "loss": "cross_entropy",
        "optimizer": "sgd",
        "lr": 0.2,
        "momentum": 0.0,
        "device": values["training"]["device"],
    }
    assert values["eval_data"] == {"data": "private", "records": 20, "classes": ["no", "yes"]}
    assert values["metadata"]["config"]["data"]["train"] == "people.csv"
    assert values["metadata"]["simulated"] is False
    (row,) = [json.loads(line) for line in (folder / "runs/people-1/metrics.jsonl").read_text().splitlines()]
    right, records = np.array(row["per_class"]).sum(axis=0)
    assert (int(records), right / records) == (20, pytest.approx(row["accuracy"]))
    assert np.array(row["per_group"]).sum(axis=0).tolist() == [right, records]


def test_held_out_records_are_neither_trained_on_nor_charged_and_budgets_stay_with_their_records(folder):
    config = configs.read(Path("people.toml"))
    prepared = prepare(config, folder)
    everyone = np.array([float(line.split(",")[-1]) for line in people().splitlines()[1:]])
    own = prepared.budgets.epsilons[prepared.budgets.group]
    assert (len(own), len(prepared.test.targets)) == (60, 20)
    ages = np.array([float(line.split(",")[1]) for line in people().splitlines()[1:]]) / 50 - 1
    incomes = prepared.train.inputs[:, 1]
    pairs = {(round(a, 4), e) for a, e in zip(ages, everyone, strict=True)}
    assert {(round(float(a), 4), e) for a, e in zip(prepared.train.inputs[:, 0], own, strict=True)} <= pairs
    held = {row.tobytes() for row in prepared.test.inputs}
    assert len(held & {row.tobytes() for row in prepared.train.inputs}) == 0
    assert incomes.min() >= -1
    plan = prepared.plan()
    groups = prepared.test_groups(plan)
    np.testing.assert_array_equal(plan.epsilons[groups], prepared.test_budgets.epsilons[prepared.test_budgets.group])


def test_the_same_seed_gives_the_same_model_and_several_seeds_a_folder_each(folder):
    changed("steps = 4", "steps = 4\nseeds = [3, 5]")
    assert run("train", "people.toml", "--quiet") == (0, "", "")
    assert run("train", "people.toml", "-q", "--run-dir", "again") == (0, "", "")
    models = [(Path(place) / "model.safetensors").read_bytes() for place in
              ("runs/people-1/seed-3", "again/seed-3", "again/seed-5")]  # fmt: skip
    assert models[0] == models[1] != models[2]
    assert "seeded" in json.loads(Path("again/seed-3/run.json").read_text())["randomness"]


def test_json_is_all_that_is_printed_to_stdout_and_progress_goes_to_stderr(folder):
    code, run_dir, err = run("train", "people.toml", "--json")
    assert code == 0
    (told,) = json.loads(run_dir)["runs"]
    assert (told["charged"], told["steps"], told["path"]) == (4, 4, "runs/people-1")
    assert [(row["epsilon"], row["records"]) for row in told["groups"]] == [(1.0, 27), (4.0, 33)]
    assert all(0.99 * row["epsilon"] < row["charged"] <= row["certified"] <= row["epsilon"] for row in told["groups"])
    assert "charged 4/4" in err


def test_json_says_no_more_of_what_a_few_chose_than_the_printed_tables(folder):
    made = []
    for chosen in ("2.3", "3.1"):
        lines = people().splitlines()
        # Everyone's 1 or 4 stays, but for three people in training and testing.
        altered = [f"{line.rpartition(',')[0]},{chosen}" if 20 <= i < 40 and i % 7 == 0 else line
                   for i, line in enumerate(lines)]  # fmt: skip
        (folder / "people.csv").write_text("\n".join(altered) + "\n")
        code, run_dir, err = run("train", "people.toml", "--json", "--quiet", "--run-dir", f"of-{chosen}")
        assert code == 0, err
        (values,) = json.loads(run_dir)["runs"]
        assert "per_group" not in values["metrics"]
        assert "Withheld" in values["withheld"]
        made.append(values["groups"])
    assert made[0] == made[1]
    assert sum(row["records"] for row in made[0]) == 60
    assert all(row.keys() == {"label", "epsilon", "at_least", "at_most", "delta", "records"} for row in made[0])


@pytest.mark.skipif(not any(map(shutil.which, ("g++", "clang++"))), reason="NO C++ COMPILER HERE")
def test_a_config_may_ask_for_compiled_steps(folder):
    changed("lr = 0.2", "lr = 0.2\nseeds = [1]")
    changed("[data]", "[performance]\ncompile = true\n\n[data]")
    code, _, err = run("train", "people.toml", "--run-dir", "compiled")
    assert code == 0, err
    assert json.loads(Path("compiled/run.json").read_text())["performance"]["compile"] is True
    changed("compile = true", "compile = false")
    code, _, err = run("train", "people.toml", "--run-dir", "eager")
    assert code == 0, err
    assert json.loads(Path("eager/run.json").read_text())["performance"]["compile"] is False
    compiled, eager = (load_file(folder / name / "model.safetensors") for name in ("compiled", "eager"))
    for name, values in eager.items():
        np.testing.assert_allclose(compiled[name], values, rtol=1e-5, atol=1e-6)


def test_a_plan_of_one_s_own_is_trained_under(folder):
    plan = prepare(configs.read(Path("people.toml")), folder)
    made = epsilons.plan(plan.budgets, epsilons.Recipe(steps=7, batch_size=12, clip_norm=0.5), "sample", "rdp")
    made.save("plan.json")
    code, run_dir, _ = run("train", "people.toml", "--plan", "plan.json")
    assert (code, "7 of 7 steps" in run_dir, "sample:" in run_dir) == (0, True, True)


def test_a_number_to_predict_has_a_loss_and_no_accuracy(folder):
    changed("steps = 4", 'steps = 4\nloss = "mse"')
    changed('target = "label"', 'target = "income"')
    changed('classes = ["no", "yes"]', "")
    changed("[data.categorical]", '[data.categorical]\nlabel = ["no", "yes"]')
    code, run_dir, err = run("train", "people.toml")
    assert (code, "test loss" in run_dir) == (0, True), err


def test_tiers_by_name_and_shares_are_said_to_be_what_they_are(folder):
    text = people().replace(",1\n", ",strict\n").replace(",4\n", ",open\n")
    Path("people.csv").write_text(text)
    changed("[budgets]", "[budgets]\ntiers = { strict = 0.5, open = 8 }")
    code, _, err = run("train", "people.toml", "--run-dir", "a")
    assert code == 0, err
    values = json.loads(Path("a/run.json").read_text())
    assert values["metadata"]["tiers"] == {"strict": 0.5, "open": 8.0}
    changed("tiers = { strict = 0.5, open = 8 }", 'shares = { "1" = 0.5, "2" = 0.5 }')
    code, run_dir, _ = run("train", "people.toml", "--run-dir", "b")
    assert (code, "SIMULATED budgets in 2 groups" in run_dir) == (0, True)
    assert json.loads(Path("b/run.json").read_text())["metadata"]["simulated"] is True


def test_named_data_bring_their_own_test_set(folder):
    Path("digits.toml").write_text(
        '[data]\ntrain = "digits"\n[budgets]\nshares = { "1" = 0.5, "2" = 0.5 }\n[model]\nname = "logistic"\n'
        '[training]\nsteps = 3\nbatch_size = 50\n[privacy]\naccountant = "rdp"\n'
    )
    code, run_dir, err = run("train", "digits.toml")
    assert (code, "1,437 records" in run_dir, "360 to test on" in run_dir) == (0, True, True), err


def test_tensorboard_holds_the_scores_and_what_each_group_was_charged(folder):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    changed("steps = 4", "steps = 4\ntest_every = 2")
    assert run("train", "people.toml", "--tensorboard", "-q")[0] == 0
    events = accumulator.EventAccumulator("runs/people-1-tensorboard")
    events.Reload()
    tags = set(events.Tags()["scalars"])
    assert tags == {"epsilon charged/of 1", "epsilon charged/of 4", "test/accuracy", "test/loss"}
    spent = [event.value for event in events.Scalars("epsilon charged/of 4")]
    assert spent == sorted(spent)
    assert 0 < spent[0] < spent[-1] <= 4
    assert [event.step for event in events.Scalars("test/loss")] == [2, 4]


# -- init ------------------------------------------------------------------------------------------------------------


def test_what_init_drafts_trains_as_it_stands(folder):
    Path("people.toml").unlink()
    code, run_dir, err = run("init", "people.csv")
    assert (code, "'label'" in run_dir, "'epsilon'" in run_dir, "'id'" in run_dir) == (0, True, True, True), err
    config = configs.read(Path("people.toml"))
    assert config.data.class_names == ("no", "yes")
    assert set(config.data.numeric) == {"age", "income"}
    assert set(config.data.categorical) == {"town", "job"}
    changed("epochs = 20", "steps = 2")
    code, run_dir, err = run("train", "people.toml")
    assert (code, "2 of 2 steps" in run_dir) == (0, True), err


def test_from_a_table_to_a_report_in_three_commands(folder):
    Path("people.toml").unlink()
    assert run("init", "people.csv")[0] == 0
    assert run("train", "people.toml")[0] == 0
    code, run_dir, err = run("report", "runs/people-1")
    assert (code, run_dir.count("may leave the house"), run_dir.count("CONFIDENTIAL")) == (0, 2, 2), err
    internal = json.loads(Path("runs/people-1/report.json").read_text())
    assert internal["status"]["state"] == "finished"
    assert [cell["label"] for cell in internal["accuracy"]["classes"]] == ["no", "yes"]
    assert sum(cell["records"] for cell in internal["accuracy"]["groups"]) == 16
    released = json.loads(Path("runs/people-1/report-release.json").read_text())
    assert released["accuracy"] is None  # on people who were not declared public


def test_bounds_that_init_reads_off_the_data_hold_them_and_are_said_not_to_be_covered(folder):
    Path("people.toml").unlink()
    run("init", "people.csv", "-q")
    text = Path("people.toml").read_text()
    assert "READ OFF THE DATA, and so not covered" in text
    ages = [int(line.split(",")[1]) for line in people().splitlines()[1:]]
    low, high = tomllib.loads(text)["data"]["numeric"]["age"]
    assert low <= min(ages) <= max(ages) <= high


@pytest.mark.parametrize("name", ["mrn", "Patient", "person_id", "subject", "patientId", "visit.id", "ID"])
def test_init_leaves_out_who_somebody_is_and_asks_about_several_records_of_one_person(name, folder):
    Path("people.toml").unlink()
    header, *rows = people().splitlines()
    repeated = [f"{i // 4},{row.partition(',')[2]}" for i, row in enumerate(rows)]
    Path("people.csv").write_text("\n".join([header.replace("id", name, 1), *repeated]) + "\n")
    code, run_dir, err = run("init", "people.csv")
    told = f"'{name}' has 20 values in 80 rows: several records of one person? The guarantee is about one record"
    assert (code, told in run_dir, "pitfalls.md#several-records-of-one-person" in run_dir) == (0, True, True), (
        err + run_dir
    )
    assert told in Path("people.toml").read_text()
    config = configs.read(Path("people.toml"))
    assert config.data.drop == [name]
    assert set(config.data.categorical) == {"town", "job"}


def test_init_keeps_quiet_about_identifiers_that_do_not_repeat(folder):
    Path("people.toml").unlink()
    code, run_dir, _ = run("init", "people.csv")
    assert (code, "'id'" in run_dir, "several records" in run_dir) == (0, True, False)
    assert configs.read(Path("people.toml")).data.drop == ["id"]


def test_what_init_tells_is_printed_as_it_is_brackets_and_all(folder):
    Path("people.csv").write_text(people().replace("label", "[bold]label", 1).replace("epsilon", "worry", 1))
    code, run_dir, err = run("init", "people.csv", "--target", "[bold]label", "-o", "[red].toml")
    assert code == 0, err
    assert "Predicts: '[bold]label'" in run_dir
    assert "Name yours in [budgets]." in run_dir
    assert "Drafted [red].toml." in run_dir
    code, run_dir, _ = run("init", "digits")
    assert (code, "name a file of your own in [budgets]." in run_dir) == (0, True)


def test_tiers_without_an_epsilon_are_drafted_so_that_they_must_be_written(folder):
    Path("people.toml").unlink()
    Path("people.csv").write_text(people().replace(",1\n", ",strict\n").replace(",4\n", ",open\n"))
    code, run_dir, _ = run("init", "people.csv")
    assert (code, "WRITE DOWN" in run_dir) == (0, True)
    code, _, err = run("train", "people.toml")
    assert (code, "greater than 0" in err) == (2, True)
    changed("open = 0.0, strict = 0.0", "open = 4, strict = 1")
    changed("epochs = 20", "steps = 2")
    assert run("train", "people.toml")[0] == 0


def test_a_value_that_one_person_holds_is_not_written_into_a_draft(folder):
    Path("people.toml").unlink()
    Path("people.csv").write_text(people(200) + "200,40,10,Atlantis,smith,no,1\n")
    run("init", "people.csv", "-q")
    assert "Atlantis" not in Path("people.toml").read_text()


@pytest.mark.parametrize("odd", ['a "quoted" name', "naïve Ωmega", "with.dot", "with=equals", "x" * 300, "\t"])
def test_any_column_name_survives_the_draft(odd, folder):
    Path("people.toml").unlink()
    quoted = '"' + odd.replace('"', '""') + '"'
    Path("people.csv").write_text(people().replace("age", quoted, 1))
    assert run("init", "people.csv", "-q")[0] == 0
    assert odd in configs.read(Path("people.toml")).data.numeric


def test_named_data_are_drafted_with_simulated_budgets(folder):
    code, run_dir, _ = run("init", "digits")
    assert (code, "SIMULATED" in run_dir) == (0, True)
    changed_config = Path("digits.toml").read_text().replace("epochs = 20", "steps = 2")
    Path("digits.toml").write_text(changed_config)
    assert run("train", "digits.toml", "-q")[0] == 0


# -- how long an epoch is --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("convention", "records", "batch", "epochs", "steps", "expected"),
    [
        ("paper", 60_000, 512, 80, 9_375, 512.0),  # the paper's text for MNIST
        ("authors-code", 60_000, 512, 80, 9_440, 60_000 / 118),  # its published code
        ("authors-code", 73_257, 1_024, 30, 2_160, 73_257 / 72),
        ("authors-code", 50_000, 1_024, 30, 1_470, 50_000 / 49),
        ("paper", 50_000, 1_024, 30, 1_464, 1_024.0),
        ("paper", 100, 50, 0.1, 1, 50.0),  # never no step at all
    ],
)
def test_both_conventions_come_to_the_published_numbers(convention, records, batch, epochs, steps, expected):
    section = TrainingSection(epochs=float(epochs), batch_size=float(batch), convention=convention)
    recipe = section.recipe(records)
    assert (recipe.steps, recipe.batch_size) == (steps, pytest.approx(expected, rel=1e-12))


def test_the_reference_page_is_what_the_program_prints():
    assert (ROOT / "docs/config.md").read_text(encoding="utf-8") == reference()


def test_the_reference_page_says_which_optimizers_there_are_and_what_an_empty_cell_becomes():
    rows = {line.split("`")[1]: line for line in reference().splitlines() if line.startswith("| `")}
    for name in get_args(TrainingSection.model_fields["optimizer"].annotation):
        assert name in rows["optimizer"].partition("One of")[2]
    assert "empty cell becomes the middle" in rows["numeric"]


# -- mangled ---------------------------------------------------------------------------------------------------------

ODD: list[Any] = [
    *(None, True, -1, 0, 1, 2.5, 1e-12, 1e300, -1e300, 2**70, math.inf, math.nan),
    *([], [1], [[1]], {}, {"a": 1}),
    *("", "x", "nan", "no", "../..", "\x00", "people.csv", "label", "epsilon", "mlp", "torch.nn:Linear"),
]


def toml(value: Any) -> str:
    """A value as TOML; what TOML cannot say (null) is left as it is, and is one more thing to be refused."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(k)} = {toml(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(toml, value)) + "]"
    return json.dumps(value) if isinstance(value, str) or value is None else repr(value)


def places(value: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The way to every value within a nest of dicts and lists."""
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [at, *(place for key, part in inside for place in places(part, (*at, key)))][0 if at else 1 :]


@st.composite
def mangled(draw: st.DrawFn, whole: Any) -> Any:
    """A nest with one to three values replaced by odd ones, removed, or renamed."""
    made = json.loads(json.dumps(whole))
    for _ in range(draw(st.integers(1, 3))):
        found = places(made)
        if not found:
            break
        *way, last = draw(st.sampled_from(found))
        part = made
        for key in way:
            part = part[key]
        how = draw(st.sampled_from(["replace", "remove", "rename"]))
        if how == "replace" or isinstance(part, list):
            part[last] = draw(st.sampled_from(ODD))
        else:
            value = part.pop(last)
            if how == "rename":
                part[draw(st.sampled_from(["x", last + "s", last[:-1]]))] = value
    return made


@st.composite
def scribbled(draw: st.DrawFn, text: str) -> str:
    """A text with a few characters cut out, doubled or put in."""
    for _ in range(draw(st.integers(1, 4))):
        at, until = sorted(draw(st.tuples(st.integers(0, len(text)), st.integers(0, len(text)))))
        until = min(until, at + 12)
        text = text[:at] + draw(st.sampled_from(["", '"', "[", "]", "=", "\n", "0", "é", "\x00", "#"])) + text[until:]
    return text


class Watch:
    """Ends what goes on for too long as Ctrl-C would: a mangled config may ask for a very long training."""

    def __enter__(self) -> None:
        self.before = signal.signal(signal.SIGALRM, signal.default_int_handler)
        signal.alarm(10)

    def __exit__(self, *_: object) -> None:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, self.before)


def never_a_traceback(name: str, content: str, *arguments: str) -> None:
    with tempfile.TemporaryDirectory() as place, contextlib.chdir(place), Watch():
        Path("people.csv").write_text(people(40))
        Path("people.toml").write_text(CONFIG)
        Path(name).write_text(content, encoding="utf-8")
        code, run_dir, err = run("train", "people.toml", "--run-dir", "run", *arguments)
        assert code in (0, 2, 3, 130), err
        assert "Traceback" not in run_dir + err
        if code in (2, 3):
            said = [line for line in err.splitlines() if line.startswith("epsilons: ") and "warning" not in line]
            assert len(said) == 1, err
            assert len(err) < 2000, err
            assert not Path("run/model.safetensors").exists()


def plan_text() -> str:
    budgets = Budgets(np.repeat([1.0, 4.0], [15, 15]), delta=1e-3)
    return json.dumps(epsilons.plan(budgets, epsilons.Recipe(4, 10, 1.0), "scale", "rdp").to_dict())


# A share of the examples runs every time; the slow test runs a thousand.
MANY = settings(max_examples=250, deadline=None, suppress_health_check=list(HealthCheck), derandomize=False)
FEW = settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
KINDS = {
    "config, values": ("people.toml", mangled(tomllib.loads(CONFIG)).map(lambda v: "\n".join(
        f"{json.dumps(k)} = {toml(x)}" for k, x in v.items())), ()),
    "config, text": ("people.toml", scribbled(CONFIG), ()),
    "plan, values": ("plan.json", mangled(json.loads(plan_text())).map(json.dumps), ("--plan", "plan.json")),
    "plan, text": ("plan.json", scribbled(plan_text()), ("--plan", "plan.json")),
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_mangled_files_never_end_in_a_traceback(kind):
    name, contents, arguments = KINDS[kind]
    given(contents)(FEW(lambda content: never_a_traceback(name, content, *arguments)))()


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_thousand_mangled_files_never_end_in_a_traceback(kind):
    name, contents, arguments = KINDS[kind]
    given(contents)(MANY(lambda content: never_a_traceback(name, content, *arguments)))()


# -- columns that are no quantities ------------------------------------------------------------------------------------

DATES = ["2024-03-31", "2024/3/31", "31.3.2024", "3/31/2024", "31.03.24", "2024-03-31 10:15", "2024-03-31T10:15:00"]


def with_column(name: str, values: list[str], records: int = 80) -> str:
    """The table of people with one more column, whose cells are these in turn."""
    header, *rows = people(records).splitlines()
    cells = [f"{values[i % len(values)]},{row}" for i, row in enumerate(rows)]
    return "\n".join([f"{name},{header}", *cells]) + "\n"


@pytest.mark.parametrize("written", DATES)
@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_dates_are_left_out_by_init_and_refused_as_numbers_and_hashed(written, suffix, folder):
    Path("people.toml").unlink()
    Path("people.csv").write_text(with_column("visit", [written, written.replace("3", "2", 1), ""]))
    if suffix == "parquet":
        from pyarrow import csv, parquet

        parquet.write_table(csv.read_csv("people.csv"), "people.parquet")
    code, run_dir, err = run("init", f"people.{suffix}", "-o", "people.toml")
    assert (code, "WARNING: 'visit' holds dates" in run_dir) == (0, True), err + run_dir
    text = Path("people.toml").read_text()
    assert "# visit holds dates" in text
    assert configs.read(Path("people.toml")).data.drop == ["visit", "id"]
    changed("epochs = 20", "steps = 2")
    assert run("train", "people.toml", "--run-dir", "left-out")[0] == 0
    Path("people.toml").write_text(text.replace('drop = ["visit", "id"]', 'drop = ["id"]'))
    draft = Path("people.toml").read_text()
    for section, line in (("data.categorical", "visit = 64"), ("data.numeric", "visit = [0, 1]")):
        Path("people.toml").write_text(draft.replace(f"[{section}]", f"[{section}]\n{line}\n#", 1))
        code, run_dir, err = run("train", "people.toml", "--run-dir", "refused")
        assert (code, "Column 'visit'" in err, "holds dates" in err, "data.drop" in err) == (2, True, True, True), err
    listed = draft.replace("[data.categorical]", f'[data.categorical]\nvisit = ["{written}"]\n#', 1)
    Path("people.toml").write_text(listed.replace("epochs = 20", "steps = 2"))
    if suffix == "csv":
        assert run("train", "people.toml", "--run-dir", "listed")[0] == 0


@pytest.mark.parametrize("values", [["1.2.345", "4.5.67"], ["12-13-14", "50-60-70"], ["a/b/c"], ["2024"], ["10:15"]])
def test_what_is_no_date_is_hashed_as_before(values, folder):
    Path("people.csv").write_text(with_column("version", values))
    changed("job = 4", "job = 4\nversion = 8")
    assert run("train", "people.toml")[0] == 0


@pytest.mark.parametrize(
    ("name", "values", "expected"),
    [
        ("zip", [str(10000 + 7 * i) for i in range(80)], "a code"),
        ("Postal_Code", [str(10000 + 7 * i) for i in range(80)], "a code"),
        ("plz", ["10115", "80331"], "a code"),
        ("icd_code", ["401", "250"], "a code"),
        ("branch", ["007", "112", "042"], "a code"),
        ("height", [str(150 + i) for i in range(40)], ""),
        ("zip", ["1.5", "2.5"], ""),
        ("encoded", ["3", "4"], ""),
        ("earned", [str(1000 + 13 * i) for i in range(1500)], "either"),
        ("earned", [str(1000 + 13 * i) for i in range(400)], ""),
    ],
)
@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_numbers_that_look_like_codes_are_named_in_the_draft_and_on_the_screen(name, values, expected, suffix, folder):
    if suffix == "parquet" and name == "branch":
        pytest.skip("numbers of a .parquet file have no leading zeros")
    Path("people.toml").unlink()
    Path("people.csv").write_text(with_column(name, values, max(80, len(values))))
    if suffix == "parquet":
        from pyarrow import csv, parquet

        parquet.write_table(csv.read_csv("people.csv"), "people.parquet")
    code, run_dir, err = run("init", f"people.{suffix}", "-o", "people.toml")
    told = [line for line in run_dir.splitlines() if line.startswith("WARNING") and "may be codes" in line]
    assert (code, any(f"'{name}'" in line for line in told)) == (0, expected != ""), err + run_dir
    data = configs.read(Path("people.toml")).data
    assert (name in data.categorical, name in data.numeric) == (expected == "a code", expected != "a code")
    (line,) = [line for line in Path("people.toml").read_text().splitlines() if line.startswith(f"{name} =")]
    assert ("#" in line) is (expected != "")
    changed("epochs = 20", "steps = 2")
    assert run("train", "people.toml")[0] == 0


def test_a_leading_zero_is_a_part_of_a_hashed_code(folder):
    """0123 and 123 are two places: the draft's column is read as it is written."""
    Path("people.csv").write_text(with_column("zip", ["0123", "123"]))
    changed("job = 4", "job = 4\nzip = 512")
    inputs = prepare(configs.read(Path("people.toml")), folder).train.inputs
    assert len(np.unique(inputs[:, -512:].argmax(1))) == 2


def test_a_target_of_one_class_is_refused(folder):
    Path("people.csv").write_text(people().replace(",no,", ",yes,"))
    code, _, err = run("train", "people.toml")
    assert (code, "All 60 targets of the training data are of one class" in err) == (2, True), err


@pytest.mark.parametrize("optimizer", ["adam", "adamw"])
def test_momentum_beside_another_optimizer_is_refused(optimizer, folder):
    changed("lr = 0.2", f'lr = 0.2\noptimizer = "{optimizer}"\nmomentum = 0.9')
    code, _, err = run("train", "people.toml")
    assert (code, "momentum is of sgd" in err, "betas" in err) == (2, True, True), err
    changed("momentum = 0.9", "momentum = 0.0")
    assert run("train", "people.toml", "--run-dir", "run")[0] == 0
    assert "momentum" not in json.loads(Path("run/run.json").read_text())["training"]
