"""Promise: every update is paid for, before it is made, and the number of updates is the plan's, exactly."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from .adapters import Refused, Table, Trainer, record, watch
from .probes import Echo, losses_of_echo, mixed, one_hot

RECORDS = 40


def table_of(steps: int, rates: tuple[float, float] = (0.2, 0.3)) -> Table:
    return Table(steps, mixed(RECORDS, 2), rates, (0.5, 1.5), 0.7, RECORDS * sum(rates) / 2)


@pytest.mark.parametrize("rates", [(0.2, 0.3), (0.012, 0.016)], ids=["full draws", "mostly empty draws"])
@pytest.mark.parametrize("kept", [False, True], ids=["in memory", "on disk"])
def test_an_update_is_on_the_books_before_it_is_made(
    trainer: Trainer, rates: tuple[float, float], kept: bool, seed: int, tmp_path: Path
):
    table = trainer.express(table_of(90, rates))
    run_dir = tmp_path / "run" if kept else None
    trace = record(trainer, Echo(RECORDS), one_hot(RECORDS), losses_of_echo, table, seed=seed, run_dir=run_dir)
    assert len(trace.charged) == 90
    assert all(charged >= number for number, charged in enumerate(trace.charged, start=1))
    assert (np.diff(trace.charged) >= 0).all()


@pytest.mark.parametrize("chunk", [None, 3])
@pytest.mark.parametrize(("steps", "phases"), [(1, 1), (2, 1), (65, 1), (65, 5)])
def test_as_many_updates_are_made_and_charged_as_the_plan_has_steps(
    trainer: Trainer, steps: int, phases: int, chunk: int | None, seed: int
):
    table = trainer.express(replace(table_of(steps), phases=phases))
    model = Echo(RECORDS)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    training = trainer.start(model, optimizer, one_hot(RECORDS), losses_of_echo, table, seed=seed, chunk=chunk)
    trace = watch(optimizer, 1.0, training.charged)
    training.run()
    assert len(trace.sums) == steps
    assert training.charged() == steps
    training.close()


@pytest.mark.parametrize("kept", [False, True], ids=["in memory", "on disk"])
def test_a_step_beyond_the_plan_is_not_made(trainer: Trainer, kept: bool, seed: int, tmp_path: Path):
    """By going on with the loop, with the parameters as witnesses."""
    table = trainer.express(table_of(5))
    model = Echo(RECORDS)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run_dir = tmp_path / "run" if kept else None
    training = trainer.start(model, optimizer, one_hot(RECORDS), losses_of_echo, table, seed=seed, run_dir=run_dir)
    training.run()
    before = [p.detach().clone() for p in model.parameters()]
    try:
        more = training.run(updates=3)
    except Refused:
        more = 0
    training.close()
    assert more == 0
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_going_on_after_a_pause_neither_repeats_nor_skips_an_update(trainer: Trainer, seed: int):
    """The same updates as in one go, to the bit."""
    table = trainer.express(table_of(12))
    whole = record(trainer, Echo(RECORDS), one_hot(RECORDS), losses_of_echo, table, seed=seed)
    model = Echo(RECORDS)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    training = trainer.start(model, optimizer, one_hot(RECORDS), losses_of_echo, table, seed=seed)
    trace = watch(optimizer, table.expected_batch, training.charged)
    made = 0
    while made < 12:
        more = training.run(updates=1)
        assert more >= 1
        made += more
    training.close()
    assert made == 12
    assert (trace.stacked() == whole.stacked()).all()
