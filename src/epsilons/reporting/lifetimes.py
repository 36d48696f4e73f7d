"""The tiers of a run that is charged to a registry: lifetime promises, what is used of them, and odds.

The groups of such a plan are levels, which are no promises: people of one tier who were in different runs are in
different groups. Here they share a row, and each of its odds is the largest of any of them.

The version for release shows the tiers as they were declared. Nothing in it depends on how many people are in a tier,
or on what they used: where it did, the reports of two runs on nearly the same people would differ by what the one
person chose who withdrew, joined or changed between them, however much is merged in each.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from ..accounting import filter as weighted_orders
from ..accounting.profile import Profile
from ..core.disclosure import DisplayRow, display_rows, tier_of
from ..core.mechanism import FloatArray, Groups, IntArray
from ..planning import Plan, risk_profile
from .load_run import RunRecord

Range = tuple[float, float]


@dataclass(frozen=True)
class Lifetime:
    """What one row's people promised for their lifetimes, and what is used of it.

    right_guesses       of 100, at most so many are right from everything that is ever charged; None if not known
    right_from_this_run the same from this run alone
    used_before, used_by_run, left  (least, most) of any person in the row, parts of the lifetime budget at the home
                        order, as `epsilons registry show` counts; None for release
    """

    right_guesses: int | None = None
    right_from_this_run: int | None = None
    used_before: Range | None = None
    used_by_run: Range | None = None
    left: Range | None = None


def tiers_of(record: RunRecord, release: bool) -> tuple[tuple[DisplayRow, Lifetime], ...]:
    """Rows of people with one lifetime budget, strictest first, whose `groups` are none of the plan's.

    One row without a promise if the run does not say what the lifetime budgets are, or, for release, if fewer than half
    of the people hold a budget that the run declared as a tier.
    """
    plan, stated = record.plan, record.settings.lifetimes
    names = record.settings.metadata.tiers or {}
    rows: tuple[tuple[DisplayRow, Lifetime], ...] = ()
    if stated:
        epsilons = np.array([epsilon for epsilon, _ in stated])
        rows = _declared(plan, epsilons, names) if release else _held(plan, epsilons, names, _used(plan, stated))
    return rows or ((DisplayRow("all", None, None, None, None, None, None, slice(0, 0)), Lifetime()),)


def labels(record: RunRecord) -> list[str] | None:
    """Names of the plan's groups: their lifetime budget, and what was used of it before. None for other runs."""
    if record.settings.registry_id is None or not record.settings.lifetimes:
        return None
    before, _ = _used(record.plan, record.settings.lifetimes).T
    stated = zip(record.settings.lifetimes, before, strict=True)
    return [f"{epsilon:.5g}, {used:.1%} used before" for (epsilon, _), used in stated]


def _used(plan: Plan, stated: list[list[float]]) -> FloatArray:
    """(groups, 2) the parts of their lifetime budgets that people used before, and will have after, all steps."""
    assert plan.groups.starts is not None
    epsilons, homes = np.array(stated).T
    home, rows, phases = np.searchsorted(weighted_orders.ORDERS, homes), np.arange(len(homes)), plan.phases
    rates, noises = np.array([(phase.sample_rate, phase.noise_multiplier) for phase in phases]).swapaxes(0, 1)
    costs = weighted_orders.sums(rates, noises, [phase.steps for phase in phases], len(rows))
    offsets = weighted_orders.offsets(plan.delta, home)[rows, home]
    before = plan.groups.starts[rows, home] - offsets
    nats, capacity = np.stack([before, before + costs[rows, home]], axis=1), (epsilons - offsets)[:, None]
    parts = np.divide(nats, capacity, out=np.ones_like(nats), where=capacity > 0)
    return np.asarray(np.clip(parts, 0.0, 1.0))


def _held(
    plan: Plan, epsilons: FloatArray, names: Mapping[str, float], used: FloatArray
) -> tuple[tuple[DisplayRow, Lifetime], ...]:
    """The budgets that people hold, for internal use."""
    budgets, tier = np.unique(np.stack([epsilons, plan.delta], axis=1), axis=0, return_inverse=True)
    tier = tier.reshape(-1)
    counts = np.bincount(tier, plan.counts).astype(np.int64)
    rows = []
    for row in display_rows(Groups(budgets[:, 0], budgets[:, 1], counts), names, release=False):
        groups = np.flatnonzero((tier >= row.groups.start) & (tier < row.groups.stop))
        before, after = used[groups].T
        promised = risk_profile.right_over_lifetime(*budgets[row.groups].max(axis=0))
        lifetime = Lifetime(
            promised,
            min(promised, _right_from_run(plan, groups)),
            _range(before),
            _range(after - before),
            _range(1 - after),
        )
        rows.append((replace(row, groups=slice(0, 0)), lifetime))
    return tuple(rows)


def _right_from_run(plan: Plan, groups: IntArray) -> int:
    return risk_profile.right_of_advantage(Profile(risk_profile.dominating(plan, groups)).advantage)


def _range(parts: FloatArray) -> Range:
    return float(parts.min()), float(parts.max())


def _declared(plan: Plan, epsilons: FloatArray, names: Mapping[str, float]) -> tuple[tuple[DisplayRow, Lifetime], ...]:
    """The declared tiers, with the delta of most people: no single person decides what is shown."""
    deltas, which = np.unique(plan.delta, return_inverse=True)
    delta = float(deltas[np.bincount(which.reshape(-1), plan.counts).argmax()])
    hold = np.isin(epsilons, list(names.values())) & (plan.delta == delta)
    if 2 * plan.counts[hold].sum() <= plan.records:
        return ()
    return tuple(
        (
            DisplayRow(f"{epsilon:.5g}", tier_of(names, epsilon), epsilon, epsilon, epsilon, delta, None, slice(0, 0)),
            Lifetime(risk_profile.right_over_lifetime(epsilon, delta)),
        )
        for epsilon in sorted(set(names.values()))
    )
