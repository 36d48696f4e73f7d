"""Tables that are read by column train as the same tables read at once, bit by bit."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pyarrow
import pytest
import torch
from pyarrow import csv, parquet
from typer.testing import CliRunner

from epsilons.cli import app
from epsilons.configs.config_file import read_config
from epsilons.configs.prepare import Prepared, budgets_to_train, prepare
from epsilons.data import tables
from epsilons.data.arrays import Encoded
from epsilons.errors import DataError, EpsilonsError
from epsilons.tabular import by_column, open_table, read_table
from epsilons.training.datasets import TensorSource
from epsilons.training.fitting.encoded import as_tensor

CONFIG = """
model = {{ name = "logistic" }}
training = {{ steps = 4, batch_size = 40, lr = 0.5, seeds = [3] }}
[data]
train = "people.{kind}"
target = "{target}"
{classes}
person = "patient"
ids = "as written"
drop = ["visit_id", "code"]
read_off = []
test_share = 0.2
numeric = {{ age = [0, 99], income = [0, 9000, "log"] }}
dates = {{ seen = ["2020-01-01", "2024-12-31"] }}
categorical = {{ smoker = ["1", "no"], town = 300 }}
[budgets]
column = "tier"
tiers = {{ strict = 1, open = 4 }}
left_out = ["none"]
"""
ROWS = 400


@pytest.fixture(autouse=True)
def _people(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of all kinds, in which columns that look alike have other cells, and no order is sorted."""
    monkeypatch.chdir(tmp_path)
    coins = np.random.default_rng(5)
    patients = coins.permutation(ROWS) % 90
    table = pyarrow.table(
        {
            "visit_id": [f"v{i // 2}" for i in range(ROWS)],
            "income": [None if i % 7 == 0 else str(x) for i, x in enumerate(np.round(coins.lognormal(5, 2, ROWS), 3))],
            "tier": np.array(["strict", "open", "open", "none"])[patients % 4],
            "seen": (np.datetime64("2020-01-01") + coins.integers(0, 1700, ROWS)).astype(str),
            "town": coins.integers(0, 40, ROWS).astype(str),
            "age": coins.integers(0, 99, ROWS),
            "smoker": np.array(["1", "1.0", "no", "a, b\n"])[coins.integers(0, 4, ROWS)],
            "code": ["x"] * (ROWS - 1) + ["NA"],
            "label": np.array(["no", "yes"])[coins.integers(0, 2, ROWS)],
            "patient": [f"p{i:03}" for i in patients],
        }
    )
    csv.write_csv(table, "people.csv")
    with pyarrow.CompressedOutputStream("people.csv.gz", "gzip") as file:
        csv.write_csv(table, file)
    parquet.write_table(table, "people.parquet", row_group_size=150)


@pytest.fixture
def by_columns(monkeypatch: pytest.MonkeyPatch):
    """Makes every table a large one, with groups of about two columns, small parts, and inputs made when needed."""

    def turn_on() -> None:
        for module, name, value in (
            (by_column, "LARGE", 0),
            (by_column, "GROUP", 9_000),
            (tables, "LARGE", -1),
            (tables, "PART", 7),
        ):
            monkeypatch.setattr(module, name, value)

    return turn_on


def prepared(kind: str, target: str = "label") -> Prepared:
    classes = 'classes = ["no", "yes"]' if target == "label" else ""
    text = CONFIG.format(kind=kind, target=target, classes=classes)
    if target != "label":
        text = text.replace("lr = 0.5", 'lr = 0.5, loss = "mse"').replace('"code"]', '"code", "label"]')
    Path("config.toml").write_text(text)
    return prepare(read_config(Path("config.toml"), ()), Path())


@pytest.mark.parametrize("kind", ["csv", "csv.gz", "parquet"])
@pytest.mark.parametrize("target", ["label", "age"])
def test_records_budgets_and_persons_are_those_of_the_whole_table(kind, target, by_columns):
    whole = prepared(kind, target)
    to_plan = budgets_to_train(whole.config, Path())
    by_columns()
    large = prepared(kind, target)
    assert isinstance(large.train.inputs, Encoded)
    assert not isinstance(whole.train.inputs, Encoded)
    for one, other in ((whole.train, large.train.whole()), (whole.test, large.test.whole())):
        for mine, its in zip(one, other, strict=True):
            assert mine.dtype == its.dtype
            assert mine.tobytes() == its.tobytes()
    np.testing.assert_array_equal(whole.persons, large.persons)
    for budgets in (large.budgets, budgets_to_train(whole.config, Path())):
        np.testing.assert_array_equal(budgets.epsilons[budgets.group], to_plan.epsilons[to_plan.group])
    assert whole.left_out == large.left_out
    assert whole.consent == large.consent


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_a_run_is_the_same_to_the_bit(kind, by_columns):
    prepared(kind)
    found = []
    for run in ("whole", "by-columns"):
        outcome = CliRunner().invoke(app, ["train", "config.toml", "--run-dir", run])
        assert outcome.exit_code == 0, outcome.output
        folder = next(Path(run).rglob("ledger.jsonl")).parent
        lines = map(json.loads, (folder / "ledger.jsonl").read_text().splitlines())
        sums = [line for line in lines if isinstance(line, str)]
        assert len(sums) == 4
        found.append((sums, *((folder / name).read_bytes() for name in ("metrics.jsonl", "model.safetensors"))))
        by_columns()
    assert found[0] == found[1]


