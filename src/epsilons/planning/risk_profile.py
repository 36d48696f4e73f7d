"""The risk of each group under a plan: attacks, odds, and the effect of other people's budgets.

Sample and Mix keep (epsilon, delta), but the rest of a group's privacy profile depends on the other groups' budgets
(Kaiser et al., "Your Privacy Depends on Others", arXiv 2601.12922). Scale's profile does not, at a fixed rate: Scale at
the same epsilon and delta is the reference here. Bayes error and tails are compared separately, so a gain in one does
not hide a loss in the other.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from ..accounting import filter as weighted_orders
from ..accounting.calibration import noises_for
from ..accounting.profile import DELTAS, Profile
from ..accounting.selection import profile_of
from ..core.disclosure import DisplayRow, has_small_cells, risk_of
from ..core.mechanism import FloatArray, IntArray, SampledGaussian
from .display import Table, first_cells, number, promised, round_up, small_cell_rows
from .plan_numbers import SHARES, PlanNumbers
from .plans import Plan

# -- Odds: how often a guess about one person is right, of 100 guesses
#
# A fair coin decides whether the training reads D or its neighbour D′. The attacker sees everything that was released,
# a draw from P or from Q, and guesses which. The best guess names the likelier of the two, so it is right with
# probability ½·Σ max(P, Q) = ½·(1 + TV), where TV = Σ (P − Q)⁺ is the total variation distance. That sum is the
# hockey-stick divergence at ε = 0 (Balle, Barthe and Gaboardi 2018, arXiv 1807.01647v2, Section 2), so δ(0) of a
# certified profile (`accounting.profile`) bounds it: at most ⌈50·(1 + δ(0))⌉ of 100 guesses are right. For one Gaussian
# release of sensitivity 1, δ(0) = 2Φ(1/(2σ)) − 1 (Balle and Wang 2018, arXiv 1805.06530v2, Theorem 8 at ε = 0).
#
# Where the profile is confidential, the promise alone bounds it. Under (ε, δ), the rates a and b of the two errors obey
# a + e^ε·b ≥ 1 − δ and e^ε·a + b ≥ 1 − δ (Kairouz, Oh and Viswanath 2015, arXiv 1311.0776v4, Theorem 2.1). Their sum
# gives (a + b)/2 ≥ (1 − δ)/(1 + e^ε), so at most ⌈100·(e^ε + δ)/(1 + e^ε)⌉ guesses are right.
#
# Every number is rounded up.

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
    return plan.history(group)


def right_guesses(plan: PlanNumbers, groups: Sequence[int] | IntArray | None = None) -> IntArray:
    """(groups,) at most so many of 100 guesses are right, about a member of each group (or of some, by index).

    From the certified profile of each group under all runs of the plan; tens of milliseconds per distinct row. The
    result depends on every budget of the plan: `of_rows` is for readers who must not see them.

    >>> from epsilons import Budgets, Recipe, plan
    >>> scaled = plan(Budgets.from_shares({1.0: .5, 2.0: .5}, records=1000), Recipe(20, 100, 1.0))
    >>> right_guesses(scaled).tolist()
    [55, 58]
    """
    return np.array([right_of_advantage(one) for one in advantages(plan, groups).tolist()], dtype=np.int64)


def advantages(plan: PlanNumbers, groups: Sequence[int] | IntArray | None = None) -> FloatArray:
    """(groups,) the delta that the certified profile of each group has at epsilon 0, as in `right_guesses`."""
    chosen = range(len(plan.groups)) if groups is None else [int(group) for group in groups]
    known: dict[History, float] = {}  # groups with the same history share one
    for group in chosen:
        row = history(plan, group)
        if row not in known:
            known[row] = profile_of(row, plan.select).advantage
    return np.array([known[history(plan, group)] for group in chosen])


def of_rows(plan: PlanNumbers, rows: Sequence[DisplayRow], suppressed: bool) -> tuple[int | None, ...]:
    """The same for rows of a display; of a merged row the largest number.

    suppressed  True where fewer than 20 records hold some budget and the reader must not see it. Then only the row's
                own promise counts, and a merged row has None. A merged row is otherwise bounded by its promises.
    """
    if suppressed:
        return tuple(of_promise(row, plan.groups.declared) for row in rows)
    alone = [row.groups.start for row in rows if not row.merged]
    exact = dict(zip(alone, right_guesses(plan, alone).tolist(), strict=True))
    promised = [right_of_promise(*one) for one in zip(plan.epsilons.tolist(), plan.delta.tolist(), strict=True)]
    return tuple(max(promised[row.groups]) if row.merged else exact[row.groups.start] for row in rows)


def of_promise(row: DisplayRow, declared: Mapping[float, Sequence[float]]) -> int | None:
    """At most so many of 100, by the row's own promise: (epsilon, delta), and the advantage that its tier declares.

    declared  {epsilon: limits}, as in `Groups`
    """
    if row.epsilon is None or row.delta is None:
        return None
    return right_of_tier(row.epsilon, row.delta, declared)


def right_of_tier(epsilon: float, delta: float, declared: Mapping[float, Sequence[float]]) -> int:
    """The same for a tier, as it was declared, whatever other people chose.

    declared  {epsilon: limits}, as in `Groups`

    >>> right_of_tier(1.0, 1e-5, {}), right_of_tier(1.0, 1e-5, {1.0: (0.1, 0.0, math.inf)})
    (74, 56)
    """
    advantage, *_ = declared.get(epsilon, (math.inf,))
    return min(right_of_promise(epsilon, delta), right_of_advantage(min(advantage, 1.0)))


def of_merged(row: DisplayRow, delta: float | None, declared: Mapping[float, Sequence[float]]) -> str:
    """The odds of a merged row in words: by the promise of each tier that it names, else of its largest epsilon.

    delta     of these promises; None if there is none that may be shown. Then "" is returned
    declared  {epsilon: limits}, as in `Groups`
    """
    if delta is None or (not row.tiers and row.at_most is None):
        return ""
    if not row.tiers:
        right = right_of_promise(row.at_most or 0.0, delta)
        return f"at most those of ε\u00a0=\u00a0{number(row.at_most or 0.0)}: {limit_of(right)}"
    return "; ".join(f"{name}: {limit_of(right_of_tier(epsilon, delta, declared))}" for name, epsilon in row.tiers)


def limit_of(right: int) -> str:
    """
    >>> limit_of(100), limit_of(56)
    ('no limit (100 of 100)', 'at most 56 of 100')
    """
    return "no limit (100 of 100)" if right == 100 else f"at most {right} of 100"


def right_over_lifetime(epsilon: float, delta: float) -> int:
    """At most so many of 100 guesses are right, from everything that a registry is ever charged for one person.

    The smallest of what the filter's curve promises at epsilons up to that of the lifetime budget. It follows from the
    budget alone, so it is the same for people who were in many runs, and in none.

    >>> right_over_lifetime(1.0, 1e-5), right_of_promise(1.0, 1e-5)
    (72, 74)
    """
    points = epsilon * np.linspace(0.5, 1.0, 51)
    deltas = weighted_orders.lifetime_deltas(epsilon, delta, points)
    return min(map(right_of_promise, points.tolist(), deltas.tolist()))


def dominating(plan: PlanNumbers, groups: IntArray) -> History:
    """A history that reveals at least as much as that of any of these groups: highest rate and least noise by phase.

    A lower rate is post-processing of a higher one (replace the result by one without the record), and more noise is
    post-processing of less. For one group it is the group's own history.
    """
    history = []
    for phase in plan.phases:
        rate, noise = phase.sample_rate[groups], phase.noise_multiplier[groups]
        drawn = noise[rate > 0] if rate.any() else noise
        history.append(SampledGaussian(float(rate.max()), float(drawn.min()), phase.steps))
    return (*history, *plan.beside)


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
        f"Someone who knows {knows}, and guesses at even odds whether {asks}, is right at most {right} of 100 times"
        f"{', which is no limit' * (right == 100)}; 50 by tossing a coin."
    )


# -- The risk of each group under a plan: attacks, odds, and the effect of other people's budgets

#: The false-positive rates at which attacks are shown.
FALSE_POSITIVES = (1e-3, 1e-2)

ODDS = (
    "Right guesses under a plan are of this plan alone. Those by the promise are the upper limit, which no plan that "
    "keeps ε and δ exceeds; 100 is no limit."
)

EXCESS = (
    "excess: what a group loses against scale at the same epsilon and delta, because of other people's budgets; in "
    "Bayes error at the worst prior, and in epsilon at the worst smaller delta"
)


@dataclass(frozen=True)
class GroupRisk:
    """The risk of one group: upper bounds, and two differences of such bounds, accurate to about 1e-4.

    epsilons      {delta: epsilon} at 1e-9 … 1e-2
    advantage     largest true-positive minus false-positive rate of any attack on one record's presence
    power         {false-positive rate: largest true-positive rate}
    bayes_excess  Bayes error lost against Scale at the same epsilon and delta, at the worst prior
    tail_excess   relative excess of epsilon at a smaller delta over that of the same Scale
    unit          "person", or "record": what the plan protects
    shares_declared  True if the plan was made from declared shares
    """

    epsilons: dict[float, float]
    advantage: float
    power: dict[float, float]
    bayes_excess: float
    tail_excess: float
    unit: str = "record"
    shares_declared: bool = False

    @property
    def odds(self) -> str:
        """The advantage in words for everyone, rounded up (derivation: `planning.odds`).

        >>> GroupRisk({}, 0.105, {}, 0.0, 0.0).odds.split(", ")[2]
        'is right at most 56 of 100 times; 50 by tossing a coin.'
        """
        right = right_of_advantage(self.advantage)
        return sentence(right, shares_declared=self.shares_declared, unit=self.unit)


def risk(plan: Plan, groups: Sequence[int] | IntArray | None = None) -> tuple[GroupRisk, ...]:
    """(groups,) the risk of each group under all runs of this plan, or of some groups (by index).

    Takes tens of milliseconds per distinct row. A group that is never drawn has no risk. Raises InfeasibleBudgetError
    where Scale could not meet the budget of a group that is drawn.

    >>> from epsilons import Budgets, Recipe, plan
    >>> sampled = plan(Budgets.from_shares({1.0: .5, 2.0: .5}, records=1000), Recipe(20, 100, 1.0), "sample")
    >>> [round(one.advantage, 2) for one in risk(sampled)]
    [0.08, 0.15]
    """
    chosen = np.arange(len(plan.groups)) if groups is None else np.asarray(groups)
    epsilons, delta = plan.epsilons[chosen], plan.delta[chosen]
    rate = plan.batch_size / plan.records
    drawn = np.any([phase.sample_rate[chosen] > 0 for phase in plan.phases], axis=0)
    noises = np.full(len(chosen), np.inf)
    if drawn.any():
        noises[drawn] = noises_for(
            epsilons[drawn], rate, plan.runs * plan.steps, plan.groups.terms[chosen][drawn], plan.certify
        )
    profiles: dict[tuple[SampledGaussian, ...], Profile] = {}  # groups with the same history share one

    def shared(*history: SampledGaussian) -> Profile:
        return profiles.setdefault(history, profile_of(history, plan.select))

    risks = []
    for i, group in enumerate(chosen):
        profile = shared(*history(plan, int(group)))
        scale = shared(SampledGaussian(rate, float(noises[i]), plan.runs * plan.steps)) if drawn[i] else profile
        risks.append(
            GroupRisk(
                epsilons=dict(zip(DELTAS, profile.epsilons.tolist(), strict=True)),
                advantage=profile.advantage,
                power={rate: float(profile.power(rate)) for rate in FALSE_POSITIVES},
                bayes_excess=profile.bayes_excess(scale),
                tail_excess=profile.tail_excess(scale, float(delta[i])),
                unit=plan.unit,
                shares_declared=plan.adjacency == SHARES,
            )
        )
    return tuple(risks)


def excess(risks: Sequence[GroupRisk]) -> FloatArray:
    """(2,) the largest Bayes excess and the largest tail excess of any group."""
    return np.array([max(r.bayes_excess for r in risks), max(r.tail_excess for r in risks)])


def risk_table(plan: Plan, risks: Sequence[GroupRisk]) -> Table:
    """Risks as rows; where a plan has small cells, only what follows from a row's (epsilon, delta)."""
    headers = [promised(plan), f"{plan.unit}s", "right guesses in 100"]
    headers[-1] += " by the promise" if has_small_cells(plan.groups) else " under the plan"
    if has_small_cells(plan.groups):
        rows = [(first_cells(row), of_promise(row, plan.groups.declared)) for row in small_cell_rows(plan)]
        return headers, [[*cells, "merged" if right is None else f"≤ {right}"] for cells, right in rows]
    headers += [f"found at FPR {a:g}" for a in FALSE_POSITIVES]
    headers += ["epsilon at 1e-9", "at 1e-7", "at 1e-3", "Bayes excess", "tail excess"]
    table = []
    for group, (epsilon, count, one) in enumerate(zip(plan.epsilons, plan.counts, risks, strict=True)):
        bounds = [
            right_of_advantage(one.advantage),
            *one.power.values(),
            *(one.epsilons[d] for d in (DELTAS[0], DELTAS[2], DELTAS[6])),
        ]
        excesses = [f"{one.bayes_excess:.4f}", f"{one.tail_excess:.2%}"]
        name = number(epsilon) + risk_of(plan.groups, group)
        table.append([name, f"{count:,}", *(number(round_up(bound, 5)) for bound in bounds), *excesses])
    return headers, table
