"""The values that everything in a Private shares: what a run is made of, and where it is in its plan."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from ..budgets.budgets import Budgets
from ..clipping import Engine
from ..core.files import FolderLock
from ..draws.persons_rows import Draws, Persons, check_size
from ..draws.randomness import Randomness
from ..errors import CallOrderError, InputError, RunError
from ..ledger.ledger import Ledger
from ..ledger.plan_folder import PlanFolder
from ..ledger.run_folder import RunFolder
from ..planning import Plan
from ..registry import Reservation
from .datasets import PhysicalBatch, Source
from .distributed import Ranks
from .performance import Decided, Performance


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


# -- What make_private was asked for, and what is known once it was checked


@dataclass(frozen=True)
class Request:
    """The arguments of make_private; has_classes: None if unknown.

    is_whole_loop: True if the library runs the loop, and may set up the process.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    dataset: Any
    plan: Plan
    budgets: Budgets
    performance: Performance
    plan_folder: PlanFolder | None = None
    run_dir: str | Path | None = None
    seed: int | None = None
    run_index: int = 0
    key: bytes | None = None
    randomness: str = "philox"
    resume: bool = False
    checkpoint_every: int | None = None
    collate_fn: Callable[[list[Any]], Any] | None = None
    persons: Any = None
    rows_per_person: int = 1
    views: int = 1
    reservation: Reservation | None = None
    metadata: Mapping[str, Any] | None = None
    has_classes: bool | None = None
    is_whole_loop: bool = False

    def __post_init__(self) -> None:
        if self.resume and self.run_dir is None:
            raise RunError("resume=True needs run_dir=, the folder of the run to resume.")
        if self.reservation is not None and self.run_dir is None:
            raise RunError("reservation= needs run_dir=: the ledger there is the evidence of what the run was charged.")
        if self.run_index and self.key is not None:
            raise InputError(
                "run_index= has no effect on an explicit key=. Leave one out, or give every run another key."
            )

    @property
    def is_subset(self) -> bool:
        """True if these are some of the plan's records."""
        return self.plan_folder is not None and self.plan_folder.is_subset

    @property
    def training(self) -> dict[str, Any]:
        """Settings of training that the key of a seed depends on."""
        return dict((self.metadata or {}).get("training") or {})


@dataclass(frozen=True)
class Inputs:
    """What is known once the inputs were checked.

    performance   what was chosen
    group         (persons,) each person's group in the plan; without persons, each record's
    persons       whose rows are whose
    largest       number of rows in a physical batch, at most
    contents      fingerprint of the data; "" if nothing is compared with it
    fingerprint   everything that may change a sum though key and state are the same
    """

    source: Source
    performance: Decided
    group: npt.NDArray[np.int64]
    persons: Persons
    randomness: Randomness
    parameters: list[nn.Parameter]
    engine: Engine
    largest: int
    contents: str
    fingerprint: dict[str, Any]

    def budgets_of(self, plan: Plan) -> tuple[bytes, bytes]:
        """Epsilon and delta of every record, in order, as bytes."""
        return plan.epsilons[self.group].tobytes(), plan.delta[self.group].tobytes()

    @property
    def roster(self) -> str:
        """A hash of the groups of all persons; without persons, of all records. Whose rows are whose is no part of it.

        It is in files of the run, and the number of a person's rows is private.
        """
        return hash_of_groups(self.group)


def hash_of_groups(group: npt.NDArray[np.int64]) -> str:
    """What run.json has of the groups of all persons, or of all records."""
    return hashlib.blake2b(group.tobytes(), digest_size=16).hexdigest()


# -- The order of calls in a private loop: a batch is issued, then backward, then step. And a loop's batches in
# groups

#: Marks an empty draw among the batches of a loop.
EMPTY_DRAW = object()

#: What may happen next. Nothing may after an error in the middle of a draw, or after the run was closed.
Turn = Literal["draw", "backward", "step", "broken", "closed"]

_ORDER = """The order is:

    for batch in private.batches:
        private.backward(losses)  # of this batch, one per record
        private.step()"""

_WHERE: dict[Turn, str] = {
    "draw": "outside a physical batch, or twice on one",
    "step": "twice on one physical batch",
    "backward": "before private.backward",
    "broken": "after an error in this draw, which is never applied",
    "closed": "after private.close()",
}


