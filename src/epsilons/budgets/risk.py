"""Risk: what a tier promises in words that people choose by, and how tiers of risks become groups.

A tier states limits on what any attack learns about one record: right guesses of 100, or true positives at a rate of
false positives. `profile.usage` says how a history is compared with them (docs/planning.md#budgets-by-risk).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import numpy as np

from ..errors import BudgetError


@dataclass(frozen=True)
class Risk:
    """The most that any attack may learn about the presence of one record of a tier: one limit, or several.

    odds       right guesses of 100 at even odds, between 50 and 100, both excluded
    advantage  in place of odds: largest true-positive rate minus false-positive rate, in (0, 1). 2·odds/100 − 1
    tpr        largest true-positive rate at the false-positive rate `at_fpr`, above it and below 1
    at_fpr     false-positive rate in (0, 1)
    epsilon    the epsilon of this tier's tail, where it is smaller than that of all tiers, or these have none

    Raises BudgetError for numbers out of range, and for odds beside an advantage.

    >>> strict, open = Risk(odds=55), Risk(tpr=0.05, at_fpr=0.01)
    """

    odds: float | None = None
    advantage: float | None = None
    tpr: float | None = None
    at_fpr: float | None = None
    epsilon: float | None = None

    def __post_init__(self) -> None:
        ranges = {"odds": (50, 100), "advantage": (0, 1), "tpr": (0, 1), "at_fpr": (0, 1), "epsilon": (0, math.inf)}
        for name, (low, high) in ranges.items():
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool | str) or not low < value < high):
                raise BudgetError(f"A risk's {name} must be a number between {low} and {high}, got {value!r}.")
        if self.odds is not None and self.advantage is not None:
            raise BudgetError("odds and advantage limit the same thing. Give one of them.")
        if (self.tpr is None) != (self.at_fpr is None) or not (self.at_fpr or 0) < (self.tpr or 1):
            raise BudgetError("tpr is the largest true-positive rate at the rate at_fpr: give both, tpr above at_fpr.")

    @property
    def limits(self) -> Limits:
        """The same as a row of `Groups.limits`; odds are rounded down, so that they hold after rounding up."""
        advantage = math.inf if self.advantage is None else float(self.advantage)
        if self.odds is not None:
            advantage = math.nextafter((2 * self.odds - 100) / 100, 0)
        return advantage, float(self.at_fpr or 0), math.inf if self.tpr is None else float(self.tpr)


Limits = tuple[float, ...]


class Contract(NamedTuple):
    """Tiers of risks as groups.

    levels  {name: epsilon}, different for tiers with different limits
    limits  {epsilon: limits}
    """

    levels: dict[Any, float]
    limits: Mapping[float, Limits]

    def shares(self, by_name: Mapping[Any, float]) -> dict[float, float]:
        """{epsilon: share} of {name: share}. Raises BudgetError for a name that is no tier."""
        shares: dict[float, float] = {}
        for name, share in by_name.items():
            if name not in self.levels:
                raise BudgetError(f"{name!r} is not the name of a tier ({', '.join(map(repr, self.levels))}).")
            shares[self.levels[name]] = shares.get(self.levels[name], 0) + share
        return shares


def as_contract(tiers: Mapping[Any, Any], tail: Sequence[float] | None, delta: Any = None) -> tuple[Contract, float]:
    """The contract of these tiers, and their delta. Raises BudgetError.

    tiers  {name: Risk, or the keys of one, or an epsilon in place of the tail's}
    tail   (epsilon, delta) that every tier keeps beside its limits
    delta  without a tail: every tier states its epsilon

    Groups are known by epsilon everywhere. So tiers with one epsilon and different limits get epsilons that differ in
    their last digits: none above the tail's, and the narrower limits the smaller one.
    """
    whole, delta = (None, delta) if tail is None else tail if np.shape(tail) == (2,) else (None, None)
    risks = {name: one if isinstance(one, Risk) else _read(name, one) for name, one in tiers.items()}
    most = math.inf if whole is None else Risk(epsilon=whole).epsilon or math.inf
    if not isinstance(delta, int | float) or any(
        math.isinf(min(one.epsilon or math.inf, most)) for one in risks.values()
    ):
        raise BudgetError(
            "Every tier by risk needs one epsilon at one delta, which it keeps, too, and which people are told: give "
            "tail=(epsilon, delta), or each Risk its epsilon."
        )
    rows = {name: (min(one.epsilon or math.inf, most), *one.limits) for name, one in risks.items()}
    levels: dict[tuple[float, ...], float] = {}
    above = math.inf
    for row in sorted(set(rows.values()), reverse=True):
        above = levels[row] = min(row[0], math.nextafter(above, 0))
    limits: dict[float, Limits] = {levels[row]: row[1:] for row in rows.values()}
    return Contract({name: levels[row] for name, row in rows.items()}, limits), float(delta)


def _read(name: Any, risk: Any) -> Risk:
    if not isinstance(risk, Mapping):
        return Risk(epsilon=risk)
    known = [one.name for one in fields(Risk)]
    if unknown := [key for key in risk if key not in known]:
        raise BudgetError(f"The risk of {name!r} has no {unknown[0]!r}; there are {', '.join(known)}.")
    return Risk(**risk)
