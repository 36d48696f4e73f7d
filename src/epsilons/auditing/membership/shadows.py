"""Shadow models: one plan for all of them, trained in blocks, on all cores.

The plan is never computed from a shadow's members. A finished block is kept in a store, so an interrupted attack
continues with the blocks that are missing.
"""

from __future__ import annotations

import copy
import os
import threading
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from ...budgets.budgets import Budgets
from ...core.mechanism import IntArray
from ...core.progress_line import Pace, can_rewrite, live_line, log
from ...core.threads import spread, workers
from ...draws.randomness import Randomness
from ...errors import EpsilonsWarning, InputError
from ...ledger.run_folder import versions
from ...planning import Plan, Recipe, plan
from ...planning.plan_numbers import SHARES
from ...training import Performance, Records, Training, fit
from ...training import values as training_values
from ...training.fitting.evaluation import Loss
from ...training.fitting.losses import MakeOptimizer
from ...training.validation import groups_of
from ..stacked import MemberDraws, train_stacked
from .attacks import BoolArray, Float32Array, Signals, read_signals

# -- One block of shadow models: who is in, how they are trained, and what is read off them
#
# A shadow is a function of (seed, its number): its coins, its key, and the common start. All arms of a comparison have
# the same coins and keys, so they can be compared shadow by shadow. A block is trained in one thread, so a repeated
# block has the same bits.
#
#     stacked  64 shadows as one batched program (auditing/stacked.py)
#     alone    one shadow by `fit`, on its members. A record that is out contributes nothing, and so does a record that
#              is not in the data set: the sums are the same
#
# To add a method: a function `(setting, block, member) -> Trained` and a line in METHODS.

#: Shadows that are trained at once. A block of another size has other rounding errors.
BLOCK_SIZES = {"stacked": 64, "alone": 1}

#: Records of which the signals are read at once: they are computed in 64 bits.
SLICE = 512

#: What is read off a block, by name; `as_arrays` lists the shapes.
Arrays = Mapping[str, npt.NDArray[Any]]

#: (records, …) inputs -> (models, records, classes)
Trained = Callable[[Tensor], Tensor]

#: Called with the part of a block that is done, between 0 and 1.
ShadowProgress = Callable[[float], None]


@dataclass(frozen=True, eq=False)
class ShadowSetting:
    """All that the shadows of one arm depend on.

    model            the common start; copies of it are trained
    optimizer        a function parameters -> optimizer
    loss             "cross_entropy", or a function (outputs, targets) -> (batch,)
    inputs, targets  (records, …) and (records,), the real records
    plan             the plan of every shadow
    budgets          of the records
    population       (inputs, targets) of records that no shadow is trained on, or None
    seed             of all coins and keys
    method           a name in METHODS
    performance      of shadows that are trained alone
    device           a torch device
    owner            (rows,) each row's person, ascending; None if each row is one record, or one person
    rows_per_person  number of rows that a drawn person contributes, at most
    """

    model: nn.Module
    optimizer: MakeOptimizer
    loss: str | Loss
    inputs: npt.NDArray[Any] = field(repr=False)
    targets: npt.NDArray[Any] = field(repr=False)
    plan: Plan
    budgets: Budgets
    population: tuple[npt.NDArray[Any], npt.NDArray[Any]] | None = field(repr=False)
    seed: int
    method: str
    performance: Performance
    device: str
    owner: IntArray | None = field(default=None, repr=False)
    rows_per_person: int = 1

    def __sizeof__(self) -> int:
        """Mostly that of the inputs. By it, dask sends the setting to a worker once, not with every block."""
        return object.__sizeof__(self) + self.inputs.nbytes

    @property
    def records(self) -> int:
        """How many records, or persons, have a coin."""
        return len(self.targets) if self.owner is None else len(self.budgets)

    @cached_property
    def scored(self) -> IntArray:
        """(scored,) the records, or the persons with rows: of others a model shows nothing."""
        return np.arange(self.records) if self.owner is None else np.unique(self.owner)

    def of_rows(self, included: BoolArray) -> BoolArray:
        """(rows,) which rows belong to these; included: (records,)"""
        return included if self.owner is None else included[self.owner]

    def of_persons(self, values: npt.NDArray[Any]) -> Float32Array:
        """(models, scored) the mean over the rows of each person; values: (models, rows)"""
        if self.owner is None:
            return values
        _, starts, counts = np.unique(self.owner, return_index=True, return_counts=True)
        means: Float32Array = (np.add.reduceat(values.astype(np.float64), starts, axis=1) / counts).astype(np.float32)
        return means

    @property
    def population_size(self) -> int:
        return 0 if self.population is None else len(self.population[1])

    @property
    def block_size(self) -> int:
        return BLOCK_SIZES[self.method]

    @cached_property
    def group(self) -> IntArray:
        """(records,) each record's group in the plan. Raises DataError if records, budgets and plan do not fit."""
        return groups_of(self.budgets, self.plan, self.records).astype(np.int64)

    def member(self, shadow: int) -> BoolArray:
        """(records,) an independent fair coin for each record."""
        coins = Randomness.fresh(self.seed).stream("membership", shadow).integers(self.records)
        return (coins >> np.uint64(63)).astype(np.bool_)

    def randomness(self, shadow: int) -> Randomness:
        """The draws and the noise of one shadow."""
        return Randomness.fresh(self.seed).bound_to(f"shadow {shadow}")


