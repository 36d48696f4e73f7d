"""Persons in config files: the column of ids, budgets by id, the split by person, drafts, and what is refused."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from epsilons.configs.config_file import read_config
from epsilons.configs.prepare import Prepared, budgets_to_train, prepare
from epsilons.data.infer import is_identifier
from epsilons.errors import EpsilonsError, EpsilonsWarning
from program import epsilons

CONFIG = """
[data]
train = "visits.csv"
test_share = 0.25
target = "label"
classes = ["no", "yes"]
person = "patient_id"
drop = ["note"]
[data.numeric]
age = [0, 100]
serial = [0, 1000]
[budgets]
column = "epsilon"
delta = 1e-4
[model]
name = "logistic"
[training]
steps = 4
batch_size = 10
lr = 0.2
[privacy]
accountant = "rdp"
"""


def visits(persons: int = 60, seed: int = 0) -> str:
    """Rows of patients, 1 to 5 each, in random order: patient_id, age, serial (the number of the row), …"""
    rng = np.random.default_rng(seed)
    owners = rng.permutation(np.repeat(np.arange(persons), rng.integers(1, 6, persons)))
    lines = ["patient_id,age,serial,label,note,epsilon"]
    for serial, owner in enumerate(owners):
        label = rng.choice(["no", "yes"])
        lines.append(f"p{owner:03},{20 + owner % 60},{serial},{label},x,{1 if owner % 3 else 4}")
    return "\n".join(lines) + "\n"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The current folder, with a table of visits and a config."""
    Path(tmp_path / "visits.csv").write_text(visits())
    Path(tmp_path / "visits.toml").write_text(CONFIG)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def change(old: str, new: str, file: str = "visits.toml") -> None:
    text = Path(file).read_text()
    assert old in text
    Path(file).write_text(text.replace(old, new))


def prepared() -> Prepared:
    return prepare(read_config(Path("visits.toml")), Path())


def table() -> list[list[str]]:
    return [line.split(",") for line in Path("visits.csv").read_text().splitlines()[1:]]


def serials(inputs: Any) -> list[int]:
    """The numbers of the rows, from the second input."""
    return np.rint((inputs[:, 1] + 1) * 500).astype(int).tolist()


# -- data and budgets ---------------------------------------------------------------------------------------------


def test_every_row_keeps_its_person_and_every_person_their_budget(folder):
    data, rows = prepared(), table()
    assert data.persons is not None
    assert (data.budgets.unit, data.budgets.has_ids) == ("person", False)
    epsilon = data.budgets.epsilons[data.budgets.group][data.persons]
    names: dict[int, str] = {}
    for row, position, value in zip(serials(data.train.inputs), data.persons.tolist(), epsilon, strict=True):
        assert value == float(rows[row][-1])
        assert names.setdefault(position, rows[row][0]) == rows[row][0]
    assert len(set(names.values())) == len(names)


@pytest.mark.parametrize("seed", range(5))
def test_no_person_is_on_both_sides_of_the_test_split(seed, folder):
    Path("visits.csv").write_text(visits(seed=seed))
    data, rows = prepared(), table()
    assert data.test is not None
    train, test = ({rows[row][0] for row in serials(side.inputs)} for side in (data.train, data.test))
    assert not train & test
    assert (len(train), len(test), data.test_persons) == (45, 15, 15)
    assert sorted(serials(data.train.inputs) + serials(data.test.inputs)) == list(range(len(rows)))
    again = prepared()
    assert again.test is not None
    assert serials(again.test.inputs) == serials(data.test.inputs)


def test_the_groups_of_test_rows_are_those_of_their_persons(folder):
    data, rows = prepared(), table()
    assert data.test is not None
    plan = data.plan()
    groups = data.test_groups(plan)
    assert groups is not None
    assert plan.epsilons[groups].tolist() == [float(rows[row][-1]) for row in serials(data.test.inputs)]
    change("test_share = 0.25", "test_share = 0.25\ntest_public = true")
    with pytest.warns(EpsilonsWarning, match="rows to test on are held out of visits.csv: people with budgets"):
        data = prepared()
    assert data.test_groups(plan) is None  # fewer than 20 test persons hold some budget


