"""Which way to plan? The ways side by side, by one model of what training gains from them.

The model: every gradient is clipped (long gradients) and all pull alike, so a step's signal over its noise is
Σ n_p q_p w_p c_p / noise_std = Σ n_p q_p / σ_p. It ranks ways to divide budgets, not models or accuracies.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from .. import accounting
from ..accounting import Accountant
from ..accounting.batched import coarse as rough
from ..accounting.calibration import noises_for
from ..budgets import SMALLEST_SHOWN, Budgets, FloatArray, IntArray
from ..disclosure import hides
from ..errors import PlanError, PromiseError
from .display import Table, aligned, number
from .plans import Plan
from .recipe import Recipe
from .risk_profile import excess, risk

MODEL = (
    "signal: of one step over its noise, relative to uniform, if every gradient is clipped and all point alike. A "
    "model: it ranks ways to divide budgets, and says nothing of accuracy."
)
WITHHELD = (
    "Withheld: fewer than 20 records hold some of these budgets, and every signal is relative to uniform, which holds "
    "everyone to the strictest of them: what they chose could be worked out. For the house, advise(…).ways and "
    "epsilons advise --json hold the numbers."
)
#: Below this, what individual budgets add is within what training itself varies by.
HARDLY = 0.05
_MOST_THRESHOLDS = 6
#: Of more levels than this, the excess is that of so many, evenly spaced: from one level to the next it hardly changes.
_MOST_LEVELS = 20
OF_SOME = f"The excess is the largest of {_MOST_LEVELS} levels; of those between them it may be a little larger."


@dataclass(frozen=True)
class Way:
    """One way to plan.

    name          strategy and option
    signal        to noise, relative to uniform
    records       records that take part
    weight        (groups,) part of the expected gradient that comes from each group
    bayes_excess, tail_excess  the largest of any group over Scale (exposure.py); of more than 20 levels, of 20
    """

    name: str
    signal: float
    records: int
    weight: tuple[float, ...]
    bayes_excess: float
    tail_excess: float


@dataclass(frozen=True, eq=False)
class Advice:
    """All ways side by side.

    ways        uniform first
    best        signal of the best rates and clip norms that this batch size allows, in the model
    full_batch  signal if everyone were drawn in every step: what a larger batch could still bring
    """

    plan: Plan
    ways: tuple[Way, ...] = field(repr=False)
    best: float = field(repr=False)
    full_batch: float = field(repr=False)

    @property
    def model(self) -> str:
        """What the numbers rest on."""
        return MODEL if len(self.plan.epsilons) <= _MOST_LEVELS else f"{MODEL} {OF_SOME}"

    @property
    def verdict(self) -> str:
        """What follows, in two sentences."""
        alike = max(way.signal for way in self.ways if _is_alike(way))
        own = max((way for way in self.ways if not _is_alike(way)), key=lambda way: way.signal, default=None)
        if own is None:
            return "No way to give everyone an own budget keeps all promises here; uniform and exclude are left."
        gain = own.signal / alike - 1
        first = (
            f"Individual budgets hardly help here: {own.name} is {gain:+.1%} against the best single budget."
            if gain < HARDLY
            else f"Individual budgets help: {own.name} has {gain:.0%} more signal than the best single budget."
        )
        larger = self.full_batch / own.signal - 1
        return f"{first} A larger batch could add up to {max(larger, 0):.0%}."

    def to_dict(self) -> dict[str, Any]:
        """As JSON values."""
        return {
            "verdict": self.verdict,
            "model": self.model,
            "best": self.best,
            "full_batch": self.full_batch,
            "epsilon": self.plan.epsilons.tolist(),
            "ways": [asdict(way) for way in self.ways],
        }

    def table(self) -> Table:
        """One row per way."""
        headers = ["", "signal", "records", *(f"weight of {number(level)}" for level in self.plan.epsilons)]
        headers += ["Bayes excess", "tail excess"]
        rows = []
        for way in self.ways:
            weights = [f"{weight:.1%}" for weight in way.weight]
            shown = [f"{way.signal:.3f}", f"{way.records:,}", *weights, f"{way.bayes_excess:.4f}"]
            rows.append([way.name, *shown, f"{way.tail_excess:.1%}"])
        return headers, rows

    def __str__(self) -> str:
        return WITHHELD if hides(self.plan) else "\n".join([aligned(self.table()), "", self.verdict, self.model])


def advise(
    budgets: Budgets,
    recipe: Recipe,
    accountant: str | Accountant = "pld",
) -> Advice:
    """Uniform, exclude at each level, Scale, Mix and Sample side by side.

    Ways that cannot keep every promise, or leave too few records, are left out. Raises InfeasibleBudgetError if
    uniform cannot.

    >>> budgets = Budgets.from_shares({1.0: .34, 2.0: .43, 3.0: .23}, records=50_000)
    >>> advice = advise(budgets, Recipe(steps=1465, batch_size=1024, clip_norm=0.4), "rdp")
    >>> {way.name: round(way.signal, 2) for way in advice.ways}["sample"]
    1.68
    """
    from . import plan as make  # the door; it knows all strategies

    certify = accounting.accountant(accountant)
    uniform = make(budgets, recipe, "uniform", certify)
    asked: list[tuple[str, Callable[[], Plan]]] = []
    levels = np.unique(budgets.epsilons)[1:]
    for level in levels[_spread(len(levels), _MOST_THRESHOLDS)]:
        name = f"exclude below {level:.3g}" if _shown(budgets, float(level)) else "exclude some"
        asked.append((name, functools.partial(make, budgets, recipe, "exclude", certify, threshold=float(level))))
    asked += [(name, functools.partial(make, budgets, recipe, name, certify)) for name in ("scale", "mix", "sample")]
    ways = [_way("uniform", uniform, uniform)]
    for name, build in asked:
        try:
            ways.append(_way(name, build(), uniform))
        except (PlanError, PromiseError):
            continue
    rate = recipe.batch_size / budgets.records
    basis = _signal(uniform) / budgets.records
    full = noises_for(budgets.epsilons, 1.0, recipe.steps, budgets.delta, certify)
    best = max(_best(budgets, recipe, certify, rate) / basis, max(way.signal for way in ways))
    return Advice(uniform, tuple(ways), best, float(budgets.shares @ (1 / full)) / basis)


def _signal(plan: Plan) -> float:
    phase = plan.phases[0]
    return float(plan.counts @ (phase.sample_rate / phase.noise_multiplier))


def _way(name: str, plan: Plan, uniform: Plan) -> Way:
    phase = plan.phases[0]
    pull = plan.counts * phase.sample_rate / phase.noise_multiplier
    # Uniform is Scale at the strictest budget. Under exclude the rate depends on how many others are left out.
    lost = np.zeros(2) if name == "uniform" else excess(risk(plan, _spread(len(plan.epsilons), _MOST_LEVELS)))
    return Way(
        name=name,
        signal=_signal(plan) / _signal(uniform),
        records=int(plan.counts[phase.sample_rate > 0].sum()),
        weight=tuple((pull / pull.sum()).tolist()),
        bayes_excess=float(lost[0]),
        tail_excess=float(lost[1]),
    )


def _best(budgets: Budgets, recipe: Recipe, certify: Accountant, rate: float) -> float:
    """Signal per record of the best rates with this mean: each group on its own curve, one price of a draw for all."""
    rates = np.unique(np.append(np.geomspace(rate * 0.01, 1.0, 30), rate))  # (points,)
    groups = len(budgets.epsilons)
    if groups > 20:  # a ranking needs no more; Sample is within 2 % of it
        return 0.0
    own = noises_for(
        np.repeat(budgets.epsilons, len(rates)),
        np.tile(rates, groups),
        recipe.steps,
        np.repeat(budgets.delta, len(rates)),
        rough(certify),
    )
    signal = np.tile(rates, groups).reshape(groups, -1) / own.reshape(groups, -1)  # (groups, points)

    def drawn(price: float) -> FloatArray:
        return np.asarray((signal - price * rates).argmax(axis=1))

    low, high = 0.0, float((signal / rates).max()) * 2
    for _ in range(60):
        price = (low + high) / 2
        low, high = (price, high) if budgets.shares @ rates[drawn(price)] > rate else (low, price)
    more, less = drawn(low), drawn(high)
    a, b = float(budgets.shares @ rates[more]), float(budgets.shares @ rates[less])
    part = 0.0 if a == b else (rate - b) / (a - b)  # between two points of the grid
    pick = np.arange(groups)
    return float(budgets.shares @ (part * signal[pick, more] + (1 - part) * signal[pick, less]))


def _spread(count: int, most: int) -> IntArray:
    """Up to so many of the indices 0 to count − 1, evenly spaced, the first and the last among them."""
    return np.unique(np.linspace(0, count - 1, min(count, most)).astype(np.int64))


def _is_alike(way: Way) -> bool:
    return way.name == "uniform" or way.name.startswith("exclude")


def _shown(budgets: Budgets, level: float) -> bool:
    return bool(budgets.counts[budgets.epsilons == level].sum() >= SMALLEST_SHOWN)
