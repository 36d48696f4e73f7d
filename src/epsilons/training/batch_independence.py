"""The batch-independence check: does any record move another's loss or gradient?

Before a physical batch is used, it is handed to the loop in a few altered forms, and nothing is learnt from them:

    as it is      the form that all others are compared with
    exchanged     some records kept, the others replaced by copies of one of them; every record is kept in some form
    fewer         one record less; half of them; one alone; the shortest one alone, so that padding has another length

Three things must hold. No operator of a form may have mixed records on the way to the losses (`operator_watch`). The
forms of other sizes must consist of the same operators with the same arguments, up to sizes that grow with the number
of records. And every record that was kept must have the loss it has in the batch as it is, and so must a random
combination of their gradients. The first two need no values, so nothing can be too small, too rare or hidden by an
outlier. The third covers what has no rule: values that pass through Python, operators that move records, gradients that
hooks or a backward pass of one's own alter. Then more exchanged forms are tried, so that any two records are
in different halves at least once.

A collate function is examined on its own: a record must come out of it the same in every company, but for padding.

What it cannot see is on the page docs/limits.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from ..errors import BatchDependenceError, DataError, UnsupportedLayerError
from . import batches
from .clipping.loop import dense
from .datasets import Gathered
from .decisions import decides
from .operator_rules import Mixed, Rows, Unknown
from .operator_watch import Coins, OperatorWatch, Read, Step, Watched

#: How far apart two losses of a record may be: relative to the loss, and in units of the last place of what it was
#: computed from. In a batch of the same shapes nothing but order of sums can differ; in another, kernels may.
SAME, SAME_PLACES = 1e-5, 64
RESIZED, RESIZED_PLACES = 1e-4, 1024
#: The same where a part is computed in 16 bits.
COARSE = 0.05
#: How far apart two gradients may be, relative to their norm.
SAME_GRADIENT = 1e-4

_PLAIN = (bool, int, float, complex, str, bytes, type(None))

WAY_OUT = "Or set performance=Performance(max_physical_batch=1), which computes every record alone."


def is_due(step: int) -> bool:
    """True for steps 0, 1, 10, 100, 1000, …"""
    return step == 0 or 10 ** round(math.log10(step)) == step


@dataclass(frozen=True)
class Variant:
    """One altered form of a physical batch of n records.

    rows   the record that stands in each place
    kept   (place here, place in the batch) of the records that are compared
    kind   "as it is", "exchanged", "fewer" or "alone"
    """

    rows: tuple[int, ...]
    kept: tuple[tuple[int, int], ...]
    kind: str


@dataclass(frozen=True)
class Collated:
    """What a collate function did, for messages.

    name      of the function
    lengths   two sizes that records were padded to; None if all were padded alike
    is_moved  whether records came out in another order, or numbers of places changed: sound if the losses undo it
    """

    name: str
    lengths: tuple[int, int] | None = None
    is_moved: bool = False


@dataclass(frozen=True)
class _Form:
    """What came of the batch as it is.

    losses     (records,) 64-bit
    unit       (records,) one unit in the last place of what each loss was computed from
    gradients  of a random combination of losses, for each set of kept records
    """

    losses: Tensor
    unit: Tensor
    gradients: dict[tuple[int, ...], list[Tensor | None]]
    watched: Watched
    shapes: tuple[Any, ...]


class IndependenceCheck:
    """The check of one physical batch.

    count       how many records it holds
    step        of the run: which halves are exchanged changes from check to check
    shortest    place of the record that is padded least alone; None if records are of one size
    longest     place of one that is padded to the batch's own length; None if all are
    is_thorough whether any two records are to be separated where operators tell nothing
    """

    def __init__(
        self,
        count: int,
        step: int,
        model: nn.Module,
        parameters: Sequence[nn.Parameter],
        shortest: int | None = None,
        longest: int | None = None,
        is_thorough: bool = False,
    ) -> None:
        self.count, self._step, self._model, self._parameters = count, step, model, list(parameters)
        self._shortest, self._longest, self._is_thorough = shortest, longest, is_thorough
        self._held = contents(model)
        self._collated: Collated | None = None
        self._coins = Coins(step)
        self._whole: _Form | None = None
        self._reads: list[tuple[Read, int]] = []  # with the number of operators before the losses
        numbers = np.random.default_rng(step)
        half = np.sort(numbers.permutation(count)[: count // 2]).tolist()
        self._halves = [half, sorted(set(range(count)) - set(half))] if count > 1 else [[0]]
        self._weights = torch.from_numpy(0.5 + numbers.random(count))
        self.saw_other_lengths = False

    def variants(self) -> Iterator[Variant]:
        """The forms to be handed out, in order; what is due next may depend on what came of those before."""
        everyone = tuple(range(self.count))
        yield Variant(everyone, tuple((i, i) for i in everyone), "as it is")
        if self.count == 1:
            yield Variant(everyone, ((0, 0),), "as it is")
            return
        for kept in self._halves:
            yield Variant(self._filled(kept), tuple((i, i) for i in kept), "exchanged")
        longest = self.count - 1 if self._longest is None else self._longest
        dropped = 0 if longest != 0 else 1  # the places of all others change
        half = tuple(sorted({*everyone[: self.count // 2], longest}))
        for rows in dict.fromkeys([tuple(i for i in everyone if i != dropped), half]):
            if 1 < len(rows) < self.count:
                yield Variant(rows, tuple(enumerate(rows)), "fewer")
        alone = [longest] if self._shortest is None else [longest, self._shortest]
        for place in dict.fromkeys(alone):
            yield Variant((place,), ((0, place),), "alone")

    @property
    def kept(self) -> list[int]:
        """The places whose records stay in the first exchanged form."""
        return self._halves[0]

    @property
    def exchanged(self) -> tuple[int, ...]:
        """The rows of the first exchanged form."""
        return self._filled(self.kept)

    def _filled(self, kept: Sequence[int]) -> tuple[int, ...]:
        """Others replaced by copies of one record: the longest, so that nothing is padded to another length."""
        fill = kept[-1] if self._longest is None else self._longest
        return tuple(i if i in set(kept) else fill for i in range(self.count))

    def watch(self, variant: Variant) -> OperatorWatch:
        """For the forward pass of this form."""
        return OperatorWatch(len(variant.rows), self._coins)

    def collated(self, found: Collated | None) -> None:
        """What the collate function did to the form at hand."""
        self._collated = found
        self.saw_other_lengths |= found is not None and found.lengths is not None

    def observe(self, variant: Variant, losses: Tensor, watched: Watched, shapes: tuple[Any, ...]) -> None:
        """Take in what came of a form. Raises BatchDependenceError, with the cause, and UnsupportedLayerError."""
        if self._whole is None:
            check_contents(self._held, self._model)
        self._check_operators(watched)
        self._reads += [(read, watched.produced) for read in watched.reads]
        if variant.kind == "as it is" and self._whole is None:
            self._begin(losses, watched, shapes)
            return
        assert self._whole is not None
        is_resized = shapes != self._whole.shapes
        if variant.kind == "fewer":
            self._check_streams(self._whole.watched, watched, is_resized)
        self._check_losses(variant, losses, watched, is_resized or variant.kind in ("fewer", "alone"))
        kept = tuple(place for _, place in variant.kept)
        if kept in self._whole.gradients:
            own = self._combination(losses, [i for i, _ in variant.kept], kept)
            if not _same_gradient(self._whole.gradients[kept], own):
                raise BatchDependenceError(self._lesson("gradients", self._collated, variant.kind))

    def conclude(self) -> None:
        """Once all forms were seen.

        Raises BatchDependenceError for a decision that was always the same; UnsupportedLayerError.
        """
        check_contents(self._held, self._model)
        outcomes: dict[str, set[str]] = {}
        for read, _ in self._reads:
            outcomes.setdefault(read.line, set()).add(read.value)
        for read, produced in self._reads:
            if read.at >= produced or (read.is_truth and len(outcomes[read.line]) > 1):
                continue  # the losses do not depend on it; or both ways were gone, and came to the same losses
            if _is_decision(read):
                raise BatchDependenceError(
                    f"The code at {read.line} decides by values of several records what is computed next, so one "
                    "record can move the losses of others, and this check saw one outcome only. Decide per record "
                    f"with torch.where, or after private.backward. {WAY_OUT}"
                )

    # -- what must hold --------------------------------------------------------------------------------

    def _check_operators(self, watched: Watched) -> None:
        losses = watched.losses
        if watched.records > 1 and isinstance(losses, Mixed):
            raise BatchDependenceError(
                f"The losses of a physical batch depend on one another: {losses.cause} computes across records, so no "
                f"gradient can be clipped alone. {self._suspects() or _across(losses.cause.operator)} {WAY_OUT}"
            )
        is_whole = isinstance(losses, Rows) and losses.count == watched.records > 1
        if is_whole and isinstance(losses, Rows) and losses != Rows(0, 1, 0, watched.records):
            raise BatchDependenceError(
                "The losses are not in the order of the records in the physical batch, so each would be clipped by "
                f"another record's clip norm. {self._suspects() or 'Return one loss per record, in order.'} {WAY_OUT}"
            )

    def _check_streams(self, whole: Watched, other: Watched, is_resized: bool) -> None:
        """Refuse what depends on the number of records."""
        is_free = isinstance(whole.losses, Unknown) or whole.is_split or is_resized
        # Where one record is cut from the others, or Python saw other values, operators may differ for other reasons.
        if is_free or _seen_by_python(whole) != _seen_by_python(other):
            return
        one, two = whole.relevant, other.relevant
        for a, b in zip(one, two, strict=False):
            difference = _difference(a, b, whole.records, other.records)
            if difference:
                raise BatchDependenceError(self._by_number(a, difference, whole.records, other.records))
        if len(one) != len(two):
            longer = one if len(one) > len(two) else two
            step = longer[min(len(one), len(two))]
            only = "runs for one number of records only"
            raise BatchDependenceError(self._by_number(step, only, whole.records, other.records))

    def _by_number(self, step: Step, difference: str, one: int, other: int) -> str:
        where = f" at {step.line}" if step.line else ""
        return (
            f"The losses depend on the number of records in the physical batch: the operator {step.operator}{where} "
            f"{difference} ({one} and {other} records). That number changes with every record, and is not public. Use "
            "a constant, e.g. the plan's expected batch; private.step() takes the average."
        )

    def _check_losses(self, variant: Variant, losses: Tensor, watched: Watched, is_resized: bool) -> None:
        assert self._whole is not None
        here, there = (torch.tensor(places, device=losses.device) for places in zip(*variant.kept, strict=True))
        before, after = self._whole.losses[there], losses.detach().double()[here]
        relative, places = (RESIZED, RESIZED_PLACES) if is_resized else (SAME, SAME_PLACES)
        if watched.is_coarse and is_resized:
            relative, places = COARSE, 0
        allowed = relative * before.abs() + places * self._whole.unit[there]
        if watched.is_coarse and is_resized:
            allowed = allowed + COARSE * _typical(self._whole.losses)
        allowed = torch.where(torch.isfinite(allowed), allowed, 0.0)
        # Negated, so that NaN differs; a record that is not finite in both is dealt with in clipping.
        is_same = ((before - after).abs() <= allowed) | (before == after) | (before.isnan() & after.isnan())
        if not bool(is_same.all()):
            is_collated = is_resized or (self._collated is not None and self._collated.is_moved)
            raise BatchDependenceError(self._lesson("losses", self._collated if is_collated else None, variant.kind))

    def _begin(self, losses: Tensor, watched: Watched, shapes: tuple[Any, ...]) -> None:
        unit = torch.finfo(losses.dtype).eps * (
            losses.detach().abs().double() if watched.scale is None else watched.scale.double()
        )
        unit = torch.where(torch.isfinite(unit), unit, 0.0)
        is_open = not isinstance(watched.losses, Rows) or any(read.at < watched.produced for read in watched.reads)
        if is_open and self._is_thorough and self.count > 2:
            places = range(max(1, (self.count - 1).bit_length()))
            halves = [[i for i in range(self.count) if (i >> bit & 1) == side] for bit in places for side in (0, 1)]
            self._halves = [half for half in halves if half]
        self._whole = _Form(losses.detach().double().clone(), unit, {}, watched, shapes)
        # Padding may move a loss by less than rounding does in a model that has learnt nothing yet; gradients show it.
        alone = [] if self._shortest is None else [[self._shortest]]
        for kept in [*self._halves, *alone]:
            self._whole.gradients[tuple(kept)] = self._combination(losses, kept, tuple(kept))

    def _combination(self, losses: Tensor, here: Sequence[int], places: tuple[int, ...]) -> list[Tensor | None]:
        """The gradient of a random combination of these records' losses, none of which is too large for the others."""
        assert self._whole is not None
        before = self._whole.losses[list(places)]
        size = before.abs() + _typical(self._whole.losses)
        weight = self._weights.to(size.device)[list(places)] / torch.where(size > 0, size, 1.0)
        is_usable = torch.isfinite(before)
        rows = torch.tensor(list(here), device=losses.device)[is_usable]
        total = (losses[rows] * weight[is_usable].to(losses.dtype)).sum()
        found = torch.autograd.grad(total, self._parameters, retain_graph=True, allow_unused=True)
        return [None if g is None else dense(g) for g in found]

    # -- messages --------------------------------------------------------------------------------------

    def _suspects(self) -> str:
        found = [
            f"{name or 'the model'} ({type(module).__name__} without batch_first=True)"
            for name, module in self._model.named_modules()
            if isinstance(module, nn.RNNBase | nn.MultiheadAttention) and not module.batch_first
        ]
        return f"Look first at {', '.join(found[:3])}: it reads the first dimension as time." if found else ""

    def _lesson(self, what: str, collated: Collated | None, kind: str = "exchanged") -> str:
        done = {
            "exchanged": "Exchanging some records",
            "fewer": "Leaving out some records",
            "alone": "Leaving out all others",
        }
        start = f"{done.get(kind, 'Handing out the same records again')} of a physical batch moved the {what} of "
        start += "the one that was left" if kind == "alone" else "others" if kind in done else "some"
        start += ", so no gradient can be clipped alone. "
        if collated is not None and collated.lengths is not None:
            return (
                f"{start}Your collate function {collated.name} pads {collated.lengths[0]} → {collated.lengths[1]}, and "
                "the model or the loss reads the padding: mask it (attention_mask, packed sequences, a mean over the "
                f"record's own length), or pad all records to one length. {WAY_OUT}"
            )
        if collated is not None and collated.is_moved:
            return _changed(collated.name)
        if kind == "as it is":
            return (
                f"{start}Usual causes: state that a forward pass leaves for the next one, or random numbers drawn from "
                "another source than torch."
            )
        return start + (
            self._suspects()
            or "Usual causes: a layer, loss or collate function that looks across the batch (normalisation, MixUp, "
            "division by its size, unmasked padding) or takes it for time (batch_first=True), a reshape that runs "
            "records together, state that a forward pass leaves, or random numbers drawn from another source than "
            f"torch. {WAY_OUT}"
        )


