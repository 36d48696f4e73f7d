"""Norms: upper bounds on sums of squares computed in 32 bits, for any data and any order of additions.

A norm that is understated lets a contribution exceed its clip norm (docs/engine.md#norms).
"""

from __future__ import annotations

import torch
from torch import Tensor

#: Sums of squares in 32 bits run over this many numbers; from there on, 64 bits. Rounding then costs 1 + 72·2⁻²⁴.
SQUARES_AT_ONCE = 64
#: Inner products run over this many numbers in 32 bits: longer, so that the products still run at full speed.
PRODUCTS_AT_ONCE = 128
#: Further roundings: squares or products, roots, second-order terms, and the additions in 64 bits.
OTHER_ROUNDINGS = 8
#: The smallest normal 32-bit number: a square or product below it may be lost whole. One side of a gradient can be as
#: small as the other is large, so this is added before sides are multiplied.
LOST = 2.0**-126


def rounding(terms: int, dtype: torch.dtype) -> float:
    """By how much a sum of so many products may be too small, relative to the sum of their absolute values.

    In any order, fused or not: Higham, Accuracy and Stability of Numerical Algorithms, 2nd ed., lemma 3.1.
    """
    return (terms + OTHER_ROUNDINGS) * torch.finfo(dtype).eps / 2


def squares(rows: Tensor) -> Tensor:
    """(rows,) 64-bit upper bounds on the sum of squares of all numbers in each row."""
    flat = rows.permute(in_memory_order(rows)).reshape(len(rows), -1)
    entries = flat.shape[1]
    lost = entries * LOST
    more = 1 + rounding(min(entries, SQUARES_AT_ONCE), rows.dtype) + entries * 2.0**-53
    if entries <= SQUARES_AT_ONCE:
        short: Tensor = torch.linalg.vector_norm(flat, dim=1).double().square() * more + lost
        return short
    full = entries // SQUARES_AT_ONCE * SQUARES_AT_ONCE
    parts = flat[:, :full].view(len(flat), -1, SQUARES_AT_ONCE)
    total: Tensor = torch.linalg.vector_norm(parts, dim=2).double().square().sum(1)
    if full < entries:
        total += torch.linalg.vector_norm(flat[:, full:], dim=1).double().square()
    return total * more + lost


def in_memory_order(rows: Tensor) -> list[int]:
    """The axes: the first, then by stride, widest first, so that flattening copies nothing."""
    return [0, *sorted(range(1, rows.ndim), key=rows.stride, reverse=True)]
