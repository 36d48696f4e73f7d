"""One training run: data, budgets, plan, model, scores. Uses the public interface of the library."""

from __future__ import annotations

import hashlib
import json
import math
import shutil
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import epsilons
from epsilons import Budgets, EvalData, Performance, Plan, Private
from epsilons.core.mechanism import IntArray
from epsilons.data import Arrays
from epsilons.draws.randomness import key_from_seed
from epsilons.errors import InputError
from epsilons.models import build
from epsilons.training.features import FEATURES
from epsilons.training.performance import use_allocator

from .results import Line, append, is_complete
from .settings import FeatureSettings, Settings, TextSettings
from .strategies import STRATEGIES
from .texts import text_inputs

#: Unfinished runs: the library's run folders, and the scores of the groups beside them.
UNFINISHED = Path(__file__).resolve().parent / "unfinished"

SECONDS_PER_LINE = 30.0

#: A GPU has memory for a whole draw, and small physical batches would not use it fully. No effect on privacy.
GPU_BATCH = 2_048


def train(settings: Settings, seed: int, label: str = "", device: str = "auto") -> dict[str, Any]:
    """Train once, or continue an interrupted run of the same settings; returns the values of one result.

    The run's folder stays until `forget` removes it, so that a result cannot be lost before it is written.
    """
    with suppress(InputError):  # not every machine has glibc
        use_allocator()  # saves a sixth of the time, does not change sums
    train_data, test_data = scored_data(settings)
    budgets = budgets_by_class(settings, train_data.targets) or budgets_of(settings, len(train_data.targets), seed)
    train_data, budgets = kept(settings, train_data, budgets)
    plan = plan_of(settings, budgets)
    torch.manual_seed(seed)
    model = network(settings, train_data)
    records = tensors(train_data)
    folder = UNFINISHED / f"{settings.named(seed)}-{plan.digest[:8]}"
    folder.parent.mkdir(parents=True, exist_ok=True)
    watch = _Watch(model, records, budgets, plan.steps, settings.watch, folder)
    progress = Progress(label, plan.steps)
    gpu = on_gpu(device)
    words = {"features": text_inputs(settings, "train").origin} if isinstance(settings, TextSettings) else {}
    started = time.perf_counter()
    run = epsilons.fit(
        model,
        records,
        plan,
        budgets=budgets,
        training=epsilons.Training(
            optimizer=settings.optimizer if isinstance(settings, TextSettings) else "sgd",
            lr=settings.lr,
            momentum=settings.momentum,
            device="cuda" if gpu else "cpu",
            progress=False,
        ),
        evaluation=EvalData(tensors(test_data), public=True, every=math.ceil(plan.steps / settings.evaluations)),
        callbacks=[progress, watch],
        run_dir=epsilons.RunFolder(folder, resume=True, metadata=words),
        # the same coins for every method; a repeated cell gives the same numbers
        seed=epsilons.Randomness.with_key(key_from_seed(seed)),
        performance=Performance(max_physical_batch=GPU_BATCH if gpu else "auto"),
    )
    seconds = time.perf_counter() - started
    groups = watch.scores()
    last = run.metrics[-1]
    # Interrupted between a checkpoint and its scores, or resumed under a new key, with updates missing: start again.
    if groups is None or last["step"] < plan.steps:
        _remove(folder)
        return train(settings, seed, label, device)
    return {
        **charges_of(plan, budgets, run.charged),
        "seconds": round(seconds, 1),
        "updates_timed": progress.updates,
        "accuracy": last["accuracy"],
        "per_class": last["per_class"],
        "curve": [{key: row[key] for key in ("step", "loss", "accuracy", "per_class")} for row in run.metrics],
        "groups": groups,
        "weights": digest(model),
        **words,
    }


def digest(model: nn.Module) -> str:
    """16 hex digits of the SHA-256 of all weights, in the order of their names."""
    parts = sorted(model.state_dict().items())
    return hashlib.sha256(b"".join(part.cpu().contiguous().numpy().tobytes() for _, part in parts)).hexdigest()[:16]


