"""Promise: no record contributes more than its bound, weight · clip norm, for any gradient."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from .adapters import Table, Trainer, record
from .probes import ALMOST_NO_NOISE, CLOSE, Echo, EchoTwice, losses_of_echo, mixed

#: Norms of gradients, in units of the largest bound: none, tiny, on either side of a bound, huge.
SIZES = (0.0, 1e-30, 1e-8, 1e-2, 0.2, 0.5, 0.999, 1.0, 1.001, 2.0, 1e3, 1e9, 1e18)
BROKEN = (math.nan, math.inf, -math.inf)
#: One direction over three values, two in one parameter and one in another.
DIRECTION = (2 / 3, 1 / 3, 2 / 3)


def table_of(records: int, **changes: object) -> Table:
    ones = (1.0, 1.0, 1.0)
    table = Table(1, mixed(records, 3), ones, (0.2, 0.5, 1.0), ALMOST_NO_NOISE, float(records), ones)
    return replace(table, **changes)


def blocks(gradients: list[tuple[float, float, float]], dtype: torch.dtype) -> tuple[Tensor]:
    """Record i's gradient, three values in columns of its own: two in the first parameter, one in the second."""
    count = len(gradients)
    x = torch.zeros(count, 3 * count, dtype=dtype)
    for i, (a, b, c) in enumerate(gradients):
        x[i, 2 * i], x[i, 2 * i + 1], x[i, 2 * count + i] = a, b, c
    return (x,)


def contributions(trainer: Trainer, data: tuple[Tensor], table: Table, seed: int, **options: object) -> np.ndarray:
    """(records, 3) what each record added to the sum."""
    count = len(data[0])
    model = Echo(2 * count, count, dtype=data[0].dtype)
    (update,) = record(trainer, model, data, losses_of_echo, table, seed=seed, **options).sums
    first, second = (t.flatten().double().numpy() for t in update)
    return np.column_stack([first[0::2], first[1::2], second])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("physical_batch", [None, 1, 4])
def test_a_contribution_is_the_gradient_cut_to_the_bound_and_never_longer(
    each: Trainer, physical_batch: int | None, dtype: torch.dtype, seed: int
):
    """All sizes in one sum, three groups; the norm is that of the whole gradient, over all parameters."""
    sizes = [size for size in SIZES for _ in range(3)]
    data = blocks([tuple(size * d for d in DIRECTION) for size in sizes], dtype)
    table = each.express(table_of(len(sizes)))
    added = contributions(each, data, table, seed, physical_batch=physical_batch)
    expected = np.minimum(sizes, table.bounds)
    lengths = np.linalg.norm(added, axis=1)
    assert (lengths <= table.bounds + 10 * ALMOST_NO_NOISE).all()
    assert np.abs(added - np.outer(expected, DIRECTION)).max() <= 2 * CLOSE * table.bounds.max() + 10 * ALMOST_NO_NOISE


@pytest.mark.parametrize("bad", BROKEN, ids=str)
@pytest.mark.parametrize("physical_batch", [None, 1, 4])
def test_a_gradient_that_is_not_finite_contributes_nothing_and_changes_no_other(
    each: Trainer, physical_batch: int | None, bad: float, seed: int
):
    records = 12
    rows: list[tuple[float, float, float]] = [(2.0, 1.0, 2.0)] * records
    rows[3], rows[7] = (0.5, bad, 0.1), (0.0, 0.0, bad)
    table = each.express(table_of(records))
    added = contributions(each, blocks(rows, torch.float64), table, seed, physical_batch=physical_batch)
    assert np.isfinite(added).all()
    lengths = np.linalg.norm(added, axis=1)
    broken = np.isin(np.arange(records), [3, 7])
    assert (lengths[broken] <= 10 * ALMOST_NO_NOISE).all()
    assert np.allclose(lengths[~broken], table.bounds[~broken], rtol=2 * CLOSE)


@pytest.mark.parametrize("size", [1e155, 1e300])
def test_a_gradient_too_long_to_be_squared_stays_within_its_bound(each: Trainer, size: float, seed: int):
    records = 6
    table = each.express(table_of(records))
    data = blocks([(size, 0.0, size)] * records, torch.float64)
    lengths = np.linalg.norm(contributions(each, data, table, seed), axis=1)
    assert (lengths <= table.bounds + 10 * ALMOST_NO_NOISE).all()


def test_a_groups_weight_is_part_of_its_bound(each: Trainer, seed: int):
    """Weights multiply what is left after clipping, also of gradients that are shorter than their clip norm."""
    sizes = [0.01, 0.1, 1e3] * 4
    data = blocks([tuple(size * d for d in DIRECTION) for size in sizes], torch.float64)
    weight = (0.5, 1.0, 2.5)
    asked = table_of(len(sizes), weight=weight)
    table = each.express(asked)
    if table != asked:
        pytest.skip("cannot be expressed: weights")
    lengths = np.linalg.norm(contributions(each, data, table, seed), axis=1)
    weights, clip_norms = np.array(weight)[list(table.group)], np.array(table.clip_norm)[list(table.group)]
    assert np.allclose(lengths, weights * np.minimum(sizes, clip_norms), rtol=2 * CLOSE)


def test_a_parameter_of_two_layers_counts_once_in_the_norm_with_its_whole_gradient(each: Trainer, seed: int):
    """The record (a, b) has the gradient a + b by the shared weight: its length is neither √(a² + b²) nor |a| + |b|."""
    pairs = [(4.0, 4.0), (4.0, -3.9), (0.05, 0.04), (0.0, 9.0), (3.0, -3.0), (0.1, 0.0)]
    count = len(pairs)
    x = torch.zeros(count, 2 * count, dtype=torch.float64)
    for i, (a, b) in enumerate(pairs):
        x[i, i], x[i, count + i] = a, b
    table = each.express(table_of(count))
    (update,) = record(each, EchoTwice(count), (x,), losses_of_echo, table, seed=seed).sums
    gradient = np.array([a + b for a, b in pairs])
    assert np.allclose(update[0].flatten(), np.clip(gradient, -table.bounds, table.bounds), rtol=2 * CLOSE, atol=1e-7)


@pytest.mark.parametrize("physical_batch", [None, 2])
def test_records_are_clipped_one_by_one_and_not_their_mean_or_sum(each: Trainer, physical_batch: int | None, seed: int):
    """One long gradient among many short ones: the mean of all is within every bound."""
    records = 8
    x = torch.full((records, 1), -0.1, dtype=torch.float64)
    x[0] = 1e6
    table = each.express(table_of(records))
    (update,) = record(each, Echo(1), (x,), losses_of_echo, table, seed=seed, physical_batch=physical_batch).sums
    expected = table.bounds[0] - 0.1 * (records - 1)
    assert float(update[0]) == pytest.approx(expected, abs=10 * CLOSE)
