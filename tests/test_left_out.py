"""Records without a budget are refused, or left out where the config says so: from training, tests and plans alike."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from epsilons.configs.config_file import read_config
from epsilons.configs.prepare import budgets_to_train, prepare
from epsilons.errors import BudgetError, DataError, EpsilonsError
from program import CONFIG, change, epsilons, people


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """The current folder, with a config and its table of 80 people; the first 25 have other cells of consent."""
    monkeypatch.chdir(tmp_path)
    write(["", "0", "inf", "0.0", " "])
    Path("people.toml").write_text(CONFIG)


def write(cells: list[str], few: int = 25, file: str = "people.csv") -> None:
    """The table of people; the first `few` have these cells in place of their budgets, and no other cells but an id."""
    header, *rows = people(80).splitlines()
    changed = [f"{i},,,,,,{cells[i % len(cells)]}" if i < few else row for i, row in enumerate(rows)]
    Path(file).write_text("\n".join([header, *changed]) + "\n")


def prepared():
    return prepare(read_config(Path("people.toml")), Path())


ALL = '[budgets]\nblank = "left out"\nzero = "left out"\ninfinite = "left out"'


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ("[budgets]", "empty"),
        ('[budgets]\nblank = "left out"', "positive, finite|not numbers"),
        ('[budgets]\nblank = "left out"\nzero = "left out"', "positive, finite|not numbers"),
        ('[budgets]\nzero = "left out"\ninfinite = "left out"', "empty"),
    ],
)
def test_a_missing_budget_is_refused_unless_the_config_says_what_it_means(keys, words):
    write(["", "0", "inf"], few=9)
    change("[budgets]", keys)
    change("classes", "# classes")
    change('target = "label"', 'target = "label"\nclasses = ["no", "yes", ""]')
    with pytest.raises(EpsilonsError, match=words):
        prepared()


def test_records_that_are_left_out_are_neither_trained_on_nor_tested_on():
    change("[budgets]", ALL)
    found = prepared()
    assert (len(found.train.targets), len(found.test.targets), len(found.budgets)) == (41, 14, 41)
    assert found.left_out.startswith("25 of 80 records are left out")
    assert "does not hide" in found.left_out
    assert np.array_equal(budgets_to_train(found.config, Path()).epsilons, found.budgets.epsilons)
    without = Path("people.csv").read_text().splitlines()
    Path("people.csv").write_text("\n".join([without[0], *without[26:]]) + "\n")
    again = prepared()
    assert np.array_equal(again.train.inputs, found.train.inputs)
    assert np.array_equal(again.test.inputs, found.test.inputs)
    assert again.left_out is None


def test_few_records_that_are_left_out_are_not_counted():
    write([""], few=7)
    change("[budgets]", '[budgets]\nblank = "left out"')
    assert prepared().left_out.startswith("Fewer than 20 records are")


def test_names_of_tiers_can_leave_records_out():
    text = Path("people.csv").read_text()
    header, *rows = people(80).splitlines()
    tiers = [row.rpartition(",")[0] + "," + ("none" if i < 30 else "open") for i, row in enumerate(rows)]
    Path("people.csv").write_text("\n".join([header, *tiers]) + "\n")
    change("[budgets]", '[budgets]\ntiers = { open = 4.0 }\nleft_out = ["none"]')
    assert prepared().left_out.startswith("30 of 80")
    assert text != Path("people.csv").read_text()
    change("open = 4.0", "open = 4.0, none = 1.0")
    with pytest.raises(EpsilonsError, match=r"both in budgets\.tiers and in budgets\.left_out"):
        prepared()


def test_one_row_that_is_left_out_leaves_out_its_person():
    header, *rows = people(80).splitlines()
    cells = [row.split(",") for row in rows]
    for i, row in enumerate(cells):
        row[0] = f"p{i // 4} " if i % 4 == 1 else f"p{i // 4}"
        row[-1] = "" if i in (3, 41) else "4"
    Path("people.csv").write_text("\n".join([header, *map(",".join, cells)]) + "\n")
    change('drop = ["id"]', 'person = "id"')
    change("[budgets]", '[budgets]\nblank = "left out"')
    found = prepared()
    assert len(found.budgets) + len(found.test.targets) // 4 == 18
    assert len(found.train.targets) + len(found.test.targets) == 72
    assert found.left_out.startswith("Fewer than 20 persons are left out")


@pytest.mark.parametrize("has_ids", [False, True])
def test_a_file_of_budgets_leaves_records_out_by_position_or_by_id(has_ids):
    Path("people.csv").write_text(people(80))
    cells = ["" if i < 25 else "4" for i in range(80)]
    order = range(79, -1, -1) if has_ids else range(80)
    Path("wishes.csv").write_text("id,wish\n" + "".join(f"{i},{cells[i]}\n" for i in order))
    change('column = "epsilon"', 'file = "wishes.csv"\ncolumn = "wish"\nblank = "left out"')
    change('drop = ["id"]', 'person = "id"\ndrop = ["epsilon"]' if has_ids else 'drop = ["id", "epsilon"]')
    found = prepared()
    assert len(found.train.targets) + len(found.test.targets) == 55
    rows = people(80).splitlines()
    Path("people.csv").write_text("\n".join([rows[0], *rows[26:]]) + "\n")
    Path("wishes.csv").write_text("id,wish\n" + "".join(f"{i},4\n" for i in order if i >= 25))
    again = prepared()
    assert sorted(map(tuple, again.train.inputs)) == sorted(map(tuple, found.train.inputs))


def test_a_file_of_budgets_of_another_length_is_refused():
    Path("wishes.csv").write_text("wish\n" + "\n" * 3 + "4\n" * 60)
    change('column = "epsilon"', 'file = "wishes.csv"\ncolumn = "wish"\nblank = "left out"')
    with pytest.raises(BudgetError, match="63 budgets for the 80 records"):
        prepared()


def test_leaving_out_everybody_is_refused():
    write([""], few=80)
    change("[budgets]", '[budgets]\nblank = "left out"')
    with pytest.raises(DataError, match="All 80 rows of people"):
        prepared()


def test_a_draft_says_which_cells_are_no_budget():
    outcome = epsilons("init", "people.csv", "-o", "new.toml")
    outcome.succeeded("WARNING: 'epsilon' holds cells that are no budget (blank, zero, infinite)")
    text = Path("new.toml").read_text()
    assert all(f'# {name} = "left out"' in text for name in ("blank", "zero", "infinite"))
    Path("new.toml").write_text(text.replace("epochs = 20", "steps = 2"))
    epsilons("train", "new.toml").is_refused(2, "row")
    for name in ("blank", "zero", "infinite"):
        text = text.replace(f"# {name} =", f"{name} =")
    Path("new.toml").write_text(text.replace("epochs = 20", "steps = 2"))
    epsilons("train", "new.toml").succeeded("25 of 80 records are left out")


def test_an_error_counts_rows_of_the_file_and_not_those_that_are_used():
    change("[budgets]", ALL)
    rows = Path("people.csv").read_text().splitlines()
    for row, column, wrong in ((31, 1, "n.b."), (47, 5, "maybe")):
        cells = rows[row + 1].split(",")
        cells[column] = wrong
        Path("people.csv").write_text("\n".join([*rows[: row + 1], ",".join(cells), *rows[row + 2 :]]) + "\n")
        with pytest.raises(DataError, match=f"row {row}, counted from 0 below the header"):
            prepared()


def test_a_column_that_is_called_like_a_row_of_an_error_does_no_harm():
    change("[budgets]", ALL)
    name = "at row 9,999, counted from 0 below the header"
    text = Path("people.csv").read_text().replace("income", f'"{name}"', 1).replace(",north,", ",x,")
    Path("people.csv").write_text(text)
    with pytest.raises(DataError, match="has no column 'income'"):
        prepared()


def test_init_warns_of_tiers_that_differ_by_spelling_and_one_of_them_stands_for_all():
    write(["Streng", "streng", "streng ", "offen"], few=60)
    outcome = epsilons("init", "people.csv", "--budget", "epsilon", "--target", "label", "-o", "new.toml")
    outcome.succeeded()
    said = " ".join((outcome.err + outcome.out).split())
    assert "'Streng', 'streng', 'streng ' of 'epsilon' differ only by case" in said
    assert said.count("differ only by case") == 1
    Path("import.csv").write_text("id,tier\n" + "".join(f"{i},{('Offen ', 'STRENG')[i % 2]}\n" for i in range(60)))
    epsilons("registry", "create", "sqlite:///p.db").succeeded()
    importing = ["registry", "import", "sqlite:///p.db", "import.csv", "--person", "id", "--column", "tier"]
    epsilons(*importing, "--tiers", "streng:1").is_refused(2, "30 of 60 cells")
    epsilons(*importing, "--tiers", "streng:1,offen:2").succeeded("60 of 60 people")
    wishes = json.loads(epsilons("registry", "show", "sqlite:///p.db", "--json").out)["wishes"]
    assert [(one["label"], one["people"]) for one in wishes] == [("1", 20), ("2", 20)]
