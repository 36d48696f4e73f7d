"""make_private: from a model, an optimizer, data and a plan to a Private, after all of them were checked.

`set_up` goes through the stages: check the inputs, check that all ranks have the same ones, bind a seed's key to them,
open the run's folder and ledger, begin.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler, default_collate

from .. import clipping
from ..budgets.budgets import Budgets
from ..core.modules import convolutions, lay_out
from ..draws import fingerprints
from ..draws.fingerprints import as_text
from ..draws.persons_rows import Draws, check_size, persons_of
from ..draws.randomness import Randomness
from ..errors import DataError, InputError
from ..ledger.plan_folder import PlanFolder, opened
from ..models import model_checks
from ..planning import Plan
from ..registry import Reservation
from . import validation
from .datasets import Source, data_source, first_record
from .distributed import Ranks, hash_of
from .opening import OpenRun, open_run
from .parts import Inputs, Parts, Position, Request
from .performance import Decided, Performance, Trial
from .private import Private
from .validation import warn_if_classes_show_budgets

# -- A DataLoader in place of a data set: its data set, workers and collate function are used, and its sampler is
# not

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


# -- make_private: from a model, an optimizer, data and a plan to a Private, after all of them were checked


def make_private(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    dataset: Any,
    plan: Plan | PlanFolder,
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
    persons: Any = None,
    rows_per_person: int = 1,
    views: int = 1,
    reservation: Reservation | None = None,
) -> Private:
    """Make a training loop private; model and optimizer stay as they are.

    model, optimizer    any torch.nn.Module without layers that mix records, and any torch optimizer over its parameters
    dataset             a tuple of tensors or arrays, or a TensorDataset (fast); a DataFrame or a dict of arrays, read
                        row by row as batches {column: (batch, …)}; or any map-style data set (through a
                        DataLoader), or a DataLoader: its data set, collate_fn and number of workers are used, and
                        its batches are not
    plan, budgets       the plan and the budgets that it was made for, one per record or person; both are verified
                        again. A plan for several runs needs its PlanFolder, in which this run claims a slot. With
                        `PlanFolder.for_subset`, data and budgets are some of the plan's records, such as a fold
    run_dir             a new folder for plan, ledger, metrics and key; None keeps the ledger in memory, not durable
    performance         engine, physical batch size, workers and so on: see Performance
    seed                makes the run repeatable, and gives no guarantee to a person who knows it. The key is a hash of
                        the seed and of what is computed: plan, data, groups of the records, model and its initial
                        values, optimizer and its settings, metadata["training"]
    run_index           distinguishes runs that are equal in all of these: each gets other coins and noise. The runs of
                        one PlanFolder always do
    key                 32 bytes, in place of a seed: coins and noise depend on nothing else. For tests, and for replays
                        that need one key on two data sets. It gives no guarantee: in the difference of two sums with
                        the same noise there is none
    randomness          "philox", or "secure" (a cipher; needs the extra `secure`)
    resume              resume the run in `run_dir`, or begin it if there is none: same model, optimizer, data, plan
    checkpoint_every    updates between checkpoints in `run_dir`; by default one about every five minutes, and at the
                        end
    collate_fn          builds a batch from a map-style data set's records, as in DataLoader
    metadata            JSON values to keep beside the settings; "features" says what computed the inputs, in words
    persons             (rows,) for budgets of persons: the id of each row's person, in data-set order; for budgets
                        without ids, the person's position in the budgets. Left out, the budgets' own rows count. A
                        person is drawn as a whole and contributes one clipped gradient, that of the mean of their
                        losses; the loop still gives one loss per row
    rows_per_person     number of rows that a drawn person contributes, at most; which rows changes from draw to draw
    views               number of times that each row is read in a draw, each time under another seed, so that random
                        augmentation differs; the gradient is that of the mean. Tensors are repeated as they are, for a
                        loop that augments by itself. The loop gives one loss per row and view
    reservation         the right to make this run's steps, from `Registry.reserve`, for budgets on accounts. The run is
                        tied to it before its first charge, and what it did not charge is given back at its end

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
    plan, plan_folder = opened(plan)
    performance = performance or Performance()
    dataset, performance, collate_fn = without_loader(dataset, performance, collate_fn)
    request = Request(
        model=model,
        optimizer=optimizer,
        dataset=dataset,
        plan=plan,
        plan_folder=plan_folder,
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
        persons=persons,
        rows_per_person=rows_per_person,
        views=views,
        reservation=reservation,
    )
    return set_up(request)


