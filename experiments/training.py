"""One training run: data, budgets, plan, model, scores. Everything by the library's public doors."""

from __future__ import annotations

import json
import math
import shutil
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import epsilons
from epsilons import Budgets, EvalData, Plan, Private
from epsilons.data import Arrays
from epsilons.errors import InputError
from epsilons.training.models import build
from epsilons.training.performance import use_allocator
from epsilons.training.randomness import key_from_seed

from .results import Line, append
from .settings import Settings
from .strategies import STRATEGIES

#: Unfinished runs: the library's run folder, and the groups' scores beside it.
UNFINISHED = Path(__file__).resolve().parent / "unfinished"

SECONDS_PER_LINE = 30.0

#: A GPU has room for a whole draw, and small chunks would leave it idle. No effect on privacy.
GPU_CHUNK = 2_048


def train(settings: Settings, seed: int, label: str = "", device: str = "auto") -> dict[str, Any]:
    """Train once, going on where an interrupted run of the same settings stopped; returns what is worth keeping.

    What it went on from is left: once the result is kept, `forget` it.
    """
    with suppress(InputError):  # where there is no glibc
        use_allocator()  # a sixth of the time; no effect on sums
    train_data, test_data = epsilons.data.load(settings.dataset, "train"), epsilons.data.load(settings.dataset, "test")
    budgets = budgets_of(settings, len(train_data.targets), seed)
    train_data, budgets = kept(settings, train_data, budgets)
    plan = plan_of(settings, budgets)
    torch.manual_seed(seed)
    model = network(settings, train_data)
    records = (torch.from_numpy(train_data.inputs), torch.from_numpy(train_data.targets))
    folder = UNFINISHED / f"{settings.named(seed)}-{plan.digest[:8]}"
    watched = folder.with_suffix(".groups.jsonl")
    folder.parent.mkdir(parents=True, exist_ok=True)
    group, every = torch.from_numpy(budgets.group.copy()), math.ceil(plan.steps / settings.watch)
    updates: list[int] = []
    callbacks: list[Callable[[Private], None]] = [
        _progress(label, plan.steps),
        _watch(model, records, group, every, watched),
        lambda private: updates.append(private.updates),
    ]
    started = time.perf_counter()
    run = epsilons.fit(
        model,
        records,
        plan,
        budgets=budgets,
        lr=settings.lr,
        momentum=settings.momentum,
        eval_data=EvalData((torch.from_numpy(test_data.inputs), torch.from_numpy(test_data.targets)), public=True),
        eval_every=math.ceil(plan.steps / settings.evaluations),
        device="cuda" if on_gpu(device) else "cpu",
        performance=epsilons.Performance(max_physical_batch=GPU_CHUNK if on_gpu(device) else None),
        key=key_from_seed(seed),  # methods are compared under equal coins, and a cell reruns to the same numbers
        run_dir=folder,
        resume=True,
        callbacks=callbacks,
        progress=False,
    )
    seconds = time.perf_counter() - started
    groups = {row["step"]: row for row in _rows(watched)} | {plan.steps: _scored(plan.steps, model, records, group)}
    lacking = set(range(every, plan.steps, every)) - set(groups)
    # Cut off after a checkpoint, before the scores that belong to it; or gone on under a new key, with updates missing.
    if lacking or run.metrics[-1]["step"] < plan.steps:
        _remove(folder)
        return train(settings, seed, label, device)
    curve = [{k: row[k] for k in ("step", "loss", "accuracy")} for row in run.metrics]
    last = run.metrics[-1]
    return {
        "plan": plan.digest,
        "steps": plan.steps,
        "charged": sum(run.charged),
        "levels": budgets.epsilons.tolist(),
        "spent": plan.spent_after(run.charged).tolist(),
        "seconds": round(seconds, 1),
        "updates_timed": len(updates),
        "accuracy": last["accuracy"],
        "per_class": last["per_class"],
        "curve": curve,
        "groups": [groups[step] for step in sorted(groups)],
    }


def forget(line: Line) -> None:
    """Remove what a finished run could have gone on from, if it is here and not on another machine."""
    if "plan" in line:
        _remove(UNFINISHED / f"{line['id']}-{line['plan'][:8]}")


