"""The memory layout of convolutions: channels innermost, where a model takes it and a CPU computes faster with it.

A layout changes no value and no gradient but by rounding. A model may still depend on it: `x.view(n, -1)` behind a
convolution is an error with channels innermost. So the layout is tried on a copy of the model before training, on zeros
in the shape of the first record.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .batches import tensors

_CONVOLUTIONS = (nn.Conv2d, nn.ConvTranspose2d)
#: Two computations of one model on zeros may differ by rounding alone.
_ROUNDING = 1e-3


def convolutions(model: nn.Module) -> list[nn.Module]:
    """The 2-D convolutions with their weights in the usual layout."""
    found = (module for module in model.modules() if isinstance(module, _CONVOLUTIONS))
    return [module for module in found if module.weight.is_contiguous()]


def to_channels_last(modules: Sequence[nn.Module]) -> None:
    """Store the weights of these convolutions with the channels innermost, in place; activations follow."""
    for module in modules:
        module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # missing in torch's stubs


def to_usual(modules: Sequence[nn.Module]) -> None:
    """Store the weights of these convolutions in the usual layout, in place."""
    for module in modules:
        module.to(memory_format=torch.contiguous_format)  # type: ignore[call-overload]


def prefers_channels_last(model: nn.Module) -> bool:
    """True if all convolutions are 32-bit and on a CPU, where channels_last is faster or costs a few percent at most.

    Max pooling gains most (docs/engine.md#allocator-and-memory-layout).
    """
    found = [module for module in model.modules() if isinstance(module, _CONVOLUTIONS)]
    is_fast = all(m.weight.dtype == torch.float32 and m.weight.device.type == "cpu" for m in found)
    return bool(found) and is_fast and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]


def takes_channels_last(model: nn.Module, batch: Any) -> bool:
    """True if the model computes the same with either layout from zeros in the shapes of this batch.

    False for a model that cannot be called with the batch's first tensor alone, and for one that returns pictures,
    because a loop may depend on their layout.
    """
    shapes = tensors(batch)
    if not shapes:
        return False
    try:
        tried = copy.deepcopy(model).eval()
        inputs = _inputs(tried, shapes[0])
        if inputs is None:
            return False
        usual = _outputs(tried, inputs)
        to_channels_last(convolutions(tried))
        return _is_alike(usual, _outputs(tried, inputs))
    except Exception:  # a custom model may raise anything; it keeps the usual layout
        return False


def note(error: BaseException | None, changed: Sequence[nn.Module]) -> None:
    """Add to an error of a loop what to do if the layout caused it."""
    if changed and isinstance(error, RuntimeError) and "view" in str(error) and "stride" in str(error):
        error.add_note(
            "epsilons stores the weights of this model's convolutions with the channels innermost, which is faster on "
            "CPUs. Use .reshape or .flatten, or set Performance(channels_last=False)."
        )


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


def _is_alike(usual: Sequence[Tensor], ours: Sequence[Tensor]) -> bool:
    return len(usual) == len(ours) > 0 and all(
        a.ndim != 4 and a.shape == b.shape and torch.allclose(a, b, _ROUNDING, _ROUNDING)
        for a, b in zip(usual, ours, strict=True)
    )
