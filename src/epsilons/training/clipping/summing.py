"""Summing: Σ factor · gradient over records, in 64 bits, from gradients in 32.

A 32-bit sum rounds at every addition, and the rounding depends on what was added before. Without one record all later
additions round differently, in this physical batch and in every later one. So two neighbouring sums differ by more
than one contribution, and the excess grows with the square of the number of records (Casacuberta, Shoemate, Vadhan &
Wagaman, "Widespread underestimation of sensitivity in differentially private libraries", CCS 2022).

So no two records are ever added in 32 bits. Each record's contribution is computed from that record alone, or exactly,
and contributions are added in 64 bits. Factors stay in 64 bits too: rounded to 32, a small one is subnormal there and
may come out larger. What 64 bits still lose is in docs/engine.md#norms.
"""

from __future__ import annotations

import torch
from torch import Tensor

#: As many values are converted to 64 bits at once: on a CPU they stay in a core's cache until they are used.
VALUES_AT_ONCE = {"cpu": 2**18}
MOST_AT_ONCE = 2**25
#: As many records are added at once at most, so that the rounding of 64 bits does not grow with the physical batch.
RECORDS_AT_ONCE = 1024
#: Up to this many rows per record, or entries of the result, products in 64 bits take less time than a 32-bit product
#: per record.
FEW_ROWS = 16
FEW_ENTRIES = 2048
#: A 32-bit product per record runs over so many rows at most, so that its rounding does not grow with time.
ROWS_AT_ONCE = 128


def added(rows: Tensor, factor: Tensor) -> Tensor:
    """Σ factor·row: (entries,) 64-bit. rows: (records, entries); factor: (records,) 64-bit."""
    entries = rows.shape[1]
    total = torch.zeros(entries, dtype=torch.float64, device=rows.device)
    if rows.dtype == torch.float64:
        return total.addmv_(rows.T, factor)
    values = VALUES_AT_ONCE.get(rows.device.type, MOST_AT_ONCE)
    # Whole rows, or long ones part by part.
    some = max(
        1, min(RECORDS_AT_ONCE, values // max(entries, 1) if 2 * entries <= values else RECORDS_AT_ONCE, len(rows))
    )
    width = max(1, min(entries, max(1024, 2 * values // some)))
    wide = torch.empty(some * width, dtype=torch.float64, device=rows.device)
    for few, its in zip(torch.split(rows, some), torch.split(factor, some), strict=True):
        for part, into in zip(torch.split(few, width, 1), torch.split(total, width), strict=True):
            into.addmv_(wide[: part.numel()].view(part.shape).copy_(part).T, its)
    return total


def is_exact(time: int, k: int, p: int, dtype: torch.dtype) -> bool:
    """Whether `products` multiplies in 64 bits; else each record's product is rounded to 32 bits. By shapes alone."""
    return dtype == torch.float64 or time <= FEW_ROWS or k * p <= FEW_ENTRIES


def products(left: Tensor, right: Tensor, factor: Tensor) -> Tensor:
    """Σ factor·(Σ_t left_t ⊗ right_t): (k, p) 64-bit. left: (records, time, k); right: (records, time, p)."""
    if is_exact(left.shape[1], left.shape[2], right.shape[2], left.dtype):
        return _in_64_bits(left, right, factor)
    return _one_by_one(left, right, factor)


def _in_64_bits(left: Tensor, right: Tensor, factor: Tensor) -> Tensor:
    """As `products`: each product of two 32-bit numbers is exact."""
    _, time, k = left.shape
    p = right.shape[2]
    total = torch.zeros(k, p, dtype=torch.float64, device=left.device)
    values = 8 * VALUES_AT_ONCE.get(left.device.type, MOST_AT_ONCE)
    at_once = max(1, min(values // max(time * (k + p), 1), RECORDS_AT_ONCE))
    own = [torch.split(tensor, at_once) for tensor in (factor, left, right)]
    for its, some, others in zip(*own, strict=True):
        # The smaller side is scaled.
        scaled, plain = (some, others) if k <= p else (others, some)
        first = (scaled.double() * its[:, None, None]).flatten(0, 1)
        second = plain.double().flatten(0, 1)
        total.addmm_(*((first.T, second) if k <= p else (second.T, first)))
    return total


def _one_by_one(left: Tensor, right: Tensor, factor: Tensor) -> Tensor:
    """As `products`: each record's product in 32 bits, from its own rows alone, then added in 64."""
    records, _, k = left.shape
    p = right.shape[2]
    total = torch.zeros(k * p, dtype=torch.float64, device=left.device)
    at_once = max(1, min(VALUES_AT_ONCE.get(left.device.type, MOST_AT_ONCE) // (k * p), RECORDS_AT_ONCE))
    if records < at_once:
        # Products are always taken in groups of one size: a kernel for another number of records may round otherwise.
        left, right, factor = (
            torch.cat([t, t.new_zeros(at_once - records, *t.shape[1:])]) for t in (left, right, factor)
        )
        records = at_once
    written = torch.empty(at_once, k, p, dtype=left.dtype, device=left.device)
    wide = torch.empty(at_once, k * p, dtype=torch.float64, device=left.device)
    is_zero = factor == 0
    some_are = bool(is_zero.any())
    for start in range(0, records, at_once):
        # The last group is full, too: those who were added already get the factor 0.
        first = min(start, records - at_once)
        own = slice(first, first + at_once)
        its = factor[own]
        if first < start:
            its = its.index_fill(0, torch.arange(start - first, device=its.device), 0.0)
        some, others = left[own].contiguous(), right[own].contiguous()
        for few, fewer in zip(torch.split(some, ROWS_AT_ONCE, 1), torch.split(others, ROWS_AT_ONCE, 1), strict=True):
            wide.copy_(torch.bmm(few.mT, fewer, out=written).flatten(1))
            if some_are:
                wide.masked_fill_(is_zero[own, None], 0.0)  # 0·inf is NaN, and such a product may overflow
            total.addmv_(wide.T, its)
    return total.view(k, p)


__all__ = ["FEW_ROWS", "ROWS_AT_ONCE", "added", "is_exact", "products"]
