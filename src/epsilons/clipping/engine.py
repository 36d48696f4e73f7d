"""The interface of every engine, and the clipping rule that all share.

A record's contribution is weight · min(1, clip_norm / ‖g‖) · g, paper Alg. 1 line 6 with c_p for c. ‖g‖ is the norm
that the engine computed, times √(1 + HEADROOM): an upper bound on the norm of the numbers that are added. All engines
and kernels have the same headroom, so no record decides by how much another is shortened. Contributions are added in 64
bits, and the factor is reduced by 2⁻²⁰ for their rounding. So, given each record's computed gradient, the sums of two
data sets that differ in one record differ by at most weight · clip_norm of that record (docs/engine.md#norms). One more
record may change the last bits of the gradients of others (docs/concepts.md).
"""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from torch import Tensor, nn

from ..errors import EpsilonsError, InputError, ModelError

#: By how much a squared norm may be too small, relative to it: the largest error that any kernel is allowed. Every
#: contribution that is clipped is 2⁻¹⁰ shorter for it, so that clipping depends on no choice of engine or kernel.
HEADROOM = 2.0**-9
HALF = frozenset([torch.bfloat16, torch.float16])
#: A gradient with a larger norm contributes nothing, like one that is not finite. Up to here all engines agree: the
#: squares fit into 32 bits.
LARGEST_NORM = 2.0**60
#: The same where a gradient has the 16 bits of float16: below it, no entry is beyond the largest number (65,504).
LARGEST_NORM_OF_FLOAT16 = 2.0**15
#: Covers rounding in 64 bits: half of it for norms, half for sums as far as `is_covered` says.
SHRINK = 1 - 2.0**-20


def to_32_bits(tensor: Tensor) -> Tensor:
    """The tensor with at least 32 bits: narrower numbers are converted before anything is multiplied."""
    return tensor.float() if tensor.dtype in HALF else tensor


def is_covered(records: float, physical_batch: float, ratio: float = 1.0) -> bool:
    """Whether SHRINK covers the rounding of a sum of so many contributions (docs/engine.md#norms).

    ratio   the largest bound weight · clip_norm over the smallest

    >>> is_covered(65_535, 65_535), is_covered(1_000_000, 256), is_covered(1_000_000, 16)
    (True, True, False)
    """
    return records * (physical_batch + records / physical_batch) * ratio <= 2**32


#: Adds a sum of clipped gradients to these tensors, one 64-bit tensor per parameter.
Clipped = Callable[[Sequence[Tensor]], None]


def add_each(parts: Sequence[Tensor], totals: Sequence[Tensor]) -> None:
    """Add each part to its total."""
    for total, part in zip(totals, parts, strict=True):
        total += part


class NonFiniteGradientError(Exception):
    """A gradient is not finite, and this engine cannot separate it from those of other records.

    The caller repeats the physical batch with another record in place of each of `records`, at weight 0. Where it is
    empty, the caller repeats the physical batch record by record.

    `records` are rows of the physical batch. Where rows belong to persons, the caller replaces all rows of a person,
    at weight 0, and repeats person by person.
    """

    def __init__(self, records: Sequence[int] = ()) -> None:
        super().__init__("a gradient is not finite")
        self.records = tuple(records)


def non_finite_losses(losses: Tensor) -> tuple[int, ...]:
    """The places of losses that are not finite."""
    return tuple((~torch.isfinite(losses.detach())).nonzero()[:, 0].tolist())


def is_meant(error: Exception) -> bool:
    """Whether callers of an engine expect this error; all others come from torch, or from a backward pass."""
    meant = (EpsilonsError, NonFiniteGradientError, torch.OutOfMemoryError, MemoryError)
    return isinstance(error, meant) or "can't allocate memory" in str(error)


@contextmanager
def no_bare_errors() -> Iterator[None]:
    """Errors that callers of an engine do not expect become a ModelError with their text."""
    try:
        yield
    except Exception as error:
        if is_meant(error):
            raise
        frame = traceback.extract_tb(error.__traceback__)[-1]  # of a hook, or of a backward of the caller's
        where = "" if "torch" in Path(frame.filename).parts else f" in {frame.name} ({frame.filename}:{frame.lineno})"
        raise ModelError(
            f"The backward pass of the losses failed{where}: {in_words(error)}. Pass losses that autograd can "
            "differentiate, once, and do not call losses.backward() yourself."
        ) from error


