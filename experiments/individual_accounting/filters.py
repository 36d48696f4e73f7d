"""Privacy filters with own budgets: before each step, how far may each record contribute?

A filter sees norms at released models, and never a coin. It charges every record that may contribute, drawn or not, in
whole units rounded up, and the loop clips each gradient to the bound that was charged. So, given all that was released
before, a record's bound does not depend on the coins of this step, and the step is dominated by a (sampled) Gaussian at
this bound. What the charges add up to is fixed by the plan:

    gdp     full batches: Σ (s_t/τ)² ≤ μ², the last contribution is cut to what is left. Koskela et al., arXiv
            2209.15596: adding μ_t² is exact and may be adaptive
    renyi   Poisson samples: Σ R_α(q, τ/Z_t) ≤ the budget at one order α, fixed by the plan. Feldman and Zrnic, arXiv
            2008.11193, Theorem 4.3, with an order and a budget per group; Z_t is a rung of a public ladder
    count   Poisson samples: a record contributes at its full norm or abstains, at most T times. The mechanisms are
            totally ordered, so PLD is exact. Stopping on the PLD of mixed histories is no filter: arXiv 2602.15815

To add a filter: a class with `bounds`, and a line in FILTERS.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from epsilons import Plan
from epsilons.accounting import rdp
from epsilons.core.mechanism import FloatArray

#: A step at a record's own clip norm costs this many units, so that a plan's cap is a whole number of steps.
UNITS = 2**40
#: A ladder of bounds: the own clip norm times 2^(−k/2).
RUNGS = 12
#: A record's bound is at least this many times its last norm, because norms are looked at in some steps only.
MARGIN = 1.1


class Filter(Protocol):
    """The meters of all records. One object may serve several runs: budgets are shared between them."""

    def bounds(self, sizes: Tensor) -> Tensor:
        """(records,) the largest norm of each record's contribution to the next step, charged; 0 if it has to stop.

        sizes  (records,) norms of the gradients at a released model; inf if they were never looked at
        """


class _Meter:
    """Units left of the budget of each record: the plan's steps at its own clip norm."""

    def __init__(self, plan: Plan, group: Tensor, units: int = UNITS) -> None:
        (phase,) = plan.phases
        self.plan, self.group, self.units = plan, group, units
        self.clip_norm = torch.from_numpy(np.array(phase.clip_norm))[group]  # (records,) 64-bit
        self.left = torch.full_like(group, phase.steps * units)  # (records,)

    def up(self, part: Tensor) -> Tensor:
        """Whole units for this part of a full step, in [0, 1], rounded up; a full step costs exactly `units`."""
        whole = torch.floor(part * self.units).long() + 1
        return torch.where(part > 0, whole.clamp_max(self.units), 0)

    def pay(self, price: Tensor) -> Tensor:
        """(records,) whether this price was affordable, and so was charged."""
        fits = price <= self.left
        self.left -= torch.where(fits, price, 0)
        return fits


class Unfiltered(_Meter):
    """No filter: every record is charged a full step."""

    def bounds(self, sizes: Tensor) -> Tensor:
        fits = self.pay(torch.full_like(self.left, self.units))
        return torch.where(fits, self.clip_norm, 0.0)


class GdpFilter(_Meter):
    """Full batches: pays (norm / own clip norm)², and cuts the last contribution to what is left."""

    def bounds(self, sizes: Tensor) -> Tensor:
        wanted = torch.minimum(sizes, self.clip_norm)
        price = self.up((wanted / self.clip_norm) ** 2)
        rest = self.clip_norm * (self.left / self.units).sqrt() * (1 - 2**-40)  # below, whatever the root's rounding
        bound = torch.where(price <= self.left, wanted, torch.minimum(wanted, rest))
        self.left -= torch.minimum(price, self.left)
        return bound


class RenyiFilter(_Meter):
    """Poisson samples: pays the divergence at a rung of the ladder, at the order that the plan fixed for the group."""

    def __init__(self, plan: Plan, group: Tensor, units: int = UNITS, rungs: int = RUNGS) -> None:
        super().__init__(plan, group, units)
        self.ladder = torch.from_numpy(2.0 ** (-np.arange(rungs) / 2))
        self.price = self.up(torch.from_numpy(relative_costs(plan, self.ladder.numpy())))  # (groups, rungs)

    def bounds(self, sizes: Tensor) -> Tensor:
        rung = self.rung(sizes)
        fits = self.pay(self.price[self.group, rung])
        return torch.where(fits, self.clip_norm * self.ladder[rung], 0.0)

    def rung(self, sizes: Tensor) -> Tensor:
        """(records,) the lowest rung that is not below the norm, with the margin."""
        room = (self.clip_norm / (MARGIN * sizes).clamp_min(1e-300)).clamp_min(1.0)
        return torch.floor(2 * torch.log2(room)).clamp_max(len(self.ladder) - 1).long()


class CountFilter(_Meter):
    """Poisson samples: a full step, or nothing. Abstains if the norm is below a part `floor` of the own clip norm."""

    def __init__(self, plan: Plan, group: Tensor, units: int = UNITS, floor: float = 0.1) -> None:
        super().__init__(plan, group, units)
        self.floor = floor

    def bounds(self, sizes: Tensor) -> Tensor:
        takes_part = sizes >= self.floor * self.clip_norm
        fits = self.pay(torch.where(takes_part, self.units, 0))
        return torch.where(fits & takes_part, self.clip_norm, 0.0)


def fixed_orders(plan: Plan) -> FloatArray:
    """(groups,) the Rényi order at which the plan's steps cost least epsilon: known before training."""
    (phase,) = plan.phases
    alpha = np.array(rdp.OPACUS_ORDERS)
    total = phase.steps * rdp.divergences(phase.sample_rate, phase.noise_multiplier, alpha)  # (groups, orders)
    spent = np.stack([rdp.converted(total[:, [i]], plan.delta, alpha[[i]]) for i in range(len(alpha))], axis=1)
    return np.asarray(alpha[spent.argmin(axis=1)], dtype=np.float64)


def relative_costs(plan: Plan, ladder: FloatArray) -> FloatArray:
    """(groups, rungs) divergence of a step at a rung, over that of a full step, at the group's fixed order."""
    (phase,) = plan.phases
    rows = []
    for rate, noise, order in zip(phase.sample_rate, phase.noise_multiplier, fixed_orders(plan), strict=True):
        costs = rdp.divergences(np.full(len(ladder), rate), noise / ladder, np.array([order]))[:, 0]
        rows.append(np.minimum(costs / costs[0], 1.0))
    return np.stack(rows)


FILTERS: dict[str, Callable[..., Any]] = {
    "none": Unfiltered,
    "gdp": GdpFilter,
    "renyi": RenyiFilter,
    "count": CountFilter,
}

#: The accountants that certify a filter's cap; without a filter, any one does.
CERTIFIED_BY = {"gdp": "gdp", "renyi": "rdp", "count": "pld"}

__all__ = ["CERTIFIED_BY", "FILTERS", "UNITS", "CountFilter", "Filter", "GdpFilter", "RenyiFilter", "Unfiltered"]
