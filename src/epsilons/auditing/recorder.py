"""A recorder between a run's engine and its optimizer: it keeps what can be compared with the plan.

The recorder sees the records in each sum, the sum that the engine computed, and the update that was applied. The noise
is the difference. The training loop does not know the recorder.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch
from scipy.stats import binom, chi2, norm
from torch import Tensor, nn

from ..clipping import Engine
from ..core.mechanism import SampledGaussian
from ..planning import Plan
from .bounds import FloatArray, IntArray

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


# -- Estimate rates, noise, contributions and updates from a recorded run, and compute epsilon from the estimates
#
# A ledger that repeats its plan proves nothing. Here each number of the plan is measured on what was drawn, summed and
# applied, compared with the plan, and given to the accountant again.
#
#     updates       counted
#     sample_rate   records found in sums; binomial
#     contribution  largest contribution of a canary to a sum, over its planned weight · clip norm; exact, without noise
#     gain          share of the engine's sum that was applied, over canaries' coordinates; normal
#     noise_std     of each tensor, from what was applied less what was summed; chi-squared
#     noise_…       autocorrelation of the noise: step to step, value to value, tensor to tensor; normal
#     drawn_twice   records found in both of two draws, against the square of their rate; binomial

#: Probability that any measure of an honest run is called different, shared by all measures.
ALPHA = 0.01
#: A contribution may exceed weight · clip norm by this share: the rounding of one 32-bit factor.
ROUNDING = 1e-9
#: A contribution may fall short by this share: engines shrink by 2⁻²⁰, and canary gradients are 100 clip norms long.
SHORT = 1e-3
#: With fewer pairs of values the autocorrelation is not normal enough to be judged.
FEWEST_PAIRS = 1000

Status = Literal["as planned", "too much", "differs"]


@dataclass(frozen=True)
class Measure:
    """One number of the plan and its measurement.

    what            updates, sample_rate, contribution, gain, noise_std, drawn_twice, or "noise_" and one of
                    AUTOCORRELATION
    phase           index of the phase
    group, tensor   group or tensor that the measure belongs to; None if global
    planned         in the plan's units; contribution and gain: 1
    measured        in the same units
    standard_error  of the measurement; 0 for what is counted
    status          "too much" breaks a promise, "differs" deviates from the plan on the safe side
    """

    what: str
    phase: int
    group: int | None
    tensor: str | None
    planned: float
    measured: float
    standard_error: float
    status: Status


@dataclass(frozen=True, eq=False)
class Reestimate:
    """measures: all of them; epsilon: (groups,) what the run spent by its measures, from the plan's accountant."""

    measures: tuple[Measure, ...]
    epsilon: FloatArray

    @property
    def deviations(self) -> tuple[Measure, ...]:
        """The measures that are not as planned."""
        return tuple(measure for measure in self.measures if measure.status != "as planned")

    @property
    def holds(self) -> bool:
        """True if no measure breaks a promise."""
        return all(measure.status != "too much" for measure in self.measures)


def reestimate(trace: Trace) -> Reestimate:
    """Measure, and compute epsilon from the point estimates; it carries their standard errors."""
    groups, phases = len(trace.plan.epsilons), len(trace.plan.phases)
    alpha = ALPHA / (phases * (1 + 4 * groups + len(trace.tensors) + len(AUTOCORRELATION)))
    measures = tuple(m for phase in range(phases) for m in _measures(trace, phase, alpha))
    return Reestimate(measures, np.array([_epsilon(trace, measures, group) for group in range(groups)]))


def _measures(trace: Trace, phase: int, alpha: float) -> Iterator[Measure]:
    steps, updates = trace.plan.phases[phase].steps, int(trace.updates[phase])
    counted: Status = "as planned" if updates == steps else "too much" if updates > steps else "differs"
    yield Measure("updates", phase, None, None, steps, updates, 0.0, counted)
    if updates == 0:
        return
    for group in np.flatnonzero(trace.records):
        yield from _measures_of_draws(trace, phase, int(group), alpha)
        if trace.signal_energy[phase, group] > 0:
            yield from _measures_of_canaries(trace, phase, int(group), alpha)
    yield from _measures_of_noise(trace, phase, alpha)


