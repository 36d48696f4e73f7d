"""Private: draw, clip, noise, charge. One object owns all four, so that they cannot drift apart.

Paper Alg. 1 with a rate, a clip norm and a weight per group, in physical chunks. The order per draw:

    charge the ledger → for each chunk: yield it, take its losses, add its clipped gradients → noise → update

Un-noised sums stay in here and never reach p.grad, so no optimizer, scheduler or average of weights sees one. A run
with a folder leaves checkpoints between draws; taken up again, it replays what came after the last one under the same
key.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from ..disclosure import has_small_cells
from ..errors import CallOrderError, EpsilonsError, InputError, RunError
from ..ledger import Ledger
from ..locks import FolderLock
from ..planning import Plan
from ..run_folder import RunFolder
from . import batches, checkpoints, validation
from .checkpoints import Stateful
from .clipping import BatchLoss, Compiled, Engine, Ghost, NonFiniteGradientError
from .datasets import Address, Gathered, Records, seed_torch
from .distributed import Ranks, check_sum, hash_of
from .independence.check import IndependenceCheck, is_due
from .independence.variants import Variant
from .sampling import Draws, chunks

#: Without another wish, a checkpoint is left about this often.
SECONDS_PER_CHECKPOINT = 300.0

#: So many checks beside the usual ones look for padding to different lengths, until one has seen two of them.
PADDING_CHECKS = 3

#: What may happen next. Nothing may once something failed in the middle of a draw, or the run was closed.
Turn = Literal["draw", "backward", "step", "broken", "closed"]

_ORDER = """The order is:

    for batch in private.batches:
        private.backward(losses)  # of this batch, one per record
        private.step()"""

#: Stands for an empty draw among the batches of a loop.
_NOBODY = object()

#: Compiled chunks hold no more records than the expected draw and this many of its roots: nearly all draws fit.
ROOTS = 4


@dataclass(frozen=True)
class _Handed:
    """What the loop was handed: these records of this physical batch, to be learnt from or only checked.

    variant  the form in which it is only checked
    silent   places whose own record is left out, and another one stands in at weight 0
    """

    address: Address
    indices: npt.NDArray[np.int64]
    is_last: bool = False
    variant: Variant | None = None
    silent: tuple[int, ...] = ()


@dataclass(frozen=True)
class _Start:
    """What the state at the start of a draw was, as far as the draw itself moves it, and marks of the rest."""

    generators: Mapping[str, Any]
    fell_back: bool
    marks: list[Any]


class Private:
    """A training loop made private; built by `make_private`. One of the two objects that hold state.

    batches        physical chunks of Poisson draws, on the model's device
    draws          the same, one iterable per draw
    epochs(n)      the same, in n nearly equal parts of the plan
    is_check       True while the batch at hand is only checked: nothing is learnt from it
    backward(…)    clip each record's gradient to its own norm and add it up
    step()         on the draw's last chunk: noise, average, update, and True
    ledger         charged / allowed steps
    epsilon_spent()  epsilon charged so far, per group
    stop()         make no further draw
    ranks          this process among those that train together; folder is None on all but the first
    on_update(…)   be called after every update, those of empty draws too
    keep(…)        have a scheduler or an average of weights go into checkpoints, too
    checkpoint()   leave a checkpoint now
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        plan: Plan,
        draws: Draws,
        records: Records,
        engine: Engine,
        ledger: Ledger,
        ranks: Ranks,
        largest: int,
        fingerprint: Mapping[str, Any],
        folder: RunFolder | None = None,
        checkpoint_every: int | None = None,
        loss: BatchLoss | None = None,
        lock: FolderLock | None = None,
    ) -> None:
        self.model, self.optimizer, self.plan, self.ledger, self.folder = model, optimizer, plan, ledger, folder
        self._draws, self._records, self._engine, self._lock = draws, records, engine, lock
        self._parameters = validation.check_optimizer(optimizer, model)
        self._known = validation.Trained.of(self._parameters, model)
        self._device = self._parameters[0].device
        self.ranks, self._largest = ranks, largest
        self._phase, self._step = 0, 0
        self._turn: Turn = "draw"
        self._in_draw = False
        self._loops = 0
        self._handed: _Handed | None = None
        self._sum: list[Tensor] = []
        self._contaminated: NonFiniteGradientError | None = None
        self._check: IndependenceCheck | None = None
        self._check_is_due = True
        self._padding_checks = PADDING_CHECKS
        self._checks_made = 0
        self._held_values: validation.Held | None = None  # of parameters and buffers, as the last update left them
        self._repeats: bool | None = None  # whether a chunk that is read twice comes out the same; None: not tried yet
        self._fingerprint: list[tuple[int, int]] = []
        self._listeners: list[Callable[[Private], None]] = []
        self._stepping = False
        self._restarted = False
        self._is_check = False
        self._is_stopped = False
        self._start: _Start | None = None  # of the draw that is being made, until its update is applied
        self._before: dict[str, Any] | None = None  # the state before the last update, until the next draw begins
        self._kept: dict[str, Stateful] = {}
        self._kept_before: dict[str, Any] = {}  # states from the checkpoint that nobody has asked for yet
        self._generators_before: Mapping[str, Any] | None = None
        self._ended = 0  # draws that came to their end here, applied or not
        self._checkpoint_every, self._updates, self._saved = checkpoint_every, 0, -1
        self._saved_at = time.monotonic()
        self._fingerprint_of_run = dict(fingerprint)
        engine.attach(model, self._parameters)
        self._loss, self._compiled = loss, self._compiling(loss)
        self._guard = optimizer.register_step_pre_hook(lambda *_: None if self._stepping else validation.refuse_step())

    # -- the loop ----------------------------------------------------------------------------------

    @property
    def batches(self) -> Iterator[Any]:
        """The chunks of every remaining draw, in the data set's own structure.

        Leaving the loop after a completed update and entering it again goes on with the next draw. At steps 0, 1, 10,
        100, … a physical batch is first handed out in a few altered forms: their losses are compared, and nothing is
        learnt from them (`independence`); `is_check` is True meanwhile. Raises CallOrderError when a draw was
        left unfinished.
        """
        return (batch for batch in self._run() if batch is not _NOBODY)

    @property
    def draws(self) -> Iterator[Iterator[Any]]:
        """The physical batches of every remaining draw, one iterable per draw.

        Every draw has its item, also a draw of nobody: its iterable is empty, and its update is made when it is
        iterated. Checks are part of the draw they come in (see `is_check`). An item must be iterated to its end before
        the next one is asked for. Raises CallOrderError when it was not.

            for draw in private.draws:
                for x, y in draw:
                    private.backward(losses(model(x), y))
                    private.step()
        """
        return self._one_by_draw()

    def epochs(self, n: int) -> Iterator[Iterator[Any]]:
        """The plan's draws in n nearly equal parts: one iterable of physical batches per part.

        Parts are parts of the plan's steps. A run that is taken up again goes on in the part that it was in, and parts
        that are over are left out. As with `draws`, a part must be iterated to its end before the next is asked for.
        Raises InputError if there are fewer steps than parts.
        """
        if not 1 <= n <= self.plan.steps:
            raise InputError(
                f"private.epochs needs a number of parts from 1 to the plan's {self.plan.steps:,} steps; got {n}."
            )
        return self._parts(n)

    @property
    def is_check(self) -> bool:
        """True while the batch at hand is only checked: its records are altered, and nothing is learnt from it.

        It stays what it is after `backward` and `step`, until the next batch is handed out. Running losses, counts and
        progress bars leave such batches out.
        """
        return self._is_check

    def epsilon_spent(self) -> npt.NDArray[np.float64]:
        """(groups,) epsilon charged so far, in the order of `plan.epsilons`; empty where some group is too small.

        An upper bound: steps are rounded up to one of 20 points of the plan's spend curve per phase. What to claim is
        the whole plan's epsilon, `plan.epsilon_spent()`, unless training stopped without a look at data or outputs.
        """
        if has_small_cells(self.plan.groups):
            return np.empty(0)
        return self.plan.spent_after(self.ledger.charged)

    def stop(self) -> None:
        """Make no further draw: the loop ends after the draw at hand. For callbacks and for the loop itself.

        The run can then be taken up again (`close`) or be ended for good (`finish`, as `fit` does). Call it on every
        rank. The claim stays the whole plan's epsilon, unless the stop looked at neither data nor outputs.
        """
        self._is_stopped = True

    def on_update(self, listener: Callable[[Private], None]) -> None:
        """Call `listener(self)` after every update.

        A draw may be empty; its update happens inside `batches`, where no step() of the loop can tell. Whatever should
        follow the number of updates (schedules, evaluations) belongs here, lest it follow how many draws were empty.
        """
        self._listeners.append(listener)

    def _run(self) -> Iterator[Any]:
        if self._turn == "closed":
            raise CallOrderError("This run is closed. Call make_private again for another one.")
        if self._in_draw:
            raise CallOrderError(
                "The loop over private.batches was left in the middle of a draw and entered again. A draw must be "
                "finished: drawing again after looking at it would not be Poisson sampling. " + _ORDER
            )
        try:
            with self.ranks.telling():
                yield from self._until_the_end()
        finally:
            self._stop_watching()

    def _until_the_end(self) -> Iterator[Any]:
        self._loops += 1
        own = self._loops
        if self._generators_before is not None:
            checkpoints.into_generators(self._generators_before)
            self._generators_before = None
        while not self.is_finished and not self._is_stopped:
            self._restarted = False
            for address, batch in self._records.stream(self._addresses(), self._device, self._draws.randomness):
                if own != self._loops or (address.phase, address.step) != (self._phase, self._step):
                    # An older loop's next draw may be made already: its noise must never hide a second sum.
                    raise CallOrderError("Another loop over private.batches was begun since; go on with that one.")
                if address.number == 0 and not self._begin_draw():
                    return
                if batch is None:
                    self._update()
                    yield _NOBODY
                    self._taken_back(own)
                else:
                    for handed, part in self._present(address, batch):
                        yield self._hand_out(handed, part)
                        self._taken_back(own)
                if self._restarted:
                    break  # under another key, everybody's coins fall anew
        if self.is_finished:
            self._settle()

    def _one_by_draw(self) -> Iterator[Iterator[Any]]:
        batches = self._run()
        while not self.is_finished and not self._is_stopped:
            ended = self._ended
            yield self._of_one_draw(batches)
            if self._ended == ended:
                raise CallOrderError(
                    "The next of private.draws was asked for before the last one was made. Iterate each to its end:\n\n"
                    "    for draw in private.draws:\n"
                    "        for batch in draw:\n"
                    "            private.backward(losses)  # of this batch, one per record\n"
                    "            private.step()"
                )
        next(batches, None)  # nothing is drawn any more: what belongs to the end of a loop is done

    def _parts(self, n: int) -> Iterator[Iterator[Any]]:
        batches = self._run()
        for part in range(1, n + 1):
            end = part * self.plan.steps // n
            if self._place >= end:
                continue
            if self._is_stopped:
                break
            yield self._until(end, batches)
            if self._in_draw:
                raise CallOrderError(
                    "The next of private.epochs was asked for in the middle of a draw. Leave a part only after "
                    "private.step() returned True, or iterate it to its end. " + _ORDER
                )
        next(batches, None)

    def _until(self, end: int, batches: Iterator[Any]) -> Iterator[Any]:
        while self._place < end and not self._is_stopped:
            yield from self._of_one_draw(batches)

    def _of_one_draw(self, batches: Iterator[Any]) -> Iterator[Any]:
        for batch in batches:
            if batch is _NOBODY:
                return
            yield batch
            if not self._in_draw:
                return

    @property
    def _place(self) -> int:
        """How many of the plan's steps lie before the next draw."""
        return sum(phase.steps for phase in self.plan.phases[: self._phase]) + self._step

    def _addresses(self) -> Iterator[Address]:
        """Every chunk of this rank from the present position on."""
        nobody = np.empty(0, dtype=np.int64)
        for phase in range(self._phase, len(self.plan.phases)):
            first = self._step if phase == self._phase else 0
            for step in range(first, self.ledger.end(phase)):
                pieces = chunks(self.ranks.part(self._draws.at(phase, step)), self._largest) or [nobody]
                for number, piece in enumerate(pieces):
                    yield Address(phase, step, number, len(pieces), piece)

    def _begin_draw(self) -> bool:
        """False if no further draw is to be made."""
        self._known.check(self.optimizer, self.model)
        if self._kept_before:
            raise RunError(
                f"The checkpoint holds states that nothing was given for: {', '.join(self._kept_before)}. Call "
                "private.register_for_checkpointing(name=object) for each before the loop, as when the run began."
            )
        if self._held_values is None:
            self._held_values = validation.Held.by(self.model, self._parameters)
        if self._is_stopped:
            self.checkpoint()
            return False
        if self._is_due():
            self.checkpoint()
        self._note_start()
        self.ledger.charge(self._phase, self._step)
        self._sum = [torch.zeros_like(p, dtype=torch.float64) for p in self._parameters]
        self._check_is_due |= is_due(self._step)
        self._fingerprint = validation.fingerprint(self.model)
        self._in_draw = True
        return True

    def _present(self, address: Address, batch: Any) -> Iterator[tuple[_Handed, Any]]:
        """One physical batch: checked where that is due, and again where it turns out contaminated."""
        indices, count = address.indices, len(address.indices)
        # From the first time that records of different sizes meet, one may be padded to another's length.
        is_due = self._check_is_due or (self._records.varies and self._padding_checks > 0)
        if is_due and (count == 1 or batches.has_different(batch, count)):
            yield from self._checks(address, batch)
            # A record alone shows less than many: so the next batch of several is checked, too, if there can be one.
            self._check_is_due = count == 1 and self._largest > 1
        yield _Handed(address, indices, address.is_last), batch
        silent: tuple[int, ...] = ()
        while self._contaminated is not None:
            found, self._contaminated = self._contaminated.records, None
            more = tuple(sorted({*silent, *found}))
            if more == silent or len(more) == count:
                yield from self._one_by_one(address, batch)
                return
            silent = more
            sound = min(set(range(count)) - set(silent))
            rows = [sound if i in silent else i for i in range(count)]
            part = self._gather(address, batch).batch(rows)
            yield _Handed(address, indices[rows], address.is_last, silent=silent), part

    def _checks(self, address: Address, batch: Any) -> Iterator[tuple[_Handed, Any]]:
        """The batch-independence check: the batch in its altered forms."""
        generators = checkpoints.of_generators()
        count = len(address.indices)
        gathered = self._records.gather(address, self._device, self._draws.randomness)
        most = min(self._largest, len(self._records))
        is_first = self._checks_made == 0
        check = IndependenceCheck(gathered, count, most, address.step, self.model, self._parameters, is_first)
        self._check = check
        if self._repeats is None:  # before the loop can write to the batch
            self._repeats = batches.is_same(check.gathered.batch(range(count)), batch)
        for variant, part in check.forms():
            yield _Handed(address, address.indices[list(variant.rows)], variant=variant), part
        checkpoints.into_generators(generators)  # a check leaves no trace in what is learnt
        self._check = None
        self._checks_made += 1
        if check.varies:
            self._padding_checks = 0 if check.saw_other_lengths else self._padding_checks - 1

    def _one_by_one(self, address: Address, batch: Any) -> Iterator[tuple[_Handed, Any]]:
        count, gathered = len(address.indices), self._gather(address, batch)
        for i in range(count):
            part = gathered.batch([i])
            yield _Handed(address, address.indices[i : i + 1], address.is_last and i == count - 1), part

    def _gather(self, address: Address, batch: Any) -> Gathered:
        """The records of a physical batch, to be put together anew.

        Read and collated again; of a data set that never comes out twice the same, cut from the batch as it came.
        """
        count = len(address.indices)
        found = self._records.gather(address, self._device, self._draws.randomness)
        if self._repeats is None:
            self._repeats = batches.is_same(found.batch(range(count)), batch)
        return found if self._repeats else Gathered(lambda places: batches.take(batch, places, count))

    def _hand_out(self, handed: _Handed, part: Any) -> Any:
        self._handed, self._turn = handed, "backward"
        self._is_check = handed.variant is not None
        validation.check_outside(self._fingerprint, self.model)
        self._engine.begin(len(handed.indices))
        # Dropout is part of the sum that the noise hides: replayed with the step.
        address = handed.address
        alone = -1 if handed.variant or len(handed.indices) == len(address.indices) else int(handed.indices[0])
        number = self.ranks.number(address.number)
        seed = self._draws.randomness.seed("torch", address.phase, address.step, number, alone)
        seed_torch(seed, self._device)
        return part

    def _stop_watching(self) -> None:
        if self._check is not None:
            self._check.stop()

    def _taken_back(self, own: int) -> None:
        if own != self._loops:
            raise CallOrderError("Another loop over private.batches was begun since; go on with that one.")
        if self._turn == "closed":
            middle = " in the middle of a draw, which is never applied" if self._in_draw else ""
            raise CallOrderError(f"This run was closed{middle}. Leave the loop after private.close().")
        if self._turn == "broken":
            raise CallOrderError("private.backward failed on a chunk of this draw, so the draw cannot be finished.")
        if self._turn != "draw":
            missing = "private.backward(losses)" if self._turn == "backward" else "private.step()"
            self._turn = "broken"
            raise CallOrderError(f"The loop went on to the next chunk without {missing}. {_ORDER}")

    def backward(self, losses: Tensor) -> None:
        """Clip each record's gradient to its own norm and add it to the draw's sum.

        losses: (batch,), one per record of the chunk, in order, from the recorded graph.
        Raises CallOrderError, ModelError for losses that are not one per record, BatchDependenceError,
        UnsupportedLayerError; after any error the draw is broken and is never applied.
        """
        if self._turn != "backward" or self._handed is None:
            raise CallOrderError(f"private.backward was called {self._where()}. {_ORDER}")
        handed = self._handed
        self._turn = "broken"  # until all of this chunk is in the sum, or known to wait for its replay
        self._stop_watching()
        with self.ranks.telling():
            losses = validation.check_losses(losses, len(handed.indices))
            validation.check_layers(self.model)
            validation.check_unchanged(self._fingerprint, self.model)
            if handed.variant is None:
                self._add(handed, losses)
            else:
                assert self._check is not None
                self._check.observe(losses)
        self._turn = "step"

    def _clip(self, batch: Any) -> None:
        """Do what `backward` does from the batch, compiled; for `fit`, which gives the loss beforehand.

        A physical batch that the program does not take (a check, a single record, one with a gradient that is not
        finite) goes through the loss and `backward`. Raises ModelError for a batch that is not made of tensors.
        """
        assert self._compiled is not None
        assert self._loss is not None
        assert self._turn == "backward"
        assert self._handed is not None
        handed, count = self._handed, len(self._handed.indices)
        is_whole = handed.variant is None and count == len(handed.address.indices)
        if is_whole and self._compiled.takes(count):
            self._turn = "broken"
            with self.ranks.telling():
                validation.check_layers(self.model)
                clipped = self._compiled.sums(batch, count, *self._bounds(handed))
                validation.check_unchanged(self._fingerprint, self.model)
            if clipped is not None:
                self._add_to_sum(clipped)
                self._turn = "step"
                return
            self._turn = "backward"
        self.backward(self._loss(self.model, batch))

    def _compiling(self, loss: BatchLoss | None) -> Compiled | None:
        if loss is None:
            return None
        assert isinstance(self._engine, Ghost)  # make_private sees to it
        expected = max(phase.expected_batch for phase in self.plan.phases)
        records = min(self._largest, math.ceil(expected + ROOTS * math.sqrt(expected)))
        return Compiled(self.model, self._parameters, loss, records)

    def _add(self, handed: _Handed, losses: Tensor) -> None:
        try:
            clipped = self._engine.clipped_sum(losses, *self._bounds(handed))
        except NonFiniteGradientError as contaminated:
            # Alone, such a record contributes nothing. Among others, the chunk is played again without it.
            if len(handed.indices) > 1:
                self._contaminated = contaminated
            return
        self._add_to_sum(clipped)

    def _bounds(self, handed: _Handed) -> tuple[Tensor, Tensor]:
        """(clip norms, weights) of these records."""
        phase = self.plan.phases[handed.address.phase]
        group = self._draws.group[handed.indices]
        weight = phase.weight[group]
        weight[list(handed.silent)] = 0.0
        return torch.from_numpy(phase.clip_norm[group]).to(self._device), torch.from_numpy(weight).to(self._device)

    def _add_to_sum(self, clipped: list[Tensor]) -> None:
        for total, part in zip(self._sum, clipped, strict=True):
            total += part

    def step(self) -> bool:
        """On the draw's last chunk: add noise, divide by the expected batch, update, and return True; else False."""
        if self._turn != "step" or self._handed is None:
            raise CallOrderError(f"private.step was called {self._where()}. {_ORDER}")
        handed, self._handed, self._turn = self._handed, None, "draw"
        if handed.variant is not None or self._contaminated is not None or not handed.is_last:
            return False
        with self.ranks.telling():
            self._update()
        return True

    def _where(self) -> str:
        return {
            "draw": "outside a chunk, or twice on one",
            "step": "twice on one chunk",
            "backward": "before private.backward",
            "broken": "after an error in this draw, which is never applied",
            "closed": "after private.close()",
        }[self._turn]

    def _update(self) -> None:
        """Noise the sum, average by the plan's constant, let the optimizer apply it, and move on to the next draw."""
        phase = self.plan.phases[self._phase]
        self._known.check(self.optimizer, self.model)
        self._check_held()
        self._add_up()
        count = sum(p.numel() for p in self._parameters)
        noise = torch.from_numpy(self._draws.randomness.noise(self._phase, self._step, count)).to(self._device)
        start = 0
        update = []
        for p, total in zip(self._parameters, self._sum, strict=True):
            own = noise[start : start + p.numel()].reshape(p.shape)
            # The divisor is public and fixed: the drawn number of records is itself private.
            update.append(((total + phase.noise_std * own) / phase.expected_batch).to(p.dtype))
            start += p.numel()
        name = hash_of(update) if self.ledger.durable or self.ranks.several else ""
        is_first = self.ledger.record(self._phase, self._step, name)
        self.ranks.meet("before the update", {"the update's values": name.encode(), "the ledger's word": is_first})
        if not is_first:
            self._begin_epoch()  # another sum than this noise has hidden before: never applied
            self._ended += 1
            return
        self._note_before()
        for p, gradient in zip(self._parameters, update, strict=True):
            p.grad = gradient
        self._stepping = True
        try:
            self.optimizer.step()
        finally:
            self._stepping = False
            for p in self._parameters:
                p.grad = None
        self._held_values = validation.Held.by(self.model, self._parameters)
        self._sum = []
        self._in_draw = False
        self._updates += 1
        self._ended += 1
        self._step += 1
        self._skip_what_is_over()
        for listener in self._listeners:
            listener(self)

    def _add_up(self) -> None:
        """Add up the sums of all ranks. Rank 0 comes here only after its charge is durable, and so do all."""
        if self.ranks.several:
            self.ranks.add(self._sum, "at the end of a draw", {"the step": (self._phase, self._step), **self._held()})

    def _held(self) -> dict[str, Any]:
        """What all ranks must hold alike."""
        return {
            "what was charged": self.ledger.charged,
            "the key": self._draws.randomness.commitment.encode(),
            "the parameters' values": str(check_sum(self._parameters)).encode(),
        }

    def _check_held(self) -> None:
        """Refuse what was written to parameters and buffers since the last update, by whatever way."""
        if self._held_values is not None:
            self._held_values.check(validation.Held.by(self.model, self._parameters))

    def _skip_what_is_over(self) -> None:
        """On to the next phase where this one is done, or where its charges are used up."""
        while not self.is_finished and self._step >= self.ledger.end(self._phase):
            self._phase, self._step = self._phase + 1, 0

    # -- stop and go on ------------------------------------------------------------------------------

    def register_for_checkpointing(self, **objects: Stateful) -> None:
        """Have these go into checkpoints: schedulers, averages of weights, anything with a state_dict.

        Call it before the loop. In a run that is taken up again, each is set to its state in the checkpoint.
        """
        for name, thing in objects.items():
            validation.check_kept(name, thing)
            if name in self._kept_before:
                thing.load_state_dict(self._kept_before.pop(name))
            self._kept[name] = thing

    def checkpoint(self) -> None:
        """Leave a checkpoint now, durably. Between draws only; nothing happens without a folder, as on other ranks.

        Let nothing of a step out of the house (a score, weights) before its checkpoint is durable: what came after the
        last one may be made again, and under another key it would be another release.
        """
        if self.folder is None or self._saved == self._updates:
            return
        if self._in_draw:
            raise CallOrderError("A checkpoint can be left between draws only: after private.step() returned True.")
        self._check_held()  # what else wrote to the model must not be gone on from
        self._save(self._state(self._generators_before or checkpoints.of_generators(), self._fell_back))

    def _state(self, generators: Mapping[str, Any], fell_back: bool) -> dict[str, Any]:
        return {
            "phase": self._phase,
            "step": self._step,
            "updates": self._updates,
            "epoch": self.ledger.epoch,
            "fingerprint": self._fingerprint_of_run,
            "model": checkpoints.of_model(self.model),
            "parameters": [p.detach() for p in self._parameters],
            "optimizer": self.optimizer.state_dict(),
            "kept": {name: thing.state_dict() for name, thing in self._kept.items()} | self._kept_before,
            "generators": generators,
            "fell_back": fell_back,
        }

    def _save(self, state: dict[str, Any]) -> None:
        assert self.folder is not None
        self.ledger.sync()
        checkpoints.save(self.folder.checkpoints, state)
        self._saved, self._saved_at = state["updates"], time.monotonic()

    @property
    def _fell_back(self) -> bool:
        return isinstance(self._engine, Ghost) and not self._engine.is_proven

    # A run that is closed is taken up again at the start of the last draw: there, and nowhere else, its state is known
    # to be that of a run that goes on. Within the draw only generators and the engine move, and both are noted. After
    # the update, the rest of the loop's body or a listener may be missing, so the state before it is kept in memory.

    def _note_start(self) -> None:
        if self.folder is not None:
            self._start = _Start(checkpoints.of_generators(), self._fell_back, self._marks())
        self._before = None

    def _note_before(self) -> None:
        state = self._at_start()
        if state is not None:  # what was noted of the generators is no longer written to
            state = checkpoints.copied(state | {"generators": None}) | {"generators": state["generators"]}
        self._before = state
        self._start = None

    def _at_start(self) -> dict[str, Any] | None:
        """The state at the start of the draw at hand; None if something was changed since, so that it is not known."""
        if self._start is None or self._start.marks != self._marks():
            return None
        return self._state(self._start.generators, self._start.fell_back)

    def _marks(self) -> list[Any]:
        """What no loop changes within a draw, if the draw can be made again from its start."""
        tensors = (*self._parameters, *self.model.parameters(), *self.model.buffers())
        kept = {name: thing.state_dict() for name, thing in self._kept.items()}
        return [
            [(id(tensor), tensor._version) for tensor in tensors],
            checkpoints.marks(self.optimizer.state_dict()),
            checkpoints.marks(kept),
            check_sum(checkpoints.tensors_in(kept)),
        ]

    def _leave_checkpoint(self) -> None:
        """On the way out: leave the state at the start of the last draw, if there is no newer one."""
        if self.folder is None or self.ledger.is_closed or self.is_finished or self.ranks.has_left:
            return
        state = self._before
        if self._start is not None:
            is_own = self._held_values == validation.Held.by(self.model, self._parameters)
            state = self._at_start() if is_own else None
        if state is not None and state["updates"] > self._saved:
            self._save(state)

    def _is_due(self) -> bool:
        if self.folder is None or self._saved < 0:
            return self.folder is not None
        if self._checkpoint_every is not None:
            return self._updates - self._saved >= self._checkpoint_every
        return time.monotonic() - self._saved_at >= SECONDS_PER_CHECKPOINT

    def take_up(self, state: Mapping[str, Any] | None) -> None:
        """Go on from a checkpoint (None: from the start), under the same key if everything is as it was.

        Called by make_private. Another engine, machine, number of threads, data set or optimizer may bring other sums
        under the same noise: then, as when the key is lost, a new key epoch begins.
        """
        if state is not None:
            hyperparameters = [{k: v for k, v in g.items() if k != "params"} for g in self.optimizer.param_groups]
            checkpoints.into_model(self.model, state["model"])
            with torch.no_grad():
                for p, value in zip(self._parameters, state["parameters"], strict=True):
                    p.copy_(value)
            self.optimizer.load_state_dict(state["optimizer"])
            if state["fingerprint"].get("optimizer") != self._fingerprint_of_run["optimizer"]:
                for group, own in zip(self.optimizer.param_groups, hyperparameters, strict=True):
                    group.update(own)
            self._phase, self._step, self._updates = state["phase"], state["step"], state["updates"]
            self._saved = self._updates
            self._kept_before = dict(state["kept"])
            self._generators_before = state["generators"]
            if state.get("fell_back") and isinstance(self._engine, Ghost):
                self._engine.fall_back()
        if self.ledger.is_closed:
            self._phase, self._step = len(self.plan.phases), 0
            return
        if state is None:
            same = self.ledger.is_untouched  # cut off before its first checkpoint, and so before its first draw
        else:
            same = state["fingerprint"] == self._fingerprint_of_run and state["epoch"] == self.ledger.epoch
        if not same or self._draws.randomness.commitment != self.ledger.key:
            self._begin_epoch()
        self._skip_what_is_over()

    def _begin_epoch(self) -> None:
        """Another key from this step on: what was reserved stays charged, and steps from here on are charged anew."""
        history = f"{self.ledger.last_line} {self._fingerprint_of_run}"
        randomness = self.ranks.first(self._draws.randomness.renewed(self.ledger.epoch + 1, history))
        self._draws = replace(self._draws, randomness=randomness)
        key_file = ""
        if self.folder:
            self.folder.write_key(randomness.key)
            key_file = self.folder.key_file()
        done = [phase.steps for phase in self.plan.phases[: self._phase]]
        later = [0] * (len(self.plan.phases) - self._phase - 1)
        self.ledger.new_epoch(randomness.commitment, [*done, self._step, *later], key_file)
        self._sum, self._in_draw, self._restarted = [], False, True
        self._saved = -1  # the epoch begins from a checkpoint of its own
        self._skip_what_is_over()

    # -- the end -----------------------------------------------------------------------------------

    @property
    def updates(self) -> int:
        """Noisy updates made: steps that the model has learnt from, each once however often it was replayed."""
        return self._updates

    @property
    def is_finished(self) -> bool:
        """True once every step of the plan was made, or charged."""
        return self._phase == len(self.plan.phases)

    def _settle(self) -> None:
        """The last checkpoint; then write down what was charged, and destroy the key: it could only do harm now."""
        if self.ledger.is_closed:
            self._release()
            return
        self._check_held()
        if self.ranks.several:
            self.ranks.meet("at the end of the run", self._held())
        with self.ranks.together("closing the ledger"):
            self.checkpoint()
            self.ledger.close()
            if self.folder:
                self.folder.destroy_key()
        self._release()

    def _release(self) -> None:
        """Let other processes into the folder."""
        if self._lock:
            self._lock.release()

    def finish(self) -> None:
        """End the run for good, however many steps are left: the key is destroyed, and it cannot be taken up again."""
        if self._in_draw:
            self._sum, self._in_draw = [], False
        self._settle()
        self.close()

    def close(self) -> None:
        """Hooks off; model and optimizer are as they were, but for what was learnt.

        An unfinished run with a folder keeps its key and can be taken up again; `finish` ends it for good. It goes on
        from the start of the last draw, which is then made again: the same release, charged once.
        """
        if self._turn != "closed":
            self._turn = "closed"
            self._stop_watching()
            is_failing = sys.exc_info()[0] is not None
            try:
                self._leave_checkpoint()
            except EpsilonsError:  # an older one is there; what went wrong before says more
                if not is_failing:
                    raise
            finally:
                self._engine.detach()
                self._guard.remove()
                try:
                    if self.is_finished and not self.ranks.has_left:
                        self._settle()
                    elif not self.ledger.is_closed:
                        self.ranks.leave(
                            "an error in its loop, or the loop was left in a draw" if self._in_draw else ""
                        )
                    self._sum, self._start, self._before = [], None, None
                    self.ledger.suspend()
                finally:
                    self._release()

    def __enter__(self) -> Private:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Private({sum(self.ledger.charged):,} of {self.plan.steps:,} steps)"
