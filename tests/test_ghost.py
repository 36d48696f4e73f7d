"""The engine ghost: every physical batch is proved on its graph, and norms are never understated."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from epsilons.clipping import ENGINES, NonFiniteGradientError
from epsilons.clipping.engine import clip_factors
from epsilons.clipping.ghost.ghost import AUDIT_EVERY
from epsilons.clipping.ghost.outer_products import OuterProductGrad, ProductSide
from epsilons.core import modules
from functional import Model
from sums import CLOSE, any_case, attached, away, common_mode, compared, length, share
from zoo import MORE, ZOO, Case, Doubled, LastStep, Packed, build, clip_norms, flat, padded_tokens

pytestmark = pytest.mark.usefixtures("one_thread")

ALIKE = [name for name in ZOO if not build(name).random] + list(MORE)


@pytest.mark.parametrize("name", share(ALIKE, every=2))
def test_the_sum_is_the_definitions_in_64_bits_for_every_parameter(name):
    case = any_case(name)
    engine = attached("ghost", case)
    for number, records in enumerate([2, 33, 1]):
        ours, theirs = compared(case, engine, records, seed=number)
        size = length(theirs)
        assert [o.shape for o in ours] == [p.shape for p in case.parameters]
        assert all(length([o - t]) <= CLOSE * size for o, t in zip(ours, theirs, strict=True))
        assert away(ours, theirs) <= CLOSE * size, f"{records} records"


@pytest.mark.parametrize("name", share([*ZOO, *MORE], every=3))
def test_a_sum_is_added_to_totals_as_it_is_given_alone(name):
    """Totals of another size: what is there stays, to the rounding of 64 bits."""
    case = any_case(name)
    for number, records in enumerate([5, 33, 1]):
        given, parts = [torch.full(p.shape, -3.0, dtype=torch.float64) for p in case.parameters], []
        for totals in (given, None):
            torch.manual_seed(number)
            engine = attached("ghost", case)
            inputs, targets = case.batch(records, seed=number)
            engine.begin(records)
            bounds = case.loss_of(inputs, targets), clip_norms(records, 0.3), torch.ones(records)
            if totals is None:
                parts = engine.clipped_sum(*bounds)
            else:
                engine.clipped(*bounds)(totals)
        for total, part in zip(given, parts, strict=True):
            assert torch.allclose(total + 3.0, part, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("shape", [(4, 3), (3, 4), (600, 1_100)])
def test_records_are_added_to_one_another_before_they_meet_a_larger_total(shape):
    """Each alone would be lost beside 2⁵³, as a million records may be that were added before."""
    left, right = torch.full((32, 1, shape[0]), 0.5), torch.full((32, 1, shape[1]), 0.5)
    grad = OuterProductGrad(ProductSide(left), ProductSide(right))
    assert grad.is_product_in_64_bits
    total = torch.full(shape, 2.0**53, dtype=torch.float64)
    grad.add_weighted(torch.ones(32, dtype=torch.float64), total)
    assert (total == 2.0**53 + 8).all()


@pytest.mark.parametrize("name", share(ALIKE, every=12))
def test_the_sum_is_the_definitions_for_large_physical_batches_too(name):
    case = any_case(name)
    ours, theirs = compared(case, attached("ghost", case), 512, seed=1)
    assert away(ours, theirs) <= CLOSE * length(theirs)


@pytest.mark.parametrize("name", [*ZOO, *MORE])
def test_the_graph_of_a_usual_model_proves_itself(name):
    """Leaving a model to vmap is slow: that is for operators without a rule."""
    case = any_case(name)
    engine = attached("ghost", case)
    for records in (4, 6):
        inputs, targets = case.batch(records, seed=records)
        engine.begin(records)
        engine.clipped_sum(case.loss_of(inputs, targets), torch.ones(records), torch.ones(records))
    assert engine.is_proven


# -- norms --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("as_on_gpu", [False, True], ids=["CPU", "GPU"])
@pytest.mark.parametrize("noise", [1.0, 1e-2, 1e-4, 0.0])
def test_no_contribution_is_above_its_clip_norm_however_much_cancels(noise, as_on_gpu, monkeypatch):
    """The layer alone, where a contribution can be measured: the sum with every other factor at 0, in 64 bits."""
    monkeypatch.setattr(modules, "AS_ON_GPU", as_on_gpu)
    records = 128
    features, gradients = common_mode(records, noise, 64, 512, 512)
    grad = OuterProductGrad(ProductSide(features), ProductSide(gradients))
    assert grad.uses_grams
    norm = grad.squared_norm().sqrt()
    exact = torch.stack([(f.double().T @ g.double()).norm() for f, g in zip(features, gradients, strict=True)])
    assert (norm - exact).abs().max() <= 1e-5 * exact.max() + 1e-6
    clip_norm = 0.5 * exact.clamp_min(1e-3)
    factor = clip_factors(norm.square(), clip_norm, torch.ones(records))
    for record in range(0, records, 32):
        only = torch.zeros_like(factor)
        only[record] = factor[record]
        assert float(grad.weighted(only).norm()) <= float(clip_norm[record])


@pytest.mark.parametrize(("noise", "width"), [(1e-2, 512), (1e-4, 512), (1e-4, 256)])
def test_a_whole_model_keeps_clip_norms_where_features_cancel(noise, width):
    """A linear layer with outputs that are summed with alternating signs: Gram matrices of 64 steps, or all entries."""
    records = 128
    features, _ = common_mode(records, noise, 64, width, 1)
    sign = torch.where(torch.arange(64) % 2 == 0, 1.0, -1.0)[:, None]
    torch.manual_seed(1)
    model = nn.Linear(width, width)
    engine = attached("ghost", Case(model, lambda n: (features[:n],)))
    for record in [0, 77]:
        engine.begin(records)
        losses = (torch.tanh(0.01 * model(features)) * sign).sum((1, 2))
        only = torch.zeros(records, dtype=torch.float64)
        only[record] = 1.0
        total = engine.clipped_sum(losses, torch.full((records,), 1e-6, dtype=torch.float64), only)
        assert 0.99e-6 <= length(total) <= 1e-6
    assert engine.is_proven


@pytest.mark.parametrize(("k", "p", "time"), [(768, 3072, 16), (3, 2048, 2), (1024, 512, 33), (40, 40, 5)])
def test_gram_norms_of_any_width_are_never_understated(k, p, time):
    torch.manual_seed(k)
    left, right = torch.randn(24, time, k) + 1, torch.randn(24, time, p)
    exact = torch.bmm(left.double().mT, right.double()).flatten(1).norm(dim=1)
    norm = OuterProductGrad(ProductSide(left), ProductSide(right)).squared_norm().sqrt()
    assert torch.allclose(norm, exact, rtol=2e-6, atol=0)


@pytest.mark.parametrize("time", [1, 16, 33])  # norms of rows, Gram matrices in 64 bits, and in 32
def test_no_norm_vanishes_where_32_bits_end(time):
    """One side of each product is so small that its squares are 0, the other as large as the gradient needs."""
    signs = torch.randn(4, time, 256).sign(), torch.randn(4, time, 256).sign()
    model, clip_norm = nn.Linear(256, 256, bias=False), torch.full((4,), 1e-3, dtype=torch.float64)
    with torch.no_grad():
        model.weight.fill_(1e-9)
    for small, large in ((2.6e-23, 8e17), (8e17, 2.6e-23)):
        x, direction = small * signs[0][:, :1].expand(4, time, 256), large * signs[1][:, :1].expand(4, time, 256)
        engine = attached("ghost", Case(model, lambda n: ()))
        for record in range(4):
            engine.begin(4)
            losses = (model(x) * direction).flatten(1).sum(1)
            assert length(engine.clipped_sum(losses, clip_norm, (torch.arange(4) == record).double())) <= 1e-3


# -- graphs without proof -----------------------------------------------------------------------------------


def doubled() -> nn.Module:
    compute = lambda m, x: m.head(torch.tanh(Doubled.apply(m.first(x))))  # noqa: E731
    return Model(compute, first=nn.Linear(6, 5), head=nn.Linear(5, 3))


@pytest.mark.parametrize("make", [lambda: Case(doubled(), flat), lambda: Case(Packed(), padded_tokens)])
def test_a_graph_without_proof_is_left_to_vmap_and_logged_once(make, caplog):
    torch.manual_seed(0)
    case = make()
    engine = attached("ghost", case)
    with caplog.at_level(logging.WARNING, logger="epsilons"):
        for number, records in enumerate([4, 5, 4]):
            ours, theirs = compared(case, engine, records, seed=number)
            assert away(ours, theirs) <= CLOSE * length(theirs)
    assert not engine.is_proven
    assert len(caplog.records) == 1
    engine.detach()
    assert not any(module._forward_hooks for module in case.model.modules())


def test_packed_and_padded_sequences_give_one_sum():
    torch.manual_seed(0)
    padded, packed = Case(LastStep(), padded_tokens), Case(Packed(), padded_tokens)
    packed.model.load_state_dict(padded.model.state_dict())
    sums = []
    for case in (padded, packed):
        engine = attached("ghost", case)
        engine.begin(6)
        sums.append(engine.clipped_sum(case.loss_of(*case.batch(6, seed=0)), clip_norms(6, 0.3), torch.ones(6)))
    assert away(*sums) <= CLOSE * length(sums[0])


def against_loop(case: Case, engine, losses, clip_norm: Tensor) -> tuple[float, float]:
    """(how far the engine's sum is from the definition's, the length of the latter) for these losses."""
    ones = torch.ones(len(clip_norm))
    theirs = attached("loop", case).clipped_sum(losses(), clip_norm, ones)
    engine.begin(len(clip_norm))
    return away(engine.clipped_sum(losses(), clip_norm, ones), theirs), length(theirs)


def test_a_hook_on_a_parameter_is_part_of_the_definition():
    torch.manual_seed(0)
    case = Case(nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)), flat)
    engine, batch = attached("ghost", case), case.batch(5, seed=0)
    against_loop(case, engine, lambda: case.loss_of(*batch), torch.ones(5))
    case.parameters[0].register_hook(lambda g: g.clamp(-0.01, 0.01))
    for _ in range(2):
        error, size = against_loop(case, engine, lambda: case.loss_of(*batch), torch.ones(5))
        assert error <= CLOSE * size


def watched(model: nn.Module, x: Tensor) -> Tensor:
    """Once `is_on` is set, a hook changes the gradients."""
    hidden = torch.tanh(model.first(x))
    if model.is_on:
        hidden.register_hook(lambda g: g / (1e-3 + g.norm()))
    return model.head(hidden)


def test_a_hook_that_appears_later_fails_the_next_check_and_is_never_trusted():
    torch.manual_seed(0)
    case = Case(Model(watched, first=nn.Linear(6, 6), head=nn.Linear(6, 3), is_on=False), flat)
    engine = attached("ghost", case)
    wrong = []
    for number in range(AUDIT_EVERY + 3):
        case.model.is_on = number >= AUDIT_EVERY - 1
        batch = case.batch(4, seed=number)
        error, _ = against_loop(case, engine, lambda: case.loss_of(*batch), torch.full((4,), 0.1))  # noqa: B023
        if error > 1e-5:
            wrong.append(number)
    assert wrong == [AUDIT_EVERY - 1]


#: Uses of a weight that are differentiated record by record, with zeros for all others.
SHARED = {
    "bilinear": lambda: nn.Bilinear(5, 5, 3),
    "batch norm": lambda: nn.BatchNorm1d(5).eval(),
    "product": lambda: nn.Parameter(torch.randn(5, 1, 4)),
}


def of_shared(model: nn.Module, x: Tensor) -> Tensor:
    part = model.part
    if isinstance(part, nn.Parameter):
        return torch.bmm(x.T[:, :, None], part).sum((0, 2))
    return (part(x, x) if isinstance(part, nn.Bilinear) else part(x)).sum(1)


@pytest.mark.parametrize("name", SHARED)
@pytest.mark.parametrize("is_seen", [True, False])
def test_a_record_that_is_not_finite_never_silently_removes_the_others(name, is_seen):
    """0·inf is NaN in the gradients of all others. Their contributions must not depend on this record."""
    torch.manual_seed(0)
    model = Model(of_shared, part=SHARED[name]())
    engine = attached("ghost", Case(model, lambda n: ()))
    x, ones = torch.randn(6, 5), torch.ones(6)
    for value, chosen in ((1.0, ()), (torch.inf, (3,) if is_seen else ())):
        x[3] = value
        losses = model(x)
        losses = losses if is_seen else losses.where(torch.arange(6) != 3, 0.0)
        engine.begin(6)
        if value == 1.0:
            engine.clipped_sum(losses, ones, ones)
            continue
        with pytest.raises(NonFiniteGradientError) as error:
            engine.clipped_sum(losses, ones, ones)
        assert error.value.records == chosen
    assert engine.is_proven


@pytest.mark.parametrize("which", ENGINES)
def test_a_record_that_cancels_beyond_32_bits_removes_no_other(which):
    """Its two uses of the weight are huge and add up to 0: in autograd's sum all others are lost."""
    torch.manual_seed(0)
    weight, x, heads = nn.Parameter(torch.randn(3, 2, 3, 3)), torch.randn(12, 4, 6, 6), torch.randn(12, 3, 4, 4)
    model = Model(lambda m, x: F.conv2d(x[:, :2], m.weight) - F.conv2d(x[:, 2:], m.weight), weight=weight)
    bounds, ones, sums = torch.full((12,), 0.01), torch.ones(12), []
    for size in (1.0, 1e17):
        x[-1], heads[-1] = 1.0, size * heads[-1]
        engine = attached(which, Case(model, lambda n: ()))
        engine.begin(12)
        sums.append(engine.clipped_sum((model(x) * heads).flatten(1).sum(1), bounds, ones))
    assert away(*sums) <= 0.01
    assert length(sums[0]) > 0.03


def test_a_record_beyond_the_largest_norm_fails_no_check():
    torch.manual_seed(0)
    model = nn.Linear(6, 3)
    engine, heads = attached("ghost", Case(model, lambda n: ())), torch.ones(5)
    heads[0] = 1e20
    engine.begin(5)
    engine.clipped_sum(model(torch.randn(5, 6)).sum(1) * heads, torch.ones(5), torch.ones(5))
    assert engine.is_proven
