"""Loops that move something by the batch, on neighbours, and loops that move the same things soundly.

Neighbours differ by one record, and their runs share the key, so coins and noise of all others are equal. Learning
rates are so small that parameters stay where they are: then the settings of every update must be equal, and the sums
without noise differ by one clip norm at most. Otherwise a loop must be refused.
"""

from __future__ import annotations

import copy
import io
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import lr_scheduler as schedules
from torch.optim.swa_utils import SWALR, AveragedModel

import epsilons
from epsilons.doors.foreign_loop import ForeignLoop
from epsilons.errors import EpsilonsError, ModelError
from epsilons.training import Private, within_draws
from epsilons.training.noisy_update import NoisyUpdate
from shares import share

pytestmark = pytest.mark.usefixtures("one_thread")

TINY = 1e-9
Loop = Callable[[Private, nn.Module, torch.optim.Optimizer], None]


@dataclass(frozen=True)
class World:
    """What makes the number of batches of a draw depend on the last record.

    records     in the larger of the neighbours
    physical    records in a physical batch, at most; "one less" than all by default, so that the last one needs another
    rate        at which records are drawn
    is_broken   whether the gradient of the last record is not finite, so that physical batches are repeated
    """

    records: int = 24
    physical: int = 23
    rate: float = 1.0
    steps: int = 6
    is_broken: bool = False


WORLDS = {
    "one more batch": World(),
    "replays": World(physical=24, is_broken=True),
    "several batches": World(physical=5, rate=0.6),
    "one batch": World(physical=24),
    "one by one": World(records=8, physical=1, rate=0.8),
}
EMPTY = World(records=6, physical=6, rate=0.2, steps=24)


