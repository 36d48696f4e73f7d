"""Sums of clipped gradients of many models at once, each over the records that it draws.

Paper Alg. 1 line 6 with a rate, a clip norm and a weight per group. A layer with input a and gradient g at its output
has the gradient g·aᵀ for its weights and g for its bias. So its squared norm is |g|²·(|a|² + 1), and no gradient of one
record is ever formed (Goodfellow, "Efficient Per-Example Gradient Computations", arXiv 1510.01799v2).

Values are (models, units, records): with the records last, products take half as long as with the units last, and a
softmax over 10 classes a tenth (benchmarks/stacked.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ...mechanism import IntArray
from ...planning import Phase
from ..clipping.engine import clip_factors
from .architecture import Layer

#: Bytes of values that are computed at once. On a CPU they should stay in its cache.
BYTES_AT_ONCE = {"cpu": 2**22, "cuda": 2**30}

#: Numbers of a layer's width that are held per record: before and after the activation, gradient, and its square twice.
HELD = 5

#: Records whose squared norms are computed at once.
RECORDS_AT_ONCE = 2**14


@dataclass(frozen=True, eq=False)
class Records:
    """The data of all models.

    inputs         (records, features)
    squared_norms  (records,) of the inputs, 64-bit
    targets        (records,) classes
    """

    inputs: Tensor
    squared_norms: Tensor
    targets: Tensor

    @classmethod
    def of(cls, inputs: Tensor, targets: Tensor) -> Records:
        """Computes the squared norms."""
        parts = [_squares(part) for part in torch.split(inputs, RECORDS_AT_ONCE)]
        return cls(inputs, torch.cat(parts), targets.long())


@dataclass(frozen=True, eq=False)
class Bounds:
    """The clip norm and the weight of each record in one phase. (records,) each, 64-bit."""

    clip_norm: Tensor
    weight: Tensor

    @classmethod
    def of(cls, phase: Phase, group: IntArray, device: torch.device) -> Bounds:
        return cls(*(torch.from_numpy(values[group]).to(device) for values in (phase.clip_norm, phase.weight)))


class ClippedSums:
    """The sums of a stack.

    gradients   (models, …) one per parameter: the last sums, overwritten by the next
    """

    def __init__(self, layers: Sequence[Layer], records: Records) -> None:
        self._layers, self._records = layers, records
        self._by_layer = [[torch.zeros_like(p) for p in layer.parameters] for layer in layers]
        self.gradients = [gradient for sums in self._by_layer for gradient in sums]
        self._room = records.inputs.new_empty(0)

    def add_up(self, drawn: Sequence[IntArray], bounds: Bounds) -> None:
        """Compute `gradients`. drawn: (models,) indices of the records that each model draws."""
        at_once = self._models_at_once(max(map(len, drawn)))
        for first in range(0, len(drawn), at_once):
            models = slice(first, first + at_once)
            self._add_up(models, drawn[models], bounds)

    def _models_at_once(self, most: int) -> int:
        inputs = self._records.inputs
        width = inputs.shape[1] + HELD * sum(layer.weight.shape[1] for layer in self._layers)
        return max(1, BYTES_AT_ONCE[inputs.device.type] // max(1, most * width * inputs.element_size()))

    def _add_up(self, models: slice, drawn: Sequence[IntArray], bounds: Bounds) -> None:
        index, is_drawn = (torch.from_numpy(part).to(self._room.device) for part in _padded(drawn))  # (models, most)
        records, layers = self._records, [layer.of(models) for layer in self._layers]
        values, before = _forward(layers, self._inputs(index))
        deltas = _backward(layers, values, before, _loss_gradient(before[-1], _of(records.targets, index)))
        squares = [_of(records.squared_norms, index), *map(_squares, values[1:])]
        squared_norm = torch.zeros_like(squares[0])  # (models, most)
        for layer, square, delta in zip(layers, squares, deltas, strict=True):
            squared_norm += _squares(delta) * (square + (layer.bias is not None))
        factor = clip_factors(squared_norm, _of(bounds.clip_norm, index), _of(bounds.weight, index) * is_drawn)
        _blank(~torch.isfinite(squared_norm), [*values, *deltas])
        for sums, value, delta in zip(self._by_layer, values, deltas, strict=True):
            _weighted_sums([part[models] for part in sums], value, delta.mul_(factor.to(delta.dtype)[:, None]))

    def _inputs(self, index: Tensor) -> Tensor:
        """(models, features, most) of these records, in memory that is kept: new memory is slower to write."""
        inputs, rows = self._records.inputs, index.numel()
        size = rows * inputs.shape[1]
        if self._room.numel() < size:
            self._room = inputs.new_empty(size + size // 8)
        room = self._room[:size].view(rows, inputs.shape[1])
        torch.index_select(inputs, 0, index.flatten(), out=room)
        return room.view(*index.shape, inputs.shape[1]).transpose(1, 2)


def _of(values: Tensor, index: Tensor) -> Tensor:
    """The values of these records; (records,) and (models, most) -> (models, most)."""
    return values.index_select(0, index.flatten()).view(index.shape)


def _loss_gradient(logits: Tensor, targets: Tensor) -> Tensor:
    """(models, classes, most) the gradient of the cross-entropy: softmax minus one at the target."""
    minus_one = logits.new_full((), -1.0).expand(len(targets), 1, targets.shape[1])
    return logits.softmax(1).scatter_add_(1, targets[:, None], minus_one)


def _padded(drawn: Sequence[IntArray]) -> tuple[IntArray, npt.NDArray[np.bool_]]:
    """(models, most) indices and whether they were drawn; draws are filled up with record 0."""
    counts = np.array([len(indices) for indices in drawn])
    is_drawn = np.arange(counts.max()) < counts[:, None]
    index = np.zeros(is_drawn.shape, dtype=np.int64)
    index[is_drawn] = np.concatenate(drawn)
    return index, is_drawn


def _forward(layers: Sequence[Layer], inputs: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """Each layer's inputs, and its outputs before the activation; the last of these are the logits."""
    values, before = [inputs], [layers[0].outputs(inputs)]
    for lower, layer in pairwise(layers):
        values.append(lower.activation.forward(before[-1]))
        before.append(layer.outputs(values[-1]))
    return values, before


def _backward(
    layers: Sequence[Layer], values: Sequence[Tensor], before: Sequence[Tensor], gradient: Tensor
) -> list[Tensor]:
    """The gradient of each record's loss at each layer's outputs before the activation; gradient: at the logits."""
    deltas = [gradient]
    for place in reversed(range(1, len(layers))):
        at_values = torch.bmm(layers[place].weight.transpose(1, 2), deltas[0])
        deltas.insert(0, layers[place - 1].activation.backward(at_values, before[place - 1], values[place]))
    return deltas


def _blank(columns: Tensor, tensors: Sequence[Tensor]) -> None:
    """Zeros for these (models, most) records: their factors are 0, but 0·NaN is NaN."""
    if columns.any():
        for tensor in tensors:
            tensor.masked_fill_(columns[:, None], 0)


def _weighted_sums(sums: Sequence[Tensor], values: Tensor, deltas: Tensor) -> None:
    """Over the records, for the weight and the bias of one layer."""
    weight, *biases = sums
    torch.bmm(deltas, values.transpose(1, 2), out=weight)
    for bias in biases:
        torch.sum(deltas, 2, out=bias)


def _squares(values: Tensor) -> Tensor:
    """Squared norms of the records over dimension 1, 64-bit."""
    return values.double().square_().sum(1)
