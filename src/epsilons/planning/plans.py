"""Plan: who is drawn how often, clipped how hard, under how much noise. Training depends on nothing else.

A phase is one table with a number of steps; a plan is a short list of phases. No code outside this folder depends on
the strategy that made a plan.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from ..accounting import Accountant, name_of
from ..accounting.selection import Selected
from ..budgets.budgets import Budgets
from ..core.disclosure import in_groups
from ..core.files import write_json
from ..core.mechanism import Counted, Repeated
from ..errors import EpsilonsWarning, PlanError
from . import display, plan_file
from .plan_numbers import ROSTER, Phase, PlanNumbers, Recipe


class Plan(PlanNumbers):
    """A plan: its numbers (see `PlanNumbers`), its file and its printed form.

    Two plans are equal if all numbers that define them are equal.

    >>> from epsilons import plan
    >>> uniform = plan(Budgets.from_shares({1.0: .5, 2.0: .5}, records=1000), Recipe(20, 100, 1.0), "uniform", "rdp")
    >>> uniform
    Plan('uniform', 20 steps, 1,000 records, 2 groups)
    """

    @classmethod
    def of(
        cls,
        budgets: Budgets,
        recipe: Recipe,
        accountant: Accountant,
        *phases: Phase,
        strategy: str,
        options: Mapping[str, Any] | None = None,
    ) -> Plan:
        """The plan that a strategy returns: these phases, for these budgets and all that the accountant counts."""
        base = accountant.accountant if isinstance(accountant, Repeated | Selected) else accountant
        return cls(
            strategy=strategy,
            options=dict(options or {}),
            accountant=name_of(accountant),
            accountant_fn=base.accountant if isinstance(base, Counted) else base,
            runs=accountant.runs if isinstance(accountant, Repeated) else 1,
            class_noise=base.noise if isinstance(base, Counted) else None,
            select=accountant.select if isinstance(accountant, Selected) else None,
            adjacency=ROSTER,
            batch_size=float(recipe.batch_size),
            unit=budgets.unit,
            groups=budgets.groups,
            phases=phases,
        )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Plan) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    # -- its file ----------------------------------------------------------------------------------

    def to_dict(self, tiers: Mapping[str, float] | None = None) -> dict[str, Any]:
        """What a saved plan holds, as JSON values; docs/concepts.md lists the keys. tiers: {name: epsilon}, to keep."""
        return plan_file.to_dict(self, tiers)

    def save(self, path: str | Path, tiers: Mapping[str, float] | None = None) -> Path:
        """Write the plan as JSON, completely or not at all, readable by its owner alone (mode 0600).

        tiers  {name: epsilon}, which `epsilons compare` shows in the place of epsilons
        """
        return write_json(Path(path), self.to_dict(tiers))

    @classmethod
    def load(cls, path: str | Path, accountant: Accountant | None = None) -> Plan:
        """Read a saved plan and verify it again.

        accountant  the function of the plan's accountant, if that is not one of accounting.ACCOUNTANTS

        Raises PlanError if the file is not a plan, contradicts itself or was changed by hand, BudgetExceededError if
        the plan overspends. Warns of what the numbers cannot show: declared shares, a delta of 1/records or more, a
        file without a digest.
        """
        file, is_unchanged = plan_file.read(Path(path))
        plan = cls(**file.fields() | {"accountant_fn": accountant})
        plan_file.check(plan, file)
        if file.digest is not None and not is_unchanged:
            raise PlanError(
                f"{path} was changed by hand: its digest is not that of its content. Make a new plan with "
                "epsilons.plan, or epsilons plan … -o."
            )
        for doubt in plan_file.doubts(plan, file):
            warnings.warn(f"{path}: {doubt}", EpsilonsWarning, stacklevel=2)
        return plan

    @cached_property
    def digest(self) -> str:
        """SHA-256 of all numbers that define the plan, in hex. A ledger is bound to it."""
        return plan_file.plan_digest(self)

    # -- how it is shown ---------------------------------------------------------------------------

    @property
    def title(self) -> str:
        """The plan in one line."""
        return display.title(self)

    @property
    def notes(self) -> tuple[str, ...]:
        """Which records take no part, and which leave part of their budgets unused. Counts only."""
        return display.notes(self)

    def summary(self) -> str:
        """The plan as aligned tables, one per phase; groups of fewer than 20 are merged."""
        return display.summary(self)

    def compare(self, *others: Plan) -> str:
        """An aligned table of this plan beside others for the same groups. Raises PlanError for other groups."""
        return display.comparison((self, *others))

    def __str__(self) -> str:
        return self.summary() + "\n\n" + self.guarantee

    def _repr_html_(self) -> str:
        """In a notebook: `summary` as tables, and the guarantee."""
        return display.of_plan(self)

    def __repr__(self) -> str:
        steps = display.steps_of(self)
        return f"Plan({self.strategy!r}, {steps}, {self.records:,} {self.unit}s{in_groups(self.groups)})"
