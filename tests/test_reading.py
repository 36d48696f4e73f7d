"""What reading a draw gives: the numbers that a data set sees, rows of tensors, and coins, against slow definitions."""

from __future__ import annotations

import hashlib
import os
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.data import Dataset, default_collate

import epsilons
from epsilons.draws.persons_rows import Persons
from epsilons.draws.randomness import Randomness
from epsilons.training import datasets
from epsilons.training.datasets import PhysicalBatch, TensorSource, data_source
from small_runs import a_model, blocks_of, epochs, private_over, some_data, train

ROWS, CPU = 60, torch.device("cpu")
RANDOMNESS = Randomness(bytes(range(32)))


# -- seeds -----------------------------------------------------------------------------------------------------------

#: What a data set may do with the generators while it reads row `i`; each gives a number.
HABITS: dict[str, Callable[[int], float]] = {
    "nothing": lambda i: 0.0,
    "torch": lambda i: float(torch.rand(())),
    "one normal of torch": lambda i: float(torch.randn(())),
    "numpy": lambda i: float(np.random.rand()),
    "one of two normals of numpy": lambda i: float(np.random.randn()),
    "random": lambda i: random.random(),
    "one of two normals of random": lambda i: random.gauss(0.0, 1.0),
    "shuffling": lambda i: float(np.random.permutation(50)[0] + torch.randperm(50)[0] + random.sample(range(50), 1)[0]),
    "reads the seed of torch": lambda i: float(np.random.default_rng(torch.initial_seed()).random()),
    "reads the state of torch": lambda i: float(torch.get_rng_state().sum()),
    "reads the state of numpy": lambda i: float(np.random.get_state()[1][0]),  # type: ignore[index]
    "reads the state of random": lambda i: float(hash(random.getstate()) % 2**32),
    "seeds all generators itself": lambda i: float((torch.manual_seed(i), np.random.seed(i), random.seed(i)) is None),
    "jumps": lambda i: float(random.setstate(random.Random(i).getstate()) is None) + random.random(),
}


class Habits(Dataset[Any]):
    """Rows that do one or several of HABITS, by chance: often a row draws nothing, and the next one does."""

    def __init__(self, number: int) -> None:
        chance = random.Random(number)
        self.habits = [chance.sample(sorted(HABITS), chance.choice([0, 0, 1, 2, 4])) for _ in range(ROWS)]

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, row: int) -> tuple[int, list[float]]:
        return row, [HABITS[habit](row) for habit in self.habits[row]]


def with_draws(records: list[Any]) -> list[Any]:
    """A collate function that draws."""
    return [*records, float(torch.rand(())), np.random.randn(), random.gauss(0.0, 1.0)]


def seed_all(*address: Any) -> None:
    seed = RANDOMNESS.seed(*address)
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)


def slowly(data: Habits, physical: PhysicalBatch) -> list[Any]:
    """The definition: generators seeded in full before each row, by its person and the number of the reading."""
    readings, at, records = physical.readings, (physical.phase, physical.step), []
    persons = np.repeat(readings.persons, readings.sizes).tolist()
    for row, person, number in zip(readings.rows.tolist(), persons, readings.numbers.tolist(), strict=True):
        seed_all("record", *at, person, *([number] if number else []))
        records.append(data[row])
    seed_all("collate", *at, physical.number)
    return with_draws(records)


def batches_of(persons: Persons, drawn: list[int], largest: int) -> list[PhysicalBatch]:
    """Two steps of a phase, of the same persons."""
    made = []
    for step in (3, 40):
        readings = persons.readings(persons.with_rows(np.array(drawn)), RANDOMNESS, 1, step)
        parts = readings.batches(largest) or [readings]
        made += [PhysicalBatch(1, step, number, len(parts), part) for number, part in enumerate(parts)]
    return made


