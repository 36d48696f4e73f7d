"""Recording: watch a run from outside, between its engine and its optimizer, and keep what can be checked.

A `Recorder` stands around the engine and before the optimizer's step. It sees who was in each sum, what the engine
made of them, and what was applied; the noise is the difference. Nothing in the training loop knows of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor, nn

from ..planning import Plan
from ..training.clipping import Engine
from .scores import FloatArray, IntArray

#: Between which values of the noise a likeness is looked for: two steps, neighbours, the largest tensor and others.
LIKENESS = ("step_to_step", "place_to_place", "tensor_to_tensor")

#: Called after every update with (phase, what was applied to the canaries' coordinates times the divisor).
Listener = Callable[[int, FloatArray], None]


@dataclass(frozen=True, eq=False)
class Trace:
    """What was counted and measured in one run.

    plan           what it was meant to be
    records        (groups,) records that took part, canaries and others
    updates        (phases,) updates applied
    drawn          (phases, groups) records found in sums, all updates together
    contribution   (phases, groups) largest contribution of a canary to a sum, in gradient units
    tensors        names and sizes of the trained parameters
    squared_noise  (phases, tensors) what was applied less what was summed, squared and added up
    carried        (phases, groups) Σ (applied − summed)·summed over canaries' coordinates, in squared gradient units
    summed         (phases, groups) Σ summed² over the same
    likeness       (phases, 3) correlation of the noise with itself, for each of LIKENESS; NaN where there is none
    pairs          (phases, 3) from how many pairs of values
    twice          (phases, groups) records found in both of two draws, steps 0 and 1, 2 and 3, …
    """

    plan: Plan = field(repr=False)
    records: IntArray = field(repr=False)
    updates: IntArray
    drawn: IntArray
    contribution: FloatArray
    tensors: tuple[tuple[str, int], ...]
    squared_noise: FloatArray
    carried: FloatArray
    summed: FloatArray
    likeness: FloatArray
    pairs: IntArray
    twice: IntArray


class Recorder:
    """Meets clipping.Engine by means of another one, and looks on.

    engine    the one that does the work
    plan      of the run
    group     (records,) each record's group
    canaries  (coordinates,) group of the canary of each coordinate of `block`
    block     the parameter that canaries pull on
    names     of the parameters, in the optimizer's order
    """

    def __init__(
        self,
        engine: Engine,
        plan: Plan,
        group: IntArray,
        canaries: IntArray,
        block: Tensor,
        names: Sequence[str],
        listener: Listener,
    ) -> None:
        self._engine, self._plan, self._group, self._canaries = engine, plan, group, canaries
        self._block, self._names, self._listener = block, tuple(names), listener
        phases, groups = len(plan.phases), len(plan.epsilons)
        self._phase = 0
        self._updates = np.zeros(phases, dtype=np.int64)
        self._drawn = np.zeros((phases, groups), dtype=np.int64)
        self._contribution, self._carried, self._summed = (np.zeros((phases, groups)) for _ in range(3))
        self._squared = np.zeros((phases, len(self._names)))
        self._products = np.zeros((phases, len(LIKENESS), 3))  # Σ a·b, Σ a², Σ b²
        self._pairs = np.zeros((phases, len(LIKENESS)), dtype=np.int64)
        self._twice = np.zeros((phases, groups), dtype=np.int64)
        self._before: Tensor | None = None  # the last update's noise, whole
        self._in_draw: list[IntArray] = []
        self._first_of_two: IntArray | None = None
        self._sum: list[Tensor] | None = None
        self._present: IntArray = np.empty(0, dtype=np.int64)
        self._parameters: list[nn.Parameter] = []

    # -- as an engine ------------------------------------------------------------------------------

    def attach(self, model: nn.Module, parameters: Sequence[nn.Parameter]) -> None:
        self._parameters = list(parameters)
        self._engine.attach(model, parameters)

    def begin(self, records: int) -> None:
        self._engine.begin(records)

    def clipped_sum(self, losses: Tensor, clip_norm: Tensor, weight: Tensor) -> list[Tensor]:
        made = self._engine.clipped_sum(losses, clip_norm, weight)
        np.add.at(self._drawn[self._phase], self._group[self._present], 1)
        self._in_draw.append(self._present)
        before = self._sum
        self._sum = list(made) if before is None else [a + b for a, b in zip(before, made, strict=True)]
        return made

    def detach(self) -> None:
        self._engine.detach()

    # -- as a witness ------------------------------------------------------------------------------

    def present(self, indices: Tensor) -> None:
        """Say whose losses are about to be differentiated: (batch,) indices of records."""
        self._present = indices.cpu().numpy()

    def watch(self, optimizer: torch.optim.Optimizer) -> None:
        """Look at everything that this optimizer applies from now on."""
        optimizer.register_step_pre_hook(lambda *_: self._applied())

    def _applied(self) -> None:
        phase = min(self._phase, len(self._plan.phases) - 1)
        divisor = self._plan.phases[phase].expected_batch
        noises = []
        for k, p in enumerate(self._parameters):
            applied = torch.zeros_like(p, dtype=torch.float64) if p.grad is None else p.grad.double() * divisor
            summed = torch.zeros_like(applied) if self._sum is None else self._sum[k]
            noise = applied - summed
            noises.append(noise.flatten())
            self._squared[phase, k] += float(noise.square().sum())
            if p is self._block:
                self._look_at_canaries(phase, summed.reshape(-1).cpu().numpy(), noise.reshape(-1).cpu().numpy())
                self._listener(phase, applied.reshape(-1).cpu().numpy())
        self._look_for_likeness(phase, noises)
        self._look_at_draws(phase)
        self._sum = None
        self._updates[phase] += 1
        if self._updates[phase] >= self._plan.phases[phase].steps and phase + 1 < len(self._plan.phases):
            self._phase = phase + 1

    def _look_at_canaries(self, phase: int, summed: FloatArray, noise: FloatArray) -> None:
        pulling = np.flatnonzero(summed)
        group, own = self._canaries[pulling], summed[pulling]
        np.maximum.at(self._contribution[phase], group, np.abs(own))
        np.add.at(self._carried[phase], group, own * noise[pulling])
        np.add.at(self._summed[phase], group, own**2)

    def _look_for_likeness(self, phase: int, noises: list[Tensor]) -> None:
        whole = torch.cat(noises)
        self._compare(phase, 0, self._before, whole)
        self._compare(phase, 1, whole[:-1], whole[1:])
        largest = max(noises, key=len)
        for other in noises:
            if other is not largest:
                self._compare(phase, 2, largest[: len(other)], other)
        self._before = whole

    def _compare(self, phase: int, kind: int, one: Tensor | None, other: Tensor) -> None:
        if one is None:
            return
        self._products[phase, kind] += [float(a @ b) for a, b in ((one, other), (one, one), (other, other))]
        self._pairs[phase, kind] += len(other)

    def _look_at_draws(self, phase: int) -> None:
        drawn = np.unique(np.concatenate(self._in_draw)) if self._in_draw else np.empty(0, dtype=np.int64)
        self._in_draw = []
        if self._updates[phase] % 2 == 0:
            self._first_of_two = drawn
        elif self._first_of_two is not None:
            again = np.intersect1d(self._first_of_two, drawn, assume_unique=True)
            np.add.at(self._twice[phase], self._group[again], 1)

    def trace(self) -> Trace:
        """What has been recorded so far."""
        root = np.sqrt(self._products[..., 1] * self._products[..., 2])
        root[root == 0] = np.nan
        return Trace(
            plan=self._plan,
            records=np.bincount(self._group, minlength=len(self._plan.epsilons)),
            updates=self._updates.copy(),
            drawn=self._drawn.copy(),
            contribution=self._contribution.copy(),
            tensors=tuple((name, p.numel()) for name, p in zip(self._names, self._parameters, strict=True)),
            squared_noise=self._squared.copy(),
            carried=self._carried.copy(),
            summed=self._summed.copy(),
            likeness=self._products[..., 0] / root,
            pairs=self._pairs.copy(),
            twice=self._twice.copy(),
        )
