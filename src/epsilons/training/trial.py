"""What is found out about a model before training, on a copy of it and zeros in the shape of the first record."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .batches import tensors
from .graphs import ends_the_process
from .layout import convolutions, to_channels_last

#: A larger model is not copied: 512 MB of 32-bit parameters.
LARGEST_COPY = 2**27
#: Two computations of one model on zeros may differ by rounding alone.
_ROUNDING = 1e-3


@dataclass(frozen=True)
class Trial:
    """What a model did with zeros; nothing is known of a model that could not be tried.

    saved                bytes per record that the forward pass keeps for the backward pass
    takes_channels_last  True if it computes the same with this layout, can be differentiated, and returns no picture
    """

    saved: int | None = None
    takes_channels_last: bool = False

    @classmethod
    def of(cls, model: nn.Module, batch: Any) -> Trial:
        """Try the model on two records in the shapes of this batch; it is called with the batch's first tensor.

        False for a model that returns pictures, because a loop may depend on their layout.
        """
        shapes = tensors(batch)
        if not shapes or sum(p.numel() for p in model.parameters()) > LARGEST_COPY:
            return cls()
        try:
            tried = copy.deepcopy(model).eval()
            inputs = _inputs(tried, shapes[0])
            return cls() if inputs is None else cls(_saved(tried, inputs), _takes_channels_last(tried, inputs))
        except Exception:  # a custom model may raise anything; then the settings do not depend on it
            return cls()


def _inputs(model: nn.Module, like: Tensor) -> Tensor | None:
    """Zeros that the model takes; loops often convert 8-bit pictures themselves. None if it takes neither."""
    zeros = torch.zeros_like(like)
    for inputs in (zeros, zeros.float()):
        try:
            _outputs(model, inputs)
        except Exception:
            continue
        return inputs
    return None


def _outputs(model: nn.Module, inputs: Tensor) -> list[Tensor]:
    with torch.no_grad():
        return tensors(model(inputs))


def _saved(model: nn.Module, inputs: Tensor) -> int:
    """Bytes per record that are kept for the backward pass, besides parameters and inputs."""
    known = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers(), inputs)}
    sizes: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            sizes[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        _ = model(inputs)
    return sum(sizes.values()) // len(inputs)


def _takes_channels_last(model: nn.Module, inputs: Tensor) -> bool:
    if not (found := convolutions(model)):
        return False
    usual = _outputs(model, inputs)
    to_channels_last(found)
    with torch.enable_grad():
        ours = tensors(model(inputs))
    return not ends_the_process(ours) and _is_alike(usual, [t.detach() for t in ours])


def _is_alike(usual: Sequence[Tensor], ours: Sequence[Tensor]) -> bool:
    return len(usual) == len(ours) > 0 and all(
        a.ndim != 4 and a.shape == b.shape and torch.allclose(a, b, _ROUNDING, _ROUNDING)
        for a, b in zip(usual, ours, strict=True)
    )
