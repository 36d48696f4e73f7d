"""A seed's key: the same call has the same one, and runs that compute anything else never share noise.

The generator: random cases, and for each of them every way in which a run may differ. All keys of a case differ from
one another, or, for what moves a sum by rounding alone, are the same.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import epsilons
from epsilons.draws.randomness import Randomness, key_from_seed
from epsilons.errors import InputError
from epsilons.ledger.ledger import read_account
from epsilons.planning import STRATEGIES
from functional import Model
from options import fit_flat, make_flat
from program import python
from shares import share
from small_runs import rows, train

pytestmark = pytest.mark.usefixtures("one_thread")

every_case = pytest.mark.parametrize("number", share(range(25), 4))


@cache
def plan_of(
    levels: tuple[float, ...], strategy: str, steps: int, clip_norm: float, batch_size: float
) -> tuple[epsilons.Budgets, epsilons.Plan]:
    budgets = epsilons.Budgets(np.array(levels), delta=1e-5)
    recipe = epsilons.Recipe(steps=steps, batch_size=batch_size, clip_norm=clip_norm)
    return budgets, epsilons.plan(budgets, recipe, strategy, "rdp")


class Bent(nn.Module):
    def __init__(self, inputs: int, classes: int, bend: Callable[[Tensor], Tensor] = torch.tanh) -> None:
        super().__init__()
        self.layer, self.bend = nn.Linear(inputs, classes), bend

    def forward(self, x: Tensor) -> Tensor:
        return self.bend(self.layer(x))


class BentTwice(Bent):
    def forward(self, x: Tensor) -> Tensor:
        return self.bend(2 * self.layer(x))


@dataclass(frozen=True)
class Case:
    """What a run is made of; `options` go to make_private as they are."""

    inputs: Tensor
    targets: Tensor
    epsilons: tuple[float, ...]
    strategy: str = "scale"
    steps: int = 5
    clip_norm: float = 1.0
    batch_size: float = 6.0
    model: Callable[[], nn.Module] = lambda: nn.Linear(1, 1)
    model_seed: int = 0
    optimizer: Callable[[Any], torch.optim.Optimizer] = lambda p: torch.optim.SGD(p, lr=0.1)
    kind: Callable[..., Any] = lambda *columns: columns
    options: dict[str, Any] = field(default_factory=dict)

    def begun(self) -> tuple[nn.Module, epsilons.Private]:
        budgets, plan = plan_of(self.epsilons, self.strategy, self.steps, self.clip_norm, self.batch_size)
        torch.manual_seed(self.model_seed)
        model = self.model()
        options = {"seed": 1} | self.options
        data = self.kind(self.inputs, self.targets)
        optimizer = self.optimizer([p for p in model.parameters() if p.requires_grad])
        return model, make_flat(model, optimizer, data, plan, budgets=budgets, **options)

    def key(self) -> str:
        """Commitment to the run's key."""
        _, private = self.begun()
        with private:
            return private.ledger.key

    def also(self, **options: Any) -> Case:
        return replace(self, options=self.options | options)


def some_case(number: int, one_level: bool = False) -> Case:
    chance = random.Random(number)
    records, inputs, classes = chance.randint(12, 40), chance.randint(2, 5), chance.randint(2, 4)
    make = torch.Generator().manual_seed(number)
    levels = [chance.choice([2.0, 4.0, 8.0]) for _ in range(records)]
    levels[:2] = [2.0, 8.0]
    if one_level:
        levels = [levels[1]] * records
    lr, momentum = chance.choice([0.05, 0.1, 1.0]), chance.choice([0.0, 0.9])
    hidden, dropout = chance.randint(2, 6), chance.choice([0.1, 0.5])
    models: list[Callable[[], nn.Module]] = [
        lambda: nn.Linear(inputs, classes),
        lambda: nn.Sequential(nn.Linear(inputs, hidden), nn.Tanh(), nn.Dropout(dropout), nn.Linear(hidden, classes)),
        lambda: Bent(inputs, classes),
    ]
    optimizers: list[Callable[[Any], torch.optim.Optimizer]] = [
        lambda p: torch.optim.SGD(p, lr=lr, momentum=momentum),
        lambda p: torch.optim.Adam(p, lr=lr),
    ]
    return Case(
        torch.randn(records, inputs, generator=make),
        torch.randint(classes, (records,), generator=make),
        tuple(levels),
        steps=chance.randint(3, 20),
        model=chance.choice(models),
        model_seed=number,
        optimizer=chance.choice(optimizers),
        kind=chance.choice([lambda *columns: columns, rows]),
    )