def _is_decision(read: Read) -> bool:
    """Whether the caller's code decides by values of several records."""
    state = read.state
    is_one = isinstance(state, Rows) and state.axis is None
    is_each = not isinstance(state, Mixed)
    return read.is_own and not is_one and decides(read.places, is_each, read.is_exact, read.is_truth)


def _seen_by_python(form: Watched) -> list[tuple[str, str]]:
    """What was read before the losses were complete and may have shaped them: (line, value) in order.

    A number that is no operator's argument has shaped nothing, or it decided something (`IndependenceCheck.conclude`).
    """
    used = {text for step in form.relevant for text in (*step.scalars, *map(repr, step.sizes))}
    used |= {repr(value) for step in form.relevant for _, values in step.values for value in values}
    return [
        (read.line, read.value)
        for read in form.reads
        if read.at < form.produced and (read.is_truth or read.is_many or read.value in used)
    ]


def _typical(losses: Tensor) -> Tensor:
    """The median size of the losses that are finite and not 0; 0 if there are none."""
    sizes = losses.abs()
    sizes = sizes[torch.isfinite(sizes) & (sizes > 0)]
    return sizes.median() if len(sizes) else losses.new_zeros(())


def _across(operator: str) -> str:
    if "batch_norm" in operator:
        return "Use a norm within each record, e.g. nn.GroupNorm."
    return "Compute along a record's own dimensions, or with constants fixed beforehand."


