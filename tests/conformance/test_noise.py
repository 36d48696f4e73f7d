"""Promise: every update holds fresh Gaussian noise of the stated standard deviation, on the sum, in every tensor.

Each test fails by chance for one seed in a million.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy import stats

from .adapters import Table, Trace, Trainer, record
from .probes import FALSE_ALARM, Echo, EchoTwice, losses_of_echo, mixed

RECORDS, UPDATES, STD = 40, 60, 1.7
WIDTHS = (20_000, 300, 300, 1)

#: The noise is the same in all: in physical batches of all sizes, with no and with long gradients.
SETTINGS = ["whole draws", "physical batches of 3", "long gradients", "three phases"]
#: Each phase's noise, as a multiple of that of the phase before.
GROWTH = 1.5


def table_of(**changes: object) -> Table:
    return replace(Table(UPDATES, mixed(RECORDS, 2), (0.2, 0.3), (0.5, 1.5), STD, 10.0), **changes)


@pytest.fixture(scope="module")
def traces(trainer: Trainer, seeded: Callable[[str], int]) -> dict[str, Trace]:
    """Records without a gradient, or with a long one in the first value of each tensor, which is then left out."""
    phases = {name: {"phases": 3, "growth": GROWTH} if name == "three phases" else {} for name in SETTINGS}
    tables = {name: trainer.express(table_of(**phases[name])) for name in SETTINGS}
    nothing = torch.zeros(RECORDS, sum(WIDTHS), dtype=torch.float64)
    long = nothing.clone()
    long[:, np.cumsum((0, *WIDTHS[:-1])).tolist()] = 1e3
    found = {}
    for name, table in tables.items():
        trace = found[name] = record(
            trainer,
            Echo(*WIDTHS),
            (long if name == "long gradients" else nothing,),
            losses_of_echo,
            table,
            seed=seeded(name),
            physical_batch=3 if name == "physical batches of 3" else None,
        )
        for number, update in enumerate(trace.sums):
            phase = number * table.phases // UPDATES
            trace.sums[number] = [tensor / table.growth**phase for tensor in update]  # to the first phase's noise
    return found


def noise_of(trace: Trace, tensor: int, name: str) -> np.ndarray:
    """(updates, values) in units of the stated deviation, without the values that hold gradients."""
    noise = trace.stacked(tensor) / STD
    return noise[:, 1:] if name == "long gradients" else noise


@pytest.mark.parametrize("name", SETTINGS)
def test_the_noise_of_every_tensor_is_as_large_as_stated(traces: dict[str, Trace], name: str):
    """To 0.5 % on the large tensor."""
    trace = traces[name]
    assert len(trace.sums) == UPDATES
    for tensor in range(len(WIDTHS)):
        values = noise_of(trace, tensor, name).ravel()
        if values.size == 0:
            continue
        share = FALSE_ALARM / 2 / len(WIDTHS)
        low, high = stats.chi2.ppf(share, values.size), stats.chi2.isf(share, values.size)
        assert low <= (values**2).sum() <= high, f"tensor {tensor}: deviation {np.sqrt((values**2).mean())} of 1"


@pytest.mark.parametrize("name", SETTINGS)
def test_the_noise_is_gaussian_around_0(traces: dict[str, Trace], name: str):
    values = noise_of(traces[name], 0, name).ravel()
    assert abs(values.sum()) <= stats.norm.isf(FALSE_ALARM / 4) * values.size**0.5
    assert stats.kstest(values[:200_000], "norm").pvalue > FALSE_ALARM / 4
    far = 4.0
    low, high = stats.binom.ppf([FALSE_ALARM / 8, 1 - FALSE_ALARM / 8], values.size, 2 * stats.norm.sf(far))
    assert low <= (np.abs(values) > far).sum() <= high


@pytest.mark.parametrize("name", SETTINGS)
def test_the_noise_of_an_update_is_independent_of_other_updates(traces: dict[str, Trace], name: str):
    """The largest correlation of any two updates: fresh noise each time, neither repeated nor negated."""
    noise = noise_of(traces[name], 0, name)
    pairs = np.triu_indices(len(noise), 1)
    product = (noise @ noise.T)[pairs] / noise.shape[1] ** 0.5
    assert np.abs(product).max() <= stats.norm.isf(FALSE_ALARM / 2 / product.size)


@pytest.mark.parametrize("name", SETTINGS)
def test_the_noise_of_a_tensor_is_independent_of_other_tensors(traces: dict[str, Trace], name: str):
    """Two tensors of one shape, the start of a third, and neighbours within one."""
    large, one, two = (noise_of(traces[name], t, name)[:, :299] for t in (0, 1, 2))
    limit = stats.norm.isf(FALSE_ALARM / 8)
    for a, b in [(one, two), (one, large), (two, large), (large[:, :-1], large[:, 1:])]:
        assert abs((a * b).sum()) <= limit * a.size**0.5 * 1.01


@pytest.mark.parametrize("num_workers", [0, 2])
def test_an_empty_draw_is_noised_like_any_other(trainer: Trainer, num_workers: int, seed: int):
    """Every update of the plan is made, with its noise, though most draws are empty."""
    table = trainer.express(table_of(sample_rate=(0.015, 0.010), expected_batch=0.5, steps=40))
    x = torch.zeros(RECORDS, 5_000, dtype=torch.float64)
    x[:, 0] = 1e3  # shows how many were drawn
    trace = record(trainer, Echo(5_000), (x,), losses_of_echo, table, seed=seed, num_workers=num_workers)
    noise = trace.stacked() / STD
    assert len(noise) == table.steps
    share = FALSE_ALARM / 2 / len(noise)
    limits = stats.chi2.ppf(share, 4_999), stats.chi2.isf(share, 4_999)
    squares = (noise[:, 1:] ** 2).sum(1)
    assert ((limits[0] <= squares) & (squares <= limits[1])).all()


def test_a_parameter_of_two_layers_is_noised_once(each: Trainer, seed: int):
    width = 5_000
    table = each.express(table_of(steps=30))
    x = torch.zeros(RECORDS, 2 * width, dtype=torch.float64)
    trace = record(each, EchoTwice(width), (x,), losses_of_echo, table, seed=seed)
    values = trace.stacked().ravel() / STD
    limits = stats.chi2.ppf(FALSE_ALARM / 2, values.size), stats.chi2.isf(FALSE_ALARM / 2, values.size)
    assert limits[0] <= (values**2).sum() <= limits[1]


def test_runs_without_a_seed_never_share_noise(trainer: Trainer):
    """Noise that repeats between runs can be subtracted. One pair in a million correlates this much."""
    table = trainer.express(table_of(steps=1))
    x = torch.zeros(RECORDS, 5_000, dtype=torch.float64)
    runs = np.stack([record(trainer, Echo(5_000), (x,), losses_of_echo, table, seed=None).stacked()[0] for _ in "1234"])
    product = (runs / STD @ runs.T / STD)[np.triu_indices(4, 1)] / 5_000**0.5
    assert np.abs(product).max() <= stats.norm.isf(FALSE_ALARM / 12)
