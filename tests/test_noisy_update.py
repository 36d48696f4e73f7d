"""The released update against its formula: (sum + noise) / expected batch in 64 bits, rounded once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import epsilons
from epsilons.training.clipping import Loop


class Reusing(Loop):
    """An engine that hands out the same tensors every time."""

    def clipped_sum(self, *arguments: Any) -> list[Tensor]:
        found = super().clipped_sum(*arguments)
        self.kept = getattr(self, "kept", None) or [torch.empty_like(part) for part in found]
        for kept, part in zip(self.kept, found, strict=True):
            kept.copy_(part)
        return self.kept


def conv() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 5, 3), nn.ReLU(), nn.Flatten(), nn.Linear(20, 3))


CASES: dict[str, dict[str, Any]] = {
    "32 bits": {},
    "64 bits": {"dtype": torch.float64},
    "channels last": {"performance": {"channels_last": True}},
    "an engine that uses its tensors again": {"performance": {"engine": Reusing()}},
}


@pytest.mark.parametrize("case", CASES)
def test_an_update_is_the_formula_to_the_last_bit(case, monkeypatch):
    """With draws of no, one and several physical batches. Sums are noted as the engine gives them."""
    options = dict(CASES[case])
    torch.manual_seed(0)
    dtype = options.pop("dtype", torch.float32)
    inputs, targets = torch.randn(30, 3, 4, 4, dtype=dtype), torch.randint(3, (30,))
    model = conv().to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plan = epsilons.plan(
        epsilons.Budgets([5.0] * 30, delta=1e-3), epsilons.Recipe(25, 3.0, 1.0), "uniform", accountant="rdp"
    )
    performance = epsilons.Performance(**({"max_physical_batch": 2} | options.get("performance", {})))
    private = epsilons.make_private(
        model, optimizer, (inputs, targets), plan, budgets=epsilons.Budgets([5.0] * 30, delta=1e-3), seed=1,
        performance=performance,
    )  # fmt: skip
    parts: list[list[Tensor]] = []
    add = private._noisy_update.add
    monkeypatch.setattr(
        private._noisy_update, "add", lambda clipped: (parts.append([p.clone() for p in clipped]), add(clipped))
    )
    numbers, seen = [], []
    parameters = list(model.parameters())

    def check(*_: Any) -> None:
        total = [torch.zeros(p.shape, dtype=torch.float64) for p in parameters]
        for part in parts:
            total = [a + b for a, b in zip(total, part, strict=True)]
        step, phase = len(numbers), plan.phases[0]
        noise = torch.from_numpy(private._draws.randomness.noise(0, step, sum(p.numel() for p in parameters)))
        for p, summed, drawn in zip(
            parameters, total, torch.split(noise, [p.numel() for p in parameters]), strict=True
        ):
            expected = (summed + phase.noise_std * drawn.reshape(p.shape)) / phase.expected_batch
            assert p.grad.dtype == dtype
            assert torch.equal(p.grad, expected.to(dtype))
            assert p.grad.stride() == p.stride()
            seen.append(p.numel())
        numbers.append(len(parts))
        parts.clear()

    optimizer.register_step_pre_hook(check)
    with private:
        for x, y in private.batches:
            private.backward(F.cross_entropy(model(x), y, reduction="none"))
            private.step()
    assert len(seen) == 25 * len(parameters)
    assert {0, 1, 2} <= set(numbers)
