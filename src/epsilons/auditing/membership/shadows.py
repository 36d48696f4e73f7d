"""Shadow models: one plan for all of them, trained in blocks, on all cores.

The plan is never computed from a shadow's members. A finished block is kept in a store, so an interrupted attack
continues with the blocks that are missing.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cache
from tempfile import TemporaryDirectory
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from joblib import Parallel, cpu_count, delayed
from joblib.externals.loky.process_executor import TerminatedWorkerError

from ...budgets import Budgets
from ...errors import ModelError
from ...planning import Plan, Recipe, plan
from ...planning.plan_numbers import SHARES
from .blocks import Arrays, Block, ShadowSetting, blocks_of, train_block
from .signals import Signals

#: Starting processes takes some seconds; work that takes less time than this is done in this process.
WORTH_PROCESSES = 20.0

#: Called with the number of shadows that are trained.
Watch = Callable[[float], None]


class Store(Protocol):
    """Where finished blocks are kept."""

    def load(self, block: Block) -> Arrays | None:
        """The arrays of a finished block; None if there is none."""

    def save(self, block: Block, arrays: Arrays) -> None:
        """Keep a finished block."""


class NoStore:
    """Keeps nothing."""

    def load(self, block: Block) -> Arrays | None:
        return None

    def save(self, block: Block, arrays: Arrays) -> None:
        pass


@dataclass(frozen=True, eq=False)
class Shadows:
    """What was read off all shadows of one arm.

    accuracy         (shadows,) on the population; NaN without one
    member_accuracy  (shadows,) on each shadow's members
    """

    signals: Signals
    accuracy: npt.NDArray[np.float64] = field(repr=False)
    member_accuracy: npt.NDArray[np.float64] = field(repr=False)


def shadow_plan(made: Plan, records: int) -> Plan:
    """The plan of every shadow of an attack on `made`: on average, half of the records are in.

    Of a plan for several runs, one run is attacked, and what is certified is that of one run. The divisor of every
    update is halved, which is post-processing, and nothing else changes. A plan with declared numbers for about half of
    the records (public_records) is used as it is.
    """
    made.verify()
    made = made.of_one_run
    if made.adjacency == SHARES and made.records <= 0.75 * records:
        return made
    phases = tuple(replace(phase, expected_batch=phase.expected_batch / 2) for phase in made.phases)
    halved = replace(made, phases=phases)
    vars(halved)["_certified"] = made.epsilon_spent()  # it does not depend on the divisor
    return halved


def placebo_plan(made: Plan) -> Plan:
    """DP-SGD for the same groups, with all records at the strictest budget: a difference between groups is chance.

    Steps and expected batch are those of `made`, and the clip norm is the mean of its clip norms over records.
    """
    rows = [np.repeat(column, made.counts) for column in (made.epsilons, made.delta)]
    clip_norm = float(np.average([phase.clip_norm @ made.counts / made.records for phase in made.phases]))
    recipe = Recipe(steps=made.steps, batch_size=made.batch_size, clip_norm=clip_norm)
    uniform = plan(Budgets(rows[0], rows[1]), recipe, "uniform", made.accountant_fn, runs=made.runs)
    return replace(uniform, adjacency=made.adjacency)


def train_shadows(
    setting: ShadowSetting,
    shadows: int,
    store: Store | None = None,
    jobs: int | None = None,
    watch: Watch | None = None,
) -> Shadows:
    """Train all shadows that the store does not hold, and return the signals of all.

    jobs   number of processes; by default one per core
    watch  called with the number of shadows that are done
    """
    store, watch = store or NoStore(), watch or (lambda done: None)
    collected = _Collected(setting, shadows)
    missing = []
    for block in blocks_of(shadows, setting.block_size):
        arrays = store.load(block)
        if arrays is None:
            missing.append(block)
        else:
            collected.add(block, arrays)
    watch(collected.done)
    for block, arrays in _trained(setting, missing, jobs, lambda part: watch(collected.done + part)):
        store.save(block, arrays)
        collected.add(block, arrays)
        watch(collected.done)
    return collected.shadows()


class _Collected:
    """The arrays of all shadows, filled block by block."""

    def __init__(self, setting: ShadowSetting, shadows: int) -> None:
        shape = shadows, setting.records
        self.done = 0
        self._arrays: dict[str, npt.NDArray[Any]] = {
            "member": np.zeros(shape, np.bool_),
            **{name: np.zeros(shape, np.float32) for name in ("margin", "raw", "log_p")},
            "population": np.zeros((shadows, setting.population_size), np.float32),
            "accuracy": np.zeros(shadows),
            "member_accuracy": np.zeros(shadows),
        }

    def add(self, block: Block, arrays: Arrays) -> None:
        for name, array in self._arrays.items():
            array[block.first : block.end] = arrays[name]
        self.done += len(block)

    def shadows(self) -> Shadows:
        rest = dict(self._arrays)
        accuracy, member_accuracy = rest.pop("accuracy"), rest.pop("member_accuracy")
        return Shadows(Signals(**rest), accuracy, member_accuracy)


def _trained(
    setting: ShadowSetting, blocks: list[Block], jobs: int | None, watch: Watch
) -> Iterator[tuple[Block, Arrays]]:
    """The blocks, in any order, as they are finished."""
    jobs = min(jobs or (1 if setting.device.startswith("cuda") else cpu_count()), len(blocks))
    here = blocks if jobs <= 1 else blocks[:1] if setting.method == "stacked" else []
    for block in here:
        began = time.monotonic()
        yield block, _train_here(setting, block, watch)
        seconds = time.monotonic() - began
    rest = blocks[len(here) :]
    if here and seconds * len(rest) < WORTH_PROCESSES:
        for block in rest:
            yield block, _train_here(setting, block, watch)
    else:
        yield from _in_processes(setting, rest, jobs)


def _train_here(setting: ShadowSetting, block: Block, watch: Watch) -> Arrays:
    return train_block(setting, block, lambda part: watch(part * len(block)))


def _in_processes(setting: ShadowSetting, blocks: list[Block], jobs: int) -> Iterator[tuple[Block, Arrays]]:
    if not blocks:
        return
    try:
        # joblib shares large arrays by files. Only the owner can read this folder.
        with TemporaryDirectory(prefix="epsilons-", ignore_cleanup_errors=True) as folder:
            processes = Parallel(n_jobs=jobs, backend="loky", return_as="generator_unordered", temp_folder=folder)
            yield from processes(delayed(_numbered)(setting, block, os.getpid()) for block in blocks)
    except TerminatedWorkerError:
        raise ModelError(
            "A process that trained shadows was ended from outside; most often memory was short. Use fewer processes "
            "(jobs=, --jobs) and continue with resume."
        ) from None


def _numbered(setting: ShadowSetting, block: Block, parent: int) -> tuple[Block, Arrays]:
    _end_with(parent)
    return block, train_block(setting, block)


@cache
def _end_with(parent: int) -> None:
    """End this process when its parent ends. If the parent is killed, joblib leaves its processes waiting."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
