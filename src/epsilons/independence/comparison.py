"""Whether losses and gradients of the kept records are the same as in the batch as it is."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..clipping.engine import no_bare_errors
from ..clipping.loop import gradient_of
from .fixed_draws import Variant
from .states import Unknown
from .watch import Step, Watched

#: How far apart two losses of a record may be: relative to the loss, and in units of the last place of what it was
#: computed from. In a batch of the same shapes only the order of sums can differ; in another, kernels may.
SAME, SAME_PLACES = 1e-5, 64
RESIZED, RESIZED_PLACES = 1e-4, 1024
#: The same where a part is computed in 16 bits.
COARSE, COARSE_PLACES = 0.05, 2
#: How far apart two gradients may be, relative to their norm.
SAME_GRADIENT = 1e-4


@dataclass
class Reference:
    """The results of the batch as it is.

    watched    what its forward pass did
    shapes     of its tensors, without the number of records
    losses     (records,) 64-bit
    unit       (records,) one unit in the last place of what each loss was computed from
    weights    (records,) of a random combination of losses, in which no loss is too large for the others
    gradients  sketches of that of this combination, for each set of kept records
    """

    watched: Watched
    shapes: list[Any]
    losses: Tensor
    unit: Tensor
    weights: Tensor
    gradients: dict[tuple[int, ...], Tensor] = field(default_factory=dict)

    @classmethod
    def of(cls, losses: Tensor, watched: Watched, shapes: list[Any], step: int) -> Reference:
        scale = watched.scale
        values = losses.detach().double().clone()
        unit = torch.finfo(losses.dtype).eps * (values.abs() if scale is None else scale.double())
        chance = 0.5 + torch.from_numpy(np.random.default_rng([step, 1]).random(len(values)))
        size = values.abs() + _typical(values)
        return cls(watched, shapes, values, _finite(unit), chance.to(size.device) / torch.where(size > 0, size, 1.0))

    def has_same_losses(self, variant: Variant, losses: Tensor, watched: Watched, is_padded: bool) -> bool:
        """is_padded: whether records have another length in this form."""
        is_resized = is_padded or len(losses) != len(self.losses)
        before, after = self.losses[list(variant.there)], losses.detach().double()[list(variant.here)]
        unit = self.unit[list(variant.there)]
        if watched.is_coarse and is_resized:
            # Terms may cancel in a loss: their size is what rounding goes by.
            scale = unit / torch.finfo(losses.dtype).eps
            allowed = COARSE * (before.abs() + _typical(self.losses)) + COARSE_PLACES * 2.0**-8 * scale
        elif is_resized:
            allowed = RESIZED * before.abs() + RESIZED_PLACES * unit
        else:
            allowed = SAME * before.abs() + SAME_PLACES * unit
        # NaN differs from numbers; a record that is not finite in both forms is left to clipping.
        is_same = ((before - after).abs() <= _finite(allowed)) | (before == after) | (before.isnan() & after.isnan())
        return bool(is_same.all())

    def keep_gradient(self, losses: Tensor, kept: Sequence[int], parameters: Sequence[nn.Parameter]) -> None:
        """Of the combination of these records' losses in the batch as it is."""
        self.gradients[tuple(kept)] = self._gradient(losses, kept, kept, parameters)

    def has_same_gradient(self, variant: Variant, losses: Tensor, parameters: Sequence[nn.Parameter]) -> bool:
        before = self.gradients.get(tuple(variant.there))
        return before is None or _is_same_gradient(
            before, self._gradient(losses, variant.here, variant.there, parameters)
        )

    def _gradient(
        self, losses: Tensor, here: Sequence[int], there: Sequence[int], parameters: Sequence[nn.Parameter]
    ) -> Tensor:
        is_usable = torch.isfinite(self.losses[list(there)])
        rows = torch.tensor(list(here), device=losses.device)[is_usable]
        weights = self.weights[list(there)][is_usable].to(losses.dtype)
        total = (losses[rows] * weights).sum()
        with no_bare_errors():
            return sketch(gradient_of(total, parameters), parameters)


def _finite(values: Tensor) -> Tensor:
    return torch.where(torch.isfinite(values), values, 0.0)


def _typical(losses: Tensor) -> Tensor:
    """The median size of the losses that are finite and not 0; 0 if there are none."""
    sizes = losses.abs()
    sizes = sizes[torch.isfinite(sizes) & (sizes > 0)]
    return sizes.median() if len(sizes) else losses.new_zeros(())


def _is_same_gradient(one: Tensor, other: Tensor) -> bool:
    size, difference = float(one.norm()), float((one - other).norm())
    return difference <= SAME_GRADIENT * size + 1e-12 if size < math.inf else True