# -- what differs -----------------------------------------------------------------------------------------------------


def altered(values: Tensor, place: tuple[int, ...], by: float) -> Tensor:
    values = values.clone()
    values[place] += by
    return values


def with_settings(case: Case, **settings: Any) -> Callable[[Any], torch.optim.Optimizer]:
    return lambda p: changed(case.optimizer(p), lambda o: [group.update(settings) for group in o.param_groups])


def changed(thing: Any, change: Callable[[Any], Any]) -> Any:
    """The thing after the change to it."""
    change(thing)
    return thing


def warmed(case: Case) -> Callable[[Any], torch.optim.Optimizer]:
    """The same optimizer, after a step of its own on gradients of zero and one on others."""

    def make(parameters: Any) -> torch.optim.Optimizer:
        parameters = list(parameters)
        optimizer = torch.optim.Adam(parameters, lr=0.1)
        kept = [p.detach().clone() for p in parameters]
        for p in parameters:
            p.grad = torch.ones_like(p)
        optimizer.step()
        for p, value in zip(parameters, kept, strict=True):
            p.grad = None
            p.data.copy_(value)
        return optimizer

    return make


def pad(records: list[Any]) -> Any:
    return torch.utils.data.default_collate(records)


def differing(case: Case, chance: random.Random) -> dict[str, Case]:
    """The case with one thing changed, for everything that may move a sum."""
    records, width = case.inputs.shape
    # of a map-style data set only some records are read: the first is one of them
    row = chance.randrange(records) if case.kind is not rows else 0
    levels = list(case.epsilons)
    low, high = levels.index(2.0), levels.index(8.0)
    levels[low], levels[high] = levels[high], levels[low]
    fewer = tuple(2.0 if level == 4.0 else level for level in case.epsilons)
    cell = (row, chance.randrange(width))
    changes: dict[str, dict[str, Any]] = {
        "a value": {"inputs": altered(case.inputs, cell, 1.0)},
        "a value's last bits": {
            "inputs": torch.where(case.inputs == case.inputs[cell], case.inputs * (1 + 2e-7), case.inputs)
        },
        "a label": {"targets": altered(case.targets, (row,), 1 if case.targets[row] == 0 else -1)},
        "the order of records": {"inputs": case.inputs.flip(0), "targets": case.targets.flip(0)},
        "precision of the data": {"inputs": case.inputs.double()},
        "one record fewer": {"inputs": case.inputs[:-1], "targets": case.targets[:-1], "epsilons": case.epsilons[:-1]},
        "who has which budget": {"epsilons": tuple(levels)},
        "other groups": {"epsilons": fewer if fewer != case.epsilons else (*case.epsilons[:-1], 16.0)},
        "steps": {"steps": case.steps + 1},
        "clip norm": {"clip_norm": case.clip_norm * chance.uniform(1.01, 2)},
        "expected batch": {"batch_size": case.batch_size * 1.1},
        "strategy": {"strategy": "sample"},
        "learning rate": {"optimizer": with_settings(case, lr=chance.uniform(0.2, 0.9))},
        "weight decay": {"optimizer": with_settings(case, weight_decay=1e-4)},
        "optimizer": {"optimizer": lambda p: torch.optim.RMSprop(p, lr=0.1)},
        "first values": {"model_seed": case.model_seed + 1},
        "one first value": {
            "model": lambda: changed(case.model(), lambda m: next(m.parameters()).data.view(-1)[0].add_(1e-6))
        },
        "a frozen layer": {
            "model": lambda: changed(case.model(), lambda m: [*m.parameters()][-1].requires_grad_(False))
        },
        "a layer more": {"model": lambda: nn.Sequential(case.model(), nn.ReLU())},
        "another layer more": {"model": lambda: nn.Sequential(case.model(), nn.Sigmoid())},
    }
    options: dict[str, dict[str, Any]] = {
        "run index": {"run_index": chance.randrange(1, 1000)},
        "run index below": {"run_index": -1},
        "seed": {"seed": chance.randrange(2, 1000)},
        "loss, as notes say": {"metadata": {"training": {"loss": "mine"}}},
        "other loss, as notes say": {"metadata": {"training": {"loss": "another"}}},
        "collate": {"collate_fn": pad},
    }
    if case.optimizer([nn.Parameter(torch.zeros(1))]).__class__ is torch.optim.Adam:
        changes["state of the optimizer"] = {"optimizer": warmed(case)}
    if isinstance(case.model(), Bent):
        classes = int(case.targets.max()) + 1
        changes["code of the model"] = {"model": lambda: BentTwice(width, classes)}
        changes["an attribute of the model"] = {"model": lambda: Bent(width, classes, torch.sin)}
    cases = {name: replace(case, **change) for name, change in changes.items()}
    return cases | {name: case.also(**option) for name, option in options.items()}


