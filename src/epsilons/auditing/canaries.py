"""Canaries: records made to be found, sent through the library's own draw, clip, sum and noise with real ones.

A canary's gradient is PULL·c_p·e_j: far beyond its clip norm, on a coordinate of its own of a parameter that exists for
the audit only. A fair coin decides whether it is in; out, it is the record with no content that the guarantee
compares with (its gradient is 0). Canaries that were added to the noisy sum by hand would test nothing but the noise.

Real records do not touch the canaries' coordinates, so scores say nothing about them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from .. import data
from ..budgets import Budgets
from ..errors import DataError, InputError, ModelError
from ..planning import Plan
from ..planning.plan_numbers import ROSTER
from ..training import make_private
from ..training.clipping import engine as engine_of
from ..training.fit_loop import LOSSES
from ..training.progress import watched
from ..training.randomness import key_from_seed
from .recorder import Recorder, Trace
from .scores import FloatArray, IntArray, Scores, log_likelihood_ratio

#: A canary's gradient norm, in clip norms.
PULL = 100.0
#: Learning rate of the real part of the model.
LEARNING_RATE = 0.1

Loss = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True, eq=False)
class Setting:
    """What an attack may use besides the plan.

    canaries    per group, on average half of them in
    model, dataset, loss
                real records, (inputs, targets), trained along; by default logistic regression on the digits
    engine, randomness
                as in make_private
    seed        repeats the audit; its key follows from the seed alone
    progress    show it on stderr
    """

    canaries: int = 1000
    model: nn.Module | None = None
    dataset: tuple[Tensor, Tensor] | None = None
    loss: str | Loss = "cross_entropy"
    engine: str = "auto"
    randomness: str = "philox"
    seed: int | None = None
    progress: bool = False


@dataclass(frozen=True, eq=False)
class Evidence:
    """scores of the canaries; a trace of the run; what was trained, in words."""

    scores: Scores
    trace: Trace
    words: str


class _WithCanaries(nn.Module):
    """The model, and beside it one coordinate per canary."""

    def __init__(self, body: nn.Module, canaries: int) -> None:
        super().__init__()
        self.body = body
        self.block = nn.Embedding(canaries, 1, _weight=torch.zeros(canaries, 1))

    def forward(self, inputs: Tensor, coordinate: Tensor, pull: Tensor) -> tuple[Tensor, Tensor]:
        """The model's outputs, and (batch,) losses of the canaries: their gradient is `pull` on their coordinate."""
        return self.body(inputs), pull * self.block(coordinate)[:, 0]


