"""All strategies by name. To add one: a file with a function like these, and its line in STRATEGIES.

A strategy is a function (budgets, recipe, accountant, **options) -> Plan. Its name appears in plan files, so a released
name stays.
"""

from __future__ import annotations

from collections.abc import Callable

from ..plan_checks import REGISTERED
from ..plans import Plan
from .exclude import exclude
from .mix import mix
from .sample import sample
from .scale import scale, scale_arithmetic
from .sequential import sequential
from .uniform import uniform

Strategy = Callable[..., Plan]

STRATEGIES: dict[str, Strategy] = {
    "uniform": uniform,
    "sample": sample,
    "scale": scale,
    "scale-arithmetic": scale_arithmetic,
    "mix": mix,
    "exclude": exclude,
    "sequential": sequential,
}
REGISTERED.update(STRATEGIES)

#: Strategies that get all budgets unrounded, however many there are: a rounded budget could miss a threshold.
UNROUNDED: tuple[Strategy, ...] = (exclude,)
