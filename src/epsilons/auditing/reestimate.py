"""Retelling: estimate rates, noise, contributions and updates from a recorded run, and account again.

A ledger that prints its plan proves nothing. Here every number of the plan is measured on what was really drawn,
summed and applied, compared with what was planned, and handed to the accountant once more.

    updates       counted
    sample_rate   records found in sums; binomial
    contribution  largest pull of a canary on a sum, over its planned weight · clip norm; free of noise, so exact
    arrival       how much of what the engine summed was applied, over canaries' coordinates; normal
    noise_std     of each tensor, from what was applied less what was summed; chi-squared
    noise_…       likeness of the noise to itself, from step to step, place to place, tensor to tensor; normal
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
from .recorder import LIKENESS, Trace
from .scores import FloatArray

#: Chance that an honest run is told to differ anywhere, shared by all its measures.
ALPHA = 0.01
#: A contribution may exceed weight · clip norm by this part: the rounding of one 32-bit factor, which engines pre-empt.
ROUNDING = 1e-9
#: … and fall short by this one: engines shrink by 2⁻²⁰, and canaries pull a hundred times as hard as they may.
SHORT = 1e-3

#: Of fewer pairs of values the likeness of the noise is not judged: it is not normal enough then.
FEWEST_PAIRS = 1000

Status = Literal["as planned", "too much", "differs"]


@dataclass(frozen=True)
class Measure:
    """One number of the plan, and what the run made of it.

    what            updates, sample_rate, contribution, arrival, noise_std, drawn_twice, or "noise_" and a LIKENESS
    phase           whose
    group, tensor   whose; None where it is nobody's in particular
    planned         in the plan's units; contribution and arrival: 1
    measured        in the same
    standard_error  of the measurement; 0 for what is counted
    status          "too much" breaks a promise, "differs" is not what was planned but on the safe side of it
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
class Retelling:
    """measures: all of them; epsilon: (groups,) what the run has spent by its own account, by the plan's accountant."""

    measures: tuple[Measure, ...]
    epsilon: FloatArray

    @property
    def deviations(self) -> tuple[Measure, ...]:
        """What was not as planned."""
        return tuple(measure for measure in self.measures if measure.status != "as planned")

    @property
    def holds(self) -> bool:
        """True if nothing breaks a promise."""
        return all(measure.status != "too much" for measure in self.measures)


def retell(trace: Trace) -> Retelling:
    """Measure and account again. The point estimates are accounted, so epsilon carries their standard errors."""
    groups, phases = len(trace.plan.epsilons), len(trace.plan.phases)
    each = ALPHA / (phases * (1 + 4 * groups + len(trace.tensors) + len(LIKENESS)))
    measures = tuple(m for phase in range(phases) for m in _phase(trace, phase, each))
    return Retelling(measures, np.array([_spent(trace, measures, group) for group in range(groups)]))


