"""By how much a gradient is shortened depends on it alone, whatever engine, check or rounding there is."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import epsilons
from epsilons.clipping import ENGINES, NonFiniteGradientError, engine
from epsilons.clipping.engine import LARGEST_NORM, SHRINK, is_covered
from epsilons.clipping.ghost import ghost
from epsilons.clipping.vmap import Vmap, called_with
from epsilons.errors import EpsilonsWarning
from epsilons.training import noisy_update
from functional import Model
from small_runs import of_phases, private_over
from sums import CLOSE, OVERSTATED, attached, away, common_mode, length
from zoo import Case, flat

# -- one rule for all engines -----------------------------------------------------------------------------------------

TIME, WIDTH = 64, 512  # so that norms come from Gram matrices
LossesOf = Callable[[nn.Module], Tensor]


def clipped(which: str, model: nn.Module, losses: LossesOf, clip_norm: Tensor) -> list[Tensor]:
    """The engine's sum of all records, at weight 1. A record that is named as broken is replaced by zeros."""
    case = engine(which)
    case.attach(model, list(model.parameters()))
    case.begin(len(clip_norm))
    try:
        return case.clipped_sum(losses(model), clip_norm, torch.ones_like(clip_norm))
    finally:
        case.detach()


@pytest.mark.parametrize("noise", [1e-3, 1e-2, 0.03, 0.1, 0.3, 1.0])
def test_records_alone_are_shortened_as_they_are_among_others(noise: float):
    """Alone, `loop` computes them. The less noise, the more cancels, and the harder is a bound on the norm."""
    records = 24
    features, gradients = common_mode(records, noise, TIME, WIDTH, WIDTH)
    model = nn.Linear(WIDTH, WIDTH, bias=False)
    clip_norm = torch.full((records,), 1e-3, dtype=torch.float64)

    def losses(rows: slice) -> LossesOf:
        return lambda model: (model(features[rows]) * gradients[rows]).flatten(1).sum(1)

    together = clipped("ghost", model, losses(slice(None)), clip_norm)
    alone = [clipped("ghost", model, losses(slice(i, i + 1)), clip_norm[i : i + 1])[0] for i in range(records)]
    lengths = torch.tensor([float(one.norm()) for one in alone])
    assert torch.allclose(lengths, clip_norm.float() / OVERSTATED, rtol=1e-5)
    assert away(together, [torch.stack(alone).sum(0)]) <= 1e-5 * float(clip_norm.sum())


# -- whole draws ----------------------------------------------------------------------------------------------


class Rooted(nn.Module):
    """A layer on many steps, and a bilinear one under a root: at 0 its gradient is not finite, though the loss is."""

    def __init__(self) -> None:
        super().__init__()
        self.steps, self.both = nn.Linear(WIDTH, WIDTH, bias=False), nn.Bilinear(2, 2, 1, bias=False)

    def forward(self, x: Tensor, gradients: Tensor, under: Tensor) -> Tensor:
        root = self.both(under, under).square().sum(1).sqrt()
        return (self.steps(x) * gradients).flatten(1).sum(1) + root


def some_plan() -> epsilons.Plan:
    return epsilons.plan(
        epsilons.Budgets([0.5, 500.0] * 8, delta=1e-5),
        epsilons.Recipe(steps=1, batch_size=16.0, clip_norm=1e-3),
        strategy="scale",
        accountant="rdp",
        public_shares={0.5: 0.5, 500.0: 0.5},
        public_records=16,
    )


def draw(data: Sequence[Tensor], levels: Sequence[float], monkeypatch: pytest.MonkeyPatch, at_once: int) -> Tensor:
    """The sum without noise of one draw of all records, under one key and one plan, whoever is among them."""
    found: list[Tensor] = []
    average = noisy_update.NoisyUpdate.noisy_average

    def watched(self, randomness):
        found.append(torch.cat([part.flatten() for part in self.sum]))
        return average(self, randomness)

    torch.manual_seed(0)
    model = Rooted()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    performance = epsilons.Performance(max_physical_batch=at_once)
    budgets = epsilons.Budgets(levels, delta=1e-5)
    with monkeypatch.context() as patch:
        patch.setattr(noisy_update.NoisyUpdate, "noisy_average", watched)
        with epsilons.make_private(
            model,
            optimizer,
            tuple(data),
            some_plan(),
            budgets=budgets,
            seed=epsilons.Randomness.with_key(bytes(32)),
            performance=performance,
        ) as private:
            for batch in private.batches:
                private.backward(model(*batch))
                private.step()
    (total,) = found
    return total


