"""Products: Σ_t left_t ⊗ right_t of each record on its own, in 32 bits.

On a CPU, oneDNN multiplies the large products of one record at the rate of AVX-512 where MKL's batched products may run
at that of AVX2: measured on AMD's EPYC (Zen 5), 100 to 200 GFLOPS a thread from SINGLE multiplications on, against 70
to 95. Smaller products are multiplied in one batch. Both only multiply and add in 32 bits, so the same bounds hold.
"""

from __future__ import annotations

import platform
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from .precision import full_precision

#: Products with at least so many multiplications are computed record by record (0.05 ms at 130 GFLOPS).
SINGLE = 3 * 2**20
#: Sides with fewer numbers, or fewer steps, are left to batches.
NARROWEST = 16


def _inner_product() -> Callable[..., Tensor] | None:
    """oneDNN's (m, t), (n, t), a bias (n,) or None, … -> (m, n).

    None where torch was built without it, or for other processors.
    """
    if platform.machine().lower() not in ("x86_64", "amd64") or not torch._C._has_mkldnn:
        return None
    found: Callable[..., Tensor] | None = getattr(torch.ops.mkldnn, "_linear_pointwise", None)
    return found


INNER_PRODUCT = _inner_product()


def has_inner_product(like: Tensor) -> bool:
    """Whether oneDNN's inner product is used. By device, dtype and the process's settings alone."""
    if INNER_PRODUCT is None or like.device.type != "cpu" or like.dtype != torch.float32:
        return False
    return _keeps_24_bits(INNER_PRODUCT)


def is_single(time: int, k: int, p: int, like: Tensor) -> bool:
    """Whether products are computed record by record. By shapes, device and the process's settings alone."""
    return time * k * p >= SINGLE and min(time, k, p) >= NARROWEST and has_inner_product(like)


def product(left: Tensor, right: Tensor) -> Tensor:
    """(k, p), left @ right.T. left: (k, time); right: (p, time). Only where `has_inner_product`.

    Faster where k <= p.
    """
    assert INNER_PRODUCT is not None
    if not (right.is_contiguous() or right.T.is_contiguous()):
        right = right.contiguous()  # of other layouts, oneDNN's product took a thousand times as long
    return INNER_PRODUCT(left, right, None, "none", [], "")


@cache
def _keeps_24_bits(inner_product: Callable[..., Tensor]) -> bool:
    """Whether 32-bit numbers are multiplied as they are: ONEDNN_DEFAULT_FPMATH_MODE may let oneDNN round them to 16.

    No setting of torch's undoes that. All sums here are exact in 32 bits.
    """
    ones = torch.ones(256, 64)
    more = ones * (1 + 2.0**-14)
    with full_precision():
        found = [inner_product(*sides, None, "none", [], "") for sides in ((more, ones), (ones, more))]
    return all(bool((one == 64 * (1 + 2.0**-14)).all()) for one in found)


def by_feature(rows: Tensor) -> Tensor:
    """(records, features, time), contiguous: what `product` takes without a copy. rows: (records, time, features)"""
    records, time, features = rows.shape
    if rows.device.type != "cpu" or not rows.is_contiguous() or 1 in rows.shape:
        return rows.mT.contiguous()
    # One picture of one pixel for each record: torch shuffles channels with vector instructions, and copies
    # transposed matrices number by number, which takes 2 to 6 times as long.
    pixel = rows.as_strided((records, time * features, 1, 1), (time * features, 1, time * features, time * features))
    return torch.channel_shuffle(pixel, time).reshape(records, features, time)


def products_of_all(left: Tensor, right: Tensor) -> Tensor:
    """(records, k, p). left: (records, time, k); right: (records, time, p)"""
    records, time, k = left.shape
    p = right.shape[2]
    if not is_single(time, k, p, left):
        return torch.bmm(left.mT, right)
    entries = left.new_empty(records, k, p)
    for into, one, other in zip(entries, by_feature(left), right.mT, strict=True):
        into.copy_(product(one, other))
    return entries


__all__ = ["INNER_PRODUCT", "by_feature", "has_inner_product", "is_single", "product", "products_of_all"]