def set_up(request: Request) -> Private:
    """The run that was asked for. Raises what make_private raises."""
    ranks = Ranks()
    with ranks.collective("checking the inputs"):
        inputs = _check_inputs(request, ranks)
    if ranks.is_distributed:
        _check_agreement(request, inputs, ranks)
    run = OpenRun(inputs.randomness if request.seed is None else _key_of_seed(request, inputs, ranks))
    try:
        open_run(run, request, inputs, ranks)
        with ranks.collective("beginning"):
            return _begin(run, request, inputs, ranks)
    except BaseException as error:
        run.abandon(error)
        raise


def _check_inputs(request: Request, ranks: Ranks) -> Inputs:
    """Everything that can be checked before a folder is opened."""
    model, plan, performance = request.model, request.plan, request.performance
    randomness = Randomness.fresh(request.seed, request.randomness, request.key)
    source = data_source(request.dataset, performance.num_workers, request.collate_fn)
    persons = persons_of(request.budgets, len(source), request.persons, request.rows_per_person, request.views)
    group = validation.groups_of(request.budgets, plan, persons.count, request.is_subset)
    plan.verify()
    model_checks.check_whole(model)
    model_checks.check_tensors(model)
    model_checks.check_layers(model)
    parameters = model_checks.check_optimizer(request.optimizer, model)
    engine = clipping.engine(performance.engine)
    if persons.most > 1:
        clipping.check_takes_persons(engine)
    decided = _decided(request, source, parameters, engine)
    decided.set_up_process()
    is_compared = request.run_dir is not None or ranks.is_distributed
    contents = source.fingerprint() if is_compared or request.seed is not None else ""
    # A number of rows of persons is private, so it is no part of what was decided, which is in run.json.
    largest = max(decided.max_physical_batch, persons.most if performance.max_physical_batch == "auto" else 1)
    check_size(persons, largest)
    if ranks.is_main:
        validation.warn_if_rounding_is_not_covered(plan, largest, persons.most)
        warn_if_classes_show_budgets(request.dataset, request.budgets, persons, plan, request.has_classes)
    inputs = Inputs(source, decided, group, persons, randomness, parameters, engine, largest, contents, {})
    return replace(inputs, fingerprint=_fingerprint(request, inputs, ranks)) if is_compared else inputs


def _decided(request: Request, source: Source, parameters: Sequence[nn.Parameter], engine: clipping.Engine) -> Decided:
    """The settings of speed. The model is tried on zeros in the shape of the first record where they depend on it."""
    model, performance = request.model, request.performance
    trial = Trial.of(model, first_record(source)) if performance.needs_trial else Trial()
    expected = max(phase.expected_batch for phase in request.plan.phases) * request.views
    return performance.decided(model, parameters, engine, expected, trial, request.is_whole_loop)


def _fingerprint(request: Request, inputs: Inputs, ranks: Ranks) -> dict[str, Any]:
    """Everything that may change a sum though key and state are the same; compared on resuming."""
    return {
        "data": inputs.contents,
        "parameters": [f"{tuple(p.shape)} {p.dtype}" for p in inputs.parameters],
        "optimizer": f"{type(request.optimizer).__name__} {as_text(request.optimizer.defaults)}",
        "engine": type(inputs.engine).__name__,
        "largest physical batch": inputs.largest,
        "settings": as_text(request.training),
        **model_checks.machine(inputs.parameters[0].device, inputs.randomness.source),
        "channels_last": inputs.performance.channels_last,
        "ranks": ranks.size,
        "draws": Draws(request.plan, inputs.group, inputs.randomness).method,
        **inputs.persons.facts,
    }


