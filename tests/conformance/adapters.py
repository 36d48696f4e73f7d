"""One way to run any library of private training, so that one suite examines them all.

A test says what is to be done as a Table, asks the trainer which table of that kind it can express, and looks at
nothing but the gradients that reach the user's own optimizer. To add a library: a class that meets Trainer, and a line
in TRAINERS, EACH and METHODS.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

import epsilons
from epsilons.ledger import read_charges
from epsilons.training.clipping import ENGINES
from epsilons.training.randomness import key_from_seed

#: losses(model, batch) -> (batch,), one number per record.
Losses = Callable[[nn.Module, Any], Tensor]


class Inexpressible(Exception):
    """The library has no way to say this; the test is skipped."""


class Refused(Exception):
    """The library declined, with an error: a promise kept, though not in the way that was asked for."""


@dataclass(frozen=True)
class Table:
    """What is to be done, a row per group; plain numbers, in no library's terms.

    group   (records,) each record's row
    phases  in how many phases of equal length, all by this table
    """

    steps: int
    group: tuple[int, ...]
    sample_rate: tuple[float, ...]
    clip_norm: tuple[float, ...]
    noise_std: float
    expected_batch: float
    weight: tuple[float, ...] = ()
    phases: int = 1

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


class Training(Protocol):
    """One run in progress, on the user's own model and optimizer."""

    def run(
        self,
        updates: int | None = None,
        between: Callable[[], None] | None = None,
        midway: Callable[[], None] | None = None,
    ) -> int:
        """Train on until so many more updates were made (or more, where the next draws are empty), or all; how many.

        `between` is called after each update, `midway` after each backward pass, before the step.
        """

    def charged(self) -> int:
        """Updates that the library has on its books, durably where it can."""

    def look_at_the_data(self) -> None:
        """Pass over the training data as the loop gets them, to evaluate on them. Refused, or without consequences."""

    def close(self) -> None:
        """Hooks off."""

    def cut_off(self) -> None:
        """As close, and nothing else: no more is left on disk than where the process is killed."""


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
        *,
        seed: int | None,
        chunk: int | None = None,
        num_workers: int = 0,
        run_dir: Path | None = None,
        every: int | None = None,
        resume: bool = False,
        collate: Callable[[list[Any]], Any] | None = None,
    ) -> Training:
        """`data`: a tuple of tensors or a map-style data set. Raises Refused.

        out     a folder for what the library keeps of a run, with a checkpoint `every` so many updates
        resume  go on from the last checkpoint there
        collate how records of a map-style data set become a batch; None: torch's own way
        """

    def solve(
        self,
        epsilons: Sequence[float],
        deltas: Sequence[float],
        group: Sequence[int],
        recipe: epsilons.Recipe,
        how: str,
    ) -> Solution:
        """What the library's own calibration makes of these budgets; `how`: its name for the method."""


# -- what is seen from outside --------------------------------------------------------------------------------


@dataclass
class Trace:
    """What reached the user's optimizer, and what had been charged by then.

    sums     per update, one tensor per parameter: the noisy sum, that is the gradient times the table's divisor
    charged  per update, what the books said at that moment
    """

    sums: list[list[Tensor]]
    charged: list[int]
    parameters: list[Tensor]

    def stacked(self, tensor: int = 0) -> np.ndarray:
        """(updates, values) of one parameter, flat."""
        return torch.stack([update[tensor].flatten() for update in self.sums]).numpy()


def watch(optimizer: torch.optim.Optimizer, divisor: float, books: Callable[[], int]) -> Trace:
    """A Trace that fills as the optimizer is stepped."""
    trace = Trace([], [], [])

    def look(stepped: torch.optim.Optimizer, *_: Any) -> None:
        held = [p for group in stepped.param_groups for p in group["params"] if p.requires_grad]
        trace.sums.append([torch.zeros_like(p) if p.grad is None else p.grad.detach().double() * divisor for p in held])
        trace.charged.append(books())

    optimizer.register_step_pre_hook(look)
    return trace


