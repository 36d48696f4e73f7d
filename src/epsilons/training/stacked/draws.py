"""The draws of many models under one plan, each among its own members."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import numpy.typing as npt

from ...mechanism import IntArray
from ...planning import Plan
from ..randomness import Randomness, thresholds
from ..sampling import Draws


@dataclass(frozen=True, eq=False)
class MemberDraws:
    """What `Draws` gives each model, without the records that are not its members.

    group       (records,) each record's group
    member      (models, records) which records each model is trained on
    randomness  (models,) source of each model's coins
    """

    plan: Plan
    group: IntArray = field(repr=False)
    member: npt.NDArray[np.bool_] = field(repr=False)
    randomness: Sequence[Randomness] = field(repr=False)

    def at(self, phase: int, step: int) -> list[IntArray]:
        """(models,) indices of the records that each model draws at this step, ascending."""
        if self._draws[0].method == "coins":
            limits, records = self._limits[phase], len(self.group)
            pairs = zip(self.randomness, self.member, strict=True)
            return [np.flatnonzero((source.coins(phase, step, records) < limits) & row) for source, row in pairs]
        drawn = [draws.at(phase, step) for draws in self._draws]
        return [indices[row[indices]] for indices, row in zip(drawn, self.member, strict=True)]

    @cached_property
    def _draws(self) -> list[Draws]:
        return [Draws(self.plan, self.group, source) for source in self.randomness]

    @cached_property
    def _limits(self) -> list[npt.NDArray[np.uint64]]:
        """Per phase the limit of each record's coin, which is the same for all models."""
        return [thresholds(phase.sample_rate)[self.group] for phase in self.plan.phases]
