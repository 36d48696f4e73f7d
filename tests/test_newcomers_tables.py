"""What a data scientist met with a hospital's tables: messages with the right row and what to do, right units."""

from __future__ import annotations

import io
import time
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")

from epsilons.data.infer import guess_table
from epsilons.errors import DataError
from epsilons.tabular import reading, table_files
from epsilons.training.predicting.table_parts import check_columns
from program import CONFIG, change, epsilons, people


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """The current folder, with a config and its table of 80 people."""
    monkeypatch.chdir(tmp_path)
    Path("people.csv").write_text(people(80))
    Path("people.toml").write_text(CONFIG)


def consents(cells: dict[int, str]) -> None:
    """Write the table with these cells of consent."""
    header, *rows = Path("people.csv").read_text().splitlines()
    rows = [f"{row.rsplit(',', 1)[0]},{cells[i]}" if i in cells else row for i, row in enumerate(rows)]
    Path("people.csv").write_text("\n".join([header, *rows]) + "\n")


@pytest.mark.parametrize(("cell", "words"), [("inf", 'infinite = "left out"'), ("abc", "not numbers")])
def test_a_bad_budget_behind_left_out_rows_is_named_by_its_row_in_the_file(cell, words):
    consents({0: "", 1: "", 5: "", 30: cell})
    change("[budgets]", '[budgets]\nblank = "left out"')
    epsilons("plan", "people.toml").is_refused(2, "row 30,", "of 80 cells", words)


def test_a_blank_budget_behind_left_out_rows_is_named_by_its_row_in_the_file():
    consents({0: "0", 1: "0", 30: ""})
    change("[budgets]", '[budgets]\nzero = "left out"')
    epsilons("plan", "people.toml").is_refused(2, "row 30,")


def test_a_tier_without_epsilon_is_refused_with_both_ways_out():
    consents(dict.fromkeys(range(80), "open") | dict.fromkeys(range(40, 80), "none"))
    change("[budgets]", "[budgets]\ntiers = { open = 8 }")
    epsilons("plan", "people.toml").is_refused(2, "epsilon of every tier", "left_out")
    change("tiers = { open = 8 }", "tiers = { open = 8, none = 0.0 }")
    epsilons("plan", "people.toml").is_refused(2, "Write the epsilon of each tier", "left_out")


def test_the_draft_s_delta_is_below_one_over_all_persons():
    rows = [f"P{i % 110_000},{i % 90},{'yes' if i % 3 else 'no'},1" for i in range(120_000)]
    Path("visits.csv").write_text("patient_id,age,label,epsilon\n" + "\n".join(rows) + "\n")
    epsilons("init", "visits.csv").succeeded("Predicts: 'label' (a guess; --target names another column)")
    assert "delta = 1e-06" in Path("visits.toml").read_text()


def test_numbers_with_a_sign_are_no_codes():
    bills = np.random.default_rng(0).permutation(5_000) - 2_500
    lines = [f"{bill},{bill + 10_000},{'yes' if bill > 0 else 'no'},1" for bill in bills]
    Path("bills.csv").write_text("bill,total,label,epsilon\n" + "\n".join(lines) + "\n")
    codes = {column.name: column.code for column in guess_table(Path("bills.csv"), None, None).columns}
    assert codes == {"bill": None, "total": "either"}


def test_the_report_of_a_number_shows_its_errors_in_its_unit():
    change('target = "label"', 'target = "age"\ntest_public = true')
    change('classes = ["no", "yes"]', "")
    change('drop = ["id"]', 'drop = ["id", "label"]')
    change("steps = 4", 'steps = 4\nloss = "mse"')
    epsilons("train", "people.toml", "-q").succeeded()
    epsilons("report", "runs/people-1", "-q").succeeded()
    for name in ("report", "report-release"):
        page = Path(f"runs/people-1/{name}.html").read_text()
        assert "mean absolute error" in page, name
        assert "squared units of the target" not in page, name  # the loss is that of the scaled target


def test_the_report_of_two_classes_shows_the_auc():
    Path("people.csv").write_text(people(400))
    epsilons("train", "people.toml", "-q").succeeded()
    epsilons("report", "runs/people-1", "-q").succeeded()
    assert "AUC: 0." in Path("runs/people-1/report.html").read_text()
    assert "AUC" not in Path("runs/people-1/report-release.html").read_text()


def test_a_table_with_another_separator_than_training_is_named_as_such():
    with pytest.raises(DataError, match="not separated as those of training"):
        check_columns(["age", "town"], ["id,age,town"], Path("new.csv"))
    with pytest.raises(DataError, match="no column 'town', which --keep names"):
        check_columns(["town"], ["id", "age"], Path("new.csv"), "which --keep names")


def test_a_file_that_is_left_early_is_read_no_further(monkeypatch):
    """A thread of pyarrow that calls Python while the process ends aborts it: `epsilons predict --keep NO-COLUMN`."""
    reads = []

    class Slow(io.BytesIO):
        def read(self, size: int | None = -1) -> bytes:
            time.sleep(0.05)
            reads.append(size)
            return super().read(size)

    Path("long.csv").write_text("a,b\n" + "1,2\n" * 200_000)
    monkeypatch.setattr(reading, "BLOCK", 1 << 14)
    monkeypatch.setattr(table_files, "opened", lambda path, is_gzip: Slow(path.read_bytes()))
    with reading.reader(table_files.text_file(Path("long.csv"), DataError), ()) as reader:
        assert reader.schema.names == ["a", "b"]
    made = len(reads)
    time.sleep(0.3)
    assert len(reads) == made < 12
