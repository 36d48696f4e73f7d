"""One way to run any library of private training, so that one suite examines them all.

A test says what is to be done as a Table, asks the trainer which table of that kind it can express, and looks at
nothing but the gradients that reach the user's own optimizer. To add a library: a class that meets Trainer, and a line
in TRAINERS, EACH and METHODS.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

import epsilons
from epsilons.draws.randomness import key_from_seed
from epsilons.ledger.ledger import read_charges

#: losses(model, batch) -> (batch,), one number per record.
Losses = Callable[[nn.Module, Any], Tensor]

Hook = Callable[[], None] | None


class Inexpressible(Exception):
    """The library has no way to say this; the test is skipped."""


class Refused(Exception):
    """The library declined, with an error: a promise kept, though not in the way that was asked for."""


@dataclass(frozen=True)
class Table:
    """What is to be done, a row per group; plain numbers, in no library's terms.

    group   (records,) each record's row
    phases  in how many phases of equal length, all by this table but for their noise
    growth  each phase's noise_std is so many times that of the phase before; the table has that of the first
    """

    steps: int
    group: tuple[int, ...]
    sample_rate: tuple[float, ...]
    clip_norm: tuple[float, ...]
    noise_std: float
    expected_batch: float
    weight: tuple[float, ...] = ()
    phases: int = 1
    growth: float = 1.0

    @property
    def rates(self) -> np.ndarray:
        """(records,) the chance of each to be drawn in one step."""
        return np.array(self.sample_rate)[list(self.group)]

    @property
    def bounds(self) -> np.ndarray:
        """(records,) how long the contribution of each may be."""
        weight = np.array(self.weight or [1.0] * len(self.clip_norm))
        return (weight * np.array(self.clip_norm))[list(self.group)]


@dataclass(frozen=True)
class Solution:
    """What a library's own calibration makes of budgets.

    phases  tables to be gone through one after another, with the same groups
    stated  (groups,) epsilon that the library says each group spends
    """

    phases: tuple[Table, ...]
    stated: tuple[float, ...]

    def history(self, group: int) -> list[tuple[float, float, int]]:
        """(sample rate, noise multiplier, steps) of every phase in which a record of this group may be drawn."""
        return [
            (table.sample_rate[group], table.noise_std / bound, table.steps)
            for table in self.phases
            for bound in [(table.weight or (1.0,) * len(table.clip_norm))[group] * table.clip_norm[group]]
            if table.sample_rate[group] > 0
        ]


@dataclass(frozen=True)
class Options:
    """How a run is made.

    seed            None: a fresh one
    physical_batch  the most records in one forward pass; None: the library's choice
    num_workers     processes that read the data
    run_dir         a folder for what the library keeps of the run, with a checkpoint `every` so many updates
    resume          continue from the last checkpoint in run_dir
    collate         turns records of a map-style data set into a batch; None: torch's own way
    """

    seed: int | None
    physical_batch: int | None = None
    num_workers: int = 0
    run_dir: Path | None = None
    every: int | None = None
    resume: bool = False
    collate: Callable[[list[Any]], Any] | None = None


class Training(Protocol):
    """One run in progress, on the user's own model and optimizer."""

    def run(self, updates: int | None = None, between: Hook = None, midway: Hook = None) -> int:
        """Train until so many more updates were made (or more, if the next draws are empty), or all; how many.

        `between` is called after each update, `midway` after each backward pass, before the step.
        """

    def charged(self) -> int:
        """Updates that the library has charged, durably if it can."""

    def look_at_the_data(self) -> None:
        """Evaluate on the training data as the loop gets them. Refused, or without consequences."""

    def close(self) -> None:
        """Hooks off."""

    def cut_off(self) -> None:
        """As `close`, but nothing is written: the run ends as if the process were killed."""


class Trainer(Protocol):
    """A library of private training."""

    name: str

    def express(self, table: Table) -> Table:
        """The table nearest to this one that the library can be asked for. Raises Inexpressible."""

    def start(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        data: Any,
        losses: Losses,
        table: Table,
        **options: Any,
    ) -> Training:
        """`data`: a tuple of tensors or a map-style data set; `options`: as in Options. Raises Refused."""

    def solve(self, budgets: epsilons.Budgets, recipe: epsilons.Recipe, how: str) -> Solution:
        """What the library's own calibration makes of these budgets; `how`: its name for the method."""


# -- what is seen from outside --------------------------------------------------------------------------------


@dataclass
class Trace:
    """What reached the user's optimizer, and what had been charged by then.

    sums     per update, one tensor per parameter: the noisy sum, that is the gradient times the table's divisor
    charged  per update, what the library had charged at that moment
    """

    sums: list[list[Tensor]]
    charged: list[int]
    parameters: list[Tensor]

    def stacked(self, tensor: int = 0) -> np.ndarray:
        """(updates, values) of one parameter, flat."""
        return torch.stack([update[tensor].flatten() for update in self.sums]).numpy()


def watch(optimizer: torch.optim.Optimizer, divisor: float, charged: Callable[[], int]) -> Trace:
    """A Trace that fills as the optimizer is stepped."""
    trace = Trace([], [], [])

    def look(stepped: torch.optim.Optimizer, *_: Any) -> None:
        held = [p for group in stepped.param_groups for p in group["params"] if p.requires_grad]
        trace.sums.append([torch.zeros_like(p) if p.grad is None else p.grad.detach().double() * divisor for p in held])
        trace.charged.append(charged())

    optimizer.register_step_pre_hook(look)
    return trace


