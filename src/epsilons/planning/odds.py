"""Odds: how often a guess about one person is right, of 100 guesses.

A fair coin decides whether the training reads D or its neighbour D′. The attacker sees everything that was released, a
draw from P or from Q, and guesses which. The best guess names the likelier of the two, so it is right with probability
½·Σ max(P, Q) = ½·(1 + TV), where TV = Σ (P − Q)⁺ is the total variation distance. That sum is the hockey-stick
divergence at ε = 0 (Balle, Barthe and Gaboardi 2018, arXiv 1807.01647v2, Section 2), so δ(0) of a certified profile
(`accounting.profile`) bounds it: at most ⌈50·(1 + δ(0))⌉ of 100 guesses are right. For one Gaussian release of
sensitivity 1, δ(0) = 2Φ(1/(2σ)) − 1 (Balle and Wang 2018, arXiv 1805.06530v2, Theorem 8 at ε = 0).

Where the profile is confidential, the promise alone bounds it. Under (ε, δ), the rates a and b of the two errors obey a
+ e^ε·b ≥ 1 − δ and e^ε·a + b ≥ 1 − δ (Kairouz, Oh and Viswanath 2015, arXiv 1311.0776v4, Theorem 2.1). Their sum gives
(a + b)/2 ≥ (1 − δ)/(1 + e^ε), so at most ⌈100·(e^ε + δ)/(1 + e^ε)⌉ guesses are right.

Every number is rounded up.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction

import numpy as np

from ..accounting.profile import Profile
from ..disclosure import DisplayRow
from ..mechanism import IntArray, SampledGaussian
from .plan_numbers import PlanNumbers

#: More than the relative error of e^ε and of the arithmetic on it.
_ROUNDING = 1e-12

History = tuple[SampledGaussian, ...]


def right_of_advantage(advantage: float) -> int:
    """⌈50·(1 + advantage)⌉, at most 100. The arithmetic is exact, so the result is never too low.

    advantage  upper bound on the total variation distance, as `accounting.profile.Profile.advantage`

    >>> right_of_advantage(0.0), right_of_advantage(0.105), right_of_advantage(1.0)
    (50, 56, 100)
    """
    return min(100, math.ceil(50 * (1 + Fraction(float(advantage)))))


def right_of_promise(epsilon: float, delta: float) -> int:
    """At most so many of 100 guesses are right, whatever keeps (epsilon, delta).

    >>> right_of_promise(1.0, 1e-5), right_of_promise(0.01, 0.0), right_of_promise(1000.0, 0.0)
    (74, 51, 100)
    """
    wrong = (1 - delta) / (1 + math.exp(min(epsilon, 700.0)))
    return min(100, math.ceil(100 * (1 - Fraction(wrong * (1 - _ROUNDING)))))


def history(plan: PlanNumbers, group: int) -> History:
    """What a group goes through in all runs of a plan."""
    phases = (phase.history(group) for phase in plan.phases)
    return tuple(replace(one, steps=plan.runs * one.steps) for one in phases)


def right_guesses(plan: PlanNumbers, groups: Sequence[int] | IntArray | None = None) -> IntArray:
    """(groups,) at most so many of 100 guesses are right, about a member of each group (or of some, by index).

    From the certified profile of each group under all runs of the plan; tens of milliseconds per distinct row. The
    result depends on every budget of the plan: `of_rows` is for readers who must not see them.

    >>> from epsilons import Budgets, Recipe, plan
    >>> scaled = plan(Budgets.from_shares({1.0: .5, 2.0: .5}, records=1000), Recipe(20, 100, 1.0))
    >>> right_guesses(scaled).tolist()
    [55, 58]
    """
    chosen = range(len(plan.groups)) if groups is None else [int(group) for group in groups]
    known: dict[History, int] = {}  # groups with the same history share one
    for group in chosen:
        row = history(plan, group)
        if row not in known:
            known[row] = right_of_advantage(Profile(row).advantage)
    return np.array([known[history(plan, group)] for group in chosen], dtype=np.int64)


def of_rows(plan: PlanNumbers, rows: Sequence[DisplayRow], suppressed: bool) -> tuple[int | None, ...]:
    """The same for rows of a display; of a merged row the largest number.

    suppressed  True where fewer than 20 records hold some budget and the reader must not see it. Then only the row's
                own promise counts, and a merged row has None. A merged row is otherwise bounded by its promises.
    """
    if suppressed:
        shown = ((row.epsilon, row.delta) for row in rows)
        return tuple(None if e is None or delta is None else right_of_promise(e, delta) for e, delta in shown)
    alone = [row.groups.start for row in rows if not row.merged]
    exact = dict(zip(alone, right_guesses(plan, alone).tolist(), strict=True))
    return tuple(_of_promises(plan, row.groups) if row.merged else exact[row.groups.start] for row in rows)


def _of_promises(plan: PlanNumbers, groups: slice) -> int:
    promises = zip(plan.epsilons[groups].tolist(), plan.delta[groups].tolist(), strict=True)
    return max(right_of_promise(epsilon, delta) for epsilon, delta in promises)


def sentence(right: int, *, shares_declared: bool, unit: str = "record") -> str:
    """The odds in words for everyone.

    right            of 100, as `right_guesses`
    shares_declared  True if the plan was made from declared shares: presence is then hidden, too
    unit             "person", or "record": one row

    >>> sentence(56, shares_declared=False, unit="person").split(", ")[2]
    'is right at most 56 of 100 times; 50 by tossing a coin.'
    """
    person = unit == "person"
    if shares_declared:
        knows, asks = "everyone else's data", "you are in the data" if person else "your row is in the data"
    else:
        knows, asks = "the list and everyone else's data", "your data were used" if person else "your row was used"
    knows = knows if person else knows.replace("everyone else's data", "all other rows")
    return (
        f"Someone who knows {knows}, and guesses at even odds whether {asks}, is right at most {right} of 100 times; "
        "50 by tossing a coin."
    )
