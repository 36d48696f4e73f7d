"""What physical batches of one fixed number of rows would cost, against batches as large as the draw.

    python benchmarks/fixed_rows.py --rounds 5 --out benchmarks/results/fixed_rows.json

Kernels may round differently for another number of rows, so whether one record was drawn can change the last bits of
what is computed for others (docs/concepts.md). A fixed number of rows, filled up with copies (their losses are selected
out), would end that. Per model: seconds of one clipped sum for every size, interleaved, medians of the processor's time
on one thread; then the mean over 2,000 Poisson draws of what they add up to, for each fixed size, relative to batches
cut as they are by default.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path

import numpy as np
import torch
from models import TASKS, Task
from torch.nn import functional as F

from epsilons.clipping import engine
from epsilons.draws.persons_rows import evenly

DRAWS = 2_000
FIXED = (16, 32, 64, 128, 256)


def seconds(task: Task, sizes: list[int], rounds: int) -> dict[int, float]:
    """{records in a physical batch: seconds of its clipped sum}."""
    torch.manual_seed(0)
    model = task.model(False, 1)
    made = engine("ghost")
    made.attach(model, list(model.parameters()))
    found: dict[int, list[float]] = {size: [] for size in sizes}
    for number in range(rounds + 1):
        for size in sizes:
            x, y = task.batch(size)
            bounds = torch.ones(size, dtype=torch.float64)
            start = time.process_time()
            made.begin(size)
            made.clipped_sum(F.cross_entropy(model(x), y, reduction="none"), bounds, bounds)
            if number:
                found[size].append(time.process_time() - start)
    return {size: statistics.median(times) for size, times in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--models", nargs="*", default=list(TASKS))
    parser.add_argument("--batch", type=int, default=256, help="expected draw")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    drawn = np.random.default_rng(0).poisson(given.batch, DRAWS)
    result = {}
    for name in given.models:
        task = TASKS[name]
        grid = sorted({*FIXED[: FIXED.index(min(256, max(FIXED)))], 24, 48, 96, 192, task.physical_batch, 256})
        grid = [size for size in grid if size <= max(task.physical_batch, 32)]
        measured = seconds(task, grid, given.rounds)
        at = np.array(sorted(measured))

        def cost(size: int) -> float:
            return float(np.interp(size, at, [measured[s] for s in at]))  # noqa: B023

        usual = np.mean([sum(map(cost, np.diff(evenly(n, task.physical_batch)).tolist())) for n in drawn])
        fixed = {
            size: float(np.mean([-(-n // size) * cost(size) for n in drawn]) / usual)
            for size in FIXED
            if size <= max(task.physical_batch, 32)
        }
        result[name] = {"physical_batch": task.physical_batch, "seconds": measured, "ratio_of_fixed": fixed}
        best = min(fixed, key=fixed.__getitem__)
        print(f"{name}: fixed rows cost at least {fixed[best]:.2f} of the usual step (with {best} rows)", flush=True)
    if given.out:
        given.out.write_text(json.dumps({"batch": given.batch, "models": result}, indent=1) + "\n")


if __name__ == "__main__":
    main()
