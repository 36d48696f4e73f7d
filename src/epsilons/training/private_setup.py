"""make_private: from a model, an optimizer, data and a plan to a Private, after all of them were checked.

`set_up` goes through the stages: check the inputs, check that all ranks have the same ones, bind a seed's key to them,
open the run's folder and ledger, begin.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
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
from . import checkpoints, validation
from .distributed import Ranks
from .inputs import Inputs, Request, check_agreement, check_inputs, key_of_seed
from .loaders import without_loader
from .parts import Parts, Position
from .performance import Performance
from .private import Private
from .randomness import Randomness
from .sampling import Draws


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
    dataset             a tuple of tensors or arrays, or a TensorDataset (fast), or any map-style data set (through a
                        DataLoader), or a DataLoader: its data set, collate_fn and number of workers are used, and
                        its batches are not
    plan, budgets       the plan and the budgets that it was made for, one per record; both are verified again
    run_dir             a new folder for plan, ledger, metrics and key; None keeps the ledger in memory, not durable
    performance         engine, physical batch size, workers and so on: see Performance
    seed                makes the run repeatable, and gives no guarantee to a person who knows it. The key is a hash of
                        the seed and of what is computed: plan, data, groups of the records, model and its initial
                        values, optimizer and its settings, metadata["training"]
    run_index           distinguishes runs that are equal in all of these: each gets other coins and noise
    key                 32 bytes, in place of a seed: coins and noise depend on nothing else. For tests, and for replays
                        that need one key on two data sets. It gives no guarantee: in the difference of two sums with
                        the same noise there is none
    randomness          "philox", or "secure" (a cipher; needs the extra `secure`)
    resume              resume the run in `run_dir`, or begin it if there is none: same model, optimizer, data, plan
    checkpoint_every    updates between checkpoints in `run_dir`; by default one about every five minutes, and at the
                        end
    collate_fn          builds a batch from a map-style data set's records, as in DataLoader
    metadata            JSON values to keep beside the settings; "features" says what computed the inputs, in words

    Raises DataError if data, budgets and plan do not belong together, BudgetExceededError if the plan breaks a budget,
    UnsupportedLayerError for a model that mixes records, InputError for settings that are unknown or contradict each
    other, RunError if `run_dir` is not empty (with resume: holds another run), LedgerError if its ledger was altered,
    RankError if processes that train together disagree.

    >>> import torch, epsilons
    >>> budgets = epsilons.Budgets([1.0, 2.0] * 50, delta=1e-3)
    >>> plan = epsilons.plan(budgets, epsilons.Recipe(steps=2, batch_size=10, clip_norm=1.0), accountant="rdp")
    >>> model, data = torch.nn.Linear(3, 2), (torch.zeros(100, 3), torch.zeros(100, dtype=torch.long))
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> with epsilons.make_private(model, optimizer, data, plan, budgets=budgets) as private:
    ...     for x, y in private.batches:
    ...         private.backward(torch.nn.functional.cross_entropy(model(x), y, reduction="none"))
    ...         _ = private.step()
    >>> private.ledger.charged
    (2,)
    """
    performance = performance or Performance()
    dataset, performance, collate_fn = without_loader(dataset, performance, collate_fn)
    request = Request(
        model=model,
        optimizer=optimizer,
        dataset=dataset,
        plan=plan,
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
        metadata=metadata or {},
    )
    if request.performance.compile:
        raise InputError(
            "make_private cannot compile, because it does not see the loss. Performance(compile=True) is for fit and "
            "for configs; leave it out here."
        )
    return set_up(request)


@dataclass
class _OpenRun:
    """The folder and ledger of a run while it is set up.

    state   the checkpoint to resume from
    """

    randomness: Randomness
    is_resumed: bool = False
    state: dict[str, Any] | None = None
    ledger: Ledger | None = None
    folder: RunFolder | None = None
    lock: FolderLock | None = None

    def abandon(self, error: BaseException) -> None:
        """After an error before the first draw."""
        if self.folder and not self.is_resumed and isinstance(error, Exception):
            self.folder.destroy_key()  # nothing was released under it
        if self.lock:
            self.lock.release()


