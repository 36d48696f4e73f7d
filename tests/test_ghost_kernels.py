"""Kernels of the engine ghost: all give the definition's sum, whatever is chosen, saved by oneDNN, or in a group."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from torch import Tensor, nn

from epsilons.clipping import summing
from epsilons.clipping.engine import Persons
from epsilons.clipping.ghost import conv, lstm, outer_products
from epsilons.clipping.ghost.graph import trace
from epsilons.clipping.ghost.outer_products import Joint, JointGrad, OuterProductGrad, ProductSide, fast_products
from epsilons.clipping.ghost.per_sample_grads import SMALLEST_NORMAL, rounding
from epsilons.clipping.summing import ROWS_AT_ONCE
from epsilons.core.modules import nodes_of
from functional import Model
from sums import CLOSE, OVERSTATED, away, common_mode, length, share, sums_of

pytestmark = pytest.mark.usefixtures("one_thread")


# -- the choice of kernels --------------------------------------------------------------------------------------------


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
    monkeypatch.setattr(conv, "VALUES_AT_ONCE", at_once)
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
    entries = grad.entries.nan_to_num()
    # In another layout of memory, the same product may be rounded differently.
    compute = summing.products_of_all
    monkeypatch.setattr(summing, "products_of_all", lambda one, other: 2 * compute(one, other))
    assert torch.equal(grad.blank(keep).weighted(factor).flatten(), summing.added(entries, factor))


# -- activation products, by oneDNN -----------------------------------------------------------------------------------

WIDTH = 24


def linear_chain() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 40), nn.Tanh(), nn.Linear(40, 18, bias=False), nn.GELU(), nn.Linear(18, 3))


def residual() -> nn.Module:
    def compute(model: nn.Module, x: Tensor) -> Tensor:
        hidden = model.first(x)
        return hidden + model.down(torch.tanh(model.up(hidden)))

    return Model(compute, first=nn.Linear(WIDTH, WIDTH), up=nn.Linear(WIDTH, 50), down=nn.Linear(50, WIDTH))


def frozen() -> nn.Module:
    """Weights that are not trained, behind one that is."""
    model = linear_chain()
    for layer in (model[2], model[4]):
        layer.requires_grad_(False)
    return model


def data_on_the_right() -> nn.Module:
    def compute(model: nn.Module, x: Tensor) -> Tensor:
        hidden = model.one.weight @ x.flatten(0, -2).T  # (20, rows)
        return (model.two.weight @ torch.tanh(hidden)).T.reshape(len(x), -1)

    return Model(compute, one=nn.Linear(WIDTH, 20), two=nn.Linear(20, 5))


CHAINS = {
    "over time": (linear_chain, (6, WIDTH)),
    "no time": (linear_chain, (WIDTH,)),
    "residual": (residual, (6, WIDTH)),
    "frozen": (frozen, (6, WIDTH)),
    "data on the right": (data_on_the_right, (WIDTH,)),
}


def losses_of(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().flatten(1).sum(1)


def made(name: str, records: int) -> tuple[nn.Module, Tensor]:
    make, shape = CHAINS[name]
    torch.manual_seed(0)
    return make(), torch.randn(records, *shape)


@pytest.fixture
def counted(monkeypatch):
    """A list of the products that oneDNN computes; skips where it is not there."""
    if not summing.has_inner_product(torch.zeros(1)):
        pytest.skip("torch was built without oneDNN, or for another processor")
    seen, multiply = list[tuple[int, int]](), summing.product

    def product(left: Tensor, right: Tensor) -> Tensor:
        seen.append((len(left), len(right)))
        return multiply(left, right)

    monkeypatch.setattr(summing, "product", product)
    monkeypatch.setattr(outer_products, "ENOUGH", 1)
    return seen


@pytest.mark.parametrize("name", CHAINS)
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


@pytest.mark.parametrize("name", CHAINS)
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


# -- LSTMs: saved gates, and products of both weights at once ---------------------------------------------------------

LSTMS = {
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
    return nn.LSTM(6, **LSTMS[name], batch_first=True), torch.randn(records, time, 6)


@pytest.mark.parametrize("gates", ["as they are", "of other records", "not a number"])
@pytest.mark.parametrize("time", [1, 9])
@pytest.mark.parametrize("name", LSTMS)
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


@pytest.mark.parametrize("name", LSTMS)
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

STEPS, HIDDEN, FEATURES = 17, 40, 56


def joint_of(left: Tensor, right: Tensor) -> tuple[list[JointGrad], list[OuterProductGrad]]:
    """(the gradients as they are computed together, the same alone)."""
    joint = Joint(ProductSide(left), ProductSide(right), [FEATURES, HIDDEN])
    grads = [grad for grad in joint.grads() if isinstance(grad, JointGrad)]
    assert len(grads) == 2
    return grads, list(Joint(ProductSide(left), ProductSide(right), [FEATURES, HIDDEN]).parts)


def both_sides(records: int, time: int = STEPS) -> tuple[Tensor, Tensor]:
    make = torch.Generator().manual_seed(0)
    left, right = (torch.randn(records, time, size, generator=make) for size in (4 * HIDDEN, FEATURES + HIDDEN))
    return left, right


@pytest.mark.usefixtures("singly")
def test_an_lstm_has_joint_products_with_the_definitions_sum(monkeypatch):
    made = list[JointGrad]()
    weighted = JointGrad.weighted
    monkeypatch.setattr(JointGrad, "weighted", lambda grad, factor: made.append(grad) or weighted(grad, factor))
    torch.manual_seed(0)
    layer, x = nn.LSTM(FEATURES, HIDDEN, batch_first=True), torch.randn(6, STEPS, FEATURES)
    clip_norm = torch.linspace(0.1, 30, 6, dtype=torch.float64)
    ours, theirs = sums_of(layer, lambda layer, x: layer(x)[0].square().sum((1, 2)), x, clip_norm)
    assert made
    assert away(ours, theirs) <= 5e-5 * length(theirs)  # norms from Gram matrices are larger by about so much


@pytest.mark.usefixtures("singly")
def test_joint_products_follow_each_factor():
    left, right = both_sides(5)
    grads, _ = joint_of(left, right)
    for factor in (torch.arange(5.0).double(), torch.ones(5).double(), torch.arange(5.0).double()):
        whole = torch.einsum("n,ntk,ntp->kp", factor, left.double(), right.double())
        for grad, exact in zip(grads, whole.split([FEATURES, HIDDEN], 1), strict=True):
            assert float((grad.weighted(factor) - exact).norm()) < 1e-6 * float(exact.norm())


@pytest.mark.usefixtures("singly")
@pytest.mark.parametrize("scale", [1e-4, 1.0])
def test_no_joint_contribution_exceeds_its_bound_where_one_part_cancels(scale):
    left, right = both_sides(8)
    one, other = common_mode(8, scale, STEPS, 4 * HIDDEN, FEATURES)
    left, right[:, :, :FEATURES] = one, other
    grads, alone = joint_of(left, right)
    for record in range(8):
        factor = torch.zeros(8, dtype=torch.float64)
        factor[record] = 1.0
        for grad, own in zip(grads, alone, strict=True):
            bound = grad.squared_norm().sqrt()[record]
            assert torch.equal(bound, own.bound.squared_norm.sqrt()[record])
            assert bound / OVERSTATED <= grad.weighted(factor).norm() <= OVERSTATED * bound


@pytest.mark.usefixtures("singly")
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


@pytest.mark.usefixtures("singly")
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


@pytest.mark.usefixtures("singly")
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


# -- sums of products on every path -----------------------------------------------------------------------------------

LEFT, RIGHT = 17, 19
#: So many records are in a group of `_in_groups`, and in a part of `_in_64_bits` with 5 rows each.
GROUP = 4
SIZES = [1, 2, GROUP - 1, GROUP, GROUP + 1, 2 * GROUP, 2 * GROUP + 1, 3 * GROUP - 1]
ROWS_OF_A_RECORD = [5, ROWS_AT_ONCE, ROWS_AT_ONCE + 1, 2 * ROWS_AT_ONCE + 7]

PATHS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "in 64 bits": summing._in_64_bits,
    "in groups": summing._in_groups,
    "one by one": summing._one_by_one,
}


@pytest.fixture
def small_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(summing, "VALUES_AT_ONCE", GROUP * LEFT * RIGHT)


def sides(records: int, time: int) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(100 * records + time)
    left, right = torch.randn(records, time, LEFT), torch.randn(records, time, RIGHT)
    return left, right, torch.linspace(0.5, 2.0, records, dtype=torch.float64)


def skip_without_onednn(path: str) -> None:
    if path == "one by one" and summing.INNER_PRODUCT is None:
        pytest.skip("needs oneDNN's inner product")


def distance(got: Tensor, expected: Tensor) -> float:
    return float((got - expected).norm() / expected.norm())


@pytest.mark.usefixtures("small_groups")
@pytest.mark.parametrize("time", ROWS_OF_A_RECORD)
@pytest.mark.parametrize("records", SIZES)
@pytest.mark.parametrize("path", PATHS)
def test_a_sum_of_products_has_every_record_once(path, records, time):
    """Against one product in 64 bits. A part more or less would be at least a hundredth of the sum."""
    skip_without_onednn(path)
    left, right, factor = sides(records, time)
    expected = torch.einsum("r,rtk,rtp->kp", factor, left.double(), right.double())
    got = PATHS[path](left, right, factor)
    assert got.dtype == torch.float64
    assert got.shape == (LEFT, RIGHT)
    assert distance(got, expected) < 1e-6


@pytest.mark.usefixtures("small_groups")
@pytest.mark.parametrize("broken", [0, GROUP - 1, GROUP, GROUP + 1, 2 * GROUP])
@pytest.mark.parametrize("path", ["in groups", "one by one"])
def test_a_record_of_factor_0_adds_nothing_though_its_product_overflows(path, broken):
    """In whatever group it is, and it takes the place of no other."""
    skip_without_onednn(path)
    left, right, factor = sides(2 * GROUP + 1, 5)
    left[broken], right[broken], factor[broken] = 3e38, 3e38, 0.0
    others = [place for place in range(len(left)) if place != broken]
    expected = torch.einsum("r,rtk,rtp->kp", factor[others], left[others].double(), right[others].double())
    assert distance(PATHS[path](left, right, factor), expected) < 1e-6


@pytest.mark.usefixtures("small_groups")
@pytest.mark.parametrize("entries", [1, 7, 1_000, 5_000])
@pytest.mark.parametrize("records", SIZES)
def test_a_sum_of_rows_has_every_record_once(records, entries):
    torch.manual_seed(records)
    rows, factor = torch.randn(records, entries), torch.linspace(0.5, 2.0, records, dtype=torch.float64)
    assert distance(summing.added(rows, factor), factor @ rows.double()) < 1e-12


@pytest.mark.usefixtures("small_groups")
@pytest.mark.parametrize("records", [1, 2, 5])
def test_products_of_all_are_each_records_own(records, monkeypatch):
    """By oneDNN and in one batch."""
    left, right, _ = sides(records, 40)
    expected = torch.einsum("rtk,rtp->rkp", left.double(), right.double())
    for single in (1, 2**60):
        monkeypatch.setattr(summing, "SINGLE", single)
        for record in range(records):
            assert distance(summing.products_of_all(left, right)[record], expected[record]) < 1e-6
