"""Small runs that the tests of training share: data, budgets, plans, models, and the loop."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset

import epsilons
from epsilons.draws.randomness import BLOCK, Randomness, key_from_seed
from epsilons.ledger.ledger import Ledger
from functional import Records
from options import make_flat

RECORDS, FEATURES, CLASSES = 60, 6, 3
LEVELS = (1.0, 2.0, 4.0)


@cache
def some_budgets(levels: tuple[float, ...] = LEVELS, records: int = RECORDS) -> epsilons.Budgets:
    """Every level equally often, in an order that has nothing to do with the data's."""
    return epsilons.Budgets(np.random.default_rng(1).permutation(np.resize(levels, records)))


@cache
def some_plan(
    strategy: str = "scale",
    steps: int = 6,
    batch_size: float = 12.0,
    clip_norm: float = 0.5,
    levels: tuple[float, ...] = LEVELS,
) -> epsilons.Plan:
    recipe = epsilons.Recipe(steps=steps, batch_size=batch_size, clip_norm=clip_norm)
    return epsilons.plan(some_budgets(levels), recipe, strategy=strategy, accountant="rdp")


def of_phases(*tables: dict[str, Any], budgets: epsilons.Budgets | None = None) -> epsilons.Plan:
    """A plan with these tables; budgets so large that nearly any table keeps them, or these."""
    usual = {"clip_norm": [0.5, 0.5], "weight": [1.0, 1.0], "noise_std": 1.0, "expected_batch": 6.0}

    def tabled(budgets, recipe, accountant):
        phases = [epsilons.Phase(**(usual | table)) for table in tables]
        return epsilons.Plan.of(budgets, recipe, accountant, *phases, strategy="tabled")

    recipe = epsilons.Recipe(steps=sum(t["steps"] for t in tables), batch_size=12.0, clip_norm=0.5)
    return epsilons.plan(budgets or some_budgets((500.0, 1000.0)), recipe, strategy=tabled, accountant="rdp")


def everyone(steps: int = 3) -> epsilons.Plan:
    """A plan that draws every record at every step."""
    return of_phases(
        {"steps": steps, "sample_rate": [1.0, 1.0], "clip_norm": [0.3, 0.6], "expected_batch": float(RECORDS)}
    )


def some_data(records: int = RECORDS) -> tuple[Tensor, Tensor]:
    make = torch.Generator().manual_seed(2)
    return torch.randn(records, FEATURES, generator=make), torch.randint(CLASSES, (records,), generator=make)


class Listed(Dataset[Any]):
    """The same records as a map-style data set of dictionaries."""

    def __init__(self) -> None:
        self.inputs, self.targets = some_data()

    def __len__(self) -> int:
        return RECORDS

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"features": self.inputs[index], "wanted": {"class": int(self.targets[index])}, "index": index}


def rows(*columns: Tensor) -> Records:
    """Columns as a map-style data set, which is read record by record."""
    return Records(lambda index: tuple(column[index] for column in columns), len(columns[0]))


def a_model(hidden: int = 0) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        if not hidden:
            return nn.Linear(FEATURES, CLASSES)
        return nn.Sequential(nn.Linear(FEATURES, hidden), nn.Tanh(), nn.Linear(hidden, CLASSES))


def private_over(
    model: nn.Module, data: Any = None, plan: epsilons.Plan | None = None, lr: float = 0.5, **options: Any
):
    """make_private with SGD, the plan's levels as budgets, and one key: data, plan and model are what differs."""
    plan = plan or some_plan()
    optimizer = options.pop("optimizer", None) or torch.optim.SGD(model.parameters(), lr=lr)
    key = {} if "seed" in options else {"key": key_from_seed(4)}
    options = {"budgets": some_budgets(tuple(plan.epsilons.tolist())), **key, **options}
    data = some_data() if data is None else data
    return make_flat(model, optimizer, data, plan, **options)


def losses_of(model: nn.Module, batch: Any) -> Tensor:
    """Cross-entropy of (inputs, targets), (inputs, targets, weights), or a batch of `Listed`."""
    if isinstance(batch, dict):
        batch = batch["features"], batch["wanted"]["class"]
    inputs, targets, *weight = batch
    losses = F.cross_entropy(model(inputs), targets, reduction="none")
    return losses * weight[0] if weight else losses


def train(private: epsilons.Private, model: nn.Module, until: int | None = None) -> None:
    """The loop, to its end or until so many updates were made."""
    for batch in private.batches:
        private.backward(losses_of(model, batch))
        private.step()
        if private.updates == until:
            return


def one_update(private: epsilons.Private, model: nn.Module, loop: Any) -> None:
    for batch in loop:
        private.backward(losses_of(model, batch))
        if private.step():
            return


def trained(data: Any = None, plan: epsilons.Plan | None = None, hidden: int = 0, **options: Any) -> list[Tensor]:
    """The parameters at the end of a whole run."""
    model = a_model(hidden)
    with private_over(model, data, plan, **options) as private:
        train(private, model)
        assert private.is_finished
    return parameters_of(model)


