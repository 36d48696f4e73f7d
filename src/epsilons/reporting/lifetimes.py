"""The tiers of a run that is charged to a registry: lifetime promises, what is used of them, and odds.

The groups of such a plan are levels, which are no promises: people of one tier who were in different runs are in
different groups. Here they share a row, and each of its odds is the largest of any of them.

The version for release shows the tiers as they were declared (`disclosure.declared_rows`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from ..accounting.filter import ORDERS, offsets, sums
from ..accounting.profile import Profile
from ..core.disclosure import DisplayRow, declared_rows, display_rows
from ..core.mechanism import FloatArray, Groups
from ..planning import risk_profile
from .load_run import RunRecord

Range = tuple[float, float]
_NONE = slice(0, 0)


@dataclass(frozen=True)
class Lifetime:
    """What one row's people promised for their lifetimes, and what is used of it.

    right_guesses       of 100, at most so many are right from everything that is ever charged; None if not known
    right_from_this_run the same from this run alone
    used_before, used_by_run, left  (least, most) of any person of this run in the row, parts of the lifetime budget at
                        the home order; None for release. `epsilons registry show` averages over all who are enrolled
    """

    right_guesses: int | None = None
    right_from_this_run: int | None = None
    used_before: Range | None = None
    used_by_run: Range | None = None
    left: Range | None = None


def tiers_of(record: RunRecord, release: bool) -> tuple[tuple[DisplayRow, Lifetime], ...]:
    """Rows of people with one lifetime budget, strictest first, whose `groups` are none of the plan's.

    One row without a promise if the run does not say what the lifetime budgets are.
    """
    rows: list[tuple[DisplayRow, Lifetime]] = []
    if record.settings.lifetimes:
        rows = (_declared if release else _held)(record, record.settings.metadata.tiers or {})
    return tuple(rows) or ((DisplayRow("all", None, None, None, None, None, None, _NONE), Lifetime()),)


def labels(record: RunRecord) -> list[str] | None:
    """Names of the plan's groups: their lifetime budget, and what was used of it before. None if not recorded."""
    if not record.settings.lifetimes:
        return None
    epsilons, used = _accounts(record)
    return [f"{epsilon:.5g}, {before:.1%} used before" for epsilon, (before, _) in zip(epsilons, used, strict=True)]


def _accounts(record: RunRecord) -> tuple[FloatArray, FloatArray]:
    """(groups,) lifetime epsilons, and (groups, 2) their parts used before, and after all steps; groups of the plan."""
    plan, (epsilons, orders) = record.plan, np.array(record.settings.lifetimes).T
    assert plan.groups.starts is not None
    at_home = np.arange(len(orders)), np.searchsorted(ORDERS, orders)
    table = np.array([(phase.sample_rate, phase.noise_multiplier) for phase in plan.phases])
    costs = sums(table[:, 0], table[:, 1], [phase.steps for phase in plan.phases], len(orders))
    begin = offsets(plan.delta, at_home[1])[at_home]
    before = plan.groups.starts[at_home] - begin
    nats, capacity = np.stack([before, before + costs[at_home]], axis=1), (epsilons - begin)[:, None]
    parts = np.divide(nats, capacity, out=np.ones_like(nats), where=capacity > 0)
    return epsilons, np.clip(parts, 0.0, 1.0)


def _held(record: RunRecord, names: Mapping[str, float]) -> list[tuple[DisplayRow, Lifetime]]:
    """The budgets that people hold, for internal use."""
    plan, (epsilons, used) = record.plan, _accounts(record)
    budgets, tier = np.unique(np.stack([epsilons, plan.delta], axis=1), axis=0, return_inverse=True)
    tier = tier.reshape(-1)
    counts = np.bincount(tier, plan.counts).astype(np.int64)
    rows = []
    for row in display_rows(Groups(budgets[:, 0], budgets[:, 1], counts), names, release=False):
        groups = np.flatnonzero((tier >= row.groups.start) & (tier < row.groups.stop))
        before, after = used[groups].T
        right = risk_profile.right_over_lifetime(*budgets[row.groups].max(axis=0))
        alone = risk_profile.right_of_advantage(Profile(risk_profile.dominating(plan, groups)).advantage)
        parts = ((float(one.min()), float(one.max())) for one in (before, after - before, 1 - after))
        rows.append((replace(row, groups=_NONE), Lifetime(right, min(right, alone), *parts)))
    return rows


def _declared(record: RunRecord, names: Mapping[str, float]) -> list[tuple[DisplayRow, Lifetime]]:
    """The declared tiers, for release."""
    plan, epsilons = record.plan, [epsilon for epsilon, _ in record.settings.lifetimes]
    rows = declared_rows(epsilons, plan.delta, plan.counts, names)
    return [(row, Lifetime(_right(row.epsilon, row.delta))) for row in rows]


def _right(epsilon: float | None, delta: float | None) -> int | None:
    return None if epsilon is None or delta is None else risk_profile.right_over_lifetime(epsilon, delta)
