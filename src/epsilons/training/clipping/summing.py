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
VALUES_AT_ONCE = {"cpu": 2**17}
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
    records, entries = rows.shape
    total = torch.zeros(entries, dtype=torch.float64, device=rows.device)
    values = VALUES_AT_ONCE.get(rows.device.type, MOST_AT_ONCE)
    if entries <= values:
        at_once = max(1, min(values // max(entries, 1), RECORDS_AT_ONCE))
        for own, its in zip(torch.split(rows, at_once), torch.split(factor, at_once), strict=True):
            total.addmv_(own.double().T, its)
        return total
    for few, its in zip(torch.split(rows, RECORDS_AT_ONCE), torch.split(factor, RECORDS_AT_ONCE), strict=True):
        # Long rows part by part: 2**20 values for few records, less for many.
        width = max(1024, min(values // 2, 8 * values // len(few)))
        for part, into in zip(torch.split(few, width, 1), torch.split(total, width), strict=True):
            into.addmv_(part.double().T, its)
    return total


def is_exact(time: int, k: int, p: int, dtype: torch.dtype) -> bool:
    """Whether `products` multiplies in 64 bits; else each record's product is rounded to 32 bits. By shapes alone."""
    return dtype == torch.float64 or time <= FEW_ROWS or k * p <= FEW_ENTRIES


def products(left: Tensor, right: Tensor, factor: Tensor) -> Tensor:
    """Σ factor·(Σ_t left_t ⊗ right_t): (k, p) 64-bit. left: (records, time, k); right: (records, time, p)."""
    records, time, k = left.shape
    p = right.shape[2]
    if is_exact(time, k, p, left.dtype):
        return _in_64_bits(left, right, factor)
    total = torch.zeros(k, p, dtype=torch.float64, device=left.device)
    if left.device.type == "cpu":
        product = torch.empty(k, p, dtype=left.dtype)
        # One product per record, always of one size: the number of records cannot change how it rounds.
        for its, rows, columns in zip(factor.tolist(), left.mT, right, strict=True):
            if its == 0.0:
                continue  # 0·inf is NaN, and such a product may overflow
            for some, others in zip(
                torch.split(rows, ROWS_AT_ONCE, 1), torch.split(columns, ROWS_AT_ONCE), strict=True
            ):
                total.add_(torch.mm(some, others, out=product), alpha=its)
        return total
    at_once = max(1, min(MOST_AT_ONCE // (k * p), RECORDS_AT_ONCE))
    own = [torch.split(tensor, at_once) for tensor in (factor, left, right)]
    for its, some, others in zip(*own, strict=True):
        for few, fewer in zip(torch.split(some, ROWS_AT_ONCE, 1), torch.split(others, ROWS_AT_ONCE, 1), strict=True):
            written = torch.bmm(few.mT, fewer).flatten(1).double()
            written.masked_fill_((its == 0.0)[:, None], 0.0)
            total.view(-1).addmv_(written.T, its)
    return total


def _in_64_bits(left: Tensor, right: Tensor, factor: Tensor) -> Tensor:
    """As `products`: each product of two 32-bit numbers is exact."""
    records, time, k = left.shape
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


__all__ = ["ROWS_AT_ONCE", "added", "is_exact", "products"]
