"""Predictions of a trained model: those of training's own evaluation, from any folder, for any order of columns.

The oracles are the loss and the accuracy that training measured on its test file, and a network by hand in numpy.
"""

from __future__ import annotations

import csv
import gzip
import hashlib
import io
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet

from options import fit_flat

pytest.importorskip("torch")

import torch
from safetensors.numpy import load_file
from torch import nn

import epsilons
import some_models
from epsilons.errors import DataError, RunError
from epsilons.training.predicting.table_parts import ROWS
from program import change, python
from program import epsilons as command

EVERY = [*some_models.KINDS, *(pytest.param(name, marks=pytest.mark.slow) for name in some_models.LARGE)]


def trained(kind: str) -> str:
    """Train in the current folder, into runs/people-1; returns the test file."""
    config = (some_models.KINDS | some_models.LARGE)[kind]()
    Path("people.toml").write_text(config, encoding="utf-8")
    command("train", "people.toml", "-q").succeeded()
    return some_models.tested_on(config)


@pytest.fixture(scope="module")
def people(tmp_path_factory) -> Path:
    """A folder with a finished run of a table, which no test changes."""
    folder: Path = tmp_path_factory.mktemp("people")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        trained("mlp")
    return folder


@pytest.fixture
def run(people, monkeypatch, tmp_path) -> Path:
    """The path of that run, from an empty folder."""
    monkeypatch.chdir(tmp_path)
    return people / "runs/people-1"


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def probabilities(path: Path, table: Any) -> Any:
    return epsilons.Run.load(path).predict(table).probabilities


# -- the same numbers as in training -----------------------------------------------------------------------------------


def loss_and_accuracy(predicted: epsilons.Predictions, name: str) -> tuple[float, float | None]:
    """Mean cross-entropy and accuracy on the test file; for numbers the mean square, on the scale of training."""
    rows = some_models.targets(name)
    if predicted.values is not None:
        wanted = np.array([float(row["price"]) for row in rows])
        scaled = "price = [0" in Path("people.toml").read_text()

        def on_scale(values: Any) -> Any:
            return 2 * np.arcsinh(values) / math.asinh(1000) - 1 if scaled else values

        clipped = np.clip(wanted, 0, 1000) if scaled else wanted
        return float(np.mean((on_scale(predicted.values) - on_scale(clipped)) ** 2)), None
    assert predicted.classes is not None
    assert predicted.probabilities is not None
    names = [row["label"] for row in rows] if isinstance(rows, list) else [predicted.classes[i] for i in rows]
    indices = [predicted.classes.index(name) for name in names]
    chosen = predicted.probabilities[np.arange(len(indices)), indices]
    return float(-np.log(chosen).mean()), float((predicted.labels == np.array(names)).mean())


