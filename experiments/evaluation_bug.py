"""The kind "evaluation-bug": noisy steps as the paper's code makes them once it has evaluated. NO GUARANTEE.

That code splits each Poisson draw into physical batches and keeps a queue of flags: sum up, or add noise and update. A
flag is put in when a physical batch is read, and taken out when its gradient is. To score the training records, the
code reads the same loader; these flags stay in the queue. Every later noisy step then ends where a draw of that
evaluation had ended: it may hold parts of two draws, and a record twice. The plan certifies steps without that.

Settings: those of "train"; `options` = {bug: whether the loader is read for evaluations; physical, every: as below}.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F

from epsilons.clipping import engine
from epsilons.clipping.engine import add_each
from epsilons.core.mechanism import FloatArray, IntArray
from epsilons.errors import InputError
from epsilons.training.performance import use_allocator

from . import training
from .settings import Settings

#: Records of a physical batch, and noisy steps between two evaluations: the defaults of the paper's code.
PHYSICAL, EVERY = 128, 100


def noisy_steps(
    rates: FloatArray, coins: np.random.Generator, others: np.random.Generator, bug: bool, physical: int, every: int
) -> Iterator[IntArray]:
    """The rows that each noisy step sums up, without end. rates: (records,).

    coins, others  of the draws of training, and of those that evaluations read
    """
    flags: deque[bool] = deque()
    rows: list[IntArray] = []
    steps, epoch = 0, max(1, round(1 / float(rates.mean())))

    def read(generator: np.random.Generator) -> list[IntArray]:
        drawn = np.flatnonzero(generator.random(len(rates)) < rates)
        parts = np.array_split(drawn, max(1, math.ceil(len(drawn) / physical)))
        flags.extend([False] * (len(parts) - 1) + [True])
        return parts

    while True:
        for part in read(coins):
            rows.append(part)
            if not flags.popleft():
                continue
            yield np.concatenate(rows)
            rows, steps = [], steps + 1
            if bug and steps % every == 1 % every:
                for _ in range(epoch):
                    read(others)


def evaluation_bug(settings: Settings, seed: int, label: str = "", device: str = "") -> dict[str, Any]:
    """The accuracy of one run, and how many of its noisy steps hold a record twice."""
    with suppress(InputError):  # not every machine has glibc
        use_allocator()
    data, test = training.scored_data(settings)
    budgets = training.budgets_of(settings, len(data.targets), seed)
    plan = training.plan_of(settings.model_copy(update={"options": {}}), budgets)
    (phase,) = plan.phases
    torch.manual_seed(seed)
    model, noise, clipping = training.network(settings, data), torch.Generator().manual_seed(seed), engine("auto")
    parameters = list(model.parameters())
    optimizer = torch.optim.SGD(parameters, settings.lr, settings.momentum)
    clipping.attach(model, parameters)
    inputs, targets = training.tensors(data)
    bounds = torch.from_numpy(phase.clip_norm[budgets.group])
    options = {"bug": True, "physical": PHYSICAL, "every": EVERY} | settings.options
    coins, others = (np.random.default_rng([seed, part]) for part in range(2))
    steps = noisy_steps(phase.sample_rate[budgets.group], coins, others, **options)
    progress, twice, sizes = training.Progress(label, plan.steps), 0, []
    for rows in itertools.islice(steps, plan.steps):
        sums = [phase.noise_std * torch.randn(p.shape, generator=noise, dtype=torch.float64) for p in parameters]
        for part in torch.split(torch.from_numpy(rows), PHYSICAL):
            clipping.begin(len(part))
            losses = F.cross_entropy(model(inputs[part]), targets[part], reduction="none")
            add_each(clipping.clipped_sum(losses, bounds[part], torch.ones(len(part), dtype=torch.float64)), sums)
        for parameter, total in zip(parameters, sums, strict=True):
            parameter.grad = (total / phase.expected_batch).to(parameter.dtype)
        optimizer.step()
        twice += len(np.unique(rows)) < len(rows)
        sizes.append(len(rows))
        progress()
    clipping.detach()
    group = torch.zeros(len(test.targets), dtype=torch.long)
    return {
        "plan": plan.digest,
        "steps": plan.steps,
        "guarantee": "none",
        "accuracy": training.scores_by_group(model, training.tensors(test), group)[1][0],
        "steps_with_a_record_twice": twice,
        "records_per_step": [float(np.mean(sizes)), float(np.std(sizes))],
        "weights": training.digest(model),
    }
