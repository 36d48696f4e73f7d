"""A record is a function of its index and its seed: data sets that mix records are refused, and sound ones train."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import epsilons
from data_sets import FEATURES, MIXING, RECORDS, SOUND, Build, Case
from epsilons.errors import BatchDependenceError

pytestmark = pytest.mark.usefixtures("one_thread")

STEPS = 12


def columns() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    x, y = torch.randn(RECORDS, FEATURES, generator=generator), torch.randn(RECORDS, generator=generator)
    x[RECORDS // 2] *= 5
    return x, y


def case_of(build: Build, *given: Tensor) -> Case:
    built = build(*given)
    return built if isinstance(built, Case) else Case(built)


def losses_of(model: nn.Module, case: Case, batch: Any) -> Tensor:
    x, y = case.features(batch)
    return (model(x.float()).squeeze(1) - y.float()) ** 2


def refusal(build: Build, steps: int = STEPS) -> str:
    """Train; the message of the error if the training is refused, else ""."""
    torch.manual_seed(0)
    case = case_of(build, *columns())
    options = dict(case.options)
    rate, records = options.pop("rate", 0.75), options.pop("records", RECORDS)
    persons = options.get("persons")
    count = records if persons is None else len(set(persons))
    budgets = epsilons.Budgets([1.0] * count, delta=1e-5, **({} if persons is None else {"unit": "person"}))
    plan = epsilons.plan(
        budgets, epsilons.Recipe(steps=steps, batch_size=rate * count, clip_norm=1.0), accountant="rdp"
    )
    model = nn.Linear(FEATURES, 1)
    performance = epsilons.Performance(num_workers=case.workers, max_physical_batch=64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    try:
        with epsilons.make_private(
            *(model, optimizer, case.data, plan),
            budgets=budgets,
            seed=0,
            performance=performance,
            collate_fn=case.collate,
            **options,
        ) as private:
            for batch in private.batches:
                private.backward(losses_of(model, case, batch))
                private.step()
    except BatchDependenceError as error:
        return str(error)
    assert private.updates == steps
    return ""


@pytest.mark.parametrize("name", SOUND)
def test_a_sound_data_set_trains(name: str) -> None:
    assert refusal(SOUND[name]) == ""


@pytest.mark.parametrize("name", MIXING)
def test_a_data_set_that_mixes_records_is_refused(name: str) -> None:
    assert refusal(MIXING[name]) != ""