def a_case(number: int) -> tuple[Habits, list[PhysicalBatch]]:
    """A data set with habits, and physical batches of records, views or persons' rows."""
    chance = random.Random(number)
    of_persons = Persons.of(np.array([chance.randrange(20) for _ in range(ROWS)]), 20, rows_per_person=2, views=2)
    persons = [Persons(ROWS), Persons(ROWS, views=3), of_persons][number % 3]
    drawn = sorted(chance.sample(range(persons.count), persons.count // 2))
    return Habits(number), batches_of(persons, drawn, chance.choice([1, 5, 12, 200]))


def check(number: int, num_workers: int) -> None:
    data, batches = a_case(number)
    expected = [slowly(data, physical) for physical in batches]
    torch.manual_seed(number)  # what the generators were before makes no difference
    found = list(data_source(data, num_workers, with_draws).stream(iter(batches), CPU, RANDOMNESS))
    assert [physical for physical, _ in found] == batches
    assert [batch for _, batch in found] == expected


@pytest.mark.parametrize("number", range(12))
def test_a_data_set_sees_the_numbers_of_its_seeds_whatever_it_does_with_them(number: int):
    check(number, 0)


@pytest.mark.parametrize("number", range(2))
def test_workers_see_the_same_numbers(number: int):
    check(number, 2)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(100, 300))
def test_a_data_set_sees_the_numbers_of_its_seeds_in_many_cases(number: int):
    check(number, 0)


def test_records_that_are_read_again_see_the_same_numbers():
    """A check collates records of a physical batch that it reads once more."""
    data, batches = a_case(1)
    source = data_source(data, 0, with_draws)
    for physical in batches:
        again = source.gather(physical, CPU, RANDOMNESS).batch(range(len(physical.indices)))
        assert again == slowly(data, physical)


def test_torchs_own_collate_function_gets_the_records_in_order():
    data, batches = Habits(0), batches_of(Persons(ROWS), [1, 2, 5], 2)
    data.habits = [["torch"]] * ROWS
    for physical, batch in data_source(data).stream(batches, CPU, RANDOMNESS):
        rows, ((numbers),) = batch
        records = slowly(data, physical)[: len(physical.indices)]
        assert rows.tolist() == physical.indices.tolist()
        assert torch.equal(numbers, default_collate(records)[1][0])


@given(st.text("abc", min_size=1), st.lists(st.integers(0, 2**40), max_size=3), st.lists(st.integers(0, 10**6)))
def test_many_seeds_are_each_the_one_of_its_name(purpose: str, address: list[int], last: list[int]):
    expected = [RANDOMNESS.seed(purpose, *address, number, 7) for number in last]
    assert list(RANDOMNESS.seeds(purpose, *address, endings=(f"{number}/7" for number in last))) == expected


# -- rows of tensors ---------------------------------------------------------------------------------------------------

KINDS: dict[str, Callable[[], torch.Tensor]] = {
    "pictures": lambda: torch.randn(ROWS, 3, 4, 5),
    "8 bits": lambda: torch.randint(255, (ROWS, 7), dtype=torch.uint8),
    "labels": lambda: torch.randint(9, (ROWS,)),
    "channels last": lambda: torch.randn(ROWS, 3, 4, 5).to(memory_format=torch.channels_last),
    "transposed": lambda: torch.randn(6, ROWS).T,
    "every second": lambda: torch.randn(2 * ROWS, 4)[::2],
    "one row for all": lambda: torch.randn(1, 4).expand(ROWS, 4),
    "no values": lambda: torch.randn(ROWS, 0),
    "truth values": lambda: torch.rand(ROWS, 4) > 0.5,
    "16 bits": lambda: torch.randn(ROWS, 4).bfloat16(),
    "complex": lambda: torch.randn(ROWS, 4, dtype=torch.complex64),
    "an odd offset": lambda: torch.randn(ROWS * 5 + 1)[1:].view(ROWS, 5),
}


@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_a_tensor_are_those_of_their_indices_in_its_memory_format(kind: str):
    tensor = KINDS[kind]()
    before, batches = tensor.clone(), batches_of(Persons(ROWS), [0, 7, 8, 59], 3)
    for physical, (batch,) in TensorSource([tensor]).stream(batches, CPU, RANDOMNESS):
        expected = tensor[torch.from_numpy(physical.indices)]
        assert torch.equal(batch, expected)
        assert batch.stride() == expected.stride()
        batch.zero_()  # a loop may write to its batch
    assert torch.equal(tensor, before)


# -- data larger than memory ----------------------------------------------------------------------------------------


def test_of_large_tensors_less_than_a_megabyte_is_in_the_fingerprint_unless_it_is_to_be_of_the_whole(tmp_path):
    rows = 300_000
    (tmp_path / "file").touch()
    os.truncate(tmp_path / "file", 4096 * rows)  # no block of the disk is used
    tensor = torch.from_file(str(tmp_path / "file"), shared=True, size=1024 * rows).view(rows, 1024)
    source, hashed = TensorSource([tensor, torch.arange(rows)]), []
    real = hashlib.blake2b

    class Counting:
        def __init__(self, *given: bytes, **settings: int) -> None:
            self._real = real(*given, **settings)
            self.digest, self.hexdigest = self._real.digest, self._real.hexdigest

        def update(self, content: bytes) -> None:
            hashed.append(len(content))
            self._real.update(content)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hashlib, "blake2b", Counting)
        before = source.fingerprint()
    assert 10_000 < sum(hashed) < 1e6
    tensor[0, 0] = 1.0
    assert source.fingerprint() != before
    tensor[0, 0], tensor[1, 0] = 0.0, 1.0
    assert source.fingerprint() == before


@pytest.mark.parametrize("is_seeded", [True, False])
def test_large_tensors_that_differ_get_no_noise_of_the_others(tmp_path, monkeypatch, is_seeded):
    """Also where the fingerprint reads no row that differs."""
    monkeypatch.setattr(datasets, "LARGE", 0)
    monkeypatch.setattr(datasets, "_sampled", lambda records: [0, records - 1])
    inputs, targets = (t.clone() for t in some_data())

    def begun(values: Tensor, **options: Any) -> epsilons.Private:
        torch.manual_seed(0)
        model = a_model()
        with blocks_of(4), private_over(model, (values, targets), **options) as private:
            train(private, model, until=None if "resume" in options else 3)
        return private

    others = inputs.clone()
    others[1:-1] += 1.0
    if is_seeded:
        keys = {begun(values, seed=1).ledger.key for values in (inputs, inputs.clone(), others)}
        assert len(keys) == 2
    else:
        sampled = TensorSource([inputs, targets]).fingerprint()
        assert sampled == TensorSource([others, targets]).fingerprint()
        assert sampled != TensorSource([inputs + 1.0, targets]).fingerprint()
        begun(inputs, run_dir=tmp_path / "run", checkpoint_every=10)
        begun(others, run_dir=tmp_path / "run", checkpoint_every=10, resume=True)
        assert epochs(tmp_path / "run") == [0, 1]
