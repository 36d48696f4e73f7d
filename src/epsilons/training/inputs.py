"""The inputs of make_private: what was asked for, checked, compared between ranks, and what a seed's key depends on."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from ..budgets import Budgets
from ..errors import InputError, RunError
from ..planning import Plan
from . import clipping, fingerprints, model_checks, validation
from .class_budgets import warn_if_classes_show_budgets
from .clipping import Engine
from .datasets import Source, data_source
from .distributed import Ranks, hash_of
from .fingerprints import as_text
from .performance import Performance, default_physical_batch
from .randomness import Randomness
from .sampling import Draws


@dataclass(frozen=True)
class Request:
    """The arguments of make_private; loss: (model, batch) -> (batch,), to compile; has_classes: None if unknown."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    dataset: Any
    plan: Plan
    budgets: Budgets
    performance: Performance
    run_dir: str | Path | None = None
    seed: int | None = None
    run_index: int = 0
    key: bytes | None = None
    randomness: str = "philox"
    resume: bool = False
    checkpoint_every: int | None = None
    collate_fn: Callable[[list[Any]], Any] | None = None
    metadata: Mapping[str, Any] | None = None
    loss: clipping.BatchLoss | None = None
    has_classes: bool | None = None

    def __post_init__(self) -> None:
        if self.resume and self.run_dir is None:
            raise RunError("resume=True needs run_dir=, the folder of the run to resume.")
        if self.run_index and self.key is not None:
            raise InputError(
                "run_index= has no effect on an explicit key=. Leave one out, or give every run another key."
            )

    @property
    def training(self) -> dict[str, Any]:
        """Settings of training that the key of a seed depends on."""
        return dict((self.metadata or {}).get("training") or {})


@dataclass(frozen=True)
class Inputs:
    """What is known once the inputs were checked.

    group         (records,) each record's group in the plan
    largest       number of records in a physical batch, at most
    contents      fingerprint of the data; "" if nothing is compared with it
    fingerprint   everything that may change a sum though key and state are the same
    """

    source: Source
    group: npt.NDArray[np.int64]
    randomness: Randomness
    parameters: list[nn.Parameter]
    engine: Engine
    largest: int
    contents: str
    fingerprint: dict[str, Any]

    @property
    def roster(self) -> str:
        """A hash of the groups of all records."""
        return hashlib.blake2b(self.group.tobytes(), digest_size=16).hexdigest()


def check_inputs(request: Request, ranks: Ranks) -> Inputs:
    """Everything that can be checked before a folder is opened."""
    model, plan, performance = request.model, request.plan, request.performance
    randomness = Randomness.fresh(request.seed, request.randomness, request.key)
    source = data_source(request.dataset, performance.num_workers, request.collate_fn)
    group = validation.groups_of(request.budgets, plan, len(source))
    plan.verify()
    model_checks.check_whole(model)
    model_checks.check_layers(model)
    parameters = model_checks.check_optimizer(request.optimizer, model)
    engine = clipping.engine(performance.engine)
    if performance.compile:
        if not isinstance(engine, clipping.Ghost):
            raise InputError(
                f"compile=True records the engine ghost, got engine={performance.engine!r}. Leave one of them out."
            )
        clipping.check_compiler(parameters[0].device)
    performance.apply(model)
    is_compared = request.run_dir is not None or ranks.is_distributed
    contents = source.fingerprint() if is_compared or request.seed is not None else ""
    largest = performance.max_physical_batch or default_physical_batch(model, parameters)
    if ranks.is_main:
        validation.warn_if_rounding_is_not_covered(plan, largest)
        warn_if_classes_show_budgets(request.dataset, request.budgets, plan, request.has_classes)
    inputs = Inputs(source, group, randomness, parameters, engine, largest, contents, {})
    return replace(inputs, fingerprint=_fingerprint(request, inputs, ranks)) if is_compared else inputs


def _fingerprint(request: Request, inputs: Inputs, ranks: Ranks) -> dict[str, Any]:
    """Everything that may change a sum though key and state are the same; compared on resuming."""
    return {
        "data": inputs.contents,
        "parameters": [f"{tuple(p.shape)} {p.dtype}" for p in inputs.parameters],
        "optimizer": f"{type(request.optimizer).__name__} {as_text(request.optimizer.defaults)}",
        "engine": type(inputs.engine).__name__,
        "largest physical batch": inputs.largest,
        "settings": as_text(request.training),
        **model_checks.machine(inputs.parameters[0].device),
        "compile": request.performance.compile,
        "channels_last": request.performance.channels_last,
        "ranks": ranks.size,
        "draws": Draws(request.plan, inputs.group, inputs.randomness).method,
    }


def check_agreement(request: Request, inputs: Inputs, ranks: Ranks) -> None:
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
    ranks.check_agreement("checking the inputs", facts | inputs.fingerprint | {"data": inputs.contents.encode()})


def key_of_seed(request: Request, inputs: Inputs, ranks: Ranks) -> Randomness:
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
    }
    return fingerprints.of(parts)