@pytest.mark.parametrize("kind", EVERY)
def test_predictions_are_those_of_the_evaluation_in_training(kind, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    name = trained(kind)
    measured = json.loads(Path("runs/people-1/metrics.jsonl").read_text().splitlines()[-1])
    command("release", "runs/people-1", "-q").succeeded()
    predicted = epsilons.Run.load("runs/people-1").predict(name)
    released = epsilons.Predictor.load("runs/people-1/release").predict(name)
    loss, accuracy = loss_and_accuracy(predicted, name)
    assert loss == pytest.approx(measured["loss"], rel=2e-6)
    assert accuracy == measured.get("accuracy", accuracy)
    for ours, theirs in ((predicted.probabilities, released.probabilities), (predicted.values, released.values)):
        assert (ours is None) == (theirs is None)
        if ours is not None and theirs is not None:
            np.testing.assert_array_equal(ours, theirs)


def by_hand(row: dict[str, str], weights: dict[str, Any]) -> Any:
    """The probabilities of one row of `some_models.mlp`, from its cells as texts."""
    age, income = (float(row[name]) if row[name] not in ("", "NA") else None for name in ("age", "income"))
    inputs = [0.0 if age is None else min(max(age / 50 - 1, -1), 1)]
    high = math.asinh(100_000)
    inputs.append(0.0 if income is None else min(max(2 * math.asinh(income) / high - 1, -1), 1))
    known = {"1999-12-31": -1.0, "2010-07-02": 2 * 3835 / 7305 - 1, "31.12.2019": 2 * 7304 / 7305 - 1}
    inputs.append(0.0 if row["seen"] == "" else known.get(row["seen"], 1.0))
    inputs += [float(row["town"] == town) for town in ("north", "south")]
    inputs += [float(row["band"] in spellings) for spellings in (("1",), ("2.0",), ("03",))]
    bucket = int.from_bytes(hashlib.blake2b(f"job={row['job']}".encode(), digest_size=8).digest(), "big") % 4
    inputs += [float(number == bucket) for number in range(4)]
    hidden = np.tanh(weights["1.weight"] @ np.array(inputs) + weights["1.bias"])
    logits = weights["3.weight"] @ hidden + weights["3.bias"]
    return np.exp(logits) / np.exp(logits).sum()


def test_predictions_are_those_of_a_network_by_hand(run, people):
    """With empty cells, numbers beyond the bounds, and values that no list has."""
    rows = rows_of(people / "test.csv")
    weights = {name: array.astype(np.float64) for name, array in load_file(run / "model.safetensors").items()}
    expected = np.array([by_hand(row, weights) for row in rows])
    np.testing.assert_allclose(probabilities(run, people / "test.csv"), expected, atol=1e-6)
    assert "" in {row["age"] for row in rows}
    assert {row["band"] for row in rows} == {"1", "2.0", "03", "x", ""}


def test_a_record_s_prediction_does_not_depend_on_the_other_rows(run, people):
    rows = rows_of(people / "test.csv")
    whole = probabilities(run, people / "test.csv")
    for number in (0, 7, 59):
        alone = {name: [cell] for name, cell in rows[number].items()}
        np.testing.assert_allclose(probabilities(run, alone)[0], whole[number], atol=1e-6)


def test_many_unknown_values_together_are_as_one_of_them(run):
    """In training a list that no cell matches is refused as misspelt; a table to predict may hold only new values."""
    row = {"age": 50, "income": 1e4, "seen": "", "town": "east", "band": "x", "job": "smith"}
    many = probabilities(run, {name: [value] * 30 for name, value in row.items()})
    np.testing.assert_allclose(many, np.repeat(probabilities(run, {n: [v] for n, v in row.items()}), 30, 0), atol=1e-6)


# -- tables of every form ----------------------------------------------------------------------------------------------


def cells_of(people: Path) -> dict[str, list[Any]]:
    """The columns of the test file with types, and None for empty cells."""
    rows = rows_of(people / "test.csv")
    numbers = {n: [float(r[n]) if r[n] not in ("", "NA") else None for r in rows] for n in ("age", "income")}
    return numbers | {name: [row[name] for row in rows] for name in ("seen", "town", "band", "job")}


def written_csv(columns: dict[str, list[Any]], path: Path) -> Path:
    with path.open("w", encoding="utf-8", newline="") as file:
        table = csv.writer(file)
        table.writerow(columns)
        table.writerows(zip(*columns.values(), strict=True))
    return path


def test_order_of_columns_and_extra_columns_do_not_matter(run, people):
    expected = probabilities(run, people / "test.csv")
    rows = rows_of(people / "test.csv")
    turned = {name: [row[name] for row in rows] for name in reversed(rows[0])}
    turned["a column, of no use"] = ["=1+1"] * len(rows)
    np.testing.assert_array_equal(probabilities(run, written_csv(turned, Path("turned.csv"))), expected)
    without = {name: cells for name, cells in turned.items() if name not in ("label", "epsilon", "id", "note", "price")}
    np.testing.assert_array_equal(probabilities(run, written_csv(without, Path("without.csv"))), expected)


def test_a_table_in_memory_is_predicted_as_its_file(run, people):
    expected, cells = probabilities(run, people / "test.csv"), cells_of(people)
    table = pa.table(cells)
    parquet.write_table(table, "new.parquet", row_group_size=7)
    codes = table.set_column(3, "town", pa.array(cells["town"]).dictionary_encode())
    numbers = {n: np.array(c, dtype=float) for n, c in cells.items() if n in ("age", "income")}
    objects = {"town": np.array([town or np.nan for town in cells["town"]], dtype=object)}
    for given in (cells, cells | objects, table, codes, Path("new.parquet"), "new.parquet", cells | numbers):
        np.testing.assert_array_equal(probabilities(run, given), expected)


def test_a_dataframe_is_predicted_as_its_file(run, people):
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame(cells_of(people)).set_index(pandas.Index(range(60), name="visit"))
    np.testing.assert_array_equal(probabilities(run, frame), probabilities(run, people / "test.csv"))
    frame["town"] = frame["town"].astype("category")
    np.testing.assert_array_equal(probabilities(run, frame), probabilities(run, people / "test.csv"))


def test_parts_of_a_table_are_joined_in_order(run, people):
    cells = {name: (values * 50)[:2500] for name, values in cells_of(people).items()}
    expected = np.tile(probabilities(run, people / "test.csv"), (50, 1))[:2500]
    written_csv({n: ["" if v is None else v for v in values] for n, values in cells.items()}, Path("long.csv"))
    for given in (cells, "long.csv"):
        parts = list(epsilons.Predictor.load(run).stream(given))
        assert max(map(len, parts)) == ROWS
        assert sum(map(len, parts)) == 2500
        joined = np.concatenate([part.probabilities for part in parts if part.probabilities is not None])
        np.testing.assert_allclose(joined, expected, atol=1e-6)


@pytest.mark.parametrize(("separator", "encoding", "name"), [(";", "utf-16", "a.csv"), ("\t", "utf-8-sig", "a.tsv.gz")])
def test_a_text_file_of_another_form_is_predicted_as_the_plain_one(separator, encoding, name, run, people):
    text = io.StringIO()
    table = csv.writer(text, delimiter=separator)
    table.writerows(csv.reader((people / "test.csv").read_text(encoding="utf-8").splitlines()))
    content = text.getvalue().encode(encoding)
    Path(name).write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    np.testing.assert_array_equal(probabilities(run, name), probabilities(run, people / "test.csv"))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{header}\n{row}\n\n", "ends with blank lines"),
        ('{header}\n{row}\n"{row}\n', "quotation mark"),
        ("{header}\n{row}\n{row},7\n", "have another number"),
        ("", "is empty"),
        ("PK\x03\x04 a workbook", "a zip archive or a workbook"),
    ],
)
def test_a_damaged_file_is_refused_with_the_reason_of_training(text, words, run):
    header, row = "age,income,seen,town,band,job", "1,2,,secret,b,c"
    Path("new.csv").write_text(text.format(header=header, row=row))
    with pytest.raises(DataError, match=words) as caught:
        probabilities(run, "new.csv")
    assert "secret" not in str(caught.value)


