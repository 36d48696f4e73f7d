"""make_private: from a model, an optimizer, data and a plan to a Private, everything checked at the door."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..budgets import Budgets
from ..errors import DataError, InputError, RunError
from ..ledger import Ledger
from ..locks import FolderLock
from ..planning import Plan
from ..run_folder import RunFolder
from . import checkpoints, clipping, fingerprints, validation
from .clipping import Engine
from .datasets import data_source
from .distributed import Ranks, hash_of
from .performance import Performance
from .private import Private
from .randomness import Randomness
from .sampling import Draws

#: Chunks are cut so that per-record gradients of one chunk, as far as an engine may write them out, stay near this many
#: values, unless told otherwise: 64 MB are gone through in a cache's time, and larger chunks were no faster.
VALUES_PER_CHUNK = 2**24
SMALLEST_CHUNK, LARGEST_CHUNK = 16, 256


def default_physical_batch(model: nn.Module, parameters: Sequence[nn.Parameter]) -> int:
    """How many records are computed at once by default. Of tables that one lookup uses only rows that occur count."""
    uses = Counter(id(p) for m in model.modules() for p in m.parameters(recurse=False))
    tables = {
        id(m.weight)
        for m in model.modules()
        if isinstance(m, nn.Embedding | nn.EmbeddingBag) and uses[id(m.weight)] == 1
    }
    size = sum(p.numel() for p in parameters if id(p) not in tables)
    return max(SMALLEST_CHUNK, min(LARGEST_CHUNK, VALUES_PER_CHUNK // max(size, 1)))


def make_private(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    dataset: Any,
    plan: Plan,
    *,
    budgets: Budgets,
    run_dir: str | Path | None = None,
    performance: Performance | None = None,
    seed: int | None = None,
    run_index: int = 0,
    key: bytes | None = None,
    randomness: str = "philox",
    resume: bool = False,
    checkpoint_every: int | None = None,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    metadata: Mapping[str, Any] | None = None,
) -> Private:
    """Make a training loop private; model and optimizer stay as they are.

    model, optimizer    any torch.nn.Module without layers that mix records, and any torch optimizer over its parameters
    dataset             a tuple of tensors or arrays, or TensorDataset (fast), or any map-style data set (through a
                        DataLoader)
    plan, budgets       what may be done, and whose record is in which group; verified again here
    run_dir             a new folder for plan, ledger, metrics and key; None keeps the ledger in memory, not durable
    performance         engine, physical batch size, workers and so on: see Performance; no effect on privacy
    seed                makes the run repeatable, and gives no guarantee towards anyone who knows it. The key follows
                        from the seed and from what is computed: plan, data, who is in which group, model and its first
                        values, optimizer and its settings, metadata["training"]
    run_index           which of several runs that are alike in all of these: others have other coins and noise
    key                 32 bytes, in place of a seed: coins and noise follow from it alone, whatever is computed. For
                        tests and replays that need one key on two data sets. It gives no guarantee: over two different
                        sums the shared noise cancels
    randomness          "philox", or "secure" (a cipher; needs the extra `secure`)
    resume              take up the run in `out` again, or begin it if there is none: same model, optimizer, data, plan
    checkpoint_every    updates between checkpoints in `out`; by default one about every five minutes, and at the end
    collate_fn          how a map-style data set's records become a batch, as in DataLoader
    metadata            JSON values to keep in the run's folder, beside its settings

    Raises DataError if data, budgets and plan do not belong together, BudgetExceededError if the plan breaks a
    budget, UnsupportedLayerError for a model that mixes records, RunError if `out` holds anything already (with
    resume: holds another run), LedgerError if its ledger was altered, RankError if processes that train together
    disagree.
    """
    performance = performance or Performance()
    if performance.compile:
        raise InputError(
            "make_private cannot compile, because it does not see the loss. Performance(compile=True) is for fit and "
            "for configs; leave it out here."
        )
    return set_up(
        model,
        optimizer,
        dataset,
        plan,
        budgets=budgets,
        run_dir=run_dir,
        performance=performance,
        seed=seed,
        run_index=run_index,
        key=key,
        randomness=randomness,
        resume=resume,
        checkpoint_every=checkpoint_every,
        collate_fn=collate_fn,
        metadata=metadata,
    )


def set_up(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    dataset: Any,
    plan: Plan,
    *,
    budgets: Budgets,
    run_dir: str | Path | None,
    performance: Performance,
    seed: int | None,
    run_index: int,
    key: bytes | None,
    randomness: str,
    resume: bool,
    checkpoint_every: int | None,
    metadata: Mapping[str, Any] | None,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    loss: clipping.BatchLoss | None = None,
) -> Private:
    """As `make_private`. loss: (model, batch) -> (batch,) losses, where performance.compile asks to compile them."""
    if resume and run_dir is None:
        raise RunError("resume=True needs run_dir=, the folder of the run to take up again.")
    if run_index and key is not None:
        raise InputError("run_index= has no effect on an explicit key=. Leave one out, or give every run its own key.")
    ranks = Ranks()
    with ranks.collective("at the door"):
        source = Randomness.fresh(seed, randomness, key)
        data = data_source(dataset, performance.num_workers, collate_fn)
        group = validation.groups_of(budgets, plan, len(data))
        plan.verify()
        validation.check_whole(model)
        validation.check_layers(model)
        trained = validation.check_optimizer(optimizer, model)
        chosen = clipping.engine(performance.engine)
        if performance.compile:
            if not isinstance(chosen, clipping.Ghost):
                raise InputError(
                    f"compile=True records the engine ghost, got engine={performance.engine!r}. Leave one of them out."
                )
            clipping.check_compiler(trained[0].device)
        performance.apply(model)
        largest = performance.max_physical_batch or default_physical_batch(model, trained)
        roster = hashlib.blake2b(group.tobytes(), digest_size=16).hexdigest()
        settings_of_training = dict((metadata or {}).get("training") or {})
        contents = data.fingerprint() if run_dir is not None or ranks.is_distributed or seed is not None else ""
        fingerprint: dict[str, Any] = {}  # alone and in memory there is nothing to compare it with
        if run_dir is not None or ranks.is_distributed:
            fingerprint = _described(contents, trained, optimizer, chosen, largest, settings_of_training) | {
                "compile": performance.compile,
                "channels_last": performance.channels_last,
                "ranks": ranks.size,
                "draws": Draws(plan, group, source).method,
            }
    if ranks.is_distributed:
        start = {"the folder": str(run_dir), "resume": resume, "randomness": source.label}
        start |= {"the number of records": len(data), "the plan": plan.digest.encode(), "the budgets": roster.encode()}
        start |= {"the key" if seed is None else "the seed": source.commitment.encode()} if source.seeded else {}
        start |= {"the model's values": hash_of([*trained, *model.parameters(), *model.buffers()]).encode()}
        start |= {"the optimizer's settings": "; ".join(_of_groups(optimizer)), "run_index": run_index}
        ranks.check_agreement("at the door", start | fingerprint | {"data": fingerprint["data"].encode()})
    if seed is not None:
        with ranks.reporting_errors():
            run = _computed(contents, collate_fn, roster, plan, model, trained, optimizer, settings_of_training)
            source = source.bound_to(f"{run} {int(run_index)}")
        ranks.check_agreement("at the door", {"the key": source.commitment.encode()})
    folder: RunFolder | None = None
    ledger: Ledger | None = None
    settings: dict[str, Any] | None = None
    lock: FolderLock | None = None
    going_on, state = False, None
    try:
        with ranks.collective("opening the run"):
            if ranks.is_main and run_dir is not None:
                settings = {
                    **(metadata or {}),  # first: nothing in them stands for what the run is
                    "performance": performance.as_settings(chosen),
                    "randomness": source.label,
                    "roster": roster,
                    "guarantee": plan.guarantee_of_run(source.label),
                }
                lock = RunFolder(Path(run_dir)).lock()  # before anything there is looked at
                going_on = resume and RunFolder(Path(run_dir)).has_begun
                folder = _reopened(run_dir, plan, settings) if going_on else RunFolder.create(run_dir, plan, settings)
            if folder and going_on:
                ledger, state = Ledger.resume(plan, folder.ledger), checkpoints.latest(folder.checkpoints)
                ledger.check(folder.read_settings(), folder.settings)
                key = folder.read_key() if folder.key_file() == ledger.key_file else None  # None: lost, or a copy's
                source = source.renewed(ledger.epoch) if key is None else replace(source, key=key)
            elif folder:
                folder.write_key(source.key)  # before its ledger, which notes where it is
                ledger = Ledger(plan, folder.ledger, source.commitment, settings=settings, key_file=folder.key_file())
            elif ranks.is_main:
                ledger = Ledger(plan, key=source.commitment)
        source, going_on, state, mirror = ranks.broadcast(
            (source, going_on, state, ledger.mirror() if ledger else None)
        )
        ledger = ledger or mirror
        assert ledger is not None  # the first rank's own, the others' mirror of it
        with ranks.collective("beginning"):
            private = Private(
                model,
                optimizer,
                plan,
                Draws(plan, group, source),
                data,
                chosen,
                ledger,
                ranks,
                largest,
                fingerprint,
                folder,
                checkpoint_every,
                loss,
                lock,
            )
            if going_on:
                private._resume(state)
    except BaseException as error:
        if folder and not going_on and isinstance(error, Exception):
            folder.destroy_key()  # nothing was released under it
        if lock:
            lock.release()
        raise
    return private


def _reopened(run_dir: str | Path, plan: Plan, settings: Mapping[str, Any]) -> RunFolder:
    """The folder of a run that is taken up again, if the people in it and their budgets are the same."""
    folder = RunFolder.reopen(run_dir, plan)
    before = folder.read_settings()
    if before.get("roster") != settings["roster"]:
        raise DataError(
            f"The budgets are not dealt to the records as when the run in {run_dir} began: someone would be charged at "
            "one budget and trained at another. Use the same budgets, in the same order."
        )
    if before.get("randomness") != settings["randomness"]:
        raise RunError(
            f"The run in {run_dir} began with randomness {before.get('randomness')!r}, and its guarantee says so; "
            f"{settings['randomness']!r} arrived. Use the same, with the same seed if there was one."
        )
    return folder


def _computed(
    contents: str,
    collate: Callable[[list[Any]], Any] | None,
    roster: str,
    plan: Plan,
    model: nn.Module,
    trained: Sequence[nn.Parameter],
    optimizer: torch.optim.Optimizer,
    training: Mapping[str, Any],
) -> str:
    """A name for what a seeded run computes, so that two runs that compute other sums have other noise.

    By the plan's table, not by the strategy's name: with one budget level every strategy is plain DP-SGD to the bit.
    Left out is what moves a sum by rounding alone: engine, size of physical batches, compiling, tuning, workers, device
    and number of processes; and the folder. (Dropout draws its masks by physical batch and device.)
    """
    names = {id(p): name for name, p in model.named_parameters()}
    parts = {
        "data": contents,
        "collate": collate,
        "roster": roster,
        "table": [
            (p.steps, p.sample_rate, p.clip_norm, p.weight, float(p.noise_std), float(p.expected_batch))
            for p in plan.phases
        ],
        "model": model,
        "trained": [(names.get(id(p)), tuple(p.shape), str(p.dtype)) for p in trained],
        "values": hash_of([*trained, *model.parameters(), *model.buffers()]),
        "optimizer": (type(optimizer), optimizer.state_dict()),
        "settings": sorted((name, fingerprints.of(value)) for name, value in training.items() if name != "device"),
    }
    return fingerprints.of(parts)


def _described(
    contents: str,
    trained: Sequence[nn.Parameter],
    optimizer: torch.optim.Optimizer,
    engine: Engine,
    largest: int,
    training: Mapping[str, Any],
) -> dict[str, Any]:
    """Whatever may change a sum though key and state are the same; it is compared when a run is taken up again."""
    return {
        "data": contents,
        "parameters": [f"{tuple(p.shape)} {p.dtype}" for p in trained],
        "optimizer": f"{type(optimizer).__name__} {_plain(optimizer.defaults)}",
        "engine": type(engine).__name__,
        "largest physical batch": largest,
        "settings": _plain(training),
        **validation.machine(trained[0].device),
    }


def _of_groups(optimizer: torch.optim.Optimizer) -> list[str]:
    """What an optimizer does with each of its groups of parameters, now."""
    return [_plain({k: v for k, v in group.items() if k != "params"}) for group in optimizer.param_groups]


def _plain(values: Mapping[str, Any]) -> str:
    """Settings as a text that is the same for the same settings, in this process and the next."""
    return ", ".join(f"{key}={value}" for key, value in sorted(values.items()))
