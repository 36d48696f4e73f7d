"""What a plan means in odds: how often a guess about one person can be right, by the certified profile of their group.

With advantage δ(0), a guess at even odds between two cases is right at most 50 (1 + δ(0)) times in 100 (Kairouz, Oh,
Viswanath, "The Composition Theorem for Differential Privacy", arXiv 1311.0776v4, Theorem 2.1, at ε = 0). Where only
(ε, δ) may be used, the largest advantage of any mechanism that keeps them takes its place.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from ..accounting.profile import Profile
from ..disclosure import DisplayRow
from ..mechanism import FloatArray, SampledGaussian
from .plan_numbers import SHARES, PlanNumbers

_LARGEST_EXPONENT = 700.0


def right_of_100(advantage: float) -> int:
    """The most right guesses in 100 at even odds, ⌈50 (1 + advantage)⌉.

    >>> right_of_100(0.105), right_of_100(0.0), right_of_100(1.0)
    (56, 50, 100)
    """
    return min(100, math.ceil(50 * (1 + advantage) - 1e-9))


def advantage_bound(epsilon: float, delta: float) -> float:
    """The largest advantage against any mechanism that keeps (epsilon, delta): (e^ε − 1 + 2δ) / (e^ε + 1).

    >>> round(advantage_bound(1.0, 1e-5), 3)
    0.462
    """
    odds = math.exp(min(epsilon, _LARGEST_EXPONENT))
    return min(1.0, (odds - 1 + 2 * delta) / (odds + 1))


def advantages(plan: PlanNumbers, groups: Sequence[int]) -> FloatArray:
    """(groups,) δ(0) of these groups under all runs of the plan; tens of milliseconds per distinct row."""
    found: dict[tuple[SampledGaussian, ...], float] = {}
    values = []
    for group in groups:
        histories = (phase.history(int(group)) for phase in plan.phases)
        history = tuple(replace(one, steps=plan.runs * one.steps) for one in histories)
        if history not in found:
            found[history] = Profile(history).advantage
        values.append(found[history])
    return np.array(values)


def right_guesses(plan: PlanNumbers, rows: Sequence[DisplayRow], bounds_only: bool = False) -> tuple[int | None, ...]:
    """(rows,) the most right guesses in 100 about one person of each row.

    A row of one group has the profile of that group. A merged row has the bound that follows from its largest epsilon
    and delta, or None where the row shows no such bound.

    bounds_only  True: use no number that was solved from all budgets together (`disclosure`)
    """
    single = [row.groups.start for row in rows if not row.merged and not bounds_only]
    of_group = dict(zip(single, advantages(plan, single).tolist(), strict=True))
    return tuple(_right(plan, row, of_group) for row in rows)


def _right(plan: PlanNumbers, row: DisplayRow, of_group: dict[int, float]) -> int | None:
    if row.groups.start in of_group and not row.merged:
        return right_of_100(of_group[row.groups.start])
    if row.at_most is None:
        return None
    return right_of_100(advantage_bound(row.at_most, float(plan.delta.max())))


def sentence(right: int, adjacency: str, your_data: str = "your data") -> str:
    """The odds in words for everyone.

    >>> sentence(74, "zero-out, roster public")[-97:]
    'whether your data were used, is right at most 74 of 100 times. Tossing a coin is right 50 times.'
    """
    knows = "the declared shares" if adjacency == SHARES else "the list of budgets"
    question = "whether you are in the data" if adjacency == SHARES else f"whether {your_data} were used"
    return (
        f"Someone who knows {knows} and everyone else’s data, and guesses at even odds {question}, is right at most "
        f"{right} of 100 times. Tossing a coin is right 50 times."
    )
