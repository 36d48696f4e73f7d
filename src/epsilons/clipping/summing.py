"""Summing: Σ factor · gradient over records, in 64 bits, from gradients in 32.

A 32-bit sum rounds at every addition, and the rounding depends on what was added before. Without one record all later
additions round differently, in this physical batch and in every later one. So two neighbouring sums differ by more
than one contribution, and the excess grows with the square of the number of records (Casacuberta, Shoemate, Vadhan &
Wagaman, "Widespread underestimation of sensitivity in differentially private libraries", CCS 2022).

So no two records are ever added in 32 bits. Each record's contribution is computed from that record alone, or exactly,
and contributions are added in 64 bits. Factors are 64-bit too: in 32 bits a small one is subnormal, and rounding may
make it larger. docs/engine.md#norms bounds what 64 bits still round.
"""

from __future__ import annotations

import math
import platform
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..core.modules import is_on_cpu
from .engine import HALF
from .loop import added_in_32_bits, gradient_of

# -- Precision: products of 32-bit numbers in 32 bits, whatever faster arithmetic torch is set to use elsewhere
#
# TF32, bfloat16 or autocast would round the factors of norms and of weighted sums (by 2⁻¹¹, 2⁻⁹), so that a
# contribution could exceed its clip norm. A model's forward pass may use them: then its results are differentiated as
# they are.


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


# -- Products: Σ_t left_t ⊗ right_t of each record on its own, in 32 bits
#
# On a CPU, oneDNN multiplies the large products of one record at the rate of AVX-512 where MKL's batched products may
# run at that of AVX2: measured on AMD's EPYC (Zen 5), 100 to 200 GFLOPS a thread from SINGLE multiplications on,
# against 70 to 95. Smaller products are multiplied in one batch. Both only multiply and add in 32 bits, so the same
# bounds hold.

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
    if INNER_PRODUCT is None or not is_on_cpu(like) or like.dtype != torch.float32:
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
    if not is_on_cpu(rows) or not rows.is_contiguous() or 1 in rows.shape:
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


# -- Summing: Σ factor · gradient over records, in 64 bits, from gradients in 32

#: So many values are converted to 64 bits at once: on a CPU, 2 MB, which stay in a core's cache until they are used.
VALUES_AT_ONCE = 2**18
#: On other devices, 256 MB: enough to keep a GPU busy, little beside its memory.
MOST_AT_ONCE = 2**25
#: At most so many records are converted at once, so that memory does not grow with the physical batch. The rounding of
#: 64 bits does grow with it: by at most n·(B + n/B)·2⁻⁵³ of the largest bound (docs/engine.md#norms).
RECORDS_AT_ONCE = 1024
#: Up to so many rows per record, or entries of the result, a product in 64 bits was measured to take less time than a
#: 32-bit product per record.
FEW_ROWS = 16
FEW_ENTRIES = 2048
#: 32-bit products are computed for so many records at once, or fewer where they are large. A kernel may round otherwise
#: for another number of records. So this follows from public settings (`Clipper`), never from how many there are.
GROUP: ContextVar[int] = ContextVar("GROUP", default=64)
#: A 32-bit product per record runs over at most so many rows, so that its rounding does not grow with time.
ROWS_AT_ONCE = 128
#: So many products are added at once: the sum is read and written half as often, and they stay in cache.
ADDED_AT_ONCE = 2


