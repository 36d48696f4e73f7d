"""The batches that a loop is handed for one physical batch, and the clipping of them.

Usually this is the physical batch as it was read. Where a batch-independence check is due, the loop is handed a few
altered forms of it first. Where a gradient is not finite, the loop is handed it again with the persons at fault masked.
If it is not known who they are, the loop is handed each person alone before, to find out: so no one else's gradient is
computed in another way for them. Without persons, each record is a person of its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from ..clipping import Engine, Ghost, NonFiniteGradientError
from ..clipping.engine import Clipped, add_each
from ..clipping.summing import GROUP
from ..core.columns import Codes
from ..core.modules import lay_out, twin
from ..draws import batches
from ..draws.batches import Gathered
from ..draws.persons_rows import Persons, Readings
from ..draws.randomness import Randomness
from ..independence import data_sets, messages
from ..independence.check import IndependenceCheck, Numbers, is_due, numbers_in
from ..independence.fixed_draws import Variant
from ..independence.states import Free, Mixed
from ..independence.watch import OperatorWatch
from ..planning import Plan
from . import checkpoints
from .datasets import PhysicalBatch, Source

if TYPE_CHECKING:
    from .sharded import Shards

#: At most this many extra checks look for padding to different lengths; they end when one has seen two lengths.
PADDING_CHECKS = 3

#: At most this many batches of equal rows, or of one row, are checked while a check is due: they show less.
POOR_CHECKS = 3


@dataclass(frozen=True)
class Issued:
    """A batch that the loop is handed.

    physical  the physical batch that it is made of
    indices   (batch,) data-set indices of its rows
    readings  whose rows they are meant to be; of a checked batch, those of the physical batch
    is_last   True if the draw's sum is complete with it
    variant   the altered form, if the batch is only checked
    masked    places among the persons of those who are left out; other rows are computed there, at weight 0
    is_probe  True if it is only computed to see whether the person in it contributes anything
    """

    physical: PhysicalBatch
    indices: npt.NDArray[np.int64]
    readings: Readings
    is_last: bool = False
    variant: Variant | None = None
    masked: tuple[int, ...] = ()
    is_probe: bool = False

    @property
    def is_whole(self) -> bool:
        """True for a physical batch with all its persons, to be trained on."""
        return self.variant is None and len(self.readings.persons) == len(self.physical.readings.persons)


class Issuer:
    """Decides which batches are issued for a physical batch.

    non_finite     the engine's error on the batch issued last, until the batch is issued again
    adds_nothing   True if the probe issued last contributes nothing
    is_foreign     True if a foreign loop checks the calls of the model itself, and sees no altered batches
    checks_made    number of checks of different records so far
    calls_are_due  True for a batch of which the calls must be checked
    watch          of a batch that is trained on, in a draw with a check
    is_wanted      number of records -> True if a foreign loop wants a batch of them watched in any draw
    gathered       the records of the batch whose calls must be checked
    """

    def __init__(
        self,
        model: nn.Module,
        parameters: Sequence[nn.Parameter],
        source: Source,
        persons: Persons,
        left_out: Callable[[int, int], npt.NDArray[np.int64]],
        shards: Shards | None = None,
    ) -> None:
        self._model, self._parameters, self._device = model, parameters, parameters[0].device
        self._shards = shards
        self._source, self._persons, self._who_left = source, persons, left_out
        self._largest = 1
        self._check: IndependenceCheck | None = None
        self._check_is_due, self._poor_checks = True, POOR_CHECKS
        self._modes: Hashable = None  # of the model's modules at the start of the draw
        self._modes_begun: set[Hashable] = set()
        self._modes_checked: set[Hashable] = set()
        self._padding_checks = PADDING_CHECKS
        self.checks_made = 0
        self.is_foreign, self.calls_are_due = False, False
        self._repeats = True  # whether a batch of the same records is the same again
        self.watch: OperatorWatch | None = None
        self.is_wanted: Callable[[int], bool] = lambda records: False
        self.gathered: Gathered | None = None
        self._earlier: list[Tensor] = []  # of the batch before, in such a draw
        self._watches = self._shows_records = False
        self._numbers: Numbers = {}  # in attributes of modules, when the losses of the batch before were complete
        self._moving: Numbers = {}  # those that the loop changed since, with what they were
        self.non_finite: NonFiniteGradientError | None = None
        self.adds_nothing = False

    def begin_draw(self, step: int, modes: Hashable) -> None:
        """modes: of the model's modules; for each of them a check must be completed"""
        if is_due(step) or modes not in self._modes_begun:
            self._poor_checks = POOR_CHECKS
        self._check_is_due |= is_due(step) or modes not in self._modes_checked
        self._modes_begun.add(modes)
        self._modes = modes
        self._watches, self._earlier, self._numbers = False, [], {}

    def issue(
        self, physical: PhysicalBatch, batch: Any, randomness: Randomness, largest: int
    ) -> Iterator[tuple[Issued, Any]]:
        """Every batch that the loop must process for this physical batch; none has more than so many rows."""
        self._largest = largest
        indices, count = physical.indices, len(physical.indices)
        self.calls_are_due = False
        # The first time that records of different sizes meet, one may be padded to another's length.
        check_is_due = self._check_is_due or (self._source.varies and self._padding_checks > 0)
        # A single record, or copies of one, show less than different ones: these are checked too, once there are any.
        is_poor = check_is_due and (count == 1 or not batches.has_different(batch, count))
        is_checked = check_is_due and (self._poor_checks > 0 or not is_poor)
        if self._shards:
            is_checked = self._shards.begin_batch(physical, is_checked, self._watches, self.is_foreign)
        if is_checked:
            yield from self._checks(physical, batch, randomness)
            self._watches = True
            self.checks_made += not is_poor
            self._poor_checks -= is_poor
            if not is_poor or largest == 1:
                self._check_is_due = False
                self._modes_checked.add(self._modes)
        masked = self._left_out(physical)
        watch = self._begin_watch(batch, count) if self._watches or self.is_wanted(count) else None
        try:
            yield Issued(physical, indices, physical.readings, physical.is_last, masked=masked), batch
        finally:
            if watch is not None:
                watch.end()  # here, too: backward may be called in another thread
        yield from self._without_broken(physical, batch, randomness)

    def _begin_watch(self, batch: Any, records: int) -> OperatorWatch:
        """Watch what the loop computes from a batch that is trained on."""
        self.watch = watch = OperatorWatch(records, is_check=False)
        own = batches.tensors(batch)
        axes = [(t, 0 if t.ndim and len(t) == records else None) for t in own]
        watch.begin(axes, [*map(twin, self._model.parameters()), *self._model.buffers()], self._earlier)
        self._earlier = own
        now = numbers_in(self._model)
        self._moving |= {key: value for key, value in self._numbers.items() if now.get(key, value) != value}
        return watch

    def check_source(self, losses: Tensor) -> None:
        """Raise BatchDependenceError if losses to train on come from another batch than the one that was issued."""
        if self.watch is not None:
            watched, self.watch = self.watch.of(losses), None
            self._numbers = numbers_in(self._model)
            if self.is_foreign:
                return  # the loop around the calls was checked, and they are checked by themselves
            is_free = isinstance(watched.losses, Free) and watched.is_seen and self._shows_records
            if isinstance(watched.losses, Mixed) or is_free:
                raise messages.other_batch()

    def _without_broken(
        self, physical: PhysicalBatch, batch: Any, randomness: Randomness
    ) -> Iterator[tuple[Issued, Any]]:
        """The batch again, as long as gradients are not finite: without the persons at fault.

        If none is found, each person is issued alone.
        """
        readings = physical.readings
        everyone = set(range(len(readings.persons)))
        masked, are_probed = self._left_out(physical), False
        while self.non_finite is not None:
            at_fault, self.non_finite = readings.persons_at(self.non_finite.records), None
            more = tuple(sorted({*masked, *at_fault}))
            if more == masked and not are_probed:
                are_probed, found = True, list(masked)
                for i, probe in enumerate(self._one_by_one(physical, batch, randomness, are_probes=True)):
                    yield probe
                    found += [i] * self.adds_nothing
                more = tuple(sorted(set(found)))
            if more == masked or len(more) == len(everyone):
                yield from self._one_by_one(physical, batch, randomness)
                return
            masked = more
            substitute = readings.places(min(everyone - set(masked)))[0]
            replaced = {place for person in masked for place in readings.places(person)}
            rows = [substitute if i in replaced else i for i in range(len(readings))]
            part = self._gather(physical, batch, randomness).batch(rows)
            yield Issued(physical, physical.indices[rows], readings, physical.is_last, masked=masked), part

    def _checks(self, physical: PhysicalBatch, batch: Any, randomness: Randomness) -> Iterator[tuple[Issued, Any]]:
        """The batch-independence check: the batch in its altered forms."""
        generators = checkpoints.of_generators()  # before records are read again, which moves the generators too
        gathered = self._source.gather(physical, self._device, randomness)
        self._inspect(gathered, physical, batch, randomness)
        is_first = self.checks_made == 0
        self._check = check = self.new_check(gathered, physical, is_first, self._moving)
        for variant, part in check.forms():
            if self.is_foreign:
                check.stop()  # only what the collate function does is compared
                check.refuse_moved()
            else:
                yield Issued(physical, physical.indices[list(variant.rows)], physical.readings, variant=variant), part
        checkpoints.into_generators(generators)
        self._shows_records, self.gathered = check.shows_records, check.gathered
        self._check, self.calls_are_due = None, self.is_foreign
        if check.varies:
            self._padding_checks = 0 if check.saw_other_lengths else self._padding_checks - 1

    def new_check(
        self,
        gathered: Gathered,
        physical: PhysicalBatch,
        is_first: bool,
        moving: Numbers | None = None,
    ) -> IndependenceCheck:
        """A check of these records, in forms of at most as many rows as a physical batch may have."""
        most = min(self._largest, len(self._source) * self._persons.views)
        count, model, parameters = len(physical.indices), self._model, self._parameters
        fewest = 2 if self.is_foreign else 1  # a model that drops dimensions of 1 fails on a single record
        return IndependenceCheck(
            gathered, count, most, physical.step, model, parameters, is_first, fewest, moving or {}
        )

    def _inspect(self, gathered: Gathered, physical: PhysicalBatch, batch: Any, randomness: Randomness) -> None:
        """Refuse a data set or a collate function that does not give these records, and nothing else, again."""
        cause = self._source.inspect(physical, randomness, self._persons.person)
        places = range(len(physical.indices))
        again, before = gathered.batch(places), batches.copied(batch)
        self._repeats = data_sets.is_alike(again, gathered.batch(places))
        if self._repeats and not data_sets.is_alike(again, batch):
            cause = cause or "state"
        gathered.batch(places[::-1])
        if not data_sets.is_alike(batch, before, 0.0):
            cause = cause or "refilled"
        if cause is not None:
            raise data_sets.refusal(cause, self._source.name)

    def stop_watching(self) -> None:
        """End the observation of operators that a check began."""
        if self._check is not None:
            self._check.stop()
        if self.watch is not None:
            self.watch.end()

    def observe(self, losses: Tensor) -> None:
        """Compare the losses of a checked batch with those of its other forms."""
        assert self._check is not None
        self._check.observe(losses)

    def _one_by_one(
        self, physical: PhysicalBatch, batch: Any, randomness: Randomness, are_probes: bool = False
    ) -> Iterator[tuple[Issued, Any]]:
        """One person after the other."""
        readings, gathered = physical.readings, self._gather(physical, batch, randomness)
        left_out = self._left_out(physical)
        for i in range(len(readings.persons)):
            alone, is_last = readings.span(i, i + 1), i == len(readings.persons) - 1
            part = gathered.batch(readings.places(i))
            masked = (0,) if i in left_out else ()
            is_last = is_last and physical.is_last and not are_probes
            yield Issued(physical, alone.rows, alone, is_last, masked=masked, is_probe=are_probes), part

    def _left_out(self, physical: PhysicalBatch) -> tuple[int, ...]:
        """Places among the persons of those who left the registry: they were drawn, and contribute nothing.

        They are left out after the draw, so that no other person's coin and no noise changes.
        """
        if physical.is_filler:
            return tuple(range(len(physical.readings.persons)))
        people = self._who_left(physical.phase, physical.step)
        return tuple(np.flatnonzero(np.isin(physical.readings.persons, people)).tolist()) if len(people) else ()

    def _gather(self, physical: PhysicalBatch, batch: Any, randomness: Randomness) -> Gathered:
        """The records of a physical batch, read and collated again.

        If a collate function does not give the same batch twice, they are cut from the batch at hand.
        """
        count = len(physical.indices)
        gathered = self._source.gather(physical, self._device, randomness)
        return gathered if self._repeats else Gathered(lambda rows: batches.take(batch, rows, count))