def _difference(a: Step, b: Step, one: int, other: int) -> str:
    """How two steps differ beyond sizes that grow with the number of records; "" if they do not."""
    if a.operator != b.operator:
        return f"stands where {b.operator} stands for another number"
    for left, right in zip(a.scalars, b.scalars, strict=False):
        if left != right:
            return f"gets {left[:40]} for one and {right[:40]} for the other"
    for x, y in zip(a.sizes, b.sizes, strict=False):
        if x != y and x * other != y * one:
            return f"gets {x} for one and {y} for the other"
    for (size, u), (its, v) in zip(a.values, b.values, strict=False):
        if size != its and size * other == its * one:
            continue  # a value for each record
        if size != its or not all(p == q or (p != p and q != q) for p, q in zip(u, v, strict=True)):
            return f"gets {_short(u)} for one and {_short(v)} for the other"
    return ""


def _short(values: tuple[Any, ...]) -> str:
    shown = ", ".join(f"{v:g}" if isinstance(v, float) else str(v) for v in values[:3])
    return shown if len(values) <= 3 else f"{shown}, …"


def _same_gradient(one: list[Tensor | None], other: list[Tensor | None]) -> bool:
    squares = [0.0, 0.0]
    for a, b in zip(one, other, strict=True):
        present = a if a is not None else b
        if present is None:
            continue
        left = torch.zeros_like(present) if a is None else a
        right = torch.zeros_like(present) if b is None else b
        squares[0] += float((left.double() - right.double()).square().sum())
        squares[1] += float(left.double().square().sum())
    distance, size = (math.sqrt(total) if total >= 0 else math.nan for total in squares)
    return distance <= SAME_GRADIENT * size + 1e-12 or not size < math.inf  # broken records are dealt with in clipping