@dataclass(frozen=True)
class Block:
    """The shadows from `first` to `end` − 1."""

    first: int
    end: int

    def __len__(self) -> int:
        return self.end - self.first

    @property
    def shadows(self) -> range:
        return range(self.first, self.end)


def blocks_of(shadows: int, size: int) -> list[Block]:
    """All shadows in blocks of this size; the last block may be smaller.

    >>> [len(block) for block in blocks_of(150, 64)]
    [64, 64, 22]
    """
    return [Block(first, min(first + size, shadows)) for first in range(0, shadows, size)]


def train_block(setting: ShadowSetting, block: Block, progress: ShadowProgress | None = None) -> Arrays:
    """Train these shadows, and read the signals of all records off them."""
    member = np.stack([setting.member(shadow) for shadow in block.shadows])  # (models, records)
    with one_thread(), warnings.catch_warnings():
        warnings.simplefilter("ignore", EpsilonsWarning)  # they are about releases, and nothing is released here
        trained = METHODS[setting.method](setting, block, member, progress)
        return as_arrays(setting, member, trained)


@contextmanager
def one_thread() -> Iterator[None]:
    """Compute in one thread: sums in one order, and one core for each process."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


# -- methods -----------------------------------------------------------------------------------------------------------


def stacked(setting: ShadowSetting, block: Block, member: BoolArray, progress: ShadowProgress | None) -> Trained:
    """All shadows of the block as one batched program."""
    randomness = [setting.randomness(shadow) for shadow in block.shadows]
    models = train_stacked(
        setting.model,
        setting.optimizer,
        (as_tensor(setting.inputs), as_tensor(setting.targets)),
        MemberDraws(replace(setting.plan, unit="record"), setting.group, member, randomness),
        device=setting.device,
        progress=None if progress is None else lambda made: progress(made / setting.plan.steps),
    )
    return models.logits


def alone(setting: ShadowSetting, block: Block, member: BoolArray, progress: ShadowProgress | None) -> Trained:
    """One shadow by `fit`, on its members, with the ledger in memory."""
    [shadow], [included] = block.shadows, member
    model, plan, rows = copy.deepcopy(setting.model), any_counts(setting.plan), setting.of_rows(included)
    owner = np.arange(setting.records) if setting.owner is None else setting.owner
    persons = (np.cumsum(included) - 1)[owner[rows]] if plan.unit == "person" else None
    data = (setting.inputs[rows], setting.targets[rows])
    fit(
        model,
        Records(data, persons=persons, rows_per_person=setting.rows_per_person),
        plan,
        budgets=setting.budgets.subset(included),
        training=Training(loss=setting.loss, optimizer=setting.optimizer, device=setting.device, progress=False),
        performance=setting.performance,
        seed=training_values.Randomness.with_key(setting.randomness(shadow).key),
        callbacks=[] if progress is None else [lambda private: progress(private.updates / plan.steps)],
    )
    return lambda inputs: model(inputs.to(setting.device))[None]


def any_counts(plan: Plan) -> Plan:
    """The same table for any number of records in each group: a shadow's coins decide how many there are.

    Only plans with declared shares allow this. Rates, clip norms, weights, noise and divisors stay as they are.
    """
    if plan.adjacency == SHARES:
        return plan
    made = replace(plan, adjacency=SHARES)
    if "_certified" in vars(plan):  # the spend depends on the table and the deltas, and these are the same
        vars(made)["_certified"] = plan.epsilon_spent()
    return made


METHODS: Mapping[str, Callable[[ShadowSetting, Block, BoolArray, ShadowProgress | None], Trained]] = {
    "stacked": stacked,
    "alone": alone,
}


# -- signals -----------------------------------------------------------------------------------------------------------


@torch.no_grad()
def as_arrays(setting: ShadowSetting, member: BoolArray, trained: Trained) -> Arrays:
    """What an attacker reads off these models, beside their coins.

    member              (models, records), or those persons who have rows
    margin, raw, log_p  (models, records) float32; of a person the mean over their rows
    population          (models, population) log_p, float32
    accuracy            (models,) on the population; NaN without one
    member_accuracy     (models,) on the members
    """
    models = len(member)
    signals, right = _read(trained, setting.inputs, setting.targets, models)
    population, known = np.empty((models, 0), np.float32), np.full((models, 1), np.nan)
    if setting.population is not None:
        public, known = _read(trained, *setting.population, models)
        population = public["log_p"]
    return {
        "member": member[:, setting.scored],
        **{name: setting.of_persons(values) for name, values in signals.items()},
        "population": population,
        "accuracy": known.mean(axis=1),
        "member_accuracy": np.array(
            [hits[setting.of_rows(included)].mean() for hits, included in zip(right, member, strict=True)]
        ),
    }


def _read(
    trained: Trained, inputs: npt.NDArray[Any], targets: npt.NDArray[Any], models: int
) -> tuple[dict[str, npt.NDArray[Any]], npt.NDArray[Any]]:
    """({signal: (models, records)}, (models, records) right or wrong), a slice of records at a time."""
    signals = {name: np.empty((models, len(targets)), np.float32) for name in ("margin", "raw", "log_p")}
    right = np.empty((models, len(targets)), np.bool_)
    for start in range(0, len(targets), SLICE):
        here = slice(start, start + SLICE)
        logits, classes = trained(as_tensor(inputs[here])).cpu(), as_tensor(targets[here])
        for name, values in read_signals(logits, classes).items():
            signals[name][:, here] = values
        right[:, here] = (logits.argmax(-1) == classes).numpy()
    return signals, right


def as_tensor(array: npt.NDArray[Any]) -> Tensor:
    """The array as a tensor; a read-only array (shared by several processes) is copied."""
    return torch.from_numpy(np.require(array, requirements=["C", "W"]))


# -- Shadow models: one plan for all of them, trained in blocks, on all cores

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
    clip_norm = float(np.average([phase.clip_norm @ made.counts / made.records for phase in made.phases]))
    recipe = Recipe(steps=made.steps, batch_size=made.batch_size, clip_norm=clip_norm)
    uniform = plan(Budgets.of_groups(made.groups, made.unit), recipe, "uniform", made.accountant_fn, runs=made.runs)
    return replace(uniform, adjacency=made.adjacency)


def train_shadows(
    setting: ShadowSetting,
    shadows: int,
    store: Store | None = None,
    jobs: int | None = None,
    watch: Watch | None = None,
) -> Shadows:
    """Train all shadows that the store does not hold, and return the signals of all.

    jobs   number of processes; by default what joblib's active backend has, or one per core
    watch  called with the number of shadows that are done
    """
    watch = watch or (lambda done: None)
    blocks, finished = blocks_of(shadows, setting.block_size), dict[Block, dict[str, npt.NDArray[Any]]]()
    for block in blocks:
        arrays = None if store is None else store.load(block)
        if arrays is not None:
            finished[block] = dict(arrays)
    missing = [block for block in blocks if block not in finished]
    watch(_count(finished))
    for block, arrays in _trained(setting, missing, jobs, lambda part: watch(_count(finished) + part)):
        if store is not None:
            store.save(block, arrays)
        finished[block] = dict(arrays)
        watch(_count(finished))
    # A name at a time, so that one array at most is in memory twice.
    joined = {
        name: np.concatenate([finished[block].pop(name) for block in blocks]) for name in list(finished[blocks[0]])
    }
    accuracy, member_accuracy = joined.pop("accuracy"), joined.pop("member_accuracy")
    return Shadows(Signals(**joined), accuracy, member_accuracy)


def _count(blocks: Iterable[Block]) -> int:
    return sum(map(len, blocks))


def _trained(
    setting: ShadowSetting, blocks: list[Block], jobs: int | None, watch: Watch
) -> Iterator[tuple[Block, Arrays]]:
    """The blocks, in any order, as they are finished."""
    many, cluster = workers(jobs)
    many = many if cluster else min(1 if jobs is None and setting.device.startswith("cuda") else many, len(blocks))
    here = [] if cluster else blocks if many <= 1 else blocks[:1] if setting.method == "stacked" else []
    for block in here:
        began = time.monotonic()
        yield block, _train_here(setting, block, watch)
        seconds = time.monotonic() - began
    rest = blocks[len(here) :]
    if here and seconds * len(rest) < WORTH_PROCESSES:
        for block in rest:
            yield block, _train_here(setting, block, watch)
    else:
        yield from _elsewhere(setting, rest, many, cluster)


def _train_here(setting: ShadowSetting, block: Block, watch: Watch) -> Arrays:
    return train_block(setting, block, lambda part: watch(part * len(block)))


def _elsewhere(setting: ShadowSetting, blocks: list[Block], jobs: int, cluster: bool) -> Iterator[tuple[Block, Arrays]]:
    of_caller = versions() if cluster else os.getpid()
    return spread(_numbered, [(setting, block, of_caller) for block in blocks], jobs, cluster)


def _numbered(setting: ShadowSetting, block: Block, of_caller: int | dict[str, str]) -> tuple[Block, Arrays]:
    """of_caller: its process if it is on this machine, otherwise its versions, which a worker must share."""
    if isinstance(of_caller, int):
        _end_with(of_caller)
    elif other := [f"{name} {number}" for name, number in of_caller.items() if versions().get(name) != number]:
        raise InputError(f"A worker of the cluster lacks {', '.join(other)}: other versions give other bits.")
    return block, train_block(setting, block)


@cache
def _end_with(parent: int) -> None:
    """End this process when its parent ends. If the parent is killed, joblib leaves its processes waiting."""

    def watch() -> None:
        while parent in (os.getppid(), os.getpid()):  # its own where joblib may not start processes
            time.sleep(1)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


# -- Progress of the shadows on stderr: how many are trained, and the time left

COLUMNS = ("{task.fields[done]} of {task.total:,} trained", "<elapsed>", "passed,", "<remaining>", "left")


@contextmanager
def watched(shadows: int, what: str, shown: bool) -> Iterator[Watch]:
    """A function to call with the number of shadows that are done: a live line, or a line every so often."""
    pace = Pace(shadows)

    def line(done: float) -> None:
        if pace.is_due(done):
            left = "" if pace.left is None else f"  {pace.left} left"
            log(what, f"trained {int(done):,}/{shadows:,}{left}")

    if not shown:
        yield lambda done: None
    elif can_rewrite():
        with live_line([what, "<bar>", *COLUMNS], shadows, done="0") as update:
            yield lambda done: update(completed=done, done=f"{int(done):,}")
    else:
        yield line
