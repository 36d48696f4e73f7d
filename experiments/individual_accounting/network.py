"""A network in the place of softmax regression: norms of its records' gradients, and their clipped sum.

For layers that are linear in their weights and applied once: a record's gradient is the product of what a layer reads
and of the gradient by what it returns, summed over positions.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .loop import Records

#: Records of one forward pass.
AT_ONCE = 100


class Network:
    """Weights are one vector. The model has convolutions and linear layers, and no other parameters."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # three times as fast
        self.layers = [layer for layer in model.modules() if isinstance(layer, nn.Conv2d | nn.Linear)]
        assert sum(p.numel() for layer in self.layers for p in layer.parameters()) == len(self.start())
        self._known: tuple[Tensor, Records, Tensor] | None = None  # the last norms are needed again for the sum

    def start(self, data: Records | None = None) -> Tensor:
        return _flat([parameter.detach() for parameter in self.model.parameters()])

    def gradient_norms(self, data: Records, weights: Tensor) -> Tensor:
        if self._known is None or self._known[0] is not weights or self._known[1] is not data:
            self._set(weights)
            self._known = weights, data, torch.cat([self._norms(x, y) for x, y in _parts(data)])
        return self._known[2]

    def clipped_sum(self, data: Records, weights: Tensor, bounds: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        sizes = self.gradient_norms(data, weights)[rows]
        factor = (bounds[rows] / sizes.clamp_min(1e-300)).clamp_max(1.0)
        self._set(weights)
        total, parameters = torch.zeros_like(weights, dtype=torch.float64), list(self.model.parameters())
        chosen = data.subset(rows)
        for (x, y), part in zip(_parts(chosen), torch.split(factor.float(), AT_ONCE), strict=True):
            losses = F.cross_entropy(self.model(x), y, reduction="none")
            gradients = torch.autograd.grad(losses @ part, parameters)
            total += _flat(gradients).double()
        return total.float(), sizes * factor

    @torch.no_grad()
    def accuracy(self, data: Records, weights: Tensor) -> float:
        self._set(weights)
        right = sum(int((self.model(x).argmax(1) == y).sum()) for x, y in _parts(data))
        return right / len(data.targets)

    @torch.no_grad()
    def _set(self, weights: Tensor) -> None:
        parameters = list(self.model.parameters())
        for parameter, part in zip(parameters, torch.split(weights, [p.numel() for p in parameters]), strict=True):
            parameter.copy_(part.view(parameter.shape))

    def _norms(self, x: Tensor, y: Tensor) -> Tensor:
        """(records,) norms of the gradients of these records."""
        read: list[Tensor] = []
        returned: list[Tensor] = []

        def hook(layer: nn.Module, given: tuple[Tensor, ...], output: Tensor) -> None:
            read.append(given[0].detach())
            returned.append(output)

        handles = [layer.register_forward_hook(hook) for layer in self.layers]
        loss = F.cross_entropy(self.model(x), y, reduction="sum")
        for handle in handles:
            handle.remove()
        errors = torch.autograd.grad(loss, returned)
        squared = sum(_squared(*each) for each in zip(self.layers, read, errors, strict=True))
        return torch.as_tensor(squared).sqrt()


def _flat(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def _squared(layer: nn.Module, read: Tensor, error: Tensor) -> Tensor:
    """(records,) squared norms of the gradients of one layer's weights and biases, 64-bit."""
    if isinstance(layer, nn.Conv2d):
        assert isinstance(layer.padding, tuple)
        read = F.unfold(read, layer.kernel_size, layer.dilation, layer.padding, layer.stride)  # (records, k, positions)
        error = error.flatten(2)
    else:
        read, error = read[:, :, None], error[:, :, None]
    weight = error @ read.mT
    bias = error.sum(2)
    return (weight.flatten(1).square().sum(1) + bias.square().sum(1)).double()


def _parts(data: Records) -> Iterator[tuple[Tensor, Tensor]]:
    yield from zip(torch.split(data.inputs, AT_ONCE), torch.split(data.targets, AT_ONCE), strict=True)
