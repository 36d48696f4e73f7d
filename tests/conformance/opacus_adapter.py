"""Opacus 1.6: PrivacyEngine.make_private with flat clipping and Poisson sampling."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

import epsilons

from .adapters import Hook, Inexpressible, Losses, Options, Refused, Solution, Table


@dataclass
class _OpacusTraining:
    engine: Any
    hooks: Any
    optimizer: Any
    loader: Any
    losses: Losses
    table: Table
    given: Options

    def __post_init__(self) -> None:
        self._stream: Iterator[Any] | None = None
        self._made = self.charged()
        self.optimizer.original_optimizer.register_step_post_hook(self._count)

    def _count(self, *_: Any) -> None:
        self._made += 1

    def keep(self, resume: bool) -> None:
        """Its own checkpoints: model, optimizer, accountant."""
        if self.given.run_dir is None:
            return
        checkpoint = self.given.run_dir / "checkpoint.pt"
        parts = {"path": checkpoint, "module": self.hooks, "optimizer": self.optimizer}
        if resume and checkpoint.is_file():
            self.engine.load_checkpoint(**parts)
            self._made = self.charged()
        elif self._made % (self.given.every or 1) == 0 or self._made == self.table.steps:
            checkpoint.parent.mkdir(parents=True, exist_ok=True)
            self.engine.save_checkpoint(**parts)

    def _batches(self) -> Iterator[Any]:
        from opacus.utils.batch_memory_manager import BatchMemoryManager

        while True:  # an epoch after another
            if self.given.physical_batch is None:
                yield from self.loader
            else:
                with BatchMemoryManager(
                    data_loader=self.loader, max_physical_batch_size=self.given.physical_batch, optimizer=self.optimizer
                ) as split:
                    self._split = split
                    yield from split

    def run(self, updates: int | None = None, between: Hook = None, midway: Hook = None) -> int:
        """Opacus has no number of steps; this loop makes as many as the table says."""
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
                    self.keep(resume=False)
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
        loader = self.loader if self.given.physical_batch is None else self._split
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
    """Opacus, in one of its modes of gradients."""

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
        **options: Any,
    ) -> _OpacusTraining:
        import warnings

        from opacus import PrivacyEngine
        from torch.utils.data import DataLoader, TensorDataset

        dataset = TensorDataset(*data) if isinstance(data, tuple) else data
        given = Options(**options)
        seed = torch.seed() if given.seed is None else given.seed
        coins, noise = (torch.Generator().manual_seed((seed + k) % 2**63) for k in (0, 1))
        batches = round(1 / table.sample_rate[0])
        loader = DataLoader(
            dataset,
            batch_size=math.ceil(len(dataset) / batches),
            num_workers=given.num_workers,
            generator=coins,
            collate_fn=given.collate,
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
        training = _OpacusTraining(engine, hooks, wrapped, private_loader, losses, table, given)
        training.keep(given.resume)
        return training

    def solve(self, budgets: epsilons.Budgets, recipe: epsilons.Recipe, how: str) -> Solution:
        """One noise multiplier for all, from the strictest budget and the smallest delta."""
        from opacus.accountants import create_accountant
        from opacus.accountants.utils import get_noise_multiplier

        rate, groups = recipe.batch_size / budgets.records, len(budgets.epsilons)
        noise = get_noise_multiplier(
            target_epsilon=min(budgets.epsilons),
            target_delta=min(budgets.delta),
            sample_rate=rate,
            steps=recipe.steps,
            accountant=how.split(", ")[1],
        )
        accountant = create_accountant(how.split(", ")[1])
        accountant.history = [(noise, rate, recipe.steps)]
        group, clip_norm = tuple(budgets.group.tolist()), recipe.clip_norm
        table = Table(
            recipe.steps, group, (rate,) * groups, (clip_norm,) * groups, noise * clip_norm, recipe.batch_size
        )
        return Solution((table,), tuple(accountant.get_epsilon(delta) for delta in budgets.delta))