class Bilinear(nn.Module):
    """A layer that is not finite for a record with a NaN, and another result for every record in each mode."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.drop = nn.Bilinear(4, 4, 1), nn.Dropout(0.0)

    def forward(self, x: Tensor) -> Tensor:
        x = self.drop(x) + self.drop.training
        return self.layer(x, x)


@dataclass
class Released:
    """What the updates of a run used: settings of each group, and sums without noise."""

    settings: list[Any] = field(default_factory=list)
    sums: list[list[Tensor]] = field(default_factory=list)


def settings_of(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    return [
        {
            name: v.tolist() if isinstance(v, Tensor) else copy.deepcopy(v)
            for name, v in group.items()
            if name != "params"
        }
        for group in optimizer.param_groups
    ]


@pytest.fixture
def released(monkeypatch) -> Released:
    """Everything that is released in this test, until it is taken out."""
    seen = Released()
    average, apply = NoisyUpdate.noisy_average, NoisyUpdate.apply

    def noisy_average(self: NoisyUpdate, randomness: Any) -> list[Tensor]:
        seen.sums.append([part.clone() for part in self.sum])
        return average(self, randomness)

    def applied(self: NoisyUpdate, update: Any) -> None:
        seen.settings.append(settings_of(self._optimizer))
        apply(self, update)

    monkeypatch.setattr(NoisyUpdate, "noisy_average", noisy_average)
    monkeypatch.setattr(NoisyUpdate, "apply", applied)
    return seen


def rows(records: int, is_broken: bool = False) -> tuple[Tensor, Tensor]:
    make = torch.Generator().manual_seed(5)
    x, y = torch.randn(records, 4, generator=make), torch.randn(records, generator=make)
    x[-1] *= 50
    if is_broken:
        x[-1] = math.nan
    return x, y


def opened(
    world: World, without_last: bool, make_optimizer: Any, data: Any = None, epsilon: float = 1.0
) -> tuple[Private, nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model, (x, y) = Bilinear(), data or rows(world.records, world.is_broken)
    kept = world.records - without_last
    plan = epsilons.plan(
        epsilons.Budgets([epsilon] * world.records, delta=1e-5),
        epsilons.Recipe(world.steps, world.records * world.rate, 1.0),
        accountant="rdp",
        public_shares={epsilon: 1.0},
        public_records=world.records,
    )
    optimizer = make_optimizer(model)
    private = epsilons.make_private(
        model,
        optimizer,
        (x[:kept], y[:kept]),
        plan,
        budgets=epsilons.Budgets([epsilon] * kept, delta=1e-5),
        seed=epsilons.Randomness.with_key(bytes(32)),
        performance=epsilons.Performance(max_physical_batch=world.physical),
    )
    return private, model, optimizer


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=TINY, momentum=0.5, weight_decay=TINY)


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=TINY)


def run(loop: Loop, world: World, without_last: bool, seen: Released, make_optimizer: Any) -> Released:
    seen.settings, seen.sums = [], []
    private, model, optimizer = opened(world, without_last, make_optimizer)
    with private:
        loop(private, model, optimizer)
    return Released(seen.settings, seen.sums)


def leaks(loop: Loop, world: World, seen: Released, make_optimizer: Any = sgd) -> str:
    """What neighbours differ in; "" if in nothing beyond one clip norm. Raises what refuses the loop."""
    one, other = (run(loop, world, without, seen, make_optimizer) for without in (False, True))
    if one.settings != other.settings:
        return "settings"
    for left, right in zip(one.sums, other.sums, strict=True):
        distance = math.sqrt(sum(float((a - b).square().sum()) for a, b in zip(left, right, strict=True)))
        if distance > 1.001:
            return f"a sum, by {distance:.3f} clip norms"
    return ""


def squares(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return (model(x).squeeze(1) - y) ** 2


# -- loops that move something by the batch -----------------------------------------------------------------------

#: What is moved: (optimizer, model) -> a function of (the batch's losses, its number of records, a count).
Mover = Callable[[torch.optim.Optimizer, nn.Module], Callable[[Tensor, int, int], Any]]


def stepping(make: Callable[[torch.optim.Optimizer], Any]) -> Mover:
    def mover(optimizer: torch.optim.Optimizer, model: nn.Module) -> Callable[[Tensor, int, int], Any]:
        schedule = make(optimizer)
        return lambda losses, records, count: schedule.step()

    return mover


def setting(name: str, value: Callable[[Tensor, int, int], Any]) -> Mover:
    def mover(optimizer: torch.optim.Optimizer, model: nn.Module) -> Callable[[Tensor, int, int], Any]:
        def move(losses: Tensor, records: int, count: int) -> None:
            for group in optimizer.param_groups:
                group[name] = value(losses, records, count)

        return move

    return mover


def acting(act: Callable[[torch.optim.Optimizer, nn.Module, int], Any]) -> Mover:
    return lambda optimizer, model: lambda losses, records, count: act(optimizer, model, count)


SCHEDULES: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "LambdaLR": lambda o: schedules.LambdaLR(o, lambda k: 1 / (1 + k)),
    "MultiplicativeLR": lambda o: schedules.MultiplicativeLR(o, lambda k: 0.9),
    "StepLR": lambda o: schedules.StepLR(o, 5, 0.1),
    "MultiStepLR": lambda o: schedules.MultiStepLR(o, [3, 7, 11], 0.1),
    "ConstantLR": lambda o: schedules.ConstantLR(o, 0.1, 7),
    "LinearLR": lambda o: schedules.LinearLR(o, 0.1, 1.0, 9),
    "ExponentialLR": lambda o: schedules.ExponentialLR(o, 0.9),
    "PolynomialLR": lambda o: schedules.PolynomialLR(o, 40),
    "CosineAnnealingLR": lambda o: schedules.CosineAnnealingLR(o, 40),
    "CosineAnnealingWarmRestarts": lambda o: schedules.CosineAnnealingWarmRestarts(o, 7),
    "CyclicLR": lambda o: schedules.CyclicLR(o, TINY, 2 * TINY, 5),
    "OneCycleLR": lambda o: schedules.OneCycleLR(o, 2 * TINY, total_steps=300),
    "SequentialLR": lambda o: schedules.SequentialLR(
        o, [schedules.ConstantLR(o, 0.1, 3), schedules.ExponentialLR(o, 0.9)], [5]
    ),
    "ChainedScheduler": lambda o: schedules.ChainedScheduler(
        [schedules.StepLR(o, 6, 0.5), schedules.ExponentialLR(o, 0.9)], o
    ),
    "SWALR": lambda o: SWALR(o, 3 * TINY, anneal_epochs=9),
}


def cosine(count: int, steps: int = 40) -> float:
    return TINY * (1 + math.cos(math.pi * count / steps))


class Ema:
    """A running mean of what it is given."""

    def __init__(self) -> None:
        self.value = 0.0

    def __call__(self, new: float) -> float:
        self.value = 0.9 * self.value + 0.1 * new
        return self.value


def reloading(optimizer: torch.optim.Optimizer, model: nn.Module) -> Callable[[Tensor, int, int], Any]:
    """The optimizer is set back to its first state, with a lower rate, at every seventh batch."""
    first = copy.deepcopy(optimizer.state_dict())

    def move(losses: Tensor, records: int, count: int) -> None:
        if count % 7 == 6:
            first["param_groups"][0]["lr"] *= 0.5
            optimizer.load_state_dict(first)

    return move


def groups_replaced(optimizer: torch.optim.Optimizer, model: nn.Module, count: int) -> None:
    optimizer.param_groups = [{**group, "lr": cosine(count)} for group in optimizer.param_groups]


MOVERS: dict[str, Mover] = {
    **{name: stepping(make) for name, make in SCHEDULES.items()},
    "plateau": lambda o, m: (lambda s: lambda losses, records, count: s.step(float(losses.detach().mean())))(
        schedules.ReduceLROnPlateau(o, patience=0, eps=0.0)
    ),
    "warm restarts by fractions": lambda o, m: (lambda s: lambda losses, records, count: s.step(count / 10))(
        schedules.CosineAnnealingWarmRestarts(o, 3)
    ),
    "cosine by hand": setting("lr", lambda losses, records, count: cosine(count)),
    "warm-up by hand": setting("lr", lambda losses, records, count: TINY * min(1.0, (1 + count) / 12)),
    "steps by hand": setting("lr", lambda losses, records, count: TINY * 0.5 ** (count // 5)),
    "the number of records": setting("lr", lambda losses, records, count: TINY * records),
    "weight decay by records": setting("weight_decay", lambda losses, records, count: TINY / records),
    "the mean loss": setting("lr", lambda losses, records, count: TINY * float(losses.detach().mean())),
    "large losses": setting(
        "lr", lambda losses, records, count: TINY * (0.1 if float(losses.detach().max()) > 50 else 1)
    ),
    "momentum by hand": setting("momentum", lambda losses, records, count: 0.5 + 0.4 * min(1.0, count / 20)),
    "weight decay by hand": setting("weight_decay", lambda losses, records, count: TINY * count),
    "nesterov later": setting("nesterov", lambda losses, records, count: count > 8),
    "a text": setting("note", lambda losses, records, count: f"batch {count}"),
    "an average as the rate": lambda o, m: (
        lambda ema: setting("lr", lambda losses, n, count: TINY * ema(float(losses.detach().mean())))(o, m)
    )(Ema()),
    "a clipped rate": setting(
        "lr", lambda losses, records, count: min(TINY, TINY * 100 / (1 + float(losses.detach().sum())))
    ),
    "a state reset": acting(lambda o, m, count: o.state.clear() if count % 6 == 5 else None),
    "a state reloaded": reloading,
    "a momentum halved": acting(
        lambda o, m, count: [state["momentum_buffer"].mul_(0.5) for state in o.state.values() if state]
    ),
    "groups replaced": acting(groups_replaced),
    "a group added": acting(
        lambda o, m, count: o.add_param_group({"params": [nn.Parameter(torch.zeros(2))]}) if count == 9 else None
    ),
    "groups renamed": acting(lambda o, m, count: o.param_groups[0].update({f"k{count // 9}": 0})),
    "an average written to parameters": acting(lambda o, m, count: [p.data.mul_(0.99) for p in m.parameters()]),
    "a probability of dropout by mode": acting(lambda o, m, count: m.drop.train(count % 3 == 0)),
    "eval after a while": acting(lambda o, m, count: m.train(count < 8)),
    "eval and back": acting(lambda o, m, count: m.train(count % 2 == 0)),
}


def by_batch(mover: Mover, when: str) -> Loop:
    """The loop of every tutorial, with a mover that is called where `when` says."""

    def loop(private: Private, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        move, count = mover(optimizer, model), 0
        for x, y in private.batches:
            losses = squares(model, x, y)
            if when == "before":
                move(losses, len(x), count)
            private.backward(losses)
            if when == "between":
                move(losses, len(x), count)
            private.step()
            if when == "after" or (when == "no checks" and not private.is_check):
                move(losses, len(x), count)
            count += when != "no checks" or not private.is_check

    return loop


def in_draws(mover: Mover, when: str) -> Loop:
    def loop(private: Private, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        move, count = mover(optimizer, model), 0
        for part in private.draws if when == "draws" else private.epochs(3):
            for x, y in part:
                losses = squares(model, x, y)
                private.backward(losses)
                private.step()
                if not private.is_check:
                    move(losses, len(x), count)
                    count += 1

    return loop


def foreign(mover: Mover) -> Loop:
    def loop(private: Private, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        theirs = ForeignLoop(private)
        move = mover(optimizer, model)
        for count, (x, y) in enumerate(theirs.batches):
            loss = F.mse_loss(model(x).squeeze(1), y)
            loss.backward()
            theirs.step()
            move(loss.detach().reshape(1), len(x), count)
        theirs.close()

    return loop


def cases() -> Iterator[Any]:
    """(world, loop, optimizer): every mover in two places, and in one world for each of them."""
    worlds = list(WORLDS)
    for number, (name, mover) in enumerate(MOVERS.items()):
        for turn, when in enumerate(("after", "no checks")):
            world = worlds[(number + 2 * turn) % len(worlds)]
            make = adam if name in ("LambdaLR", "a state reset", "StepLR") else sgd
            yield pytest.param(WORLDS[world], by_batch(mover, when), make, id=f"{name}, {when}, {world}")
    for name in ("cosine by hand", "StepLR", "momentum by hand", "the number of records", "an average as the rate"):
        for when in ("before", "between"):
            yield pytest.param(WORLDS["several batches"], by_batch(MOVERS[name], when), sgd, id=f"{name}, {when}")
    for name in ("StepLR", "OneCycleLR", "cosine by hand", "the number of records", "eval after a while"):
        for when in ("draws", "epochs"):
            yield pytest.param(WORLDS["one more batch"], in_draws(MOVERS[name], when), sgd, id=f"{name}, in {when}")
        yield pytest.param(WORLDS["several batches"], foreign(MOVERS[name]), sgd, id=f"{name}, foreign")


CASES = list(cases())


def verdict(loop: Loop, world: World, seen: Released, make_optimizer: Any) -> str:
    try:
        return leaks(loop, world, seen, make_optimizer)
    except EpsilonsError:
        return "refused"


@pytest.mark.parametrize(("world", "loop", "make_optimizer"), CASES)
def test_what_moves_with_batches_is_refused_or_equal_for_neighbours(world, loop, make_optimizer, released):
    assert verdict(loop, world, released, make_optimizer) in ("refused", "")


def test_without_the_comparison_most_of_these_loops_tell_neighbours_apart(released, monkeypatch):
    monkeypatch.setattr(within_draws.Settings, "compare", lambda self: None)
    monkeypatch.setattr(within_draws.Modes, "check", lambda self, is_check: None)
    found = [verdict(loop, world, released, make) for world, loop, make in (case.values for case in CASES[::3])]
    assert sum(result not in ("refused", "") for result in found) > len(found) // 2


@pytest.mark.parametrize("when", ["if it updated", "in draws", "in epochs", "by private.updates", "an average"])
def test_what_follows_the_updates_that_a_loop_sees_is_refused_if_draws_may_be_empty(when):
    """The body does not run for an empty draw, so what it counts would show which draws were empty."""
    private, model, optimizer = opened(EMPTY, False, sgd)
    schedule, average = schedules.ExponentialLR(optimizer, 0.9), AveragedModel(model)
    private.register_for_checkpointing(schedule=schedule, average=average)

    def after() -> None:
        if when == "by private.updates":
            optimizer.param_groups[0]["lr"] = cosine(private.updates)
        elif when == "an average":
            average.update_parameters(model)
        else:
            schedule.step()

    def loop() -> None:
        parts = {"in draws": lambda: private.draws, "in epochs": lambda: private.epochs(3)}
        for part in parts.get(when, lambda: [private.batches])():
            train(private, model, after, part)

    with pytest.raises(ModelError, match=r"(?s)does not run for empty draws.*private\.on_update\("), private:
        loop()


def test_the_message_names_the_setting_its_group_and_the_lines_to_write():
    private, model, optimizer = opened(WORLDS["one more batch"], False, sgd)
    with pytest.raises(ModelError) as caught, private:
        by_batch(MOVERS["momentum by hand"], "after")(private, model, optimizer)
    text = str(caught.value)
    assert "momentum of parameter group 0 changed within a draw" in text
    assert "    private.on_update(lambda _: scheduler.step())" in text
    assert "epsilons docs concepts" in text


def test_a_call_in_another_mode_than_checks_have_seen_is_refused():
    """The mode is another one around the call alone."""
    private, model, _ = opened(WORLDS["one batch"], False, sgd)

    def loop() -> None:
        for x, y in private.batches:
            model.drop.train(private.updates != 3)
            losses = squares(model, x, y)
            model.drop.train()
            private.backward(losses)
            private.step()

    with pytest.raises(ModelError, match=r"of Dropout changed within a draw"), private:
        loop()


def test_modes_that_are_new_are_checked_at_the_next_draw():
    private, model, _ = opened(World(physical=24, steps=9), False, sgd)
    checked = []
    with private:
        for x, y in private.batches:
            checked += [private.updates] * private.is_check
            private.backward(squares(model, x, y))
            if private.step():
                model.train(private.updates not in (4, 5, 7))
    assert sorted(set(checked)) == [0, 1, 4]  # at steps 0 and 1 always


# -- sound loops ----------------------------------------------------------------------------------------------------

LR = 0.05
UPDATES = 12
SOUND = World(steps=UPDATES)


def plain(make: Callable[[torch.optim.Optimizer], Any] | None, every: int = 1) -> list[float]:
    """The rate of each update, with a schedule that steps after every so many updates."""
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=LR, momentum=0.5)
    schedule, rates = make(optimizer) if make else None, []
    for update in range(UPDATES):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        if schedule is not None and (update + 1) % every == 0:
            schedule.step()
    return rates


def halved(optimizer: torch.optim.Optimizer) -> Any:
    return schedules.StepLR(optimizer, 3, 0.5)


def warm(optimizer: torch.optim.Optimizer) -> Any:
    parts = [schedules.LinearLR(optimizer, 0.25, 1.0, 4), schedules.CosineAnnealingLR(optimizer, 8)]
    return schedules.SequentialLR(optimizer, parts, [4])


def chained(optimizer: torch.optim.Optimizer) -> Any:
    parts = [schedules.StepLR(optimizer, 6, 0.5), schedules.ExponentialLR(optimizer, 0.95)]
    return schedules.ChainedScheduler(parts, optimizer)


def cycle(optimizer: torch.optim.Optimizer) -> Any:
    return schedules.OneCycleLR(optimizer, 2 * LR, total_steps=UPDATES + 1)


def ramp(updates: int) -> float:
    return LR * min(1.0, (1 + updates) / 5)


def train(private: Private, model: nn.Module, after: Callable[[], Any] = lambda: None, batches: Any = None) -> None:
    """The loop of the README. after: called in its body after each update"""
    for x, y in batches or private.batches:
        private.backward(squares(model, x, y))
        if private.step():
            after()


def set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate


def listening(make: Callable[[torch.optim.Optimizer], Any]) -> Loop:
    def loop(private: Private, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        schedule = make(optimizer)
        private.register_for_checkpointing(schedule=schedule)
        private.on_update(lambda _: schedule.step())
        train(private, model)

    return loop


def in_body(make: Callable[[torch.optim.Optimizer], Any]) -> Loop:
    return lambda private, model, optimizer: train(private, model, make(optimizer).step)


def after_each_draw(private: Private, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    schedule = halved(optimizer)
    for draw in private.draws:
        train(private, model, batches=draw)
        schedule.step()


def after_each_part(private: Private, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    schedule = schedules.ExponentialLR(optimizer, 0.5)
    for part in private.epochs(3):
        train(private, model, batches=part)
        schedule.step()


def by_updates_in_the_body(private: Private, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    set_rate(optimizer, ramp(0))
    train(private, model, lambda: set_rate(optimizer, ramp(private.updates)))


def by_updates_in_a_listener(private: Private, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    set_rate(optimizer, ramp(0))
    private.on_update(lambda private: set_rate(optimizer, ramp(private.updates)))
    train(private, model)


def averaged_in_a_listener(private: Private, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    average = AveragedModel(model)
    private.register_for_checkpointing(average=average)
    private.on_update(lambda _: average.update_parameters(model))
    train(private, model)
    assert int(average.n_averaged) == UPDATES


def averaged_in_the_body(private: Private, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    average = AveragedModel(model)
    private.register_for_checkpointing(average=average)
    train(private, model, lambda: average.update_parameters(model))
    assert int(average.n_averaged) == UPDATES


def swa_at_the_end(private: Private, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    average, schedule = AveragedModel(model), SWALR(optimizer, LR / 4, anneal_epochs=1)

    def after() -> None:
        if private.updates >= 6:
            average.update_parameters(model)
            schedule.step()

    train(private, model, after)
    assert int(average.n_averaged) == UPDATES - 5


def validated(private: Private, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    scores = []

    def after() -> None:
        if private.updates % 3 == 0:
            model.eval()
            with torch.no_grad():
                scores.append(float(squares(model, *public()).mean()))
            model.train()

    train(private, model, after)
    assert len(scores) == UPDATES // 3


def train_at_the_top(private: Private, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """A validation leaves the model in eval, and every batch begins with train()."""
    model.eval()
    for x, y in private.batches:
        model.train()
        private.backward(squares(model, x, y))
        if private.step():
            model.eval()


def with_targets_in_eval(private: Private, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """The model's own outputs in eval are a part of each record's target."""
    for x, y in private.batches:
        model.eval()
        with torch.no_grad():
            own = model(x).squeeze(1)
        model.train()
        private.backward(squares(model, x, 0.9 * y + 0.1 * own))
        private.step()


def public() -> tuple[Tensor, Tensor]:
    x, y = learnable(40)
    return x[-16:], y[-16:]


def plateau_between_draws(private: Private, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    schedule = schedules.ReduceLROnPlateau(optimizer, patience=50)
    for draw in private.draws:
        train(private, model, batches=draw)
        with torch.no_grad():
            schedule.step(float(squares(model, *public()).mean()))
    assert schedule.last_epoch == UPDATES


def plateau_in_a_listener(private: Private, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    schedule = schedules.ReduceLROnPlateau(optimizer, patience=0, factor=0.9)
    private.on_update(lambda _: schedule.step(1.0))
    train(private, model)


def left_and_entered(private: Private, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for end in (4, 8, 12):
        for x, y in private.batches:
            private.backward(squares(model, x, y))
            private.step()
            if private.updates == end:
                break
        set_rate(optimizer, optimizer.param_groups[0]["lr"] / 2)


def copied_and_saved(private: Private, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """A teacher that is a copy, called in every batch, and a file with the whole model."""
    teacher = copy.deepcopy(model).eval()
    for x, y in private.batches:
        with torch.no_grad():
            own = teacher(x).squeeze(1)
        private.backward(squares(model, x, y) + 0 * own)
        if private.step():
            torch.save(model, file := io.BytesIO())
            file.seek(0)
            loaded = torch.load(file, weights_only=False)
            assert torch.equal(loaded(x), model(x))


def state_forgotten(private: Private, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    train(private, model, lambda: optimizer.state.clear() if private.updates == 6 else None)


def foreign_listening(private: Private, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    theirs, schedule = ForeignLoop(private), halved(optimizer)
    private.on_update(lambda _: schedule.step())
    for x, y in theirs.batches:
        F.mse_loss(model(x).squeeze(1), y).backward()
        theirs.step()


def foreign_in_body(private: Private, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    theirs, schedule = ForeignLoop(private), halved(optimizer)
    for x, y in theirs.batches:
        F.mse_loss(model(x).squeeze(1), y).backward()
        if theirs.step():
            schedule.step()


def sgd_in_groups(model: nn.Module) -> torch.optim.Optimizer:
    groups = [{"params": [model.layer.weight]}, {"params": [model.layer.bias], "lr": LR / 10}]
    return torch.optim.SGD(groups, lr=LR, momentum=0.5)


def sgd_at(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=LR, momentum=0.5)


def adam_of_tensor(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=torch.tensor(LR, dtype=torch.float64), foreach=False)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=LR)


ONE_BATCH, SMALL = World(physical=24, steps=UPDATES), World(physical=5, rate=0.8, steps=UPDATES)
CONSTANT = [LR] * UPDATES
RAMP = [ramp(k) for k in range(UPDATES)]
#: name: (loop, optimizer, world, rates of all updates)
SOUND_LOOPS: dict[str, tuple[Loop, Any, World, list[float]]] = {
    "a schedule in on_update": (listening(halved), sgd_at, SOUND, plain(halved)),
    "warm-up, then cosine, in on_update": (listening(warm), sgd_at, SMALL, plain(warm)),
    "a chain in on_update": (listening(chained), sgd_at, SMALL, plain(chained)),
    "one cycle in on_update, with momentum": (listening(cycle), sgd_at, SMALL, plain(cycle)),
    "a record with NaN": (listening(halved), sgd_at, World(25, 24, steps=UPDATES, is_broken=True), plain(halved)),
    "if private.step()": (in_body(halved), sgd_at, SOUND, plain(halved)),
    "if private.step(), large draws": (in_body(cycle), adamw, SMALL, plain(cycle)),
    "if private.step(), a chain": (in_body(chained), sgd_at, ONE_BATCH, plain(chained)),
    "if private.step(), two in turn": (in_body(warm), sgd_at, SMALL, plain(warm)),
    "after each draw": (after_each_draw, sgd_at, SMALL, plain(halved)),
    "after each part": (after_each_part, sgd_at, SMALL, plain(lambda o: schedules.ExponentialLR(o, 0.5), UPDATES // 3)),
    "warm-up by private.updates": (by_updates_in_the_body, sgd_at, SMALL, RAMP),
    "warm-up in on_update": (by_updates_in_a_listener, sgd_at, SMALL, RAMP),
    "an average in on_update": (averaged_in_a_listener, sgd_at, SMALL, CONSTANT),
    "an average in the body": (averaged_in_the_body, sgd_at, SMALL, CONSTANT),
    "SWA at the end": (swa_at_the_end, sgd_at, ONE_BATCH, [LR] * 6 + [LR / 4] * 6),
    "validation in eval": (validated, sgd_at, SMALL, CONSTANT),
    "train at the top of the body": (train_at_the_top, sgd_at, SMALL, CONSTANT),
    "targets computed in eval": (with_targets_in_eval, sgd_at, SMALL, CONSTANT),
    "plateau of public data between draws": (plateau_between_draws, sgd_at, SMALL, CONSTANT),
    "plateau in on_update": (plateau_in_a_listener, sgd_at, SMALL, [LR] + [LR * 0.9**k for k in range(UPDATES - 1)]),
    "left and entered by private.updates": (left_and_entered, sgd_at, SMALL, [LR] * 4 + [LR / 2] * 4 + [LR / 4] * 4),
    "copies and files of the model": (copied_and_saved, sgd_at, SMALL, CONSTANT),
    "momentum forgotten at an update": (state_forgotten, sgd_at, SMALL, CONSTANT),
    "several groups": (listening(halved), sgd_in_groups, SMALL, plain(halved)),
    "a rate in a tensor": (listening(halved), adam_of_tensor, SMALL, plain(halved)),
    "foreign, on_update": (foreign_listening, sgd_at, SMALL, plain(halved)),
    "foreign, in the body": (foreign_in_body, sgd_at, SOUND, plain(halved)),
    "empty draws, in on_update": (listening(halved), sgd_at, World(6, 3, 0.3, UPDATES), plain(halved)),
    "empty draws, after each draw": (after_each_draw, sgd_at, World(6, 3, 0.3, UPDATES), plain(halved)),
    "empty draws, after each part": (
        after_each_part,
        sgd_at,
        World(6, 3, 0.3, UPDATES),
        plain(lambda o: schedules.ExponentialLR(o, 0.5), 4),
    ),
}


def learnable(records: int) -> tuple[Tensor, Tensor]:
    x = torch.randn(records, 4, generator=torch.Generator().manual_seed(6))
    return x, 1 + x[:, 0] * x[:, 1] + x[:, 2]


@pytest.mark.parametrize("name", share(SOUND_LOOPS, 16))
def test_a_sound_loop_trains_with_the_rates_of_a_plain_one(name, released, monkeypatch):
    loop, make_optimizer, world, rates = SOUND_LOOPS[name]
    x, y = learnable(world.records)
    if world.is_broken:
        x[-1] = math.nan
    private, model, optimizer = opened(world, False, make_optimizer, (x, y), epsilon=1e5)
    first = float(squares(model, *learnable(24)).mean())
    with private:
        loop(private, model, optimizer)
    assert private.is_finished
    assert [groups[0]["lr"] for groups in released.settings] == pytest.approx(rates)
    assert float(squares(model, *learnable(24)).mean()) < 0.8 * first
