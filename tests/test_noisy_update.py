"""The released update against its formula, and what hooks of the optimizer may do beside it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrize
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

import epsilons
from epsilons.clipping import Loop
from epsilons.clipping.engine import add_each
from epsilons.draws.randomness import BLOCK, Randomness
from epsilons.errors import ModelError
from epsilons.training.noisy_update import CHECK_EVERY
from functional import Model
from shares import share
from small_runs import CLASSES, FEATURES, everyone, losses_of, parameters_of, private_over, same, some_plan, train


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
    """(sum + noise) / expected batch in 64 bits, rounded once.

    With draws of no, one and several physical batches. Sums are noted as the engine gives them.
    """
    options = dict(CASES[case])
    torch.manual_seed(0)
    dtype = options.pop("dtype", torch.float32)
    inputs, targets = torch.randn(30, 3, 4, 4, dtype=dtype), torch.randint(3, (30,))
    model = conv().to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plan = epsilons.plan(
        epsilons.Budgets([5.0] * 30, delta=1e-3), epsilons.Recipe(80, 3.0, 1.0), "uniform", accountant="rdp"
    )
    performance = epsilons.Performance(**({"max_physical_batch": 2} | options.get("performance", {})))
    private = epsilons.make_private(
        model, optimizer, (inputs, targets), plan, budgets=epsilons.Budgets([5.0] * 30, delta=1e-3), seed=1,
        performance=performance,
    )  # fmt: skip
    parts: list[list[Tensor]] = []
    clipped = private._clipper.clipped

    def noted(*given: Any) -> Any:
        own = [torch.zeros(p.shape, dtype=torch.float64) for p in model.parameters()]
        clipped(*given)(own)
        parts.append(own)
        return functools.partial(add_each, own)

    monkeypatch.setattr(private._clipper, "clipped", noted)
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
    assert len(seen) == 80 * len(parameters)
    assert {0, 1, 2} <= set(numbers)


class Keeping(torch.optim.SGD):
    """It keeps the gradients of every step, as they were and as it got them: tensors, or their memory alone."""

    def __init__(self, *given: Any, keeps_storage: bool, **named: Any) -> None:
        super().__init__(*given, **named)
        self.keeps_storage = keeps_storage
        self.kept: list[list[Any]] = []
        self.copies: list[list[Any]] = []

    def step(self, closure: Any = None) -> Any:
        own: list[Any] = [p.grad for group in self.param_groups for p in group["params"]]
        own = [g.untyped_storage() for g in own] if self.keeps_storage else own
        self.kept.append(own)
        self.copies.append([g.clone() for g in own])
        return super().step(closure)


@pytest.mark.parametrize("keeps_storage", [False, True])
@pytest.mark.parametrize(
    "dtypes", [(torch.float32,) * 2, (torch.float64,) * 2, (torch.float32, torch.float64), (torch.bfloat16,) * 2]
)
def test_a_gradient_that_an_optimizer_keeps_stays_as_it_was(dtypes, keeps_storage):
    """The memory of an update is used again only if nobody else has it. Of several types, each has its own."""
    torch.manual_seed(0)
    first, second = (nn.Linear(4, 4, dtype=dtype) for dtype in dtypes)
    model = Model(lambda m, x: m.second(m.first(x).to(dtypes[1])), first=first, second=second)
    optimizer = Keeping(model.parameters(), lr=0.1, keeps_storage=keeps_storage)
    data = torch.randn(60, 4, dtype=dtypes[0]), torch.randint(3, (60,))
    with private_over(model, data, some_plan(steps=6), optimizer=optimizer) as private:
        train(private, model)
    assert len(optimizer.kept) == 6
    for own, copies in zip(optimizer.kept, optimizer.copies, strict=True):
        assert all(a.tolist() == b.tolist() for a, b in zip(own, copies, strict=True))
    assert optimizer.copies[0][0].tolist() != optimizer.copies[1][0].tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("numbers", [3, BLOCK, 5 * BLOCK + 7])
def test_no_sum_without_noise_is_left_in_the_memory_of_an_update(numbers, dtype, monkeypatch):
    """Whoever saves a gradient saves all of its memory."""
    model = nn.Module()
    model.weight = nn.Parameter(torch.zeros(numbers, dtype=dtype))
    with private_over(model, plan=everyone()) as private:
        update = private._noisy_update
        for threads in (1, 3):
            monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
            update.begin_sum()
            for part in update.sum:
                part.fill_(1e6)
            (gradient,) = update.noisy_average(private._draws.randomness)
            phase = private.plan.phases[0]
            noise = private._draws.randomness.noise(0, 0, numbers)
            expected = torch.from_numpy((1e6 + phase.noise_std * noise) / phase.expected_batch)
            assert torch.equal(gradient, expected.to(dtype))
            kept = gradient.clone()
            update.begin_sum()
            assert torch.equal(gradient, kept)
            update._total = torch.full((numbers,), 1e6, dtype=torch.float64)
            update.sum  # noqa: B018
            update.begin_sum()  # a draw that was left, and begins again
            assert not any(part.any() for part in update.sum)
            rest = torch.tensor(gradient.untyped_storage(), dtype=torch.uint8)[numbers * dtype.itemsize :]
            assert not rest.any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_after_an_interruption_no_part_of_an_update_is_taken_for_a_sum(dtype, monkeypatch):
    """The same noise would be added to it again. The draw's sum is gone, and what remains is noise."""
    numbers = 6 * BLOCK
    model = nn.Module()
    model.weight = nn.Parameter(torch.zeros(numbers, dtype=dtype))
    with private_over(model, plan=everyone()) as private:
        update, randomness = private._noisy_update, private._draws.randomness
        expected = torch.from_numpy(randomness.noise(0, 0, numbers) * private.plan.phases[0].noise_std)
        expected = (expected / private.plan.phases[0].expected_batch).to(dtype)
        for blocks in range(6):
            update.begin_sum()
            for part in update.sum:
                part.fill_(1e6)
            del part
            true = Randomness._block

            def block(
                own: Any, phase: int, step: int, block: int, count: int, true: Any = true, last: int = blocks
            ) -> Any:
                if block == last:
                    raise KeyboardInterrupt
                return true(own, phase, step, block, count)

            with monkeypatch.context() as patch:
                patch.setattr(Randomness, "_block", block)
                with pytest.raises(KeyboardInterrupt):
                    update.noisy_average(randomness)
            (again,) = update.noisy_average(randomness)
            assert torch.equal(again, expected)
            del again


