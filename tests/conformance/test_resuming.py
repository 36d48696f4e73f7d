"""Promise: a resumed run releases what it would have released, and anything else is charged.

Two different sums under the same noise reveal their difference without any noise. A step that is made twice under
fresh draws is two releases, so it must be charged twice.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor

from functional import Records

from .adapters import Table, Trace, Trainer, watch
from .probes import FALSE_ALARM, Echo, losses_of_echo, mixed
from .test_records import listed

RECORDS, WIDTH, STEPS, STOPPED, EVERY = 12, 400, 90, 17, 7
TABLE = Table(STEPS, mixed(RECORDS, 2), (0.2, 0.3), (0.5, 1.5), 0.7, 3.0)


def some_data(size: float = 1e3) -> Tensor:
    """A coordinate for each record, and others that only noise reaches."""
    return torch.cat([size * torch.eye(RECORDS), torch.zeros(RECORDS, WIDTH)], 1).double()


def go(
    trainer: Trainer, data: Any, run_dir: Path, seed: int | None, *, updates: int | None = None, resume: bool = False
) -> Trace:
    """From the beginning or from the last checkpoint, with a new model and optimizer.

    With a number of updates it then ends as a killed process does, so that the last of them are made again.
    """
    model = Echo(RECORDS, WIDTH)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    table = replace(trainer.express(TABLE), steps=STEPS)
    training = trainer.start(
        model, optimizer, data, losses_of_echo, table, seed=seed, run_dir=run_dir, every=EVERY, resume=resume
    )
    trace = watch(optimizer, table.expected_batch, training.charged)
    try:
        training.run(updates=updates)
        trace.charged.append(training.charged())
    finally:
        training.close() if updates is None else training.cut_off()
    trace.parameters = [p.detach().clone() for p in model.parameters()]
    return trace


def fickle(rows: Tensor) -> Records:
    """Records that are a little different each time they are read: a fingerprint cannot show whether they changed."""
    return Records(lambda index: (rows[index] * (1 + 1e-6 * np.random.default_rng().random()),), len(rows))


def releases(*traces: Trace) -> int:
    """How many different noisy sums there were."""
    return len({trace.stacked(0)[i].tobytes() for trace in traces for i in range(len(trace.sums))})


def test_a_resumed_run_gives_the_bits_of_a_run_without_a_stop(trainer: Trainer, seed: int, tmp_path: Path):
    """What came after the last checkpoint is made again, the same; then the rest, and the same parameters."""
    uninterrupted = go(trainer, (some_data(),), tmp_path / "whole", seed)
    first = go(trainer, (some_data(),), tmp_path / "stopped", seed, updates=STOPPED)
    second = go(trainer, (some_data(),), tmp_path / "stopped", seed, resume=True)
    assert len(uninterrupted.sums) == STEPS
    assert STEPS - len(first.sums) <= len(second.sums) <= STEPS
    assert (first.stacked() == uninterrupted.stacked()[: len(first.sums)]).all()
    assert (second.stacked() == uninterrupted.stacked()[-len(second.sums) :]).all()
    assert all(torch.equal(a, b) for a, b in zip(uninterrupted.parameters, second.parameters, strict=True))


@pytest.mark.parametrize("is_seeded", [True, False], ids=["with a seed", "without a seed"])
def test_no_more_is_released_than_is_charged(trainer: Trainer, is_seeded: bool, seed: int, tmp_path: Path):
    """A step that is made again is the same release, or it is charged again."""
    run_seed = seed if is_seeded else None
    first = go(trainer, (some_data(),), tmp_path / "run", run_seed, updates=STOPPED)
    second = go(trainer, (some_data(),), tmp_path / "run", run_seed, resume=True)
    assert STEPS <= len(first.sums) + len(second.sums) <= STEPS + EVERY
    assert releases(first, second) <= second.charged[-1] <= STEPS


@pytest.mark.parametrize("kind", [lambda rows: (rows,), listed, fickle], ids=["tensors", "map-style", "fickle"])
@pytest.mark.parametrize("is_seeded", [True, False], ids=["with a seed", "without a seed"])
def test_over_other_data_the_noise_is_new_and_charged(
    trainer: Trainer, is_seeded: bool, kind: Any, seed: int, tmp_path: Path
):
    """Records may change while the run is stopped: the same noise is not used for a second sum.

    The correlation of values without gradients shows it: 1 where noise is used again, and above the
    limit by chance for one seed in a million.
    """
    run_seed = seed if is_seeded else None
    first = go(trainer, kind(some_data()), tmp_path / "run", run_seed, updates=STOPPED)
    second = go(trainer, kind(some_data(-1e3)), tmp_path / "run", run_seed, resume=True)
    different = (first.stacked()[:, None] != second.stacked()[None]).any(2)  # (first, second)
    noise = [trace.stacked(1) / TABLE.noise_std for trace in (first, second)]
    alike = np.abs(noise[0] @ noise[1].T) / WIDTH**0.5
    assert not (different & (alike > 1.1 * stats.norm.isf(FALSE_ALARM / 2 / alike.size))).any()
    assert releases(first, second) <= second.charged[-1] <= STEPS


def test_a_finished_run_makes_no_further_update(trainer: Trainer, seed: int, tmp_path: Path):
    first = go(trainer, (some_data(),), tmp_path / "run", seed)
    again = go(trainer, (some_data(),), tmp_path / "run", seed, resume=True)
    assert len(first.sums) == STEPS
    assert not again.sums
    assert first.charged[-1] == again.charged[-1] == STEPS