# -- what is refused ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("town", "twon", r"no column 'town', which .* Did you mean 'twon'\?"),
        ("age", "x", r"no column 'age'"),
        ("job", "town", r"no column 'job'"),
        ("id", "town", r"several columns called 'town'"),
    ],
)
def test_a_missing_column_is_named(old, new, words, run, people):
    header, _, rest = (people / "test.csv").read_text(encoding="utf-8").partition("\n")
    names = [new if name == old else name for name in header.split(",")]
    Path("new.csv").write_text(",".join(names) + "\n" + rest, encoding="utf-8")
    with pytest.raises(DataError, match=words):
        probabilities(run, "new.csv")


def test_all_missing_columns_are_named(run):
    with pytest.raises(DataError, match=r"no column 'income', 'seen', 'band', which"):
        probabilities(run, {"age": [1], "town": ["north"], "job": ["smith"]})


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ({"age": ["ten"]}, r"1 or more cells of column 'age' .* are not numbers"),
        ({"age": [1, 2]}, "one value per row"),
        ([1, 2], "got a list"),
        (7, "got a int"),
        ("missing.csv", "missing.csv"),
        ("people.docx", "people.docx"),
    ],
)
def test_something_that_is_no_table_is_refused(table, words, run):
    row = {"income": [1.0], "seen": [""], "town": ["north"], "band": [1], "job": ["smith"]}
    with pytest.raises(DataError, match=words):
        probabilities(run, row | table if isinstance(table, dict) else table)