@pytest.mark.parametrize("at_once", [16, 8])
@pytest.mark.parametrize("is_broken", [True, False], ids=["its gradient is not finite", "it is as all others"])
def test_no_record_decides_by_how_much_others_are_shortened(is_broken: bool, at_once: int, monkeypatch):
    """Much of their gradients cancels, and their clip norms are far larger than that of the record left out."""
    features, gradients = common_mode(16, 0.1, TIME, WIDTH, WIDTH)
    under = torch.ones(16, 2)
    under[-1] = 0.0 if is_broken else 1.0
    levels = [500.0] * 15 + [0.5]
    data = features, gradients, under
    whole = draw(data, levels, monkeypatch, at_once)
    rest = draw([t[:-1] for t in data], levels[:-1], monkeypatch, at_once)
    moved = float((whole - rest).norm())
    strict, loose = some_plan().clip_norm
    assert float(rest.norm()) > loose > 20 * strict
    # A broken record is replaced by another at weight 0, so not even the last bits of others move.
    assert moved == (0.0 if is_broken else pytest.approx(strict / OVERSTATED, rel=1e-4))


# -- vmap -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [10.0, 1e6, 1e12])
def test_a_wrong_gradient_that_is_huge_hides_no_other_wrong_one(size: float, monkeypatch):
    """vmap's gradient of record 2 is wrong by the first layer, and so long that its clip factor hides all else."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)), torch.randn(6, 5)
    by_module = Vmap._by_module

    def wrong(self, calls, losses):
        gradients = by_module(self, calls, losses)
        gradients[0][2] += size
        gradients[2][2] += 1.0
        gradients[3][2] -= 0.5
        return gradients

    clip_norm = torch.linspace(0.01, 1.0, 6, dtype=torch.float64)
    losses = lambda model: model(x).square().sum(1)  # noqa: E731
    exact = clipped("loop", model, losses, clip_norm)
    monkeypatch.setattr(Vmap, "_by_module", wrong)
    assert away(clipped("vmap", model, losses, clip_norm), exact) <= 1e-6 * length(exact)


# -- large numbers --------------------------------------------------------------------------------------------

#: Sizes of a record's input and of its gradient at the output; their product is the size of its gradient.
SIZES = [(1e10, 1.0), (1e15, 1.0), (1e25, 1e-20), (1e-20, 1e25), (1e37, 1e-30), (1e19, 1.0), (1e25, 1.0), (1e37, 1e-10)]


@pytest.mark.parametrize("which", ENGINES)
@pytest.mark.parametrize("steps", [1, 3, 40])
@pytest.mark.parametrize(("left", "right"), SIZES)
def test_all_engines_clip_and_leave_out_the_same_large_gradients(which: str, steps: int, left: float, right: float):
    make = torch.Generator().manual_seed(0)
    x, y = torch.randn(5, steps, 30, generator=make), torch.randn(5, steps, 40, generator=make)
    x[3] *= left
    y[3] *= right
    model = Model(lambda m, x, y: (m.layer(x) * y).flatten(1).sum(1), layer=nn.Linear(30, 40, bias=False))
    clip_norm = torch.full((5,), 0.1, dtype=torch.float64)
    exact = torch.einsum("nti,nto->noi", x.double(), y.double())
    norms = exact.flatten(1).norm(dim=1)
    factor = (clip_norm / (OVERSTATED * norms)).clamp_max(1.0) * (norms <= LARGEST_NORM)
    assert bool(factor[3] > 0) == (left * right < 1e18)
    expected = [torch.einsum("n,noi->oi", factor, exact)]
    try:
        found = clipped(which, model, lambda model: model(x, y), clip_norm)
    except NonFiniteGradientError:
        assert factor[3] == 0.0  # the caller repeats the physical batch without this record
        return
    assert away(found, expected) <= 1e-5 * float(clip_norm.sum())


def test_lengths_below_and_above_the_largest_norm_are_those_of_the_page():
    """A gradient just below contributes its clip norm, one just above contributes nothing."""
    model = nn.Linear(1, 1, bias=False)
    for factor, expected in ((0.99, 1.0 / OVERSTATED), (1.01, 0.0)):
        x = torch.tensor([[1.0], [factor * LARGEST_NORM / OVERSTATED]])
        for which in ENGINES:
            total = clipped(which, model, lambda model: model(x).squeeze(1), torch.ones(2, dtype=torch.float64))  # noqa: B023
            assert float(total[0]) == pytest.approx(1 / OVERSTATED + expected, rel=1e-5)


def test_mse_losses_are_unchanged_where_nothing_is_clipped():
    """The headroom concerns what is clipped: a sum of short gradients is autograd's."""
    torch.manual_seed(0)
    model, x, y = nn.Linear(4, 2), torch.randn(8, 4), torch.randn(8, 2)
    losses = lambda model: F.mse_loss(model(x), y, reduction="none").sum(1)  # noqa: E731
    exact = torch.autograd.grad(losses(model).sum(), list(model.parameters()))
    for which in ENGINES:
        found = clipped(which, model, losses, torch.full((8,), 1e6, dtype=torch.float64))
        assert away(found, [g.double() for g in exact]) <= 2e-6 * length(exact)


