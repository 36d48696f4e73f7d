"""Cells as exports write them: what is stated is read, and all else is refused or marked. Training guesses nothing."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import pyarrow
import pytest
from pyarrow import csv, parquet

import epsilons
from epsilons.configs.config import Config, DataSection
from epsilons.configs.config_file import read_config
from epsilons.configs.prepare import budgets_to_train, prepare
from epsilons.data.tables import record_inputs
from epsilons.errors import DataError, EpsilonsWarning, InputError
from epsilons.tabular.table_files import with_marks
from epsilons.training.predicting.predictor import inert
from program import epsilons as command
from test_mutated_tables import slow_number

CELLS = [
    "5.1",
    "5,1",
    "1.234",
    "1,234",
    "1.234,5",
    "1,234.5",
    "1'234",
    "1 234",
    "12.345.678",
    "1.234.5",
    "1,234,5",
    "n.b.",
    "-",
    "-99",
    "-99.0",
]
CELLS += [
    "5.1 g/dl",
    "5,1g/dl",
    "5.1 mg",
    "g/dl",
    "1e400",
    "9" * 400,
    "-1e5",
    "1e-400",
    "",
    " ",
    "NA",
    "0x10",
    "١",
    "+7",
    ".",
]
CELLS += [
    "=1+1",
    "5.",
    ",5",
    "1.23.45",
    "12,34,5",
    "1.2345",
    "5\u00a0g/dl",
    "1\u202f234",
    "inf",
    "nan",
    "1_000",
    "--5",
    "5 5",
]


def stated(coins: random.Random) -> DataSection:
    """What a config may state of the column `hb`."""
    decimal = coins.choice([None, ".", ","])
    thousands = coins.choice([None, "'", " ", *{".": ",", ",": ".", None: ",."}[decimal]])
    missing = coins.choice([[], ["n.b.", "-"], [-99, "n.b."], ["-99"]])
    units = coins.choice([{}, {"hb": "g/dl"}])
    return DataSection(
        train="t.csv", numeric={"hb": [-1e9, 1e9]}, decimal=decimal, thousands=thousands, missing=missing, units=units
    )


def test_cells_mean_what_a_slow_reader_makes_of_the_statements_or_are_noted():
    """In 1,000 columns of random cells under random statements. -99 as a mark also means -99.0."""
    coins = random.Random(0)
    for _ in range(1_000):
        data, cells = stated(coins), coins.choices(CELLS, k=8)
        wanted = [slow_number(cell, data, "hb") for cell in cells]
        if {-99, "-99"} & {*data.missing}:
            wanted = [np.nan if value == -99 else value for value in wanted]
        table = with_marks(pyarrow.table({"hb": cells}), data.marks)
        unread = []
        inputs, _ = record_inputs(table, "", data.columns, Path("t.csv"), unread)
        assert {why for _, why in unread} <= {"hb is not a number"}
        noted = np.any([rows for rows, _ in unread] or [[False] * len(cells)], axis=0)
        assert noted.tolist() == [value is None for value in wanted], (cells, data)
        scaled = [0.0 if value is None or np.isnan(value) else value / 1e9 for value in wanted]
        assert np.allclose(inputs[:, 0], np.clip(scaled, -1, 1), rtol=1e-6), (cells, data)
        if noted.any():
            with pytest.raises(DataError, match=r"hb.*are not numbers"):
                record_inputs(table, "", data.columns, Path("t.csv"))


GERMAN = "patient;alter;hb;crp;thrombo;aufnahme;station;epsilon;ziel"


def german(rows: int = 400, people: int = 100, seed: int = 0) -> str:
    """A hospital's export: decimal commas, units, thousands, marks of missing values, dates."""
    coins, lines = random.Random(seed), [GERMAN]
    for i in range(rows):
        hb = f"{coins.uniform(8, 16):.1f}".replace(".", ",") + " g/dl" * (i % 3 > 0)
        crp = coins.choice(["-", "n.b."]) if i % 33 == 0 else f"{coins.uniform(0, 200):.1f}".replace(".", ",")
        thrombo = f"{coins.randint(1000, 400_000):,}".replace(",", ".") + f",{coins.randint(0, 9)}"
        day = "k.A." if i % 50 == 7 else f"{coins.randint(1, 28):02d}.{coins.randint(1, 12):02d}.{2018 + i % 7}"
        person, level = f"P{i % people:03d}", [1, 4][i % people % 2]
        lines.append(f"{person};{coins.randint(18, 90)};{hb};{crp};{thrombo};{day};{'AB'[i % 2]};{level};{'jn'[i % 2]}")
    return "\n".join(lines) + "\n"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("de.csv").write_text(german(), encoding="utf-8")
    return tmp_path


