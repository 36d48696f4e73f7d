"""The memory layout of convolutions: channels innermost, where a model takes it and a CPU computes faster with it.

A layout changes no value and no gradient but by rounding. A model may still depend on it: `x.view(n, -1)` behind a
convolution is an error with channels innermost. So the layout is tried before training (`trial`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

_CONVOLUTIONS = (nn.Conv2d, nn.ConvTranspose2d)


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


def note(error: BaseException | None, changed: Sequence[nn.Module]) -> None:
    """Add to an error of a loop what to do if the layout caused it."""
    if changed and isinstance(error, RuntimeError) and "view" in str(error) and "stride" in str(error):
        error.add_note(
            "epsilons stores the weights of this model's convolutions with the channels innermost, which is faster on "
            "CPUs. Use .reshape or .flatten, or set Performance(channels_last=False)."
        )
