"""Promise: one noisy sum holds one draw, whole, and nobody twice, whatever the loop does between two updates.

The code published with the paper evaluates on the training loader, which shifts its chunks against its steps; then
36 of 120 noisy sums hold somebody twice.
"""

from __future__ import annotations

from contextlib import suppress

import numpy as np
import pytest
import torch

from .adapters import Refused, Table, Trainer, record, watch
from .probes import NEXT_TO_NONE, Echo, losses_of_echo, mixed, one_hot, who

RECORDS, UPDATES = 60, 20
TABLE = Table(UPDATES, mixed(RECORDS, 2), (0.2, 0.3), (0.5, 1.5), NEXT_TO_NONE, 15.0)


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("chunk", [None, 1, 3, 16])
def test_nobody_is_twice_in_one_noisy_sum(trainer: Trainer, chunk: int | None, num_workers: int, seed: int):
    table = trainer.express(TABLE)
    trace = record(
        trainer, Echo(RECORDS), one_hot(RECORDS), losses_of_echo, table, seed=seed, chunk=chunk, num_workers=num_workers
    )
    assert who(trace.stacked(), table).max() == 1
    assert len(trace.sums) == UPDATES


def test_chunks_change_how_a_sum_is_computed_and_not_what_is_in_it(trainer: Trainer, seed: int):
    table = trainer.express(TABLE)
    sums = [
        record(trainer, Echo(RECORDS), one_hot(RECORDS), losses_of_echo, table, seed=seed, chunk=chunk).stacked()
        for chunk in (None, 1, 4)
    ]
    assert np.allclose(sums[0], sums[1], atol=1e-6)
    assert np.allclose(sums[0], sums[2], atol=1e-6)


def evaluated(trainer: Trainer, chunk: int | None, seed: int) -> tuple[np.ndarray, int]:
    """The sums of a run that evaluates on its training data as the loop gets them, as far as it gets; how many."""
    table = trainer.express(TABLE)
    optimizer = torch.optim.SGD((model := Echo(RECORDS)).parameters(), lr=0.0)
    training = trainer.start(model, optimizer, one_hot(RECORDS), losses_of_echo, table, seed=seed, chunk=chunk)
    trace = watch(optimizer, table.expected_batch, training.charged)

    def evaluate() -> None:
        if len(trace.sums) % 5 == 1:
            training.look_at_the_data()

    with suppress(Refused):
        training.run(between=evaluate)
    training.close()
    return trace.stacked(), len(trace.sums)


@pytest.mark.parametrize("chunk", [None, 4])
def test_evaluating_on_the_training_data_as_the_loop_gets_them_puts_nobody_into_a_sum_twice(
    trainer: Trainer, chunk: int | None, seed: int
):
    """Either such a pass is refused, and nothing follows it, or it is made, and sums hold everybody once."""
    sums, updates = evaluated(trainer, chunk, seed)
    assert updates >= 1
    assert who(sums, trainer.express(TABLE)).max() == 1


@pytest.mark.parametrize("chunk", [None, 4])
def test_evaluating_on_the_training_data_as_the_loop_gets_them_changes_no_sum(
    trainer: Trainer, chunk: int | None, seed: int
):
    """As far as the run gets, it is the run without that pass."""
    undisturbed = record(
        trainer, Echo(RECORDS), one_hot(RECORDS), losses_of_echo, trainer.express(TABLE), seed=seed, chunk=chunk
    ).stacked()
    sums, updates = evaluated(trainer, chunk, seed)
    assert np.allclose(sums, undisturbed[:updates], atol=1e-6)
