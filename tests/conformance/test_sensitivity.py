"""Promise: without one record, a sum differs by no more than that record's bound, whatever the data and their number.

A contribution within its bound is not enough: sums round, and without one record they round otherwise. Data here are
made so that roundings of 32 bits add up: partial sums stand near a power of two, on one side of it with the record and
on the other without, while thousands of small values follow that only one side rounds away.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from epsilons.errors import EpsilonsError, ModelError
from epsilons.training.clipping import ENGINES, Compiled, NonFiniteGradientError, engine

from .adapters import Refused, Table, Trainer, record
from .probes import ALMOST_NO_NOISE, Echo, losses_of_echo

#: What epsilons shrinks factors by, so that data made for 32-bit sums meet the very numbers they were made for.
SHRINK = 1 - 2.0**-20
SIZES = (256, 1024, 2048, 4096)
LARGE = (8192, 16384, 20000)
ONE = 1 - 2.0**-12  # contributions just below the clip norm


def near_a_power(records: int, kind: str, seed: int = 0) -> Tensor:
    """(records,) contributions to one coordinate, each at most 1 in size; the first is the record to leave out.

    steady       all of one sign: sums of 32 bits end far from the true one
    there, back  the second half takes back what the first half added, so that the sum itself is small
    alternating  signs alternate, with partial sums near a power of two throughout
    huge, tiny   a few large ones among many below half of the last bit
    """
    make = np.random.default_rng(seed)
    if kind == "huge, tiny":
        values = np.where(np.arange(records) % 64 == 1, ONE, make.uniform(0.3, 0.7) * records * 2.0**-31)
        values[0] = ONE
        return torch.tensor(values, dtype=torch.float32)
    share = 2 if kind == "steady" else 4
    power = 2.0 ** math.floor(math.log2(records / share))
    up = int((power - 0.5) / ONE)
    fill = power - 0.5 - up * ONE
    last_bit = power * 2.0**-23
    back = 0 if kind == "steady" else up
    rest = records - 2 - up - back
    small = np.tile([0.6 * last_bit, -0.4 * last_bit], rest // 2 + 1)[:rest]
    if kind == "alternating":
        small[0::2] += 2.0**-6
        small[1::2] -= 2.0**-6
    return torch.tensor(np.concatenate([[ONE], np.full(up, ONE), [fill], small, np.full(back, -ONE)]) / SHRINK).float()


KINDS = ("steady", "there, back", "alternating", "huge, tiny")


# -- any library --------------------------------------------------------------------------------------------


def table_of(records: int) -> Table:
    return Table(1, (0,) * records, (1.0,), (1.0,), ALMOST_NO_NOISE, float(records))


def a_sum(trainer: Trainer, x: Tensor, seed: int, physical_batch: int | None) -> np.ndarray:
    table = trainer.express(table_of(len(x)))
    model = Echo(x.shape[1], dtype=x.dtype)
    (update,) = record(trainer, model, (x,), losses_of_echo, table, seed=seed, physical_batch=physical_batch).sums
    return update[0].flatten().double().numpy()


@pytest.mark.parametrize("records", [256, 1024, *(pytest.param(n, marks=pytest.mark.slow) for n in (4096, 16384))])
@pytest.mark.parametrize("kind", ["there, back", "huge, tiny"])
def test_a_sum_moves_by_no_more_than_the_bound_of_the_record_left_out(
    trainer: Trainer, kind: str, records: int, seed: int
):
    """One physical batch of all records."""
    x = near_a_power(records, kind)[:, None]
    whole, rest = a_sum(trainer, x, seed, records), a_sum(trainer, x[1:], seed, records)
    # What reaches the optimizer is rounded to the parameter's own 32 bits, after the noise: no part of the sum.
    handed_over = np.linalg.norm([whole, rest]) * 2.0**-23
    assert np.linalg.norm(whole - rest) <= 1 + handed_over + 10 * ALMOST_NO_NOISE


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_losses_of_a_copy_of_the_model_are_refused(each: Trainer, dtype: torch.dtype, seed: int):
    """They depend on parameters, but on none that is trained: noise alone would be, and everyone charged."""
    x = torch.ones(8, 2, dtype=dtype)
    model = Echo(2, dtype=dtype)
    other = copy.deepcopy(model)
    with pytest.raises((Refused, EpsilonsError)):
        record(each, model, (x,), lambda _, batch: other(batch[0]), each.express(table_of(8)), seed=seed, lr=1.0)


# -- every engine and every kind of layer -------------------------------------------------------------------


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.layer(x))


class Scaled(nn.Module):
    """A scale and a shift: broadcast over records."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.randn(5)), nn.Parameter(torch.randn(1, 5))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale + self.shift


