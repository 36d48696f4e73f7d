"""Activation products: those of torch's backward pass, by oneDNN, whatever the number of records."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn

from epsilons.clipping import summing
from epsilons.clipping.ghost import outer_products
from epsilons.clipping.ghost.graph import trace
from epsilons.clipping.ghost.outer_products import fast_products
from functional import Model
from sums import CLOSE, away, length, sums_of

WIDTH = 24


def over_time() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 40), nn.Tanh(), nn.Linear(40, 18, bias=False), nn.GELU(), nn.Linear(18, 3))


def residual() -> nn.Module:
    def compute(model: nn.Module, x: Tensor) -> Tensor:
        hidden = model.first(x)
        return hidden + model.down(torch.tanh(model.up(hidden)))

    return Model(compute, first=nn.Linear(WIDTH, WIDTH), up=nn.Linear(WIDTH, 50), down=nn.Linear(50, WIDTH))


def frozen() -> nn.Module:
    """Weights that are not trained, behind one that is."""
    model = over_time()
    for layer in (model[2], model[4]):
        layer.requires_grad_(False)
    return model


def data_on_the_right() -> nn.Module:
    def compute(model: nn.Module, x: Tensor) -> Tensor:
        hidden = model.one.weight @ x.flatten(0, -2).T  # (20, rows)
        return (model.two.weight @ torch.tanh(hidden)).T.reshape(len(x), -1)

    return Model(compute, one=nn.Linear(WIDTH, 20), two=nn.Linear(20, 5))


MODELS = {
    "over time": (over_time, (6, WIDTH)),
    "no time": (over_time, (WIDTH,)),
    "residual": (residual, (6, WIDTH)),
    "frozen": (frozen, (6, WIDTH)),
    "data on the right": (data_on_the_right, (WIDTH,)),
}


def losses_of(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().flatten(1).sum(1)


def made(name: str, records: int) -> tuple[nn.Module, Tensor]:
    make, shape = MODELS[name]
    torch.manual_seed(0)
    return make(), torch.randn(records, *shape)


@pytest.fixture
def counted(monkeypatch):
    """A list of the products that oneDNN computes; skips where it is not there."""
    if not summing.has_inner_product(torch.zeros(1)):
        pytest.skip("torch was built without oneDNN, or for another processor")
    seen: list[tuple[int, int]] = []

    def product(left: Tensor, right: Tensor) -> Tensor:
        seen.append((len(left), len(right)))
        return summing.product(left, right)

    monkeypatch.setattr(outer_products, "product", product)
    monkeypatch.setattr(outer_products, "ENOUGH", 1)
    return seen


@pytest.mark.parametrize("name", MODELS)
def test_sums_with_products_by_onednn_are_the_definitions(name, counted):
    model, x = made(name, 9)
    clip_norm = torch.linspace(0.1, 30, 9, dtype=torch.float64)
    ours, theirs = sums_of(model, losses_of, x, clip_norm)
    assert counted
    assert away(ours, theirs) <= CLOSE * length(theirs)


def multiplied_by(model: nn.Module, x: Tensor) -> bool:
    """Whether oneDNN multiplies in the backward pass."""
    losses = losses_of(model, x)
    places = {id(p): k for k, p in enumerate(p for p in model.parameters() if p.requires_grad)}
    return not isinstance(fast_products(trace(losses, places), losses), nullcontext)


@pytest.mark.parametrize("name", MODELS)
def test_the_kernel_does_not_depend_on_the_number_of_records(name, counted, monkeypatch):
    for enough in (1, 500, 5_000, 20_000, 10**6):
        monkeypatch.setattr(outer_products, "ENOUGH", enough)
        assert len({multiplied_by(*made(name, records)) for records in (2, 3, 17, 256)}) == 1


@pytest.mark.parametrize("shape", [(40, 18), (7, 300), (256, 64)])
def test_a_rows_product_does_not_depend_on_the_number_of_rows(shape, counted):
    torch.manual_seed(0)
    weight, rows = torch.randn(shape), torch.randn(300, shape[0])
    with outer_products._ByOneDnn():
        every = rows @ weight
        for count in (1, 2, 5, 16, 63, 64, 299):
            assert torch.equal(rows[:count] @ weight, every[:count])
            assert torch.equal(rows[-count:].clone() @ weight, every[-count:])
    assert len(counted) == 15


@pytest.mark.usefixtures("counted")
def test_what_is_not_a_product_of_32_bit_matrices_is_left_to_torch(counted):
    left, right = torch.randn(6, 5), torch.randn(5, 4)
    empty = torch.randn(0, 5)
    with outer_products._ByOneDnn():
        results = [
            left.double() @ right.double(),
            empty @ right,
            left[:, :0] @ right[:0],
            left.bfloat16() @ right.bfloat16(),
        ]
    assert [r.shape for r in results] == [(6, 4), (0, 4), (6, 4), (6, 4)]
    assert torch.equal(results[0], left.double() @ right.double())
    assert not results[2].any()
    assert counted == []


def test_where_onednn_is_missing_or_little_is_multiplied_nothing_is_replaced(monkeypatch):
    assert not multiplied_by(*made("over time", 64))
    monkeypatch.setattr(outer_products, "ENOUGH", 1)
    monkeypatch.setattr(summing, "INNER_PRODUCT", None)
    assert not multiplied_by(*made("over time", 64))