def drafted(**changes: str) -> None:
    """A draft of de.csv as de.toml, that trains fast, with lines replaced."""
    command("init", "de.csv").succeeded()
    text = Path("de.toml").read_text().replace("epochs = 20 ", "steps = 2 ").replace('"pld"', '"rdp"')
    for old, new in {"delta = 1e-05": "delta = 1e-3", **changes}.items():
        assert old in text, (old, text)
        text = text.replace(old, new)
    Path("de.toml").write_text(text)


def test_a_german_export_is_drafted_with_what_its_cells_are_and_trains(folder):
    outcome = command("init", "de.csv")
    assert "of the cells of 'hb'" in outcome.out
    data = read_config(Path("de.toml")).data
    assert {*data.numeric} == {"alter", "hb", "crp", "thrombo"}
    assert {*data.dates} == {"aufnahme"}
    assert (data.decimal, data.thousands, data.units) == (",", ".", {"hb": "g/dl"})
    assert {*data.missing} == {"-", "n.b.", "k.A."}
    Path("de.toml").unlink()
    drafted()
    rows = [line.split(";") for line in german().splitlines()[1:]]
    found = prepare(read_config(Path("de.toml")), Path())
    assert len(found.train.inputs) + len(found.test.inputs) == len(rows)
    assert command("train", "de.toml", "-o", "run", "-q").code == 0