class Turns:
    """Whose turn it is.

    turn        the call that must come next
    in_draw     True from a draw's charge to its update
    ended       number of draws that ended in this process, applied or not
    is_stopped  True if no further draw is to be made
    """

    def __init__(self, position: Position) -> None:
        self._position = position
        self.turn: Turn = "draw"
        self.in_draw, self.is_stopped = False, False
        self.ended = 0
        self._loops = 0  # how many loops over the batches were begun; only the latest may go on
        self._lock = threading.Lock()

    @property
    def has_next(self) -> bool:
        """True if there is another draw to make."""
        return not self._position.is_finished and not self.is_stopped

    def end_draw(self) -> None:
        self.in_draw = False
        self.ended += 1

    def take(self, turn: Literal["backward", "step"], then: Turn) -> None:
        """Raises CallOrderError if it is not the turn of this call. Of two threads, one has it."""
        with self._lock:
            if self.turn != turn:
                raise CallOrderError(f"private.{turn} was called {_WHERE[self.turn]}. {_ORDER}")
            self.turn = then

    def begin_loop(self) -> int:
        """The number of a new loop. Raises CallOrderError in the middle of a draw, and after closing."""
        if self.turn == "closed":
            raise CallOrderError("This run is closed. Call make_private again for another one.")
        if self.in_draw:
            raise CallOrderError(
                "The loop over private.batches was left in the middle of a draw and entered again. A draw must be "
                "finished: drawing again after looking at it would not be Poisson sampling. " + _ORDER
            )
        with self._lock:
            self._loops += 1
            return self._loops

    def check_latest(self, loop: int, is_next: bool = True) -> None:
        """Raises CallOrderError if another loop was begun after this one.

        is_next   False if the loop's draw is not the next one. An older loop may have made it in advance, and its noise
                  must never be added to a second sum
        """
        if loop != self._loops or not is_next:
            raise CallOrderError("Another loop over private.batches was begun since; go on with that one.")

    def check_batch_is_done(self, loop: int) -> None:
        """Raises CallOrderError if a loop asks for the next batch without having finished the last one."""
        self.check_latest(loop)
        if self.turn == "closed":
            middle = " in the middle of a draw, which is never applied" if self.in_draw else ""
            raise CallOrderError(f"This run was closed{middle}. Leave the loop after private.close().")
        if self.turn == "broken":
            raise CallOrderError(
                "private.backward failed on a physical batch of this draw, so the draw cannot be finished."
            )
        if self.turn != "draw":
            missing = "private.backward(losses)" if self.turn == "backward" else "private.step()"
            self.turn = "broken"
            raise CallOrderError(f"The loop went on to the next physical batch without {missing}. {_ORDER}")


def by_draw(batches: Iterator[Any], turns: Turns, end_body: Callable[[], None]) -> Iterator[Iterator[Any]]:
    """The batches of a loop, in one iterable per remaining draw.

    end_body   called after the body of a draw's last batch; what the caller does then follows empty draws, too
    """
    while turns.has_next:
        ended = turns.ended
        yield _of_one_draw(batches, turns, end_body)
        if turns.ended == ended:
            raise CallOrderError(
                "The next of private.draws was asked for before the last one was made. Iterate each to its end:\n\n"
                "    for draw in private.draws:\n"
                "        for batch in draw:\n"
                "            private.backward(losses)  # of this batch, one per record\n"
                "            private.step()"
            )
    next(batches, None)  # runs the end of the loop: no draw is left


def by_part(
    batches: Iterator[Any], turns: Turns, end_body: Callable[[], None], position: Position, n: int
) -> Iterator[Iterator[Any]]:
    """The batches of a loop, in one iterable per remaining part of n. end_body: as of `by_draw`"""

    def until(end: int) -> Iterator[Any]:
        while position.steps_before < end and turns.has_next:
            yield from _of_one_draw(batches, turns, end_body)

    for part in range(1, n + 1):
        end = part * position.plan.steps // n
        if position.steps_before >= end:
            continue
        if not turns.has_next:
            break
        yield until(end)
        if turns.in_draw:
            raise CallOrderError(
                "The next of private.epochs was asked for in the middle of a draw. Leave a part only after "
                "private.step() returned True, or iterate it to its end. " + _ORDER
            )
    next(batches, None)


def _of_one_draw(batches: Iterator[Any], turns: Turns, end_body: Callable[[], None]) -> Iterator[Any]:
    for batch in batches:
        if batch is EMPTY_DRAW:
            return
        yield batch
        if not turns.in_draw:
            end_body()
            return
