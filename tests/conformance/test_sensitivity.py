"""Promise: without one record, a sum differs by no more than that record's bound, for any data and any number of them.

A contribution within its bound is not enough: sums round, and without one record they round differently. The data here
are made so that roundings of 32 bits add up (adverse.py).
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from epsilons.clipping import ENGINES, Engine, NonFiniteGradientError, engine
from epsilons.errors import EpsilonsError, ModelError
from shares import share
from sums import away, length

from .adapters import Refused, Table, Trainer, record
from .adverse import KINDS, LAYERS, Attack, attack, near_a_power
from .probes import ALMOST_NO_NOISE, Echo, losses_of_echo

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
    full, rest = a_sum(trainer, x, seed, records), a_sum(trainer, x[1:], seed, records)
    # What reaches the optimizer is rounded to the parameter's own 32 bits, after the noise: no part of the sum.
    handed_over = np.linalg.norm([full, rest]) * 2.0**-23
    assert np.linalg.norm(full - rest) <= 1 + handed_over + 10 * ALMOST_NO_NOISE


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_losses_of_a_copy_of_the_model_are_refused(each: Trainer, dtype: torch.dtype, seed: int):
    """They depend on parameters, but on none that is trained: noise alone would be, and everyone charged."""
    x = torch.ones(8, 2, dtype=dtype)
    model = Echo(2, dtype=dtype)
    other = copy.deepcopy(model)
    with pytest.raises((Refused, EpsilonsError)):
        record(each, model, (x,), lambda _, batch: other(batch[0]), each.express(table_of(8)), seed=seed, lr=1.0)


# -- every engine and every kind of layer -------------------------------------------------------------------


@contextmanager
def attached(which: str, model: nn.Module) -> Iterator[Engine]:
    case = engine(which)
    case.attach(model, list(model.parameters()))
    try:
        yield case
    finally:
        case.detach()


def attack_sum(which: str, case: Attack, rows: Tensor, weight: Tensor, at_once: int, bounds: Tensor) -> list[Tensor]:
    """The engine's sum over these records, in physical batches of so many."""
    total = [torch.zeros_like(p, dtype=torch.float64) for p in case.parameters]
    with attached(which, case.model) as one:
        for part in torch.split(rows, at_once):
            one.begin(len(part))
            added = one.clipped_sum(case.losses(part), bounds[part], weight[part])
            total = [t + a for t, a in zip(total, added, strict=True)]
    return total


def first_alone(which: str, model: nn.Module, losses: Callable[[], Tensor], clip_norm: float) -> list[Tensor]:
    """The part of the first of two records in the sum."""
    with attached(which, model) as one:
        one.begin(2)
        weight = torch.tensor([1.0, 0.0], dtype=torch.float64)
        return one.clipped_sum(losses(), torch.full((2,), clip_norm, dtype=torch.float64), weight)


def by_slow(names: Iterable[str], always: int) -> list[object]:
    """One in `always` names in every run, the others with --slow."""
    return [name if i % always == 0 else pytest.param(name, marks=pytest.mark.slow) for i, name in enumerate(names)]


@pytest.mark.parametrize(
    "records", [1024, *(pytest.param(n, marks=pytest.mark.slow) for n in (256, 2048, 4096, 8192, 16384, 20000))]
)
@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("kind", by_slow(KINDS, always=4))
def test_no_layers_sum_moves_by_more_than_the_bound_of_the_record_left_out(kind: str, layer: str, records: int):
    """Engine ghost, all records in one physical batch."""
    if layer in ("one record at a time", "bag") and records > 4096:
        pytest.skip("its time grows with the square of the records")
    case = attack(layer, near_a_power(records, kind))
    weight = torch.full((records,), 0.5, dtype=torch.float64)  # another power of two, so that the data stay adverse
    bounds = torch.full((records,), case.bound, dtype=torch.float64)
    rows = torch.arange(records)
    full, rest = (attack_sum("ghost", case, some, weight, records, bounds) for some in (rows, rows[1:]))
    assert away(full, rest) <= 0.5 * case.bound