def test_scores_of_people_with_budgets_are_called_public_with_a_warning(folder):
    said = "rows to test on are held out of visits.csv: people with budgets"
    change("test_share = 0.25", "test_share = 0.25\ntest_public = true")
    for command in ("plan", "train"):
        assert said in " ".join(epsilons(command, "visits.toml", "-q").err.split())
    Path("other.csv").write_text(visits(seed=1))
    change("test_share = 0.25", 'test = "other.csv"')
    assert "people with budgets" not in epsilons("plan", "visits.toml", "-q").err
    change('test = "other.csv"', "test_share = 0.25")
    change('column = "epsilon"', 'shares = { "1" = 0.5, "4" = 0.5 }')
    assert "people with budgets" not in epsilons("plan", "visits.toml", "-q").err


def test_a_plan_of_the_config_counts_persons(folder):
    plan = prepared().plan()
    assert (plan.unit, plan.records) == ("person", 45)
    assert len(budgets_to_train(read_config(Path("visits.toml")), Path())) == 45
    epsilons("plan", "visits.toml").succeeded("45 persons")


def test_the_person_column_is_no_input(folder):
    assert prepared().train.inputs.shape[1] == 2
    change("age = [0, 100]", "age = [0, 100]\npatient_id = [0, 100]")
    epsilons("train", "visits.toml").is_refused(2, "patient_id", "never an input", "[data.numeric]")


@pytest.mark.parametrize("key", ['target = "label"', 'column = "epsilon"'])
def test_the_person_column_is_neither_target_nor_budget(key, folder):
    change(key, key.partition("=")[0] + '= "patient_id"')
    epsilons("train", "visits.toml").is_refused(2, "patient_id")


# -- budgets from a file of wishes ---------------------------------------------------------------------------------


def wishes(rows: list[list[str]], extra: str = "") -> None:
    """Budgets in a file of their own, one row per person, in another order than the visits."""
    stated = {row[0]: row[-1] for row in reversed(rows)}
    lines = "".join(f"{value}, {name}\n" for name, value in stated.items())
    Path("wishes.csv").write_text("epsilon,patient_id\n" + lines + extra)
    change("[budgets]", '[budgets]\nfile = "wishes.csv"')


def test_budgets_from_a_file_of_wishes_are_joined_by_id(folder):
    rows = table()
    wishes(rows)
    data = prepared()
    assert data.persons is not None
    epsilon = data.budgets.epsilons[data.budgets.group][data.persons]
    assert [float(rows[row][-1]) for row in serials(data.train.inputs)] == epsilon.tolist()


def test_persons_of_the_wishes_without_rows_are_not_on_the_roster(folder):
    wishes(table())
    before = prepared()
    with Path("wishes.csv").open("a") as file:
        file.write("".join(f"4,absent-{i}\n" for i in range(40)))
    data = prepared()
    assert len(data.budgets) == 45  # three quarters of 60
    assert data.plan() == before.plan()
    assert {"file": "wishes.csv", "what": "listed without rows", "count": "40"} in data.consent["table"]


def test_persons_of_the_wishes_without_rows_count_and_have_none(folder):
    wishes(table(), extra="".join(f"4,absent-{i}\n" for i in range(40)))
    change("[budgets]", '[budgets]\nwithout_rows = "on the roster"')
    data = prepared()
    assert len(data.budgets) == 75  # three quarters of 100
    assert data.persons is not None
    assert len(set(data.persons.tolist())) < 75


@pytest.mark.parametrize(("missing", "words"), [(3, "Fewer than 20 persons"), (30, "30 of 60 persons")])
def test_persons_without_a_wish_are_refused_with_a_count_by_the_rule_of_20(missing, words, folder):
    rows = table()
    gone = sorted({row[0] for row in rows})[:missing]
    wishes([row for row in rows if row[0] not in gone])
    outcome = epsilons("train", "visits.toml")
    outcome.is_refused(2, words, "rows without a budget")
    assert not any(name in outcome.err for name in gone)


