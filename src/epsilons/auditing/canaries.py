"""The attack "canaries": synthetic records that pass through the library's own draw, clip, sum and noise.

A canary's gradient is CANARY_NORM·c_p·e_j: far beyond its clip norm, on one coordinate of a parameter that exists for
the audit only. A fair coin decides whether the canary is in. If it is out, its gradient is 0, as for the empty record
of the guarantee. Canaries added to the noisy sum directly would test nothing but the noise.

Under a plan of persons each canary is a person with several rows, who is in or out as a whole. All of the rows are read
whenever the canary is drawn. If rows were clipped in place of persons, a canary would contribute that many times its
bound.

Real records do not touch the canaries' coordinates, so the scores do not depend on them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from .. import data
from ..budgets.budgets import Budgets
from ..clipping import engine as engine_of
from ..draws.randomness import key_from_seed
from ..errors import DataError, InputError, ModelError
from ..planning import Plan
from ..planning.plan_numbers import ROSTER
from ..training import Performance, Randomness, Records, make_private
from ..training.fitting.losses import LOSSES, by_name
from ..training.fitting.progress import watched
from .bounds import BoolArray, CanaryScores, FloatArray, IntArray, log_likelihood_ratio
from .recorder import Recorder, Trace

#: A canary's gradient norm, in clip norms.
CANARY_NORM = 100.0
#: Rows of a canary under a plan of persons, if the caller names no number.
CANARY_ROWS = 10
#: Learning rate of the real part of the model.
LEARNING_RATE = 0.1

Loss = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True, eq=False)
class AttackConfig:
    """What an attack may use besides the plan.

    canaries    number per group; on average half of them are in
    canary_rows rows of each canary under a plan of persons; None: CANARY_ROWS. Under a plan of records it is 1
    model, dataset, loss
                real records, (inputs, targets), and the model trained on them; by default logistic regression on the
                embedded digits
    performance, randomness
                as in make_private
    seed        makes the audit repeatable; the run's key follows from the seed alone
    progress    show progress on stderr
    """

    canaries: int = 1000
    canary_rows: int | None = None
    model: nn.Module | None = None
    dataset: tuple[Tensor, Tensor] | None = None
    loss: str | Loss = "cross_entropy"
    performance: Performance = field(default_factory=Performance)
    randomness: str = "chacha20"
    seed: int | None = None
    progress: bool = False

    def rows_under(self, plan: Plan) -> int:
        """Number of rows of each canary. Raises InputError for a number that the plan's unit does not allow."""
        rows = self.canary_rows
        if rows is None:
            return CANARY_ROWS if plan.unit == "person" else 1
        if isinstance(rows, bool) or not isinstance(rows, int | np.integer) or rows < 1:
            raise InputError(f"canary_rows must be a whole number of at least 1, got {rows!r}.")
        if plan.unit == "record" and rows != 1:
            raise InputError(
                f"The plan is for records, and a record is one row; got canary_rows={rows:,}. Leave it out, or audit a "
                "plan of persons (Budgets.by_person)."
            )
        return int(rows)

    @property
    def engine_name(self) -> str:
        """The name of the engine, for audit.json."""
        engine = self.performance.engine
        return engine if isinstance(engine, str) else type(engine).__name__.lower()


@dataclass(frozen=True, eq=False)
class AttackResult:
    """The canaries' scores, a trace of the recorded run, and a description of what was trained."""

    scores: CanaryScores
    trace: Trace
    description: str


class _WithCanaries(nn.Module):
    """The model, with one more coordinate per canary."""

    def __init__(self, body: nn.Module, canaries: int) -> None:
        super().__init__()
        self.body = body
        self.block = nn.Embedding(canaries, 1, _weight=torch.zeros(canaries, 1))

    def forward(self, inputs: Tensor, coordinate: Tensor, gradient: Tensor) -> tuple[Tensor, Tensor]:
        """The model's outputs, and (batch,) canary losses with this gradient on their coordinates."""
        return self.body(inputs), gradient * self.block(coordinate)[:, 0]