# -- batches ---------------------------------------------------------------------------------------------------


def shapes_of(batch: Any) -> tuple[Any, ...]:
    """What of the tensors' shapes does not count records."""
    return tuple(
        (tuple(t.shape[1:]), t.dtype) if isinstance(t, Tensor) else None for t in tree_flatten(batches.plain(batch))[0]
    )


def axes_of_records(batch: Any, exchanged: Any | None, kept: Sequence[int], records: int) -> list[int | None]:
    """For every leaf of a batch, the axis along which its records lie; None for what is no tensor, or is not known.

    exchanged   the batch with some records replaced by others, and `kept` left in their places: what changed shows the
                axis. None: it is the first
    """
    leaves = tree_flatten(batches.plain(batch))[0]
    others = [None] * len(leaves) if exchanged is None else tree_flatten(batches.plain(exchanged))[0]
    found: list[int | None] = []
    for leaf, other in zip(leaves, others, strict=False):
        if not isinstance(leaf, Tensor):
            found.append(None)
            continue
        axes = [
            axis
            for axis in range(leaf.ndim if exchanged is not None else min(leaf.ndim, 1))
            if leaf.shape[axis] == records
        ]
        if isinstance(other, Tensor) and other.shape == leaf.shape:
            index = torch.tensor(list(kept), device=leaf.device)
            axes = [a for a in axes if _equal(leaf.index_select(a, index), other.index_select(a, index))]
        found.append(axes[0] if axes else None)
    return found


