"""Weighting, upsampling and vanishing as plans: rate 1, and √2·w in the place of a clip norm.

A record belongs to one teacher. If it changes, the teacher may vote for another class: one count loses w, another one
gains w, so the counts move by √2·w in L2 norm. A vote under noise σ is SampledGaussian(1, σ / (√2·w), 1), and K votes,
also if each one depends on earlier labels, compose as the steps of a training do.

    weighting   the library's Scale: weights with mean 1 over records use up all budgets under one noise
    upsampling  k copies of a record go to k teachers of weight 1. If it changes, all of them may: weight k
    vanishing   a teacher of weight 1 takes part in as many votes as its budget allows: a list of phases
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

import epsilons
from epsilons import Budgets, Phase, Plan, Recipe, SampledGaussian
from epsilons.accounting import Accountant
from epsilons.accounting.calibration import noises_for
from epsilons.core.mechanism import FloatArray
from epsilons.errors import PlanError
from epsilons.planning.strategies import Strategy

from ..strategies import most_steps

#: L2 norm by which the counts move if a teacher of weight 1 votes for another class.
SENSITIVITY = math.sqrt(2)


def vote_plan(
    budgets: Budgets, votes: int, strategy: str, accountant: str = "pld", copies: Sequence[int] | None = None
) -> Plan:
    """The plan of so many votes. strategy: "uniform" (every weight is 1), "scale" (weighting), "upsampling",
    "vanishing".

    copies  (groups,) numbers of copies, of "upsampling" only

    >>> budgets = Budgets.from_shares({1.0: .34, 2.0: .43, 3.0: .23}, records=50_000)
    >>> weights(vote_plan(budgets, 400, "scale").phases[0]).round(3)
    array([0.568, 1.062, 1.523])
    """
    recipe = Recipe(steps=votes, batch_size=budgets.records, clip_norm=SENSITIVITY)
    own = {"upsampling": upsampling(copies or [1] * len(budgets.epsilons)), "vanishing": vanishing}
    return epsilons.plan(budgets, recipe, own.get(strategy, strategy), accountant=accountant)


def weights(phase: Phase) -> FloatArray:
    """(groups,) the weight of one record in these votes: the sum over its teachers. 0 if it takes no part."""
    return np.where(phase.sample_rate > 0, phase.weight * phase.clip_norm / SENSITIVITY, 0.0)


def upsampling(copies: Sequence[int]) -> Strategy:
    """Weight k for k copies, and the noise that the group with the least room needs.

    copies  (groups,) whole numbers, at least 1. Raises PlanError for others.
    """
    k = np.array(copies, dtype=np.float64)

    def upsampling(budgets: Budgets, recipe: Recipe, accountant: Accountant) -> Plan:
        if k.shape != budgets.epsilons.shape or not (np.isfinite(k) & (k == np.round(k)) & (k >= 1)).all():
            raise PlanError(f"upsampling needs a whole number of copies, at least 1, for each group; got {k.tolist()}.")
        multipliers = noises_for(budgets.epsilons, 1.0, recipe.steps, budgets.delta, accountant)
        phase = _phase(recipe, recipe.steps, np.ones(len(k)), k, float((k * multipliers).max()))
        return Plan.of(budgets, recipe, accountant, phase, strategy="upsampling")

    return upsampling


def vanishing(budgets: Budgets, recipe: Recipe, accountant: Accountant) -> Plan:
    """Noise that the loosest group needs for all votes; each other group leaves when its budget is used up.

    Raises PlanError if a budget does not allow a single vote.
    """
    multipliers = noises_for(budgets.epsilons, 1.0, recipe.steps, budgets.delta, accountant)
    noise, ones = float(multipliers.min()), np.ones(len(multipliers))

    def allowed(epsilon: float, delta: float) -> int:
        return most_steps(lambda steps: accountant([SampledGaussian(1.0, noise, steps)], delta), epsilon)

    pairs = zip(budgets.epsilons, budgets.delta, strict=True)
    lasts = np.minimum([allowed(float(epsilon), float(delta)) for epsilon, delta in pairs], recipe.steps)
    phases, start = [], 0
    for end in np.unique(lasts).tolist():
        phases.append(_phase(recipe, end - start, (lasts >= end).astype(float), ones, noise))
        start = end
    return Plan.of(budgets, recipe, accountant, *phases, strategy="vanishing")


def _phase(recipe: Recipe, votes: int, rate: FloatArray, weight: FloatArray, noise: float) -> Phase:
    """noise: standard deviation over the sensitivity of weight 1."""
    return Phase(
        steps=votes,
        sample_rate=rate,
        clip_norm=recipe.clip_norm * weight,
        weight=np.ones(len(rate)),
        noise_std=noise * recipe.clip_norm,
        expected_batch=recipe.batch_size,
    )