def _measures_of_draws(trace: Trace, phase: int, group: int, alpha: float) -> Iterator[Measure]:
    rate, records = float(trace.plan.phases[phase].sample_rate[group]), int(trace.records[group])
    updates, drawn = int(trace.updates[phase]), int(trace.drawn[phase, group])
    trials = records * updates
    error = math.sqrt(rate * (1 - rate) / trials)
    status = _status(*_binomial_tails(drawn, trials, rate), alpha)
    yield Measure("sample_rate", phase, group, None, rate, drawn / trials, error, status)
    # Draws are independent, so a record is in both of two draws with the squared probability.
    pairs, both = records * (updates // 2), int(trace.redrawn[phase, group])
    if pairs == 0 or rate == 1:
        return
    error = math.sqrt(rate**2 * (1 - rate**2) / pairs)
    status = "too much" if min(_binomial_tails(both, pairs, rate**2)) < alpha / 2 else "as planned"
    yield Measure("drawn_twice", phase, group, None, rate**2, both / pairs, error, status)


def _measures_of_canaries(trace: Trace, phase: int, group: int, alpha: float) -> Iterator[Measure]:
    table, energy = trace.plan.phases[phase], float(trace.signal_energy[phase, group])
    share = float(trace.contribution[phase, group] / (table.weight * table.clip_norm)[group])
    status: Status = "too much" if share > 1 + ROUNDING else "differs" if share < 1 - SHORT else "as planned"
    yield Measure("contribution", phase, group, None, 1.0, share, 0.0, status)
    gain = 1 + float(trace.noise_dot_signal[phase, group]) / energy
    error = max(table.noise_std, _pooled_std(trace, phase)) / math.sqrt(energy)  # noise beyond the plan blurs it, too
    status = _status(float(norm.sf((gain - 1) / error)), float(norm.cdf((gain - 1) / error)), alpha)
    yield Measure("gain", phase, group, None, 1.0, gain, error, status)


def _measures_of_noise(trace: Trace, phase: int, alpha: float) -> Iterator[Measure]:
    planned, updates = trace.plan.phases[phase].noise_std, int(trace.updates[phase])
    for k, (name, size) in enumerate(trace.tensors):
        values = size * updates
        if values == 0:
            continue
        squared = float(trace.squared_noise[phase, k]) / planned**2
        status = _status(float(chi2.cdf(squared, values)), float(chi2.sf(squared, values)), alpha)
        measured, error = planned * math.sqrt(squared / values), planned / math.sqrt(2 * values)
        yield Measure("noise_std", phase, None, name, planned, measured, error, status)
    for kind, name in enumerate(AUTOCORRELATION):
        pairs, correlation = int(trace.pairs[phase, kind]), float(trace.autocorrelation[phase, kind])
        if pairs < FEWEST_PAIRS or math.isnan(correlation):
            continue
        status = "too much" if correlation_p_value(correlation, pairs) < alpha else "as planned"
        yield Measure(f"noise_{name}", phase, None, None, 0.0, correlation, 1 / math.sqrt(pairs), status)


def correlation_p_value(correlation: float, pairs: int) -> float:
    """Two-sided p-value of a correlation of so many pairs of fresh values; its exact standard deviation is 1/√pairs."""
    return 2 * float(norm.sf(abs(correlation) * math.sqrt(pairs)))


def _pooled_std(trace: Trace, phase: int) -> float:
    """Standard deviation of the noise over all tensors."""
    values = sum(size for _, size in trace.tensors) * int(trace.updates[phase])
    return math.sqrt(float(trace.squared_noise[phase].sum()) / values)


def _binomial_tails(count: int, trials: int, rate: float) -> tuple[float, float]:
    """Probabilities of so many or more, and of so many or fewer."""
    return float(binom.sf(count - 1, trials, rate)), float(binom.cdf(count, trials, rate))


def _status(harmful: float, harmless: float, alpha: float) -> Status:
    return "too much" if harmful < alpha / 2 else "differs" if harmless < alpha / 2 else "as planned"


def _epsilon(trace: Trace, measures: tuple[Measure, ...], group: int) -> float:
    plan, history = trace.plan, []
    for phase, table in enumerate(plan.phases):
        of_group = {m.what: m for m in measures if m.phase == phase and m.group == group}
        noise = [m for m in measures if m.phase == phase and m.what == "noise_std"]
        rate = of_group["sample_rate"].measured if "sample_rate" in of_group else 0.0
        if rate == 0 or not noise:
            continue
        # Tensors differ by chance, unless a test says otherwise: then the least noisy one counts.
        std = min((m.measured for m in noise if m.status == "too much"), default=_pooled_std(trace, phase))
        share = of_group["contribution"].measured if "contribution" in of_group else 1.0
        if "gain" in of_group and of_group["gain"].status == "too much":
            share *= of_group["gain"].measured
        multiplier = std / (share * float(table.weight[group] * table.clip_norm[group]))
        if multiplier == 0 or rate > 1:  # no noise, or a record more than once in a sum
            return math.inf
        history.append(SampledGaussian(rate, multiplier, int(trace.updates[phase])))
    return float(plan.accountant_fn(history, float(plan.delta[group])))
