"""What `make_private` and `fit` take in place of plain values: records, the folder of a run, and randomness."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler, default_collate

from ..budgets.budgets import Budgets
from ..errors import DataError, InputError, RunError
from ..registry import Reservation
from .performance import Performance


@dataclass(frozen=True)
class Records:
    """Records, and how they are read: in place of a plain data set.

    data             a tuple of tensors or arrays, a data set, or a DataLoader: see `make_private`
    collate_fn       builds a batch from a map-style data set's records, as in DataLoader
    persons          (rows,) for budgets of persons: the id of each row's person, in data-set order; for budgets without
                     ids, the person's position in the budgets. Left out, the budgets' own rows count. A person is drawn
                     as a whole and contributes one clipped gradient, that of the mean of their losses; the loop still
                     gives one loss per row
    rows_per_person  number of rows that a drawn person contributes, at most; which rows changes from draw to draw
    views            number of times that each row is read in a draw, each time under another seed, so that random
                     augmentation differs; the gradient is that of the mean. Tensors are repeated as they are, for a
                     loop that augments by itself. The loop gives one loss per row and view

    >>> Records([0.5, 1.5], rows_per_person=2).views
    1
    """

    data: Any = field(repr=False)
    collate_fn: Callable[[list[Any]], Any] | None = None
    persons: Any = field(default=None, repr=False)
    rows_per_person: int = 1
    views: int = 1


@dataclass(frozen=True)
class RunFolder:
    """The folder of a run, and what is kept in it: in place of a plain path.

    path              a new folder for plan, ledger, metrics and key; None keeps the ledger in memory, not durable
    resume            resume the run in the folder, or begin it if there is none: same model, optimizer, data, plan
    checkpoint_every  updates between checkpoints; by default one about every five minutes, and at the end
    metadata          JSON values to keep beside the settings; "features" says what computed the inputs, in words
    reservation       the right to make this run's steps, from `Registry.reserve`, for budgets on accounts. The run is
                      tied to it before its first charge, and what it did not charge is given back at its end

    Raises RunError for what needs a path and has none.

    >>> RunFolder("runs/first", resume=True).checkpoint_every is None
    True
    """

    path: str | Path | None
    resume: bool = False
    checkpoint_every: int | None = None
    metadata: Mapping[str, Any] | None = None
    reservation: Reservation | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if self.resume and self.path is None:
            raise RunError("resume=True needs a path, the folder of the run to resume: RunFolder(path, resume=True).")
        if self.reservation is not None and self.path is None:
            raise RunError("reservation= needs a path: the ledger there is the evidence of what the run was charged.")

    @property
    def training(self) -> dict[str, Any]:
        """Settings of training that the key of a seed depends on."""
        return dict((self.metadata or {}).get("training") or {})


@dataclass(frozen=True)
class Randomness:
    """Where coins and noise come from, in place of a plain seed. By default the key is from the operating system.

    source  "chacha20", or "secure" (against attacks on the last bits of a value; noise takes four times as long)
    seed    makes the run repeatable, and gives no guarantee to a person who knows it. The key is a hash of the seed and
            of what is computed: plan, data, groups of the records, model and its initial values, optimizer and its
            settings, metadata["training"]
    index   distinguishes runs that are equal in all of these: each gets other coins and noise. The runs of one
            PlanFolder always do
    key     32 bytes, in place of a seed: coins and noise depend on nothing else. For tests, and for replays that need
            one key on two data sets. It gives no guarantee: in the difference of two sums with the same noise there is
            none

    Raises InputError for a seed and a key together, and for an index of a key.

    >>> Randomness.seeded(1, index=2).index
    2
    """

    source: str = "chacha20"
    seed: int | None = None
    index: int = 0
    key: bytes | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if self.seed is not None and self.key is not None:
            raise InputError("Got a seed and a key, and each of them determines the run's coins. Leave one out.")
        if self.index and self.key is not None:
            raise InputError("index= has no effect on an explicit key. Leave one out, or give every run another key.")

    @classmethod
    def secure(cls) -> Randomness:
        """Each value is half the sum of four, under a key from the operating system."""
        return cls("secure")

    @classmethod
    def with_key(cls, key: bytes) -> Randomness:
        """Under this key of 32 bytes. It gives no guarantee."""
        return cls(key=key)

    @classmethod
    def seeded(cls, seed: int, index: int = 0) -> Randomness:
        """Repeatable. It gives no guarantee to a person who knows the seed."""
        return cls(seed=seed, index=index)


def as_folder(run_dir: str | Path | RunFolder | None) -> RunFolder:
    return run_dir if isinstance(run_dir, RunFolder) else RunFolder(run_dir)


def as_randomness(seed: int | Randomness | None) -> Randomness:
    return seed if isinstance(seed, Randomness) else Randomness(seed=seed)


# -- A DataLoader in place of a data set: its data set, workers and collate function are used, and its sampler is not


def as_records(data: Any, performance: Performance | None = None) -> tuple[Records, Performance]:
    """Records and settings of speed, with what a DataLoader says of them, where the caller says nothing.

    Raises DataError for a loader that does more than to read every record once, in order or shuffled.
    """
    records, performance = data if isinstance(data, Records) else Records(data), performance or Performance()
    loader = records.data
    if not isinstance(loader, DataLoader):
        return records, performance
    _check_sampler(loader)
    if loader.worker_init_fn is not None:
        raise DataError(
            "The DataLoader has a worker_init_fn, which is not called here: generators are seeded for each record. "
            "Leave it out, and open files in the data set's __getitem__."
        )
    own = None if loader.collate_fn is default_collate else loader.collate_fn
    performance = replace(performance, num_workers=performance.num_workers or loader.num_workers)
    return replace(records, data=loader.dataset, collate_fn=records.collate_fn or own), performance


def draws_of(loader: DataLoader[Any], budgets: Budgets | None = None) -> int:
    """Draws of an epoch of someone else's loop: the loader's batches. Of persons: one for batch_size of them.

    The number of rows of persons, and with it the number of batches, is private; a plan is not. Raises InputError for
    budgets of persons and a loader without a batch size.
    """
    if budgets is None or budgets.unit == "record":
        return len(loader)
    if loader.batch_size is None:
        raise InputError(
            "Budgets of persons need a data loader with a batch_size: so many persons are expected in a draw."
        )
    return math.ceil(len(budgets) / loader.batch_size)


def _check_sampler(loader: DataLoader[Any]) -> None:
    """Refuse samplers that choose records: who is drawn, and how often, follows from the budgets."""
    sampler, batches = loader.sampler, loader.batch_sampler
    is_plain = type(sampler) is SequentialSampler or (
        type(sampler) is RandomSampler and not sampler.replacement and sampler.num_samples == len(loader.dataset)  # type: ignore[arg-type]
    )
    if not is_plain or (batches is not None and type(batches) is not BatchSampler):
        kind = type(sampler if batches is None or type(batches) is BatchSampler else batches).__name__
        raise DataError(
            f"The DataLoader draws with a {kind}. Each record is drawn here at the rate that follows from its budget, "
            "so a sampler would have no effect. Leave it out; for a part of the data use torch.utils.data.Subset."
        )
    if batches is None:
        raise DataError(
            "The DataLoader has batch_size=None, so its data set gives batches. Each record needs an index of its own: "
            "pass a data set of single records."
        )