# -- physical batches that fail the random check are left to vmap -----------------------------------------------------

STEPS, WIDE = 64, 512  # so that norms come from Gram matrices


def _engine(model: nn.Module) -> ghost.Ghost:
    engine = ghost.Ghost()
    engine.attach(model, list(model.parameters()))
    return engine


def _sums(engine: ghost.Ghost, losses: Tensor, clip_norm: float = 1.0) -> list[Tensor]:
    engine.begin(len(losses))
    return engine.clipped_sum(losses, *_bounds(len(losses), clip_norm))


def _bounds(records: int, clip_norm: float) -> tuple[Tensor, Tensor]:
    return torch.full((records,), clip_norm, dtype=torch.float64), torch.ones(records, dtype=torch.float64)


@pytest.mark.usefixtures("one_thread")
def test_a_record_that_fails_the_check_changes_no_later_draw():
    """Its gradient is rounding alone. Others are clipped by upper bounds, which `vmap` would not use."""
    torch.manual_seed(0)
    model = nn.Linear(WIDE, WIDE)
    sign = torch.where(torch.arange(STEPS) % 2 == 0, 1.0, -1.0)[:, None]
    x = torch.randn(1, 1, WIDE) + torch.randn(16, STEPS, WIDE)
    y = model(x).detach() - sign * torch.randn(1, 1, WIDE)
    theirs = 1e6 * torch.randn(1, STEPS, WIDE)  # adds up to 0 over time, as does the gradient of the bias
    theirs[:, -1] -= theirs.sum(1)

    def losses(*attackers: Tensor) -> Tensor:
        inputs = torch.cat([x, *(torch.zeros(1, STEPS, WIDE) for _ in attackers)])
        targets = torch.cat([y, *(attacker + model.bias.detach() for attacker in attackers)])
        return (model(inputs) - targets).square().sum((1, 2))

    without, beside = _engine(model), _engine(model)
    _sums(without, losses())
    _sums(beside, losses(theirs))
    assert without.is_proven
    assert not beside.is_proven  # the check failed
    for _ in range(3):
        assert all(map(torch.equal, _sums(without, losses()), _sums(beside, losses())))