def _check_agreement(request: Request, inputs: Inputs, ranks: Ranks) -> None:
    """Check that all ranks got the same inputs. Facts in bytes are compared and never shown."""
    model, randomness = request.model, inputs.randomness
    settings = [as_text({k: v for k, v in group.items() if k != "params"}) for group in request.optimizer.param_groups]
    facts: dict[str, Any] = {
        "the folder": str(request.run_dir),
        "resume": request.resume,
        "randomness": randomness.label,
        "the number of records": len(inputs.source),
        "the plan": request.plan.digest.encode(),
        "the budgets": inputs.roster.encode(),
        "the model's values": hash_of([*inputs.parameters, *model.parameters(), *model.buffers()]).encode(),
        "the optimizer's settings": "; ".join(settings),
        "run_index": request.run_index,
    }
    if randomness.seeded:
        facts["the key" if request.seed is None else "the seed"] = randomness.commitment.encode()
    secret = {"data": inputs.contents.encode(), "persons": str(inputs.persons.facts).encode()}
    ranks.check_agreement("checking the inputs", facts | inputs.fingerprint | secret)


def _key_of_seed(request: Request, inputs: Inputs, ranks: Ranks) -> Randomness:
    """Randomness under a key that follows from the seed and from what is computed."""
    with ranks.reporting_errors():
        randomness = inputs.randomness.bound_to(f"{_computation(request, inputs)} {int(request.run_index)}")
    ranks.check_agreement("checking the inputs", {"the key": randomness.commitment.encode()})
    return randomness


def _computation(request: Request, inputs: Inputs) -> str:
    """A hash of what a seeded run computes, so that two runs that compute other sums have other noise.

    It depends on the plan's table, not on the strategy's name: with one budget level every strategy is plain DP-SGD to
    the bit. It does not depend on what changes a sum by rounding alone: performance, device and number of processes;
    nor on the folder. (Dropout draws its masks by physical batch and device.)
    """
    model, optimizer = request.model, request.optimizer
    names = {id(p): name for name, p in model.named_parameters()}
    settings = request.training.items()
    parts = {
        "data": inputs.contents,
        "collate": request.collate_fn,
        "roster": inputs.roster,
        "table": [
            (p.steps, p.sample_rate, p.clip_norm, p.weight, float(p.noise_std), float(p.expected_batch))
            for p in request.plan.phases
        ],
        "model": model,
        "trained": [(names.get(id(p)), tuple(p.shape), str(p.dtype)) for p in inputs.parameters],
        "values": hash_of([*inputs.parameters, *model.parameters(), *model.buffers()]),
        "optimizer": (type(optimizer), optimizer.state_dict()),
        "settings": sorted((name, fingerprints.of(value)) for name, value in settings if name != "device"),
        **inputs.persons.facts,
    }
    return fingerprints.of(parts)


def _begin(run: OpenRun, request: Request, inputs: Inputs, ranks: Ranks) -> Private:
    assert run.ledger is not None
    changed = convolutions(request.model) if inputs.performance.channels_last else []
    lay_out(changed, torch.channels_last)
    parts = Parts(
        model=request.model,
        optimizer=request.optimizer,
        parameters=inputs.parameters,
        plan=request.plan,
        group=inputs.group,
        persons=inputs.persons,
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
        relaid=changed if request.performance.channels_last == "auto" else (),
    )
    private = Private(parts, Draws(request.plan, inputs.group, run.randomness))
    if run.is_resumed:
        private._resume(run.state)
    return private