@contextmanager
def started(
    trainer: Trainer,
    model: nn.Module,
    data: Any,
    losses: Losses,
    table: Table,
    *,
    lr: float = 0.0,
    momentum: float = 0.0,
    divisor: float | None = None,
    **options: Any,
) -> Iterator[tuple[Training, Trace]]:
    """A run of a table that the trainer can express, by SGD; with lr 0, all updates compare. Its end closes it.

    divisor  what gradients in the trace are multiplied by; None: the table's expected batch
    """
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=lr, momentum=momentum)
    training = trainer.start(model, optimizer, data, losses, table, **options)
    try:
        yield training, watch(optimizer, table.expected_batch if divisor is None else divisor, training.charged)
    finally:
        training.close()


def record(
    trainer: Trainer,
    model: nn.Module,
    data: Any,
    losses: Losses,
    table: Table,
    *,
    between: Callable[[Training], None] | None = None,
    **options: Any,
) -> Trace:
    """A whole run, as `started`."""
    with started(trainer, model, data, losses, table, **options) as (training, trace):
        training.run(between=(lambda: between(training)) if between else None)
    trace.parameters = [p.detach().clone() for p in model.parameters()]
    return trace


# -- epsilons -------------------------------------------------------------------------------------------------


#: By how much epsilons overstates every norm (docs/engine.md#norms): so much longer clip norms give a table's bounds.
OVERSTATED = math.sqrt(1 + 2.0**-9)


def _nothing(history: Sequence[Any], delta: float) -> float:
    """An accountant for probes: their noise is almost none, their data are made up, and they promise nothing."""
    return 0.0


@dataclass
class _OurTraining:
    private: epsilons.Private
    model: nn.Module
    losses: Losses

    def run(self, updates: int | None = None, between: Hook = None, midway: Hook = None) -> int:
        done = 0

        def count(_: epsilons.Private) -> None:
            nonlocal done
            done += 1

        self.private.on_update(count)
        before = -1
        while before < done and not self.private.is_finished and (updates is None or done < updates):
            before = done
            for batch in self.private.batches:
                self.private.backward(self.losses(self.model, batch))
                if midway:
                    midway()
                stepped = self.private.step()
                if stepped and between:
                    between()
                if stepped and updates is not None and done >= updates:
                    break
        return done

    def charged(self) -> int:
        ledger = self.private.ledger
        return sum(read_charges(ledger.path, self.private.plan) if ledger.path else ledger.charged)

    def look_at_the_data(self) -> None:
        try:
            for batch in self.private.batches:
                with torch.no_grad():
                    self.losses(self.model, batch)
        except epsilons.errors.EpsilonsError as error:
            raise Refused(str(error)) from error

    def close(self) -> None:
        self.private.close()

    def cut_off(self) -> None:
        self.private._leave_checkpoint = lambda: None  # type: ignore[method-assign]
        self.private.close()


@dataclass(frozen=True)
class Ours:
    """This library, with one of its engines."""

    engine: str = "auto"

    @property
    def name(self) -> str:
        return f"epsilons[{self.engine}]"

    def express(self, table: Table) -> Table:
        return table

    def start(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        data: Any,
        losses: Losses,
        table: Table,
        **options: Any,
    ) -> _OurTraining:
        given, (budgets, plan) = Options(**options), planned(table)
        try:
            private = epsilons.make_private(
                model,
                optimizer,
                epsilons.Records(data, collate_fn=given.collate),
                plan,
                budgets=budgets,
                run_dir=epsilons.RunFolder(given.run_dir, resume=given.resume, checkpoint_every=given.every),
                # One key for one seed, whatever the data: neighbours are compared under the same draws and noise.
                seed=epsilons.Randomness.with_key(None if given.seed is None else key_from_seed(given.seed)),
                performance=epsilons.Performance(self.engine, given.physical_batch or "auto", given.num_workers),
            )
        except epsilons.errors.EpsilonsError as error:
            raise Refused(str(error)) from error
        return _OurTraining(private, model, losses)

    def solve(self, budgets: epsilons.Budgets, recipe: epsilons.Recipe, how: str) -> Solution:
        strategy, accountant = how.split(", ")
        strategy, *by = strategy.split(" by ")
        plan = epsilons.plan(budgets, recipe, strategy, accountant, **({"by": by[0]} if by else {}))
        group = tuple(budgets.group.tolist())
        tables = tuple(
            Table(
                p.steps, group, tuple(p.sample_rate), tuple(p.clip_norm), p.noise_std, p.expected_batch, tuple(p.weight)
            )
            for p in plan.phases
        )
        return Solution(tables, tuple(plan.epsilon_spent()))


def planned(table: Table) -> tuple[epsilons.Budgets, epsilons.Plan]:
    """Budgets and a plan that give this table; row g has a budget of g + 1, because nothing here depends on it."""
    rows = sorted(set(table.group))
    assert rows == list(range(len(table.clip_norm))), "a probe's groups all have records"
    budgets = epsilons.Budgets(np.array(table.group) + 1.0, delta=1e-8)

    phases = [
        epsilons.Phase(
            steps=table.steps // table.phases,
            sample_rate=table.sample_rate,
            clip_norm=[OVERSTATED * clip_norm for clip_norm in table.clip_norm],
            weight=table.weight or [1.0] * len(table.clip_norm),
            noise_std=table.noise_std * table.growth**number,
            expected_batch=table.expected_batch,
        )
        for number in range(table.phases)
    ]
    recipe = epsilons.Recipe(steps=table.steps, batch_size=table.expected_batch, clip_norm=1.0)
    return budgets, epsilons.Plan.of(budgets, recipe, _nothing, *phases, strategy="probe")
