"""What a step costs besides its gradients: who is drawn, their records gathered and normalised, noise, the draw from
ever more records, and the reading of single records.

    python benchmarks/data_path.py --out benchmarks/results/data_path.json

The network is the paper's for MNIST, 512 of 60,000 records expected, pictures kept as 8-bit integers and normalised
one physical batch at a time. Each part is timed beside the gradients, in turn, in one process of one thread; medians of
processor time, which others on the machine do not lengthen. The draw from many is by coins and by counts, at 1,000
expected records and three rates. The choice of rows is that of about 1,000 persons of 1,000,000. Single records are 64
floats and a label; what reading them costs is given beyond the data set's own __getitem__ (torch's plain DataLoader
beside it), for this process and its workers together.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import numpy as np
import torch
from models import mnist
from step import machine, tune_allocator
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

from epsilons import Budgets, Phase, Plan, Recipe, plan
from epsilons.clipping import engine
from epsilons.draws.persons_rows import Draws, Persons
from epsilons.draws.randomness import Randomness
from epsilons.training.datasets import PhysicalBatch, data_source

LARGEST = 128
#: What `Performance` chooses for the paper's MNIST network, with channels last.
LARGEST_OF_MNIST = 768


def tabled(rates: list[float], count: int, source: str = "chacha20") -> Draws:
    """Draws at these rates, one group each."""

    def table(budgets: Budgets, recipe: Recipe, accountant: object) -> Plan:
        one = np.ones(len(rates))
        phase = Phase(1, np.array(rates), one, one, noise_std=50.0, expected_batch=float(np.mean(rates) * count))
        return Plan.of(budgets, recipe, accountant, phase, strategy="table")

    budgets = Budgets(np.resize(1e4 * np.arange(1.0, len(rates) + 1), count), delta=1e-9)
    made = plan(budgets, Recipe(1, float(np.mean(rates) * count), 1.0), table, "rdp")
    return Draws(made, budgets.group, Randomness(bytes(32), source))


def interleaved(parts: dict[str, Callable[[int], object]], rounds: int) -> dict[str, float]:
    """Median seconds of processor time of each."""
    found: dict[str, list[float]] = {name: [] for name in parts}
    for number in range(rounds + 2):
        for name, run in parts.items():
            start = time.process_time()
            run(number)
            if number >= 2:
                found[name].append(time.process_time() - start)
    return {name: statistics.median(seconds) for name, seconds in found.items()}


def step_of_mnist(rounds: int, source: str) -> dict[str, float]:
    torch.manual_seed(0)
    model = mnist().to(memory_format=torch.channels_last)
    parameters = list(model.parameters())
    made = engine("ghost")
    made.attach(model, parameters)
    count = sum(p.numel() for p in parameters)
    draws = tabled([512 / 60_000 * share for share in (0.5, 1.0, 1.5)], 60_000, source)
    data = data_source((torch.randint(256, (60_000, 1, 28, 28), dtype=torch.uint8), torch.randint(10, (60_000,))))
    drawn: list[np.ndarray] = []
    gathered: list[tuple[torch.Tensor, torch.Tensor]] = []

    def draw(step: int) -> None:
        drawn[:] = [draws.at(0, step)]

    def gather(step: int) -> None:
        pieces = Persons(60_000).readings(drawn[0], draws.randomness, 0, step).batches(LARGEST_OF_MNIST)
        batches = [PhysicalBatch(0, step, n, len(pieces), piece) for n, piece in enumerate(pieces)]
        read = data.stream(batches, torch.device("cpu"), draws.randomness)
        gathered[:] = [((x.float() - 33.3) / 78.6, y) for _, (x, y) in read]

    def noise(step: int) -> None:
        values = torch.from_numpy(draws.randomness.noise(0, step, count))
        start = 0
        for p in parameters:
            p.grad = ((values[start : start + p.numel()] * 50.0).reshape(p.shape) / 512).to(p.dtype)
            start += p.numel()
        for p in parameters:
            p.grad = None

    def gradients(step: int) -> None:
        for x, y in gathered:
            made.begin(len(y))
            losses = F.cross_entropy(model(x), y, reduction="none")
            ones = torch.ones(len(y), dtype=torch.float64)
            made.clipped_sum(losses, ones, ones)

    return interleaved({"draw": draw, "gather": gather, "gradients": gradients, "noise": noise}, rounds)


def draws_from_many(rounds: int) -> dict[str, dict[str, float]]:
    """Of about 1,000 records, at three rates; the plan is reduced to what draws read of it."""
    found = {}
    for count in (1_000_000, 10_000_000, 100_000_000):
        phase = SimpleNamespace(sample_rate=np.array([500 / count, 1000 / count, 1500 / count]))
        plan = cast(Plan, SimpleNamespace(records=count, phases=[phase]))
        draws = Draws(plan, np.resize([0, 1, 2], count), Randomness(bytes(32)))
        start = time.process_time()
        draws.by_counts(0, 0)
        first = time.process_time() - start
        medians = interleaved({"coins": partial(draws.by_coins, 0), "counts": partial(draws.by_counts, 0)}, rounds)
        found[f"{count:,}"] = {**medians, "first draw by counts": first}
    return found


def choices(rounds: int) -> dict[str, dict[str, float]]:
    """Of about 1,000 persons out of 1,000,000 with 3,000,000 rows: the coins, and the choice of their rows."""
    count, rows = 1_000_000, 3_000_000
    person = np.random.default_rng(0).permutation(np.repeat(np.arange(count), 3))
    draws = tabled([500 / count, 1000 / count, 1500 / count], count, "chacha20")
    drawn: list[np.ndarray] = [np.empty(0, dtype=np.int64)]

    def coins(step: int) -> None:
        drawn[:] = [draws.by_coins(0, step)]

    found = {}
    for most in (1, 2, 4):
        persons = Persons.of(person, count, most)
        start = time.process_time()
        persons.readings(persons.with_rows(drawn[0]), draws.randomness, 0, 0)
        first = time.process_time() - start

        def choice(step: int, persons: Persons = persons) -> None:
            readings = persons.readings(persons.with_rows(drawn[0]), draws.randomness, 0, step)
            readings.batches(LARGEST)

        medians = interleaved({"coins": coins, "choice": choice}, rounds)
        found[f"{rows:,} rows, rows_per_person={most}"] = {**medians, "first choice": first}
    return found


class Small(Dataset[tuple[torch.Tensor, int]]):
    """Records of 64 floats and a label."""

    def __init__(self, records: int) -> None:
        self._inputs, self._targets = torch.randn(records, 64), torch.randint(10, (records,)).tolist()

    def __len__(self) -> int:
        return len(self._targets)

    def __getitem__(self, record: int) -> tuple[torch.Tensor, int]:
        return self._inputs[record], self._targets[record]


def read_alone(data: Small, batches: list[PhysicalBatch]) -> None:
    for physical in batches:
        for row in physical.indices.tolist():
            data[row]


def read_by_torch(data: Small, num_workers: int, batches: list[PhysicalBatch]) -> None:
    rows = [physical.indices.tolist() for physical in batches]
    list(DataLoader(data, batch_sampler=rows, num_workers=num_workers))


def read_by_us(data: Small, num_workers: int, batches: list[PhysicalBatch]) -> None:
    source = data_source(data, num_workers)
    list(source.stream(iter(batches), torch.device("cpu"), Randomness(bytes(32))))


def processor_seconds() -> float:
    """Of this process and of the workers that have ended."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