def canaries(plan: Plan, config: AttackConfig) -> AttackResult:
    """Train under the plan's phases with canaries among the records.

    A record's mechanism depends on its group's row of the plan alone, so the number of records is free: the plan's
    rates, clip norms, weights, noise, divisor and steps are used as they are.
    Raises InputError for too few canaries, DataError or ModelError for data and a model that do not fit.
    """
    if config.canaries < 10:
        raise InputError(f"An audit needs at least 10 canaries per group, got {config.canaries}.")
    body, inputs, targets = _real_part(config)
    loss = by_name(LOSSES, config.loss, "loss")
    canary_group, included, group = _assignment(plan, config, len(inputs))
    counts = np.bincount(group, minlength=len(plan.epsilons))
    audited = replace(plan, groups=replace(plan.groups, counts=counts), adjacency=ROSTER)

    rows = config.rows_under(plan)
    model = _WithCanaries(body, len(canary_group)).train()
    block = model.block.weight
    parameters: list[dict[str, Any]] = [
        {"params": [p for p in body.parameters() if p.requires_grad]},
        {"params": [block], "lr": 0.0},
    ]
    optimizer = torch.optim.SGD(parameters, lr=LEARNING_RATE)
    score = np.zeros(len(canary_group))

    def add_to_score(phase: int, applied: FloatArray) -> None:
        table = audited.phases[phase]
        unit = (table.weight * table.clip_norm)[canary_group]
        rate, noise = table.sample_rate[canary_group], table.noise_multiplier[canary_group]
        np.add(score, log_likelihood_ratio(applied / unit, rate, noise), out=score)

    recorder = Recorder(engine_of(config.performance.engine), audited, group, canary_group, block, add_to_score)
    private = make_private(
        model,
        optimizer,
        Records(
            _dataset(inputs, targets, audited, canary_group, included, rows),
            persons=_owners(len(canary_group), len(group), rows) if plan.unit == "person" else None,
            rows_per_person=rows,
        ),
        audited,
        budgets=Budgets(plan.epsilons[group], plan.delta[group], unit=plan.unit),
        performance=replace(config.performance, engine=recorder),
        # From the seed alone: the run is thrown away, and a seed gives the same audit on every machine.
        seed=Randomness(config.randomness, key=None if config.seed is None else key_from_seed(config.seed)),
    )
    recorder.watch(optimizer)  # after make_private, so that its check of the optimizer's calls comes first
    # The progress line shows no spend: the plan in use has only the audited groups.
    with private, watched(private, config.progress, "audited", lambda _: ""):
        for features, labels, index, coordinate, gradient, is_real in private.batches:
            recorder.set_batch(index)
            outputs, canary_losses = model(features, coordinate, gradient)
            losses = loss(outputs, labels)
            private.backward(torch.where(is_real, losses, torch.zeros_like(losses)) + canary_losses)
            private.step()
    if not np.isfinite(score).all():
        raise ModelError("The audited run applied updates that are not finite, so nothing can be concluded from it.")
    who = "canaries" if plan.unit == "record" else f"canary persons of {rows:,} row{'s' * (rows != 1)} each"
    description = (
        f"{type(body).__name__}, {sum(p.numel() for p in body.parameters()):,} parameters, on {len(inputs):,} real "
        f"{plan.unit}s, with {config.canaries:,} {who} per group"
    )
    return AttackResult(CanaryScores(canary_group, included, score), recorder.trace, description)


def _real_part(config: AttackConfig) -> tuple[nn.Module, Tensor, Tensor]:
    """(model, inputs, targets): the caller's, or logistic regression and the embedded digits."""
    if config.dataset is None:
        if config.model is not None:
            raise DataError("A model for the audit needs a dataset with it: (inputs, targets), two tensors.")
        inputs, targets = map(torch.from_numpy, data.load("digits", "train"))
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return nn.Linear(64, 10), inputs, targets
    inputs, targets = config.dataset
    if config.model is None:
        raise ModelError("A dataset for the audit needs a model with it.")
    if len(inputs) != len(targets):
        raise DataError(f"The audit's dataset has {len(inputs):,} inputs and {len(targets):,} targets.")
    return copy.deepcopy(config.model), inputs, targets  # the trained copy is never released


def _assignment(plan: Plan, config: AttackConfig, real_records: int) -> tuple[IntArray, BoolArray, IntArray]:
    """(groups of the canaries, their coins, groups of all records), independent of the run's own randomness."""
    rng = np.random.default_rng(None if config.seed is None else [config.seed, 0xCA11A7])
    groups = len(plan.epsilons)
    canary_group = np.repeat(np.arange(groups), config.canaries)
    included = rng.random(len(canary_group)) < 0.5
    real_group = rng.choice(groups, size=real_records, p=plan.counts / plan.counts.sum())
    return canary_group, included, np.concatenate([canary_group, real_group])


def _owners(canaries: int, persons: int, rows: int) -> IntArray:
    """(rows of all,) the person of each row: canaries with so many rows each, and then real records with one."""
    return np.concatenate([np.repeat(np.arange(canaries), rows), np.arange(canaries, persons)])


def _dataset(
    inputs: Tensor, targets: Tensor, plan: Plan, canary_group: IntArray, included: BoolArray, rows: int
) -> tuple[Tensor, ...]:
    """(inputs, targets, index, coordinate, gradient, is_real), canaries first, each with so many rows.

    index   of the canary or real record
    """
    count, real = len(canary_group) * rows, len(inputs)
    index = torch.from_numpy(_owners(len(canary_group), len(canary_group) + real, rows))
    largest = np.max([phase.clip_norm for phase in plan.phases], axis=0)  # (groups,)
    if CANARY_NORM * largest.max() > np.finfo(np.float32).max:
        raise InputError("The plan's clip norms are too large for an audit: canary gradients exceed 32-bit numbers.")
    gradient = np.concatenate([np.repeat(CANARY_NORM * largest[canary_group] * included, rows), np.zeros(real)])
    return (
        torch.cat([torch.zeros((count, *inputs.shape[1:]), dtype=inputs.dtype), inputs]),
        torch.cat([torch.zeros((count, *targets.shape[1:]), dtype=targets.dtype), targets]),
        index,
        torch.where(index < len(canary_group), index, 0),
        torch.from_numpy(gradient.astype(np.float32)),
        torch.arange(count + real) >= count,
    )