def _phase(trace: Trace, phase: int, alpha: float) -> Iterator[Measure]:
    table, updates = trace.plan.phases[phase], int(trace.updates[phase])
    counted: Status = "as planned" if updates == table.steps else "too much" if updates > table.steps else "differs"
    yield Measure("updates", phase, None, None, table.steps, updates, 0.0, counted)
    unit = table.weight * table.clip_norm
    for group, rate in enumerate(table.sample_rate):
        trials, drawn = int(trace.records[group]) * updates, int(trace.drawn[phase, group])
        if trials == 0:
            continue
        found = drawn / trials
        more, less = binom.sf(drawn - 1, trials, rate), binom.cdf(drawn, trials, rate)
        error = math.sqrt(rate * (1 - rate) / trials)
        yield Measure(
            "sample_rate", phase, group, None, float(rate), found, error, _status(float(more), float(less), alpha)
        )
        yield from _drawn_twice(trace, phase, group, float(rate), alpha)
        pulled = float(trace.summed[phase, group])
        if pulled == 0:
            continue
        share = float(trace.contribution[phase, group] / unit[group])
        size: Status = "too much" if share > 1 + ROUNDING else "differs" if share < 1 - SHORT else "as planned"
        yield Measure("contribution", phase, group, None, 1.0, share, 0.0, size)
        arrived = 1 + float(trace.carried[phase, group]) / pulled
        error = max(table.noise_std, _pooled(trace, phase)) / math.sqrt(pulled)  # louder noise blurs it, too
        above, below = norm.sf((arrived - 1) / error), norm.cdf((arrived - 1) / error)
        yield Measure("arrival", phase, group, None, 1.0, arrived, error, _status(float(above), float(below), alpha))
    for place, (name, size_) in enumerate(trace.tensors):
        values = size_ * updates
        if values == 0:
            continue
        squared = float(trace.squared_noise[phase, place]) / table.noise_std**2
        too_small, too_large = float(chi2.cdf(squared, values)), float(chi2.sf(squared, values))
        measured = table.noise_std * math.sqrt(squared / values)
        yield Measure(
            "noise_std",
            phase,
            None,
            name,
            table.noise_std,
            measured,
            table.noise_std / math.sqrt(2 * values),
            _status(too_small, too_large, alpha),
        )

    for kind, where in enumerate(LIKENESS):
        pairs, likeness = int(trace.pairs[phase, kind]), float(trace.likeness[phase, kind])
        if pairs < FEWEST_PAIRS or math.isnan(likeness):
            continue
        alike: Status = "too much" if likeness_p_value(likeness, pairs) < alpha else "as planned"
        yield Measure(f"noise_{where}", phase, None, None, 0.0, likeness, 1 / math.sqrt(pairs), alike)


def _drawn_twice(trace: Trace, phase: int, group: int, rate: float, alpha: float) -> Iterator[Measure]:
    """Draws of one step tell nothing of the next one's: who was in both is a coin of its own, at the squared rate."""
    trials, found = int(trace.records[group]) * (int(trace.updates[phase]) // 2), int(trace.twice[phase, group])
    if trials == 0 or rate == 1:
        return
    planned = rate**2
    more, less = float(binom.sf(found - 1, trials, planned)), float(binom.cdf(found, trials, planned))
    error = math.sqrt(planned * (1 - planned) / trials)
    strays: Status = "too much" if min(more, less) < alpha / 2 else "as planned"
    yield Measure("drawn_twice", phase, group, None, planned, found / trials, error, strays)


def likeness_p_value(likeness: float, pairs: int) -> float:
    """How likely a correlation so far from 0 is, of so many pairs of fresh values: 1/√pairs is its exact deviation."""
    return 2 * float(norm.sf(abs(likeness) * math.sqrt(pairs)))


def _pooled(trace: Trace, phase: int) -> float:
    """Standard deviation of the noise over all tensors."""
    values = sum(size for _, size in trace.tensors) * int(trace.updates[phase])
    return math.sqrt(float(trace.squared_noise[phase].sum()) / values)


def _status(harmful: float, harmless: float, alpha: float) -> Status:
    return "too much" if harmful < alpha / 2 else "differs" if harmless < alpha / 2 else "as planned"


def _spent(trace: Trace, measures: tuple[Measure, ...], group: int) -> float:
    plan, history = trace.plan, []
    for phase, table in enumerate(plan.phases):
        mine = {m.what: m for m in measures if m.phase == phase and m.group == group}
        noise = [m for m in measures if m.phase == phase and m.what == "noise_std"]
        updates = int(trace.updates[phase])
        if "sample_rate" not in mine or mine["sample_rate"].measured == 0 or not noise:
            continue
        # Tensors differ by chance unless one was found to: then it is the quietest that counts.
        small = [m.measured for m in noise if m.status == "too much"]
        std = min(small, default=_pooled(trace, phase))
        share = mine["contribution"].measured if "contribution" in mine else 1.0
        if "arrival" in mine and mine["arrival"].status == "too much":
            share *= mine["arrival"].measured
        multiplier = std / (share * float(table.weight[group] * table.clip_norm[group]))
        if multiplier == 0:
            return math.inf
        if mine["sample_rate"].measured > 1:  # in one sum more than once
            return math.inf
        history.append(SampledGaussian(mine["sample_rate"].measured, multiplier, updates))
    return float(plan.accountant_fn(history, float(plan.delta[group])))