@every_case
def test_seeded_runs_that_differ_in_anything_have_keys_of_their_own(number):
    case = some_case(number)
    names: dict[str, str] = {case.key(): "the case itself"}
    for name, other in differing(case, random.Random(f"{number}")).items():
        key = other.key()
        assert key not in names, f"{name} and {names[key]} share a key (case {number})"
        names[key] = name


# -- what does not ----------------------------------------------------------------------------------------------------


def agreeing(case: Case, run_dir: Path) -> dict[str, Case]:
    """The case with one thing changed that moves a sum by rounding alone, or not at all."""
    changes: dict[str, dict[str, Any]] = {
        "again": {},
        "loop": {"engine": "loop"},
        "vmap": {"engine": "vmap"},
        "ghost": {"engine": "ghost"},
        "physical batch": {"max_physical_batch": 2},
        "folder": {"run_dir": run_dir / "run"},
        "resume": {"run_dir": run_dir / "resumed", "resume": True},
        "checkpoints": {"run_dir": run_dir / "checkpoints", "checkpoint_every": 2},
        "layout": {"channels_last": True},
        "metadata": {"metadata": {"mine": 1}},
        "device, as notes say": {"metadata": {"training": {"device": "cuda"}}},
        "index of its own": {"run_index": 0},
    } | ({"num_workers": {"num_workers": 1}} if case.kind is rows and len(case.inputs) < 16 else {})
    return {name: case.also(**options) for name, options in changes.items()}


@every_case
def test_what_moves_a_sum_by_rounding_alone_leaves_the_key(number, tmp_path):
    case = some_case(number)
    expected = case.key()
    for name, same in agreeing(case, tmp_path).items():
        assert same.key() == expected, name


@pytest.mark.parametrize("number", share(range(8), 3))
def test_with_one_level_every_strategy_has_one_key_and_comes_to_the_same_bits(number):
    """Plain DP-SGD, by whatever name."""
    case = some_case(number, one_level=True)
    case = replace(case, model=lambda: nn.Linear(case.inputs.shape[1], 4), kind=lambda *columns: columns)
    keys_and_bits = set()
    for strategy in STRATEGIES:
        model, private = replace(case, strategy=strategy).begun()
        with private:
            train(private, model)
        bits = torch.cat([p.detach().flatten() for p in model.parameters()]).numpy().tobytes()
        keys_and_bits.add((private.ledger.key, bits))
    assert len(keys_and_bits) == 1