def with_axes(batch: Any, axes: Sequence[int | None], records: int) -> list[tuple[Tensor, int | None]]:
    """The tensors of a form of that batch, each with the axis of its records."""
    leaves = tree_flatten(batches.plain(batch))[0]
    known = [*axes, *(None for _ in leaves)]
    return [
        (leaf, axis if axis is not None and leaf.ndim > axis and leaf.shape[axis] == records else None)
        for leaf, axis in zip(leaves, known, strict=False)
        if isinstance(leaf, Tensor)
    ]


def check_collate(gathered: Gathered, step: int, records: int) -> Gathered:
    """Watch a collate function, and refuse one that computes across records, or decides by several of them.

    The records as they are to be put together: cut from one batch where a collate function that keeps them apart draws
    from a generator of its own. Raises BatchDependenceError.
    """
    assert gathered.collate is not None
    assert gathered.name is not None
    loose = gathered.copies()
    watch = OperatorWatch(records, Coins(step))
    watch.begin_apart(
        [[leaf for leaf in tree_flatten(batches.plain(record))[0] if isinstance(leaf, Tensor)] for record in loose]
    )
    try:
        batch = gathered.collate(loose)
    finally:
        watch.end()
    name = gathered.name
    states = [watch.state(leaf) for leaf in tree_flatten(batches.plain(batch))[0] if isinstance(leaf, Tensor)]
    values = [leaf.is_floating_point() for leaf in tree_flatten(batches.plain(batch))[0] if isinstance(leaf, Tensor)]
    for state, is_value in zip(states, values, strict=True):
        if isinstance(state, Mixed) and is_value:
            raise BatchDependenceError(
                f"Your collate function {name} computes across records, by {state.cause}, so no gradient can be "
                f"clipped alone. Compute with one record at a time, or with constants fixed beforehand. {WAY_OUT}"
            )
    for read in watch.found.reads:
        if _is_decision(read):
            raise BatchDependenceError(
                f"Your collate function {name} decides by values of several records what it does with all, at "
                f"{read.line}, so one record can move the losses of others. Decide for each record by itself. {WAY_OUT}"
            )
    whole = gathered.batch(range(records))
    if _are_alike(whole, gathered.batch(range(records))):
        return gathered
    if all(isinstance(state, Rows) and (state.first, state.count) == (0, records) for state in states):
        return Gathered(lambda places: take(whole, places, records), gathered.records)
    raise BatchDependenceError(
        f"Your collate function {name} makes another batch of the same records when it is called again, so nobody can "
        "tell what one record does to others. Keep no state between calls, and draw from the global generators of "
        f"torch, NumPy or random: they are seeded for every physical batch. {WAY_OUT}"
    )


