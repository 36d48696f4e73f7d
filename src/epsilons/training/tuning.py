"""Tuning: what makes any training faster on this machine, private or not. Nothing of it is done unasked.

    allocator      glibc keeps freed memory in the process instead of handing it back after each step and asking for it
                   again; for all of the process, until it ends
    channels_last  pictures are kept with their channels innermost, as convolutions and pooling on CPUs like them

Neither touches the guarantee. channels_last changes the order in which sums are taken, so it is part of what a run that
is taken up again must have alike. To add one: a function (model) -> None, and a line in TUNINGS.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable

import torch
from torch import nn

from ..errors import InputError

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h of glibc


def allocator(model: nn.Module | None = None) -> None:
    """Have glibc's malloc keep large blocks (mallopt(3)). Raises InputError where there is no glibc."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
        done = mallopt(_M_MMAP_THRESHOLD, 1 << 30) and mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)
    except (OSError, AttributeError, TypeError):
        done = False
    if not done:
        raise InputError('tuning="allocator" sets glibc\'s malloc, and this process has none. Leave it out.')


def channels_last(model: nn.Module) -> None:
    """The weights of 2-D convolutions with their channels innermost; what they compute follows. In place."""
    for module in model.modules():
        if isinstance(module, nn.Conv2d | nn.ConvTranspose2d):
            module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # missing in torch's stubs


TUNINGS: dict[str, Callable[[nn.Module], None]] = {"allocator": allocator, "channels_last": channels_last}

#: What is asked for elsewhere and not done here, and why.
REFUSED = {
    "bf16": "norms and clipped sums are always computed from 32-bit products, for factors rounded to 8 bits would lift "
    "contributions above their clip norms. For the model's own forward pass set torch.backends.mkldnn.matmul."
    "fp32_precision = 'bf16' yourself, or use torch.autocast around it: both keep the guarantee",
    "autocast": "write torch.autocast around your own forward pass and loss, and leave private.backward outside: "
    "gradients are widened to 32 bits before anything is multiplied, so contributions stay within their clip norms",
}


def tune(model: nn.Module, names: str | Iterable[str]) -> list[str]:
    """Do what was asked for, and return its names, sorted. Raises InputError for a name that is not known."""
    wanted = sorted({names} if isinstance(names, str) else set(names))
    for name in wanted:
        if name in REFUSED:
            raise InputError(f"tuning={name!r} is not offered: {REFUSED[name]}.")
        if name not in TUNINGS:
            raise InputError(f"No tuning is called {name!r}; there are: {', '.join(TUNINGS)}.")
    for name in wanted:
        TUNINGS[name](model)
    return wanted
