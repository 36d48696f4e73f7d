"""All strategies by name. To add one: a file with a function like these, and its line in STRATEGIES.

A strategy is a function (budgets, recipe, accountant, **options) -> Plan. Its name appears in plan files, so a released
name stays. REFUSING and UNROUNDED name the strategies with a property that the planner or the tests must know.
"""

from __future__ import annotations

from collections.abc import Callable

from ...errors import EpsilonsError, InfeasibleBudgetError, PlanError
from ..plan_file import REGISTERED
from ..plans import Plan
from .baselines import exclude, sequential, uniform
from .mix import mix
from .sample import sample
from .scale import scale, scale_arithmetic

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

#: Strategies that may refuse budgets that are not out of the accountant's reach, with the error they raise: under the
#: noise that all groups share, Sample and Mix may find no rate for a group, and Sequential needs a step for each group.
#: The contract tests accept a refusal from these alone.
REFUSING: dict[str, type[EpsilonsError]] = {
    "sample": InfeasibleBudgetError,
    "mix": InfeasibleBudgetError,
    "sequential": PlanError,
}

#: Strategies that get all budgets unrounded, however many there are: a rounded budget could miss a threshold.
UNROUNDED: tuple[Strategy, ...] = (exclude,)