# -- frozen weights -------------------------------------------------------------------------------------------------


class WithFrozen(nn.Module):
    """A frozen table that is too large to be hashed at every step, and a trained layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(5_000, 16).requires_grad_(False)
        self.layer = nn.Linear(16, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.layer(self.table(tokens).mean(1))


def _add_in_place(model: WithFrozen) -> None:
    with torch.no_grad():
        model.table.weight[7] += 1


def _replace(model: WithFrozen) -> None:
    model.table.weight = nn.Parameter(model.table.weight.detach() + 1, requires_grad=False)


def _set_data(model: WithFrozen) -> None:
    model.table.weight.data = model.table.weight.data + 1


def _write_to_data(model: WithFrozen) -> None:
    model.table.weight.data[7] += 1


@pytest.mark.parametrize(
    ("write", "most"), [(_add_in_place, 1), (_replace, 1), (_set_data, 1), (_write_to_data, CHECK_EVERY + 1)]
)
def test_a_write_to_frozen_weights_is_refused(write, most):
    """At once, if torch knows of it; otherwise within CHECK_EVERY updates."""
    model = WithFrozen()
    optimizer = torch.optim.SGD(model.layer.parameters(), lr=0.1)
    x, y = torch.randint(5_000, (30, 4)), torch.randint(3, (30,))
    budgets = epsilons.Budgets([5.0] * 30, delta=1e-3)
    plan = epsilons.plan(budgets, epsilons.Recipe(2 * CHECK_EVERY, 3.0, 1.0), "uniform", accountant="rdp")
    private = epsilons.make_private(model, optimizer, (x, y), plan, budgets=budgets, seed=1)
    after, is_written = 0, False
    with pytest.raises(ModelError, match=r"table\.weight changed between two updates"), private:
        for bx, by in private.batches:
            private.backward(F.cross_entropy(model(bx), by, reduction="none"))
            if private.step():
                after += is_written
                if private.updates >= 12 and not is_written:  # a draw without records is no turn of the loop
                    write(model)
                    is_written = True
    assert after < most


@pytest.mark.parametrize("how", ["checkpoint", "end"])
def test_a_write_to_frozen_weights_is_refused_where_a_state_is_saved_and_at_the_end(how, tmp_path):
    model = WithFrozen()
    optimizer = torch.optim.SGD(model.layer.parameters(), lr=0.1)
    x, y = torch.randint(5_000, (30, 4)), torch.randint(3, (30,))
    budgets = epsilons.Budgets([5.0] * 30, delta=1e-3)
    plan = epsilons.plan(budgets, epsilons.Recipe(12, 3.0, 1.0), "uniform", accountant="rdp")
    private = epsilons.make_private(model, optimizer, (x, y), plan, budgets=budgets, run_dir=tmp_path / "run")
    with pytest.raises(ModelError, match=r"table\.weight changed between two updates"), private:
        for bx, by in private.batches:
            private.backward(F.cross_entropy(model(bx), by, reduction="none"))
            if private.step() and private.updates == (5 if how == "checkpoint" else 12):
                _write_to_data(model)
                if how == "checkpoint":
                    private.checkpoint()
    assert private.updates == (5 if how == "checkpoint" else 12)


# -- hooks of the optimizer -----------------------------------------------------------------------------------------


class Projected(torch.optim.SGD):
    """Its step is that of its parent, whose hooks torch runs too, and a projection that uses no data."""

    def step(self, closure: Any = None) -> Any:
        result = super().step(closure)
        with torch.no_grad():
            for group in self.param_groups:
                for p in group["params"]:
                    p.clamp_(-0.2, 0.2)
        return result


KINDS = {"SGD": torch.optim.SGD, "a subclass": Projected}

# ruff: noqa: PT012  (a loop is what raises)
#: Optimizer, hook -> what removes it.
PLACES: dict[str, Callable[[Any, Any], Any]] = {
    "after the step": lambda optimizer, hook: optimizer.register_step_post_hook(hook),
    "before the step": lambda optimizer, hook: optimizer.register_step_pre_hook(hook),
    "after all steps": lambda optimizer, hook: register_optimizer_step_post_hook(hook),
    "before all steps": lambda optimizer, hook: register_optimizer_step_pre_hook(hook),
}


def centred() -> nn.Module:
    torch.manual_seed(3)
    model = nn.Linear(FEATURES, CLASSES)
    model.register_buffer("centre", torch.zeros(2))
    return model


def trained_with(hook: Callable[..., None], place: str, kind: str, update: int = 0, **options: Any) -> list[Tensor]:
    """Three steps on everyone, with the hook from this update on."""
    torch.optim.SGD([nn.Parameter(torch.zeros(1))])  # from the first one on, torch runs hooks in SGD's own step
    model = centred()
    optimizer = KINDS[kind](model.parameters(), lr=0.5)
    handles = []
    try:
        with private_over(model, plan=everyone(3), optimizer=optimizer, **options) as private:
            for batch in private.batches:
                private.backward(losses_of(model, batch))
                if private.updates == update and not handles:
                    handles.append(PLACES[place](optimizer, lambda *_: hook(model, batch)))  # noqa: B023
                private.step()
    finally:
        handles[0].remove()
    return parameters_of(model)


@pytest.mark.parametrize("tensor", ["weight", "bias", "centre"])
@pytest.mark.parametrize("update", [0, 2], ids=["first update", "last update"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("place", PLACES)
def test_what_a_hook_writes_to_the_model_is_refused(place, kind, update, tensor, tmp_path):
    """Once is enough: values of a batch, without noise. No checkpoint keeps them."""
    written = []

    def write(model: nn.Module, batch: Any) -> None:
        if not written:
            values = getattr(model, tensor).data.view(-1)
            values[0] += batch[0].mean()
            written.append(values[0].clone())

    options = {"run_dir": tmp_path / "run", "checkpoint_every": 1}
    with pytest.raises(ModelError, match=r"changed between two updates.*or a hook of the optimizer"):
        trained_with(write, place, kind, update, **options)
    model = centred()
    private_over(
        model, plan=everyone(3), resume=True, optimizer=KINDS[kind](model.parameters(), lr=0.5), **options
    ).close()
    assert model.weight.any()
    held = torch.cat([t.detach().view(-1) for t in (*model.parameters(), *model.buffers())])
    assert not (held == written[0]).any()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("place", PLACES)
def test_a_hook_that_only_reads_is_run_once_per_update_and_sees_it(place, kind):
    seen = []

    def read(model: nn.Module, batch: Any) -> None:
        seen.append((model.weight.detach().clone(), model.weight.grad.clone()))

    after = trained_with(read, place, kind)
    assert same(after, trained_with(lambda *_: None, place, kind))
    assert len(seen) == 3
    assert all(gradient.abs().min() > 0 for _, gradient in seen)
    (before, gradient), (later, _) = seen[:2]
    if "before" in place:
        moved = before - 0.5 * gradient
        assert torch.equal(later, moved if kind == "SGD" else moved.clamp(-0.2, 0.2))
    else:
        assert torch.equal(seen[-1][0], after[0])


def test_what_a_listener_writes_after_an_update_is_refused():
    torch.manual_seed(3)
    model = nn.Linear(FEATURES, CLASSES)
    with private_over(model, plan=everyone(3)) as private, pytest.raises(ModelError, match="bias changed between two"):
        private.on_update(lambda made: model.bias.data.add_(1.0))
        for batch in private.batches:
            private.backward(losses_of(model, batch))
            private.step()
    assert private.updates == 1


@pytest.mark.parametrize("engine", ["loop", "vmap", "ghost"])
@pytest.mark.parametrize("way", ["optimizer", "parametrization"])
def test_a_projection_in_the_step_or_in_a_parametrization_is_accepted(way, engine):
    class Bounded(nn.Module):
        def forward(self, weight: Tensor) -> Tensor:
            return weight.clamp(-0.2, 0.2)

    torch.manual_seed(3)
    model = nn.Linear(FEATURES, CLASSES)
    if way == "parametrization":
        parametrize.register_parametrization(model, "weight", Bounded())
    kind = Projected if way == "optimizer" else torch.optim.SGD
    optimizer = kind(model.parameters(), lr=5.0)
    with private_over(model, plan=everyone(3), optimizer=optimizer, engine=engine) as private:
        for batch in private.batches:
            private.backward(losses_of(model, batch))
            private.step()
        assert private.is_finished
    assert float(model.weight.detach().abs().max()) == pytest.approx(0.2)


# -- anything else that writes ----------------------------------------------------------------------------------------

LAYERS = 12


def deep() -> nn.Module:
    torch.manual_seed(3)
    layers = [nn.Linear(FEATURES, FEATURES) for _ in range(LAYERS)]
    for layer in layers[::4]:
        layer.register_buffer("centre", torch.zeros(1))
    return nn.Sequential(*layers, nn.Linear(FEATURES, CLASSES))


@pytest.mark.parametrize("way", ["between updates", "between physical batches", "before the update"])
@pytest.mark.parametrize("number", share([0, 7, 8, 9, 16, 2 * LAYERS + 1, 2 * LAYERS + 2, 2 * LAYERS + 4], 4))
def test_a_write_to_any_tensor_of_a_deep_model_is_refused(number, way):
    """However many tensors come before it: parameters, then buffers."""
    model = deep()
    with private_over(model, plan=everyone(3), max_physical_batch=20) as private:
        with pytest.raises(ModelError, match="changed between two updates"):
            for batch in private.batches:
                private.backward(losses_of(model, batch))
                is_there = private.updates == 2 and not private.is_check
                if way == "between updates" and private.step() and private.updates == 2:
                    write(model, number, is_seen_by_torch=False)
                elif way == "between physical batches" and is_there and not private.is_last:
                    write(model, number, is_seen_by_torch=True)
                elif way == "before the update" and is_there and private.is_last:
                    write(model, number, is_seen_by_torch=False)
                if way != "between updates":
                    private.step()
        assert private.updates == 2


def write(model: nn.Module, number: int, is_seen_by_torch: bool) -> None:
    with torch.no_grad():
        tensor = [*model.parameters(), *model.buffers()][number]
        (tensor if is_seen_by_torch else tensor.data).view(-1)[0] += 1
