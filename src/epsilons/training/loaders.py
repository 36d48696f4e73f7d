"""A DataLoader in place of a data set: its data set, workers and collate function are used, and its sampler is not."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler, default_collate

from ..budgets import Budgets
from ..errors import DataError, InputError
from .performance import Performance

Collate = Callable[[list[Any]], Any]


def without_loader(
    dataset: Any, performance: Performance, collate_fn: Collate | None
) -> tuple[Any, Performance, Collate | None]:
    """(data set, performance, collate_fn): what a DataLoader says of them, where the caller says nothing.

    Raises DataError for a loader that does more than to read every record once, in order or shuffled.
    """
    if not isinstance(dataset, DataLoader):
        return dataset, performance, collate_fn
    _check_sampler(dataset)
    if dataset.worker_init_fn is not None:
        raise DataError(
            "The DataLoader has a worker_init_fn, which is not called here: generators are seeded for each record. "
            "Leave it out, and open files in the data set's __getitem__."
        )
    own = None if dataset.collate_fn is default_collate else dataset.collate_fn
    workers = performance.num_workers or dataset.num_workers
    return dataset.dataset, replace(performance, num_workers=workers), collate_fn or own


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