def canaries(plan: Plan, setting: Setting) -> Evidence:
    """Train under this plan's phases with canaries among the records.

    What a record goes through depends on its group's row of the plan alone, so the number of records is free: the
    plan's rates, clip norms, weights, noise, divisor and steps are used as they are.
    Raises InputError for too few canaries, DataError or ModelError for data and a model that do not fit.
    """
    if setting.canaries < 10:
        raise InputError(f"An audit needs at least 10 canaries per group; {setting.canaries} arrived.")
    groups = len(plan.epsilons)
    inputs, targets = _real(setting)
    loss = LOSSES.get(setting.loss) if isinstance(setting.loss, str) else setting.loss
    if loss is None:
        raise InputError(f"No loss is called {setting.loss!r}; there are: {', '.join(LOSSES)}, or pass a function.")
    # Coins, and who of the real records goes into which group, are independent of the run's own randomness.
    chance = np.random.default_rng(None if setting.seed is None else [setting.seed, 0xCA11A7])
    canary_group = np.repeat(np.arange(groups), setting.canaries)
    included = chance.random(len(canary_group)) < 0.5
    share = plan.counts / plan.counts.sum()
    real_group = chance.choice(groups, size=len(inputs), p=share)
    group = np.concatenate([canary_group, real_group])
    audited = _with_counts(plan, np.bincount(group, minlength=groups))

    body = _body(setting)
    model = _WithCanaries(body, len(canary_group)).train()
    block = model.block.weight
    parts: list[dict[str, Any]] = [
        {"params": [p for p in body.parameters() if p.requires_grad]},
        {"params": [block], "lr": 0.0},
    ]
    optimizer = torch.optim.SGD(parts, lr=LEARNING_RATE)
    score = np.zeros(len(canary_group))

    def listen(phase: int, applied: FloatArray) -> None:
        table = audited.phases[phase]
        unit = (table.weight * table.clip_norm)[canary_group]
        rate, noise = table.sample_rate[canary_group], table.noise_multiplier[canary_group]
        np.add(score, log_likelihood_ratio(applied / unit, rate, noise), out=score)

    # By identity: one optimizer's order is not the other's.
    names = {id(p): name for name, p in model.named_parameters()}
    trained = [names[id(p)] for part in parts for p in part["params"]]
    recorder = Recorder(engine_of(setting.engine), audited, group, canary_group, block, trained, listen)
    private = make_private(
        model,
        optimizer,
        _dataset(inputs, targets, audited, canary_group, included),
        audited,
        budgets=Budgets(plan.epsilons[group], plan.delta[group]),
        engine=recorder,
        # By the seed alone: the run is thrown away, and one seed is to give one audit whatever computes it.
        key=None if setting.seed is None else key_from_seed(setting.seed),
        randomness=setting.randomness,
    )
    recorder.watch(optimizer)  # after make_private, whose own guard must speak first
    # Nobody is charged, and of the whole plan's budgets, some of which may not be shown, nothing is known here.
    with private, watched(private, setting.progress, "audited", lambda _: ""):
        for own, answers, who, coordinate, pull, real in private.batches:
            recorder.present(who)
            outputs, pulled = model(own, coordinate, pull)
            losses = loss(outputs, answers)
            private.backward(torch.where(real, losses, torch.zeros_like(losses)) + pulled)
            private.step()
    if not np.isfinite(score).all():
        raise ModelError("The audited run applied updates that are not finite, so nothing can be concluded from it.")
    words = (
        f"{type(body).__name__}, {sum(p.numel() for p in body.parameters()):,} parameters, on {len(inputs):,} real "
        f"records, with {setting.canaries:,} canaries per group"
    )
    return Evidence(Scores(canary_group, included, score), recorder.trace(), words)


def _real(setting: Setting) -> tuple[Tensor, Tensor]:
    if setting.dataset is None:
        if setting.model is not None:
            raise DataError("A model for the audit needs a dataset to go with it: (inputs, targets), two tensors.")
        inputs, targets = map(torch.from_numpy, data.load("digits", "train"))
        return inputs, targets
    inputs, targets = setting.dataset
    if setting.model is None:
        raise ModelError("A dataset for the audit needs a model to go with it.")
    if len(inputs) != len(targets):
        raise DataError(f"The audit's dataset has {len(inputs):,} inputs and {len(targets):,} targets.")
    return inputs, targets


def _body(setting: Setting) -> nn.Module:
    if setting.model is not None:
        return copy.deepcopy(setting.model)  # what is trained here is not to be released
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Linear(64, 10)


def _with_counts(plan: Plan, counts: IntArray) -> Plan:
    """The same phases for other numbers of records."""
    return replace(plan, groups=replace(plan.groups, counts=counts), adjacency=ROSTER)


def _dataset(
    inputs: Tensor, targets: Tensor, plan: Plan, canary_group: IntArray, included: np.ndarray
) -> tuple[Tensor, ...]:
    """(inputs, targets, index, coordinate, pull, is real), canaries first."""
    count, real = len(canary_group), len(inputs)
    largest = np.max([phase.clip_norm for phase in plan.phases], axis=0)  # (groups,)
    if PULL * largest.max() > np.finfo(np.float32).max:
        raise InputError(
            "The plan's clip norms are too large for an audit: what canaries pull with is no 32-bit number."
        )
    pull = np.concatenate([PULL * largest[canary_group] * included, np.zeros(real)])
    return (
        torch.cat([torch.zeros((count, *inputs.shape[1:]), dtype=inputs.dtype), inputs]),
        torch.cat([torch.zeros((count, *targets.shape[1:]), dtype=targets.dtype), targets]),
        torch.arange(count + real),
        torch.cat([torch.arange(count), torch.zeros(real, dtype=torch.int64)]),
        torch.from_numpy(pull.astype(np.float32)),
        torch.cat([torch.zeros(count, dtype=torch.bool), torch.ones(real, dtype=torch.bool)]),
    )
