"""The keys of a plan file, and the types of their values: what is read is checked by pydantic, of the extra `app`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, Field

from ..accounting.filter import ORDERS
from ..accounting.selection import Selection
from ..core.mechanism import Groups, Unit
from ..errors import PlanError
from .plan_numbers import COLUMNS, Phase

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Probability = Annotated[float, Field(ge=0, le=1)]
Count = Annotated[int, Field(ge=1, le=10**15)]


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True, extra="ignore")


class GroupRow(_Strict):
    """One group's budget and the epsilon it spends; for one-phase plans, also its row of the table."""

    epsilon: Positive
    delta: Annotated[float, Field(gt=0, lt=1)]
    records: Count
    epsilon_spent: Annotated[float, Field(ge=0)]
    start: list[float] | None = None
    risk: dict[str, Probability] | None = None
    sample_rate: Probability | None = None
    clip_norm: Positive | None = None
    weight: Positive | None = None
    noise_multiplier: Positive | None = None


class PhaseRow(_Strict):
    """One group's row of a phase's table."""

    sample_rate: Probability
    clip_norm: Positive
    weight: Positive
    noise_multiplier: Positive | None


class PhaseTable(_Strict):
    """One phase."""

    steps: Count
    noise_std: Positive
    expected_batch: Positive
    groups: list[PhaseRow]


class PlanFile(_Strict):
    """A plan as read."""

    schema_: Annotated[int, Field(alias="schema")]
    epsilons_version: str
    strategy: str
    options: dict[str, Any]
    accountant: str
    adjacency: str
    records: Count
    batch_size: Positive
    steps: Count
    groups: list[GroupRow]
    phases: list[PhaseTable]
    runs: Count = 1
    unit: Unit = "record"
    select: str | None = None
    class_noise: Positive | None = None
    noise_std: Positive | None = None
    expected_batch: Positive | None = None
    digest: str | None = None
    tiers: dict[str, Positive] | None = None

    @property
    def added(self) -> object:
        """What plans of schema 7 have, and no others."""
        return self.class_noise if self.select is None else self.select

    def fields(self) -> dict[str, Any]:
        """The arguments of a plan. Raises PlanError for groups or phases that no plan has."""
        epsilons, deltas, records = (_column(self.groups, name) for name in ("epsilon", "delta", "records"))
        phases = []
        for phase in self.phases:
            columns = {name: _column(phase.groups, name) for name in COLUMNS}
            phases.append(Phase(phase.steps, **columns, noise_std=phase.noise_std, expected_batch=phase.expected_batch))
        same = ("strategy", "options", "accountant", "adjacency", "batch_size", "runs", "unit", "class_noise")
        groups = Groups(epsilons, deltas, records, self._starts(), self._limits())
        select = None if self.select is None else Selection.of(self.select)
        return {"groups": groups, "phases": phases, "select": select} | {name: getattr(self, name) for name in same}

    def _limits(self) -> npt.NDArray[Any] | None:
        rows = [row.risk for row in self.groups if row.risk is not None]
        if rows and len(rows) != len(self.groups):
            raise PlanError("A plan of budgets by risk needs the limits of each group, {} for none.")
        none = {"advantage": math.inf, "at_fpr": 0.0, "tpr": math.inf}
        return (
            np.array([[row.get(name, otherwise) for name, otherwise in none.items()] for row in rows]) if rows else None
        )

    def _starts(self) -> npt.NDArray[Any] | None:
        rows = [row.start for row in self.groups if row.start is not None]
        if not rows:
            return None
        if len(rows) != len(self.groups) or {len(row) for row in rows} != {len(ORDERS)}:
            raise PlanError(f"A plan on accounts needs {len(ORDERS)} numbers as the start of each group.")
        return np.array(rows)


def _column(rows: Sequence[BaseModel], name: str) -> npt.NDArray[Any]:
    return np.array([getattr(row, name) for row in rows])
