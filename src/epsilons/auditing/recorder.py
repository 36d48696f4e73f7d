"""A recorder between a run's engine and its optimizer: it keeps what can be compared with the plan.

The recorder sees the records in each sum, the sum that the engine computed, and the update that was applied. The noise
is the difference. The training loop does not know the recorder.
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

#: The pairs of noise values that are correlated: successive steps, neighbours, the largest tensor and the others.
AUTOCORRELATION = ("step_to_step", "place_to_place", "tensor_to_tensor")

#: Called after every update with the phase and (canaries,) the update on the canaries' coordinates times the divisor.
Listener = Callable[[int, FloatArray], None]


@dataclass(frozen=True, eq=False)
class Trace:
    """Counts and measurements of one run; phases, groups and tensors are axes of the arrays.

    plan              the plan that the run should follow
    records           (groups,) number of records, canaries and others
    tensors           names and sizes of the trained parameters
    updates           (phases,) updates applied
    drawn             (phases, groups) records found in sums, over all updates
    redrawn           (phases, groups) records found in both of two draws: steps 0 and 1, 2 and 3, …
    contribution      (phases, groups) largest contribution of a canary to a sum, in gradient units
    noise_dot_signal  (phases, groups) Σ noise·summed over canaries' coordinates, in squared gradient units
    signal_energy     (phases, groups) Σ summed² over the same
    squared_noise     (phases, tensors) Σ noise²
    noise_products    (phases, 3, 3) Σ a·b, Σ a², Σ b² over pairs (a, b) of noise values, for each of AUTOCORRELATION
    pairs             (phases, 3) number of these pairs
    """

    plan: Plan = field(repr=False)
    records: IntArray = field(repr=False)
    tensors: tuple[tuple[str, int], ...]
    updates: IntArray
    drawn: IntArray
    redrawn: IntArray
    contribution: FloatArray
    noise_dot_signal: FloatArray
    signal_energy: FloatArray
    squared_noise: FloatArray
    noise_products: FloatArray
    pairs: IntArray

    @classmethod
    def empty(cls, plan: Plan, records: IntArray, tensors: tuple[tuple[str, int], ...]) -> Trace:
        """A trace of no updates."""
        phases, kinds = len(plan.phases), len(AUTOCORRELATION)
        by_group = (phases, len(plan.epsilons))
        return cls(
            plan,
            records,
            tensors,
            updates=np.zeros(phases, dtype=np.int64),
            drawn=np.zeros(by_group, dtype=np.int64),
            redrawn=np.zeros(by_group, dtype=np.int64),
            contribution=np.zeros(by_group),
            noise_dot_signal=np.zeros(by_group),
            signal_energy=np.zeros(by_group),
            squared_noise=np.zeros((phases, len(tensors))),
            noise_products=np.zeros((phases, kinds, 3)),
            pairs=np.zeros((phases, kinds), dtype=np.int64),
        )

    @property
    def autocorrelation(self) -> FloatArray:
        """(phases, 3) correlation of the noise with itself, for each of AUTOCORRELATION; NaN without pairs."""
        root = np.sqrt(self.noise_products[..., 1] * self.noise_products[..., 2])
        root[root == 0] = np.nan
        correlation: FloatArray = self.noise_products[..., 0] / root
        return correlation


class Recorder:
    """An engine that passes all calls to another engine and records them.

    engine    does the work
    plan      of the run
    group     (records,) each record's group
    canaries  (coordinates,) group of the canary of each coordinate of `block`
    block     the parameter that holds the canaries' coordinates
    listener  called after every update
    """

    trace: Trace

    def __init__(
        self, engine: Engine, plan: Plan, group: IntArray, canaries: IntArray, block: Tensor, listener: Listener
    ) -> None:
        self._engine, self._plan, self._group, self._canaries = engine, plan, group, canaries
        self._block, self._listener = block, listener
        self._phase = 0
        self._batch: IntArray = np.empty(0, dtype=np.int64)  # records of the current physical batch
        self._draw: list[IntArray] = []  # of all physical batches of this draw
        self._even_draw: IntArray | None = None  # records of the first of two draws
        self._sum: list[Tensor] | None = None
        self._last_noise: Tensor | None = None

    # -- as an engine ------------------------------------------------------------------------------

    def attach(self, model: nn.Module, parameters: Sequence[nn.Parameter]) -> None:
        self._parameters = list(parameters)
        names = {id(p): name for name, p in model.named_parameters()}
        tensors = tuple((names[id(p)], p.numel()) for p in parameters)
        records = np.bincount(self._group, minlength=len(self._plan.epsilons))
        self.trace = Trace.empty(self._plan, records, tensors)
        self._engine.attach(model, parameters)

    def begin(self, records: int) -> None:
        self._engine.begin(records)

    def clipped_sum(
        self, losses: Tensor, clip_norm: Tensor, weight: Tensor, sizes: Sequence[int] | None = None
    ) -> list[Tensor]:
        part = self._engine.clipped_sum(losses, clip_norm, weight, sizes)
        drawn = self._batch if sizes is None else self._batch[np.cumsum(sizes) - 1]  # a row of each person
        np.add.at(self.trace.drawn[self._phase], self._group[drawn], 1)
        self._draw.append(drawn)
        self._sum = list(part) if self._sum is None else [a + b for a, b in zip(self._sum, part, strict=True)]
        return part

    def detach(self) -> None:
        self._engine.detach()

    # -- as an observer ----------------------------------------------------------------------------

    def set_batch(self, indices: Tensor) -> None:
        """Name the records or persons of the losses to come: (batch,) index of each row's."""
        self._batch = indices.cpu().numpy()

    def watch(self, optimizer: torch.optim.Optimizer) -> None:
        """Record everything that this optimizer applies from now on."""
        optimizer.register_step_pre_hook(lambda *_: self._record_update())

    def _record_update(self) -> None:
        phase = self._phase
        divisor = self._plan.phases[phase].expected_batch
        noises = []
        for k, p in enumerate(self._parameters):
            applied = torch.zeros_like(p, dtype=torch.float64) if p.grad is None else p.grad.double() * divisor
            summed = torch.zeros_like(applied) if self._sum is None else self._sum[k]
            noise = applied - summed
            noises.append(noise.flatten())
            self.trace.squared_noise[phase, k] += float(noise.square().sum())
            if p is self._block:
                self._record_canaries(summed.reshape(-1).cpu().numpy(), noise.reshape(-1).cpu().numpy())
                self._listener(phase, applied.reshape(-1).cpu().numpy())
        self._record_autocorrelation(noises)
        self._record_draw()
        self._sum = None
        self.trace.updates[phase] += 1
        if self.trace.updates[phase] >= self._plan.phases[phase].steps and phase + 1 < len(self._plan.phases):
            self._phase = phase + 1

    def _record_canaries(self, summed: FloatArray, noise: FloatArray) -> None:
        trace, phase = self.trace, self._phase
        present = np.flatnonzero(summed)
        group, signal = self._canaries[present], summed[present]
        np.maximum.at(trace.contribution[phase], group, np.abs(signal))
        np.add.at(trace.noise_dot_signal[phase], group, signal * noise[present])
        np.add.at(trace.signal_energy[phase], group, signal**2)

    def _record_autocorrelation(self, noises: list[Tensor]) -> None:
        noise = torch.cat(noises)
        if self._last_noise is not None:
            self._correlate(0, self._last_noise, noise)
        self._correlate(1, noise[:-1], noise[1:])
        largest = max(noises, key=len)
        for other in noises:
            if other is not largest:
                self._correlate(2, largest[: len(other)], other)
        self._last_noise = noise

    def _correlate(self, kind: int, a: Tensor, b: Tensor) -> None:
        self.trace.noise_products[self._phase, kind] += [float(a @ b), float(a @ a), float(b @ b)]
        self.trace.pairs[self._phase, kind] += len(b)

    def _record_draw(self) -> None:
        drawn = np.unique(np.concatenate(self._draw)) if self._draw else np.empty(0, dtype=np.int64)
        self._draw = []
        if self.trace.updates[self._phase] % 2 == 0:
            self._even_draw = drawn
        elif self._even_draw is not None:
            again = np.intersect1d(self._even_draw, drawn, assume_unique=True)
            np.add.at(self.trace.redrawn[self._phase], self._group[again], 1)
