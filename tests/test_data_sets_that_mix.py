"""A record is a function of its index and its seed: data sets that mix records are refused, and sound ones train."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import default_collate

import epsilons
from data_sets import FEATURES, MIXING, RECORDS, SOUND, UNSEEN, Build, Case
from epsilons.draws.persons_rows import Persons
from epsilons.draws.randomness import Randomness
from epsilons.errors import BatchDependenceError
from epsilons.training.datasets import DataLoaderSource, PhysicalBatch
from options import make_flat
from shares import share

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
        with make_flat(
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


def sum_of_others(build: Build, x: Tensor, y: Tensor, person: int, is_there: bool) -> Tensor:
    """The clipped gradients of all records but one, in 64 bits, at weights of zero. Sound: they do not move with it."""
    case, total = case_of(build, x, y), torch.zeros(FEATURES + 1, dtype=torch.float64)
    for index in range(len(x)):
        if index == person and not is_there:
            continue
        random.seed(index)
        np.random.seed(index)
        torch.manual_seed(index)
        row, target = case.features((case.collate or default_collate)([case.data[index]]))
        gradient = -2 * target.double() * torch.cat([row[0].double(), torch.ones(1, dtype=torch.float64)])
        total += (index != person) * gradient / max(1.0, float(gradient.norm()))
    return total


def moved(build: Build) -> float:
    """How far one record moves the others' clipped sum, in clip norms: the largest of all records, each made large."""
    found = []
    for person in range(RECORDS):
        x, y = columns()
        x[person], y[person] = 50 * x[person], 50 * y[person]
        there = sum_of_others(build, x, y, person, True)
        x[person], y[person] = 0, 0
        found.append(float((there - sum_of_others(build, x, y, person, False)).norm()))
    return max(found)


@pytest.mark.parametrize("name", share(SOUND, 24))
def test_a_sound_data_set_trains(name: str) -> None:
    assert refusal(SOUND[name]) == ""


@pytest.mark.parametrize("name", sorted(set(MIXING) - set(UNSEEN)))
def test_a_data_set_that_mixes_records_is_refused(name: str) -> None:
    assert refusal(MIXING[name]) != ""


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("buffer_in_an_object", "Return a copy of the buffer"),
        ("running_mean", "running statistics, counters"),
        ("time", "the time, or random numbers without a seed"),
        ("small_cache_with_a_wrong_key", "wrong caches"),
        ("index_ignored", "Read record `index`"),
        ("siamese_by_parity", "Read record `index`"),
        ("windows_unfolded", "(tensors) gives records of different persons that overlap in memory"),
        ("rare_windows_of_a_long_series", "overlap in memory"),
        ("mixup", "(Rows) reads several rows of one table"),
        ("batch_buffer_of_collate", "Return new tensors from the collate function"),
        ("state_of_a_collate_function", "Your collate function"),
    ],
)
def test_a_refusal_names_the_cause_and_the_cure(name: str, words: str) -> None:
    assert words in refusal(MIXING[name])


@pytest.mark.parametrize("name", share(UNSEEN, 3))
def test_what_no_check_finds_is_listed_with_its_size(name: str) -> None:
    assert refusal(MIXING[name]) == ""
    assert moved(MIXING[name]) == pytest.approx(UNSEEN[name], abs=0.06)


@pytest.mark.slow
def test_a_sound_data_set_moves_no_other_record() -> None:
    assert moved(SOUND["augmented_by_all_global_generators"]) == 0
    assert moved(SOUND["records_of_different_sizes"]) == 0


def test_the_page_of_concepts_lists_what_no_check_finds() -> None:
    """With the same sizes, in the same order, and nothing else."""
    page = (Path(__file__).parents[1] / "docs" / "concepts.md").read_text(encoding="utf-8")
    table = page.partition("| not found | moves the others by |")[2].partition("\n\n")[0].splitlines()[2:]
    assert [float(line.split("|")[2]) for line in table] == [round(size, 1) for size in UNSEEN.values()]


OWN = [name for name in SOUND if "own" in name and "wrappers" not in name and "collate" not in name]


@pytest.mark.parametrize("name", OWN)
def test_own_generators_give_each_reading_numbers_of_its_own_in_any_process(name: str) -> None:
    """The same ones where workers read, and others for another record and in another step."""

    def read(workers: int, step: int) -> list[Tensor]:
        case = case_of(SOUND[name], *columns())
        source = DataLoaderSource(case.data, workers, case.collate)
        rows = np.array([3, 0, 5])
        readings = Persons(RECORDS).readings(np.sort(rows), Randomness(bytes(32)), 0, step)
        physical = PhysicalBatch(0, step, 0, 1, readings)
        ((_, batch),) = source.stream([physical], torch.device("cpu"), Randomness(bytes(32)))
        return [row - plain for row, plain in zip(batch[0], columns()[0][np.sort(rows)], strict=True)]

    here, there, later = read(0, 1), read(1, 1), read(0, 2)
    assert all(map(torch.equal, here, there))
    assert not any(map(torch.equal, here, later))
    assert not torch.equal(here[0], here[1])


def test_there_are_many_of_each() -> None:
    assert len(set(MIXING) - set(UNSEEN)) >= 30
    assert len(SOUND) >= 30
    assert set(UNSEEN) <= set(MIXING)
