"""`epsilons train CONFIG --dry-run`: what would be trained. Nothing is written, and no private record is trained on.

The time of a step is measured on a copy of the model, with zeros in the place of the records.
"""

from __future__ import annotations

import copy
import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from torch import nn

from ..configs.config_file import read_config
from ..configs.plan_choice import plan_of
from ..configs.prepare import Prepared, prepare
from ..configs.registry_train import members_of
from ..core.disclosure import PLAN_SUPPRESSED, has_small_cells
from ..errors import InputError, printable
from ..ledger.plan_folder import PlanFolder, opened
from ..models import build
from ..planning import Plan
from ..planning.display import round_up
from ..training import Performance, Private, Training, fit
from ..training.distributed import Ranks, launched_processes
from ..training.fitting.encoded import as_tensor
from .options import console, show_plan
from .plan_inputs import TrainFlags, check_trusted
from .train_config import FIT_KEYS, check_device, check_outputs, groups_as_json, records_of, show_data

#: Steps that are timed at most, and after how many seconds the measurement ends.
_STEPS, _SECONDS = 6, 5.0


@dataclass(frozen=True)
class _Would:
    """What would be trained."""

    prepared: Prepared
    plan: Plan
    folder: Path
    plan_folder: PlanFolder | None
    parameters: int
    seconds_per_step: float | None


def dry_run(file: Path, folder: Path, flags: TrainFlags) -> None:
    """Do everything that `train` does before its first step, and print what would follow. Raises what it raises."""
    if launched_processes() > 1:
        raise InputError("A dry run is made in one process, got several from torchrun. Leave out torchrun.")
    config = read_config(file, flags.changed)
    check_trusted([config.model.name, config.privacy.strategy], file.parent, flags.trust)
    out = console(quiet=flags.quiet or flags.as_json)
    with members_of(flags.registry, flags.pepper, config, folder, False, Ranks()) as members:
        prepared = prepare(config, file.parent, members=members)
    plan, plan_folder = opened(plan_of(prepared, file.parent, [], flags.plan, makes_folder=False))
    check_device(config.training.device)
    seeds = config.training.seeds
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seeds[0] if seeds else 0)
        model = build(config.model.name, prepared.train.inputs.shape[1:], prepared.outputs, **config.model_options)
        check_outputs(model, as_tensor(prepared.train.inputs), prepared.outputs, config.model.name)
        seconds = None if members is not None else _seconds_per_step(model, prepared, plan)
    would = _Would(prepared, plan, folder, plan_folder, sum(p.numel() for p in model.parameters()), seconds)
    show_data(prepared, out)
    show_plan(plan, out, config.budgets.levels)
    _show(would, out)
    if flags.as_json:
        print(json.dumps(_as_json(would), indent=1))


def _show(would: _Would, out: Console) -> None:
    config, plan = would.prepared.config, would.plan
    training = config.training
    out.print(
        f"\nWould train {printable(config.model.name)} ({would.parameters:,} parameters) with {training.optimizer}, lr "
        f"{training.lr:g}, for {plan.steps:,} steps with an expected batch of {plan.batch_size:,.6g} {plan.unit}s"
        f"{_time(would)}."
    )
    if training.seeds:
        out.print(f"{len(training.seeds):,} runs, one per seed. Seeded: with the seed, the noise can be removed.")
    if would.plan_folder is not None:
        folder = would.plan_folder
        out.print(f"{folder.left:,} of {plan.runs:,} runs of the plan in {printable(folder.path)} are left.")
    out.print(f"Would be saved in {printable(would.folder)}/. Dry run: nothing was written, and no budget was spent.")


def _time(would: _Would) -> str:
    """The time of a step and of all, as far as it was measured."""
    if would.seconds_per_step is None:
        return ""
    total = would.seconds_per_step * would.plan.steps * max(1, len(would.prepared.config.training.seeds))
    return f"; about {_duration(would.seconds_per_step)} a step here, {_duration(total)} in all without evaluations"


def _duration(seconds: float) -> str:
    """Two significant digits, in the unit that suits."""
    for limit, unit, size in ((1.0, "ms", 1e-3), (120.0, "s", 1.0), (7200.0, "min", 60.0)):
        if seconds < limit:
            return f"{round_up(seconds / size, 2):g} {unit}"
    return f"{round_up(seconds / 3600, 2):g} h"


def _as_json(would: _Would) -> dict[str, Any]:
    plan, config = would.plan, would.prepared.config
    values = {
        "dry_run": True,
        "path": str(would.folder),
        "model": config.model.name,
        "parameters": would.parameters,
        "steps": plan.steps,
        "expected_batch": plan.batch_size,
        "seconds_per_step": would.seconds_per_step,
    }
    values["groups"] = groups_as_json(plan, config.budgets.levels)
    return values | ({"suppressed": PLAN_SUPPRESSED} if has_small_cells(plan.groups) else {})


# -- the time of a step ------------------------------------------------------------------------------------------------


class _Clock:
    """A callback that keeps the shortest time between two updates, and stops after a few."""

    def __init__(self) -> None:
        self.shortest: float | None = None
        self._begun = self._last = time.perf_counter()

    def __call__(self, private: Private) -> None:
        now = time.perf_counter()
        if private.updates > 1:  # the first update also warms up
            self.shortest = min(self.shortest or np.inf, now - self._last)
        self._last = now
        if private.updates >= _STEPS or now - self._begun > _SECONDS:
            private.stop()


def _seconds_per_step(model: nn.Module, prepared: Prepared, plan: Plan) -> float | None:
    """The shortest of a few steps on zeros; None where there was one step only."""
    config, clock = prepared.config, _Clock()
    inputs = np.zeros(prepared.train.inputs.shape, prepared.train.inputs.dtype)
    if prepared.classes is None:
        targets = np.zeros(prepared.train.targets.shape, prepared.train.targets.dtype)
    else:
        targets = np.arange(len(inputs)) % len(prepared.classes)
    fit(
        copy.deepcopy(model),
        records_of(prepared, inputs, targets),
        plan.of_one_run,
        budgets=prepared.budgets,
        training=Training(**config.training.model_dump(include=FIT_KEYS), progress=False),
        callbacks=[clock],
        performance=Performance(**config.performance.model_dump()),
    )
    return clock.shortest
