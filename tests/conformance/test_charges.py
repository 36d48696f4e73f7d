"""Promise: every update is charged before it is made, and the number of updates is the plan's, exactly."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from .adapters import Refused, Table, Trainer, started
from .probes import Echo, losses_of_echo, mixed, one_hot, recorded

RECORDS = 40
KEPT = pytest.mark.parametrize("kept", [False, True], ids=["in memory", "on disk"])


def table_of(steps: int, rates: tuple[float, float] = (0.2, 0.3)) -> Table:
    return Table(steps, mixed(RECORDS, 2), rates, (0.5, 1.5), 0.7, RECORDS * sum(rates) / 2)


@pytest.mark.parametrize("rates", [(0.2, 0.3), (0.012, 0.016)], ids=["full draws", "mostly empty draws"])
@KEPT
def test_an_update_is_charged_before_it_is_made(
    trainer: Trainer, rates: tuple[float, float], kept: bool, seed: int, tmp_path: Path
):
    run_dir = tmp_path / "run" if kept else None
    trace = recorded(trainer, table_of(90, rates), seed=seed, run_dir=run_dir)
    assert len(trace.charged) == 90
    assert all(charged >= number for number, charged in enumerate(trace.charged, start=1))
    assert (np.diff(trace.charged) >= 0).all()


@pytest.mark.parametrize("physical_batch", [None, 3])
@pytest.mark.parametrize(("steps", "phases"), [(1, 1), (2, 1), (65, 1), (65, 5)])
def test_as_many_updates_are_made_and_charged_as_the_plan_has_steps(
    trainer: Trainer, steps: int, phases: int, physical_batch: int | None, seed: int
):
    table = trainer.express(replace(table_of(steps), phases=phases))
    run = Echo(RECORDS), one_hot(RECORDS), losses_of_echo, table
    with started(trainer, *run, lr=0.1, seed=seed, physical_batch=physical_batch) as (training, trace):
        training.run()
        assert len(trace.sums) == steps
        assert training.charged() == steps


@KEPT
def test_a_step_beyond_the_plan_is_not_made(trainer: Trainer, kept: bool, seed: int, tmp_path: Path):
    """By continuing the loop; the parameters show it."""
    model, run_dir = Echo(RECORDS), tmp_path / "run" if kept else None
    run = model, one_hot(RECORDS), losses_of_echo, trainer.express(table_of(5))
    with started(trainer, *run, lr=0.1, seed=seed, run_dir=run_dir) as (training, _):
        training.run()
        before = [p.detach().clone() for p in model.parameters()]
        try:
            more = training.run(updates=3)
        except Refused:
            more = 0
    assert more == 0
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_a_pause_neither_repeats_nor_skips_an_update(trainer: Trainer, seed: int):
    """The same updates as without a pause, to the bit."""
    uninterrupted = recorded(trainer, table_of(12), seed=seed)
    run = Echo(RECORDS), one_hot(RECORDS), losses_of_echo, trainer.express(table_of(12))
    with started(trainer, *run, seed=seed) as (training, trace):
        updates = 0
        while updates < 12:
            more = training.run(updates=1)
            assert more >= 1
            updates += more
    assert updates == 12
    assert (trace.stacked() == uninterrupted.stacked()).all()