def charges_of(plan: Plan, budgets: Budgets, charged: Sequence[int]) -> dict[str, Any]:
    """What a result line says of the plan and of what was spent. charged: (phases,) steps."""
    return {
        "plan": plan.digest,
        "steps": plan.steps,
        "charged": sum(charged),
        "levels": budgets.epsilons.tolist(),
        "spent": plan.spent_after(charged).tolist(),
    }


def scored_data(settings: Settings) -> tuple[Arrays, Arrays]:
    """The training records, and the records that are scored: the test data, or a part of the training data.

    The part is chosen at random, equally for all seeds and methods. The test data are then not read.
    """
    data = inputs_of(settings, "train")
    if not settings.validation:
        return data, inputs_of(settings, "test")
    order = np.random.default_rng(0).permutation(len(data.targets))
    held = round(settings.validation * len(order))
    return data.subset(np.sort(order[held:])), data.subset(np.sort(order[:held]))


def inputs_of(settings: Settings, split: str) -> Arrays:
    """One split of the data, or its features."""
    if isinstance(settings, TextSettings):
        return text_inputs(settings, split).arrays
    if not isinstance(settings, FeatureSettings):
        return epsilons.data.load(settings.dataset, split)
    return _features(settings.dataset, split, settings.features, json.dumps(settings.feature_options))


@lru_cache(maxsize=4)  # two data sets: cells of one process share them
def _features(dataset: str, split: str, name: str, options: str) -> Arrays:
    data = epsilons.data.load(dataset, split, pixels=True)
    return Arrays(FEATURES[name](torch.from_numpy(data.inputs), **json.loads(options)).numpy(), data.targets)


def forget(line: Line) -> None:
    """Remove the folder of a run whose result is written, if it is on this machine; not if shadows are missing."""
    if "plan" in line and is_complete(line):
        _remove(UNFINISHED / f"{line['id']}-{line['plan'][:8]}")


def _remove(folder: Path) -> None:
    if folder.exists():
        shutil.rmtree(folder)
    folder.with_suffix(".groups.jsonl").unlink(missing_ok=True)


def on_gpu(device: str) -> bool:
    """Whether "auto", "cpu" or "cuda" is a GPU on this machine."""
    return device == "cuda" or (device == "auto" and torch.cuda.is_available())


def network(settings: Settings, data: Arrays) -> nn.Module:
    """A new model for these data. Channels come last, because max_pool2d is then a third faster on a CPU."""
    options = settings.model_options if isinstance(settings, TextSettings) else {}
    model = build(settings.model, data.inputs.shape[1:], int(data.targets.max()) + 1, **options)
    return model.to(memory_format=torch.channels_last)  # type: ignore[call-overload, no-any-return]


def budgets_of(settings: Settings, records: int, seed: int) -> Budgets:
    """Simulated budgets, assigned again for every seed, as in the paper's code."""
    if settings.uniform is not None:
        low, high, groups = settings.uniform
        coins = np.random.default_rng(seed)
        levels = coins.uniform(low, high, int(groups))
        return Budgets(levels[coins.integers(0, int(groups), records)], settings.delta)
    shares = {float(level): share for level, share in settings.shares.items()}
    return Budgets.from_shares(shares, records=records, delta=settings.delta, seed=seed)


def budgets_by_class(settings: Settings, targets: IntArray) -> Budgets | None:
    """Budgets that follow from the (records,) classes; None without `class_epsilon`.

    Raises InputError for a class that no record has.
    """
    if not settings.class_epsilon:
        return None
    present, named = set(np.unique(targets).tolist()), {int(k): level for k, level in settings.class_epsilon.items()}
    if absent := sorted(set(named) - present):
        raise InputError(f"class_epsilon names class {absent[0]}, which no record of {settings.dataset} has.")
    classes = {number: float(others) for others in settings.shares for number in present} | named
    return Budgets.by_class(targets, classes, delta=settings.delta)


