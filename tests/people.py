"""Persons with 1 to 50 rows, what a run over them sees and sums up, and what it should: for tests of persons."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import epsilons
from by_hand import a_phase
from epsilons.draws.randomness import COIN_BITS, Randomness, key_from_seed
from options import make_flat
from sums import OVERSTATED

FEATURES, CLASSES = 5, 3
#: Number of rows of each person, by position in the budgets; person 6 has none.
SIZES = (1, 50, 3, 1, 10, 2, 0, 7, 1, 4, 25, 1)
NO_PERSON = SIZES.index(0)
KEY = key_from_seed(26)
STEPS, BATCH = 8, 6.0
RATES, NORMS, WEIGHTS = (0.4, 0.7), (0.05, 0.2), (1.0, 0.5)


@dataclass(frozen=True)
class Visits:
    """Rows in an order that has nothing to do with whose they are.

    person  (rows,) position in the budgets
    """

    inputs: Tensor
    targets: Tensor
    person: np.ndarray

    @property
    def columns(self) -> tuple[Tensor, Tensor, Tensor]:
        """Inputs, targets, and each row's own number, by which a loop knows it."""
        return self.inputs, self.targets, self.numbers

    @property
    def numbers(self) -> Tensor:
        """(rows,) a number that stays with the row when others are removed: a hash of its inputs."""
        return (self.inputs[:, 0] * 2**20).long()

    def without(self, person: int) -> Visits:
        """The same rows but this person's."""
        kept = self.person != person
        return Visits(self.inputs[kept], self.targets[kept], self.person[kept])

    def rows_of(self, person: int) -> list[int]:
        return np.flatnonzero(self.person == person).tolist()


def visits(sizes: tuple[int, ...] = SIZES, seed: int = 5) -> Visits:
    make = torch.Generator().manual_seed(seed)
    person = np.random.default_rng(seed).permutation(np.repeat(np.arange(len(sizes)), sizes))
    rows = len(person)
    inputs = torch.randn(rows, FEATURES, generator=make, dtype=torch.float64)
    return Visits(inputs, torch.randint(CLASSES, (rows,), generator=make), person)


def budgets(sizes: tuple[int, ...] = SIZES) -> epsilons.Budgets:
    """Two levels, one after the other."""
    return epsilons.Budgets(np.resize([1.0, 4.0], len(sizes)), delta=1e-5, unit="person")


def a_plan(steps: int = STEPS, people: epsilons.Budgets | None = None, **changes: Any) -> epsilons.Plan:
    """A plan for these budgets, with noise of a known size."""
    people = budgets() if people is None else people
    numbers = {"sample_rate": list(RATES), "clip_norm": list(NORMS), "weight": list(WEIGHTS)}
    phase = a_phase(**(numbers | {"steps": steps, "noise_std": 0.5, "expected_batch": BATCH} | changes))

    def tabled(budgets: Any, recipe: Any, accountant: Any) -> epsilons.Plan:
        return epsilons.Plan.of(budgets, recipe, lambda history, delta: 0.0, phase, strategy="by hand")

    return tabled(people, epsilons.Recipe(steps=steps, batch_size=BATCH, clip_norm=1.0), None)


def a_model() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return nn.Sequential(nn.Linear(FEATURES, 4), nn.Tanh(), nn.Linear(4, CLASSES)).double()


def losses_of(model: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


def private_over(data: Visits, model: nn.Module, plan: epsilons.Plan | None = None, lr: float = 0.0, **options: Any):
    """make_private with SGD, by positions of persons and one key."""
    keys = {} if "seed" in options else {"key": KEY}
    engine, largest = options.pop("engine", "auto"), options.pop("largest", 60)
    given = {"budgets": budgets(), "persons": data.person, **keys, **options}
    dataset = given.pop("dataset", data.columns)
    performance = given.pop("performance", epsilons.Performance(engine, largest))
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    return make_flat(model, optimizer, dataset, plan or a_plan(), performance=performance, **given)


@dataclass
class Trace:
    """What a run did.

    seen   per update, the numbers of the rows that the loop was handed to learn from, in order
    sums   per update, the sum of clipped gradients without its noise, flat
    """

    seen: list[list[int]] = field(default_factory=list)
    sums: list[np.ndarray] = field(default_factory=list)


def run(data: Visits, losses: Callable[[nn.Module, Any], Tensor] = losses_of, **options: Any) -> Trace:
    """A whole run with a learning rate of 0, so that all updates compare."""
    model, trace, handed = a_model(), Trace(), []
    with private_over(data, model, **options) as private:
        watch(private, trace, handed)
        for batch in private.batches:
            if not private.is_check:
                handed.append(batch[2].tolist())
            private.backward(losses(model, batch))
            private.step()
    return trace


def watch(private: Any, trace: Trace, handed: list[list[int]]) -> None:
    """Note each update as the optimizer gets it; the noise is known from the key."""

    def note(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        flat = torch.cat([p.grad.flatten() for p in parameters]).numpy()
        step = len(trace.sums)
        phase = private.plan.phases[0]
        noise = Randomness(KEY).noise(0, step, len(flat)) * phase.noise_std
        trace.sums.append(flat * phase.expected_batch - noise)
        trace.seen.append([number for batch in handed for number in batch])
        handed.clear()

    private.optimizer.register_step_pre_hook(note)


# -- what should happen, written from the definition ----------------------------------------------------------------


def drawn(step: int, persons: int = len(SIZES)) -> list[int]:
    """The persons whose coin falls: one coin for each position in the budgets."""
    coins = Randomness(KEY).coins(0, step, persons)
    rates = [RATES[p % 2] for p in range(persons)]
    return [p for p in range(persons) if int(coins[p]) < rates[p] * 2**COIN_BITS]


def clipped(data: Visits, person: int, rows: list[int]) -> np.ndarray:
    """A person's contribution: the gradient of the mean loss over these rows, each by itself, cut and weighted."""
    model = a_model()
    total: Tensor | float = 0.0
    for row in rows:
        total = total + losses_of(model, (data.inputs[row : row + 1], data.targets[row : row + 1]))[0]
    gradients = torch.autograd.grad(total / len(rows), list(model.parameters()))
    flat = torch.cat([g.flatten() for g in gradients]).numpy()
    group = person % 2
    return WEIGHTS[group] * flat * min(1.0, NORMS[group] / (OVERSTATED * np.linalg.norm(flat)))


def rows_seen(data: Visits, seen: list[int]) -> dict[int, list[int]]:
    """{person: their rows that were handed out, in order}, with views."""
    row_of = {number: row for row, number in enumerate(data.numbers.tolist())}
    by_person: dict[int, list[int]] = {}
    for number in seen:
        row = row_of[number]
        by_person.setdefault(int(data.person[row]), []).append(row)
    return by_person