class Clipper:
    """The engine, with the clip norm and the weight of each person; without persons, of each record."""

    def __init__(
        self,
        engine: Engine,
        model: nn.Module,
        parameters: Sequence[nn.Parameter],
        plan: Plan,
        group: Codes,
        relaid: Sequence[nn.Module],
    ) -> None:
        self._engine, self._plan, self._group, self._relaid = engine, plan, group, relaid
        self._device = parameters[0].device
        engine.attach(model, parameters)

    def begin(self, issued: Issued, largest: int) -> None:
        """Before the forward pass. largest: rows of a physical batch, at most"""
        GROUP.set(usual(self._plan.phases[issued.physical.phase].expected_batch, largest))
        self._engine.begin(len(issued.indices))

    def sum(self, issued: Issued, losses: Tensor) -> list[Tensor]:
        """One float64 tensor per parameter. Raises NonFiniteGradientError as the engine does."""
        return self._engine.clipped_sum(losses, *self._bounds(issued), **_sizes(issued))

    def clipped(self, issued: Issued, losses: Tensor) -> Clipped | None:
        """What adds this sum to one total per parameter. An engine's own tensors stay: it may use them again.

        None where it was added over all ranks already (`ShardedEngine`). Raises NonFiniteGradientError as the engine
        does. Nothing was added then.
        """
        if type(self._engine) is Ghost:
            return self._engine.clipped(losses, *self._bounds(issued), **_sizes(issued))
        parts = self.sum(issued, losses)
        return partial(add_each, parts) if parts else None

    def _bounds(self, issued: Issued) -> tuple[Tensor, Tensor]:
        """(clip norms, weights) of these persons."""
        phase = self._plan.phases[issued.physical.phase]
        group = self._group[issued.readings.persons]
        weight = phase.weight[group]
        weight[list(issued.masked)] = 0.0
        clip_norm = phase.clip_norm[group]
        return torch.from_numpy(clip_norm).to(self._device), torch.from_numpy(weight).to(self._device)

    def detach(self) -> None:
        """Remove the engine's hooks, and restore the model's layout."""
        self._engine.detach()
        lay_out(self._relaid, torch.contiguous_format)


def _sizes(issued: Issued) -> dict[str, Any]:
    """The argument that engines need for persons."""
    return {} if issued.readings.is_of_records else {"sizes": issued.readings.sizes.tolist()}


def usual(expected: float, largest: int) -> int:
    """The records in most physical batches, at most. By public numbers alone: those expected in a draw, and the limit.

    >>> usual(32, 512), usual(1000, 512), usual(1000, 8)
    (55, 512, 8)
    """
    part = expected / max(1, math.ceil(expected / largest))
    return min(largest, math.ceil(part + 4 * math.sqrt(part)))