def _are_alike(one: Any, other: Any) -> bool:
    """Whether two batches hold the same tensors and plain values."""
    (left, shape), (right, its_shape) = tree_flatten(batches.plain(one)), tree_flatten(batches.plain(other))
    if shape != its_shape:
        return False
    for a, b in zip(left, right, strict=True):
        if isinstance(a, Tensor) and isinstance(b, Tensor):
            if a.shape != b.shape or not _equal(a, b):
                return False
        elif isinstance(a, _PLAIN) and repr(a) != repr(b):
            return False
    return True


def examine(whole: Any, part: Any, variant: Variant, records: int, name: str) -> Collated:
    """Refuse a collate function that gives a record other values in other company, but for padding.

    Raises BatchDependenceError. What it cannot compare is left to the losses, and so is another order of records.
    """
    lengths, is_moved = None, False
    ones, others = tree_flatten(batches.plain(whole))[0], tree_flatten(batches.plain(part))[0]
    if len(ones) != len(others):
        return Collated(name)
    here, there = zip(*variant.kept, strict=True)
    for one, other in zip(ones, others, strict=True):
        if not (isinstance(one, Tensor) and isinstance(other, Tensor)) or one.ndim != other.ndim or one.ndim == 0:
            continue
        if len(one) != records or len(other) != len(variant.rows):
            continue
        a, b = one[list(there)], other[list(here)]
        if a.shape == b.shape:
            if _equal(a, b):
                continue
            is_place = a.ndim == 1 and not a.is_floating_point()
            if not is_place and not _rows(other) <= _rows(one):
                raise BatchDependenceError(_changed(name))
            is_moved = True
            continue
        axis = next(k for k in range(1, a.ndim) if a.shape[k] != b.shape[k])
        lengths = lengths or (min(b.shape[axis], a.shape[axis]), max(a.shape[axis], b.shape[axis]))
    return Collated(name, lengths, is_moved)


def _changed(name: str) -> str:
    """The lesson for a collate function in which records meet."""
    return (
        f"Your collate function {name} gives a record other values, or another place, when it is collated with other "
        "records. Records must not meet there, and losses must be in the order in which records went in: each is "
        "clipped by its own clip norm. Normalise and mix nothing across records, and sort inside the model, or sort "
        f"the losses back. {WAY_OUT}"
    )


def _rows(column: Tensor) -> set[bytes]:
    """Its rows, without their order."""
    flat = column.detach().cpu().reshape(len(column), -1).contiguous()
    return {row.view(torch.uint8).numpy().tobytes() for row in flat}


def _equal(a: Tensor, b: Tensor) -> bool:
    return bool(((a == b) | ((a != a) & (b != b))).all())


def take(batch: Any, rows: Sequence[int], records: int) -> Any:
    """These records of a collated batch: the same structure, with every tensor and list of `records` items cut.

    Raises DataError if nothing in it can be cut: then records could not be told apart.
    """

    def cut(column: Any) -> Any:
        if isinstance(column, Tensor):
            return column[torch.as_tensor(rows, device=column.device)]
        return [column[i] for i in rows]

    return _over_columns(batch, records, cut)