def record(
    trainer: Trainer,
    model: nn.Module,
    data: Any,
    losses: Losses,
    table: Table,
    *,
    lr: float = 0.0,
    between: Callable[[Training], None] | None = None,
    **options: Any,
) -> Trace:
    """A whole run of a table that the trainer can express, by plain SGD; with lr 0, so that all updates compare."""
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=lr)
    training = trainer.start(model, optimizer, data, losses, table, **options)
    try:
        trace = watch(optimizer, table.expected_batch, training.charged)
        training.run(between=(lambda: between(training)) if between else None)
    finally:
        training.close()
    trace.parameters = [p.detach().clone() for p in model.parameters()]
    return trace


# -- epsilons -------------------------------------------------------------------------------------------------


def _nothing(history: Sequence[Any], delta: float) -> float:
    """An accountant for probes: their noise is next to none, their data made up, and nothing is promised to anyone."""
    return 0.0


@dataclass
class _OurTraining:
    private: epsilons.Private
    model: nn.Module
    losses: Losses

    def run(
        self,
        updates: int | None = None,
        between: Callable[[], None] | None = None,
        midway: Callable[[], None] | None = None,
    ) -> int:
        made = 0

        def count(_: epsilons.Private) -> None:
            nonlocal made
            made += 1

        self.private.on_update(count)
        before = -1
        while before < made and not self.private.is_finished and (updates is None or made < updates):
            before = made
            for batch in self.private.batches:
                self.private.backward(self.losses(self.model, batch))
                if midway:
                    midway()
                stepped = self.private.step()
                if stepped and between:
                    between()
                if stepped and updates is not None and made >= updates:
                    break
        return made

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
        *,
        seed: int | None,
        chunk: int | None = None,
        num_workers: int = 0,
        run_dir: Path | None = None,
        every: int | None = None,
        resume: bool = False,
        collate: Callable[[list[Any]], Any] | None = None,
    ) -> _OurTraining:
        budgets, plan = planned(table)
        try:
            private = epsilons.make_private(
                model,
                optimizer,
                data,
                plan,
                budgets=budgets,
                # One key for one seed, whatever the data: neighbours are compared under the same coins and noise.
                key=None if seed is None else key_from_seed(seed),
                performance=epsilons.Performance(self.engine, chunk, num_workers),
                run_dir=run_dir,
                checkpoint_every=every,
                resume=resume,
                collate_fn=collate,
            )
        except epsilons.errors.EpsilonsError as error:
            raise Refused(str(error)) from error
        return _OurTraining(private, model, losses)

    def solve(
        self, levels: Sequence[float], deltas: Sequence[float], group: Sequence[int], recipe: epsilons.Recipe, how: str
    ) -> Solution:
        rows = list(group)
        strategy, accountant = how.split(", ")
        strategy, *by = strategy.split(" by ")
        budgets = epsilons.Budgets(np.array(levels)[rows], np.array(deltas)[rows])
        plan = epsilons.plan(budgets, recipe, strategy, accountant, **({"by": by[0]} if by else {}))
        # The plan's groups stand strictest first, as those of every test here do.
        assert np.array_equal(plan.epsilons, levels)
        return Solution(
            tuple(
                Table(
                    phase.steps,
                    tuple(rows),
                    tuple(phase.sample_rate),
                    tuple(phase.clip_norm),
                    phase.noise_std,
                    phase.expected_batch,
                    tuple(phase.weight),
                )
                for phase in plan.phases
            ),
            tuple(plan.epsilon_spent()),
        )