class Derived(nn.Module):
    """A weight computed from parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.randn(4, 2)), nn.Parameter(torch.randn(2, 5))

    def forward(self, x: Tensor) -> Tensor:
        return x @ (self.a @ self.b).T


class Untaught(nn.Module):
    """A parameter in an operator that is differentiated one record at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(3, 5) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return torch.atan2(x[:, None], self.weight)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(5, 6, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.lstm(x)[0]


def normal(*shape: int) -> Callable[[], Tensor]:
    return lambda: torch.randn(*shape)


def tokens(*shape: int) -> Callable[[], Tensor]:
    return lambda: torch.randint(7, shape)


#: module, and one record's input; what they exercise: how the engine `ghost` forms norm and sum
LAYERS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "linear": (lambda: nn.Linear(5, 4), normal(5)),
    "linear without bias": (lambda: nn.Linear(5, 4, bias=False), normal(5)),
    "linear over a few steps, written": (lambda: nn.Linear(3, 2), normal(6, 3)),
    "linear over a few steps, by Gram matrices": (lambda: nn.Linear(40, 30), normal(6, 40)),
    "linear over many steps, by Gram matrices": (lambda: nn.Linear(64, 64), normal(20, 64)),
    "convolution, windows": (lambda: nn.Conv2d(2, 3, 3), normal(2, 5, 5)),
    "convolution, grouped": (lambda: nn.Conv2d(6, 4, 3, padding=1, groups=2), normal(6, 9, 9)),
    "embedding": (lambda: nn.Embedding(7, 4), tokens(5)),
    "bag": (lambda: nn.EmbeddingBag(7, 4), tokens(5)),
    "layer norm": (lambda: nn.LayerNorm(6), normal(3, 6)),
    "group norm": (lambda: nn.GroupNorm(2, 4), normal(4, 5)),
    "lstm": (Recurrent, normal(4, 5)),
    "used twice": (Twice, normal(5)),
    "scale and shift": (Scaled, normal(5)),
    "derived weight": (Derived, normal(5)),
    "one record at a time": (Untaught, normal(5)),
}


@dataclass(frozen=True)
class Attack:
    """Records of one input, with losses of made-up sizes: their gradients are those sizes times one direction.

    direction  the gradient of a record of size 1
    bound      so that the sizes are clipped where they exceed 1 in the direction's largest coordinate
    """

    model: nn.Module
    x: Tensor
    sizes: Tensor
    heads: Tensor
    bound: float

    @property
    def parameters(self) -> list[nn.Parameter]:
        return list(self.model.parameters())

    def losses(self, rows: Tensor) -> Tensor:
        """(rows,) losses of these records."""
        outputs = self.model(self.x.expand(len(rows), *self.x.shape[1:]).contiguous())
        return (outputs * self.heads).flatten(1).sum(1) * self.sizes[rows]


def attack(layer: str, sizes: Tensor, dtype: torch.dtype = torch.float32, seed: int = 0) -> Attack:
    make, one = LAYERS[layer]
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model, x = make(), one()[None]
        heads = torch.randn_like(model(x))
    model = model.to(dtype)
    x = x.to(dtype) if x.is_floating_point() else x
    made = Attack(model, x, torch.ones(1, dtype=dtype), heads.to(dtype), 1.0)
    found = torch.autograd.grad(made.losses(torch.zeros(1, dtype=torch.long))[0], made.parameters)
    direction = torch.cat([g.double().flatten() for g in found])
    largest = float(direction.abs().max())
    scaled = (sizes.double() / largest).to(dtype)
    return Attack(model, x, scaled, heads.to(dtype), float(direction.norm()) / largest)


