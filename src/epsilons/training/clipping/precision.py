"""Precision: products of 32-bit numbers in 32 bits, whatever faster arithmetic torch is set to use elsewhere.

TF32, bfloat16 or autocast would round the factors of norms and of weighted sums (by 2⁻¹¹, 2⁻⁹), so that a contribution
could exceed its clip norm. A model's forward pass may use them: then its results are differentiated as they are.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from typing import Any

import torch


@cache
def _switches() -> list[Any]:
    """Every setting of precision (torch 2.9 and later)."""
    backends: Any = torch.backends
    parts = [(backend, name) for backend in (backends.cudnn, backends.mkldnn) for name in ("conv", "rnn")]
    parts += [(backend, "matmul") for backend in (backends.cuda, backends.mkldnn)]
    settings = [getattr(backend, name, None) for backend, name in parts]
    return [part for part in settings if hasattr(part, "fp32_precision")]


def in_use() -> str:
    """The precisions that are set, as a text: they may change the last bits of a sum."""
    switches = _switches()
    return " ".join(part.fp32_precision for part in switches) if switches else torch.get_float32_matmul_precision()


@contextmanager
def full_precision() -> Iterator[None]:
    """No TF32, bfloat16 or autocast for products, convolutions and recurrent layers. Then all settings are restored."""
    with ExitStack() as stack:
        for device in ("cpu", "cuda"):
            if torch.is_autocast_enabled(device):  # the caller's loop runs private.backward inside autocast
                stack.enter_context(torch.autocast(device, enabled=False))
        stack.enter_context(_no_switches())
        yield


@contextmanager
def _no_switches() -> Iterator[None]:
    switches = _switches()
    if not switches:
        before = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("highest")
        try:
            with torch.backends.cudnn.flags(enabled=torch.backends.cudnn.enabled, allow_tf32=False):
                yield
        finally:
            torch.set_float32_matmul_precision(before)
        return
    # Once the newer settings were used, the older functions raise an error. So only the newer ones are used.
    precisions = [part.fp32_precision for part in switches]
    try:
        for part in switches:
            part.fp32_precision = "ieee"
        yield
    finally:
        for part, precision in zip(switches, precisions, strict=True):
            part.fp32_precision = precision