@pytest.mark.parametrize("layer", [layer for layer in LAYERS if layer not in ("one record at a time", "bag")])
@pytest.mark.parametrize("kind", by_slow(KINDS, always=4))
def test_no_layers_sum_moves_by_more_than_the_bound_of_the_person_left_out(kind: str, layer: str):
    """Engine ghost, 256 persons of 4 rows in one physical batch."""
    case = attack(layer, near_a_power(1024, kind))

    def sum_without(persons: int) -> list[Tensor]:
        count = 256 - persons
        bounds = torch.full((count,), case.bound, dtype=torch.float64)
        with attached("ghost", case.model) as one:
            one.begin(4 * count)
            losses = case.losses(torch.arange(4 * persons, 1024))
            return one.clipped_sum(losses, bounds, torch.full_like(bounds, 0.5), [4] * count)

    assert away(sum_without(0), sum_without(1)) <= 0.5 * case.bound


@pytest.mark.parametrize("which", ENGINES)
@pytest.mark.parametrize("layer", by_slow(LAYERS, always=4))
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_every_engine_keeps_the_bound_in_one_physical_batch_or_many(which: str, layer: str, dtype: torch.dtype):
    """And whole batches, odd ones and single records give the same sum, so their size is without effect on privacy."""
    if dtype == torch.bfloat16 and layer in ("lstm", "one record at a time"):
        pytest.skip("torch has no such operator in 16 bits")
    records = 96
    make = torch.Generator().manual_seed(1)
    sizes = near_a_power(records, "there, back") * 10.0 ** torch.randint(-2, 3, (records,), generator=make)
    case = attack(layer, sizes, dtype)
    weight = 0.5 + torch.rand(records, generator=make, dtype=torch.float64)
    bounds = case.bound * (0.5 + torch.rand(records, generator=make, dtype=torch.float64))
    rows = torch.arange(records)
    sums = [attack_sum(which, case, rows, weight, at_once, bounds) for at_once in (records, 7, 1)]
    exact = attack_sum("loop", case, rows, weight, 1, bounds)  # the definition
    scale = float((weight * bounds).sum())
    for one in sums:
        assert away(one, exact) <= (1e-2 if dtype == torch.bfloat16 else 2e-5) * scale
    for leaving in (0, 1, records // 2, records - 1):
        rest = attack_sum(which, case, rows[rows != leaving], weight, records, bounds)
        assert away(sums[0], rest) <= float(weight[leaving] * bounds[leaving])


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
            contribution = first_alone(which, model, lambda: (model(left) * right).flatten(1).sum(1), clip_norm)  # noqa: B023
            assert 0.999 * clip_norm <= length(contribution) <= clip_norm


@pytest.mark.parametrize("which", ENGINES)
@pytest.mark.parametrize("size", [1e8, 1e17])
@pytest.mark.parametrize(("time", "k", "p"), [(2, 48, 64), (16, 48, 64), (40, 48, 64), (20, 160, 192)])
@pytest.mark.parametrize("nearly", [0.0, 1e-7])
def test_what_cancels_within_one_record_changes_no_others(
    which: str, time: int, k: int, p: int, size: float, nearly: float
):
    """One record's steps are huge and cancel, wholly or nearly: neither it nor what it is added to moves too far."""
    records, huge = 12, 5
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
        full, is_proven = linear_sum(which, model, left, right, ones)
    except NonFiniteGradientError:
        return  # too large: the record is left out
    # Autograd's own product for the batch rounds by the number of rows, in the last bits of the huge steps, which here
    # are all there is of that gradient. So where gradients are autograd's, only this record may be left out.
    for leaving in (0, huge, records - 1) if is_proven else (huge,):
        kept = rows[rows != leaving]
        rest, is_proven_too = linear_sum(which, model, left[kept], right[kept], ones[kept])
        if is_proven_too or leaving == huge:
            assert away(full, rest) <= 1


def linear_sum(which: str, model: nn.Linear, left: Tensor, right: Tensor, weight: Tensor) -> tuple[list[Tensor], bool]:
    """(of Σ_t left_t ⊗ right_t per record, clipped to 1; whether the engine formed the gradients itself)."""
    with attached(which, model) as case:
        case.begin(len(left))
        sums = case.clipped_sum((model(left) * right).flatten(1).sum(1), torch.ones_like(weight), weight)
        return sums, bool(getattr(case, "is_proven", False))


# -- factors ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("which", ENGINES)
@pytest.mark.parametrize(
    "layer",
    share(["linear", "linear without bias", "scale and shift", "embedding", "mean of an embedding", "layer norm"], 3),
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_huge_gradients_and_small_clip_norms_keep_the_bound(which: str, layer: str, dtype: torch.dtype):
    """Factors far below what 32 bits hold in full: rounded there, a contribution may come out a third too long."""
    case = attack(layer, torch.ones(2), dtype)
    for size in np.geomspace(1e15, 3e38, 12):  # the largest are left out
        larger = replace(case, sizes=case.sizes * size)
        for clip_norm in (1e-2, 1e-9, 1e-22, 1e-26):
            try:
                contribution = first_alone(which, larger.model, partial(larger.losses, torch.arange(2)), clip_norm)
            except NonFiniteGradientError:
                continue  # the record is left out
            except ModelError:  # not proven in 16 bits: refused, and no other engine takes over
                assert which == "ghost"
                assert dtype == torch.bfloat16
                continue
            assert length(contribution) <= clip_norm


@pytest.mark.parametrize("which", ENGINES)
def test_gradients_near_the_largest_number_keep_the_bound(which: str):
    """A linear layer's two sides, below 2³⁰ each: the gradient fits into 32 bits, and some factors do not."""
    for part in np.linspace(0.3, 0.99, 12):
        for clip_norm in (1.0, 1e-7, 1e-22, 1e-26):
            model = nn.Linear(3, 1, bias=False)
            x = torch.tensor([[2.0**30 * float(part), 0.0, 0.0], [1.0, 0.0, 0.0]])
            losses = lambda: model(x).squeeze(1) * torch.tensor([2.0**30, 0.0])  # noqa: B023, E731
            contribution = length(first_alone(which, model, losses, clip_norm))
            assert 0.99 * clip_norm <= contribution <= clip_norm


# -- other parameters ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("which", ENGINES)
@pytest.mark.parametrize("layer", LAYERS)
def test_at_every_physical_batch_losses_of_other_parameters_are_refused(which: str, layer: str):
    case = attack(layer, torch.ones(3))
    other = replace(case, model=copy.deepcopy(case.model))
    ones = torch.ones(3, dtype=torch.float64)
    for records in (1, 3):
        rows, rest = torch.arange(records), (ones[:records], ones[:records])
        with attached(which, case.model) as one:
            for _ in range(2):
                one.begin(records)
                one.clipped_sum(case.losses(rows), *rest)
            one.begin(records)
            with pytest.raises(ModelError, match="none of the"):
                one.clipped_sum(other.losses(rows), *rest)


@pytest.mark.parametrize("which", ENGINES)
def test_losses_of_no_gradient_and_of_no_records_are_accepted(which: str):
    """A loss times 0 depends on the parameters, as one does that leaves some out; and a draw may be empty."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
    x, ones = torch.randn(4, 3), torch.ones(4, dtype=torch.float64)
    with attached(which, model) as case:
        for compute in (lambda: 0 * model(x), lambda: model[1](x), lambda: model(x[:0])):
            case.begin(len(compute()))
            losses = compute().squeeze(1)
            sums = case.clipped_sum(losses, ones[: len(losses)], ones[: len(losses)])
            assert all(torch.isfinite(s).all() for s in sums)