def its_sum(which: str, made: Attack, rows: Tensor, weight: Tensor, at_once: int, bounds: Tensor) -> list[Tensor]:
    """The engine's sum over these records, in physical batches of so many."""
    one = engine(which)
    one.attach(made.model, made.parameters)
    total = [torch.zeros_like(p, dtype=torch.float64) for p in made.parameters]
    for part in torch.split(rows, at_once):
        one.begin(len(part))
        found = one.clipped_sum(made.losses(part), bounds[part], weight[part])
        total = [t + f for t, f in zip(total, found, strict=True)]
    one.detach()
    return total


def length(sums: list[Tensor]) -> float:
    return math.sqrt(math.fsum(float(s.double().square().sum()) for s in sums))


def without(whole: list[Tensor], rest: list[Tensor]) -> float:
    return length([a - b for a, b in zip(whole, rest, strict=True)])


def by_slow(names: list[str], always: int) -> list[object]:
    return [name if i % always == 0 else pytest.param(name, marks=pytest.mark.slow) for i, name in enumerate(names)]


@pytest.mark.parametrize("records", [1024, *(pytest.param(n, marks=pytest.mark.slow) for n in (*SIZES, *LARGE))])
@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("kind", ["steady", *(pytest.param(k, marks=pytest.mark.slow) for k in KINDS[1:])])
def test_no_layers_sum_moves_by_more_than_the_bound_of_the_record_left_out(kind: str, layer: str, records: int):
    """Engine ghost, all records in one physical batch."""
    if layer in ("one record at a time", "bag") and records > 4096:
        pytest.skip("its time grows with the square of the records")
    made = attack(layer, near_a_power(records, kind))
    weight = torch.full((records,), 0.5, dtype=torch.float64)  # another power of two, so that the data stay adverse
    bounds = torch.full((records,), made.bound, dtype=torch.float64)
    rows = torch.arange(records)
    whole, rest = (its_sum("ghost", made, own, weight, records, bounds) for own in (rows, rows[1:]))
    assert without(whole, rest) <= 0.5 * made.bound


