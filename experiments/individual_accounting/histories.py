"""What each record spent, computed from the bounds of its active steps alone: a check of the filters, and hindsight.

A record is active in a step if its bound is above 0, whether it was drawn or not. The measure belongs to the filter: an
epsilon from another one would be no promise (arXiv 2206.02617 reports such hindsight, and says so).
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from epsilons import Plan, SampledGaussian
from epsilons.accounting import pld, rdp
from epsilons.core.mechanism import FloatArray, IntArray

from . import gaussian
from .filters import fixed_orders


def by_gdp(plan: Plan, group: IntArray, parts: FloatArray) -> FloatArray:
    """(records,) exact epsilon of full batches. parts: (steps, records), bounds over own clip norms."""
    mu = np.sqrt((parts**2).sum(axis=0)) / plan.noise_multiplier[group]
    spent = np.zeros(len(group))
    for delta in np.unique(plan.delta):
        rows = plan.delta[group] == delta
        spent[rows] = gaussian.epsilon_of(mu[rows], float(delta))
    return spent


def by_renyi(plan: Plan, group: IntArray, parts: FloatArray) -> FloatArray:
    """(records,) epsilon by RDP at the order that the plan fixed for the group."""
    (phase,), orders = plan.phases, fixed_orders(plan)
    total = np.zeros(len(group))
    for part in np.unique(parts[parts > 0]):
        active = (parts == part).sum(axis=0)  # (records,)
        one = [
            float(rdp.divergence(rate, noise / part, [order])[0])
            for rate, noise, order in zip(phase.sample_rate, phase.noise_multiplier, orders, strict=True)
        ]
        total += active * np.array(one)[group]
    fixed = np.log1p(-1 / orders) - (np.log(orders) + np.log(plan.delta)) / (orders - 1)  # (groups,)
    return np.where(total > 0, np.maximum(total + fixed[group], 0.0), 0.0)


def by_count(plan: Plan, group: IntArray, parts: FloatArray) -> FloatArray:
    """(records,) epsilon by PLD of the steps with a contribution; a part other than 0 and 1 costs infinitely much."""
    (phase,) = plan.phases
    spent = np.full(len(group), math.inf)
    whole = np.isin(parts, (0.0, 1.0)).all(axis=0)
    active = (parts > 0).sum(axis=0)
    for p, count in {(int(p), int(n)) for p, n in zip(group[whole], active[whole], strict=True)}:
        history = [SampledGaussian(float(phase.sample_rate[p]), float(phase.noise_multiplier[p]), count)]
        spent[whole & (group == p) & (active == count)] = pld.epsilon(history, float(plan.delta[p]))
    return spent


#: The measure of each filter.
MEASURES: dict[str, Callable[[Plan, IntArray, FloatArray], FloatArray]] = {
    "gdp": by_gdp,
    "renyi": by_renyi,
    "count": by_count,
}


def parts_of(plan: Plan, group: Tensor, bounds: list[Tensor]) -> FloatArray:
    """(steps, records) each step's bounds, as a part of the record's own clip norm."""
    own = torch.from_numpy(np.array(plan.phases[0].clip_norm))[group]
    return np.asarray((torch.stack(bounds) / own).numpy(), dtype=np.float64)