def in_words(error: Exception) -> str:
    """One line about an error: the operator where it was raised, if that is known, its type and its text."""
    text = " ".join(str(error).split()).rstrip(".")
    where = "".join(f"{note}: " for note in getattr(error, "__notes__", ())[:1])
    return f"{where}{type(error).__name__}: {text[:300]}"


class Engine(Protocol):
    """Turns the losses of one physical batch into a sum of clipped gradients.

    attach       once: the model and the parameters to differentiate by, in order
    begin        before the forward pass of each physical batch: its number of rows
    clipped_sum  after it: one 64-bit tensor per parameter. losses: (rows,)
                 Without sizes each row is a record; clip_norm, weight: (rows,). With sizes, (persons,) numbers of
                 rows, at least 1, rows of one person are consecutive, and what is clipped is the gradient of the
                 mean of the person's losses; clip_norm, weight: (persons,).
                 Zeros for no records. Frees the graph and leaves no gradient in any p.grad. A record or person with
                 a gradient that is not finite contributes nothing. Where it may have changed the gradients of
                 others, raises NonFiniteGradientError. Raises ModelError if the losses depend on no trained
                 parameter.
    detach       removes all hooks

    An engine with a clipped_sum that takes no sizes clips records only (`check_takes_persons`).
    """

    def attach(self, model: nn.Module, parameters: Sequence[nn.Parameter]) -> None: ...

    def begin(self, records: int) -> None: ...

    def clipped_sum(
        self, losses: Tensor, clip_norm: Tensor, weight: Tensor, sizes: Sequence[int] | None = None
    ) -> list[Tensor]: ...

    def detach(self) -> None: ...


def check_takes_persons(engine: Engine) -> None:
    """Raises InputError for an engine of the caller that clips records only: its clipped_sum takes no `sizes`."""
    given = inspect.signature(engine.clipped_sum).parameters.values()
    if not any(p.name == "sizes" or p.kind is p.VAR_KEYWORD for p in given):
        raise InputError(
            "Expected an engine that clips persons with several rows or views, got "
            f"{type(engine).__name__}, with a clipped_sum that has no argument `sizes`. Add the argument, or use "
            'engine="auto". See: epsilons docs extending'
        )


def clip_factors(
    squared_norm: Tensor, clip_norm: Tensor, weight: Tensor, dtypes: Collection[torch.dtype] = ()
) -> Tensor:
    """(batch,) 64-bit factors on the gradients: the only place where a clip norm becomes a factor.

    0 where the norm is not finite or above the largest, or the factor is too small for 64 bits.
    squared_norm: (batch,) at least 1 / (1 + HEADROOM) of the true one
    dtypes: of gradients in the graph (`graph.Trace`)
    """
    largest = LARGEST_NORM_OF_FLOAT16 if torch.float16 in dtypes else LARGEST_NORM
    if not HALF.isdisjoint(dtypes):  # a record alone is left to `loop`, which rounds its gradient by up to 0.5 %
        weight = weight * (1 - 2.0**-7)
    norm = (squared_norm.double() * (1 + HEADROOM)).sqrt()
    tiny = torch.finfo(torch.float64).tiny
    factor = weight.double() * (clip_norm.double() / norm.clamp_min(tiny)).clamp_max(1.0) * SHRINK
    # Numbers below `tiny` have fewer bits, so that rounding may have made a factor much larger. NaN is not `tiny` or
    # more.
    return torch.where((factor >= tiny) & (norm <= largest), factor, 0.0)


# -- Persons: consecutive rows of a physical batch that together make one clipped contribution
#
# The gradient that is clipped is that of the mean of a person's losses. The factor 1/size is part of what the backward
# pass begins with, so that no row's gradient is larger than in that mean.
#
# How a person's rows are merged depends on their own number of rows alone: persons are grouped by it, and nothing is
# padded. Otherwise one person's rows would change how the gradients of others are rounded (docs/engine.md#persons).