def test_a_file_of_wishes_without_ids_is_refused(folder):
    Path("wishes.csv").write_text("epsilon\n" + "1\n" * len(table()))
    change("[budgets]", '[budgets]\nfile = "wishes.csv"')
    epsilons("train", "visits.toml").is_refused(2, "wishes.csv has no column 'patient_id'", "one row per person")


# -- conflicts and statements -------------------------------------------------------------------------------------


def disagree() -> None:
    """One row of the first person states another budget than the others."""
    lines = Path("visits.csv").read_text().splitlines()
    owner = lines[1].partition(",")[0]
    assert sum(line.startswith(owner) for line in lines) > 1
    lines[1] = lines[1].rpartition(",")[0] + ",0.5"
    Path("visits.csv").write_text("\n".join(lines) + "\n")


def test_a_conflict_is_refused_or_the_strictest_budget_counts(folder):
    disagree()
    outcome = epsilons("train", "visits.toml")
    outcome.is_refused(2, "Fewer than 20 persons", "different budgets", 'conflict="strictest"')
    change("[budgets]", '[budgets]\nconflict = "strictest"')
    data = prepared()
    tested = data.test_owned
    assert tested is not None
    assert 0.5 in [*data.budgets.epsilons, *tested.budgets.epsilons]


def test_a_table_of_repeated_persons_needs_a_statement(folder):
    change('person = "patient_id"\ndrop = ["note"]', 'drop = ["note", "patient_id"]')
    for command in ("train", "plan"):
        epsilons(command, "visits.toml").is_refused(
            2, "'patient_id'", 'person = "patient_id"', 'person = "each row is one person"'
        )
    change("drop =", 'person = "each row is one person"\ndrop =')
    assert prepared().plan().unit == "record"


def test_two_owners_of_a_row_are_refused_with_what_to_do(folder):
    change('person = "patient_id"', 'person = ["patient_id", "note"]')
    epsilons("train", "visits.toml").is_refused(2, "data.person", "row has one person", "Name the column", "one id")


@pytest.mark.parametrize(
    ("old", "new"),
    [("[budgets]", '[budgets]\nconflict = "strictest"'), ("steps = 4", "steps = 4\nrows_per_person = 2")],
)
def test_settings_of_persons_need_a_column_of_ids(old, new, folder):
    change('person = "patient_id"\ndrop = ["note"]', 'person = "each row is one person"\ndrop = ["note", "patient_id"]')
    change(old, new)
    epsilons("train", "visits.toml").is_refused(2, "name the column of their ids in data.person")


def test_a_misspelt_person_column_is_named_with_what_may_be_meant(folder):
    change('person = "patient_id"', 'person = "patientid"')
    epsilons("train", "visits.toml").is_refused(2, "'patientid', which data.person names", "'patient_id'")


def test_an_id_per_row_beside_repeated_persons_is_warned_of(folder):
    lines = Path("visits.csv").read_text().splitlines()
    numbered = [f"{line},{'visit_id' if i == 0 else i}" for i, line in enumerate(lines)]
    Path("visits.csv").write_text("\n".join(numbered) + "\n")
    change('person = "patient_id"\ndrop = ["note"]', 'person = "visit_id"\ndrop = ["note", "patient_id"]')
    with pytest.warns(EpsilonsWarning, match="values of 'patient_id' repeat"):
        prepared()


@pytest.mark.parametrize(("shared", "words"), [(2, "Fewer than 20 persons"), (30, "30 of 60 persons")])
def test_persons_on_both_sides_of_two_files_are_warned_of(shared, words, folder):
    lines = Path("visits.csv").read_text().splitlines()
    tests = [f" {line}" if int(line[1:4]) < shared else f"q{line[1:]}" for line in lines[1:]]
    Path("test.csv").write_text("\n".join([lines[0], *tests]) + "\n")
    change("test_share = 0.25", 'test = "test.csv"')
    with pytest.warns(EpsilonsWarning, match=words):
        prepared()


# -- runs and reports ---------------------------------------------------------------------------------------------


