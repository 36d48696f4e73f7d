"""DataFrames and dicts of columns as data sets: read row by row, with the number of rows as the number of records."""

from __future__ import annotations

from collections import UserDict
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import default_collate

import epsilons
from epsilons.draws.persons_rows import Readings
from epsilons.draws.randomness import Randomness
from epsilons.errors import DataError
from epsilons.training import EvalData
from epsilons.training.datasets import PhysicalBatch, data_source
from epsilons.training.validation import named_columns

RECORDS = 60


class Series:
    """As a column of pandas or polars."""

    def __init__(self, values: np.ndarray) -> None:
        self._values, self.dtype = values, values.dtype

    def __len__(self) -> int:
        return len(self._values)

    def to_numpy(self) -> np.ndarray:
        return self._values


class Frame:
    """As a DataFrame of pandas or polars: columns by name, and a length."""

    def __init__(self, columns: dict[Any, np.ndarray]) -> None:
        self._data, self.columns = columns, list(columns)

    def __len__(self) -> int:
        return len(next(iter(self._data.values())))

    def __getitem__(self, name: Any) -> Any:
        return Frame({n: self._data[n] for n in name}) if isinstance(name, list) else Series(self._data[name])

    def to_numpy(self) -> Any:
        raise AssertionError("columns are read one by one")


def columns() -> dict[Any, np.ndarray]:
    rng = np.random.default_rng(0)
    return {
        "age": rng.integers(18, 90, RECORDS),
        "income": rng.normal(size=RECORDS).astype(np.float32),
        "member": rng.random(RECORDS) > 0.5,
        "target": np.arange(RECORDS) // 7 % 2,
    }


def pandas_frame(values: dict[Any, np.ndarray]) -> Any:
    return pytest.importorskip("pandas").DataFrame(values)


def polars_frame(values: dict[Any, np.ndarray]) -> Any:
    return pytest.importorskip("polars").DataFrame(values)


def tensors(values: dict[Any, np.ndarray]) -> dict[Any, torch.Tensor]:
    return {name: torch.from_numpy(column) for name, column in values.items()}


def read_only(values: dict[Any, np.ndarray]) -> Any:
    for column in values.values():
        column.setflags(write=False)
    return MappingProxyType(values)


KINDS = {"frame": Frame, "pandas": pandas_frame, "polars": polars_frame, "dict": dict, "tensors": tensors}
KINDS |= {"user dict": UserDict, "read-only": read_only, "reversed": lambda d: {n: c[::-1][::-1] for n, c in d.items()}}


