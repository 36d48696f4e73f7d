"""A physical batch that fails the random check is left to `vmap`. Later draws do not depend on who was in it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from epsilons.clipping.ghost import ghost
from sums import CLOSE, away, length

TIME, FEATURES = 64, 512  # so that norms come from Gram matrices


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
    model = nn.Linear(FEATURES, FEATURES)
    sign = torch.where(torch.arange(TIME) % 2 == 0, 1.0, -1.0)[:, None]
    x = torch.randn(1, 1, FEATURES) + torch.randn(16, TIME, FEATURES)
    y = model(x).detach() - sign * torch.randn(1, 1, FEATURES)
    theirs = 1e6 * torch.randn(1, TIME, FEATURES)  # adds up to 0 over time, as does the gradient of the bias
    theirs[:, -1] -= theirs.sum(1)

    def losses(*attackers: Tensor) -> Tensor:
        inputs = torch.cat([x, *(torch.zeros(1, TIME, FEATURES) for _ in attackers)])
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