REPEATED = """
import torch, numpy as np, epsilons
from torch import nn
class Odd(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.bend = lambda x: x * 2 if "a" in {"a", "b", "c"} else x
    def forward(self, x):
        return self.bend(self.layer(x))
torch.manual_seed(0)
budgets = epsilons.Budgets(np.repeat([4.0, 8.0], 10), delta=1e-5)
plan = epsilons.plan(budgets, epsilons.Recipe(steps=2, batch_size=5, clip_norm=1.0), "scale", "rdp")
found = []
def keep(private): found.append(private.ledger.key)
limit = {"a", "b", "c"}
loss = lambda out, y: (out - y).square().mean(1) * len(limit & {"x", "a", "y"})
epsilons.fit(Odd(), (torch.ones(20, 3), torch.zeros(20, 2)), plan, budgets=budgets, seed=3, callbacks=[keep],
             training=epsilons.Training(
                 loss=loss, optimizer=lambda p: torch.optim.SGD(p, lr=0.1), device="cpu", progress=False,
                 scheduler=lambda o: torch.optim.lr_scheduler.ExponentialLR(o, 0.9)))
print(found[0])
"""


def test_the_same_call_has_the_same_key_in_every_process():
    """Sets have another order in each, and functions another address."""
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(REPEATED, "<string>", "exec"), names)
    other = python(REPEATED, PYTHONHASHSEED="2" if os.environ.get("PYTHONHASHSEED") == "1" else "1")
    assert other.strip() == names["found"][0]


# -- fit --------------------------------------------------------------------------------------------------------------


def key_of_fit(**options: Any) -> str:
    found: list[str] = []
    case = some_case(3)
    budgets, plan = plan_of(case.epsilons, "scale", 2, 1.0, 6.0)
    torch.manual_seed(0)
    model = nn.Linear(case.inputs.shape[1], 4)
    options = {"seed": 1, "device": "cpu", "progress": False} | options
    options["callbacks"] = [lambda private: found.append(private.ledger.key), *options.get("callbacks", [])]
    fit_flat(model, (case.inputs, case.targets), plan, budgets=budgets, **options)
    return found[0]


def weighted_module(weight: float) -> nn.Module:
    """A loss with a setting that neither its text nor its state shows."""
    loss = lambda model, outputs, targets: model.weight * F.cross_entropy(outputs, targets, reduction="none")  # noqa: E731
    return Model(loss, weight=weight)


def weighted(weight: float) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda outputs, targets: weight * F.cross_entropy(outputs, targets, reduction="none")


def test_fits_that_differ_in_loss_optimizer_or_schedule_have_keys_of_their_own():
    schedule = torch.optim.lr_scheduler.ExponentialLR
    options: dict[str, dict[str, Any]] = {
        "as it is": {},
        "learning rate": {"lr": 0.2},
        "momentum": {"momentum": 0.5},
        "optimizer": {"optimizer": "adam"},
        "a function": {"loss": lambda o, t: F.cross_entropy(o, t, reduction="none")},
        "another function of that name": {"loss": lambda o, t: 2 * F.cross_entropy(o, t, reduction="none")},
        "with another constant": {"loss": lambda o, t: 3 * F.cross_entropy(o, t, reduction="none")},
        "closed over 1": {"loss": weighted(1.0)},
        "closed over 2": {"loss": weighted(2.0)},
        "a module with 1": {"loss": weighted_module(1.0)},
        "a module with 2": {"loss": weighted_module(2.0)},
        "schedule": {"scheduler": lambda o: schedule(o, 0.9)},
        "another schedule": {"scheduler": lambda o: schedule(o, 0.8)},
        "run index": {"run_index": 1},
    }
    keys = {name: key_of_fit(**changes) for name, changes in options.items()}
    assert len(set(keys.values())) == len(keys), keys


def test_what_a_fit_only_shows_leaves_the_key(tmp_path):
    case = some_case(3)
    test = (case.inputs[:4], case.targets[:4])
    for options in (
        {"eval_data": test, "eval_every": 1},
        {"callbacks": [print]},
        {"run_dir": tmp_path / "run"},
        {"metadata": {"author": "me"}},
        {"engine": "loop", "max_physical_batch": 1},
    ):
        assert key_of_fit(**options) == key_of_fit(), options


# -- noise is not shared --------------------------------------------------------------------------------------------


SILENT = 500  # coordinates that no record reaches: there, an update is noise alone


