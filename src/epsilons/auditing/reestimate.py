"""Estimate rates, noise, contributions and updates from a recorded run, and compute epsilon from the estimates.

A ledger that repeats its plan proves nothing. Here each number of the plan is measured on what was drawn, summed and
applied, compared with the plan, and given to the accountant again.

    updates       counted
    sample_rate   records found in sums; binomial
    contribution  largest contribution of a canary to a sum, over its planned weight · clip norm; exact, without noise
    gain          share of the engine's sum that was applied, over canaries' coordinates; normal
    noise_std     of each tensor, from what was applied less what was summed; chi-squared
    noise_…       autocorrelation of the noise: step to step, value to value, tensor to tensor; normal
    drawn_twice   records found in both of two draws, against the square of their rate; binomial
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np
from scipy.stats import binom, chi2, norm

from ..mechanism import SampledGaussian
from .recorder import AUTOCORRELATION, Trace
from .scores import FloatArray

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
