"""Modules are called with other tensors, and have their own again afterwards, whatever is registered or tied twice."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from epsilons.clipping.vmap import called_with
from functional import Model
from sums import CLOSE, attached, away, length
from zoo import Case, flat


def _under_two_names() -> nn.Module:
    layer = nn.Linear(6, 6)
    return nn.Sequential(layer, nn.Tanh(), layer)


def _tied() -> nn.Module:
    one, two = nn.Linear(6, 6), nn.Linear(6, 6)
    two.weight = one.weight
    return nn.Sequential(one, nn.Tanh(), two)


def _within_a_unit() -> nn.Module:
    """A module with a parameter of its own is one unit of `vmap`, with all its children."""
    layer = nn.Linear(6, 6)
    scale = nn.Parameter(torch.ones(6))
    return Model(lambda m, x: m.again(torch.tanh(m.layer(x) * m.scale)), layer=layer, again=layer, scale=scale)


def _buffer_under_two_names() -> nn.Module:
    norm = nn.BatchNorm1d(6).eval()
    return nn.Sequential(nn.Linear(6, 6), norm, nn.Tanh(), norm)


SHARING = [_under_two_names, _tied, _within_a_unit, _buffer_under_two_names]


def _places(model: nn.Module) -> list[tuple[str, int]]:
    kept = {"remove_duplicate": False}
    return [(name, id(t)) for name, t in [*model.named_parameters(**kept), *model.named_buffers(**kept)]]


@pytest.mark.parametrize("build", SHARING)
def test_a_module_computes_with_the_given_tensors_and_keeps_its_own(build):
    torch.manual_seed(0)
    model, other, x = build(), build(), torch.randn(4, 6)
    before = _places(model)
    given = dict([*other.named_parameters(), *other.named_buffers()])
    torch.testing.assert_close(called_with(model, given, (x,)), other(x), rtol=0.0, atol=0.0)
    assert _places(model) == before


def test_what_is_not_given_stays_the_modules_own():
    torch.manual_seed(0)
    model, x = _under_two_names(), torch.randn(4, 6)
    zero = torch.zeros(6)
    ours = called_with(model, {"0.bias": zero}, (x,))
    (layer, tanh, _) = model
    assert torch.equal(ours, tanh(x @ layer.weight.T) @ layer.weight.T)


def test_a_module_that_raises_has_its_own_tensors_again():
    model = _under_two_names()
    before = _places(model)
    with pytest.raises(RuntimeError):
        called_with(model, {name: p.detach() for name, p in model.named_parameters()}, (torch.ones(4, 7),))
    assert _places(model) == before


@pytest.mark.parametrize("engine", ["vmap", "ghost"])
@pytest.mark.parametrize("build", SHARING)
def test_engines_leave_the_model_its_parameters_step_after_step(build, engine):
    """`vmap` once left other tensors in a model like these: from the second step on, its parameters did nothing."""
    torch.manual_seed(0)
    case = Case(nn.Sequential(build(), nn.Linear(6, 3)), flat)
    before, ones = _places(case.model), torch.ones(8, dtype=torch.float64)
    ours, definition = attached(engine, case), attached("loop", case)
    for step in range(3):
        inputs, targets = case.batch(8, seed=step)
        ours.begin(8)
        sums = ours.clipped_sum(case.loss_of(inputs, targets), ones, ones)
        assert _places(case.model) == before
        theirs: list[Tensor] = definition.clipped_sum(case.loss_of(inputs, targets), ones, ones)
        assert away(sums, theirs) <= CLOSE * length(theirs)
