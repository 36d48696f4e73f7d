"""One block of shadow models: who is in, how they are trained, and what is read off them.

A shadow is a function of (seed, its number): its coins, its key, and the common start. All arms of a comparison have
the same coins and keys, so they can be compared shadow by shadow. A block is trained in one thread, so a repeated block
has the same bits.

    stacked  64 shadows as one batched program (training/stacked.py)
    alone    one shadow by `fit`, on its members. A record that is out contributes nothing, and so does a record that
             is not in the data set: the sums are the same

To add a method: a function `(setting, block, member) -> Trained` and a line in METHODS.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from ...budgets import Budgets
from ...errors import EpsilonsWarning
from ...mechanism import IntArray
from ...planning import Plan
from ...planning.plan_numbers import SHARES
from ...training import Performance, fit
from ...training.evaluation import Loss
from ...training.optimizers import MakeOptimizer
from ...training.randomness import Randomness
from ...training.stacked import train_stacked
from ...training.validation import groups_of
from .signals import BoolArray, read_signals

#: Shadows that are trained at once. A block of another size has other rounding errors.
BLOCK_SIZES = {"stacked": 64, "alone": 1}

#: Records of which the signals are read at once: they are computed in 64 bits.
SLICE = 512

#: What is read off a block, by name; `as_arrays` lists the shapes.
Arrays = Mapping[str, npt.NDArray[Any]]

#: (records, …) inputs -> (models, records, classes)
Trained = Callable[[Tensor], Tensor]

#: Called with the part of a block that is done, between 0 and 1.
Progress = Callable[[float], None]


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

    @property
    def records(self) -> int:
        return len(self.targets)

    @property
    def population_size(self) -> int:
        return 0 if self.population is None else len(self.population[1])

    @property
    def block_size(self) -> int:
        return BLOCK_SIZES[self.method]

    @cached_property
    def group(self) -> IntArray:
        """(records,) each record's group in the plan. Raises DataError if records, budgets and plan do not fit."""
        return groups_of(self.budgets, self.plan, self.records)

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


def train_block(setting: ShadowSetting, block: Block, progress: Progress | None = None) -> Arrays:
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


def stacked(setting: ShadowSetting, block: Block, member: BoolArray, progress: Progress | None) -> Trained:
    """All shadows of the block as one batched program."""
    models = train_stacked(
        setting.model,
        setting.optimizer,
        (as_tensor(setting.inputs), as_tensor(setting.targets)),
        setting.plan,
        group=setting.group,
        member=member,
        randomness=[setting.randomness(shadow) for shadow in block.shadows],
        device=setting.device,
        progress=None if progress is None else lambda made: progress(made / setting.plan.steps),
    )
    return models.logits


def alone(setting: ShadowSetting, block: Block, member: BoolArray, progress: Progress | None) -> Trained:
    """One shadow by `fit`, on its members, with the ledger in memory."""
    [shadow], [included] = block.shadows, member
    model, plan = copy.deepcopy(setting.model), any_counts(setting.plan)
    fit(
        model,
        (setting.inputs[included], setting.targets[included]),
        plan,
        budgets=setting.budgets.subset(included),
        loss=setting.loss,
        optimizer=setting.optimizer,
        device=setting.device,
        performance=setting.performance,
        key=setting.randomness(shadow).key,
        progress=False,
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


METHODS: Mapping[str, Callable[[ShadowSetting, Block, BoolArray, Progress | None], Trained]] = {
    "stacked": stacked,
    "alone": alone,
}


# -- signals -----------------------------------------------------------------------------------------------------------


@torch.no_grad()
def as_arrays(setting: ShadowSetting, member: BoolArray, trained: Trained) -> Arrays:
    """What an attacker reads off these models, beside their coins.

    member              (models, records)
    margin, raw, log_p  (models, records) float32
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
        "member": member,
        **signals,
        "population": population,
        "accuracy": known.mean(axis=1),
        "member_accuracy": np.array([hits[included].mean() for hits, included in zip(right, member, strict=True)]),
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
