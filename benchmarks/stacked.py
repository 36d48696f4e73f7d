"""What a step of a shadow model costs in a stack, and alone through make_private.

    python benchmarks/stacked.py --rounds 7 --out benchmarks/results/stacked.json

Milliseconds of the processor's time on one thread per (model, step): medians of interleaved rounds, and medians of the
paired ratios. Alone, a model is trained on half of the records; in a stack, each model draws among all records and
keeps its own half of them. The time alone is without setup and without the first five steps, the time in a stack is
that of the whole call. Digits are the data of the demo (1,437 records); features are random numbers in the shape of
CIFAR10's scattering features (8,000 records).
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import epsilons
from epsilons.auditing.stacked import MemberDraws, train_stacked
from epsilons.draws.randomness import Randomness
from epsilons.models import build

EPSILONS = {10.0: 0.5, 20.0: 0.5}


@dataclass(frozen=True)
class Task:
    """inputs (records, features), targets, hidden layers, expected batch, learning rate."""

    inputs: Tensor
    targets: Tensor
    hidden: tuple[int, ...]
    batch: float
    lr: float

    @property
    def group(self) -> np.ndarray:
        return np.random.default_rng(7).permutation(np.arange(len(self.inputs)) % 2)

    def model(self) -> nn.Module:
        return build("mlp", self.inputs.shape[1:], 10, hidden=list(self.hidden))

    def optimizer(self, parameters: Iterator[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=self.lr)

    def plan(self, steps: int) -> tuple[epsilons.Budgets, epsilons.Plan]:
        """For half of the records: the expected members of one model."""
        budgets = epsilons.Budgets.from_shares(EPSILONS, records=len(self.inputs) // 2, delta=1e-5, seed=0)
        recipe = epsilons.Recipe(steps=steps, batch_size=self.batch, clip_norm=1.0)
        return budgets, epsilons.plan(budgets, recipe, strategy="sample", accountant="rdp")


def digits(*hidden: int) -> Task:
    x, y = epsilons.data.load("digits", "train")
    return Task(torch.from_numpy((x / 4).astype(np.float32)), torch.from_numpy(y), hidden, 144.0, 4.0)


def features(records: int, width: int, batch: float, *hidden: int) -> Task:
    make = torch.Generator().manual_seed(0)
    x, y = torch.randn(records, width, generator=make) / 8, torch.randint(10, (records,), generator=make)
    return Task(x, y, hidden, batch, 1.0)


TASKS: dict[str, Callable[[], Task]] = {
    "digits 64-10": digits,
    "digits 64-32-10": lambda: digits(32),
    "features 972-10, batch 256": lambda: features(8_000, 972, 256.0),
    "features 972-10, batch 512": lambda: features(8_000, 972, 512.0),
}


def alone(task: Task, steps: int) -> float:
    """Seconds per step of make_private; of its checks of batch independence, that at step 10 is included."""
    budgets, plan = task.plan(steps + 5)
    model = task.model()
    half = len(task.inputs) // 2
    optimizer = task.optimizer(model.parameters())
    with epsilons.make_private(
        model, optimizer, (task.inputs[:half], task.targets[:half]), plan, budgets=budgets, seed=0
    ) as private:
        start = 0.0
        for x, y in private.batches:
            if private.updates == 5 and not start:
                start = time.process_time()
            private.backward(F.cross_entropy(model(x), y, reduction="none"))
            private.step()
        return (time.process_time() - start) / steps


def in_a_stack(task: Task, models: int, steps: int, data: tuple[Tensor, Tensor]) -> float:
    """Seconds per model and step, all of train_stacked included."""
    plan = task.plan(steps)[1]
    member = np.random.default_rng(1).random((models, len(data[0]))) < 0.5
    randomness = [Randomness.fresh(k) for k in range(models)]
    start = time.process_time()
    draws = MemberDraws(plan, task.group, member, randomness)
    train_stacked(task.model(), task.optimizer, data, draws)
    return (time.process_time() - start) / models / steps


def measure(task: Task, sizes: list[int], rounds: int, steps: int) -> dict[str, list[float]]:
    """{"alone" or number of models: milliseconds per model and step, a value per round}."""
    data = task.inputs, task.targets
    found: dict[str, list[float]] = {"alone": [], **{str(models): [] for models in sizes}}
    for number in range(rounds + 1):
        values = {"alone": alone(task, steps)}
        values |= {str(models): in_a_stack(task, models, steps, data) for models in sizes}
        for name, seconds in values.items() if number else ():  # the first round warms up
            found[name].append(1e3 * seconds)
    return found


def line(name: str, found: dict[str, list[float]]) -> str:
    own = found["alone"]
    ratios = {
        models: statistics.median(a / b for a, b in zip(own, values, strict=True)) for models, values in found.items()
    }
    cells = [f"{statistics.median(found[m]):.3f} (x{ratios[m]:.1f})" for m in found if m != "alone"]
    return f"| {name} | {statistics.median(own):.2f} | " + " | ".join(cells) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="*", default=list(TASKS), choices=list(TASKS))
    parser.add_argument("--models", nargs="*", type=int, default=[1, 4, 16, 64])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--note", default="", help="kept with the results: what else ran on the machine")
    given = parser.parse_args()
    torch.set_num_threads(1)
    print("| ms per model and step | alone | " + " | ".join(f"{m} models" for m in given.models) + " |")
    print("|---" * (len(given.models) + 2) + "|")
    kept = {}
    for name in given.tasks:
        kept[name] = measure(TASKS[name](), given.models, given.rounds, given.steps)
        print(line(name, kept[name]), flush=True)
    if given.out:
        machine = f"{platform.machine()}, {torch.get_num_threads()} thread, torch {torch.__version__}"
        given.out.write_text(
            json.dumps({"machine": machine, "note": given.note, "milliseconds": kept}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
