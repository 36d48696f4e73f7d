"""What persons cost: a step on persons with several rows, relative to a step on as many records.

    python benchmarks/persons.py --rows 4 --rounds 15 --out benchmarks/results/persons.json

Both steps have the same rows: forward pass, backward pass, clipping, noise, update. In one each row is a record, in
another each person has `--rows` of them, in a third persons have 1, 2, … up to `--rows`. Interleaved in one process,
medians of paired ratios, in processor time of one thread.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from models import TASKS, Task
from step import CLIP_NORM, NOISE, RATE, Step, clock, losses_of, machine, ratio, tune_allocator
from torch import Tensor, nn


def mlp() -> nn.Module:
    return nn.Sequential(
        nn.Flatten(), nn.Linear(784, 512), nn.Tanh(), nn.Linear(512, 512), nn.Tanh(), nn.Linear(512, 10)
    )


MODELS = {**TASKS, "mlp": Task(lambda *_: mlp(), TASKS["mnist"].batch, 512, 256)}


def mixed(rows: int, at_most: int) -> list[int]:
    """1, 2, …, at_most, 1, 2, … until all rows are given out."""
    sizes: list[int] = []
    while (left := rows - sum(sizes)) > 0:
        sizes.append(min(len(sizes) % at_most + 1, left))
    return sizes


def build(task: Task, which: str, sizes: Sequence[int] | None) -> Step:
    """One step on this task's records, in its physical batches. sizes: of the persons in each; None for records"""
    from epsilons.clipping import engine

    torch.manual_seed(0)
    model = task.model(False, 1)
    parameters = list(model.parameters())
    made = engine(which)
    made.attach(model, parameters)
    optimizer = torch.optim.SGD(parameters, lr=RATE)
    x, y = task.batch(task.records)
    parts = list(zip(x.split(task.physical_batch), y.split(task.physical_batch), strict=True))
    count = task.physical_batch if sizes is None else len(sizes)
    bounds = CLIP_NORM * torch.linspace(0.5, 1.5, count, dtype=torch.float64)
    weights = torch.ones(count, dtype=torch.float64)

    def step() -> None:
        total: list[Tensor] = []
        for part in parts:
            made.begin(task.physical_batch)
            found = made.clipped_sum(losses_of(model, part), bounds, weights, sizes)
            total = found if not total else [t.add_(f) for t, f in zip(total, found, strict=True)]
        for p, t in zip(parameters, total, strict=True):
            p.grad = t.to(p.dtype).add_(torch.normal(0.0, NOISE * CLIP_NORM, p.shape)).div_(task.records)
        optimizer.step()
        optimizer.zero_grad()

    return step


def measure(task: Task, which: str, rows: int, rounds: int) -> dict[str, list[float]]:
    """{kind of step: seconds, a value per round}"""
    size = task.physical_batch
    kinds = {"records": None, "persons": [rows] * (size // rows), "mixed": mixed(size, rows)}
    steps = {kind: build(task, which, sizes) for kind, sizes in kinds.items()}
    found: dict[str, list[float]] = {kind: [] for kind in steps}
    for number in range(rounds + 2):
        for kind, step in steps.items():
            start = clock()
            step()
            if number >= 2:
                found[kind].append(clock() - start)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--engine", default="ghost")
    parser.add_argument("--rows", type=int, default=4, help="of each person")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    tune_allocator()
    kept = {"machine": machine(), "command": sys.argv, "seconds": {}}
    for model in given.models:
        kept["seconds"][model] = found = measure(MODELS[model], given.engine, given.rows, given.rounds)
        plain = 1e3 * statistics.median(found["records"])
        others = [f"{kind} {ratio(found[kind], found['records']):.3f}" for kind in ("persons", "mixed")]
        print(f"{model}: records {plain:.0f} ms a step; relative to it: {', '.join(others)}", flush=True)
    if given.out:
        given.out.write_text(json.dumps(kept, indent=1) + "\n")


if __name__ == "__main__":
    main()
