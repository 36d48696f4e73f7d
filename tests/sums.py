"""Clipped sums for tests: of an engine, of the definition in 64 bits, and how far they are apart."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from epsilons.clipping import ENGINES, Engine
from zoo import MORE, ZOO, Case, build, clip_norms

CLOSE = 4e-6  # relative to the clipped sum, against the definition in 64 bits
OVERSTATED = math.sqrt(1 + 2.0**-9)  # every engine's norms, by so much (docs/engine.md#norms)


def share(names: Sequence[Any], every: int) -> list[Any]:
    """One name of so many in every run of the tests, the others with --slow."""
    return [name if i % every == 0 else pytest.param(name, marks=pytest.mark.slow) for i, name in enumerate(names)]


def any_case(name: str) -> Case:
    """Of the zoo, or of the further models."""
    if name in ZOO:
        return build(name)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        case = MORE[name]()
        case.model(*case.inputs(3))  # lazy layers
        return case


def length(parts: Sequence[Tensor]) -> float:
    return math.sqrt(math.fsum(float(p.double().square().sum()) for p in parts))


def away(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> float:
    return length([a - b for a, b in zip(ours, theirs, strict=True)])


def doubled(case: Case) -> Case:
    return Case(copy.deepcopy(case.model).double(), case.inputs, case.losses)


def in_double(inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    return tuple(t.double() if t.is_floating_point() else t for t in inputs)


def attached(which: str, case: Case) -> Engine:
    """An engine by name, on the case's model."""
    made = ENGINES[which]()
    made.attach(case.model, case.parameters)
    return made


def compared(case: Case, engine: Engine, records: int, seed: int) -> tuple[list[Tensor], list[Tensor]]:
    """(the engine's sum in 32 bits, the definition's in 64) with a clip norm and a weight per record."""
    inputs, targets = case.batch(records, seed)
    exact = doubled(case)
    definition = attached("loop", exact)
    few = min(records, 32)  # enough to know how long gradients are
    some_inputs, some_targets = case.batch(few, seed)
    losses = exact.loss_of(in_double(some_inputs), some_targets)
    total = definition.clipped_sum(losses, torch.full((few,), 1e9), torch.ones(few))
    clip_norm = clip_norms(records, length(total) / math.sqrt(few))
    weight = torch.linspace(1.5, 0.5, records, dtype=torch.float64)
    theirs = definition.clipped_sum(exact.loss_of(in_double(inputs), targets), clip_norm, weight)
    engine.begin(records)
    return engine.clipped_sum(case.loss_of(inputs, targets), clip_norm, weight), theirs


def sums_of(
    model: nn.Module, losses: Callable[[nn.Module, Tensor], Tensor], x: Tensor, clip_norm: Tensor
) -> tuple[list[Tensor], list[Tensor]]:
    """(the sum of ghost, which must be proven, the definition's in 64 bits), all weights 1."""
    case, ones = Case(model, lambda records: ()), torch.ones(len(x))
    engine, exact = attached("ghost", case), doubled(case)
    engine.begin(len(x))
    ours = engine.clipped_sum(losses(model, x), clip_norm, ones)
    assert engine.is_proven
    return ours, attached("loop", exact).clipped_sum(losses(exact.model, x.double()), clip_norm, ones)


def common_mode(records: int, noise: float, time: int, k: int, p: int) -> tuple[Tensor, Tensor]:
    """Features that all time steps share, gradients of alternating sign: nearly everything cancels."""
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(records, 1, k, generator=generator).expand(-1, time, -1)
    features = features + noise * torch.randn(records, time, k, generator=generator)
    sign = torch.where(torch.arange(time) % 2 == 0, 1.0, -1.0)[None, :, None]
    gradients = torch.randn(records, 1, p, generator=generator) * sign
    return features, gradients + noise * torch.randn(records, time, p, generator=generator)
