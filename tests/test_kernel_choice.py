"""Kernels: all of them give the definition's sum, so the choice between them is about speed alone."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from epsilons.clipping import summing
from epsilons.clipping.ghost import conv, outer_products
from epsilons.clipping.ghost.outer_products import OuterProductGrad, ProductSide
from epsilons.clipping.ghost.per_sample_grads import SMALLEST_NORMAL, rounding
from functional import Model
from sums import CLOSE, OVERSTATED, away, common_mode, length, share, sums_of


def over_time() -> nn.Module:
    """A linear layer on 5 steps and one on 40, so that the rule chooses differently."""

    def compute(model: nn.Module, x: Tensor) -> Tensor:
        hidden = torch.tanh(model.few(x))
        return model.many(hidden.repeat(1, 8, 1) * torch.linspace(0.1, 1, 40)[:, None]).sum(1)

    return Model(compute, few=nn.Linear(12, 12), many=nn.Linear(12, 3))


MODELS = {
    "linear over time": (over_time, (5, 12)),
    "convolutions": (
        lambda: nn.Sequential(nn.Conv2d(2, 5, 3, 2, padding=1), nn.Tanh(), nn.Conv2d(5, 7, 2, dilation=2)),
        (2, 9, 8),
    ),
    "wide convolution": (lambda: nn.Conv2d(16, 16, 3), (16, 4, 4)),
    "few channels": (
        lambda: nn.Sequential(
            nn.Conv2d(3, 4, (4, 3), (2, 1), padding=(1, 2), dilation=(1, 2)), nn.Tanh(), nn.Conv2d(4, 5, 2, dilation=2)
        ),
        (3, 9, 8),
    ),
    "few channels, last": (
        lambda: nn.Sequential(nn.Conv2d(3, 4, 4, (2, 4), padding=(1, 0)), nn.Tanh(), nn.Conv2d(4, 5, 2)).to(
            memory_format=torch.channels_last
        ),
        (3, 9, 8),
    ),
    "few channels, three axes": (lambda: nn.Conv3d(2, 3, (2, 3, 4), (2, 1, 2), padding=(0, 1, 1)), (2, 5, 5, 6)),
    "three axes": (
        lambda: nn.Conv3d(5, 4, (2, 3, 2), (1, 2, 1), padding=(0, 1, 1), dilation=(2, 1, 1)),
        (5, 5, 6, 4),
    ),
    "channels last": (
        lambda: nn.Sequential(nn.Conv2d(5, 6, 3, (1, 2), padding=(2, 0)), nn.Tanh(), nn.Conv2d(6, 5, 2)).to(
            memory_format=torch.channels_last
        ),
        (5, 6, 7),
    ),
    "outputs in vectors": (
        lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.Tanh(), nn.Conv2d(8, 5, 1), nn.Tanh(), nn.Conv2d(5, 16, 3)),
        (3, 9, 8),
    ),
    "groups and one axis": (
        lambda: nn.Sequential(nn.Conv1d(4, 6, 3, groups=2), nn.Tanh(), nn.Conv1d(6, 2, 2, padding=1)),
        (4, 9),
    ),
}


@pytest.mark.parametrize(("single", "most_lines"), [(summing.SINGLE, 1.125), (1, 0.0), (1, 9.0)])
@pytest.mark.parametrize("at_once", share([1000, 1, 2**18], every=3))
@pytest.mark.parametrize("choice", [True, False])
@pytest.mark.parametrize("name", MODELS)
def test_every_kernel_gives_the_definitions_sum(name, choice, at_once, single, most_lines, monkeypatch):
    monkeypatch.setattr(summing, "SINGLE", single)
    monkeypatch.setattr(conv, "MOST_LINES", most_lines)
    monkeypatch.setattr(summing, "NARROWEST", 1)
    monkeypatch.setitem(conv.VALUES_AT_ONCE, "cpu", at_once)
    monkeypatch.setattr(conv, "is_windowed", lambda weight, positions, is_plain: is_plain and choice)
    monkeypatch.setattr(OuterProductGrad, "is_dense", property(lambda self: choice and self._sizes[0] > 1))
    make, shape = MODELS[name]
    torch.manual_seed(0)
    model, x = make(), torch.randn(9, *shape)
    clip_norm = torch.linspace(0.1, 30, 9, dtype=torch.float64)
    ours, theirs = sums_of(model, lambda model, x: model(x).square().flatten(1).sum(1), x, clip_norm)
    assert away(ours, theirs) <= CLOSE * length(theirs)


@pytest.mark.parametrize("is_dense", [True, False])
@pytest.mark.parametrize("sizes", [(64, 20, 30), (4, 60, 50)])
def test_no_kernel_lets_a_contribution_grow_where_features_cancel(is_dense, sizes, monkeypatch):
    monkeypatch.setattr(OuterProductGrad, "is_dense", property(lambda self: is_dense))
    grad = OuterProductGrad(*(ProductSide(side) for side in common_mode(32, 1e-4, *sizes)))
    norm = grad.squared_norm().sqrt()
    for record in range(32):
        factor = torch.zeros(32, dtype=torch.float64)
        factor[record] = 1e-3 / (OVERSTATED * norm[record]) * (1 - 2.0**-20)
        assert 0.998e-3 <= float(grad.weighted(factor).norm()) <= 1e-3


# -- products of one record ---------------------------------------------------------------------------------

TIME, K, P = 40, 24, 56


def hard(kind: str) -> tuple[Tensor, Tensor]:
    """Both sides, of 6 records each, in which much is lost by rounding or below 2⁻¹²⁶."""
    if kind == "cancelling":
        return common_mode(6, 1e-5, TIME, K, P)
    make = torch.Generator().manual_seed(0)
    left, right = torch.randn(6, TIME, K, generator=make), torch.randn(6, TIME, P, generator=make)
    powers = {"plain": (0, 0), "tiny, huge": (-126, 120), "subnormal": (-140, 100), "vanishing": (-80, -60)}
    scale, other = (2.0**power for power in powers[kind])
    return (left.double() * scale).float(), right * other


@pytest.fixture
def singly(monkeypatch):
    monkeypatch.setattr(summing, "SINGLE", 1)
    if not summing.is_single(TIME, K, P, torch.zeros(1)):
        pytest.skip("torch was built without oneDNN, or for another processor")


@pytest.mark.usefixtures("singly")
@pytest.mark.parametrize("kind", ["plain", "cancelling", "tiny, huge", "subnormal", "vanishing"])
def test_a_product_of_one_record_rounds_no_more_than_norms_allow_for(kind):
    left, right = hard(kind)
    ours = summing.products_of_all(left, right).double()
    exact, size = left.double().mT @ right.double(), left.double().abs().mT @ right.double().abs()
    allowed = rounding(TIME, torch.float32) * size + TIME * SMALLEST_NORMAL
    assert ((ours - exact).abs() <= allowed).all()


@pytest.mark.usefixtures("singly")
@pytest.mark.parametrize("kind", ["plain", "cancelling", "subnormal"])
def test_no_records_product_depends_on_the_others(kind):
    left, right = hard(kind)
    every = summing.products_of_all(left, right)
    broken = left.clone()
    broken[[0, 2]] = torch.tensor([torch.inf, torch.nan])[:, None, None]
    assert torch.equal(summing.products_of_all(broken, right)[[1, 3, 4, 5]], every[[1, 3, 4, 5]])
    assert torch.equal(summing.products_of_all(left[3:4], right[3:4])[0], every[3])


LAYERS = {
    "padded": (nn.Conv2d(32, 32, 3, padding=1), (24, 24)),
    "strides, dilation": (nn.Conv2d(32, 16, (3, 5), (1, 2), padding=(0, 3), dilation=(2, 3)), (40, 20)),
    "one axis": (nn.Conv1d(64, 96, 3, padding=2), (100,)),
    "three axes": (nn.Conv3d(16, 16, (3, 3, 2), (1, 2, 1), padding=(1, 1, 0)), (20, 9, 8)),
}


@pytest.mark.usefixtures("singly")
@pytest.mark.parametrize("name", LAYERS)
def test_products_by_line_are_each_records_own_gradient(name):
    layer, sizes = LAYERS[name]
    make = torch.Generator().manual_seed(0)
    x = torch.randn(4, layer.in_channels, *sizes, generator=make)
    x[2] = torch.nan  # must be seen in no other record
    gradient = torch.randn(layer(x).shape, generator=make)
    kernel = conv.Kernel(layer.kernel_size, layer.stride, layer.padding, layer.dilation)
    assert conv.is_by_line(layer.in_channels, gradient, kernel)
    ours = conv.products_by_line(x, gradient, kernel)
    assert torch.equal(conv.products_by_line(x[1:2], gradient[1:2], kernel)[0], ours[1])
    wide = copy.deepcopy(layer).double()
    for record in (0, 1, 3):
        (theirs,) = torch.autograd.grad(wide(x[record, None].double()), wide.weight, gradient[record, None].double())
        rows = ours[record].unflatten(2, (*layer.kernel_size[1:], -1)).movedim((1, -1), (0, 1))
        assert float((rows - theirs).norm()) <= 1e-6 * float(theirs.norm())


@pytest.mark.parametrize("sizes", [(3, 40, 24), (2, 17, 33), (1, 5, 1), (4, 1, 6), (0, 2, 3)])
def test_sides_by_feature_hold_the_same_numbers(sizes):
    rows = torch.randn(sizes)
    for given in (rows, rows.double(), torch.randn(*sizes[:1], *sizes[:0:-1]).mT, rows.expand(2, *sizes)[0]):
        turned = summing.by_feature(given)
        assert turned.is_contiguous()
        assert torch.equal(turned, given.mT)


@pytest.mark.usefixtures("singly")
@pytest.mark.parametrize("sides", [(K, P), (P, K)])
def test_without_one_record_a_sum_of_single_products_moves_by_its_part_alone(sides, monkeypatch):
    monkeypatch.setattr(summing, "FEW_ENTRIES", 0)
    make = torch.Generator().manual_seed(0)
    # Just above powers of two, in 32 bits every addition would round in one direction.
    left, right = (1 + 2.0**-23 * torch.randint(0, 9, (400, TIME, n), generator=make) for n in sides)
    factor = torch.rand(400, generator=make, dtype=torch.float64)
    factor[7] = 0.0
    right[7] = torch.inf  # at the factor 0, it must not be seen
    own = summing.product(left[0].mT, right[0].mT).double() * factor[0]
    full, rest = (summing.products(left[n:], right[n:], factor[n:]) for n in (0, 1))
    assert float((full - rest - own).norm()) <= 2.0**-40 * float(own.norm())


@pytest.mark.usefixtures("singly")
def test_gaps_between_rows_change_no_bit_of_a_product():
    """oneDNN has another, slow kernel for them, which rounds differently."""
    left, right = hard("plain")
    whole = summing.products_of_all(left, right)
    wider = [torch.cat([side, side], 2)[:, :, : side.shape[2]] for side in (left, right)]
    for some in ((wider[0], right), (left, wider[1]), wider):
        assert torch.equal(summing.products_of_all(*some), whole)


@pytest.mark.usefixtures("singly")
@pytest.mark.parametrize("side", [0, 1])
def test_a_onednn_that_rounds_to_16_bits_is_not_used(side, monkeypatch):
    """As with ONEDNN_DEFAULT_FPMATH_MODE=BF16 on processors that multiply in bfloat16."""
    exact = summing.INNER_PRODUCT

    def rounded(*arguments):
        sides = [t.bfloat16().float() if i == side else t for i, t in enumerate(arguments[:2])]
        return exact(*sides, *arguments[2:])

    monkeypatch.setattr(summing, "INNER_PRODUCT", rounded)
    assert not summing.is_single(TIME, K, P, torch.zeros(1))


def test_entries_are_added_from_the_numbers_of_their_norms_beside_a_broken_record_too(monkeypatch):
    left, right = torch.randn(3, 40, 6), torch.randn(3, 40, 7)
    left[1, 0, 0] = torch.nan
    grad = OuterProductGrad(ProductSide(left), ProductSide(right))
    assert grad.is_dense
    keep, factor = torch.isfinite(grad.squared_norm()), torch.tensor([0.5, 0.0, 2.0], dtype=torch.float64)
    entries = grad.rows.nan_to_num()
    # In another layout of memory, the same product may be rounded differently.
    monkeypatch.setattr(outer_products, "products_of_all", lambda one, other: 2 * summing.products_of_all(one, other))
    assert torch.equal(grad.blank(keep).weighted(factor).flatten(), summing.added(entries, factor))
