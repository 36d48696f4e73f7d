"""Promise: a budget stays with its record through shuffles, physical batches, workers and kinds of data sets."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Subset, TensorDataset

from functional import Records

from .adapters import Inexpressible, Table, Trainer, record
from .probes import ALMOST_NO_NOISE, CLOSE, Echo, drawn_in, losses_of_echo, mixed, one_hot

RECORDS, UPDATES = 60, 10
TABLE = Table(UPDATES, mixed(RECORDS, 3), (0.2, 0.4, 0.9), (0.5, 1.0, 2.0), ALMOST_NO_NOISE, 30.0)


def listed(rows: Tensor) -> Records:
    """A map-style data set that is read record by record."""
    return Records(lambda index: (rows[index],), len(rows))


def named(rows: Tensor) -> Records:
    """The same of dictionaries, with a column that is no tensor."""
    return Records(lambda index: {"x": rows[index], "name": f"record {index}"}, len(rows))


def losses_of_named(model: nn.Module, batch: Any) -> Tensor:
    return model(batch["x"] if isinstance(batch, dict) else batch[0])


SHAPES = ["tensors", "tensor data set", "map-style", "part of a data set", "dictionaries"]


def shaped(shape: str, rows: Tensor) -> Any:
    if shape == "part of a data set":  # every second record of a data set twice as long, backwards
        longer = torch.full((2 * len(rows), rows.shape[1]), 7.0, dtype=rows.dtype)
        places = list(range(2 * len(rows) - 2, -1, -2))
        longer[places] = rows
        return Subset(TensorDataset(longer), places)
    kinds = {"tensors": lambda r: (r,), "tensor data set": TensorDataset, "map-style": listed, "dictionaries": named}
    return kinds[shape](rows)


def sums_of(trainer: Trainer, shape: str, table: Table, **options: Any) -> np.ndarray:
    (rows,) = one_hot(RECORDS)
    return record(trainer, Echo(RECORDS), shaped(shape, rows), losses_of_named, table, **options).stacked()


@pytest.mark.parametrize(
    ("shape", "num_workers", "physical_batch"),
    [("tensors", 0, 1), *((shape, workers, size) for shape in SHAPES for workers, size in ((0, None), (0, 7), (2, 7)))],
)
def test_each_record_is_clipped_to_the_norm_of_its_own_budget(
    trainer: Trainer, shape: str, num_workers: int, physical_batch: int | None, seed: int
):
    """A coordinate that is not empty holds the whole contribution that its record may make."""
    table = trainer.express(TABLE)
    sums = sums_of(trainer, shape, table, seed=seed, num_workers=num_workers, physical_batch=physical_batch)
    is_drawn = np.abs(sums) > 1e-6
    assert is_drawn.any(0).sum() > RECORDS / 2, "most records are drawn at least once"
    assert not is_drawn.all()
    assert np.allclose(sums[is_drawn], np.broadcast_to(table.bounds, sums.shape)[is_drawn], rtol=2 * CLOSE)


@pytest.mark.parametrize("shape", ["tensors", "map-style"])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_each_record_is_drawn_at_the_rate_of_its_own_budget(trainer: Trainer, shape: str, num_workers: int, seed: int):
    """Rates of 0 and 1 show without any chance who belongs to which group."""
    asked = Table(4, mixed(RECORDS, 2), (0.0, 1.0), (0.5, 2.0), ALMOST_NO_NOISE, 30.0)
    table = trainer.express(asked)
    if table != asked:
        raise Inexpressible("a rate per group")
    sums = sums_of(trainer, shape, table, seed=seed, num_workers=num_workers, physical_batch=7)
    assert (drawn_in(sums, table) == np.array(table.group)).all()


def test_shuffled_records_take_their_budgets_along(trainer: Trainer, seed: int):
    """All records are drawn; the one that has moved takes its clip norm along, and nothing else changes."""
    table = Table(1, mixed(RECORDS, 3), (1.0, 1.0, 1.0), (0.5, 1.0, 2.0), ALMOST_NO_NOISE, 60.0)
    (rows,) = one_hot(RECORDS)
    order = np.random.default_rng(5).permutation(RECORDS)
    shuffled = replace(table, group=tuple(np.array(table.group)[order].tolist()))
    before, after = (
        record(trainer, Echo(RECORDS), (data,), losses_of_echo, trainer.express(its), seed=seed).stacked()
        for data, its in ((rows, table), (rows[torch.from_numpy(order)], shuffled))
    )
    assert np.allclose(before, after, atol=1e-6)


def test_workers_and_kinds_of_data_sets_do_not_change_a_sum(trainer: Trainer, seed: int):
    """Same seed, same sums, to the bit."""
    first, *others = (
        sums_of(trainer, shape, trainer.express(TABLE), seed=seed, num_workers=num_workers, physical_batch=5)
        for shape, num_workers in [("tensors", 0), ("map-style", 0), ("map-style", 2), ("dictionaries", 2)]
    )
    assert all((other == first).all() for other in others)
