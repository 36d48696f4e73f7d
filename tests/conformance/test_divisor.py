"""Promise: the noisy sum is divided by a public constant, never by the number of records that were drawn."""

from __future__ import annotations

import numpy as np
import pytest

from .adapters import Table, Trainer
from .probes import ALMOST_NO_NOISE, CLOSE, mixed, recorded

RECORDS, UPDATES = 40, 60


@pytest.mark.parametrize("physical_batch", [None, 3])
@pytest.mark.parametrize("rates", [(0.1, 0.4), (0.02, 0.03)], ids=["many drawn", "few drawn"])
def test_a_records_part_of_an_average_does_not_depend_on_how_many_are_drawn(
    trainer: Trainer, rates: tuple[float, float], physical_batch: int | None, seed: int
):
    asked = Table(UPDATES, mixed(RECORDS, 2), rates, (0.5, 1.5), ALMOST_NO_NOISE, RECORDS * sum(rates) / 2)
    table = trainer.express(asked)
    average = recorded(trainer, asked, seed=seed, physical_batch=physical_batch, divisor=1.0).stacked()
    drawn = np.abs(average) > 1e-6
    assert len(set(drawn.sum(1).tolist())) > 2, "draws of several sizes are needed to see anything"
    stated = np.broadcast_to(table.bounds / table.expected_batch, average.shape)
    assert np.allclose(average[drawn], stated[drawn], rtol=2 * CLOSE)


def test_the_divisor_is_the_stated_one(trainer: Trainer, seed: int):
    """Also where it is not the number of records that are drawn."""
    asked = Table(3, mixed(RECORDS, 2), (1.0, 1.0), (0.5, 1.5), ALMOST_NO_NOISE, 7.0)
    table = trainer.express(asked)
    average = recorded(trainer, asked, seed=seed, divisor=1.0).stacked()
    assert np.allclose(average, table.bounds / table.expected_batch, rtol=2 * CLOSE)