@pytest.mark.parametrize("bad", [(5,), (2 * ROWS + 5,), (2 * ROWS + 5, 2 * ROWS + 9), (3 * ROWS - 1,)])
@pytest.mark.parametrize("is_file", [True, False])
def test_a_bad_cell_is_told_by_its_row_in_the_table_and_without_a_total_of_a_part(bad, is_file, run):
    columns: dict[str, list[Any]] = {"age": ["1"] * (3 * ROWS), "income": ["1.0"] * (3 * ROWS)}
    columns |= {name: ["x"] * (3 * ROWS) for name in ("seen", "town", "band", "job")}
    columns["seen"] = [""] * (3 * ROWS)
    for row in bad:
        columns["age"][row] = "secret words"
    table: Any = columns
    if is_file:
        table = Path("later.csv")
        lines = [",".join(row) for row in zip(*columns.values(), strict=True)]
        table.write_text("\n".join([",".join(columns), *lines]) + "\n")
    with pytest.raises(DataError) as caught:
        probabilities(run, table)
    message = str(caught.value)
    assert message.startswith(f"{len(bad)} or more cells of column 'age' in ")
    assert f"first at row {bad[0]:,}, counted from 0 below the header" in message
    assert f"{ROWS:,}" not in message
    assert "secret" not in message


def test_a_table_without_rows_has_no_predictions(run):
    names = ("age", "income", "seen", "town", "band", "job")
    assert len(epsilons.Run.load(run).predict({name: [] for name in names})) == 0
    Path("new.csv").write_text(",".join(names) + "\n")
    command("predict", run, "new.csv", "-o", "scored.csv").is_refused(2, "no rows")
    assert not Path("scored.csv").exists()


def test_a_run_without_a_trained_model_is_refused(run, tmp_path):
    with pytest.raises(RunError, match=r"is no folder"):
        epsilons.Predictor.load("nowhere")
    with pytest.raises(RunError, match="holds no run"):
        epsilons.Run.load(tmp_path)
    with pytest.raises(RunError, match=r"has no model.safetensors. It holds people-1"):
        epsilons.Predictor.load(run.parent)


# -- the command -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ending", ["csv", "parquet"])
def test_the_command_writes_one_row_for_each(ending, run, people):
    done = command("predict", run, people / "test.csv", "-o", f"scored.{ending}", "--keep", "id", "--keep", "town")
    done.succeeded("60 rows predicted")
    expected = epsilons.Run.load(run).predict(people / "test.csv")
    kept = rows_of(people / "test.csv")
    rows = rows_of(Path("scored.csv")) if ending == "csv" else parquet.read_table("scored.parquet").to_pylist()
    assert list(rows[0]) == ["id", "town", "prediction", "probability_no", "probability_yes"]
    assert [(row["id"], row["town"]) for row in rows] == [(row["id"], row["town"]) for row in kept]
    assert [row["prediction"] for row in rows] == expected.labels.tolist()
    numbers = [[float(row[f"probability_{name}"]) for name in ("no", "yes")] for row in rows]
    np.testing.assert_allclose(numbers, expected.probabilities, rtol=1e-15)
    assert Path(f"scored.{ending}").stat().st_mode & 0o77 == 0


def test_the_command_replaces_no_file_and_leaves_none_of_a_failure(run, people):
    Path("old.csv").write_text("kept")
    command("predict", run, people / "test.csv", "-o", "old.csv").is_refused(2, "exists already")
    command("predict", run, people / "test.csv", "-o", "scored.txt").is_refused(2, ".csv or .parquet")
    command("predict", run, people / "test.csv", "-o", "no/such/scored.csv").is_refused(2, "cannot be written")
    command("predict", run, people / "test.csv", "-o", "x.csv", "--keep", "nme").is_refused(2, "no column 'nme'")
    command("predict", run, people / "test.csv", "-o", "x.csv", "--keep", "town", "--keep", "x").is_refused(2, "'x'")
    Path("bad.csv").write_text("age,income,seen,town,band,job\n" + "1,2,,a,b,c\n" * 5000 + "x,2,,a,b,c\n")
    command("predict", run, "bad.csv", "-o", "x.csv").is_refused(2, "not numbers")
    assert {path.name for path in Path().iterdir()} == {"old.csv", "bad.csv"}
    assert Path("old.csv").read_text() == "kept"


# -- models of the caller ----------------------------------------------------------------------------------------------