@dataclass(frozen=True, eq=False)
class SizeGroup:
    """All persons of a physical batch who have one number of rows.

    size    rows of each
    places  (persons of this size,) places of these persons; None for all persons
    rows    (persons of this size · size,) their rows, person by person; None for all rows
    """

    size: int
    places: Tensor | None
    rows: Tensor | None

    def split(self, tensor: Tensor) -> Tensor:
        """(persons of this size, size, …) of a tensor with all rows (rows, …)."""
        own = tensor if self.rows is None else tensor.index_select(0, self.rows)
        return own.view(len(own) // self.size, self.size, *own.shape[1:])

    def of(self, values: Tensor) -> Tensor:
        """(persons of this size,) of values for all persons."""
        return values if self.places is None else values.index_select(0, self.places)


class Persons:
    """The rows of each person in one physical batch.

    owner   (rows,) the place of each row's person
    groups  persons by their number of rows
    """

    def __init__(self, sizes: Sequence[int], device: torch.device) -> None:
        own = np.asarray(sizes, dtype=np.int64)
        self.count = len(own)
        self.owner = torch.from_numpy(np.repeat(np.arange(len(own)), own)).to(device)
        self._sizes = torch.from_numpy(own).to(device)
        first = np.cumsum(own) - own
        self.groups: list[SizeGroup] = []
        for size in np.unique(own).tolist():
            places = (own == size).nonzero()[0]
            rows = (first[places, None] + np.arange(size)).ravel()
            some = [torch.from_numpy(t).to(device) if len(places) < len(own) else None for t in (places, rows)]
            self.groups.append(SizeGroup(size, *some))

    def shares(self, losses: Tensor) -> Tensor:
        """(rows,) the gradient of the sum of all means by each loss: 1/size."""
        return self._sizes.to(losses.dtype).reciprocal()[self.owner]

    def means(self, losses: Tensor) -> Tensor:
        """(persons,) the mean of each person's losses, to be differentiated."""
        # Unlike a product with a matrix of 0 and 1, this keeps a loss that is not finite with its person.
        return losses.new_zeros(self.count).index_add(0, self.owner, losses * self.shares(losses))

    def summed(self, rows: Tensor) -> Tensor:
        """(persons, …) each person's rows, added. rows: (rows, …)"""
        if len(self.groups) == 1:
            return self.groups[0].split(rows).sum(1)
        total = rows.new_empty(self.count, *rows.shape[1:])
        for group in self.groups:
            assert group.places is not None  # there are several groups
            total[group.places] = group.split(rows).sum(1)
        return total

    def rows_of(self, is_chosen: Tensor) -> tuple[int, ...]:
        """The rows of the chosen persons. is_chosen: (persons,)"""
        return tuple(is_chosen[self.owner].nonzero()[:, 0].tolist())


def persons_in(losses: Tensor, clip_norm: Tensor, sizes: Sequence[int] | None) -> Persons | None:
    """The persons in this physical batch; None where each row is its own.

    Raises InputError unless there is one size of at least 1 for each clip norm, and they add up to the losses.
    """
    if sizes is None:
        if len(losses) != len(clip_norm):
            raise InputError(f"Expected a clip norm for each of {len(losses)} losses, got {len(clip_norm)}. {_ADVICE}")
        return None
    own = np.asarray(sizes)
    is_whole = own.ndim == 1 and (own.dtype.kind in "iu" or own.size == 0)
    if not is_whole or len(own) != len(clip_norm) or (own < 1).any() or own.sum() != len(losses):
        raise InputError(
            f"Expected one whole number of rows, at least 1, for each of {len(clip_norm)} persons, adding up to "
            f"{len(losses)} losses, got sizes of shape {own.shape} and type {own.dtype} that do not. {_ADVICE}"
        )
    return None if (own == 1).all() else Persons(own.tolist(), losses.device)


_ADVICE = "Leave out persons without rows, and give one clip norm and one weight per person."
