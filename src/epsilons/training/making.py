"""make_private: from a model, an optimizer, data and a plan to a Private, everything checked at the door."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..budgets import Budgets
from ..errors import DataError, RunError
from ..ledger import Ledger
from ..planning import Plan
from ..runs import RunFolder
from . import checks, clipping
from .clipping import Engine
from .private import Private
from .randomness import Randomness
from .records import records
from .sampling import Draws


def make_private(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    dataset: Any,
    plan: Plan,
    *,
    budgets: Budgets,
    out: str | Path | None = None,
    engine: str | Engine = "auto",
    max_physical_batch: int | None = None,
    seed: int | None = None,
    randomness: str = "philox",
    resume: bool = False,
    workers: int = 0,
    collate_fn: Callable[[list[Any]], Any] | None = None,
) -> Private:
    """Make a training loop private; model and optimizer stay as they are.

    model, optimizer    any torch.nn.Module without layers that mix records, and any torch optimizer over its parameters
    dataset             a tuple of tensors or TensorDataset (fast), or any map-style data set (through a DataLoader)
    plan, budgets       what may be done, and whose record is in which group; verified again here
    out                 a new folder for plan, ledger, metrics and key; None keeps the ledger in memory, not durable
    engine              "auto", "loop" (the definition), "vmap", "ghost", or an object that meets clipping.Engine
    max_physical_batch  largest chunk computed at once; no effect on privacy or, but for rounding, on the result
    seed                makes the run repeatable, and gives no guarantee towards anyone who knows it; two runs with one
                        seed share coins and noise, so never release both
    randomness          "philox", or "secure" (a cipher; needs the extra `secure`)
    workers, collate_fn for map-style data sets, as in torch.utils.data.DataLoader

    Raises DataError if data, budgets and plan do not belong together, Overspend if the plan breaks a budget,
    UnsupportedLayer for a model that mixes records, RunError if `out` holds anything already.
    """
    if resume:
        raise RunError("Runs cannot be resumed yet: checkpoints are not built. Start a new run in a new folder.")
    if max_physical_batch is not None and max_physical_batch < 1:
        raise DataError(f"max_physical_batch must be at least 1; {max_physical_batch} arrived.")
    source = Randomness.fresh(seed, randomness)
    data = records(dataset, source, workers, collate_fn)
    group = checks.groups_of(budgets, plan, len(data))
    plan.verify()
    checks.check_layers(model)
    checks.check_optimizer(optimizer, model)
    chosen = clipping.engine(engine)
    checks.check_alone()
    folder = None
    if out is not None:
        settings = {
            "engine": type(chosen).__name__.lower(),
            "randomness": source.label,
            "max_physical_batch": max_physical_batch,
            "guarantee": plan.guarantee_of_run(source.label),
        }
        folder = RunFolder.create(out, plan, settings)
    ledger = Ledger(plan, folder.ledger if folder else None, key=source.commitment)
    draws = Draws(plan, group, source)
    private = Private(model, optimizer, plan, draws, data, chosen, ledger, folder, max_physical_batch)
    if folder:
        folder.write_key(source.key)  # last, so that nothing that fails above leaves a key behind
    return private
