"""Training by a config, from a table to a run's folder; the drafts of `init`; and damaged configs and plans."""

from __future__ import annotations

import contextlib
import json
import math
import re
import signal
import tempfile
import tomllib
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import trackers
from epsilons import Budgets, Recipe, plan
from epsilons.configs.config_file import read_config
from epsilons.configs.config_training import TrainingSection
from epsilons.configs.prepare import Prepared, prepare
from epsilons.errors import DataError
from epsilons.ledger.run_json import About
from program import CONFIG, change, epsilons, people

ROOT = Path(__file__).parent.parent


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The current folder, with a table and a config."""
    Path(tmp_path / "people.csv").write_text(people())
    Path(tmp_path / "people.toml").write_text(CONFIG)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def train(*arguments: object, words: tuple[str, ...] = ()) -> None:
    epsilons("train", "people.toml", *arguments).succeeded(*words)


def init(data: str = "people.csv", *arguments: str, words: tuple[str, ...] = ()) -> str:
    """Draft people.toml; returns what was printed."""
    Path("people.toml").unlink(missing_ok=True)
    outcome = epsilons("init", data, "-o", "people.toml", *arguments)
    outcome.succeeded(*words)
    return outcome.out


def prepared() -> Prepared:
    return prepare(read_config(Path("people.toml")), Path())


def written(path: str) -> Any:
    return json.loads(Path(path).read_text())


# -- training by a config --------------------------------------------------------------------------------------------


def test_a_run_records_its_config_its_training_and_its_test_data(folder):
    train(words=("4 of 4 steps charged; test accuracy", "epsilons report runs/people-1"))
    names = {path.name for path in (folder / "runs/people-1").iterdir()}
    assert names == {"plan.json", "run.json", "ledger.jsonl", "metrics.jsonl", "model.json", "model.safetensors"}
    values = written("runs/people-1/run.json")
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
    (row,) = [json.loads(line) for line in Path("runs/people-1/metrics.jsonl").read_text().splitlines()]
    right, records = np.array(row["per_class"]).sum(axis=0)
    assert (int(records), right / records) == (20, pytest.approx(row["accuracy"]))
    assert np.array(row["per_group"]).sum(axis=0).tolist() == [right, records]
    cells = np.array(row["per_class_group"])
    assert cells.sum(axis=0).tolist() == row["per_group"]
    assert cells.sum(axis=1).tolist() == row["per_class"]


def test_held_out_records_are_not_trained_on_and_budgets_stay_with_records(folder):
    data = prepared()
    rows = [line.split(",") for line in people().splitlines()[1:]]
    epsilon = data.budgets.epsilons[data.budgets.group]
    assert (len(epsilon), len(data.test.targets)) == (60, 20)
    pairs = {(round(float(row[1]) / 50 - 1, 4), float(row[-1])) for row in rows}
    assert {(round(float(a), 4), e) for a, e in zip(data.train.inputs[:, 0], epsilon, strict=True)} <= pairs
    assert not {row.tobytes() for row in data.test.inputs} & {row.tobytes() for row in data.train.inputs}
    assert data.train.inputs[:, 1].min() >= -1
    made = data.plan()
    np.testing.assert_array_equal(
        made.epsilons[data.test_groups(made)], data.test_owned.budgets.epsilons[data.test_owned.budgets.group]
    )


def test_one_seed_gives_one_model_and_several_seeds_a_folder_each(folder):
    change("steps = 4", "steps = 4\nseeds = [3, 5]")
    for arguments in (["--quiet"], ["-q", "--run-dir", "again"]):
        outcome = epsilons("train", "people.toml", *arguments)
        assert (outcome.code, outcome.out, outcome.err) == (0, "", "")
    run_dirs = ("runs/people-1/seed-3", "again/seed-3", "again/seed-5")
    models = [(Path(run_dir) / "model.safetensors").read_bytes() for run_dir in run_dirs]
    assert models[0] == models[1] != models[2]
    assert "seeded" in written("again/seed-3/run.json")["randomness"]


def test_with_json_stdout_is_json_and_progress_goes_to_stderr(folder):
    outcome = epsilons("train", "people.toml", "--json")
    (values,) = json.loads(outcome.out)["runs"]
    assert (values["charged"], values["steps"], values["path"]) == (4, 4, "runs/people-1")
    assert [(row["epsilon"], row["records"]) for row in values["groups"]] == [(1.0, 27), (4.0, 33)]
    assert all(0.99 * row["epsilon"] < row["charged"] <= row["certified"] <= row["epsilon"] for row in values["groups"])
    assert "charged 4/4" in outcome.err


def test_json_suppresses_small_groups_as_the_printed_tables_do(folder):
    groups = []
    for chosen in ("2.3", "3.1"):
        lines = people().splitlines()
        # all keep 1 or 4, but for three people in training and testing
        altered = [
            f"{line.rpartition(',')[0]},{chosen}" if 20 <= i < 40 and i % 7 == 0 else line
            for i, line in enumerate(lines)
        ]
        Path("people.csv").write_text("\n".join(altered) + "\n")
        outcome = epsilons("train", "people.toml", "--json", "--quiet", "--run-dir", f"of-{chosen}")
        (values,) = json.loads(outcome.out)["runs"]
        assert not {"per_group", "per_class_group"} & values["metrics"].keys()
        assert "Fewer than 20 records" in values["suppressed"]
        groups.append(values["groups"])
    assert groups[0] == groups[1]
    assert sum(row["records"] for row in groups[0]) == 60
    assert all(row.keys() == {"label", "epsilon", "at_least", "at_most", "delta", "records"} for row in groups[0])


def test_the_keys_of_performance_are_passed_to_the_training(folder):
    change("[data]", "[performance]\nengine = 'vmap'\nmax_physical_batch = 3\nchannels_last = true\n[data]")
    train()
    values = {"engine": "vmap", "max_physical_batch": 3, "channels_last": True}
    assert values.items() <= written("runs/people-1/run.json")["performance"].items()


def test_a_saved_plan_takes_the_place_of_the_config_s_plan(folder):
    plan(prepared().budgets, Recipe(steps=7, batch_size=12, clip_norm=0.5), "sample", "rdp").save("plan.json")
    train("--plan", "plan.json", words=("7 of 7 steps", "sample:"))


def test_a_number_to_predict_has_a_loss_and_no_accuracy(folder):
    change("steps = 4", 'steps = 4\nloss = "mse"')
    change('target = "label"', 'target = "income"')
    change('classes = ["no", "yes"]', "")
    change("[data.categorical]", '[data.categorical]\nlabel = ["no", "yes"]')
    train(words=("mean absolute error",))


def test_tiers_and_simulated_shares_are_recorded_as_such(folder):
    Path("people.csv").write_text(people().replace(",1\n", ",strict\n").replace(",4\n", ",open\n"))
    change("[budgets]", "[budgets]\ntiers = { strict = 0.5, open = 8 }")
    train("--run-dir", "a")
    assert written("a/run.json")["metadata"]["tiers"] == {"strict": 0.5, "open": 8.0}
    change("tiers = { strict = 0.5, open = 8 }", 'shares = { "1" = 0.5, "2" = 0.5 }')
    train("--run-dir", "b", words=("SIMULATED budgets in 2 groups",))
    assert written("b/run.json")["metadata"]["simulated"] is True


def test_a_named_data_set_is_drafted_and_trained_with_its_own_test_split(folder):
    epsilons("init", "digits").succeeded("SIMULATED", "name a file of your own in [budgets].")
    change("epochs = 20", "steps = 2", "digits.toml")
    epsilons("train", "digits.toml").succeeded("1,437 records", "360 to test on")


def test_tensorboard_shows_scores_and_the_spends_of_each_group(folder):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    change("steps = 4", "steps = 4\neval_every = 2")
    train("--tensorboard", "-q")
    events = accumulator.EventAccumulator("runs/people-1-tensorboard")
    events.Reload()
    tags = set(events.Tags()["scalars"])
    assert tags == {"epsilon charged/of 1", "epsilon charged/of 4", "test/accuracy", "test/loss"}
    spent = [event.value for event in events.Scalars("epsilon charged/of 4")]
    assert spent == sorted(spent)
    assert 0 < spent[0] < spent[-1] <= 4
    assert [event.step for event in events.Scalars("test/loss")] == [2, 4]


def test_mlflow_is_given_the_spends_of_each_group_and_no_score(folder, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"file:{folder}/mlruns")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    logged = trackers.install(monkeypatch)["mlflow"]
    change("steps = 4", "steps = 4\neval_every = 2")
    train("--mlflow", "-q")
    assert [step for step, _ in logged] == [1, 2, 3, 4]
    assert {*logged[-1][1]} == {"epsilon charged/of 1", "epsilon charged/of 4"}
    spent = [values["epsilon charged/of 4"] for _, values in logged]
    assert spent == sorted(spent)
    assert 0 < spent[0] < spent[-1] <= 4
    Path("people.csv").write_text(people().replace(",4\n", ",3\n", 7))
    train("--mlflow", "-q")
    assert len(logged) == 4  # 7 people hold a budget


def test_a_target_of_one_class_is_refused(folder):
    Path("people.csv").write_text(people().replace(",no,", ",yes,"))
    epsilons("train", "people.toml").is_refused(2, "All 60 targets of the training data are of one class")


@pytest.mark.parametrize("optimizer", ["adam", "adamw"])
def test_momentum_with_another_optimizer_than_sgd_is_refused(optimizer, folder):
    change("lr = 0.2", f'lr = 0.2\noptimizer = "{optimizer}"\nmomentum = 0.9')
    epsilons("train", "people.toml").is_refused(2, "momentum is for sgd", "betas")
    change("momentum = 0.9", "momentum = 0.0")
    train("--run-dir", "run")
    assert "momentum" not in written("run/run.json")["training"]


@pytest.mark.parametrize(
    ("convention", "records", "batch", "epochs", "steps", "expected"),
    [
        ("paper", 60_000, 512, 80, 9_375, 512.0),  # the paper's text for MNIST
        ("authors-code", 60_000, 512, 80, 9_440, 60_000 / 118),  # its published code
        ("authors-code", 73_257, 1_024, 30, 2_160, 73_257 / 72),
        ("authors-code", 50_000, 1_024, 30, 1_470, 50_000 / 49),
        ("paper", 50_000, 1_024, 30, 1_464, 1_024.0),
        ("paper", 100, 50, 0.1, 1, 50.0),  # at least one step
    ],
)
def test_both_epoch_conventions_give_the_published_steps(convention, records, batch, epochs, steps, expected):
    section = TrainingSection(epochs=float(epochs), batch_size=float(batch), convention=convention)
    recipe = section.recipe(records)
    assert (recipe.steps, recipe.batch_size) == (steps, pytest.approx(expected, rel=1e-12))


def test_the_reference_page_describes_the_keys_as_the_code_does():
    page = epsilons("docs", "config").out
    said = " ".join((Path(__file__).parents[1] / "docs" / "config.md").read_text().split())
    assert "`epsilons docs config` prints it." in said, "a reader of the file finds no keys in it"
    rows = dict(re.findall(r"^`(\w+)`.*\n:   (.+)$", page, flags=re.M))
    for name in get_args(TrainingSection.model_fields["optimizer"].annotation):
        assert name in rows["optimizer"].partition("One of")[2]
    assert "empty cell becomes the middle" in rows["numeric"]


# -- drafts ----------------------------------------------------------------------------------------------------------


def test_from_a_table_to_a_report_in_three_commands(folder):
    assert all(f"'{name}'" in init() for name in ("label", "epsilon", "id"))
    data = read_config(Path("people.toml")).data
    assert data.class_names == ("no", "yes")
    assert (set(data.numeric), set(data.categorical)) == ({"age", "income"}, {"town", "job"})
    change("epochs = 20", "steps = 2")
    train(words=("2 of 2 steps",))
    outcome = epsilons("report", "runs/people-1")
    assert (outcome.code, outcome.out.count("may be published"), outcome.out.count("CONFIDENTIAL")) == (0, 2, 2)
    internal = written("runs/people-1/report.json")
    assert internal["status"]["state"] == "finished"
    assert [cell["label"] for cell in internal["accuracy"]["classes"]] == ["no", "yes"]
    assert sum(cell["records"] for cell in internal["accuracy"]["groups"]) == 16
    assert written("runs/people-1/report-release.json")["accuracy"] is None  # the test data are not public


def test_drafted_bounds_contain_the_data_and_are_said_not_to_be_covered(folder):
    init()
    text = Path("people.toml").read_text()
    assert "READ OFF THE DATA, so not covered" in text
    ages = [int(line.split(",")[1]) for line in people().splitlines()[1:]]
    low, high = tomllib.loads(text)["data"]["numeric"]["age"]
    assert low <= min(ages) <= max(ages) <= high


@pytest.mark.parametrize("name", ["mrn", "Patient", "person_id", "subject", "patientId", "visit.id", "ID"])
def test_init_drops_identifiers_and_asks_about_several_records_of_a_person(name, folder):
    assert "several rows" not in init(words=("'id'",))  # identifiers that do not repeat
    header, *rows = people().splitlines()
    repeated = [f"{i // 4},{row.partition(',')[2]}" for i, row in enumerate(rows)]
    Path("people.csv").write_text("\n".join([header.replace("id", name, 1), *repeated]) + "\n")
    question = f"'{name}' has 20 values in 80 rows: several rows of one person? The draft has one budget per value"
    init(words=(question, "epsilons docs persons"))
    assert question in Path("people.toml").read_text()
    data = read_config(Path("people.toml")).data
    assert (data.person, data.drop, set(data.categorical)) == (name, [name], {"town", "job"})


def test_init_prints_names_unchanged_with_their_brackets(folder):
    Path("people.csv").write_text(people().replace("label", "[bold]label", 1).replace("epsilon", "worry", 1))
    epsilons("init", "people.csv", "--target", "[bold]label", "-o", "[red].toml").succeeded(
        "Predicts: '[bold]label'", "Name yours in [budgets].", "Drafted [red].toml."
    )


def test_drafted_tiers_must_be_given_an_epsilon_before_training(folder):
    Path("people.csv").write_text(people().replace(",1\n", ",strict\n").replace(",4\n", ",open\n"))
    init(words=("WRITE DOWN",))
    epsilons("train", "people.toml").is_refused(2, "greater than 0")
    change("open = 0.0, strict = 0.0", "open = 4, strict = 1")
    change("epochs = 20", "steps = 2")
    train()


def test_the_comments_of_a_draft_are_keys_that_a_config_takes(folder):
    """[about] with all its keys, and tiers for a column of names; both reach the page of the plan."""
    init()
    text = Path("people.toml").read_text()
    about = text[text.index("[about]") :]
    keys = {line[2:].partition(" =")[0] for line in about.splitlines() if line.startswith("# ")}
    assert keys == set(About.model_fields)
    Path("people.toml").write_text(text.replace(about, about.replace("\n# ", "\n")))
    change("# tiers = { strict = 0.5, open = 8 }", "tiers = { strict = 0.5, open = 8 }")
    Path("people.csv").write_text(people(400).replace(",1\n", ",strict\n").replace(",4\n", ",open\n"))
    epsilons("plan", "people.toml", "-q", "--html", "plan.html").succeeded()
    page = Path("plan.html").read_text()
    for stated in (
        *read_config(Path("people.toml")).about.approvers,
        "2030-01-31",
        "privacy@hospital.example",
        "strict",
    ):
        assert stated in page
    Path("people.csv").write_text(people().replace("epsilon", "worry", 1))
    init()
    assert "# tiers = { strict" in Path("people.toml").read_text()


def test_a_value_that_one_person_holds_is_not_in_the_draft(folder):
    Path("people.csv").write_text(people(200) + "200,40,10,Atlantis,smith,no,1\n")
    init()
    assert "Atlantis" not in Path("people.toml").read_text()


@pytest.mark.parametrize("odd", ['a "quoted" name', "naïve Ωmega", "with.dot", "with=equals", "x" * 300, "\t"])
def test_any_column_name_survives_the_draft(odd, folder):
    quoted = '"' + odd.replace('"', '""') + '"'
    Path("people.csv").write_text(people().replace("age", quoted, 1))
    init()
    assert odd in read_config(Path("people.toml")).data.numeric


# -- dates and codes -------------------------------------------------------------------------------------------------

DATES = ["2024-03-31", "2024/3/31", "31.3.2024", "3/31/2024", "31.03.24", "2024-03-31 10:15", "2024-03-31T10:15:00"]


def add_column(name: str, values: list[str], records: int = 80, suffix: str = "csv") -> str:
    """Write the table of people with one more column, which repeats these cells; returns the file."""
    header, *rows = people(records).splitlines()
    cells = [f"{values[i % len(values)]},{row}" for i, row in enumerate(rows)]
    Path("people.csv").write_text("\n".join([f"{name},{header}", *cells]) + "\n")
    if suffix == "parquet":
        from pyarrow import csv, parquet

        parquet.write_table(csv.read_csv("people.csv"), "people.parquet")
    return f"people.{suffix}"


@pytest.mark.parametrize(("date", "suffix"), [*((date, "csv") for date in DATES), (DATES[0], "parquet")])
def test_dates_become_days_between_drafted_bounds_by_the_order_that_their_cells_show(date, suffix, folder):
    other = date.replace("31", "1" if date != "31.03.24" else "11", 1)
    file = add_column("visit", [date, other, ""], suffix=suffix)
    if date == "31.03.24":
        init(file, words=("WARNING: 'visit' holds dates",))
        assert read_config(Path("people.toml")).data.drop == ["visit", "id"]
        return
    init(file, words=("Dates: 'visit'",))
    order = ["month first"] if date == "3/31/2024" else []
    assert read_config(Path("people.toml")).data.dates == {"visit": ["2024-01-01", "2024-12-31", *order]}
    change("test_share = 0.2 ", "# ")
    days = prepared().train.inputs[:3, 2]  # of the 31st and the 1st of March, and an empty cell
    assert days.tolist() == pytest.approx([2 * 90 / 365 - 1, 2 * 60 / 365 - 1, 0])


@pytest.mark.parametrize(("date", "suffix"), [*((date, "csv") for date in DATES), (DATES[0], "parquet")])
def test_dates_are_refused_as_numbers_and_hashed(date, suffix, folder):
    file = add_column("visit", [date, date.replace("3", "2", 1), ""], suffix=suffix)
    init(file)
    lines = Path("people.toml").read_text().splitlines()
    kept = [line for line in lines if not line.startswith(("visit =", "[data.dates]", "read_off"))]
    draft = "\n".join(kept).replace('drop = ["id"]', 'drop = ["visit", "id"]')
    for section, line in (("data.categorical", "visit = 64"), ("data.numeric", "visit = [0, 1]")):
        text = draft.replace('drop = ["visit", "id"]', 'drop = ["id"]')
        Path("people.toml").write_text(text.replace(f"[{section}]", f"[{section}]\n{line}\n#", 1))
        with pytest.raises(DataError, match=r"Column 'visit' .*holds dates.*data\.drop"):
            prepared()
    Path("people.toml").write_text(draft.replace('drop = ["visit", "id"]', 'drop = ["id"]'))
    change("[data.categorical]", f'[data.categorical]\nvisit = ["{date}"]\n#')
    if suffix == "csv":
        prepared()  # a list of values is allowed


@pytest.mark.parametrize("values", [["1.2.345", "4.5.67"], ["12-13-14", "50-60-70"], ["a/b/c"], ["2024"], ["10:15"]])
def test_texts_that_are_no_dates_are_hashed(values, folder):
    add_column("version", values)
    change("job = 4", "job = 4\nversion = 8")
    prepared()


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
def test_numbers_that_look_like_codes_are_named_in_the_draft(name, values, expected, suffix, folder):
    if suffix == "parquet" and name == "branch":
        pytest.skip("numbers of a .parquet file have no leading zeros")
    printed = init(add_column(name, values, max(80, len(values)), suffix))
    warnings = [line for line in printed.splitlines() if line.startswith("WARNING") and "may be codes" in line]
    assert any(f"'{name}'" in line for line in warnings) is (expected != "")
    data = read_config(Path("people.toml")).data
    assert (name in data.categorical, name in data.numeric) == (expected == "a code", expected != "a code")
    (line,) = [line for line in Path("people.toml").read_text().splitlines() if line.startswith(f"{name} =")]
    assert ("#" in line) is (expected != "")
    prepared()


def test_a_leading_zero_is_a_part_of_a_hashed_code(folder):
    """0123 and 123 are different codes, so the column must be read as text."""
    add_column("zip", ["0123", "123"])
    change("job = 4", "job = 4\nzip = 512")
    assert len(np.unique(prepared().train.inputs[:, -512:].argmax(1))) == 2


# -- damaged files ---------------------------------------------------------------------------------------------------

ODD: list[Any] = [
    *(None, True, -1, 0, 1, 2.5, 1e-12, 1e300, -1e300, 2**70, math.inf, math.nan),
    *([], [1], [[1]], {}, {"a": 1}),
    *("", "x", "nan", "no", "../..", "\x00", "people.csv", "label", "epsilon", "mlp", "torch.nn:Linear"),
]


def toml(value: Any) -> str:
    """A value as TOML. TOML has no null, so a null is left as it is and must be refused."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(k)} = {toml(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(toml, value)) + "]"
    return json.dumps(value) if isinstance(value, str) or value is None else repr(value)