class _Hooked:
    """A model of which the outputs' gradients are clamped in some physical batches, and how often it was checked."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        torch.manual_seed(0)
        self.model, self.x, self.checks = nn.Linear(5, 3), torch.randn(8, 5), 0
        agrees = ghost.Ghost._agrees

        def counted(*given):
            self.checks += 1
            return agrees(*given)

        monkeypatch.setattr(ghost.Ghost, "_agrees", counted)

    def losses(self, is_hooked: bool) -> Tensor:
        outputs = self.model(self.x)
        if is_hooked:
            outputs.register_hook(lambda gradient: gradient.clamp(-0.1, 0.1))
        return outputs.square().sum(1)

    def is_right(self, engine: ghost.Ghost, is_hooked: bool) -> bool:
        ours = _sums(engine, self.losses(is_hooked), 1e9)
        total = self.losses(is_hooked).sum()
        exact = [g.double() for g in torch.autograd.grad(total, list(self.model.parameters()))]
        return away(ours, exact) <= CLOSE * length(exact)


def test_a_pattern_that_always_fails_is_checked_no_more(monkeypatch):
    hooked = _Hooked(monkeypatch)
    engine = _engine(hooked.model)
    assert all(hooked.is_right(engine, is_hooked=True) for _ in range(ghost.AUDIT_EVERY + 5))
    assert hooked.checks == ghost.AUDIT_EVERY


def test_after_a_failure_the_following_physical_batches_are_checked(monkeypatch):
    """A hook that alters some physical batches is found in each of them, until it was not found for 64."""
    hooked = _Hooked(monkeypatch)
    engine = _engine(hooked.model)
    assert all(hooked.is_right(engine, is_hooked=i % 3 == 0) for i in range(2 * ghost.AUDIT_EVERY))
    assert hooked.checks == 2 * ghost.AUDIT_EVERY
    last = next(i for i in reversed(range(2 * ghost.AUDIT_EVERY)) if i % 3 == 0)
    checked = 2 * ghost.AUDIT_EVERY - 1 - last
    assert all(hooked.is_right(engine, is_hooked=False) for _ in range(3 * ghost.AUDIT_EVERY))
    assert hooked.checks == 2 * ghost.AUDIT_EVERY + (ghost.AUDIT_EVERY - checked) + 2


# -- the range in which the rounding of sums is covered ---------------------------------------------------------------

BUDGETS = epsilons.Budgets([500.0, 1000.0] * 6, delta=1e-3)


@pytest.mark.parametrize("ratio", [1.0, 3.0])
@pytest.mark.parametrize("physical_batch", [1, 16, 256, 4096, 10**9])
def test_the_errors_of_all_additions_stay_below_half_of_what_is_covered(physical_batch, ratio):
    """Each addition is wrong by 2⁻⁵³ of the sum so far: here all are, in both of two neighbouring sums."""
    for records in (1_000, 20_000, 65_000, 10**6, 10**7):
        batch = min(physical_batch, records)
        within = torch.arange(1, batch + 1, dtype=torch.float64).sum() * records / batch
        across = torch.arange(1, records // batch + 1, dtype=torch.float64).sum() * batch
        error = 2 * float(within + across) * 2.0**-53 * ratio
        if is_covered(records, batch, ratio):
            assert error <= (1 - SHRINK) / 2 * (1 + 2 / records**0.5)
        else:
            assert error >= (1 - SHRINK) / 2 * (1 - 2 / records**0.5)


def test_sums_of_65_535_records_are_covered_in_physical_batches_of_any_size():
    assert all(is_covered(65_535, physical_batch) for physical_batch in range(1, 65_536))
    assert not is_covered(65_536, 65_536)


def warned(*expected_batches: float, clip_norm: tuple[float, float] = (1.0, 1.0), **performance: int) -> list[str]:
    shared = {"steps": 1, "sample_rate": [1.0, 1.0], "clip_norm": clip_norm}
    plan = of_phases(*(shared | {"expected_batch": expected} for expected in expected_batches), budgets=BUDGETS)
    model, data = nn.Linear(3, 2), (torch.zeros(12, 3), torch.zeros(12, dtype=torch.long))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        private_over(model, data, plan, budgets=BUDGETS, **performance)
    return [str(w.message) for w in caught if issubclass(w.category, EpsilonsWarning)]


def test_make_private_warns_once_if_draws_may_be_too_large():
    (message,) = warned(12.0, 2e6, 3e6)
    assert message.startswith("With draws of about 2,000,000 records in physical batches of 256, rounding in 64 bits")
    assert "use a smaller batch_size (the range is widest with max_physical_batch=1414). See" in message


@pytest.mark.parametrize(
    ("expected_batch", "options"),
    [(12.0, {}), (60_000.0, {}), (9e5, {}), (9e5, {"max_physical_batch": 1024}), (1.5e6, {"max_physical_batch": 1225})],
)
def test_make_private_does_not_warn_of_draws_that_are_covered(expected_batch, options):
    assert warned(expected_batch, **options) == []


def test_bounds_that_differ_between_groups_make_the_range_smaller():
    assert warned(60_000.0, max_physical_batch=60_000) == []
    assert len(warned(60_000.0, max_physical_batch=60_000, clip_norm=(0.5, 1.0))) == 1


# -- modules called with other tensors, in vmap -----------------------------------------------------------------------


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
