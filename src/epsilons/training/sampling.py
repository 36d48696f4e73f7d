"""Poisson draws with one rate per record, and the physical chunks they are computed in.

A draw is a function of (key, phase, step); nothing here has state. The chunks of one draw are one logical
batch: they are added up before any noise, however small they had to be made to fit into memory.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from ..planning import Plan
from .randomness import Randomness, thresholds


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

    def at(self, phase: int, step: int) -> npt.NDArray[np.int64]:
        """Indices of the records drawn at this step, ascending."""
        limits = thresholds(self.plan.phases[phase].sample_rate)[self.group]  # (records,)
        return np.flatnonzero(self.randomness.coins(phase, step, len(self.group)) < limits)


def chunks(drawn: npt.NDArray[np.int64], largest: int) -> list[npt.NDArray[np.int64]]:
    """Consecutive pieces of at most `largest` records, of nearly equal size; none for an empty draw.

    >>> [len(piece) for piece in chunks(np.arange(10), 4)]
    [4, 3, 3]
    """
    if len(drawn) == 0:
        return []
    return np.array_split(drawn, -(-len(drawn) // largest))
