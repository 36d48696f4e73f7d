"""One rule of norms: by how much a gradient is shortened depends on it alone, whatever engine or kernel computes it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import epsilons
from epsilons.clipping import ENGINES, NonFiniteGradientError, engine
from epsilons.clipping.engine import LARGEST_NORM
from epsilons.clipping.vmap import Vmap
from epsilons.training import noisy_update
from functional import Model
from sums import OVERSTATED, away, common_mode, length

TIME, WIDTH = 64, 512  # so that norms come from Gram matrices
Losses = Callable[[nn.Module], Tensor]


def clipped(which: str, model: nn.Module, losses: Losses, clip_norm: Tensor) -> list[Tensor]:
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

    def losses(rows: slice) -> Losses:
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
            model, optimizer, tuple(data), some_plan(), budgets=budgets, key=bytes(32), performance=performance
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
