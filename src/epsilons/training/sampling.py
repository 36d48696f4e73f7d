"""Poisson draws with one rate per record, and the physical chunks they are computed in.

A draw is a function of (key, phase, step); nothing here has state. The chunks of one draw are one logical
batch: they are added up before any noise, however small they had to be made to fit into memory.

A coin per record is the definition. Beyond a million records the same law is had without a look at everyone (`gaps`).
Which of the two is used follows from the plan's number of records alone, which is public and part of the plan: a run
that is taken up again uses the same, however fast or full the machine is.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property, partial

import numpy as np
import numpy.typing as npt

from ..planning import Plan
from .gaps import Halved, halved
from .randomness import Randomness, thresholds

#: Plans for more records than this are drawn by gaps.
MOST_COINS = 1_000_000


@dataclass(frozen=True)
class Draws:
    """Who is drawn when.

    plan        rates per group
    group       (records,) each record's group
    randomness  where coins come from
    """

    plan: Plan
    group: npt.NDArray[np.int64] = field(repr=False)  # each person's choice: kept out of logs
    randomness: Randomness

    @property
    def method(self) -> str:
        """ "coins" or "gaps": the same law, other records under the same key."""
        return "coins" if self.plan.records <= MOST_COINS else "gaps"

    def at(self, phase: int, step: int) -> npt.NDArray[np.int64]:
        """Indices of the records drawn at this step, ascending."""
        return self.by_coins(phase, step) if self.method == "coins" else self.by_gaps(phase, step)

    def by_coins(self, phase: int, step: int) -> npt.NDArray[np.int64]:
        """A coin for every record, by its index."""
        limits = thresholds(self.plan.phases[phase].sample_rate)[self.group]  # (records,)
        return np.flatnonzero(self.randomness.coins(phase, step, len(self.group)) < limits)

    def by_gaps(self, phase: int, step: int) -> npt.NDArray[np.int64]:
        """From candidate to candidate."""
        stream = self.randomness.stream
        found = [
            part.drawn(
                self.group,
                gaps=stream("gaps", phase, step, part.halvings),
                coins=stream("thinning", phase, step, part.halvings),
                more=partial(stream, "further", phase, step, part.halvings),
            )
            for part in self._halved(phase)
        ]
        return np.sort(np.concatenate([np.empty(0, dtype=np.int64), *found]))

    def _halved(self, phase: int) -> list[Halved]:
        if phase not in self._latest:
            self._latest.clear()  # as large as the data set, so only one is kept
            self._latest[phase] = halved(thresholds(self.plan.phases[phase].sample_rate), self.group)
        return self._latest[phase]

    @cached_property
    def _latest(self) -> dict[int, list[Halved]]:
        return {}


def physical_batches(drawn: npt.NDArray[np.int64], largest: int) -> list[npt.NDArray[np.int64]]:
    """Consecutive parts of at most `largest` records, of nearly equal size; none for an empty draw.

    >>> [len(part) for part in physical_batches(np.arange(10), 4)]
    [4, 3, 3]
    """
    if len(drawn) == 0:
        return []
    return np.array_split(drawn, -(-len(drawn) // largest))
