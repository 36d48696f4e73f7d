"""Promise: the noisy sum is divided by a public constant, never by the number of records that were drawn."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from .adapters import Table, Trainer, watch
from .probes import CLOSE, NEXT_TO_NONE, Echo, losses_of_echo, mixed, one_hot

RECORDS, UPDATES = 40, 60


@pytest.mark.parametrize("chunk", [None, 3])
@pytest.mark.parametrize("rates", [(0.1, 0.4), (0.02, 0.03)], ids=["many drawn", "few drawn"])
def test_a_record_is_worth_the_same_however_many_others_are_drawn(
    trainer: Trainer, rates: tuple[float, float], chunk: int | None, seed: int
):
    expected = RECORDS * sum(rates) / 2
    asked = Table(UPDATES, mixed(RECORDS, 2), rates, (0.5, 1.5), NEXT_TO_NONE, expected)
    table = trainer.express(asked)
    model = Echo(RECORDS)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    training = trainer.start(model, optimizer, one_hot(RECORDS), losses_of_echo, table, seed=seed, chunk=chunk)
    trace = watch(optimizer, 1.0, training.charged)  # the gradients themselves
    training.run()
    training.close()
    worth = trace.stacked()
    drawn = np.abs(worth) > 1e-6
    assert len(set(drawn.sum(1).tolist())) > 2, "draws of several sizes are needed to see anything"
    stated = np.broadcast_to(table.bounds / table.expected_batch, worth.shape)
    assert np.allclose(worth[drawn], stated[drawn], rtol=2 * CLOSE)


def test_the_divisor_is_the_one_that_was_stated(trainer: Trainer, seed: int):
    """All else equal, twice the stated batch halves the gradient, though the same records are drawn."""
    asked = Table(3, mixed(RECORDS, 2), (1.0, 1.0), (0.5, 1.5), NEXT_TO_NONE, 7.0)
    table = trainer.express(asked)
    model = Echo(RECORDS)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    training = trainer.start(model, optimizer, one_hot(RECORDS), losses_of_echo, table, seed=seed)
    trace = watch(optimizer, 1.0, training.charged)
    training.run()
    training.close()
    assert np.allclose(trace.stacked(), table.bounds / table.expected_batch, rtol=2 * CLOSE)
