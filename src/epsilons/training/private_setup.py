"""make_private: from a model, an optimizer, data and a plan to a Private, after all of them were checked.

`set_up` goes through the stages: check the inputs, check that all ranks have the same ones, bind a seed's key to them,
open the run's folder and ledger, begin.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .. import clipping
from ..budgets.budgets import Budgets
from ..core.checksums import hash_of
from ..core.modules import convolutions, is_divided, lay_out, lay_out_state
from ..draws import fingerprints
from ..draws import randomness as sources
from ..draws.fingerprints import as_text
from ..draws.persons_rows import Draws, check_size, persons_of
from ..ledger.plan_folder import PlanFolder, opened
from ..models import model_checks
from ..planning import Plan
from . import checkpoints, validation
from .datasets import Source, data_source, first_record
from .distributed import Ranks, check_alone
from .opening import Inputs, OpenRun, Request, open_run
from .performance import Decided, Performance, Trial
from .private import Private
from .validation import warn_if_classes_show_budgets
from .values import Randomness, RunFolder, as_folder, as_randomness, as_records


def make_private(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    data: Any,
    plan: Plan | PlanFolder,
    *,
    budgets: Budgets,
    run_dir: str | Path | RunFolder | None = None,
    seed: int | Randomness | None = None,
    performance: Performance | None = None,
) -> Private:
    """Make a training loop private; model and optimizer stay as they are.

    model, optimizer    any torch.nn.Module without layers that mix records, and any torch optimizer over its parameters
    data                a tuple of tensors or arrays, or a TensorDataset (fast); a DataFrame or a dict of arrays, read
                        row by row as batches {column: (batch, …)}; or any map-style data set (through a
                        DataLoader), or a DataLoader: its data set, collate_fn and number of workers are used, and
                        its batches are not. `Records` says more: persons, views, a collate function
    plan, budgets       the plan and the budgets that it was made for, one per record or person; both are verified
                        again. A plan for several runs needs its PlanFolder, in which this run claims a slot. With
                        `PlanFolder.for_subset`, data and budgets are some of the plan's records, such as a fold
    run_dir             a new folder for plan, ledger and key; None keeps the ledger in memory, not durable.
                        `RunFolder` says more: how to resume a run, checkpoints, metadata, a reservation
    seed                makes the run repeatable, and gives no guarantee to a person who knows it. `Randomness` says
                        more: a cipher, a key, equal runs with other coins
    performance         engine, physical batch size, workers and so on: see Performance

    Raises DataError if data, budgets and plan do not belong together, BudgetExceededError if the plan breaks a budget,
    UnsupportedLayerError for a model that mixes records, InputError for settings that are unknown or contradict each
    other, RunError if `run_dir` is not empty (with resume: holds another run), LedgerError if its ledger was altered,
    RankError if processes that train together disagree, or are in no process group.

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
    records, performance = as_records(data, performance)
    folder, coins = as_folder(run_dir), as_randomness(seed)
    return set_up(Request(model, optimizer, records, plan, plan_folder, budgets, folder, coins, performance))


def set_up(request: Request) -> Private:
    """The run that was asked for. Raises what make_private raises."""
    ranks = Ranks()
    check_alone(request.folder.path is not None)
    request = replace(request, model=ranks.unwrapped(request.model))
    run = None
    try:
        with ranks.collective("checking the inputs"):
            inputs = _check_inputs(request, ranks)
        if inputs.is_divided:
            from .sharded import Shards

            ranks.shards = Shards(request.model, inputs.parameters, ranks)
        if ranks.is_distributed:
            _check_agreement(request, inputs, ranks)
        run = OpenRun(inputs.randomness if request.randomness.seed is None else _key_of_seed(request, inputs, ranks))
        open_run(run, request, inputs, ranks)
        with ranks.collective("beginning"):
            return _begin(run, request, inputs, ranks)
    except BaseException as error:
        ranks.rewrap()
        if run is not None:
            run.abandon(error)
        raise


def _check_inputs(request: Request, ranks: Ranks) -> Inputs:
    """Everything that can be checked before a folder is opened."""
    model, plan, performance, records = request.model, request.plan, request.performance, request.records
    coins = request.randomness
    randomness = sources.Randomness.fresh(coins.seed, coins.source, coins.key)
    source = data_source(records.data, performance.num_workers, records.collate_fn)
    persons = persons_of(request.budgets, len(source), records.persons, records.rows_per_person, records.views)
    group = validation.groups_of(request.budgets, plan, persons.count, request.is_subset)
    plan.verify()
    divided = is_divided(model)
    model_checks.check_whole(model)
    model_checks.check_tensors(model)
    model_checks.check_layers(model)
    parameters = model_checks.check_optimizer(request.optimizer, model)
    engine = clipping.engine(performance.engine)
    if persons.most > 1:
        clipping.check_takes_persons(engine)
    if divided:
        from .sharded import check

        check(request, parameters, engine, ranks)
    decided = _decided(request, source, parameters, engine)
    decided.set_up_process()
    is_compared = request.folder.path is not None or ranks.is_distributed
    is_seeded = coins.seed is not None
    contents = source.fingerprint(whole=is_seeded) if is_compared or is_seeded else ""
    # A number of rows of persons is private, so it is no part of what was decided, which is in run.json.
    largest = max(decided.max_physical_batch, persons.most if performance.max_physical_batch == "auto" else 1)
    check_size(persons, largest)
    if ranks.is_main:
        validation.warn_if_rounding_is_not_covered(plan, largest, persons.most)
        warn_if_classes_show_budgets(records.data, request.budgets, persons, plan, request.has_classes)
    inputs = Inputs(source, decided, group, persons, randomness, parameters, engine, largest, contents, {}, divided)
    return replace(inputs, fingerprint=_fingerprint(request, inputs, ranks)) if is_compared else inputs