def updates_of(data: Tensor, lr: float = 1e-3, **options: Any) -> np.ndarray:
    """(steps, coordinates) what was applied, divided by the learning rate."""
    budgets, plan = plan_of((8.0,) * 30, "uniform", 6, 1.0, 10.0)
    model = Model(lambda m, x: x @ m.value, value=nn.Parameter(torch.zeros(SILENT + 4)))
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    applied: list[np.ndarray] = []
    before = [model.value.detach().clone()]

    def note(_: Any) -> None:
        applied.append(((before[0] - model.value.detach()) / lr).numpy().copy())
        before[0] = model.value.detach().clone()

    whole = torch.cat([data, torch.zeros(len(data), SILENT)], 1)
    private = make_flat(model, optimizer, (whole,), plan, budgets=budgets, **options)
    private.on_update(note)
    with private:
        for (x,) in private.batches:
            private.backward(model(x))
            private.step()
    assert len(applied) == 6
    return np.stack(applied)


@pytest.mark.parametrize("number", range(6))
def test_two_seeded_runs_on_neighbouring_data_or_at_another_rate_share_no_noise(number):
    """Where no record reaches, the difference of two updates is noise; one key on both makes it nothing."""
    chance = torch.Generator().manual_seed(number)
    data = torch.randn(30, 4, generator=chance)
    other = data.clone()
    other[number] = torch.randn(4, generator=chance) * 100
    _, plan = plan_of((8.0,) * 30, "uniform", 6, 1.0, 10.0)
    expected = 2**0.5 * plan.noise_std / 10.0
    ours = updates_of(data, seed=7)
    assert np.array_equal(ours, updates_of(data, seed=7))
    for theirs in (
        updates_of(other, seed=7),
        updates_of(data, lr=2e-3, seed=7),
        updates_of(data, seed=7, run_index=1),
        updates_of(data, seed=8),
    ):
        difference = (ours - theirs)[:, 4:]  # (steps, silent coordinates)
        assert difference.std(1) == pytest.approx(expected, rel=0.25)
        correlation = [np.corrcoef(a[4:], b[4:])[0, 1] for a in ours for b in theirs]
        assert np.abs(correlation).max() < 0.3  # 6.7 standard deviations
    one_key = key_from_seed(7)
    assert np.abs(updates_of(data, key=one_key) - updates_of(other, key=one_key))[:, 4:].max() < 1e-4 * expected


# -- an explicit key -------------------------------------------------------------------------------------------------


def test_an_explicit_key_is_the_run_s_whatever_is_computed(tmp_path):
    key = bytes(range(32))
    expected = Randomness(key).commitment
    case = some_case(1).also(seed=None, key=key)
    for other in (case, *differing(some_case(1), random.Random(0)).values()):
        if "run_index" not in other.options:
            assert other.also(seed=None, key=key).key() == expected
    _, private = case.also(run_dir=tmp_path / "run").begun()
    private.close()
    settings = (tmp_path / "run" / "run.json").read_text()
    assert '"randomness": "seeded"' in settings
    assert "no guarantee towards anyone who knows the seed" in settings
    assert key.hex() not in settings
    assert read_account(tmp_path / "run" / "ledger.jsonl", private.plan).key == expected


def test_a_key_of_a_seed_alone_is_what_it_always_was():
    """Recorded results rest on it."""
    assert key_from_seed(0).hex() == "f042dcd19c4304f095918c3949d60729d5d7feace4f49ec3061f355d99b7fded"
    assert Randomness.fresh(7).key == key_from_seed(7)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"key": b""}, "takes 32 bytes; got 0"),
        ({"key": bytes(31)}, "takes 32 bytes; got 31"),
        ({"key": bytes(64)}, "takes 32 bytes; got 64"),
        ({"key": "0" * 32}, "takes 32 bytes; got a str"),
        ({"key": 5}, "takes 32 bytes; got a int"),
        ({"key": bytes(32), "seed": 1}, "Got a seed and a key"),
        ({"key": bytes(32), "run_index": 1}, "index= has no effect on an explicit key"),
    ],
)
def test_a_key_that_is_none_is_refused(options, words, tmp_path):
    with pytest.raises(InputError, match=words):
        some_case(1).also(**({"seed": None} | options), run_dir=tmp_path / "run").begun()
    assert not (tmp_path / "run").exists()
    with pytest.raises(InputError, match=words):
        key_of_fit(**({"seed": None} | options))