def kept(settings: Settings, data: Arrays, budgets: Budgets) -> tuple[Arrays, Budgets]:
    """The records with an epsilon in settings.keep; all records without that setting."""
    if settings.keep is None:
        return data, budgets
    rows = np.flatnonzero(np.isin(budgets.epsilons[budgets.group], settings.keep))
    return data.subset(rows), budgets.subset(rows)


def plan_of(settings: Settings, budgets: Budgets) -> Plan:
    """The plan of these settings for these budgets."""
    strategy = STRATEGIES.get(settings.strategy, settings.strategy)
    recipe = settings.recipe(len(budgets))
    return epsilons.plan(budgets, recipe, strategy, accountant=settings.accountant, **settings.options)


def tensors(data: Arrays) -> tuple[Tensor, Tensor]:
    """Inputs and targets."""
    return torch.from_numpy(data.inputs), torch.from_numpy(data.targets)


@torch.no_grad()
def scores_by_group(model: nn.Module, data: tuple[Tensor, Tensor], group: Tensor) -> tuple[list[float], list[float]]:
    """(groups,) mean cross-entropy and (groups,) accuracy on the training records of each group."""
    device = next(model.parameters()).device
    model.eval()
    losses, right = [], []
    for start in range(0, len(data[1]), 2_000):
        x, y = (part[start : start + 2_000].to(device) for part in data)
        outputs = model(x)
        losses.append(F.cross_entropy(outputs, y, reduction="none").double().cpu())
        right.append((outputs.argmax(1) == y).double().cpu())
    model.train()
    counts = torch.bincount(group).double()
    loss, accuracy = (torch.bincount(group, weights=torch.cat(parts)) / counts for parts in (losses, right))
    return loss.tolist(), accuracy.tolist()


class _Watch:
    """A callback that scores every group's training records at equal distances, into a file beside the run."""

    def __init__(
        self, model: nn.Module, data: tuple[Tensor, Tensor], budgets: Budgets, steps: int, times: int, folder: Path
    ) -> None:
        self.model, self.data, self.group = model, data, torch.from_numpy(budgets.group.copy())
        self.steps, self.every = steps, math.ceil(steps / times)
        self.file = folder.with_suffix(".groups.jsonl")

    def __call__(self, private: Private) -> None:
        if private.updates % self.every == 0 and not private.is_finished:
            append(self.file, self._score(private.updates))

    def scores(self) -> list[dict[str, Any]] | None:
        """All scores in order, with those of the finished model; None if some are missing."""
        texts = self.file.read_text().split("\n")[:-1] if self.file.exists() else []
        rows = {row["step"]: row for row in map(json.loads, texts)}  # a resumed run may score a step again, equally
        rows[self.steps] = self._score(self.steps)
        complete = rows.keys() >= set(range(self.every, self.steps, self.every))
        return [rows[step] for step in sorted(rows)] if complete else None

    def _score(self, step: int) -> dict[str, Any]:
        loss, accuracy = scores_by_group(self.model, self.data, self.group)
        return {"step": step, "loss": loss, "accuracy": accuracy}


class Progress:
    """A callback that counts updates, and prints the time left every SECONDS_PER_LINE seconds."""

    def __init__(self, label: str, steps: int) -> None:
        self.label, self.steps, self.updates = label, steps, 0
        self.started = self.printed = time.monotonic()

    def __call__(self, private: Private | None = None) -> None:
        self.updates += 1
        at = self.updates if private is None else private.updates
        now = time.monotonic()
        if now - self.printed < SECONDS_PER_LINE or not self.label:
            return
        self.printed = now
        left = (now - self.started) / self.updates * (self.steps - at) / 60
        where = f"{at:,}/{self.steps:,} steps"
        print(f"  {self.label}: {where}, {left:.1f} min left", file=sys.stderr, flush=True)