def planned(table: Table) -> tuple[epsilons.Budgets, epsilons.Plan]:
    """Budgets and plan that come to this table; row g has a budget of g + 1, for nothing here depends on it."""
    rows = sorted(set(table.group))
    assert rows == list(range(len(table.clip_norm))), "a probe's groups all have records"
    budgets = epsilons.Budgets(np.array(table.group) + 1.0, delta=1e-8)

    phase = epsilons.Phase(
        steps=table.steps // table.phases,
        sample_rate=table.sample_rate,
        clip_norm=table.clip_norm,
        weight=table.weight or [1.0] * len(table.clip_norm),
        noise_std=table.noise_std,
        expected_batch=table.expected_batch,
    )
    recipe = epsilons.Recipe(steps=table.steps, batch_size=table.expected_batch, clip_norm=1.0)
    return budgets, epsilons.Plan.of(budgets, recipe, _nothing, *[phase] * table.phases, strategy="probe")


# -- Opacus ---------------------------------------------------------------------------------------------------


@dataclass
class _OpacusTraining:
    engine: Any
    hooks: Any
    optimizer: Any
    loader: Any
    losses: Losses
    table: Table
    chunk: int | None
    checkpoint: Path | None
    every: int | None

    def __post_init__(self) -> None:
        self._stream: Iterator[Any] | None = None
        self._made = self.charged()
        self.optimizer.original_optimizer.register_step_post_hook(self._count)

    def _count(self, *_: Any) -> None:
        self._made += 1

    def keep(self, resume: bool) -> None:
        """Its own checkpoints: model, optimizer, accountant."""
        if self.checkpoint is None:
            return
        parts = {"path": self.checkpoint, "module": self.hooks, "optimizer": self.optimizer}
        if resume and self.checkpoint.is_file():
            self.engine.load_checkpoint(**parts)
            self._made = self.charged()
        elif self._made % (self.every or 1) == 0 or self._made == self.table.steps:
            self.checkpoint.parent.mkdir(parents=True, exist_ok=True)
            self.engine.save_checkpoint(**parts)

    def _batches(self) -> Iterator[Any]:
        from opacus.utils.batch_memory_manager import BatchMemoryManager

        while True:  # an epoch after another
            if self.chunk is None:
                yield from self.loader
            else:
                with BatchMemoryManager(
                    data_loader=self.loader, max_physical_batch_size=self.chunk, optimizer=self.optimizer
                ) as split:
                    self._split = split
                    yield from split

    def run(
        self,
        updates: int | None = None,
        between: Callable[[], None] | None = None,
        midway: Callable[[], None] | None = None,
    ) -> int:
        """The library itself knows no number of steps; the table's is kept by this loop."""
        self._stream = self._stream or self._batches()
        start = self._made
        last = start + updates if updates is not None else self.table.steps
        if start >= last:
            return 0
        for batch in self._stream:
            before = self._made
            try:
                self.optimizer.zero_grad()
                losses = self.losses(self.hooks, batch)
                losses.mean().backward()
                if midway:
                    midway()
                self.optimizer.step()
                if self._made > before:
                    self.register_for_checkpointing(resume=False)
                    if between:
                        between()
            except (RuntimeError, ValueError, TypeError, AttributeError) as error:  # declined later than at the door
                raise Refused(f"{type(error).__name__}: {error}") from error
            if self._made >= last:
                break
        return self._made - start

    def charged(self) -> int:
        return sum(steps for _, _, steps in self.engine.accountant.history)

    def look_at_the_data(self) -> None:
        loader = self.loader if self.chunk is None else self._split
        for batch in loader:
            with torch.no_grad():
                self.losses(self.hooks, batch)

    def close(self) -> None:
        with suppress(Exception):
            self.hooks.cleanup()

    def cut_off(self) -> None:
        self.close()