def set_up(request: Request) -> Private:
    """The run that was asked for. Raises what make_private raises."""
    ranks = Ranks()
    with ranks.collective("checking the inputs"):
        inputs = check_inputs(request, ranks)
    if ranks.is_distributed:
        check_agreement(request, inputs, ranks)
    run = _OpenRun(inputs.randomness if request.seed is None else key_of_seed(request, inputs, ranks))
    try:
        _open(run, request, inputs, ranks)
        with ranks.collective("beginning"):
            return _begin(run, request, inputs, ranks)
    except BaseException as error:
        run.abandon(error)
        raise


def _open(run: _OpenRun, request: Request, inputs: Inputs, ranks: Ranks) -> None:
    """Rank 0 opens folder and ledger; the other ranks get a mirror of the ledger."""
    with ranks.collective("opening the run"):
        if ranks.is_main and request.run_dir is not None:
            _open_folder(run, request.run_dir, request, inputs)
        elif ranks.is_main:
            run.ledger = Ledger(request.plan, key=run.randomness.commitment)
    shared = run.randomness, run.is_resumed, run.state, run.ledger.mirror() if run.ledger else None
    run.randomness, run.is_resumed, run.state, mirror = ranks.broadcast(shared)
    run.ledger = run.ledger or mirror


def _open_folder(run: _OpenRun, run_dir: str | Path, request: Request, inputs: Inputs) -> None:
    plan = request.plan
    settings: dict[str, Any] = {
        **(request.metadata or {}),  # first, so that no entry replaces a setting of the run
        "performance": request.performance.as_settings(inputs.engine),
        "randomness": run.randomness.label,
        "roster": inputs.roster,
        "guarantee": plan.guarantee_of_run(run.randomness.label, validation.stated_features(request.metadata)),
    }
    run.lock = RunFolder(Path(run_dir)).lock()  # before anything in it is read
    run.is_resumed = request.resume and RunFolder(Path(run_dir)).has_begun
    if run.is_resumed:
        folder = run.folder = _reopened(run_dir, plan, settings)
        ledger = run.ledger = Ledger.resume(plan, folder.ledger)
        run.state = checkpoints.latest(folder.checkpoints)
        ledger.check(folder.read_settings(), folder.settings)
        # No key if it was lost, or if this folder is a copy.
        key = folder.read_key() if folder.key_file() == ledger.key_file else None
        run.randomness = run.randomness.renewed(ledger.epoch) if key is None else replace(run.randomness, key=key)
    else:
        folder = run.folder = RunFolder.create(run_dir, plan, settings)
        folder.write_key(run.randomness.key)  # before the ledger, which records the key's file
        key_file = folder.key_file()
        run.ledger = Ledger(plan, folder.ledger, run.randomness.commitment, settings=settings, key_file=key_file)


def _reopened(run_dir: str | Path, plan: Plan, settings: Mapping[str, Any]) -> RunFolder:
    """The folder of a resumed run. Raises DataError if the budgets, RunError if the randomness is another one."""
    folder = RunFolder.reopen(run_dir, plan)
    before = folder.read_settings()
    if before.get("roster") != settings["roster"]:
        raise DataError(
            f"The budgets belong to other records than when the run in {run_dir} began: a record would be charged at "
            "one budget and trained at another. Use the same budgets, in the same order."
        )
    if before.get("randomness") != settings["randomness"]:
        raise RunError(
            f"The run in {run_dir} began with randomness {before.get('randomness')!r}, which its guarantee states, got "
            f"{settings['randomness']!r}. Use the same, with the same seed if there was one."
        )
    return folder


def _begin(run: _OpenRun, request: Request, inputs: Inputs, ranks: Ranks) -> Private:
    assert run.ledger is not None
    parts = Parts(
        model=request.model,
        optimizer=request.optimizer,
        parameters=inputs.parameters,
        plan=request.plan,
        group=inputs.group,
        source=inputs.source,
        engine=inputs.engine,
        largest=inputs.largest,
        ledger=run.ledger,
        position=Position(request.plan, run.ledger),
        ranks=ranks,
        fingerprint=inputs.fingerprint,
        folder=run.folder,
        lock=run.lock,
        checkpoint_every=request.checkpoint_every,
        loss=request.loss,
    )
    private = Private(parts, Draws(request.plan, inputs.group, run.randomness))
    if run.is_resumed:
        private._resume(run.state)
    return private
