"""Promise: a budget stays with its record, by its index, through shuffles, chunks, workers and kinds of data sets."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, Subset, TensorDataset

from .adapters import Inexpressible, Table, Trainer, record
from .probes import CLOSE, NEXT_TO_NONE, Echo, losses_of_echo, mixed, one_hot, who

RECORDS, UPDATES = 60, 10
TABLE = Table(UPDATES, mixed(RECORDS, 3), (0.2, 0.4, 0.9), (0.5, 1.0, 2.0), NEXT_TO_NONE, 30.0)


class Listed(Dataset[tuple[Tensor]]):
    """A map-style data set that is read record by record."""

    def __init__(self, rows: Tensor) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> tuple[Tensor]:
        return (self.rows[index],)


class Named(Dataset[dict[str, Any]]):
    """A map-style data set of dictionaries, with a column that is no tensor."""

    def __init__(self, rows: Tensor) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"x": self.rows[index], "name": f"record {index}"}


def losses_of_named(model: nn.Module, batch: Any) -> Tensor:
    return model(batch["x"] if isinstance(batch, dict) else batch[0])


SHAPES = ["tensors", "tensor data set", "map-style", "part of a data set", "dictionaries"]


def shaped(shape: str, rows: Tensor) -> Any:
    if shape == "part of a data set":  # every second record of a data set twice as long, backwards
        longer = torch.full((2 * len(rows), rows.shape[1]), 7.0, dtype=rows.dtype)
        places = list(range(2 * len(rows) - 2, -1, -2))
        longer[places] = rows
        return Subset(TensorDataset(longer), places)
    kinds = {"tensors": lambda r: (r,), "tensor data set": TensorDataset, "map-style": Listed, "dictionaries": Named}
    return kinds[shape](rows)


def assert_each_has_its_own(sums: np.ndarray, table: Table) -> None:
    """Where a record's coordinate is not empty, it holds the whole contribution that this record is due."""
    there = np.abs(sums) > 1e-6
    assert there.any(0).sum() > len(table.group) / 2, "most records are drawn at least once"
    assert not there.all()
    due = np.broadcast_to(table.bounds, sums.shape)
    assert np.allclose(sums[there], due[there], rtol=2 * CLOSE)


@pytest.mark.parametrize("chunk", [None, 1, 7])
@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("shape", SHAPES)
def test_each_record_is_clipped_to_the_norm_of_its_own_budget(
    trainer: Trainer, shape: str, num_workers: int, chunk: int | None, seed: int
):
    if chunk == 1 and (num_workers or shape != "tensors"):
        pytest.skip("covered by chunks of 7")
    table = trainer.express(TABLE)
    (rows,) = one_hot(RECORDS)
    trace = record(
        trainer,
        Echo(RECORDS),
        shaped(shape, rows),
        losses_of_named,
        table,
        seed=seed,
        num_workers=num_workers,
        chunk=chunk,
    )
    assert_each_has_its_own(trace.stacked(), table)


@pytest.mark.parametrize("shape", ["tensors", "map-style"])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_each_record_is_drawn_at_the_rate_of_its_own_budget(trainer: Trainer, shape: str, num_workers: int, seed: int):
    """Rates of 0 and 1 show who belongs to which group without any chance."""
    asked = Table(4, mixed(RECORDS, 2), (0.0, 1.0), (0.5, 2.0), NEXT_TO_NONE, 30.0)
    table = trainer.express(asked)
    if table != asked:
        raise Inexpressible("a rate per group")
    (rows,) = one_hot(RECORDS)
    data = shaped(shape, rows)
    trace = record(trainer, Echo(RECORDS), data, losses_of_named, table, seed=seed, num_workers=num_workers, chunk=7)
    assert (who(trace.stacked(), table) == np.array(table.group)).all()


def test_shuffling_records_with_their_budgets_shuffles_contributions_and_nothing_else(trainer: Trainer, seed: int):
    """Everyone is drawn; the record that has moved takes its clip norm along."""
    everyone = Table(1, mixed(RECORDS, 3), (1.0, 1.0, 1.0), (0.5, 1.0, 2.0), NEXT_TO_NONE, 60.0)
    (rows,) = one_hot(RECORDS)
    order = np.random.default_rng(5).permutation(RECORDS)
    moved = Table(1, tuple(np.array(everyone.group)[order].tolist()), *everyone_after_group(everyone))
    sums = [
        record(trainer, Echo(RECORDS), (data,), losses_of_echo, trainer.express(table), seed=seed).stacked()
        for data, table in ((rows, everyone), (rows[torch.from_numpy(order)], moved))
    ]
    assert np.allclose(sums[0], sums[1], atol=1e-6)


def everyone_after_group(table: Table) -> tuple[Any, ...]:
    return table.sample_rate, table.clip_norm, table.noise_std, table.expected_batch


def test_workers_and_kinds_of_data_sets_change_neither_who_is_drawn_nor_how(trainer: Trainer, seed: int):
    """Same seed, same sums, to the bit."""
    table = trainer.express(TABLE)
    (rows,) = one_hot(RECORDS)
    runs = [
        record(
            trainer,
            Echo(RECORDS),
            shaped(shape, rows),
            losses_of_named,
            table,
            seed=seed,
            num_workers=num_workers,
            chunk=5,
        ).stacked()
        for shape, num_workers in [("tensors", 0), ("map-style", 0), ("map-style", 2), ("dictionaries", 2)]
    ]
    assert all((other == runs[0]).all() for other in runs[1:])
