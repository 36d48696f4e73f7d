"""On a GPU: the same draws, the same noise, and sums that agree with the definition. Skipped without one.

tests/test_kernels.py runs the same branches on a CPU. Here are the kernels themselves, and what the host waits for.
"""

from __future__ import annotations

import copy
import warnings
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import epsilons
from epsilons import Budgets, Recipe
from epsilons.clipping import ENGINES
from epsilons.clipping.ghost.outer_products import OuterProductGrad, ProductSide
from epsilons.core.checksums import CheckSums, check_sum, tree_hash
from sums import OVERSTATED, any_case, attached, away, common_mode, doubled, length
from test_kernels import LIMITS, MODELS, Transformer
from zoo import MORE, ZOO, Case, build, clip_norms

pytestmark = pytest.mark.gpu
DEVICE = "cuda"


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


# -- sums and norms ----------------------------------------------------------------------------------------------------


def assert_has_the_sum_of_the_definition(case: Case, sizes: list[int] | None) -> None:
    """In 64 bits on a CPU. The second physical batch is not checked, so gradients are joined."""
    exact, on_gpu = doubled(case), replace(case, model=copy.deepcopy(case.model).to(DEVICE))
    loop, ghost = attached("loop", exact), attached("ghost", on_gpu)
    people = 7 if sizes is None else len(sizes)
    rows = people if sizes is None else sum(sizes)
    weight = torch.linspace(1.5, 0.0, people, dtype=torch.float64)
    for seed in range(2):
        inputs, targets = case.batch(rows, seed)
        wide = tuple(t.double() if t.is_floating_point() else t for t in inputs)
        theirs = loop.clipped_sum(exact.loss_of(wide, targets), clip_norms(people, 0.3), weight, sizes)
        ghost.begin(rows)
        losses = on_gpu.loss_of(tuple(t.to(DEVICE) for t in inputs), targets.to(DEVICE))
        ours = ghost.clipped_sum(losses, clip_norms(people, 0.3).to(DEVICE), weight.to(DEVICE), sizes)
        assert away([part.cpu() for part in ours], theirs) <= 1e-4 * length(theirs)


@pytest.mark.parametrize("name", [*MORE, *(name for name in ZOO if not build(name).random)])
def test_every_model_has_the_sum_of_the_definition(name):
    torch.backends.cudnn.allow_tf32 = False
    assert_has_the_sum_of_the_definition(any_case(name), None)


@pytest.mark.parametrize("sizes", [None, [3, 1, 2, 2, 1]], ids=["records", "persons"])
@pytest.mark.parametrize("limit", LIMITS)
@pytest.mark.parametrize("name", MODELS)
def test_every_kernel_gives_the_sum_of_the_definition(name, limit, sizes, monkeypatch):
    for module, constant, value in LIMITS[limit]:
        monkeypatch.setattr(module, constant, value)
    assert_has_the_sum_of_the_definition(build(name), sizes)


@pytest.mark.parametrize("sizes", [(64, 512, 512), (20, 96, 64), (200, 512, 1024)])
@pytest.mark.parametrize("noise", [1.0, 1e-2, 1e-4, 0.0])
def test_no_contribution_is_above_its_bound_however_much_cancels(noise, sizes):
    """Of a linear layer, however a GPU's kernels round: by Gram matrices, and by all entries."""
    grad = OuterProductGrad(*(ProductSide(side.to(DEVICE)) for side in common_mode(32, noise, *sizes)))
    norm = grad.squared_norm().sqrt()
    for record in range(32):
        factor = torch.zeros(32, dtype=torch.float64, device=DEVICE)
        factor[record] = 1e-3 / (OVERSTATED * norm[record].clamp_min(1e-30)) * (1 - 2.0**-20)
        assert float(grad.weighted(factor).norm()) <= 1e-3


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool])
def test_checksums_and_hashes_are_those_of_the_cpu(dtype):
    tensors = [torch.randn(shape).to(dtype) for shape in [(), (3,), (7, 5), (100_000,), (200, 333), (0,)]]
    on_cpu, on_gpu = (
        (CheckSums.of(some, []).sums, tree_hash(some), check_sum(some))
        for some in (tensors, [t.to(DEVICE) for t in tensors])
    )
    assert on_gpu == on_cpu


# -- what the host waits for -------------------------------------------------------------------------------------------


def waits(layers: int, width: int, time: int) -> int:
    """How often the host waits for the GPU in one step that is not checked, by torch's own count."""
    torch.manual_seed(0)
    model, x, y = Transformer(layers, width, time), torch.randint(0, 100, (400, time)), torch.randint(0, 10, (400,))
    model.to(DEVICE)
    budgets = Budgets([1.0, 3.0] * 200, delta=1e-4)
    plan = epsilons.plan(budgets, Recipe(steps=4, batch_size=32, clip_norm=1.0), accountant="rdp")
    optimizer, found = torch.optim.SGD(model.parameters(), lr=0.1), list[int]()
    performance = epsilons.Performance(max_physical_batch=96)
    with epsilons.make_private(
        model, optimizer, (x, y), plan, budgets=budgets, seed=1, performance=performance
    ) as private:
        for inputs, targets in private.batches:
            losses = F.cross_entropy(model(inputs), targets, reduction="none")
            with warnings.catch_warnings(record=True) as seen:
                warnings.simplefilter("always")
                torch.cuda.set_sync_debug_mode("warn")
                private.backward(losses)
                is_updated = private.step()
                torch.cuda.set_sync_debug_mode("default")
            found += [sum("synchroniz" in str(one.message) for one in seen)] if is_updated else []
    return found[3]


@pytest.mark.parametrize("sizes", [(32, 16), (128, 20)], ids=["entries", "Gram matrices"])
def test_no_layer_makes_the_host_wait(sizes):
    assert waits(2, *sizes) == waits(4, *sizes) <= 20