def added(rows: Tensor, factor: Tensor) -> Tensor:
    """Σ factor·row: (entries,) 64-bit. rows: (records, entries); factor: (records,) 64-bit."""
    entries = rows.shape[1]
    total = torch.zeros(entries, dtype=torch.float64, device=rows.device)
    if rows.dtype == torch.float64:
        return total.addmv_(rows.T, factor)
    values = VALUES_AT_ONCE if is_on_cpu(rows) else MOST_AT_ONCE
    # Full rows, or long rows part by part.
    some = max(
        1, min(RECORDS_AT_ONCE, values // max(entries, 1) if 2 * entries <= values else RECORDS_AT_ONCE, len(rows))
    )
    width = max(1, min(entries, max(1024, 2 * values // some)))
    if some == len(rows) and width == entries:
        return total.addmv_(rows.double().T, factor)
    wide = torch.empty(some * width, dtype=torch.float64, device=rows.device)
    for some_rows, factors in zip(torch.split(rows, some), torch.split(factor, some), strict=True):
        for part, into in zip(torch.split(some_rows, width, 1), torch.split(total, width), strict=True):
            into.addmv_(wide[: part.numel()].view(part.shape).copy_(part).T, factors)
    return total


def product_in_64_bits(time: int, k: int, p: int, dtype: torch.dtype) -> bool:
    """Whether `products` multiplies in 64 bits; else each record's product is rounded to 32 bits. By shapes alone."""
    return dtype == torch.float64 or time <= FEW_ROWS or k * p <= FEW_ENTRIES


def products(left: Tensor, right: Tensor, factor: Tensor) -> Tensor:
    """Σ factor·(Σ_t left_t ⊗ right_t): (k, p) 64-bit. left: (records, time, k); right: (records, time, p)."""
    if product_in_64_bits(left.shape[1], left.shape[2], right.shape[2], left.dtype):
        return _in_64_bits(left, right, factor)
    if is_single(left.shape[1], left.shape[2], right.shape[2], left):
        return _one_by_one(left, right, factor)
    return _in_groups(left, right, factor)


def _in_64_bits(left: Tensor, right: Tensor, factor: Tensor) -> Tensor:
    """As `products`: each product of two 32-bit numbers is exact. The smaller side is scaled, and gives the rows."""
    records, time, k = left.shape
    p = right.shape[2]
    if k > p:
        return _in_64_bits(right, left, factor).mT
    total = torch.zeros(k, p, dtype=torch.float64, device=left.device)
    values = VALUES_AT_ONCE if is_on_cpu(left) else 8 * MOST_AT_ONCE
    at_once = max(1, min(values // max(time * (k + p), 1), RECORDS_AT_ONCE, records))
    wide = torch.empty(at_once, time, p, dtype=torch.float64, device=left.device)
    parts = [torch.split(tensor, at_once) for tensor in (factor, left, right)]
    for factors, some_left, some_right in zip(*parts, strict=True):
        scaled = (some_left.double() * factors[:, None, None]).flatten(0, 1)
        plain = wide[: len(factors)].copy_(some_right).flatten(0, 1)
        total.addmm_(scaled.T, plain)
    return total


def add_products(left: Tensor, right: Tensor, factor: Tensor, total: Tensor) -> None:
    """Add `products` to a total (k, p), where these are multiplied in 64 bits.

    Some rows after the other, so that no memory of the total's size is needed. The products of all records are added
    before they meet the total, which may hold many more: else each addition would be rounded as the largest sum is.
    """
    some = max(1, 2 * VALUES_AT_ONCE // max(right.shape[2], 1))
    for rows, into in zip(torch.split(left, some, 2), torch.split(total, some), strict=True):
        into += _in_64_bits(rows, right, factor)


def _one_by_one(left: Tensor, right: Tensor, factor: Tensor) -> Tensor:
    """As `products`: one record's product in 32 bits, then added in 64, a few at a time."""
    k, p = left.shape[2], right.shape[2]
    if k > p:
        return _one_by_one(right, left, factor).mT
    total = torch.zeros(k * p, dtype=torch.float64)
    wide = torch.empty(ADDED_AT_ONCE, k, p, dtype=torch.float64)
    columns, held = wide.flatten(1).T, list[float]()
    for some, others, own in _parts(left, right, factor):
        wide[len(held)].copy_(product(some, others))
        held.append(own)
        if len(held) == ADDED_AT_ONCE:
            total.addmv_(columns, torch.tensor(held, dtype=torch.float64))
            held.clear()
    total.addmv_(columns[:, : len(held)], torch.tensor(held, dtype=torch.float64))
    return total.view(k, p)


def _parts(left: Tensor, right: Tensor, factor: Tensor) -> Iterator[tuple[Tensor, Tensor, float]]:
    """(k, time), (p, time) and the factor of each record and each ROWS_AT_ONCE rows of it.

    Not those with factor 0: 0·inf is NaN, and such a product may overflow.
    """
    is_short = left.shape[1] <= ROWS_AT_ONCE
    for one, other, own in zip(by_feature(left).unbind(), right.mT.unbind(), factor.tolist(), strict=True):
        if own == 0.0:
            continue
        if is_short:
            yield one, other, own
        else:
            for some, others in zip(*(torch.split(side, ROWS_AT_ONCE, 1) for side in (one, other)), strict=True):
                yield some, others, own


def _in_groups(left: Tensor, right: Tensor, factor: Tensor) -> Tensor:
    """As `products`: the product of each record in 32 bits, from its rows alone, then added in 64.

    All groups have one size (`GROUP`).
    """
    records, _, k = left.shape
    p = right.shape[2]
    total = torch.zeros(k * p, dtype=torch.float64, device=left.device)
    at_once = max(1, min((VALUES_AT_ONCE if is_on_cpu(left) else MOST_AT_ONCE) // (k * p), GROUP.get()))
    is_zero = factor == 0
    if not is_on_cpu(left) or bool(is_zero.any()):
        # 0·inf is NaN, and such a product may overflow.
        left, right = (side.masked_fill(is_zero[:, None, None], 0.0) for side in (left, right))
    if records < at_once:
        more = at_once - records
        left, right, factor = (F.pad(t, (0, 0) * (t.ndim - 1) + (0, more)) for t in (left, right, factor))
        records = at_once
    product = torch.empty(at_once, k, p, dtype=left.dtype, device=left.device)
    wide = torch.empty(at_once, k * p, dtype=torch.float64, device=left.device)
    for start in range(0, records, at_once):
        # The last group has the same size: records that were added already get the factor 0.
        first = min(start, records - at_once)
        group = slice(first, first + at_once)
        factors = factor[group]
        if first < start:
            factors = factors.index_fill(0, torch.arange(start - first, device=factor.device), 0.0)
        sides = (torch.split(side[group].contiguous(), ROWS_AT_ONCE, 1) for side in (left, right))
        for some_left, some_right in zip(*sides, strict=True):
            wide.copy_(torch.bmm(some_left.mT, some_right, out=product).flatten(1))
            total.addmv_(wide.T, factors)
    return total.view(k, p)


# -- Random check: an engine's gradients against autograd's, for one random combination of the losses
#
# If the gradient of a single record is wrong, Σ v·g differs from autograd's gradient of Σ v·losses for almost every
# random v (Freivalds' check of matrix products, 1977). One backward pass checks a whole physical batch.

#: How far the sum may be from autograd's, relative to the size of this parameter's part of it: far above rounding in
#: 32 bits, far below what a gradient given to the wrong record changes.
AGREEMENT = 1e-3
#: Further, relative to the size of the whole sum: what rounding in 32 bits leaves where gradients cancel to 0.
ROUNDING = 4e-6


#: Where gradients have 16 bits: how many units autograd's gradient by one parameter may be away, by rounding at the
#: operator and at casts (at most 3 were measured). Uses are added in 16 bits, which adds half the root of their number
#: (a third was measured).
ROUNDINGS = 4
#: A weight that is computed from parameters counts as so many uses: every operator on the way rounds (5 were measured).
USES_OF_A_DERIVED_WEIGHT = 64


def rounding_in_16_bits(dtypes: Collection[torch.dtype], uses: int = 1) -> float:
    """What is allowed on top of AGREEMENT for gradients of these types, by a parameter that is used so often.

    For one use 0.018 in bfloat16, 0.002 in float16; 0 if there are no such gradients.
    """
    unit = max((torch.finfo(dtype).eps / 2 for dtype in HALF.intersection(dtypes)), default=0.0)
    return (ROUNDINGS + math.sqrt(uses or USES_OF_A_DERIVED_WEIGHT) / 2) * unit


class RandomCheck:
    """One engine's checks. The seed is fixed: factors must not depend on the data, but need not be secret.

    Where gradients have 16 bits, factors are powers of two. Products with them are exact, so the backward pass that
    begins with them rounds the gradients of all activations as the engine's own does. What is left is rounding at the
    parameters.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._parameters = parameters
        self._generator = torch.Generator().manual_seed(0)

    def numbers(self, losses: Tensor, dtypes: Collection[torch.dtype]) -> Tensor:
        """(records,) random numbers for one physical batch. dtypes: of gradients in the graph"""
        if HALF.isdisjoint(dtypes):
            return torch.randn(len(losses), generator=self._generator, dtype=torch.float64).to(losses.device)
        # None is much smaller than another, and up to 4 records have different ones. Signs are independent: the sum of
        # all must not be 0, as what is wrong may be the same for all records.
        sign = 1.0 - 2.0 * torch.randint(2, losses.shape, generator=self._generator, dtype=torch.float64)
        size = torch.randperm(len(losses), generator=self._generator) % 4
        return torch.ldexp(sign, -size).to(losses.device)

    def combination(
        self,
        losses: Tensor,
        clip_factor: Tensor,
        dtypes: Collection[torch.dtype],
        numbers: Tensor | None = None,
    ) -> tuple[Tensor, list[Tensor | None]]:
        """(v, autograd's gradient of Σ v·losses by each parameter). numbers: by default, new ones

        v is random times the clip factor: in clipped units no record is too small to be seen beside another.
        """
        if not HALF.isdisjoint(dtypes):  # powers of two, of which the largest is 1: small ones end sooner in 16 bits
            exponent = torch.frexp(clip_factor).exponent
            largest = exponent.where(clip_factor > 0, -(2**20)).max()
            clip_factor = torch.ldexp((clip_factor > 0).double(), exponent - largest)
        factor = (self.numbers(losses, dtypes) if numbers is None else numbers) * clip_factor
        return factor, self.gradients(losses, factor, dtypes)

    def gradients(self, losses: Tensor, factor: Tensor, dtypes: Collection[torch.dtype]) -> list[Tensor | None]:
        """Autograd's gradient of Σ factor·losses by each parameter, at least 32-bit. Keeps the graph."""
        with added_in_32_bits(dtypes):
            gradients = gradient_of((factor.to(losses.dtype) * losses).sum(), self._parameters)
        return [g if g is None or g.dtype in (torch.float32, torch.float64) else g.double() for g in gradients]


def rounding_of(sizes: Iterable[float]) -> float:
    """The rounding allowed for a sum with parts of these sizes."""
    return ROUNDING * math.hypot(*sizes)


def agree(ours: Tensor | None, autograds: Tensor | None, size: float, rounding: float) -> bool:
    """Whether two gradients of one parameter are equal but for rounding. size: of our part of the sum, uncancelled"""
    return size_of(ours, autograds) <= AGREEMENT * size + rounding  # NaN disagrees


def size_of(one: Tensor | None, other: Tensor | None, times: float = 1.0) -> float:
    """The norm of one - times·other; None is 0."""
    zero = torch.zeros((), dtype=torch.float64)
    return float(((zero if one is None else one) - times * (zero if other is None else other)).norm())