@pytest.mark.parametrize("kind", ["csv", "csv.gz", "parquet"])
def test_each_column_has_the_cells_and_type_of_the_whole_table(kind, by_columns):
    texts, path = ["town", "age", "patient", "income"], Path(f"people.{kind}")
    whole = read_table(path, "data", DataError, texts)
    by_columns()
    large = open_table(path, "data", DataError, texts)
    assert isinstance(large, by_column.ByColumn)
    assert (large.column_names, len(large)) == (whole.column_names, len(whole))
    mask = pyarrow.array(np.arange(ROWS) % 3 > 0)
    again = pyarrow.array(np.arange(len(whole.filter(mask))) % 2 > 0)
    for table, part in ((whole, large), (whole.filter(mask).filter(again), large.filter(mask).filter(again))):
        for name in [*whole.column_names[::-1], *whole.column_names]:
            assert table.column(name).type == part.column(name).type
            assert table.column(name).to_pylist() == part.column(name).to_pylist()
        assert part.select(["age", "code"]).to_pydict() == table.select(["age", "code"]).to_pydict()


#: Key, or column -> what is wrong there: each name replaced by one that no column has, and cells that no rule takes.
WRONG_NAMES = (
    ('target = "label"', 'target = "labels"'),
    ('person = "patient"', 'person = "patients"'),
    ('drop = ["visit_id", "code"]', 'drop = ["visits", "code"]'),
    ("numeric = { age", "numeric = { ages"),
    ("dates = { seen", "dates = { sene"),
    ("categorical = { smoker", "categorical = { smokers"),
    ('column = "tier"', 'column = "tiers"'),
    ('column = "tier"', 'column = "tier"\ndelta_column = "deltas"'),
    ('["1", "no"]', '["y", "n"]'),
    ("numeric = { age", "numeric = { seen = [0, 1], age"),
)
WRONG_CELLS = {"age": "old", "income": "1,2,3", "seen": "soon", "tier": "maybe", "label": "", "patient": ""}


def said() -> list[str]:
    """What preparing and planning say of a config; each is refused."""
    found = []
    for make in (prepare, budgets_to_train):
        try:
            make(read_config(Path("config.toml"), ()), Path())
            found.append("nothing")
        except EpsilonsError as error:
            found.append(f"{type(error).__name__}: {error}")
    return found


@pytest.mark.parametrize("kind", ["csv", "parquet"])
@pytest.mark.parametrize("wrong", [*WRONG_NAMES, *WRONG_CELLS.items()], ids=str)
def test_what_is_refused_is_refused_in_the_same_words(kind, wrong, by_columns):
    prepared(kind)
    text = Path("config.toml").read_text()
    if wrong in WRONG_NAMES:
        assert wrong[0] in text
        Path("config.toml").write_text(text.replace(*wrong))
    else:
        column, cell = wrong
        table = read_table(Path(f"people.{kind}"), "data", DataError, [column])
        cells = table.column(column).cast("string").to_pylist()
        cells[311] = cell
        table = table.set_column(table.column_names.index(column), column, pyarrow.array(cells))
        write = csv.write_csv if kind == "csv" else parquet.write_table
        write(table, f"people.{kind}")
    whole = said()
    assert whole[0] != "nothing"
    by_columns()
    assert said() == whole


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_a_file_that_changes_while_it_is_read_is_refused(kind, by_columns):
    by_columns()
    path = Path(f"people.{kind}")
    large = open_table(path, "data", DataError, ["age"])
    large.column("age")
    os.utime(path, ns=(1, 1))
    with pytest.raises(DataError, match="changed while it was read"):
        large.column("town")


def test_some_inputs_are_those_of_all(by_columns):
    by_columns()
    encoded = prepared("parquet").train.inputs
    lazy, dense = as_tensor(encoded), torch.from_numpy(np.asarray(encoded))
    rows = torch.tensor([5, 0, 5, 17])
    for read in (
        lambda x: x[3],
        lambda x: x[-1],
        lambda x: x[2:9:3],
        lambda x: x[rows],
        lambda x: x[rows.reshape(2, 2)],
        lambda x: x.index_select(0, rows),
        lambda x: x[torch.arange(len(x)) % 3 == 0],
        lambda x: x[:, 3],
        lambda x: x[rows, rows],
        lambda x: x.detach()[rows],
        lambda x: torch.nn.functional.linear(x, torch.ones(2, x.shape[1])),
        lambda x: x.double().sum(1),
    ):
        assert torch.equal(read(lazy), read(dense))
        assert type(read(lazy)) is torch.Tensor
    some = rows.numpy()
    assert (np.asarray(encoded[some][some[:3] % 4][::-1]) == dense.numpy()[some][some[:3] % 4][::-1]).all()
    assert TensorSource([lazy]).fingerprint() == TensorSource([dense]).fingerprint()
    assert "EncodedTensor" in repr(lazy)


@pytest.mark.parametrize("values", [2, 127, 128, 300, 40_000])
def test_every_value_of_a_category_has_its_own_column(values):
    """Whatever type holds the places, by the definition of a bucket and by that of a list."""
    texts = [str(i) for i in range(0, values, max(values // 40, 1))]
    table = pyarrow.table({"a": texts})
    listed = [str(i) for i in range(values)]
    for rule, places in ((values, [tables._bucket("a", text, values) for text in texts]), (listed, map(int, texts))):
        inputs, _ = tables.record_inputs(table, "", tables.Features(categorical={"a": rule}), Path("a.csv"))
        assert inputs.shape == (len(texts), values)
        assert inputs.argmax(axis=1).tolist() == list(places)
        assert np.count_nonzero(inputs) == inputs.sum() == len(texts)