def per_record(read: Callable[[list[PhysicalBatch]], None], batches: list[PhysicalBatch]) -> float:
    """Seconds of processor time per record: the difference of all batches and a tenth, without the start of workers."""
    parts, seconds = (batches[: len(batches) // 10], batches), []
    for part in parts:
        start = processor_seconds()
        read(part)
        seconds.append(processor_seconds() - start)
    few, all_ = (sum(len(physical.indices) for physical in part) for part in parts)
    return (seconds[1] - seconds[0]) / (all_ - few)


def single_records(rounds: int, count: int = 20_000) -> dict[str, dict[str, float]]:
    """Seconds per record beyond the data set's own __getitem__, by torch's DataLoader and by ours."""
    data, rng = Small(count), np.random.default_rng(0)
    persons, randomness, batches = Persons(count), Randomness(bytes(32)), []
    for step in range(20):
        drawn = np.sort(rng.choice(count, 8 * LARGEST, replace=False))
        pieces = persons.readings(drawn, randomness, 0, step).batches(LARGEST)
        batches += [PhysicalBatch(0, step, n, len(pieces), piece) for n, piece in enumerate(pieces)]
    found = {}
    for workers in (0, 2):
        readers = {"torch": partial(read_by_torch, data, workers), "ours": partial(read_by_us, data, workers)}
        beyond: dict[str, list[float]] = {name: [] for name in readers}
        for _ in range(rounds):
            own = per_record(partial(read_alone, data), batches)
            for name, read in readers.items():
                beyond[name].append(per_record(read, batches) - own)
        found[f"{workers} workers"] = {name: statistics.median(seconds) for name, seconds in beyond.items()}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    tune_allocator()
    kept: dict[str, object] = {"machine": machine(), "command": sys.argv}
    for source in ("chacha20", "secure"):
        parts = step_of_mnist(given.rounds, source)
        share = 1 - parts["gradients"] / sum(parts.values())
        kept[f"step, {source}"] = {**parts, "share besides gradients": share}
        print(f"{source}: " + ", ".join(f"{k} {1e3 * v:.2f} ms" for k, v in parts.items()) + f"; {share:.1%} besides")
    single = kept["single records"] = single_records(given.rounds)
    for workers, beyond in single.items():
        listed = ", ".join(f"{name} {1e6 * seconds:.1f} µs" for name, seconds in beyond.items())
        print(f"a record of a map-style data set, {workers}: {listed} beyond its __getitem__")
    many = kept["draws"] = draws_from_many(min(given.rounds, 5))
    for count, medians in many.items():
        print(f"{count} records: " + ", ".join(f"{k} {1e3 * v:.2f} ms" for k, v in medians.items()))
    persons = kept["persons"] = choices(given.rounds)
    for what, medians in persons.items():
        print(f"{what}: " + ", ".join(f"{k} {1e3 * v:.2f} ms" for k, v in medians.items()))
    if given.out:
        given.out.write_text(json.dumps(kept, indent=1) + "\n")


if __name__ == "__main__":
    main()