@dataclass(frozen=True)
class Opacus:
    """Opacus 1.6: PrivacyEngine.make_private with flat clipping and Poisson sampling, in one of its modes."""

    mode: str = "hooks"

    @property
    def name(self) -> str:
        return f"opacus[{self.mode}]"

    def express(self, table: Table) -> Table:
        """One rate, which is one over a whole number of batches, and one clip norm: the means over records."""
        records = len(table.group)
        mean = float(table.rates.mean())
        if mean * records < 0.5 or mean == 0:
            raise Inexpressible("sampling rates are one over the number of batches of at least one record")
        batches = math.ceil(records / max(1, round(mean * records)))
        return replace(
            table,
            group=(0,) * records,
            sample_rate=(1 / batches,),
            clip_norm=(float(table.bounds.mean()),),
            weight=(1.0,),
            expected_batch=float(int(records / batches)),  # which is how Opacus rounds it
            phases=1,
        )

    def start(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        data: Any,
        losses: Losses,
        table: Table,
        *,
        seed: int | None,
        chunk: int | None = None,
        num_workers: int = 0,
        run_dir: Path | None = None,
        every: int | None = None,
        resume: bool = False,
        collate: Callable[[list[Any]], Any] | None = None,
    ) -> _OpacusTraining:
        import warnings

        from opacus import PrivacyEngine
        from torch.utils.data import DataLoader, TensorDataset

        dataset = TensorDataset(*data) if isinstance(data, tuple) else data
        seed = torch.seed() if seed is None else seed
        coins, noise = (torch.Generator().manual_seed((seed + k) % 2**63) for k in (0, 1))
        batches = round(1 / table.sample_rate[0])
        loader = DataLoader(
            dataset,
            batch_size=math.ceil(len(dataset) / batches),
            num_workers=num_workers,
            generator=coins,
            collate_fn=collate,
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            engine = PrivacyEngine()
            try:
                hooks, wrapped, private_loader = engine.make_private(
                    module=model,
                    optimizer=optimizer,
                    data_loader=loader,
                    noise_multiplier=table.noise_std / table.clip_norm[0],
                    max_grad_norm=table.clip_norm[0],
                    noise_generator=noise,
                    grad_sample_mode=self.mode,
                )
            except Exception as error:
                raise Refused(f"{type(error).__name__}: {error}") from error
        checkpoint = run_dir / "checkpoint.pt" if run_dir else None
        training = _OpacusTraining(engine, hooks, wrapped, private_loader, losses, table, chunk, checkpoint, every)
        training.keep(resume)
        return training

    def solve(
        self, levels: Sequence[float], deltas: Sequence[float], group: Sequence[int], recipe: epsilons.Recipe, how: str
    ) -> Solution:
        """One noise multiplier for all, from the strictest budget and the smallest delta."""
        from opacus.accountants import create_accountant
        from opacus.accountants.utils import get_noise_multiplier

        rate = recipe.batch_size / len(group)
        noise = get_noise_multiplier(
            target_epsilon=min(levels),
            target_delta=min(deltas),
            sample_rate=rate,
            steps=recipe.steps,
            accountant=how.split(", ")[1],
        )
        accountant = create_accountant(how.split(", ")[1])
        accountant.history = [(noise, rate, recipe.steps)]
        table = Table(
            recipe.steps,
            tuple(group),
            (rate,) * len(levels),
            (recipe.clip_norm,) * len(levels),
            noise * recipe.clip_norm,
            recipe.batch_size,
        )
        return Solution((table,), tuple(accountant.get_epsilon(delta) for delta in deltas))


#: By the name that --trainer takes: a library as it is used by default.
TRAINERS: dict[str, Trainer] = {"epsilons": Ours(), "opacus": Opacus()}
#: Every way in which it computes gradients.
EACH: dict[str, list[Trainer]] = {
    "epsilons": [Ours(name) for name in ENGINES],
    "opacus": [Opacus(mode) for mode in ("hooks", "functorch")],
}
#: What `solve` takes as `how`.
METHODS: dict[str, list[str]] = {
    "epsilons": [f"{s}, {a}" for s in (*epsilons.planning.STRATEGIES, "scale by weight") for a in ("pld", "rdp")],
    "opacus": ["uniform, prv", "uniform, rdp"],
}