#: The numbers of a sketch.
BUCKETS = 2**20


def sketch(gradients: Sequence[Tensor | None], parameters: Sequence[nn.Parameter]) -> Tensor:
    """(at most BUCKETS,) 64-bit: the gradient in rows of so many numbers, added up with random signs; None is 0.

    So no check holds two gradients of a large model. The square of the norm of a sketch, and of the difference of two,
    is right on average, with a relative standard deviation below √(2 / BUCKETS) = .0014 unless few numbers make up the
    norm (Charikar, Chen and Farach-Colton, ICALP 2002). A gradient of one row is its own sketch.
    """
    width = min(sum(p.numel() for p in parameters), BUCKETS)
    device = next((g.device for g in gradients if g is not None), torch.device("cpu"))
    total, at = torch.zeros(width, dtype=torch.float64, device=device), 0
    for p, gradient in zip(parameters, gradients, strict=True):
        flat = torch.zeros(0) if gradient is None else gradient.reshape(-1)
        begin = 0
        while begin < len(flat):
            row, place = divmod(at + begin, width)
            part = flat[begin : begin + width - place].to(device, torch.float64)
            if row:
                part *= _signs(row).to(device)[place : place + len(part)]
            total[place : place + len(part)] += part
            begin += len(part)
        at += p.numel()
    return total


def _signs(row: int) -> Tensor:
    """(BUCKETS,) 1 or -1."""
    return torch.from_numpy(np.random.default_rng([row, 2]).integers(0, 2, BUCKETS, dtype=np.int8)) * 2 - 1


# -- Whether losses depend on the number of records
#
# Two forms of other sizes must consist of the same operators with the same arguments, up to sizes that grow with the
# number of records.


def difference(whole: Watched, other: Watched) -> tuple[Step, str] | None:
    """The first step that depends on the number of records, and how; None if there is none, or if it is not known."""
    # Where one record is cut from the others, or Python saw other values, operators may differ for other reasons.
    if isinstance(whole.losses, Unknown) or whole.is_split or seen_by_python(whole) != seen_by_python(other):
        return None
    return first_difference(whole, other)


def first_difference(whole: Watched, other: Watched, of: str = "sizes") -> tuple[Step, str] | None:
    """The first step that is not the same in both, and how.

    of   "sizes": everything, up to sizes that grow with the number of records; "values": the same without sizes, where
         records have other lengths; "operators": their names alone
    """
    for one, two in zip_longest(whole.relevant, other.relevant):
        if one is None or two is None:
            return one or two, "runs for one number of records only"
        text = _difference(one, two, whole.records, other.records, of)
        if text:
            return one, text
    return None


def seen_by_python(form: Watched) -> list[tuple[str, str]]:
    """What was read before the losses were complete and may have shaped them: (line, value) in order.

    A number that is no operator's argument has shaped nothing, or it decided something (`IndependenceCheck.conclude`).
    """
    used = {text for step in form.relevant for argument in step.arguments for text in _texts(argument)}
    return [
        (read.line, read.value)
        for read in form.reads
        if read.at < form.produced and (read.is_truth or read.is_many or read.value in used)
    ]


def _texts(argument: Any) -> list[str]:
    return [argument] if isinstance(argument, str) else list(map(repr, _values(argument)))


def _values(argument: Any) -> tuple[Any, ...]:
    return argument[1] if isinstance(argument, tuple) else (argument,)


def _difference(a: Step, b: Step, one: int, other: int, of: str) -> str:
    """How two steps differ beyond sizes that grow with the number of records; "" if they do not."""
    if a.operator != b.operator:
        return f"runs where {b.operator} runs for another number"
    if of == "operators":
        return ""
    for left, right in zip(a.arguments, b.arguments, strict=False):
        sizes = [x[0] if isinstance(x, tuple) else x for x in (left, right) if not isinstance(x, str)]
        if len(sizes) == 2 and sizes[0] != sizes[1]:
            # A size that grows with the records, or a value for each; the values' range may be known.
            is_same = sizes[0] * other == sizes[1] * one or of == "values"
            is_same = is_same and _ranges(left) == _ranges(right)
        else:
            values = zip_longest(_values(left), _values(right))
            is_same = all(p == q or (p != p and q != q) for p, q in values)
        if not is_same:
            return f"gets {_short(left)} for one and {_short(right)} for the other"
    return ""


def _ranges(argument: Any) -> list[str]:
    return [value for value in _values(argument) if isinstance(value, str)]


def _short(argument: Any) -> str:
    values = _values(argument)
    shown = ", ".join(f"{v:g}" if isinstance(v, float) else str(v)[:40] for v in values[:3])
    return shown if len(values) <= 3 else f"{shown}, …"
