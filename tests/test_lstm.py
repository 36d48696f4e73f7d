"""LSTMs by ghost: gates that oneDNN saved, and products of both weights at once, held to the definition."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from epsilons.clipping import summing
from epsilons.clipping.engine import Persons
from epsilons.clipping.ghost import lstm
from epsilons.clipping.ghost.outer_products import Joint, JointGrad, OuterProductGrad, ProductSide
from epsilons.core.modules import nodes_of
from sums import CLOSE, OVERSTATED, away, common_mode, length, sums_of

LAYERS = {
    "one": {"hidden_size": 10},
    "padded rows": {"hidden_size": 64},
    "no bias": {"hidden_size": 6, "bias": False},
    "two, both directions": {"hidden_size": 7, "num_layers": 2, "bidirectional": True},
}


def states_given(layer: nn.LSTM, x: Tensor) -> Tensor:
    """(records,) losses of outputs and last states, from given first states."""
    count = layer.num_layers * (2 if layer.bidirectional else 1)
    h0 = torch.linspace(-1, 1, layer.hidden_size, dtype=x.dtype).expand(count, len(x), -1).contiguous()
    out, (h, c) = layer(x, (h0, 2 * h0))
    return (out * torch.arange(-1, x.shape[1] - 1)[:, None]).square().sum((1, 2)) + (h * c).sum((0, 2))


def layer_and_inputs(name: str, time: int, records: int = 5) -> tuple[nn.LSTM, Tensor]:
    torch.manual_seed(0)
    return nn.LSTM(6, **LAYERS[name], batch_first=True), torch.randn(records, time, 6)


@pytest.mark.parametrize("gates", ["as they are", "of other records", "not a number"])
@pytest.mark.parametrize("time", [1, 9])
@pytest.mark.parametrize("name", LAYERS)
def test_the_sum_is_the_definitions_whatever_onednn_saved(name, time, gates, monkeypatch):
    saved, used = lstm._saved_gates, list[bool]()

    def altered(*arguments):
        found = saved(*arguments)
        if found is None or gates == "as they are":
            return found
        return [gate.flip(1) if gates == "of other records" else gate * torch.nan for gate in found]

    def judged(*arguments, judge=lstm._is_product):
        used.append(judge(*arguments))
        return used[-1]

    monkeypatch.setattr(lstm, "_saved_gates", altered)
    monkeypatch.setattr(lstm, "_is_product", judged)
    layer, x = layer_and_inputs(name, time)
    ours, theirs = sums_of(layer, states_given, x, torch.linspace(0.1, 30, 5, dtype=torch.float64))
    assert away(ours, theirs) <= CLOSE * length(theirs)
    assert gates == "as they are" or not any(used)


@pytest.mark.parametrize("name", LAYERS)
def test_what_onednn_saved_are_the_gates_or_is_not_used(name):
    layer, x = layer_and_inputs(name, 9)
    losses = states_given(layer, x)
    for node in nodes_of([losses]):
        if "MkldnnRnnLayer" in node.name():
            one = lstm._Layer(node)
            entering = one._entering()
            for ours, theirs in zip(one._states(entering)[0], one._computed_gates(entering), strict=True):
                assert float((ours - theirs).abs().max().detach()) < 1e-5


def test_a_record_that_is_not_finite_does_not_decide_how_gates_are_found():
    h, o, shown = (torch.full((3, 2, 4), value) for value in (0.25, 0.5, 0.5))
    h[:, 0], o[:, 0] = torch.nan, torch.inf
    assert lstm._is_product(h, o, shown)
    o[1, 1, 2] = torch.nan
    assert not lstm._is_product(h, o, shown)


# -- joint products -----------------------------------------------------------------------------------------

TIME, HIDDEN, FEATURES = 17, 40, 56


@pytest.fixture
def jointly(monkeypatch):
    monkeypatch.setattr(summing, "SINGLE", 1)
    if not summing.is_single(TIME, 4 * HIDDEN, HIDDEN, torch.zeros(1)):
        pytest.skip("torch was built without oneDNN, or for another processor")


def joint_of(left: Tensor, right: Tensor) -> tuple[list[JointGrad], list[OuterProductGrad]]:
    """(the gradients as they are computed together, the same alone)."""
    joint = Joint(ProductSide(left), ProductSide(right), [FEATURES, HIDDEN])
    grads = [grad for grad in joint.grads() if isinstance(grad, JointGrad)]
    assert len(grads) == 2
    return grads, list(Joint(ProductSide(left), ProductSide(right), [FEATURES, HIDDEN]).parts)


def both_sides(records: int, time: int = TIME) -> tuple[Tensor, Tensor]:
    make = torch.Generator().manual_seed(0)
    left, right = (torch.randn(records, time, size, generator=make) for size in (4 * HIDDEN, FEATURES + HIDDEN))
    return left, right


@pytest.mark.usefixtures("jointly")
def test_an_lstm_has_joint_products_with_the_definitions_sum(monkeypatch):
    made = list[JointGrad]()
    weighted = JointGrad.weighted
    monkeypatch.setattr(JointGrad, "weighted", lambda grad, factor: made.append(grad) or weighted(grad, factor))
    torch.manual_seed(0)
    layer, x = nn.LSTM(FEATURES, HIDDEN, batch_first=True), torch.randn(6, TIME, FEATURES)
    clip_norm = torch.linspace(0.1, 30, 6, dtype=torch.float64)
    ours, theirs = sums_of(layer, lambda layer, x: layer(x)[0].square().sum((1, 2)), x, clip_norm)
    assert made
    assert away(ours, theirs) <= 5e-5 * length(theirs)  # norms from Gram matrices are larger by about so much


@pytest.mark.usefixtures("jointly")
def test_joint_products_follow_each_factor():
    left, right = both_sides(5)
    grads, _ = joint_of(left, right)
    for factor in (torch.arange(5.0).double(), torch.ones(5).double(), torch.arange(5.0).double()):
        whole = torch.einsum("n,ntk,ntp->kp", factor, left.double(), right.double())
        for grad, exact in zip(grads, whole.split([FEATURES, HIDDEN], 1), strict=True):
            assert float((grad.weighted(factor) - exact).norm()) < 1e-6 * float(exact.norm())


@pytest.mark.usefixtures("jointly")
@pytest.mark.parametrize("scale", [1e-4, 1.0])
def test_no_joint_contribution_exceeds_its_bound_where_one_part_cancels(scale):
    left, right = both_sides(8)
    one, other = common_mode(8, scale, TIME, 4 * HIDDEN, FEATURES)
    left, right[:, :, :FEATURES] = one, other
    grads, alone = joint_of(left, right)
    for record in range(8):
        factor = torch.zeros(8, dtype=torch.float64)
        factor[record] = 1.0
        for grad, own in zip(grads, alone, strict=True):
            bound = grad.squared_norm().sqrt()[record]
            assert torch.equal(bound, own.bound.squared_norm.sqrt()[record])
            assert bound / OVERSTATED <= grad.weighted(factor).norm() <= OVERSTATED * bound


@pytest.mark.usefixtures("jointly")
def test_a_joint_record_that_is_blanked_leaves_all_others_as_they_are():
    left, right = both_sides(5)
    keep, factor = torch.tensor([True, False, True, True, True]), torch.linspace(1, 2, 5, dtype=torch.float64)
    before = [grad.weighted(factor * keep) for grad in joint_of(left, right)[0]]
    left[1] = torch.nan
    grads, _ = joint_of(left, right)
    for grad, others in zip(grads, before, strict=True):
        blank = grad.blank(keep)
        assert torch.equal(blank.weighted(factor), others)
        assert torch.equal(blank.squared_norm()[keep], grad.squared_norm()[keep])


@pytest.mark.usefixtures("jointly")
@pytest.mark.parametrize("sizes", [[2, 2, 2], [1, 3, 2], [1, 1, 4]])
def test_joint_products_of_persons_are_those_of_all_their_rows(sizes):
    left, right = both_sides(6)
    grads, _ = joint_of(left, right)
    persons, factor = Persons(sizes, left.device), torch.tensor([1.0, -2.0, 3.0], dtype=torch.float64)
    whole = torch.einsum("n,ntk,ntp->nkp", factor[persons.owner], left.double(), right.double())
    for grad, exact in zip(grads, whole.split([FEATURES, HIDDEN], 2), strict=True):
        own = grad.of_persons(persons)
        assert float((own.weighted(factor) - exact.sum(0)).norm()) < 1e-6 * float(exact.norm())
        norm = [float(part.sum(0).norm()) for part in exact.split(sizes)]
        assert norm == pytest.approx((own.squared_norm().sqrt() * factor.abs()).tolist(), rel=2e-6)


@pytest.mark.usefixtures("jointly")
def test_onednn_is_given_matrices_without_gaps(monkeypatch):
    left, right = both_sides(3)
    gaps, multiply = list[bool](), summing.INNER_PRODUCT
    assert multiply is not None

    def seen(one: Tensor, other: Tensor, *rest: object) -> Tensor:
        gaps.append(not (other.is_contiguous() or other.T.is_contiguous()))
        return multiply(one, other, *rest)

    monkeypatch.setattr(summing, "INNER_PRODUCT", seen)
    assert summing.has_inner_product(left)  # tries it once
    gaps.clear()
    narrow = left[:, :, 3:70]
    ours = summing.products_of_all(right, narrow)
    assert gaps == [False] * 3
    assert torch.allclose(ours, right.mT @ narrow, atol=1e-4)
