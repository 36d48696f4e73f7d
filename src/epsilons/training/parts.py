"""The values that everything in a Private shares: what a run is made of, and where it is in its plan."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from ..ledger import Ledger
from ..locks import FolderLock
from ..planning import Plan
from ..run_folder import RunFolder
from .clipping import Engine
from .datasets import PhysicalBatch, Source
from .distributed import Ranks
from .ownership import check_size
from .performance import Performance
from .persons import Persons
from .sampling import Draws


@dataclass(repr=False, eq=False)
class Position:
    """Where a run is: the next draw, and the number of noisy updates."""

    plan: Plan
    ledger: Ledger
    phase: int = 0
    step: int = 0
    updates: int = 0

    @property
    def is_finished(self) -> bool:
        return self.phase == len(self.plan.phases)

    @property
    def steps_before(self) -> int:
        """How many of the plan's steps come before the next draw."""
        return sum(phase.steps for phase in self.plan.phases[: self.phase]) + self.step

    def skip_finished_phases(self) -> None:
        """Move to the next phase if this one is done, or if its charges are used up."""
        while not self.is_finished and self.step >= self.ledger.end(self.phase):
            self.phase, self.step = self.phase + 1, 0


@dataclass(repr=False, eq=False)
class Parts:
    """What a run is made of, after all of it was checked.

    parameters        those that are trained, in the optimizer's order
    group             (persons,) each person's group in the plan; without persons, each record's
    persons           whose rows are whose
    largest           number of rows in a physical batch, at most; it may change between draws
    fingerprint       everything that may change a sum though key and state are the same; compared on resuming
    folder, lock      None without run_dir, and on ranks other than 0
    checkpoint_every  updates between checkpoints; None saves by time
    relaid            convolutions that get their usual memory layout back at the end
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    parameters: Sequence[nn.Parameter]
    plan: Plan
    group: npt.NDArray[np.int64]
    persons: Persons
    source: Source
    engine: Engine
    largest: int
    ledger: Ledger
    position: Position
    ranks: Ranks
    fingerprint: Mapping[str, Any]
    folder: RunFolder | None
    lock: FolderLock | None
    checkpoint_every: int | None
    relaid: Sequence[nn.Module] = ()

    def set_largest(self, records: int) -> None:
        """Change the physical batch size for draws that are not read yet.

        Raises DataError for less than 1, and if some person's rows do not fit.
        """
        Performance(max_physical_batch=records)  # raises
        check_size(self.persons, records)
        self.largest = records

    def charge(self) -> None:
        """Charge the next draw, on every rank, and learn who left the registry before a block of steps begins."""
        phase, step = self.position.phase, self.position.step
        leavers = self.ledger.leavers(phase, step)
        if self.ranks.is_distributed and "registry" in self.ledger.rests_on:
            leavers = self.ranks.broadcast(leavers)  # rank 0 alone has the reservation
        self.ledger.charge(phase, step, leavers)

    def release(self) -> None:
        """Let other processes use the folder."""
        if self.lock:
            self.lock.release()

    @property
    def device(self) -> torch.device:
        return self.parameters[0].device

    def remaining(self, draws: Draws) -> Iterator[PhysicalBatch]:
        """Every physical batch of this rank from the current position on."""
        at = self.position
        for phase in range(at.phase, len(self.plan.phases)):
            first = at.step if phase == at.phase else 0
            for step in range(first, self.ledger.end(phase)):
                drawn = self.ranks.part(self.persons.with_rows(draws.at(phase, step)))
                readings = self.persons.readings(drawn, draws.randomness, phase, step)
                parts = readings.batches(self.largest) or [readings]
                for number, part in enumerate(parts):
                    yield PhysicalBatch(phase, step, number, len(parts), part)
