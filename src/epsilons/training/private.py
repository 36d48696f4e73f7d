"""Private: draw, clip, add noise, charge. One object does all four, so that they cannot disagree.

Paper Alg. 1 with a rate, a clip norm and a weight per group, in physical batches. The order for each draw:

    charge the ledger → for each physical batch: yield it, take its losses, add its clipped gradients → noise → update

Sums without noise stay in here and never reach p.grad, so no optimizer, scheduler or average of weights sees one.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt
from torch import Tensor, nn

from ..clipping import NonFiniteGradientError
from ..core import modules
from ..core.disclosure import has_small_cells
from ..core.modules import check_graph
from ..draws.persons_rows import Draws, check_size
from ..errors import CallOrderError, EpsilonsError, InputError
from ..independence.check import is_due
from ..models import model_checks
from . import validation
from .checkpoints import Stateful
from .datasets import PhysicalBatch, seed_torch
from .distributed import Ranks
from .microbatches import Clipper, Issued, Issuer
from .noisy_update import NoisyUpdate
from .opening import Inputs, OpenRun, Request
from .performance import Performance
from .resume import Checkpointer
from .within_draws import EMPTY_DRAW, Modes, Position, Settings, Turns, by_draw, by_part


class Private:
    """A private training loop; built by `make_private`.

    model, optimizer, plan   as they were passed to make_private
    ledger                   charged and allowed steps
    folder                   the run's folder; None without run_dir, and on ranks other than 0
    ranks                    this process among those that train together
    """

    def __init__(
        self, request: Request, inputs: Inputs, run: OpenRun, ranks: Ranks, relaid: Sequence[nn.Module] = ()
    ) -> None:
        model, optimizer, plan, ledger = request.model, request.optimizer, request.plan, run.ledger
        assert ledger is not None
        self.model, self.optimizer, self.plan, self.ledger = model, optimizer, plan, ledger
        self.folder, self.ranks, self._lock, self._relaid = run.folder, ranks, run.lock, relaid
        self._source, self._persons, self._largest = inputs.source, inputs.persons, inputs.largest
        self._parameters, self._device = inputs.parameters, inputs.parameters[0].device
        self._position = position = Position(plan, ledger)
        self._draws, self._turns = Draws(plan, inputs.group, run.randomness), Turns(position)
        engine, computed = (
            ranks.shards.computed_by(inputs.engine) if ranks.shards else (inputs.engine, self._parameters)
        )
        self._issuer = Issuer(model, computed, inputs.source, inputs.persons, ledger.left_out, ranks.shards)
        self._checkpointer = Checkpointer(request, inputs, run.folder, position, ranks)
        self._issued: Issued | None = None
        self._listeners: list[Callable[[Private], None]] = []
        self._restarted, self._is_check = False, False
        self._is_cut_short = False  # somebody ended the run, or a part of it, before the plan did
        self._clipper = Clipper(engine, model, computed, plan, inputs.group, relaid)
        # last, because these add hooks to the optimizer and the model
        self._noisy_update = NoisyUpdate(model, optimizer, inputs.parameters, position, ranks)
        registered, check_trained = self._checkpointer.registered, self._noisy_update.check_trained
        self._settings = Settings(optimizer, plan, ranks.size, registered, check_trained)
        self._modes = Modes(model, self._turns)

    # -- the loop ----------------------------------------------------------------------------------

    @property
    def batches(self) -> Iterator[Any]:
        """The physical batches of every remaining draw, in the structure of the data set.

        A loop that was left after a complete update continues with the next draw if it is entered again. At steps 0, 1,
        10, 100, … a physical batch is first issued in a few altered forms: their losses are compared, nothing is learnt
        from them (`independence`), and `is_check` is True. Raises CallOrderError if a draw was left unfinished,
        ModelError if settings of the optimizer, schedulers or modes of modules moved with batches.
        """
        return (batch for batch in self._loop() if batch is not EMPTY_DRAW)

    @property
    def draws(self) -> Iterator[Iterator[Any]]:
        """The physical batches of every remaining draw, one iterable per draw.

        An empty draw has an empty iterable, and its update is made when it is iterated. Checks are part of their draw
        (see `is_check`). Each iterable must end before the next one is requested, or CallOrderError is raised.
        """
        return by_draw(self._loop(), self._turns, self._settings.compare)

    def epochs(self, n: int) -> Iterator[Iterator[Any]]:
        """The plan's draws in n nearly equal parts: one iterable of physical batches per part.

        A resumed run continues in its current part. Each part must end before the next one is requested, or
        CallOrderError is raised. Raises InputError if there are fewer steps than parts.
        """
        if not 1 <= n <= self.plan.steps:
            raise InputError(
                f"private.epochs needs a number of parts from 1 to the plan's {self.plan.steps:,} steps; got {n}."
            )
        return by_part(self._loop(), self._turns, self._settings.compare, self._position, n)

    @property
    def is_check(self) -> bool:
        """True while the current batch is only checked: its records are altered, and nothing is learnt from it.

        It stays True until the next batch is issued. Leave such batches out of running losses and progress bars.
        """
        return self._is_check

    @property
    def is_last(self) -> bool:
        """True if the current batch is to complete its draw: `step` then updates, if all gradients are finite."""
        return self._issued is not None and self._issued.is_last

    @property
    def max_physical_batch(self) -> int:
        """How many rows are computed at once, at most. It may be set; draws read in advance keep the former one."""
        return self._largest

    @max_physical_batch.setter
    def max_physical_batch(self, records: int) -> None:
        Performance(max_physical_batch=records)  # raises
        check_size(self._persons, records)
        self._largest = records

    def epsilon_spent(self) -> npt.NDArray[np.float64]:
        """(groups,) epsilon charged so far, in the order of `plan.epsilons`; empty if some group is too small.

        An upper bound: steps are rounded up to one of 20 points of the plan's spend curve per phase, and other runs of
        the plan count in full. If training ended before the plan did (`stop`, `finish`, `close`, a loop over a foreign
        library's loader that was left), all steps of the plan count, because data or outputs may have led to it.
        """
        if has_small_cells(self.plan.groups):
            return np.empty(0)
        return self.plan.spent_after([p.steps for p in self.plan.phases] if self._is_cut_short else self.ledger.charged)

    def stop(self) -> None:
        """Make no further draw: the loop ends after the current draw. For callbacks and for the loop itself.

        Call it on every rank. The run can then be resumed (`close`) or ended for good (`finish`). The claim stays the
        whole plan's epsilon, unless the decision to stop used neither data nor outputs.
        """
        self._turns.is_stopped = True
        self._cut_short()

    def _cut_short(self) -> None:
        self._is_cut_short |= not self.is_finished

    def on_update(self, listener: Callable[[Private], None]) -> None:
        """Call `listener(self)` after every update, those of empty draws too, which the loop does not see.

        The place for schedules: `private.on_update(lambda _: scheduler.step())`.
        """
        self._listeners.append(listener)

    def _loop(self) -> Iterator[Any]:
        """Every batch that the caller must process, and EMPTY_DRAW after the update of an empty draw."""
        number = self._turns.begin_loop()
        try:
            with self.ranks.reporting_errors():
                self._settings.compare()
                self._checkpointer.restore_generators()
                while self._turns.has_next:
                    yield from self._until_restarted(number)
                if self.is_finished:
                    self._settle()
        finally:
            self._issuer.stop_watching()

    def _until_restarted(self, loop: int) -> Iterator[Any]:
        """The batches until the end, a stop, or a new key, under which other records are drawn."""
        self._restarted = False
        at, randomness = self._position, self._draws.randomness
        for physical, batch in self._source.stream(self._physical_batches(), self._device, randomness):
            self._turns.check_latest(loop, (physical.phase, physical.step) == (at.phase, at.step))
            if physical.number == 0 and not self._begin_draw():
                return
            if batch is None:
                self._update()
                yield EMPTY_DRAW
                self._turns.check_batch_is_done(loop)
            else:
                for issued, part in self._issuer.issue(physical, batch, self._draws.randomness, self._largest):
                    yield self._issue(issued, part)
                    self._turns.check_batch_is_done(loop)
                    self._settings.compare()
            if self._restarted:
                return

    def _physical_batches(self) -> Iterator[PhysicalBatch]:
        """Every physical batch of this rank from the current position on."""
        at, draws = self._position, self._draws
        for phase in range(at.phase, len(self.plan.phases)):
            first = at.step if phase == at.phase else 0
            for step in range(first, self.ledger.end(phase)):
                drawn = self._persons.with_rows(draws.at(phase, step))
                readings = self._persons.readings(self.ranks.part(drawn), draws.randomness, phase, step)
                own = readings.batches(self._largest)
                parts = own or [readings]
                if self.ranks.shards:  # all ranks compute as many, of a person of the draw again where they have less
                    each = [self._persons.readings(p, draws.randomness, phase, step) for p in self.ranks.parts(drawn)]
                    most = max(len(readings.batches(self._largest)) for readings in each)
                    filler = self._persons.readings(drawn[:1], draws.randomness, phase, step)
                    parts = own + [filler] * (most - len(own)) or parts
                for number, part in enumerate(parts):
                    yield PhysicalBatch(phase, step, number, len(parts), part, number >= len(own))

    def _charge(self) -> None:
        """Charge the next draw, on every rank, and learn who left the registry before a block of steps begins."""
        phase, step = self._position.phase, self._position.step
        leavers = self.ledger.leavers(phase, step)
        if self.ranks.is_distributed and "registry" in self.ledger.rests_on:
            leavers = self.ranks.broadcast(leavers)  # rank 0 alone has the reservation
        self.ledger.charge(phase, step, leavers)

    def _begin_draw(self) -> bool:
        """Charge the next draw. False if no further draw is to be made."""
        self._noisy_update.check_trained()
        self._noisy_update.note_contents()
        self._checkpointer.check_registered()
        if self._turns.is_stopped or self._checkpointer.is_due:
            self.checkpoint()
        if self._turns.is_stopped:
            return False
        is_check = is_due(self._position.step)  # it keeps gradients, and needs memory
        self._checkpointer.note_start(frees_memory=is_check)
        self._charge()
        if is_check:
            self._noisy_update.drop_sum()
        self._noisy_update.begin_sum()
        self._settings.begin_draw(self._position.step)
        self._issuer.begin_draw(self._position.step, self._modes.begin_draw())
        self._turns.in_draw = True
        return True

    def _issue(self, issued: Issued, batch: Any) -> Any:
        """Hand the loop this batch."""
        self._issued, self._turns.turn = issued, "backward"
        self._is_check = issued.variant is not None or issued.physical.is_filler
        self._noisy_update.check_between_batches()
        self._clipper.begin(issued, self._largest)
        # Dropout is part of the sum that the noise hides, so it is seeded and replayed with the step.
        physical = issued.physical
        alone = -1 if issued.variant is not None or issued.is_whole else int(issued.readings.persons[0])
        number = self.ranks.number(physical.number)
        seed = self._draws.randomness.seed("torch", physical.phase, physical.step, number, alone)
        seed_torch(seed, self._device)
        return batch

    def backward(self, losses: Tensor) -> None:
        """Clip each record's gradient to its clip norm and add it to the draw's sum; of a person, that of their mean.

        losses: (batch,), one per row, in order, with their graph. Raises CallOrderError, ModelError for losses that
        are not one per record, BatchDependenceError, UnsupportedLayerError; after an error the draw is never applied.
        """
        self._turns.take("backward", then="broken")  # until the batch is in the sum, or waits for its replay
        assert self._issued is not None
        issued = self._issued
        self._issuer.stop_watching()
        with self.ranks.reporting_errors():
            losses = validation.check_losses(losses, len(issued.indices))
            model_checks.check_layers(self.model)
            self._modes.check(issued.variant is not None or self._issuer.calls_are_due)
            self._noisy_update.check_forward()
            if issued.variant is not None or self._issuer.calls_are_due:
                check_graph(losses)
            if issued.variant is None:
                self._issuer.check_source(losses)
                self._add(issued, losses)
            else:
                self._issuer.observe(losses)
        self._turns.turn = "step"

    def _add(self, issued: Issued, losses: Tensor) -> None:
        try:
            if issued.is_probe:
                self._issuer.adds_nothing = not any(bool(part.any()) for part in self._clipper.sum(issued, losses))
            else:
                clipped = self._clipper.clipped(issued, losses)
                if clipped is not None and not issued.physical.is_filler:
                    self._noisy_update.add(clipped)
        except NonFiniteGradientError as error:
            # A single such person contributes nothing. Among others, the batch is issued again without them.
            if len(issued.readings.persons) > 1:
                self._issuer.non_finite = error

    def step(self) -> bool:
        """On the draw's last physical batch: add noise, divide by the expected batch size, update, return True.

        Returns False on every other batch. Raises CallOrderError unless `backward` was called on the batch.
        """
        self._turns.take("step", then="draw")
        assert self._issued is not None
        issued, self._issued = self._issued, None
        if issued.variant is not None or self._issuer.non_finite is not None or not issued.is_last:
            return False
        with self.ranks.reporting_errors():
            self._update()
        self._settings.begin_body()
        return True

    def _update(self) -> None:
        """Add noise to the sum, average by the plan's constant, apply the update, and move on to the next draw."""
        self._settings.end_draw()
        self._noisy_update.check_trained()
        self._noisy_update.check_contents(whole=False)
        update = self._noisy_update.noisy_average(self._draws.randomness)
        if not self._noisy_update.is_first_release(update):
            self._begin_epoch()  # this noise was added to another sum before: the update is never applied
            return
        self._checkpointer.note_update()
        self._noisy_update.apply(update)
        self._turns.end_draw()
        self._position.updates += 1
        self._position.step += 1
        self._position.skip_finished_phases()
        for listener in self._listeners:
            listener(self)

    def _abandon_draw(self) -> None:
        """A foreign loop was left within a draw: it is never applied, its charge stays, and the next one may begin."""
        if self._turns.in_draw and self._turns.turn in ("draw", "backward", "step"):
            self._noisy_update.drop_sum()
            self._settings.forget()
            self._issuer.stop_watching()
            self._issued, self._turns.turn = None, "draw"
            self._turns.end_draw()
            self._position.step += 1
            self._position.skip_finished_phases()

    def _skip_paid(self) -> None:
        """Leave out the steps that an earlier process paid for and may have made: they stay charged."""
        at = self._position
        while not at.is_finished and at.step < self.ledger.paid(at.phase):
            at.step = self.ledger.paid(at.phase)
            at.skip_finished_phases()

    # -- checkpoints and the end -----------------------------------------------------------------------

    def register_for_checkpointing(self, **objects: Stateful) -> None:
        """Save these in checkpoints: schedulers, averages of weights, anything with a state_dict.

        Call it before the loop; a resumed run sets each object to its state in the checkpoint. Raises ModelError for a
        scheduler that takes a metric.
        """
        for name, thing in objects.items():
            self._checkpointer.register(name, thing)

    def checkpoint(self) -> None:
        """Save a checkpoint now, durably. Without a folder, as on ranks other than 0, this does nothing.

        Release nothing of a step before its checkpoint: later steps may be repeated, and under another key that is
        another release. Raises CallOrderError inside a draw.
        """
        if self._checkpointer.is_saved:
            return
        if self._turns.in_draw:
            raise CallOrderError("A checkpoint can be saved between draws only: after private.step() returned True.")
        self._noisy_update.check_contents()  # a foreign write must not be resumed from
        self._noisy_update.drop_sum()
        self._checkpointer.save()

    def _leave_checkpoint(self) -> None:
        """On closing: save the state at the start of the last draw, if there is no newer checkpoint."""
        if self.ledger.is_closed or self.is_finished or self.ranks.has_aborted:
            return
        self._noisy_update.drop_sum()
        self._checkpointer.save_last(*self._noisy_update.changes())

    def _resume(self, state: Mapping[str, Any] | None) -> None:
        """Go on from a checkpoint (None: from the start).

        If something differs that may change sums under the same noise (engine, machine, threads, data set, optimizer),
        or if the key is lost, a new key epoch begins.
        """
        if state is not None:
            self._checkpointer.restore(state)
        if self.ledger.is_closed:
            self._position.phase, self._position.step = len(self.plan.phases), 0
            return
        if not self._checkpointer.fits(state) or self._draws.randomness.commitment != self.ledger.key:
            self._begin_epoch()
        self._position.skip_finished_phases()

    def _begin_epoch(self) -> None:
        """Use another key from this step on."""
        self._draws = self._checkpointer.new_epoch(self._draws)
        self._noisy_update.drop_sum()
        self._turns.end_draw()
        self._restarted = True
        self._position.skip_finished_phases()

    @property
    def updates(self) -> int:
        """Number of noisy updates that the model has learnt from; a repeated step counts once.

        What the loop's body changes in the optimizer after an update must follow this number, and read it there.
        """
        self._settings.follows_updates = True
        return self._position.updates

    @property
    def is_finished(self) -> bool:
        """True once every step of the plan was made, or charged."""
        return self._position.is_finished

    def _settle(self) -> None:
        """Save the last checkpoint, close the ledger, and destroy the key, which could only do harm now."""
        self._noisy_update.drop_sum()
        if not self.ledger.is_closed:
            self._noisy_update.check_contents()
            self.ranks.check_agreement("at the end of the run", self._noisy_update.shared_facts(self._draws.randomness))
            with self.ranks.collective("closing the ledger"):
                self.checkpoint()
                self.ledger.close()
                if self.folder:
                    self.folder.end()
        self._release()

    def _release(self) -> None:
        """Let other processes use the folder."""
        if self._lock:
            self._lock.release()

    def finish(self) -> None:
        """End the run for good, however many steps are left: the key is destroyed, and it cannot be resumed."""
        self._cut_short()
        self._turns.in_draw = False
        self._settle()
        self.close()

    def close(self) -> None:
        """Remove hooks; model and optimizer are as before, except for what was learnt.

        An unfinished run with a folder can be resumed, from the start of its last draw; `finish` ends it for good.
        """
        if self._turns.turn == "closed":
            return
        self._turns.turn = "closed"
        self._cut_short()
        self._issuer.stop_watching()
        is_failing = sys.exc_info()[0] is not None
        try:
            if not (is_failing and self.ranks.shards):  # the other ranks may be elsewhere
                self._leave_checkpoint()
        except EpsilonsError:  # there is an older checkpoint, and the first error matters more
            if not is_failing:
                raise
        finally:
            self._clipper.detach()
            modules.lay_out_state(self.optimizer)
            if self.ranks.shards:
                self.ranks.shards.end()
            self.ranks.rewrap()
            self._noisy_update.remove_guard()
            self._modes.remove()
            try:
                if self.is_finished and not self.ranks.has_aborted:
                    self._settle()
                elif not self.ledger.is_closed:
                    self.ranks.abort(
                        "an error in its loop, or the loop was left in a draw" if self._turns.in_draw else ""
                    )
                self._noisy_update.drop_sum()
                self._checkpointer.forget()
                self.ledger.suspend()
            finally:
                self._release()

    def __enter__(self) -> Private:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        modules.note(error, self._relaid)
        self.close()

    def __reduce__(self) -> NoReturn:
        raise InputError(
            "A private run cannot be copied or pickled: both copies would add the same noise to different sums. Save "
            "model.state_dict(). To go on in another process, close a run that has a run_dir, and resume it there."
        )

    def __repr__(self) -> str:
        return f"Private({sum(self.ledger.charged):,} of {self.plan.steps:,} steps)"