def _decided(request: Request, source: Source, parameters: Sequence[nn.Parameter], engine: clipping.Engine) -> Decided:
    """The settings of speed. The model is tried on zeros in the shape of the first record where they depend on it."""
    model, performance = request.model, request.performance
    trial = Trial.of(model, first_record(source)) if performance.needs_trial else Trial()
    expected = max(phase.expected_batch for phase in request.plan.phases) * request.records.views
    return performance.decided(model, parameters, engine, expected, trial, request.is_whole_loop)


def _fingerprint(request: Request, inputs: Inputs, ranks: Ranks) -> dict[str, Any]:
    """Everything that may change a sum though key and state are the same; compared on resuming."""
    return {
        "data": inputs.contents,
        "parameters": [f"{tuple(p.shape)} {p.dtype}" for p in inputs.parameters],
        "optimizer": f"{type(request.optimizer).__name__} {as_text(request.optimizer.defaults)}",
        "engine": _name_of(inputs.engine),
        "largest physical batch": inputs.largest,
        "settings": as_text(request.folder.training),
        **model_checks.machine(inputs.parameters[0].device, inputs.randomness.source),
        "channels_last": inputs.performance.channels_last,
        "ranks": ranks.size,
        "draws": Draws(request.plan, inputs.group, inputs.randomness).method,
        **inputs.persons.facts,
    }


def _name_of(engine: clipping.Engine) -> str:
    """Of one of the caller's, with its module: it may compute another sum than one of the same name."""
    kind = type(engine)
    return kind.__name__ if kind in clipping.ENGINES.values() else f"{kind.__module__}.{kind.__qualname__}"


def _check_agreement(request: Request, inputs: Inputs, ranks: Ranks) -> None:
    """Check that all ranks got the same inputs. Facts in bytes are compared and never shown."""
    randomness = inputs.randomness
    settings = [as_text({k: v for k, v in group.items() if k != "params"}) for group in request.optimizer.param_groups]
    facts: dict[str, Any] = {
        "the folder": str(request.folder.path),
        "resume": request.folder.resume,
        "randomness": randomness.label,
        "the number of records": len(inputs.source),
        "the plan": request.plan.digest.encode(),
        "the budgets": inputs.roster.encode(),
        "the model's values": hash_of(_whole(request, inputs)).encode(),
        "the optimizer's settings": "; ".join(settings),
        "the index of the randomness": request.randomness.index,
    }
    if randomness.seeded:
        facts["the key" if request.randomness.seed is None else "the seed"] = randomness.commitment.encode()
    secret = {"data": inputs.contents.encode(), "persons": str(inputs.persons.facts).encode()}
    ranks.check_agreement("checking the inputs", facts | inputs.fingerprint | secret)


def _whole(request: Request, inputs: Inputs) -> Iterable[Tensor]:
    """All that is trained, or that trained values follow from."""
    tensors = [*inputs.parameters, *request.model.parameters(), *request.model.buffers()]
    if not inputs.is_divided:
        return tensors
    from .sharded import whole

    return whole([*tensors, *checkpoints.tensors_in(request.optimizer.state_dict())])


def _key_of_seed(request: Request, inputs: Inputs, ranks: Ranks) -> sources.Randomness:
    """Randomness under a key that follows from the seed and from what is computed."""
    with ranks.reporting_errors():
        randomness = inputs.randomness.bound_to(f"{_computation(request, inputs)} {int(request.randomness.index)}")
    ranks.check_agreement("checking the inputs", {"the key": randomness.commitment.encode()})
    return randomness


def _computation(request: Request, inputs: Inputs) -> str:
    """A hash of what a seeded run computes, so that two runs that compute other sums have other noise.

    It depends on the plan's table, not on the strategy's name: with one budget level every strategy is plain DP-SGD to
    the bit. It does not depend on what changes a sum by rounding alone: performance, device and number of processes;
    nor on the folder. An engine of the caller may compute another sum, so its class counts. (Dropout draws its masks by
    physical batch and device.)
    """
    model, optimizer = request.model, request.optimizer
    names = {id(p): name for name, p in model.named_parameters()}
    settings = request.folder.training.items()
    parts = {
        "data": inputs.contents,
        "collate": request.records.collate_fn,
        "roster": inputs.roster,
        "table": [
            (p.steps, p.sample_rate, p.clip_norm, p.weight, float(p.noise_std), float(p.expected_batch))
            for p in request.plan.phases
        ],
        "model": model,
        "trained": [(names.get(id(p)), tuple(p.shape), str(p.dtype)) for p in inputs.parameters],
        "values": hash_of(_whole(request, inputs)),
        "optimizer": (type(optimizer), optimizer.state_dict()),
        **({} if type(inputs.engine) in clipping.ENGINES.values() else {"engine": _name_of(inputs.engine)}),
        "settings": sorted((name, fingerprints.of(value)) for name, value in settings if name != "device"),
        **inputs.persons.facts,
    }
    return fingerprints.of(parts)


def _begin(run: OpenRun, request: Request, inputs: Inputs, ranks: Ranks) -> Private:
    changed = convolutions(request.model) if inputs.performance.channels_last else []
    lay_out(changed, torch.channels_last)
    lay_out_state(request.optimizer)
    relaid = changed if request.performance.channels_last == "auto" else []
    private = Private(request, inputs, run, ranks, relaid)
    if run.is_resumed:
        private._resume(run.state)
    return private
