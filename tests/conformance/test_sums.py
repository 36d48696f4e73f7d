"""Promise: one noisy sum holds one complete draw, and each record at most once, whatever the loop does between updates.

The code published with the paper evaluates on the training loader, which shifts its physical batches against its
steps; then 36 of 120 noisy sums hold a record twice.
"""

from __future__ import annotations

from contextlib import suppress

import numpy as np
import pytest

from .adapters import Refused, Table, Trainer, started
from .probes import ALMOST_NO_NOISE, Echo, drawn_in, losses_of_echo, mixed, one_hot, recorded

RECORDS, UPDATES = 60, 20
TABLE = Table(UPDATES, mixed(RECORDS, 2), (0.2, 0.3), (0.5, 1.5), ALMOST_NO_NOISE, 15.0)


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("physical_batch", [None, 1, 3, 16])
def test_a_record_is_at_most_once_in_a_sum(trainer: Trainer, physical_batch: int | None, num_workers: int, seed: int):
    trace = recorded(trainer, TABLE, seed=seed, physical_batch=physical_batch, num_workers=num_workers)
    assert drawn_in(trace.stacked(), trainer.express(TABLE)).max() == 1
    assert len(trace.sums) == UPDATES


def test_the_size_of_physical_batches_does_not_change_a_sum(trainer: Trainer, seed: int):
    sums = [recorded(trainer, TABLE, seed=seed, physical_batch=size).stacked() for size in (None, 1, 4)]
    assert np.allclose(sums[0], sums[1], atol=1e-6)
    assert np.allclose(sums[0], sums[2], atol=1e-6)


@pytest.mark.parametrize("physical_batch", [None, 4])
def test_evaluating_on_the_loops_own_data_changes_no_sum(trainer: Trainer, physical_batch: int | None, seed: int):
    """Such a pass is refused and nothing follows it, or it is made and the run is the same as without it."""
    table = trainer.express(TABLE)
    run = Echo(RECORDS), one_hot(RECORDS), losses_of_echo, table
    with started(trainer, *run, seed=seed, physical_batch=physical_batch) as (training, trace):

        def evaluate() -> None:
            if len(trace.sums) % 5 == 1:
                training.look_at_the_data()

        with suppress(Refused):
            training.run(between=evaluate)
    undisturbed = recorded(trainer, TABLE, seed=seed, physical_batch=physical_batch).stacked()
    assert len(trace.sums) >= 1
    assert drawn_in(trace.stacked(), table).max() == 1
    assert np.allclose(trace.stacked(), undisturbed[: len(trace.sums)], atol=1e-6)
