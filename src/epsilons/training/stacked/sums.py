"""Sums of clipped gradients of many models at once, each over the records that it draws.

Paper Alg. 1 line 6 with a rate, a clip norm and a weight per group. A layer with input a and gradient g at its output
has the gradient g·aᵀ for its weights and g for its bias. So its squared norm is |g|²·(|a|² + 1), and no gradient of one
record is ever formed (Goodfellow, "Efficient Per-Example Gradient Computations", arXiv 1510.01799v2).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional as F

from ...mechanism import IntArray
from ...planning import Phase
from ..clipping.engine import clip_factors
from .architecture import Layer

#: Bytes of inputs that are multiplied at once. On a CPU they should stay in its cache.
BYTES_AT_ONCE = {"cpu": 2**22, "cuda": 2**30}

#: Records whose squared norms are computed at once.
RECORDS_AT_ONCE = 2**14


@dataclass(frozen=True, eq=False)
class Records:
    """The data of all models.

    inputs         (records, features)
    squared_norms  (records,) of the inputs, 64-bit
    one_hot        (records, classes) the targets
    """

    inputs: Tensor
    squared_norms: Tensor
    one_hot: Tensor

    @classmethod
    def of(cls, inputs: Tensor, targets: Tensor, classes: int) -> Records:
        one_hot = F.one_hot(targets.long(), classes).to(inputs.dtype)
        return cls(inputs, torch.cat([_squares(part) for part in torch.split(inputs, RECORDS_AT_ONCE)]), one_hot)


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

    def _models_at_once(self, largest: int) -> int:
        inputs = self._records.inputs
        widest = max(layer.weight.shape[-1] for layer in self._layers)
        return max(1, BYTES_AT_ONCE[inputs.device.type] // max(1, largest * widest * inputs.element_size()))

    def _add_up(self, models: slice, drawn: Sequence[IntArray], bounds: Bounds) -> None:
        index, is_drawn = (torch.from_numpy(part).to(self._room.device) for part in _padded(drawn))  # (models, most)
        flat, layers = index.flatten(), [layer.of(models) for layer in self._layers]
        values, before = _forward(layers, self._inputs(flat).view(*index.shape, -1))
        one_hot = self._records.one_hot.index_select(0, flat).view_as(values[-1])
        deltas = _backward(layers, values, before, values[-1].softmax(-1).sub_(one_hot))
        squares = [self._records.squared_norms.index_select(0, flat).view(index.shape), *map(_squares, values[1:-1])]
        squared_norm = torch.zeros_like(squares[0])
        for layer, square, delta in zip(layers, squares, deltas, strict=True):
            squared_norm += _squares(delta) * (square + (layer.bias is not None))
        clip_norm, weight = (part.index_select(0, flat).view(index.shape) for part in (bounds.clip_norm, bounds.weight))
        factor = clip_factors(squared_norm, clip_norm, weight * is_drawn)  # (models, most)
        _blank(~torch.isfinite(squared_norm), [*values, *deltas])
        for sums, value, delta in zip(self._by_layer, values, deltas, strict=False):
            _weighted_sums(sums, value, delta.mul_(factor.to(delta.dtype)[..., None]), models)

    def _inputs(self, flat: Tensor) -> Tensor:
        """(rows, features) the inputs of these records, in memory that is kept: new memory is slower to write."""
        inputs = self._records.inputs
        size = len(flat) * inputs.shape[1]
        if self._room.numel() < size:
            self._room = inputs.new_empty(size + size // 8)
        return torch.index_select(inputs, 0, flat, out=self._room[:size].view(len(flat), -1))


def _padded(drawn: Sequence[IntArray]) -> tuple[IntArray, npt.NDArray[np.bool_]]:
    """(models, most) indices and whether they were drawn; draws are filled up with record 0."""
    counts = np.array([len(indices) for indices in drawn])
    is_drawn = np.arange(counts.max()) < counts[:, None]
    index = np.zeros(is_drawn.shape, dtype=np.int64)
    index[is_drawn] = np.concatenate(drawn)
    return index, is_drawn


def _forward(layers: Sequence[Layer], inputs: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """The inputs of each layer and the logits, and each layer's outputs before the activation."""
    values, before = [inputs], []
    for layer in layers:
        before.append(layer.outputs(values[-1]))
        values.append(layer.activation.forward(before[-1]))
    return values, before


def _backward(
    layers: Sequence[Layer], values: Sequence[Tensor], before: Sequence[Tensor], gradient: Tensor
) -> list[Tensor]:
    """The gradient of each record's loss at each layer's outputs before the activation; gradient: at the logits."""
    deltas: list[Tensor] = []
    for place in reversed(range(len(layers))):
        deltas.insert(0, layers[place].activation.backward(gradient, before[place], values[place + 1]))
        if place > 0:
            gradient = torch.bmm(deltas[0], layers[place].weight)
    return deltas


def _blank(rows: Tensor, tensors: Sequence[Tensor]) -> None:
    """Zeros in these rows: their factors are 0, but 0·NaN is NaN."""
    if rows.any():
        for tensor in tensors:
            tensor.masked_fill_(rows[..., None], 0)


def _weighted_sums(sums: Sequence[Tensor], values: Tensor, deltas: Tensor, models: slice) -> None:
    """Over the records, for weight and bias of one layer."""
    weight, *biases = (part[models] for part in sums)
    torch.bmm(deltas.transpose(1, 2), values, out=weight)
    for bias in biases:
        torch.sum(deltas, 1, out=bias)


def _squares(values: Tensor) -> Tensor:
    """Squared norms over the last dimension, 64-bit."""
    norms: Tensor = torch.linalg.vector_norm(values, dim=-1, dtype=torch.float64)
    return norms.square()
