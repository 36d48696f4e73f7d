"""Kernels: all of them give the definition's sum, so the choice between them is about speed alone."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from epsilons.training.clipping.ghost import conv, windows
from epsilons.training.clipping.ghost.outer_products import OuterProductGrad, ProductSide
from functional import Model
from sums import CLOSE, away, common_mode, length, share, sums_of


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
    "groups and one axis": (
        lambda: nn.Sequential(nn.Conv1d(4, 6, 3, groups=2), nn.Tanh(), nn.Conv1d(6, 2, 2, padding=1)),
        (4, 9),
    ),
}


@pytest.mark.parametrize("at_once", share([1000, 1, 2**18], every=3))
@pytest.mark.parametrize("choice", [True, False])
@pytest.mark.parametrize("name", MODELS)
def test_every_kernel_gives_the_definitions_sum(name, choice, at_once, monkeypatch):
    monkeypatch.setitem(windows.VALUES_AT_ONCE, "cpu", at_once)
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
        factor[record] = 1e-3 / norm[record] * (1 - 2.0**-20)
        assert 0.999e-3 <= float(grad.weighted(factor).norm()) <= 1e-3