def parameters_of(model: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def same(ours: list[Tensor], theirs: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def close(ours: list[Tensor], theirs: list[Tensor], within: float = 1e-5) -> bool:
    return all((a - b).abs().max() <= within for a, b in zip(ours, theirs, strict=True))


# -- runs that are stopped and resumed --------------------------------------------------------------------------------


@cache
def three_levels() -> epsilons.Budgets:
    return epsilons.Budgets(np.repeat([1.0, 2.0, 8.0], 20), delta=1e-3)


@contextmanager
def blocks_of(steps: int) -> Iterator[None]:
    """Ledgers reserve so many steps at a time instead of 64, so that a short run has several blocks."""
    prepare = Ledger._prepare
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Ledger, "_prepare", lambda ledger, plan, path, block: prepare(ledger, plan, path, steps))
        yield


@cache
def sampled(steps: int = 40, batch_size: float = 6.0) -> epsilons.Plan:
    """Some draws of several physical batches, some of one, some of none."""
    recipe = epsilons.Recipe(steps=steps, batch_size=batch_size, clip_norm=0.5)
    return epsilons.plan(three_levels(), recipe, "sample", "rdp")


@cache
def points(seed: int = 0) -> tuple[Tensor, Tensor]:
    make = torch.Generator().manual_seed(seed)
    return torch.randn(60, 3, generator=make), torch.randint(0, 2, (60,), generator=make)


def dropping_model() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Dropout(0.3), nn.Linear(4, 2))


class Training:
    """A model, its optimizer with momentum, a schedule and an average of weights, kept in one run."""

    def __init__(
        self, run_dir: Path | None, *, lr: float = 0.3, decay: float = 0.99, model: Any = None, **options: Any
    ) -> None:
        torch.manual_seed(0)
        self.model = (model or dropping_model)()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=lr, momentum=0.6)
        self.schedule = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, decay)
        self.average = torch.optim.swa_utils.AveragedModel(self.model)
        options = {"engine": "vmap", "seed": 5, "budgets": three_levels()} | options
        data, plan = options.pop("data", points()), options.pop("plan", sampled())
        self.private = make_flat(self.model, self.optimizer, data, plan, run_dir=run_dir, **options)
        self.private.register_for_checkpointing(schedule=self.schedule, average=self.average)
        self.private.on_update(lambda _: self.average.update_parameters(self.model))

    def bits(self) -> bytes:
        """Everything that training moved."""
        moved = [*self.model.parameters(), *self.average.parameters()]
        moved += [state["momentum_buffer"] for state in self.optimizer.state.values()]
        lr = repr(self.optimizer.param_groups[0]["lr"]).encode()
        return b"".join(t.detach().numpy().tobytes() for t in moved) + lr


def lines(run_dir: Path) -> list[dict[str, Any]]:
    """The lines of a run's ledger; a line that is only an update's hash is written out."""
    found: list[dict[str, Any]] = []
    block: dict[str, Any] = {}
    following: list[int] = []  # (phases,) the step after the last update of the present epoch
    for line in map(json.loads, (run_dir / "ledger.jsonl").read_text().split("\n")[:-1]):
        if isinstance(line, str):
            place = {"epoch": block["epoch"], "phase": block["phase"], "step": following[block["phase"]]}
            line = {"kind": "update", **place, "update": line}
        if line["kind"] == "key":
            following = list(line["start"])
        if line["kind"] == "reserve":
            block = line
        if line["kind"] == "update":
            following[line["phase"]] = line["step"] + 1
        found.append(line)
    return found


def epochs(run_dir: Path) -> list[int]:
    return [line["epoch"] for line in lines(run_dir) if line["kind"] == "key"]


def without_times(settings: dict[str, Any]) -> dict[str, Any]:
    """The content of run.json, without the times when the run began and ended."""
    return {key: value for key, value in settings.items() if key not in ("started", "ended")}


def replace_noise(patch: Any, change: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """The noise of all updates is that of change(the real one): (randomness, phase, step, count, …) -> (count,).

    patch  as pytest's monkeypatch, with `setattr`
    """
    blocks = Randomness.each_block

    def real(self: Randomness, phase: int, step: int, count: int, threads: int = 1) -> Any:
        values = np.empty(count)

        def put(start: int, block: Any) -> None:
            values[start : start + len(block)] = block

        blocks(self, phase, step, count, put, threads)
        return values

    changed = change(real)

    def each_block(self: Randomness, phase: int, step: int, count: int, use: Any, threads: int = 1) -> None:
        values = np.array(changed(self, phase, step, count, threads))
        for start in range(0, count, BLOCK):
            use(start, values[start : start + BLOCK])

    patch.setattr(Randomness, "noise", changed)
    patch.setattr(Randomness, "each_block", each_block)
