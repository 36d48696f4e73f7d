"""On a GPU: the same draws, the same noise, and sums that agree with the definition. Skipped without one."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import epsilons
from epsilons import Budgets, Recipe
from epsilons.clipping import ENGINES

pytestmark = pytest.mark.gpu


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 8, 3), nn.Tanh(), nn.GroupNorm(2, 8), nn.Flatten(), nn.LazyLinear(16), nn.ReLU(), nn.Linear(16, 4)
    )


def trained(device: str, engine: str, strategy: str = "scale") -> list[torch.Tensor]:
    torch.backends.cudnn.allow_tf32 = False
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(300, 1, 8, 8, generator=generator), torch.randint(0, 4, (300,), generator=generator)
    budgets = Budgets.from_shares({1.0: 0.5, 4.0: 0.5}, records=300, delta=1e-4)
    plan = epsilons.plan(budgets, Recipe(steps=5, batch_size=60, clip_norm=0.5), strategy, "rdp")
    model = network()
    model(x[:1])
    model.to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    private = epsilons.make_private(
        model, optimizer, (x, y), plan, budgets=budgets, seed=3, performance=epsilons.Performance(engine=engine)
    )
    with private:
        for inputs, targets in private.batches:
            assert inputs.device.type == device
            private.backward(F.cross_entropy(model(inputs), targets, reduction="none"))
            private.step()
    return [p.detach().cpu() for p in model.parameters()]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("strategy", ["scale", "sample"])
def test_a_gpu_learns_what_the_cpu_learns(engine, strategy):
    for on_gpu, on_cpu in zip(trained("cuda", engine, strategy), trained("cpu", "loop", strategy), strict=True):
        torch.testing.assert_close(on_gpu, on_cpu, atol=1e-5, rtol=1e-5)


def test_one_level_is_plain_dp_sgd_on_a_gpu_too():
    budgets = Budgets([2.0] * 100, delta=1e-4)
    x, y = torch.randn(100, 5), torch.randint(0, 3, (100,))
    found = []
    for strategy in ("uniform", "sample", "scale"):
        plan = epsilons.plan(budgets, Recipe(steps=4, batch_size=20, clip_norm=1.0), strategy, "rdp")
        torch.manual_seed(0)
        model = nn.Linear(5, 3)
        epsilons.fit(
            model, (x, y), plan, budgets=budgets, training=epsilons.Training(device="cuda", progress=False), seed=1
        )
        found.append(model.weight.detach().cpu())
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])