def reported(statement: str) -> tuple[str, str, Any]:
    """(the internal report, the guarantee, run.json) of a run of the config with this statement."""
    change('person = "patient_id"\n', statement)
    epsilons("train", "visits.toml").succeeded()
    epsilons("report", "runs/visits-1").succeeded()
    report = json.loads(Path("runs/visits-1/report.json").read_text())
    return " ".join(report["summary"]), report["guarantee"], json.loads(Path("runs/visits-1/run.json").read_text())


def test_a_run_of_persons_is_reported_for_persons_and_names_no_rows(folder):
    summary, guarantee, run = reported('person = "patient_id"\n')
    assert "45 persons" in summary
    assert "all rows of person i removed" in guarantee
    assert "Persons: all rows with one id are one person; ids in the column 'patient_id'." in guarantee
    assert run["person"] == "patient_id"
    assert run["eval_data"]["records"] not in (None, 15)
    files = [path for path in Path("runs").rglob("*") if path.is_file() and path.suffix in (".json", ".jsonl", ".html")]
    texts = {path.name: path.read_text() for path in files}
    assert not [name for name, text in texts.items() if "p000" in text or "p059" in text]
    rows = len(table())
    released = [text for name, text in texts.items() if "release" in name or name == "plan.json"]
    assert len(released) == 3
    for number in (rows, run["eval_data"]["records"], rows - run["eval_data"]["records"]):
        assert not [text for text in released if f": {number}," in text or f" {number} " in text]


def test_training_gets_each_rows_person_and_the_rows_per_person(folder, monkeypatch):
    from epsilons.cli import train_config

    change("steps = 4", "steps = 4\nrows_per_person = 3\nviews = 2")
    asked: dict[str, Any] = {}

    def fit(model: Any, records: Any, *arguments: Any, **named: Any) -> None:
        asked.update(named | {"records": records})
        raise KeyboardInterrupt

    monkeypatch.setattr(train_config, "fit", fit)
    epsilons("train", "visits.toml")
    data = prepared()
    assert data.persons is not None
    assert asked["records"].persons.tolist() == data.persons.tolist()
    assert asked["budgets"].group.tolist() == data.budgets.group.tolist()
    assert (asked["records"].rows_per_person, asked["records"].views) == (3, 2)


def test_the_statement_that_rows_are_persons_is_reported(folder):
    change('drop = ["note"]', 'drop = ["note", "patient_id"]')
    _, guarantee, run = reported('person = "each row is one person"\n')
    assert "Persons: each row is one person, as stated; this was not checked." in guarantee
    assert run["person"] == "each row is one person"


def test_a_run_without_a_statement_says_so(folder):
    Path("visits.csv").write_text(visits().replace("patient_id", "town", 1))
    change('drop = ["note"]', 'drop = ["note", "town"]')
    _, guarantee, run = reported("")
    assert "Persons: whether each row is one person is not stated." in guarantee
    assert "person" not in run


def test_a_statement_that_was_edited_afterwards_is_refused(folder):
    change('drop = ["note"]', 'drop = ["note", "patient_id"]')
    reported('person = "each row is one person"\n')
    path = Path("runs/visits-1/run.json")
    path.write_text(path.read_text().replace('"person": "each row is one person"', '"person": "patient_id"', 1))
    epsilons("report", "runs/visits-1").is_refused(2, "guarantee")


def test_a_person_with_one_row_left_out_is_left_out_with_all_rows(folder):
    lines = Path("visits.csv").read_text().splitlines()
    gone = lines[1][:4]
    lines[1] = lines[1].rpartition(",")[0] + ","
    assert sum(line.startswith(gone) for line in lines) > 1
    Path("visits.csv").write_text("\n".join(lines) + "\n")
    epsilons("train", "visits.toml").is_refused(2, "empty")
    change("[budgets]", '[budgets]\nblank = "left out"')
    data = prepared()
    assert data.test is not None
    used = {table()[row][0] for side in (data.train, data.test) for row in serials(side.inputs)}
    assert gone not in used
    assert len(used) == 59


# -- drafts -------------------------------------------------------------------------------------------------------


