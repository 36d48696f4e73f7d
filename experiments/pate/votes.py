"""Votes: weighted counts of the teachers' classes, and the class with the largest noisy count (GNMax)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from epsilons import Plan
from epsilons.core.mechanism import FloatArray, IntArray

from .costs import weights


def counts(votes: IntArray, weight: FloatArray, classes: int) -> FloatArray:
    """(records, classes) sums of the weights of the teachers that vote for a class.

    votes (teachers, records), weight (teachers,)
    """
    return np.stack([weight @ (votes == c) for c in range(classes)], axis=1)


def planned_counts(
    votes: IntArray, own: IntArray, plan: Plan, copies: Sequence[int], classes: int
) -> tuple[FloatArray, FloatArray]:
    """(votes, classes) counts and (votes,) standard deviations of their noise, phase after phase.

    votes   (teachers, votes or more) classes
    own     (teachers,) the group of each teacher's records
    copies  (groups,) how many teachers have a record of this group; they share its weight
    """
    found, start = [], 0
    for phase in plan.phases:
        found.append(counts(votes[:, start : start + phase.steps], (weights(phase) / copies)[own], classes))
        start += phase.steps
    noise = np.repeat([phase.noise_std for phase in plan.phases], [phase.steps for phase in plan.phases])
    return np.concatenate(found), noise


def released_labels(counted: FloatArray, noise: FloatArray, coins: np.random.Generator) -> IntArray:
    """(votes,) the classes with the largest noisy counts: all that is released."""
    noisy = counted + noise[:, None] * coins.standard_normal(counted.shape)
    return np.asarray(noisy.argmax(axis=1), dtype=np.int64)