@pytest.mark.parametrize("share", [0.03, 0.08])
def test_values_between_marks_of_missing_values_are_not_discarded(share, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    coins = random.Random(1)
    values = ["n.b." if coins.random() < share else f"{coins.uniform(3, 9):.2f}" for _ in range(500)]
    lines = [f"{value},{i % 2},{[1, 4][i % 2]}" for i, value in enumerate(values)]
    Path("lab.csv").write_text("\n".join(["hb,label,epsilon", *lines]) + "\n")
    command("init", "lab.csv").succeeded()
    data = read_config(Path("lab.toml")).data
    assert ({*data.numeric}, data.categorical, data.missing) == ({"hb"}, {}, ["n.b."])
    inputs, _ = record_inputs(csv.read_csv("lab.csv"), "", data.columns, Path("lab.csv"))
    low, high = data.numeric["hb"]
    wanted = [0.0 if value == "n.b." else 2 * (float(value) - low) / (high - low) - 1 for value in values]
    assert np.allclose(inputs[:, 0], wanted, atol=1e-6)


def test_a_rare_text_of_one_cell_is_in_no_draft_and_is_refused(folder):
    Path("de.csv").write_text(german().replace(";n.b.;", ";Frau Muster;", 1), encoding="utf-8")
    drafted()
    assert "Muster" not in Path("de.toml").read_text()
    assert "cannot be read" in Path("de.toml").read_text()
    outcome = command("train", "de.toml", "-q")
    assert outcome.code == 2
    assert "1 of 400 cells of column 'crp'" in outcome.err
    assert "data.missing" in outcome.err


def test_columns_of_numbers_that_become_categories_are_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    lines = [f"{'text ' + str(i) if i % 5 == 0 else i / 10},{i % 2},{[1, 4][i % 2]}" for i in range(400)]
    Path("lab.csv").write_text("\n".join(["hb,label,epsilon", *lines]) + "\n")
    outcome = command("init", "lab.csv")
    assert "WARNING: of the cells of 'hb', 320 of 400 are numbers or dates" in outcome.out


# -- predictions -------------------------------------------------------------------------------------------------------


def test_bad_rows_are_refused_or_marked_and_the_others_keep_their_predictions(folder):
    drafted()
    command("train", "de.toml", "-o", "run", "-q").succeeded()
    lines = german(2_500).splitlines()
    bad = {3: "abc", 1_100: "1e400", 2_400: "5,1 mmol"}
    for row, cell in bad.items():
        cells = lines[row + 1].split(";")
        cells[2] = cell
        lines[row + 1] = ";".join(cells)
    Path("new.csv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    assert command("predict", "run", "new.csv", "-o", "a.parquet").code == 2
    assert not Path("a.parquet").exists()
    outcome = command("predict", "run", "new.csv", "-o", "a.parquet", "--bad-rows", "mark")
    assert outcome.code == 4
    assert "2,497 rows predicted in a.parquet, and 3 not" in outcome.out
    Path("good.csv").write_text("\n".join(x for i, x in enumerate(lines) if i - 1 not in bad) + "\n", encoding="utf-8")
    command("predict", "run", "good.csv", "-o", "b.parquet", "--bad-rows", "mark").succeeded()
    marked, good = parquet.read_table("a.parquet").to_pylist(), parquet.read_table("b.parquet").to_pylist()
    assert {i: row["not_predicted"] for i, row in enumerate(marked) if row["not_predicted"]} == {
        3: "hb is not a number",
        1_100: "hb is not a number",
        2_400: "hb is not a number",
    }
    assert all(value is None for i in bad for key, value in marked[i].items() if key != "not_predicted")
    assert [row for i, row in enumerate(marked) if i not in bad] == good


def test_csv_that_is_written_holds_no_formula_and_numbers_stay_numbers(tmp_path):
    texts = [
        "=HYPERLINK(1)",
        "+1+1",
        "-2+3",
        "@x",
        "\t=1",
        "\r=1",
        " =1",
        "a;=1",
        "-5.2",
        "+7",
        "-0,5",
        "fine",
        "a-b",
        "＝1",
        None,
    ]
    table = inert(pyarrow.table({"=name": texts, "number": np.arange(-1.0, len(texts) - 1)}))
    assert table.column_names == ["'=name", "number"]
    assert table.column(0).to_pylist() == [
        *("'=HYPERLINK(1)", "'+1+1", "'-2+3", "'@x", "\t'=1", "\r'=1", " '=1", "a;'=1"),
        *("-5.2", "+7", "-0,5", "fine", "a-b", "'＝1", None),
    ]
    assert table.column(1).to_pylist()[0] == -1.0


# -- splits ------------------------------------------------------------------------------------------------------------


def test_rows_after_a_day_are_tested_on_and_rows_without_a_date_are_neither(folder):
    drafted(**{"test_share = 0.2": 'test_after = { aufnahme = ["2022-12-31"] }'})
    config = read_config(Path("de.toml"))
    days = [line.split(";")[5] for line in german().splitlines()[1:]]
    years = [0 if day == "k.A." else int(day[-4:]) for day in days]
    with pytest.warns(EpsilonsWarning, match="too high"):
        found = prepare(config, Path())
    assert len(found.train.inputs) == sum(0 < year <= 2022 for year in years)
    assert len(found.test.inputs) == sum(year > 2022 for year in years)
    assert "Fewer than 20 rows have no date" in found.left_out
    assert (budgets_to_train(config, Path()).counts == found.budgets.counts).all()
    trained = {
        line.split(";")[0] for line, year in zip(german().splitlines()[1:], years, strict=True) if 0 < year <= 2022
    }
    assert len(found.budgets) == len(trained)


def test_test_rows_of_people_who_also_train_are_dropped_where_it_is_stated(folder):
    lines = german(700, people=200).splitlines()
    Path("de.csv").write_text("\n".join(lines[:500]) + "\n", encoding="utf-8")
    Path("later.csv").write_text(
        "\n".join([lines[0], *lines[450:], "NEW1" + lines[4][4:], "NEW2" + lines[5][4:]]) + "\n"
    )
    drafted(**{"test_share = 0.2": 'test = "later.csv"'})
    with pytest.warns(EpsilonsWarning, match="too high"):
        assert len(prepare(read_config(Path("de.toml")), Path()).test.inputs) == len(lines) - 450 + 2
    text = Path("de.toml").read_text()
    Path("de.toml").write_text(text.replace("test = ", 'test_people = "new"\ntest = '))
    found = prepare(read_config(Path("de.toml")), Path())
    assert len(found.test.inputs) == 2
    assert "also train: their rows are not tested on" in found.left_out
    outcome = command("train", "de.toml", "-o", "run")
    assert "also train" in outcome.out
    assert "also train" in Path("run/run.json").read_text()


def test_tiers_of_test_people_come_from_the_file_of_budgets_and_json_names_them(folder):
    lines = [line.split(";") for line in german(1_000).splitlines()]
    without = [";".join(cells[:7] + cells[8:]) for cells in lines]
    Path("de.csv").write_text("\n".join(without[:701]) + "\n", encoding="utf-8")
    strangers = [f"X{line[1:]}" for line in without[1:31]]
    Path("later.csv").write_text("\n".join([without[0], *without[701:], *strangers]) + "\n", encoding="utf-8")
    tiers = [f"P{i:03d},{['strict', 'open'][i % 2]}" for i in range(100)]
    Path("consent.csv").write_text("\n".join(["patient,tier", *tiers]) + "\n")
    command("init", "de.csv").succeeded()
    text = Path("de.toml").read_text().replace("epochs = 20 ", "steps = 2 ").replace('"pld"', '"rdp"')
    text = text.replace("test_share = 0.2 ", 'test = "later.csv" ').replace("delta = 1e-05", "delta = 1e-3")
    shares = next(line for line in text.splitlines() if line.startswith("shares"))
    budgets = 'file = "consent.csv"\ncolumn = "tier"\ntiers = { strict = 1, open = 4 }'
    Path("de.toml").write_text(text.replace(shares, budgets))
    outcome = command("train", "de.toml", "-o", "run", "--json")
    values = json.loads(outcome.out)["runs"][0]
    assert [group["tier"] for group in values["groups"]] == ["strict", "open"]
    assert values["metrics"]["classes"] == ["j", "n"]
    tested = [int(line.split(";")[0][1:]) % 2 for line in without[701:]]
    assert [records for _, records in values["metrics"]["per_group"]] == [tested.count(0), tested.count(1)]


# -- one message -------------------------------------------------------------------------------------------------------


def test_one_epsilon_far_outside_the_others_is_warned_about_without_its_value():
    with pytest.warns(EpsilonsWarning, match="more than 100 times as large") as found:
        epsilons.Budgets([1.0, 2.0] * 50 + [98_765.0], delta=1e-4)
    assert "98" not in str(found[0].message).replace("1E5", "")


@pytest.mark.parametrize("values", [[1.0, 8.0] * 50, [1.0] * 50 + [1e5] * 30, [0.01] * 99 + [8.0], [1e5] * 40])
def test_other_epsilons_are_not_warned_about(values, recwarn):
    epsilons.Budgets(values, delta=1e-4)
    assert not recwarn.list


def test_two_byte_order_marks_and_classes_without_end_get_one_message(folder):
    Path("bom.csv").write_bytes(b"\xef\xbb\xbf\xef\xbb\xbf" + german().encode())
    assert "two byte-order marks" in command("init", "bom.csv").err
    endless = "classes = 9223372036854775808"
    Path("c.toml").write_text(f'[data]\ntrain = "x.csv"\n{endless}\n[training]\nsteps = 1\nbatch_size = 1\n')
    with pytest.raises(InputError, match="less than or equal to 100000"):
        read_config(Path("c.toml"))


def test_a_config_that_a_run_has_saved_is_read_again(folder):
    for changes in ({}, {"test_share = 0.2": "test_after = { aufnahme = [2022-12-31] }"}):
        drafted(**changes)
        config = read_config(Path("de.toml"))
        again = Config.model_validate_json(config.model_dump_json())
        assert (again.data.columns, again.data.test_after) == (config.data.columns, config.data.test_after)
        Path("de.toml").unlink()
