"""What a plan means for each group: attacks, odds, and what it owes to other people's budgets.

Sample and Mix keep (epsilon, delta), but where a group stands on the curve behind it depends on the others' budgets
(Kaiser et al., "Your Privacy Depends on Others", arXiv 2601.12922). Scale's curve does not, at a fixed rate: it is the
reference here, at the same epsilon and delta. Bayes error and tails are compared apart: no loss of the one can hide a
loss of the other.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..accounting.calibration import noises_for
from ..accounting.profile import DELTAS, Profile, profile
from ..budgets import FloatArray, IntArray
from ..disclosure import Row, hides
from ..mechanism import SampledGaussian
from .display import Table, number, shown, spent, who
from .plans import Plan

#: The false-positive rates at which attacks are shown.
FALSE_POSITIVES = (1e-3, 1e-2)

EXCESS = (
    "excess: what a group loses against scale at the same epsilon and delta, because of other people's budgets; in "
    "Bayes error at the worst prior, and in epsilon at the worst smaller delta"
)


@dataclass(frozen=True)
class Risk:
    """One group's risk: upper bounds, and two differences of such bounds, good to about 1e-4.

    epsilons      {delta: epsilon} at 1e-9 … 1e-2
    advantage     largest true-positive minus false-positive rate of any attack on one record's presence
    power         {false-positive rate: largest true-positive rate}
    bayes_excess  Bayes error lost against Scale at the same epsilon and delta, at the worst prior
    tail_excess   part by which epsilon at a smaller delta exceeds that of the same Scale
    """

    epsilons: dict[float, float]
    advantage: float
    power: dict[float, float]
    bayes_excess: float
    tail_excess: float

    @property
    def odds(self) -> str:
        """The advantage in words for everyone.

        >>> Risk({}, 0.105, {}, 0.0, 0.0).odds
        'Guessing whether a record took part, at even odds, is right at most 56 times in 100 instead of 50.'
        """
        right = min(100, int(np.ceil(50 * (1 + self.advantage) - 1e-9)))
        return (
            f"Guessing whether a record took part, at even odds, is right at most {right} times in 100 instead of 50."
        )


def risk(plan: Plan, groups: Sequence[int] | IntArray | None = None) -> tuple[Risk, ...]:
    """(groups,) each group's risk under this plan, or that of some. Takes tens of milliseconds per distinct row.

    Who is never drawn risks nothing. Raises InfeasibleBudgetError where Scale could not meet the budget of somebody
    who is.
    """
    chosen = np.arange(len(plan.epsilons)) if groups is None else np.asarray(groups)
    levels, delta = plan.epsilons[chosen], plan.delta[chosen]
    rate = plan.batch_size / plan.records
    drawn = np.any([phase.sample_rate[chosen] > 0 for phase in plan.phases], axis=0)
    own = np.full(len(chosen), np.inf)
    if drawn.any():
        own[drawn] = noises_for(levels[drawn], rate, plan.steps, delta[drawn], plan.accounts)
    known: dict[tuple[SampledGaussian, ...], Profile] = {}

    def of(*history: SampledGaussian) -> Profile:
        if history not in known:
            known[history] = profile(history)
        return known[history]

    found = []
    for place, (group, noise) in enumerate(zip(chosen, own, strict=True)):
        mine = of(*(phase.history(int(group)) for phase in plan.phases))
        alone = of(SampledGaussian(rate, float(noise), plan.steps)) if drawn[place] else mine
        found.append(
            Risk(
                epsilons=dict(zip(DELTAS, mine.epsilons.tolist(), strict=True)),
                advantage=mine.advantage,
                power={rate: mine.power(rate) for rate in FALSE_POSITIVES},
                bayes_excess=mine.bayes_excess(alone),
                tail_excess=mine.tail_excess(alone, float(delta[place])),
            )
        )
    return tuple(found)


def excess(risks: Sequence[Risk]) -> FloatArray:
    """(2,) the largest Bayes and the largest tail excess of any group."""
    return np.array([max(r.bayes_excess for r in risks), max(r.tail_excess for r in risks)])


def risk_table(plan: Plan, risks: Sequence[Risk]) -> Table:
    """Risks as rows; where few hold some budget, only what follows from a row's own (epsilon, delta)."""
    headers = ["epsilon", "records", "right guesses in 100"]
    if hides(plan):
        return headers, [[*who(row), _right_guesses(row)] for row in shown(plan)]
    headers += [f"found at FPR {a:g}" for a in FALSE_POSITIVES]
    headers += ["epsilon at 1e-9", "at 1e-7", "at 1e-3", "Bayes excess", "tail excess"]
    table = []
    for level, count, one in zip(plan.epsilons, plan.counts, risks, strict=True):
        numbers = [
            50 * (1 + one.advantage),
            *one.power.values(),
            *(one.epsilons[d] for d in (DELTAS[0], DELTAS[2], DELTAS[6])),
        ]
        excesses = [f"{one.bayes_excess:.4f}", f"{one.tail_excess:.2%}"]
        table.append([number(level), f"{count:,}", *map(number, numbers), *excesses])
    return headers, table


def _right_guesses(row: Row) -> str:
    """At most so many in 100, of a presence at even odds, whatever mechanism keeps (epsilon, delta)."""
    if row.epsilon is None or row.delta is None:
        return "merged"
    odds = math.exp(min(row.epsilon, 700.0))
    return "≤ " + spent(min(100 * (odds + row.delta) / (1 + odds), 100.0), 100.0)
