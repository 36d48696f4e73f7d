"""Rehearsals: does any record move another's loss or gradient? Found by trying, whatever the cause.

Before a chunk is used, it is handed out in a few altered forms. In each, some records are kept and others exchanged
for copies of one of them, or left out; what is kept must come out as it does in the chunk itself: its losses, and
for one witness the whole gradient (a gate that is still 0 hides a mixture from the losses). That finds batch
statistics, contrastive losses, MixUp, reshapes and time-first layers without a list of types. A data set is read and
collated anew for each form, so that a collate function that mixes is found as well. A record that is alone is handed
out twice: nothing may be left of the first time.

What it cannot see: collating of records that never come out twice the same, random draws that records share, and mixing
that begins between rehearsals, which are repeated at steps 0, 1, 10, 100, …, at the same steps for every data set.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from ..errors import DataError, MixedRecords, UnsupportedLayer
from . import batches
from .clipping.loop import record_gradient

#: Losses may differ by this, relative to the largest: rounding, not mixing. Gradients by ten times it, relative to
#: their norm.
SAME = 1e-5
#: The same where fewer records are computed together, so that other kernels may be used.
SAME_IN_ANOTHER_SIZE = 1e-3

_PLAIN = (bool, int, float, complex, str, bytes, type(None))


def is_due(step: int) -> bool:
    """True for steps 0, 1, 10, 100, 1000, …"""
    return step == 0 or 10 ** round(math.log10(step)) == step


@dataclass(frozen=True)
class Variant:
    """One altered form of a chunk of n records.

    rows        the record that stands in each place
    kept        the places whose losses must come out as in the chunk itself
    is_resized  whether tensors have other shapes than in the chunk itself
    """

    rows: tuple[int, ...]
    kept: tuple[int, ...]
    is_resized: bool = False

    @property
    def witness(self) -> int:
        """The place whose gradient is compared, too."""
        return self.kept[0]


def variants(records: int) -> Iterator[Variant]:
    """The first record exchanged; the last; the front half; the back half; the back half left out. One: as it is."""
    everyone, half = range(records), records // 2
    if records == 1:
        yield Variant((0,), (0,))
        return
    yield Variant((records - 1, *everyone[1:]), tuple(everyone[1:]))
    yield Variant((*everyone[:-1], 0), tuple(everyone[:-1]))
    yield Variant((*(records - 1 for _ in everyone[:half]), *everyone[half:]), tuple(everyone[half:]))
    yield Variant((*everyone[:half], *(0 for _ in everyone[half:])), tuple(everyone[:half]))
    yield Variant(tuple(everyone[:half]), tuple(everyone[:half]))


@dataclass(frozen=True)
class Outcome:
    """What came of one form of a chunk: its losses, the witnesses' gradients, and whether it drew random numbers."""

    losses: Tensor
    gradients: dict[int, list[Tensor | None]]
    drew: bool


@dataclass
class Rehearsal:
    """The rehearsals of one chunk: what was tried, and what came of it."""

    tried: list[tuple[Variant, Outcome]] = field(default_factory=list)

    @property
    def witnesses(self) -> tuple[int, ...]:
        """Places whose gradients the chunk itself must give for the comparison."""
        return tuple(sorted({variant.witness for variant, _ in self.tried}))

    def compare(self, whole: Outcome, model: nn.Module) -> None:
        """Hold every variant to the chunk itself. Raises MixedRecords, naming likely causes in `model`."""
        for variant, outcome in self.tried:
            if variant.is_resized and (whole.drew or outcome.drew):
                continue  # dropout masks of another size are other masks
            tolerance = SAME_IN_ANOTHER_SIZE if variant.is_resized else SAME
            kept = torch.tensor(variant.kept, device=whole.losses.device)
            before, after = whole.losses[kept].double(), outcome.losses[kept].double()
            largest = float(torch.where(torch.isfinite(before), before.abs(), 0.0).max())
            if not torch.isclose(before, after, rtol=0.0, atol=tolerance * largest, equal_nan=True).all():
                raise MixedRecords(_lesson("losses", model))
            own, other = whole.gradients[variant.witness], outcome.gradients[variant.witness]
            if not _same_gradient(own, other, 10 * tolerance):
                raise MixedRecords(_lesson("gradients", model))


def outcome(losses: Tensor, witnesses: Sequence[int], parameters: Sequence[nn.Parameter], drew: bool) -> Outcome:
    """Look at a form of a chunk, leaving the graph as it is."""
    gradients = {i: record_gradient(losses, i, parameters, keep_graph=True) for i in witnesses}
    return Outcome(losses.detach().clone(), gradients, drew)


def _same_gradient(one: list[Tensor | None], other: list[Tensor | None], tolerance: float) -> bool:
    squares = [torch.zeros((), dtype=torch.float64) for _ in range(2)]
    for a, b in zip(one, other, strict=True):
        present = a if a is not None else b
        if present is None:
            continue
        left = torch.zeros_like(present) if a is None else a
        right = torch.zeros_like(present) if b is None else b
        squares[0] = squares[0].to(left.device) + (left.double() - right.double()).square().sum()
        squares[1] = squares[1].to(left.device) + left.double().square().sum()
    distance, size = (float(total.sqrt()) for total in squares)
    return distance <= tolerance * size + 1e-12 or not size < float("inf")  # a broken record is dealt with in clipping


def _lesson(what: str, model: nn.Module) -> str:
    suspects = [
        f"{name or 'the model'} ({type(module).__name__} without batch_first=True)"
        for name, module in model.named_modules()
        if isinstance(module, nn.RNNBase | nn.MultiheadAttention) and not module.batch_first
    ]
    if suspects:
        return (
            f"Exchanging some records of a batch moved the {what} of others, so no one's gradient can be clipped "
            f"alone. Look first at {', '.join(suspects[:3])}: it reads the first dimension as time."
        )
    return (
        f"Exchanging some records of a batch moved the {what} of others, so no one's gradient can be clipped alone. "
        "Usual causes: a layer, loss or collate function that looks across the batch (normalisation, MixUp, division "
        "by its size, unmasked padding) or takes it for time (batch_first=True), a reshape that runs records together, "
        "state that a forward pass leaves, or random numbers drawn from another source than torch."
    )


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
        raise UnsupportedLayer(written(changed))


def written(names: Sequence[str]) -> str:
    """The lesson for a forward pass that writes to its model."""
    return (
        f"The forward pass changed {', '.join(names[:3])}: values computed from the data enter the model without "
        "clipping or noise. Typical causes are running statistics, Embedding(max_norm=…) and spectral norm; replace "
        "or freeze that layer."
    )
