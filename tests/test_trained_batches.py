"""Batches that are trained on: their losses come from them, and follow no counter of batches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import epsilons
from epsilons import Budgets, Performance, Private, Recipe
from epsilons.errors import BatchDependenceError
from functional import Model

RECORDS = 24
Loop = Callable[[Private, nn.Module], None]


def train(loop: Loop, model: nn.Module, data: Any = None, at_once: int = 8, steps: int = 4) -> None:
    torch.manual_seed(0)
    x, y = torch.randn(RECORDS, 4), torch.randint(0, 3, (RECORDS,))
    plan = epsilons.plan(
        Budgets([1.0] * RECORDS, delta=1e-5), Recipe(steps, float(RECORDS), 1.0), accountant="rdp", strategy="uniform"
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with epsilons.make_private(
        model,
        optimizer,
        (x, y) if data is None else data,
        plan,
        budgets=Budgets([1.0] * RECORDS, delta=1e-5),
        key=bytes(32),
        performance=Performance(max_physical_batch=at_once),
    ) as private:
        loop(private, model)
        assert private.updates == steps


def losses_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y, reduction="none")


# -- another batch ------------------------------------------------------------------------------------------


def the_batch_before(private: Private, model: nn.Module) -> None:
    before = None
    for batch in private.batches:
        own = batch if private.is_check or before is None else before
        private.backward(losses_of(model, *own))
        private.step()
        before = before if private.is_check else batch


def a_part_of_the_batch_before(private: Private, model: nn.Module) -> None:
    before = None
    for x, y in private.batches:
        mixed = x if private.is_check or before is None else x + 0.1 * before
        private.backward(losses_of(model, mixed, y))
        private.step()
        before = before if private.is_check else x


def targets_of_the_batch_before(private: Private, model: nn.Module) -> None:
    before = None
    for x, y in private.batches:
        private.backward(losses_of(model, x, y if private.is_check or before is None else before))
        private.step()
        before = before if private.is_check else y


def the_mean_of_the_batch_before(private: Private, model: nn.Module) -> None:
    before = None
    for x, y in private.batches:
        losses = losses_of(model, x, y)
        private.backward(losses if private.is_check or before is None else losses * (1 + before.abs().mean()))
        private.step()
        before = before if private.is_check else x


def a_batch_of_ones_own(private: Private, model: nn.Module) -> None:
    own = torch.randn(RECORDS, 4), torch.randint(0, 3, (RECORDS,))
    for x, y in private.batches:
        chosen = (x, y) if private.is_check else tuple(t[: len(x)] for t in own)
        private.backward(losses_of(model, *chosen))
        private.step()


@pytest.mark.parametrize(
    "loop",
    [
        the_batch_before,
        a_part_of_the_batch_before,
        targets_of_the_batch_before,
        the_mean_of_the_batch_before,
        a_batch_of_ones_own,
    ],
)
def test_losses_of_another_batch_outside_of_checks_are_refused(loop: Loop):
    with pytest.raises(BatchDependenceError, match="the batch before"):
        train(loop, nn.Linear(4, 3))


def plain(private: Private, model: nn.Module) -> None:
    for x, y in private.batches:
        private.backward(losses_of(model, x, y))
        private.step()


def through_numpy(model: Any, x: Tensor) -> Tensor:
    """Operators show nothing of what NumPy computes: neither in checks nor in training."""
    return model.layer(torch.from_numpy(x.numpy() * 2))


SOUND: dict[str, Callable[[], nn.Module]] = {
    "dropout": lambda: nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.ReLU(), nn.Linear(8, 3)),
    "noise": lambda: Model(lambda m, x: m.layer(x + 0.1 * torch.randn_like(x)), layer=nn.Linear(4, 3)),
    "one coin": lambda: Model(lambda m, x: m.layer(x.flip(1) if torch.rand(()) < 0.5 else x), layer=nn.Linear(4, 3)),
    "numpy": lambda: Model(through_numpy, layer=nn.Linear(4, 3)),
    "lstm": lambda: Model(
        lambda m, x: m.o(m.r(x[:, :, None])[0][:, -1]), r=nn.LSTM(1, 5, batch_first=True), o=nn.Linear(5, 3)
    ),
}


@pytest.mark.parametrize("name", SOUND)
@pytest.mark.parametrize("at_once", [8, 24])
def test_sound_models_train(name: str, at_once: int):
    torch.manual_seed(1)
    train(plain, SOUND[name](), at_once=at_once)


def test_watching_changes_no_draw_of_dropout():
    """A draw with a check is watched. Its update is that of the same losses by hand, under the same seeds."""
    seen: list[list[Tensor]] = []

    def loop(private: Private, model: nn.Module) -> None:
        for x, y in private.batches:
            outputs = model(x)
            if not private.is_check:
                seen[-1].append((outputs == 0).float().mean().detach())
            private.backward(F.cross_entropy(outputs, y, reduction="none"))
            private.step()

    for _ in range(2):
        seen.append([])
        torch.manual_seed(1)
        train(loop, nn.Sequential(nn.Linear(4, 300), nn.Dropout(0.5)), steps=3)
    first, second = seen
    assert first == second
    assert all(0.4 < float(share) < 0.6 for share in first)


# -- counters -----------------------------------------------------------------------------------------------


class Counted(nn.Module):
    """A layer whose outputs may be scaled by a counter that the loop moves."""

    def __init__(self, strength: float) -> None:
        super().__init__()
        self.layer, self.count, self.strength = nn.Linear(4, 3), 0, strength

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * (1 + self.strength * self.count)


def counting(private: Private, model: nn.Module) -> None:
    for x, y in private.batches:
        private.backward(losses_of(model, x, y))
        private.step()
        if not private.is_check:
            model.count += 1


def test_a_counter_of_batches_in_a_model_that_moves_losses_is_refused():
    with pytest.raises(BatchDependenceError, match=r"a counter, and how many batches.*private\.on_update"):
        train(counting, Counted(0.01))


def test_a_counter_of_batches_that_moves_no_loss_trains_and_counts_on():
    model = Counted(0.0)
    train(counting, model)
    assert model.count == 4 * RECORDS // 8


def test_a_counter_of_updates_that_moves_losses_trains():
    def by_updates(private: Private, model: nn.Module) -> None:
        private.on_update(lambda private: setattr(model, "count", private.updates))
        plain(private, model)

    train(by_updates, Counted(0.01))


class Cached(nn.Module):
    """Caches its positions, and how many they are: a number in an attribute that a forward pass changes."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.longest = nn.Linear(4, 3), 0

    def forward(self, x: Tensor) -> Tensor:
        self.longest = max(self.longest, x.shape[1])
        return self.layer(x / self.longest)


def test_a_number_that_forward_passes_set_from_shapes_trains():
    train(plain, Cached())