def fitted(model: nn.Module, **options: Any) -> epsilons.Run:
    torch.manual_seed(0)
    budgets = epsilons.Budgets([1.0, 4.0] * 30, delta=1e-3)
    plan = epsilons.plan(budgets, epsilons.Recipe(steps=3, batch_size=20, clip_norm=1.0), accountant="rdp")
    data = torch.randn(60, 4), torch.arange(60) % 3
    return fit_flat(model, data, plan, budgets=budgets, **options)


def test_a_network_of_the_caller_gets_the_weights(tmp_path):
    model = nn.Linear(4, 3)
    run = fitted(model, run_dir=tmp_path / "run")
    with pytest.raises(RunError, match=r"caller's own.*model=yours.*load_model"):
        run.predict(np.zeros((2, 4)))
    records = np.random.default_rng(0).normal(size=(5, 4)).astype(np.float32)
    expected = model(torch.from_numpy(records)).softmax(1).detach()
    for given in (records, torch.from_numpy(records)):
        np.testing.assert_allclose(run.predict(given, model=nn.Linear(4, 3)).probabilities, expected, atol=1e-6)
    with pytest.raises(RunError, match="cannot be loaded into Linear"):
        run.predict(records, model=nn.Linear(4, 2))
    with pytest.raises(epsilons.EpsilonsError, match="cannot take these records"):
        run.predict(np.zeros((2, 9)), model=nn.Linear(4, 3))
    with pytest.raises(DataError, match="arrays, not on a table"):
        run.predict({"a": [1]}, model=nn.Linear(4, 3))


def test_a_model_of_the_table_is_built_again_for_fit(tmp_path):
    from epsilons.models import build

    made = build("mlp", (4,), 3, hidden=[5])
    run = fitted(made, run_dir=tmp_path / "run")
    records = np.random.default_rng(0).normal(size=(5, 4)).astype(np.float32)
    before = torch.random.get_rng_state()
    np.testing.assert_allclose(
        run.predict(records).probabilities, made(torch.from_numpy(records)).softmax(1).detach(), atol=1e-6
    )
    assert torch.equal(before, torch.random.get_rng_state())
    with pytest.raises(DataError, match=r"trained on records of shape \(4,\), got \(7,\)"):
        run.predict(np.zeros((2, 7)))


def test_a_run_that_kept_no_files_cannot_predict():
    with pytest.raises(RunError, match="kept no files"):
        fitted(nn.Linear(4, 3)).predict(np.zeros((1, 4)))


def test_no_code_that_a_folder_names_is_run(run, tmp_path):
    """A model by import path is the user's own code: a folder from elsewhere must not choose what is imported."""
    import shutil

    shutil.copytree(run, tmp_path / "other")
    change('"name": "mlp"', '"name": "os:getcwd"', str(tmp_path / "other/model.json"))
    with pytest.raises(RunError, match="run no code that it names"):
        epsilons.Predictor.load(tmp_path / "other")


@pytest.mark.parametrize("old", ["0.0", "false", '"table"', '"classes"', "1", '"declared"', '"mlp"', "8"])
def test_a_description_of_another_shape_is_refused(old, run, tmp_path):
    import shutil

    shutil.copytree(run, tmp_path / "other")
    text = (run / "model.json").read_text()
    for new in ('"x"', "-1", "null", "[]", "1e999", "{"):
        (tmp_path / "other/model.json").write_text(text.replace(old, new, 1))
        if text.replace(old, new, 1) != text:
            with pytest.raises(epsilons.EpsilonsError):
                epsilons.Predictor.load(tmp_path / "other").predict({"age": [1]})


def test_a_repr_of_predictions_shows_none(run, people):
    predicted = epsilons.Run.load(run).predict(people / "test.csv")
    assert repr(predicted) == "Predictions(60 rows, classes no, yes)"


def test_predictions_come_from_the_folder_alone(run, people, tmp_path):
    """In a process of its own, in another folder, with the release alone."""
    import shutil

    command("release", run, "-o", tmp_path / "model", "-q").succeeded()
    shutil.copy(people / "test.csv", tmp_path / "new.csv")
    expected = probabilities(run, people / "test.csv").tolist()
    code = "import epsilons; print(epsilons.Predictor.load('model').predict('new.csv').probabilities.tolist())"
    assert json.loads(python(code, tmp_path)) == expected
