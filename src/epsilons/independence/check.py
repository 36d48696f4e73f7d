"""The batch-independence check of one physical batch, in its altered forms; nothing is learnt from them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..core.checksums import CheckSums
from ..core.modules import named_modules, sharded
from ..draws import batches
from ..draws.batches import Gathered, is_equal, leaves, sizes_of, tensors
from . import comparison, messages
from .comparison import Reference
from .fixed_draws import Coins, Variant, Variants
from .states import Mixed, Rows, State
from .watch import OperatorWatch, Read, Watched

# -- Forward passes that write to their model: values computed from the data would enter it without clipping or
# noise
#
# And numbers in attributes of modules, which a loop may write to.

#: Numbers in attributes of modules, by module and name.
Numbers = dict[tuple[nn.Module, str], float]


@dataclass(frozen=True)
class Contents:
    """Checksums of what a model keeps: parameters, buffers, and plain attributes outside any graph.

    names   of the tensors
    kept    their checksums
    """

    names: tuple[str, ...]
    kept: CheckSums

    @classmethod
    def of(cls, model: nn.Module) -> Contents:
        tensors = dict([*model.named_parameters(), *model.named_buffers()])
        attributes = {
            f"{name}{attribute}": value
            for name, module in named_modules(model)
            for attribute, value in vars(module).items()
            if isinstance(value, Tensor) and not value.requires_grad
        }
        tensors |= attributes
        held = list(map(sharded, tensors.values()))
        return cls(tuple(tensors), CheckSums.of(held, held))

    def check(self, model: nn.Module) -> None:
        """Refuse a model that a forward pass wrote to, by whatever way. Raises UnsupportedLayerError."""
        now = Contents.of(model)
        if self.names != now.names:
            raise messages.writes(sorted({*self.names} ^ {*now.names}))
        if changed := self.kept.changed(now.kept):
            raise messages.writes(sorted(self.names[k] for k in changed))


def numbers_in(model: nn.Module) -> Numbers:
    return {
        (module, name): value
        for _, module in named_modules(model)
        for name, value in vars(module).items()
        if type(value) in (int, float)
    }


@contextmanager
def set_to(numbers: Numbers) -> Iterator[None]:
    """Set these attributes inside. Afterwards they are as before."""
    before = {(module, name): getattr(module, name) for module, name in numbers}
    try:
        for (module, name), value in numbers.items():
            setattr(module, name, value)
        yield
    finally:
        for (module, name), value in before.items():
            setattr(module, name, value)


# -- The batch-independence check of one physical batch, in its altered forms; nothing is learnt from them


def is_due(step: int) -> bool:
    """True for steps 0, 1, 10, 100, 1000, …"""
    return step == 0 or 10 ** round(math.log10(step)) == step


class IndependenceCheck:
    """The check of one physical batch.

        for variant, batch in check.forms():
            losses = …  # the caller's code
            check.stop()
            check.observe(losses)

    gathered     its records, to be put together in other ways; watched while a collate function does so
    count        how many records it holds
    most         how many a physical batch can hold
    step         of the run
    is_thorough  whether any two records are to be separated where operators do not show everything
    fewest       how many records a form holds at least, by copies, if there are several
    earlier      numbers in attributes that were other ones before in the same draw
    """

    def __init__(
        self,
        gathered: Gathered,
        count: int,
        most: int,
        step: int,
        model: nn.Module,
        parameters: Sequence[nn.Parameter],
        is_thorough: bool = False,
        fewest: int = 1,
        earlier: Numbers | None = None,
    ) -> None:
        is_collated = gathered.name is not None and count > 1
        self.gathered = check_collate(gathered, step, count) if is_collated else gathered
        lengths = [1] * count if gathered.records is None else sizes_of(gathered.records)
        self._variants = Variants(count, most, step, lengths, fewest)
        self.varies, self.saw_other_lengths = self._variants.varies, False
        self._step, self._model, self._parameters, self._is_thorough = step, model, list(parameters), is_thorough
        self._coins, self._earlier = Coins(step), earlier or {}
        self._contents = Contents.of(model)
        self._watch = OperatorWatch(count)
        self._variant: Variant | None = None  # the form at hand, with its shapes and what its collate function did
        self._shapes: list[Any] = []
        self._collated: Collated | None = None
        self._reference: Reference | None = None
        self._reads: list[tuple[Read, int]] = []  # with the number of operators before the losses
        self.shows_records = False  # whether the operators show that losses depend on records

    def forms(self) -> Iterator[tuple[Variant, Any]]:
        """(form, its batch), watched from here on. At the end, raises what `observe` raises.

        The forms that come later may depend on the losses of those before.
        """
        gathered, variants, count = self.gathered, self._variants, self._variants.count
        whole, name = gathered.calm(range(count)), gathered.name
        kept = variants.halves[0]
        other = gathered.calm(variants.exchanged(kept)) if name is not None and count > 1 else None
        axes = axes_of_records(whole, other, kept, count)

        def begun(variant: Variant) -> tuple[Variant, Any]:
            self.stop()  # if another thread handed over the losses
            batch = gathered.calm(variant.rows)
            if name is not None:
                self._collated = compare(whole, batch, variant, count, name)
                self.saw_other_lengths |= self._collated.lengths is not None
            self._variant, self._shapes = variant, shapes_of(batch)
            self._watch = OperatorWatch(len(variant.rows), self._coins)
            constants = [*self._model.parameters(), *self._model.buffers(), *self._parameters]
            self._watch.begin(with_axes(batch, axes, len(variant.rows)), constants)
            return variant, batch

        yield from map(begun, variants)
        if self._earlier:
            with set_to(self._earlier):
                yield begun(Variant(range(count), range(count), range(count), "earlier"))
        self.stop()
        self._conclude()

    def stop(self) -> None:
        """Watch no more: the forward pass of this form is over, or the loop was left."""
        self._watch.end()

    def refuse_moved(self) -> None:
        """Raise BatchDependenceError if the collate function puts records into other places in the form at hand."""
        if self._collated is not None and self._collated.is_moved:
            raise messages.collate(self._collated.name, "changes")

    def observe(self, losses: Tensor) -> None:
        """The losses of the form at hand. Raises BatchDependenceError, with the cause, and UnsupportedLayerError."""
        variant, watched, reference = self._variant, self._watch.of(losses), self._reference
        assert variant is not None
        self._check_operators(watched)
        self._reads += [(read, watched.produced) for read in watched.reads]
        if reference is None:
            self._contents.check(self._model)
            self._begin(losses, watched)
            return
        is_padded = self._shapes != reference.shapes  # records have another length in this form
        difference = (
            comparison.difference(reference.watched, watched) if variant.kind == "resized" and not is_padded else None
        )
        if difference is not None:
            raise messages.depends_on_number(*difference, reference.watched.records, watched.records)
        if not reference.has_same_losses(variant, losses, watched, is_padded):
            is_moved = self._collated is not None and self._collated.is_moved
            collated = self._collated if is_padded or is_moved else None
            raise messages.moved("losses", variant.kind, collated, self._model)
        if not reference.has_same_gradient(variant, losses, self._parameters):
            raise messages.moved("gradients", variant.kind, self._collated, self._model)

    def _begin(self, losses: Tensor, watched: Watched) -> None:
        self.shows_records = isinstance(watched.losses, Rows)
        is_open = not isinstance(watched.losses, Rows) or any(read.at < watched.produced for read in watched.reads)
        if is_open and self._is_thorough and self._variants.count > 2:
            self._variants.separate_all()
        self._reference = Reference.of(losses, watched, self._shapes, self._step)
        # Padding may move a loss by less than rounding does in a model that has learnt nothing yet; gradients show it.
        shortest = [[self._variants.shortest]] if self.varies else []
        for kept in [*self._variants.halves, *shortest]:
            self._reference.keep_gradient(losses, kept, self._parameters)

    def _check_operators(self, watched: Watched) -> None:
        losses, records = watched.losses, watched.records
        if records > 1 and isinstance(losses, Mixed):
            raise messages.mixed_losses(losses, self._model)
        is_whole = isinstance(losses, Rows) and losses.count == records > 1
        if is_whole and losses != Rows(0, 1, 0, records):
            raise messages.unordered_losses(self._model)

    def _conclude(self) -> None:
        """Raises BatchDependenceError for a decision that was always the same; UnsupportedLayerError."""
        self._contents.check(self._model)
        outcomes: dict[str, set[str]] = {}
        for read, _ in self._reads:
            outcomes.setdefault(read.line, set()).add(read.value)
        for read, produced in self._reads:
            if read.at >= produced or (read.is_truth and len(outcomes[read.line]) > 1):
                continue  # the losses do not depend on it; or both outcomes gave the same losses
            if read.is_decision():
                raise messages.decision(read)


# -- Collate functions: a record must come out of one the same beside any other records, except for padding


@dataclass(frozen=True)
class Collated:
    """What a collate function did to a form, for messages.

    name      of the function
    lengths   two sizes that records were padded to; None if all were padded alike
    is_moved  whether records came out in another order, or numbers of places changed: sound if the losses undo it
    """

    name: str
    lengths: tuple[int, int] | None = None
    is_moved: bool = False


def check_collate(gathered: Gathered, step: int, records: int) -> Gathered:
    """Watch a collate function, and refuse one that computes across records, or decides by several of them.

    Gives the records as they are put together from here on. They are cut from one batch if the function keeps them
    apart and draws from a generator that is not seeded here. Raises BatchDependenceError.
    """
    assert gathered.collate is not None
    assert gathered.name is not None
    watch = OperatorWatch(records, Coins(step))
    loose = gathered.copies()
    watch.begin_apart([tensors(record) for record in loose])
    try:
        batch = gathered.collate(loose)
    finally:
        watch.end()
    states = [watch.state(tensor) for tensor in tensors(batch)]
    for state, tensor in zip(states, tensors(batch), strict=True):
        if isinstance(state, Mixed) and tensor.is_floating_point():
            raise messages.collate(gathered.name, "computes", state.cause)
    for read in watch.watched.reads:
        if read.is_decision():
            raise messages.collate(gathered.name, "decides", read.line)
    return _repeatable(gathered, states, records)


def _repeatable(gathered: Gathered, states: Sequence[State], records: int) -> Gathered:
    whole = gathered.batch(range(records))
    if batches.is_same(whole, gathered.batch(range(records)), unknown=True):
        return gathered
    if all(isinstance(state, Rows) and (state.first, state.count) == (0, records) for state in states):
        return Gathered(lambda places: batches.take(whole, places, records), gathered.records)
    raise messages.collate(str(gathered.name), "is not repeatable")


def compare(whole: Any, part: Any, variant: Variant, records: int, name: str) -> Collated:
    """Refuse a collate function that gives a record other values beside other records, except for padding.

    Raises BatchDependenceError. What it cannot compare is left to the losses, and so is another order of records.
    """
    lengths, is_moved = None, False
    ones, others = leaves(whole), leaves(part)
    if len(ones) != len(others):
        return Collated(name)
    for one, other in zip(ones, others, strict=True):
        if not (isinstance(one, Tensor) and isinstance(other, Tensor) and one.ndim == other.ndim > 0):
            continue
        if (len(one), len(other)) != (records, len(variant.rows)):
            continue
        a, b = one[list(variant.there)], other[list(variant.here)]
        if a.shape != b.shape:
            axis = next(k for k in range(1, a.ndim) if a.shape[k] != b.shape[k])
            lengths = lengths or (min(b.shape[axis], a.shape[axis]), max(a.shape[axis], b.shape[axis]))
        elif not is_equal(a, b):
            is_place = a.ndim == 1 and not a.is_floating_point()
            if not is_place and not _rows(other) <= _rows(one):
                raise messages.collate(name, "changes")
            is_moved = True
    return Collated(name, lengths, is_moved)


def _rows(column: Tensor) -> set[bytes]:
    """Its rows, without their order."""
    flat = column.detach().cpu().reshape(len(column), -1).contiguous()
    return {row.view(torch.uint8).numpy().tobytes() for row in flat}


# -- where the records of a batch lie ------------------------------------------------------------------------------


def shapes_of(batch: Any) -> list[Any]:
    """The shapes of all tensors, without the number of records."""
    return [(tuple(t.shape[1:]), t.dtype) for t in tensors(batch)]


def axes_of_records(batch: Any, exchanged: Any | None, kept: Sequence[int], records: int) -> list[int | None]:
    """For every tensor of a batch, the axis along which its records lie; None if it is not known.

    exchanged  the batch with some records replaced by others, and `kept` left in their places: what changed shows the
               axis. None: it is the first
    """
    axes: list[int | None] = []
    others: list[Any] = [None] * len(tensors(batch)) if exchanged is None else tensors(exchanged)
    for tensor, other in zip(tensors(batch), others, strict=False):
        searched = range(tensor.ndim if exchanged is not None else min(tensor.ndim, 1))
        possible = [axis for axis in searched if tensor.shape[axis] == records]
        if isinstance(other, Tensor) and other.shape == tensor.shape:
            index = torch.tensor(list(kept), device=tensor.device)
            possible = [a for a in possible if is_equal(tensor.index_select(a, index), other.index_select(a, index))]
        axes.append(possible[0] if possible else None)
    return axes


def with_axes(batch: Any, axes: Sequence[int | None], records: int) -> list[tuple[Tensor, int | None]]:
    """The tensors of a form of that batch, each with the axis of its records."""
    known = [*axes, *(None for _ in tensors(batch))]
    return [
        (tensor, axis if axis is not None and tensor.ndim > axis and tensor.shape[axis] == records else None)
        for tensor, axis in zip(tensors(batch), known, strict=False)
    ]