def test_a_draft_of_visits_names_the_person_and_trains(folder):
    Path("visits.toml").unlink()
    epsilons("init", "visits.csv").succeeded("'patient_id' has 60 values", "one budget per value")
    config = read_config(Path("visits.toml"))
    assert config.data.person == "patient_id"
    assert prepare(config, Path()).budgets.unit == "person"


# -- generated tables ----------------------------------------------------------------------------------------------


def bad_table(seed: int) -> str:
    """A table with odd ids and budgets: blanks, empty cells, mixtures of types, conflicts, empty budgets."""
    rng = np.random.default_rng(seed)
    rows = int(rng.integers(2, 80))
    ids = ["7", "07", " 7", "7.0", "", "NA", "p-1", '"p,1"', "é", "0x7", "1e3", "-1", "p 1", "P 1"]
    chosen = rng.choice(len(ids), rng.integers(1, 6))
    budgets = ["1", "1", "1", "4", "", "0", "x"][: int(rng.integers(1, 8))]
    lines = [
        f"{ids[rng.choice(chosen)]},30,{i},{rng.choice(['no', 'yes'])},x,{rng.choice(budgets)}" for i in range(rows)
    ]
    return "\n".join(["patient_id,age,serial,label,note,epsilon", *lines]) + "\n"


@pytest.mark.filterwarnings("ignore:delta")
@pytest.mark.parametrize("seed", range(60))
def test_any_table_of_persons_is_split_by_person_or_refused(seed, folder):
    Path("visits.csv").write_text(bad_table(seed))
    if seed % 2:
        change("[budgets]", '[budgets]\nconflict = "strictest"')
    change("batch_size = 10", "batch_size = 1")
    with contextlib.suppress(EpsilonsError):
        check_split(prepared())


def check_split(data: Prepared) -> None:
    """All rows of one id are on one side, and the plan holds no id."""
    assert data.persons is not None
    assert data.test is not None
    lines = Path("visits.csv").read_text().splitlines()[1:]
    name = [line.rsplit(",", 5)[0].strip() for line in lines]
    train, test = ({name[row] for row in serials(side.inputs)} for side in (data.train, data.test))
    assert not train & test
    assert json.dumps(data.plan().to_dict()).find("p-1") == -1


@pytest.mark.parametrize(
    "name",
    [
        *(
            "Pat-Nr",
            "patnr",
            "pat_id",
            "Patientennummer",
            "Pat.-Nr.",
            "Pat. Nr",
            "MRN",
            "NHS number",
            "nhs_no",
            "Proband",
        ),
        *("Probanden-ID", "subject", "Versichertennummer", "Versicherte", "Kundennummer", "PatID", "Patienten-Kennung"),
    ],
)
def test_names_of_ids_of_patients_are_drafted_and_need_a_statement(name, folder):
    lines = visits().splitlines()[1:]
    rows = [line.split(",") for line in lines]
    text = "".join(f"{row[0][1:].zfill(6)},{row[1]},{row[3]},{row[5]}\n" for row in rows)  # zero-padded digits
    Path("visits.csv").write_text(f"{name},age,label,epsilon\n{text}")
    epsilons("init", "visits.csv", "-o", "new.toml").succeeded(repr(name), "several rows of one person")
    data = read_config(Path("new.toml")).data
    assert (data.person, data.drop) == (name, [name])
    new = Path("new.toml").read_text()
    assert f'person = "{name}"' in new
    for stated in (f'drop = ["{name}"]', f'drop = []\ncategorical = {{ "{name}" = 32 }}'):
        text = CONFIG.replace('person = "patient_id"\ndrop = ["note"]', stated).replace("serial = [0, 1000]\n", "")
        Path("visits.toml").write_text(text)
        for command in ("plan", "train --dry-run", "train"):
            epsilons(*command.split(), "visits.toml").is_refused(2, repr(name), f'person = "{name}"')


@pytest.mark.parametrize("name", ["path", "patch", "pat_status", "nhs_trust", "versichert", "pattern", "subjective"])
def test_other_names_of_columns_are_no_ids_of_patients(name):
    assert not is_identifier(name)
