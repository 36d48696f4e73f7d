"""Which strategy suits these budgets? All of them side by side, under one model of what training gains from each.

The model: every gradient is clipped (gradients are long) and all point in the same direction. The signal to noise of
one step is then Σ n_p q_p w_p c_p / noise_std = Σ n_p q_p / σ_p. It ranks ways to use budgets, not models or scores.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from .. import accounting
from ..accounting import Accountant
from ..accounting.calibration import noise_for, noises_for
from ..accounting.selection import DISTRIBUTIONS, MOST_RUNS, Selected, Selection
from ..budgets.budgets import Budgets
from ..core.disclosure import ADVICE_SUPPRESSED, SMALLEST_SHOWN, has_small_cells, of_unit, risk_of
from ..core.mechanism import IntArray, Repeated
from ..errors import PlanError, PromiseError
from .display import Table, aligned, number
from .plan_numbers import Recipe
from .planner import plan
from .plans import Plan
from .risk_profile import excess, risk

MODEL = (
    "signal: of one step over its noise, relative to uniform, if every gradient is clipped and all point alike. A "
    "model: it ranks ways to divide budgets, and says nothing of accuracy."
)
#: What often gains more than any way to divide budgets.
INPUTS = (
    "For images or texts, first train a linear model on fixed features (data.features in a config), which cost no "
    "privacy: epsilons docs concepts"
)
TUNING = "Tuning: noise of the strictest tier, relative to one run"
#: A smaller gain is within the variation of training itself.
SMALL_GAIN = 0.05
_MOST_THRESHOLDS = 6
#: With more epsilons than this, the excess is computed for this many, evenly spaced: neighbours hardly differ.
_MOST_LEVELS = 20
OF_SOME = f"The excess is the largest of {_MOST_LEVELS} levels; of those between them it may be a little larger."


@dataclass(frozen=True)
class Way:
    """One way to plan.

    name          strategy and option
    signal        signal to noise of one step, relative to uniform
    records       records that take part
    weight        (groups,) part of the expected gradient that comes from each group
    bayes_excess, tail_excess  the largest of any group over Scale (see `GroupRisk`); of more than 20 epsilons, of 20
    """

    name: str
    signal: float
    records: int
    weight: tuple[float, ...]
    bayes_excess: float
    tail_excess: float

    @property
    def is_individual(self) -> bool:
        """Whether different budgets get different rates or clip norms, among the records that take part."""
        return self.name != "uniform" and not self.name.startswith("exclude")


@dataclass(frozen=True, eq=False)
class Advice:
    """All ways side by side.

    plan        the plan of uniform
    ways        uniform first
    full_batch  signal if every record were drawn in every step: what a larger batch could add
    plans       the plan of each way
    tuning      noise of the strictest group over that of one run: of several runs that are all released, and of
                selections of as many in expectation; {} for one run
    """

    plan: Plan
    ways: tuple[Way, ...] = field(repr=False)
    full_batch: float = field(repr=False)
    plans: tuple[Plan, ...] = field(repr=False, default=())
    tuning: dict[str, float] = field(repr=False, default_factory=dict)

    @property
    def model(self) -> str:
        """The model behind the numbers."""
        return MODEL if len(self.plan.groups) <= _MOST_LEVELS else f"{MODEL} {OF_SOME}"

    @property
    def inputs(self) -> str:
        """What to train on, where it fits."""
        return INPUTS

    @property
    def best(self) -> Way | None:
        """The way of using individual budgets with the largest signal; None if none keeps all promises."""
        return max((way for way in self.ways if way.is_individual), key=lambda way: way.signal, default=None)

    @property
    def verdict(self) -> str:
        """The conclusion, in two sentences."""
        common = max(way.signal for way in self.ways if not way.is_individual)
        individual = self.best
        if individual is None:
            return "No way of using individual budgets keeps all promises here; uniform and exclude are left."
        gain = individual.signal / common - 1
        first = (
            f"Individual budgets hardly help here: {individual.name} is {gain:+.1%} against the best single budget."
            if gain < SMALL_GAIN
            else f"Individual budgets help: {individual.name} has {gain:.0%} more signal than the best single budget."
        )
        larger = self.full_batch / individual.signal - 1
        return f"{first} A larger batch could add up to {max(larger, 0):.0%}."

    @property
    def of_tuning(self) -> str:
        """What tuning costs, in a sentence; "" for one run."""
        if not self.tuning:
            return ""
        costs = ", ".join(f"{name} {cost:.2f}" for name, cost in self.tuning.items())
        least = min(self.tuning, key=self.tuning.__getitem__)
        return f"{TUNING}: {costs}. The least noise: {least}."

    def to_dict(self) -> dict[str, Any]:
        """As JSON values."""
        return {
            **({"tuning": self.tuning} if self.tuning else {}),
            "verdict": self.verdict,
            "model": self.model,
            "inputs": self.inputs,
            "full_batch": self.full_batch,
            "epsilon": self.plan.epsilons.tolist(),
            "ways": [asdict(way) for way in self.ways],
        }

    def table(self) -> Table:
        """One row per way."""
        headers = [
            "",
            "signal",
            f"{self.plan.unit}s",
            *(f"weight of {number(e)}{risk_of(self.plan.groups, group)}" for group, e in enumerate(self.plan.epsilons)),
        ]
        headers += ["Bayes excess", "tail excess"]
        rows = []
        for way in self.ways:
            weights = [f"{weight:.1%}" for weight in way.weight]
            numbers = [f"{way.signal:.3f}", f"{way.records:,}", *weights, f"{way.bayes_excess:.4f}"]
            rows.append([way.name, *numbers, f"{way.tail_excess:.1%}"])
        return headers, rows

    def __str__(self) -> str:
        if has_small_cells(self.plan.groups):
            return of_unit(ADVICE_SUPPRESSED, self.plan.unit)
        return "\n".join(
            filter(None, [aligned(self.table()), "", self.verdict, self.of_tuning, self.model, self.inputs])
        )


def advise(
    budgets: Budgets,
    recipe: Recipe,
    accountant: str | Accountant = "pld",
    *,
    runs: int = 1,
    select: Selection | None = None,
    class_noise: float | None = None,
    excesses: bool = True,
) -> Advice:
    """Uniform, exclude at several thresholds, Scale, Mix and Sample side by side.

    runs, select, class_noise  as for `plan`: how many runs share the budgets, and whether they count classes
    excesses                   False leaves out bayes_excess and tail_excess, which take most of the time: they are NaN

    Ways that cannot keep every promise, or leave too few records, are left out. Raises InfeasibleBudgetError if
    uniform cannot meet the strictest budget.

    >>> budgets = Budgets.from_shares({1.0: .34, 2.0: .43, 3.0: .23}, records=50_000)
    >>> advice = advise(budgets, Recipe(steps=1465, batch_size=1024, clip_norm=0.4), "rdp")
    >>> {way.name: round(way.signal, 2) for way in advice.ways}["sample"]
    1.68
    """
    certify = accounting.accountant(accountant)
    shared = {"runs": runs, "select": select, "class_noise": class_noise}
    make: Callable[..., Plan] = functools.partial(plan, budgets, recipe, accountant=certify, **shared)  # type: ignore[arg-type]
    uniform = make("uniform")
    candidates: list[tuple[str, Callable[[], Plan]]] = []
    thresholds = np.unique(budgets.epsilons)[1:]
    for threshold in thresholds[_spread(len(thresholds), _MOST_THRESHOLDS)]:
        is_shown = budgets.counts[budgets.epsilons == threshold].sum() >= SMALLEST_SHOWN
        declared = risk_of(uniform.groups, int(np.argmax(uniform.epsilons == threshold)))
        name = f"exclude below {threshold:.3g}{declared}" if is_shown else "exclude some"
        candidates.append((name, functools.partial(make, "exclude", threshold=float(threshold))))
    candidates += [(name, functools.partial(make, name)) for name in ("scale", "mix", "sample")]
    ways, plans = [_way("uniform", uniform, uniform, excesses)], [uniform]
    for name, candidate in candidates:
        try:
            made = candidate()
            ways.append(_way(name, made, uniform, excesses))
        except (PlanError, PromiseError):
            continue
        plans.append(made)
    certify = uniform.certify  # a selection has its own
    full = noises_for(budgets.epsilons, 1.0, runs * recipe.steps, budgets.claims, certify)
    basis = _signal(uniform) / budgets.records
    tuning = tuning_costs(budgets, recipe, accounting.accountant(accountant), runs if select is None else select.mean)
    return Advice(uniform, tuple(ways), float(budgets.shares @ (1 / full)) / basis, tuple(plans), tuning)


def tuning_costs(budgets: Budgets, recipe: Recipe, accountant: Accountant, runs: float) -> dict[str, float]:
    """Noise of the strictest group over that of one run, for each way to share the budgets among so many runs.

    {} for one run, and for budgets that no selection takes.
    """
    is_known = accountant in (accounting.pld.epsilon, accounting.rdp.epsilon)
    if not (1 < runs <= MOST_RUNS and is_known and budgets.groups.terms.ndim == 1):
        return {}
    ways: dict[str, Accountant] = {"all runs released": Repeated(accountant, math.ceil(runs))}
    ways |= {str(one): Selected(one, accountant) for one in (Selection(name, runs) for name in DISTRIBUTIONS)}
    rate = recipe.batch_size / budgets.records

    def noise(certify: Accountant) -> float:
        return noise_for(float(budgets.epsilons[0]), rate, recipe.steps, float(budgets.claims[0]), certify)

    return {name: noise(certify) / noise(accountant) for name, certify in ways.items()}


def _signal(plan: Plan) -> float:
    phase = plan.phases[0]
    return float(plan.counts @ (phase.sample_rate / phase.noise_multiplier))


def _way(name: str, plan: Plan, uniform: Plan, with_excesses: bool) -> Way:
    phase = plan.phases[0]
    signals = plan.counts * phase.sample_rate / phase.noise_multiplier
    # Uniform is Scale at the strictest budget. Under exclude the rate depends on how many others are left out.
    excesses = np.zeros(2) if with_excesses else np.full(2, math.nan)
    if with_excesses and name != "uniform":
        excesses = excess(risk(plan, _spread(len(plan.groups), _MOST_LEVELS)))
    return Way(
        name=name,
        signal=_signal(plan) / _signal(uniform),
        records=int(plan.counts[phase.sample_rate > 0].sum()),
        weight=tuple((signals / signals.sum()).tolist()),
        bayes_excess=float(excesses[0]),
        tail_excess=float(excesses[1]),
    )


def _spread(count: int, most: int) -> IntArray:
    """At most `most` of the indices 0 to count − 1, evenly spaced, with the first and the last."""
    return np.unique(np.linspace(0, count - 1, min(count, most)).astype(np.int64))
