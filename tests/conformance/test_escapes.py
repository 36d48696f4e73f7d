"""Promise: nothing un-noised reaches the parameters, nor any place where an optimizer, a logger or a user finds it."""

from __future__ import annotations

import itertools
from contextlib import suppress

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from .adapters import Table, Trainer, Training, record
from .probes import Echo, losses_of_echo, mixed, one_hot

RECORDS = 40
TABLE = Table(6, mixed(RECORDS, 2), (0.4, 0.6), (0.5, 1.5), 0.7, 20.0)


def parameters_of(model: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def same(ours: list[Tensor], theirs: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("when", ["before the first draw", "between two updates", "in the middle of a draw"])
def test_the_habit_of_backward_and_step_does_not_train_without_noise(trainer: Trainer, when: str, seed: int):
    """loss.mean().backward(); optimizer.step() on one's own objects: refused, or at least without effect."""
    model, data = Echo(RECORDS), one_hot(RECORDS)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    training = trainer.start(
        model, optimizer, data, losses_of_echo, trainer.express(TABLE), seed=seed, physical_batch=5
    )
    tried = 0

    def habit() -> None:
        nonlocal tried
        before = parameters_of(model)
        tried += 1
        with suppress(Exception):
            losses_of_echo(model, data).mean().backward()
            optimizer.step()
        moved = not same(before, parameters_of(model))
        optimizer.zero_grad()
        assert not moved

    if when == "before the first draw":
        habit()
    elif when == "between two updates":
        training.run(updates=2, between=habit)
    else:
        training.run(updates=1, midway=habit)
    training.close()
    assert tried


def test_no_gradient_is_in_sight_between_backward_and_step(trainer: Trainer, seed: int):
    """What lies in p.grad there is found by clipping helpers, loggers of gradient norms, and the optimizer."""
    model = Echo(RECORDS)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    training = trainer.start(
        model, optimizer, one_hot(RECORDS), losses_of_echo, trainer.express(TABLE), seed=seed, physical_batch=5
    )
    seen: list[bool] = []
    training.run(midway=lambda: seen.append(all(p.grad is None for p in model.parameters())))
    training.close()
    assert seen
    assert all(seen)


def test_a_gradient_put_in_by_hand_adds_nothing(trainer: Trainer, seed: int):
    """p.grad filled between backward and step, as an un-noised penalty would: the update is as without it."""

    def run(meddle: bool) -> list[Tensor]:
        model = Echo(RECORDS)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        training = trainer.start(model, optimizer, one_hot(RECORDS), losses_of_echo, trainer.express(TABLE), seed=seed)

        def fill() -> None:
            for p in model.parameters():
                p.grad = torch.ones_like(p)

        training.run(midway=fill if meddle else None)
        training.close()
        return parameters_of(model)

    assert same(run(False), run(True))


@pytest.mark.parametrize("way", ["thawed", "added"])
def test_a_parameter_that_joins_later_is_not_trained_without_noise(trainer: Trainer, way: str, seed: int):
    """Refused, or left alone, or trained with noise like all the others; here it would have no gradient but its own."""
    model = Echo(RECORDS, 50)
    late = model.parts[1].weight
    x = torch.cat([one_hot(RECORDS)[0], torch.zeros(RECORDS, 50, dtype=torch.float64)], 1)
    x[:, -1] = 1.0
    held = list(model.parameters()) if way == "thawed" else [model.parts[0].weight]
    optimizer = torch.optim.SGD(held, lr=0.1)
    late.requires_grad_(False)
    try:
        training = trainer.start(model, optimizer, (x,), losses_of_echo, trainer.express(TABLE), seed=seed)
    except Exception:  # a model of which a part is frozen is declined
        pytest.skip("refused at the door")
    with suppress(Exception):
        training.run(updates=1)
        late.requires_grad_(True)
        if way == "added":
            optimizer.add_param_group({"params": [late]})
        training.run(updates=3)
    training.close()
    values = late.detach().flatten().numpy()
    assert not values.any() or np.count_nonzero(values) == 50


def test_every_update_that_moves_the_parameters_holds_noise(trainer: Trainer, seed: int):
    """Coordinates that no record touches move at every update: 60 of 60, however many were drawn."""
    model = Echo(RECORDS, 60)
    x = torch.cat([one_hot(RECORDS)[0], torch.zeros(RECORDS, 60, dtype=torch.float64)], 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    training = trainer.start(
        model, optimizer, (x,), losses_of_echo, trainer.express(TABLE), seed=seed, physical_batch=3
    )
    positions = [parameters_of(model)]
    training.run(between=lambda: positions.append(parameters_of(model)))
    training.close()
    assert len(positions) == 7
    for before, after in itertools.pairwise(positions):
        assert ((after[1] - before[1]) != 0).all()


@pytest.mark.parametrize("how", ["a second optimizer", "a write to .data"])
def test_what_else_writes_to_the_parameters_between_updates_is_noticed(trainer: Trainer, how: str, seed: int):
    """Un-noised values get into the model beside the update; no library can undo that, and it can refuse to go on."""
    table = trainer.express(Table(4, mixed(24, 2), (0.5, 0.5), (0.5, 1.0), 0.7, 12.0))
    model = Echo(24)
    raw = torch.full((1, 24), 3.0, dtype=torch.float64)

    def write(training: Training) -> None:
        (weight,) = model.parameters()
        if how == "a write to .data":
            weight.data += raw
        else:
            with torch.no_grad():
                weight.add_(raw)

    made: list[int] = []

    def between(training: Training) -> None:
        made.append(1)
        write(training)

    with suppress(Exception):
        record(trainer, model, one_hot(24), losses_of_echo, table, seed=seed, between=between)
    assert len(made) <= 1
