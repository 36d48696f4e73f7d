"""Products of 32-bit numbers as such, whatever faster and coarser ones torch is told to use elsewhere.

TF32 or bfloat16 would round the factors of norms and of weighted sums anew (2⁻¹¹, 2⁻⁹), so that a contribution could be
longer than its clip norm. A model's own forward pass may use them: what it computes is then what is differentiated.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


def _switches() -> list[Any]:
    """Everything that has a precision of its own (torch 2.9 and later)."""
    backends: Any = torch.backends
    parts = [(backend, name) for backend in (backends.cudnn, backends.mkldnn) for name in ("conv", "rnn")]
    parts += [(backend, "matmul") for backend in (backends.cuda, backends.mkldnn)]
    found = [getattr(backend, name, None) for backend, name in parts]
    return [part for part in found if hasattr(part, "fp32_precision")]


def in_use() -> str:
    """The precisions set, as a text: they may change the last bits of a sum."""
    switches = _switches()
    return " ".join(part.fp32_precision for part in switches) if switches else torch.get_float32_matmul_precision()


@contextmanager
def full_precision() -> Iterator[None]:
    """No TF32 and no bfloat16 inside, for products, convolutions and recurrent layers; afterwards all is as it was."""
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
    # The older functions raise once somebody used the newer ones, so only these are used.
    precisions = [part.fp32_precision for part in switches]
    try:
        for part in switches:
            part.fp32_precision = "ieee"
        yield
    finally:
        for part, precision in zip(switches, precisions, strict=True):
            part.fp32_precision = precision