@pytest.mark.parametrize("which", ENGINES)
@pytest.mark.parametrize("layer", by_slow(list(LAYERS), always=3))
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_every_engine_keeps_the_bound_in_one_physical_batch_or_many(which: str, layer: str, dtype: torch.dtype):
    """And whole batches, odd ones and single records give the same sum, so their size is without effect on privacy."""
    if dtype == torch.bfloat16 and layer in ("lstm", "one record at a time"):
        pytest.skip("torch has no such operator in 16 bits")
    records = 96
    make = torch.Generator().manual_seed(1)
    sizes = near_a_power(records, "there, back") * 10.0 ** torch.randint(-2, 3, (records,), generator=make)
    made = attack(layer, sizes, dtype)
    weight = 0.5 + torch.rand(records, generator=make, dtype=torch.float64)
    bounds = made.bound * (0.5 + torch.rand(records, generator=make, dtype=torch.float64))
    rows = torch.arange(records)
    sums = [its_sum(which, made, rows, weight, at_once, bounds) for at_once in (records, 7, 1)]
    exact = [torch.stack(c).double().sum(0) for c in zip(*contributions(made, weight, bounds), strict=True)]
    scale = float((weight * bounds).sum())
    for found in sums:
        assert without(found, exact) <= (1e-2 if dtype == torch.bfloat16 else 2e-5) * scale
    for leaving in (0, 1, records // 2, records - 1):
        rest = its_sum(which, made, rows[rows != leaving], weight, records, bounds)
        assert without(sums[0], rest) <= float(weight[leaving] * bounds[leaving])


def contributions(made: Attack, weight: Tensor, bounds: Tensor) -> Iterator[list[Tensor]]:
    """The oracle: each record alone, by the definition."""
    alone = engine("loop")
    alone.attach(made.model, made.parameters)
    for row in range(len(weight)):
        own = torch.tensor([row])
        yield alone.clipped_sum(made.losses(own), bounds[own], weight[own])


# -- norms --------------------------------------------------------------------------------------------------


def lost_squares(count: int, lanes: int, size: float = 1.0) -> Tensor:
    """(count,) numbers whose squares are lost in a 32-bit sum: `lanes` large ones, then all below half a last bit."""
    values = torch.full((count,), 0.999 * 2.0**-12 * size)
    values[:lanes] = size
    return values


@pytest.mark.parametrize("which", ENGINES)
@pytest.mark.parametrize("time", [1, 2, 20])
@pytest.mark.parametrize(("k", "p"), [(64, 3), (128, 128), (600, 600), (1000, 130)])
def test_no_norm_is_understated_where_squares_or_products_are_lost(which: str, time: int, k: int, p: int):
    """Each record alone, its own part of the sum measured in 64 bits; all steps alike, so that nothing cancels."""
    for lanes in (1, 4, 16):
        left, right = (lost_squares(n, lanes).expand(2, time, n).contiguous() for n in (k, p))
        model = nn.Linear(k, p, bias=False)
        for clip_norm in (1.0, 1e-3):
            made = engine(which)
            made.attach(model, [model.weight])
            made.begin(2)
            losses = (model(left) * right).flatten(1).sum(1)
            only = torch.tensor([1.0, 0.0], dtype=torch.float64)
            found = made.clipped_sum(losses, torch.full((2,), clip_norm, dtype=torch.float64), only)
            made.detach()
            assert 0.999 * clip_norm <= length(found) <= clip_norm


@pytest.mark.parametrize("which", ENGINES)
@pytest.mark.parametrize("size", [1e18, 1e30])
@pytest.mark.parametrize("time", [2, 16, 40])
@pytest.mark.parametrize("nearly", [0.0, 1e-7])
def test_what_cancels_within_one_record_spoils_no_others(which: str, time: int, size: float, nearly: float):
    """One record's steps are huge and cancel, wholly or nearly: neither it nor what it is added to moves too far."""
    records, huge, k, p = 12, 5, 48, 64
    make = torch.Generator().manual_seed(3)
    left, right = torch.randn(records, time, k, generator=make), torch.randn(records, time, p, generator=make)
    sign = torch.where(torch.arange(time) % 2 == 0, 1.0, -1.0)[:, None]
    left[huge] = math.sqrt(size) * torch.randn(1, k, generator=make)
    right[huge] = (
        math.sqrt(size) * sign * (torch.randn(1, p, generator=make) + nearly * torch.randn(time, p, generator=make))
    )
    model = nn.Linear(k, p, bias=False)
    rows, ones = torch.arange(records), torch.ones(records, dtype=torch.float64)
    try:
        whole, is_proven = linear_sum(which, model, left, right, ones)
    except NonFiniteGradientError:
        return  # too large for 32 bits: the record is left out
    # Autograd's own product for the batch rounds by the number of rows, in the last bits of the huge steps, which here
    # are all there is of that gradient. So where gradients are autograd's, only this record may be left out.
    for leaving in (0, huge, records - 1) if is_proven else (huge,):
        kept = rows[rows != leaving]
        rest, is_proven_too = linear_sum(which, model, left[kept], right[kept], ones[kept])
        if is_proven_too or leaving == huge:
            assert without(whole, rest) <= 1


def linear_sum(which: str, model: nn.Linear, left: Tensor, right: Tensor, weight: Tensor) -> tuple[list[Tensor], bool]:
    """(of Σ_t left_t ⊗ right_t per record, clipped to 1; whether the engine formed the gradients itself)."""
    made = engine(which)
    made.attach(model, [model.weight])
    made.begin(len(left))
    try:
        found = made.clipped_sum((model(left) * right).flatten(1).sum(1), torch.ones_like(weight), weight)
        return found, bool(getattr(made, "is_proven", False))
    finally:
        made.detach()


# -- factors ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("which", ENGINES)
@pytest.mark.parametrize("layer", ["linear", "linear without bias", "scale and shift", "embedding", "layer norm"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_huge_gradients_and_small_clip_norms_keep_the_bound(which: str, layer: str, dtype: torch.dtype):
    """Factors far below what 32 bits hold in full: rounded there, a contribution may come out a third too long."""
    made = attack(layer, torch.ones(2), dtype)
    for size in np.geomspace(1e15, 3e38, 12):
        own = Attack(made.model, made.x, made.sizes * size, made.heads, made.bound)
        for clip_norm in (1e-2, 1e-5, 1e-6, 1e-7, 1e-9):
            one = engine(which)
            one.attach(own.model, own.parameters)
            one.begin(2)
            only = torch.tensor([1.0, 0.0], dtype=torch.float64)
            try:
                found = one.clipped_sum(
                    own.losses(torch.arange(2)), torch.full((2,), clip_norm, dtype=torch.float64), only
                )
            except NonFiniteGradientError:
                continue  # not finite: the record is left out
            finally:
                one.detach()
            assert length(found) <= clip_norm


@pytest.mark.parametrize("which", ENGINES)
def test_gradients_near_the_largest_number_keep_the_bound(which: str):
    """A linear layer's two sides, 1e19 each: the gradient fits into 32 bits, the factor does not."""
    for share in np.linspace(0.3, 1.0, 12):
        for clip_norm in (1.0, 1e-4, 1e-6, 1e-7):
            model = nn.Linear(3, 1, bias=False)
            x = torch.tensor([[1e19 * float(share), 0.0, 0.0], [1.0, 0.0, 0.0]])
            made = engine(which)
            made.attach(model, [model.weight])
            made.begin(2)
            losses = model(x).squeeze(1) * torch.tensor([1e19, 0.0])
            ones = torch.ones(2, dtype=torch.float64)
            found = made.clipped_sum(losses, clip_norm * ones, ones)
            made.detach()
            assert length(found) <= clip_norm


# -- whose parameters ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("which", ENGINES)
@pytest.mark.parametrize("layer", LAYERS)
def test_at_every_physical_batch_losses_of_other_parameters_are_refused(which: str, layer: str):
    made = attack(layer, torch.ones(3))
    other = Attack(copy.deepcopy(made.model), made.x, made.sizes, made.heads, made.bound)
    ones = torch.ones(3, dtype=torch.float64)
    for records in (1, 3):
        one = engine(which)
        one.attach(made.model, made.parameters)
        rows = torch.arange(records)
        for _ in range(2):
            one.begin(records)
            one.clipped_sum(made.losses(rows), ones[:records], ones[:records])
        one.begin(records)
        with pytest.raises(ModelError, match="none of the"):
            one.clipped_sum(other.losses(rows), ones[:records], ones[:records])
        one.detach()


@pytest.mark.parametrize("which", ENGINES)
def test_no_gradient_and_nobody_are_no_reason_to_refuse(which: str):
    """A loss times 0 depends on the parameters, and so does one that some have no part in; and nobody may be drawn."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
    made = engine(which)
    made.attach(model, list(model.parameters()))
    x, ones = torch.randn(4, 3), torch.ones(4, dtype=torch.float64)
    for losses in (lambda: 0 * model(x).squeeze(1), lambda: model[1](x).squeeze(1), lambda: model(x[:0]).squeeze(1)):
        made.begin(len(losses()))
        found = losses()
        sums = made.clipped_sum(found, ones[: len(found)], ones[: len(found)])
        assert all(torch.isfinite(s).all() for s in sums)
    made.detach()


# -- compiled -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["steady", *(pytest.param(k, marks=pytest.mark.slow) for k in KINDS[1:])])
@pytest.mark.parametrize("layer", by_slow(["linear", *(name for name in LAYERS if name != "linear")], always=2))
def test_a_compiled_sum_moves_by_no_more_than_the_bound_of_the_record_left_out(kind: str, layer: str):
    """The same program for both; the batch holds sizes and places, from which the losses are made."""
    records = 1024
    made = attack(layer, near_a_power(records, kind))

    def losses(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return (model(batch[0]) * made.heads).flatten(1).sum(1) * batch[1]

    program = Compiled(made.model, made.parameters, losses, records)
    x = made.x.expand(records, *made.x.shape[1:]).contiguous()
    bounds = torch.full((records,), made.bound, dtype=torch.float64)
    ones = torch.ones(records, dtype=torch.float64)
    sums = []
    for _ in range(2):
        sums = [
            program.sums((x[own], made.sizes[own]), records - own.start, bounds[own], ones[own])
            for own in (slice(0, records), slice(1, records))
        ]
    if program.refused:
        pytest.skip(f"not compiled: {program.refused}")
    whole, rest = sums
    assert whole is not None
    assert rest is not None
    assert without(whole, rest) <= made.bound


def test_compiled_losses_of_other_parameters_are_refused():
    model = nn.Linear(3, 1)
    other = copy.deepcopy(model)
    program = Compiled(model, list(model.parameters()), lambda _, batch: F.softplus(other(batch).squeeze(1)), 4)
    ones = torch.ones(4, dtype=torch.float64)
    with pytest.raises(ModelError, match="none of the"):
        program.sums(torch.randn(4, 3), 4, ones, ones)