def paths(value: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The path to every value inside nested dicts and lists."""
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [at, *(path for key, part in inside for path in paths(part, (*at, key)))][0 if at else 1 :]


@st.composite
def damaged(draw: st.DrawFn, original: Any) -> Any:
    """A nested value with one to three values replaced by odd ones, removed, or renamed."""
    copy = json.loads(json.dumps(original))
    for _ in range(draw(st.integers(1, 3))):
        if not paths(copy):
            break
        *path, last = draw(st.sampled_from(paths(copy)))
        part = copy
        for key in path:
            part = part[key]
        how = draw(st.sampled_from(["replace", "remove", "rename"]))
        if how == "replace" or isinstance(part, list):
            part[last] = draw(st.sampled_from(ODD))
        else:
            value = part.pop(last)
            if how == "rename":
                part[draw(st.sampled_from(["x", last + "s", last[:-1]]))] = value
    return copy


@st.composite
def scribbled(draw: st.DrawFn, text: str) -> str:
    """A text with a few characters cut out, doubled or put in."""
    for _ in range(draw(st.integers(1, 4))):
        at, until = sorted(draw(st.tuples(st.integers(0, len(text)), st.integers(0, len(text)))))
        until = min(until, at + 12)
        text = text[:at] + draw(st.sampled_from(["", '"', "[", "]", "=", "\n", "0", "é", "\x00", "#"])) + text[until:]
    return text


@contextlib.contextmanager
def at_most_ten_seconds():
    """Interrupts as Ctrl-C does: a damaged config may ask for a very long training."""
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    signal.alarm(10)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def ends_without_a_traceback(name: str, content: str, *arguments: str) -> None:
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder), at_most_ten_seconds():
        Path("people.csv").write_text(people(40))
        Path("people.toml").write_text(CONFIG)
        Path(name).write_text(content, encoding="utf-8")
        outcome = epsilons("train", "people.toml", "--run-dir", "run", *arguments)
        assert outcome.code in (0, 2, 3, 130), outcome.err
        assert "Traceback" not in outcome.out + outcome.err
        if outcome.code in (2, 3):
            lines = outcome.err.splitlines()
            assert sum(line.startswith("epsilons: ") and "warning" not in line for line in lines) == 1, outcome.err
            assert len(outcome.err) < 2000, outcome.err
            assert not Path("run/model.safetensors").exists()


def plan_text() -> str:
    budgets = Budgets(np.repeat([1.0, 4.0], [15, 15]), delta=1e-3)
    return json.dumps(plan(budgets, Recipe(4, 10, 1.0), "scale", "rdp").to_dict())


def sections(values: dict[str, Any]) -> str:
    return "\n".join(f"{json.dumps(key)} = {toml(value)}" for key, value in values.items())


KINDS = {
    "config, values": ("people.toml", damaged(tomllib.loads(CONFIG)).map(sections), ()),
    "config, text": ("people.toml", scribbled(CONFIG), ()),
    "plan, values": ("plan.json", damaged(json.loads(plan_text())).map(json.dumps), ("--plan", "plan.json")),
    "plan, text": ("plan.json", scribbled(plan_text()), ("--plan", "plan.json")),
}


@pytest.mark.parametrize("examples", [20, pytest.param(250, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", KINDS)
def test_damaged_configs_and_plans_never_end_in_a_traceback(kind, examples):
    name, contents, arguments = KINDS[kind]
    few = settings(
        max_examples=examples, deadline=None, suppress_health_check=list(HealthCheck), derandomize=examples < 100
    )
    given(contents)(few(lambda content: ends_without_a_traceback(name, content, *arguments)))()