def plan_of(records: int = RECORDS) -> tuple[epsilons.Budgets, epsilons.Plan]:
    budgets = epsilons.Budgets([1.0, 4.0] * (records // 2), delta=1e-3)
    return budgets, epsilons.plan(budgets, epsilons.Recipe(4, 20, 1.0), accountant="rdp")


@pytest.mark.parametrize("kind", KINDS)
def test_batches_are_those_of_default_collate_over_rows(kind):
    values = columns()
    source = data_source(KINDS[kind](columns()))
    assert len(source) == RECORDS
    rows = np.array([3, 1, 59])
    randomness = Randomness(bytes(32))
    readings = Readings(rows, np.ones_like(rows), rows, np.zeros_like(rows))
    ((_, batch),) = source.stream([PhysicalBatch(0, 0, 0, 1, readings)], torch.device("cpu"), randomness)
    expected = default_collate(
        [{name: torch.as_tensor(column[row]) for name, column in values.items()} for row in rows]
    )
    assert list(batch) == list(expected)
    for name, column in expected.items():
        assert batch[name].dtype == column.dtype
        assert torch.equal(batch[name], column)


@pytest.mark.parametrize("kind", ["frame", "pandas", "dict"])
def test_make_private_trains_on_columns_by_name(kind):
    budgets, plan = plan_of()
    model = nn.Linear(2, 2)
    private = epsilons.make_private(
        model, torch.optim.SGD(model.parameters(), lr=0.1), KINDS[kind](columns()), plan, budgets=budgets
    )
    for batch in private.batches:
        inputs = torch.stack([batch["age"] / 90, batch["income"]], dim=1)
        private.backward(F.cross_entropy(model(inputs), batch["target"], reduction="none"))
        private.step()
    private.close()
    assert private.ledger.charged == (4,)


@pytest.mark.parametrize("kind", ["frame", "pandas", "polars"])
def test_fit_trains_on_a_frame_and_a_column_as_on_their_arrays(kind):
    budgets, plan = plan_of()
    values = {name: column for name, column in columns().items() if name != "member"}
    values["age"] = (values["age"] / 90).astype(np.float32)
    frame = KINDS[kind](values)
    inputs = np.stack([values["age"], values["income"]], axis=1)
    found = []
    for data in ((frame[["age", "income"]], frame["target"]), (inputs, values["target"])):
        torch.manual_seed(0)
        model = nn.Linear(2, 2)
        epsilons.fit(
            model,
            data,
            plan,
            budgets=budgets,
            training=epsilons.Training(progress=False),
            evaluation=EvalData(data),
            seed=0,
        )
        found.append(model.weight.detach().clone())
    assert torch.equal(*found)


@pytest.mark.parametrize("kind", ["frame", "pandas", "dict"])
def test_fit_says_how_to_pass_columns_by_name(kind):
    budgets, plan = plan_of()
    with pytest.raises(DataError, match=r"4 columns \('age', 'income', 'member', 'target'\).*frame\[target\]"):
        epsilons.fit(nn.Linear(2, 2), KINDS[kind](columns()), plan, budgets=budgets)


def test_budgets_for_another_number_of_rows_name_both_numbers():
    budgets, plan = plan_of(40)
    model = nn.Linear(2, 2)
    with pytest.raises(DataError, match="40 budgets for a data set of 60 records"):
        epsilons.make_private(model, torch.optim.SGD(model.parameters(), lr=0.1), columns(), plan, budgets=budgets)


@pytest.mark.parametrize("kind", ["frame", "pandas", "polars", "dict"])
@pytest.mark.parametrize(
    "column",
    [
        np.array(["north"] * RECORDS, dtype=object),
        np.array(["2020-01-01"] * RECORDS, dtype="datetime64[ns]"),
    ],
    ids=["text", "date"],
)
def test_columns_without_numbers_are_refused_by_name(kind, column):
    data = KINDS[kind](columns() | {"town": column})
    with pytest.raises(DataError, match=r"1 of 5 columns of .* hold no numbers: 'town'.*epsilons init"):
        data_source(data)
    if kind != "dict":
        with pytest.raises(DataError, match="hold no numbers: 'town'"):
            data_source((data, columns()["target"]))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"x": [1.0, 2.0], "y": [0, 1]}, "Got a dict of 2 entries \\('x', 'y'\\).*numpy.asarray"),
        ({"x": np.zeros(3), "y": np.zeros(4)}, "one row per record each"),
        ({"x": np.array(1.0)}, "single number"),
        ([Frame({"x": np.zeros(3)})], "list of DataFrames"),
    ],
)
def test_other_dicts_and_lists_are_refused(data, message):
    with pytest.raises(DataError, match=message):
        data_source(data)


def test_two_columns_with_one_name_are_refused():
    frame = Frame({"x": np.zeros(3)})
    frame.columns = ["x", "x"]
    with pytest.raises(DataError, match="two columns with one name"):
        data_source(frame)


def test_a_collate_function_is_refused_for_columns():
    with pytest.raises(DataError, match="Leave out collate_fn"):
        data_source(columns(), collate=list)


def test_a_dict_of_records_by_number_stays_a_data_set_of_records():
    assert named_columns({0: torch.zeros(3), 1: torch.zeros(3)}) is None
    assert len(data_source({0: torch.zeros(3), 1: torch.zeros(3)})) == 2


def test_the_names_of_columns_are_in_the_fingerprint():
    one, other = columns(), columns()
    other["years"] = other.pop("target")
    assert data_source(one).fingerprint() == data_source(columns()).fingerprint()
    assert data_source(one).fingerprint() != data_source(other).fingerprint()