def has_different(batch: Any, records: int) -> bool:
    """True if not all records of the batch are the same, so that exchanging them can show anything."""
    found = []

    def look(column: Any) -> Any:
        same = (
            torch.equal(column[:1].expand_as(column), column)
            if isinstance(column, Tensor)
            else all(item == column[0] for item in column)
        )
        found.append(not same)
        return column

    _over_columns(batch, records, look)
    return any(found)


def same_shapes(one: Any, other: Any) -> bool:
    """Whether two batches differ in the values of their tensors at most."""
    return _like(one, other, lambda a, b: a.shape == b.shape and a.dtype == b.dtype)


def same(one: Any, other: Any) -> bool:
    """Whether two batches hold the same values, and NaN in the same places."""

    def is_equal(a: Tensor, b: Tensor) -> bool:
        return a.shape == b.shape and a.dtype == b.dtype and bool(((a == b) | (a.isnan() & b.isnan())).all())

    return _like(one, other, is_equal)


def _like(one: Any, other: Any, compare: Callable[[Tensor, Tensor], bool]) -> bool:
    (left, shape), (right, its_shape) = tree_flatten(batches.plain(one)), tree_flatten(batches.plain(other))

    def is_like(a: Any, b: Any) -> bool:
        if isinstance(a, Tensor) and isinstance(b, Tensor):
            return compare(a, b)
        return isinstance(a, _PLAIN) and repr(a) == repr(b)  # written out, NaN is NaN

    return bool(shape == its_shape) and all(is_like(a, b) for a, b in zip(left, right, strict=True))


def _over_columns(batch: Any, records: int, change: Callable[[Any], Any]) -> Any:
    """The batch with `change` applied to every column: a tensor or list with one item per record.

    A list of as many parts as there are records is told from a column by what it holds: parts hold tensors, and the
    batch itself is a column only if its items are plain values.
    """
    found = 0

    def walk(node: Any, is_root: bool) -> Any:
        nonlocal found
        parts = (Tensor, list, tuple, Mapping) if is_root else (Tensor,)
        is_list = isinstance(node, list) and len(node) == records and not any(isinstance(part, parts) for part in node)
        if is_list or (isinstance(node, Tensor) and node.ndim > 0 and len(node) == records):
            found += 1
            return change(node)
        named = batches.named_parts(node)
        if named is not None:
            return batches.rebuilt(node, {key: walk(value, False) for key, value in named.items()})
        if isinstance(node, tuple) and hasattr(node, "_fields"):
            return type(node)(*(walk(value, False) for value in node))
        if isinstance(node, list | tuple):
            return type(node)(walk(value, False) for value in node)
        return node

    changed = walk(batch, True)
    if not found:
        raise DataError(
            f"The data set's batches are of type {type(batch).__name__}, in which {records} records cannot be told "
            "apart. Collate records into a tensor, or a tuple, list or dict of tensors, with the records in the first "
            "dimension."
        )
    return changed


def contents(model: nn.Module) -> dict[str, Tensor]:
    """Copies of all tensors that a model keeps: parameters, buffers, and plain attributes outside any graph."""
    held = {name: t.detach().clone() for name, t in (*model.named_parameters(), *model.named_buffers())}
    for name, module in model.named_modules():
        for attribute, value in vars(module).items():
            if isinstance(value, Tensor) and not value.requires_grad:
                held[f"{name}.{attribute}".strip(".")] = value.detach().clone()
    return held


def check_contents(before: dict[str, Tensor], model: nn.Module) -> None:
    """Refuse a model that a forward pass wrote to, by whatever way."""
    after = contents(model)
    changed = [
        name
        for name in sorted({*before, *after})
        if name not in before
        or name not in after
        or before[name].shape != after[name].shape
        or not torch.allclose(before[name], after[name], rtol=0.0, atol=0.0, equal_nan=True)
    ]
    if changed:
        raise UnsupportedLayerError(written(changed))


def written(names: Sequence[str]) -> str:
    """The lesson for a forward pass that writes to its model."""
    return (
        f"The forward pass changed {', '.join(names[:3])}: values computed from the data enter the model without "
        "clipping or noise. Typical causes are running statistics, Embedding(max_norm=…) and spectral norm; replace "
        "or freeze that layer."
    )