def on_gpu(device: str) -> bool:
    """Whether "auto", "cpu" or "cuda" is a GPU here."""
    return device == "cuda" or (device == "auto" and torch.cuda.is_available())


def network(settings: Settings, data: Arrays) -> nn.Module:
    """A new model for these data. Channels come last: max_pool2d is a third faster on a CPU then."""
    model = build(settings.model, data.inputs.shape[1:], int(data.targets.max()) + 1)
    return model.to(memory_format=torch.channels_last)  # type: ignore[call-overload, no-any-return]


def budgets_of(settings: Settings, records: int, seed: int) -> Budgets:
    """Simulated budgets for so many records; dealt out anew for every seed, as the paper's code does."""
    if settings.uniform is not None:
        low, high, groups = settings.uniform
        coins = np.random.default_rng(seed)
        levels = coins.uniform(low, high, int(groups))
        return Budgets(levels[coins.integers(0, int(groups), records)], settings.delta)
    shares = {float(level): share for level, share in settings.shares.items()}
    return Budgets.from_shares(shares, records=records, delta=settings.delta, seed=seed)


def kept(settings: Settings, data: Arrays, budgets: Budgets) -> tuple[Arrays, Budgets]:
    """Only the records whose epsilon is in settings.keep; all, if that is not set."""
    if settings.keep is None:
        return data, budgets
    rows = np.flatnonzero(np.isin(budgets.epsilons[budgets.group], settings.keep))
    return data.subset(rows), budgets.subset(rows)


def plan_of(settings: Settings, budgets: Budgets) -> Plan:
    """The plan for these budgets."""
    strategy = STRATEGIES.get(settings.strategy, settings.strategy)
    return epsilons.plan(
        budgets, settings.recipe(len(budgets)), strategy, accountant=settings.accountant, **settings.options
    )


@torch.no_grad()
def scores_by_group(model: nn.Module, data: tuple[Tensor, Tensor], group: Tensor) -> tuple[list[float], list[float]]:
    """(groups,) mean cross-entropy and (groups,) accuracy on the training records of each group."""
    where = next(model.parameters()).device
    model.eval()
    losses, right = [], []
    for start in range(0, len(data[1]), 2_000):
        x, y = (part[start : start + 2_000] for part in data)
        outputs, y = model(x.to(where)), y.to(where)
        losses.append(F.cross_entropy(outputs, y, reduction="none").double().cpu())
        right.append((outputs.argmax(1) == y).double().cpu())
    model.train()
    counts = torch.bincount(group).double()
    loss, hits = (torch.bincount(group, weights=torch.cat(parts)) / counts for parts in (losses, right))
    return loss.tolist(), hits.tolist()


def _scored(step: int, model: nn.Module, data: tuple[Tensor, Tensor], group: Tensor) -> dict[str, Any]:
    loss, accuracy = scores_by_group(model, data, group)
    return {"step": step, "loss": loss, "accuracy": accuracy}


def _watch(
    model: nn.Module, data: tuple[Tensor, Tensor], group: Tensor, every: int, file: Path
) -> Callable[[Private], None]:
    def look(private: Private) -> None:
        if private.updates % every == 0 and not private.is_finished:
            append(file, _scored(private.updates, model, data, group))

    return look


def _rows(file: Path) -> list[dict[str, Any]]:
    """All whole lines; a run that was cut off and taken up again may have scored a step twice, alike."""
    return [json.loads(line) for line in file.read_text().split("\n")[:-1]] if file.exists() else []


def _remove(folder: Path) -> None:
    if folder.exists():
        shutil.rmtree(folder)
    folder.with_suffix(".groups.jsonl").unlink(missing_ok=True)


def _progress(label: str, steps: int) -> Callable[[Private], None]:
    state = {"began": time.monotonic(), "printed": time.monotonic(), "first": -1}

    def tick(private: Private) -> None:
        now, done = time.monotonic(), private.updates
        if state["first"] < 0:
            state["first"] = done - 1
        if now - state["printed"] < SECONDS_PER_LINE or not label:
            return
        state["printed"] = now
        left = (now - state["began"]) / (done - state["first"]) * (steps - done)
        print(f"  {label}: {done:,}/{steps:,} steps, {left / 60:.1f} min left", file=sys.stderr, flush=True)

    return tick
