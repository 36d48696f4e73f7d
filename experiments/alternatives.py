"""The ways to individual budgets that the paper's appendix rejects, computed: the kind "alternatives".

Appendix C.1 (larger batches, more steps), F.1 (noise per data point: one record a step, or one group a step) and F.2
(copies of data points). How good a way is for learning is measured by the pull of a step: the expected sum of the clip
norms, over the noise. `ratio` divides by that of DP-SGD at the strictest budget; of ways with other steps, the pull of
as many records counts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from scipy.optimize import brentq
from scipy.stats import binom

from epsilons import Budgets, SampledGaussian
from epsilons.accounting import ACCOUNTANTS, noise_for, pld, rate_for
from epsilons.core.mechanism import FloatArray

from .comparing import runs_of, titled
from .results import Line
from .settings import RECORDS, Settings, Table
from .training import budgets_of, plan_of

#: Numbers of copies that are accounted for.
COPIES = (1, 2, 3, 4, 5)


def alternatives(settings: Settings, seed: int, label: str = "", device: str = "") -> dict[str, Any]:
    """Pull over noise of each way, and the epsilon of n copies under the noise of the strictest budget."""
    records = RECORDS[settings.dataset]
    budgets = budgets_of(settings, records, seed)
    steps, delta = settings.recipe(records).steps, settings.delta
    rate = settings.batch_size / records
    noise = noise_for(float(budgets.epsilons[0]), rate, steps, delta, pld.epsilon)
    batch = {"larger batch": larger_batch(budgets, noise, steps) / rate}
    longer = more_steps(budgets, noise, rate, steps)
    ways = {name: pull(settings, budgets, name) for name in ("uniform", "scale", "sample")}
    ways |= {
        "one record a step": one_record_a_step(budgets, settings.batch_size, steps),
        "one group a step": one_group_a_step(budgets, settings.batch_size, steps),
    }
    return {
        "steps": steps,
        "noise_multiplier": noise,
        "longer": longer / steps,
        "ratio": {name: value / ways["uniform"] for name, value in ways.items()}
        | batch
        | {"more steps": math.sqrt(longer / steps)},
        "copies": {str(n): copies(noise, rate, steps, delta, n) for n in COPIES},
        "as_argued": {str(n): as_argued(noise, rate, steps, delta, n) for n in COPIES},
        "by_rate": {str(n): pld.epsilon([SampledGaussian(n * rate, noise, steps)], delta) for n in COPIES},
        "by_weight": {str(n): pld.epsilon([SampledGaussian(rate, noise / n, steps)], delta) for n in COPIES},
    }


def pull(settings: Settings, budgets: Budgets, strategy: str) -> float:
    """Expected sum of clip norms of a step, over the noise, of a strategy of the library."""
    plan = plan_of(settings.model_copy(update={"strategy": strategy}), budgets)
    (phase,) = plan.phases
    return float((budgets.counts * phase.sample_rate * phase.clip_norm).sum() / phase.noise_std)


def larger_batch(budgets: Budgets, noise: float, steps: int) -> float:
    """Mean sampling rate if the noise stays DP-SGD's and each budget is used up by its rate."""
    return float(budgets.shares @ _rates(budgets, noise, steps))


def more_steps(budgets: Budgets, noise: float, rate: float, steps: int) -> float:
    """Number of steps at which the mean of these rates is `rate`, so that the batch stays as it is."""

    def excess(log_steps: float) -> float:
        return math.log(larger_batch(budgets, noise, round(math.exp(log_steps))) / rate)

    found = brentq(excess, math.log(steps), math.log(steps) + 4, xtol=1e-3)
    return float(round(math.exp(found)))


def _rates(budgets: Budgets, noise: float, steps: int) -> FloatArray:
    pairs = zip(budgets.epsilons, budgets.delta, strict=True)
    return np.array([rate_for(float(epsilon), noise, steps, float(delta), pld.epsilon) for epsilon, delta in pairs])


def one_record_a_step(budgets: Budgets, batch_size: float, steps: int) -> float:
    """F.1 (i): each gradient gets the noise of its own budget; the pull of batch_size records, best weighted.

    A uniformly chosen record is drawn with probability 1 / records; RDP bounds the many steps.
    """
    many = round(batch_size * steps)
    own = _noises(budgets, np.full(len(budgets.epsilons), 1 / budgets.records), [many] * len(budgets.epsilons), "rdp")
    return math.sqrt(batch_size * float(budgets.shares @ (1 / own**2)))


def one_group_a_step(budgets: Budgets, batch_size: float, steps: int) -> float:
    """F.1 (ii): a step draws a batch from one group, which has its share of the steps; root mean square over steps."""
    own = _noises(budgets, batch_size / budgets.counts, np.rint(budgets.shares * steps).astype(int).tolist(), "pld")
    return math.sqrt(float(budgets.shares @ (batch_size / own) ** 2))


def _noises(budgets: Budgets, rates: FloatArray, steps: list[int], accountant: str) -> FloatArray:
    """(groups,) the noise multiplier that uses up each budget."""
    groups = zip(budgets.epsilons, budgets.delta, rates, steps, strict=True)
    spends = ACCOUNTANTS[accountant]
    return np.array([noise_for(float(e), float(q), count, float(d), spends) for e, d, q, count in groups])


def copies(noise: float, rate: float, steps: int, delta: float, count: int) -> float:
    """Epsilon of a record with so many copies, each drawn alone: a Gaussian mixture of shifts 0 … count.

    Binomial weights; the composition is dp-accounting's, rounded up.
    """
    from dp_accounting.pld import privacy_loss_distribution

    shifts = np.arange(count + 1)
    one = privacy_loss_distribution.from_mixture_gaussian_mechanism(
        noise,
        [float(shift) for shift in shifts],
        [float(p) for p in binom.pmf(shifts, count, rate)],
        value_discretization_interval=min(0.05 * rate * count * math.sqrt(math.expm1(1 / noise**2)), 1e-3),
    )
    return float(one.self_compose(steps).get_epsilon_for_delta(delta - 1e-12))


def as_argued(noise: float, rate: float, steps: int, delta: float, count: int) -> float:
    """Epsilon by the appendix' argument: sensitivity `count` whenever any copy is drawn."""
    return pld.epsilon([SampledGaussian(1 - (1 - rate) ** count, noise / count, steps)], delta)


def page(table: Table, done: Mapping[str, Line]) -> str:
    """The table of copies, for the page of results; the shares of the budgets do not matter for it."""
    rows = [
        ("exact", "copies"),
        ("as the appendix argues", "as_argued"),
        ("one copy, n times the rate", "by_rate"),
        ("one copy, n times the weight", "by_weight"),
    ]
    by_data = {line["settings"]["dataset"]: line for cell in table.cells for line in runs_of(cell, done).values()}
    found = [
        [data, name, *(f"{line[key][str(n)]:.3f}" for n in COPIES)]
        for data, line in by_data.items()
        for name, key in rows
    ]
    return titled("Copies of a record", ["data", "ε of n copies", *(f"n = {n}" for n in COPIES)], found)
