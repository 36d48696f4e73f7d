"""What each class weighs in training where budgets are tied to classes, and a shift of logits that makes up for it.

The weight of a class is its part of the expected gradient if every gradient is clipped: the sum over its people of
sample_rate · weight · clip_norm. The shift is the logit adjustment of Menon et al. (arXiv 2007.07314, eq. 10) with
these weights in the place of class frequencies. It follows from the plan and from declared numbers alone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ..core.mechanism import FloatArray
from ..errors import PlanError
from .display import Table
from .plan_numbers import PlanNumbers

#: {epsilon: one number per class}: how the people with this budget divide into the classes, as counts or shares.
Classes = Mapping[float, Sequence[float]]

#: Classes with a smaller part than this of the weight that their share of the people would give are warned of.
LOW_WEIGHT = 0.8
#: Below a table of weights / people.
TIED = (
    f"1.00 for every class if tiers are not tied to classes. Below {LOW_WEIGHT}, training.balance = true, or "
    "epsilons.balanced_loss, makes up for most of it: epsilons docs choosing-budgets"
)
#: tau = signal ** POWER. Measured on the digits, and tested on other data (docs/choosing-budgets.md).
POWER = 1 / 8


@dataclass(frozen=True, eq=False)
class Balance:
    """The weights of the classes under one plan.

    share   (classes,)  part of the people
    weight  (classes,)  part of the expected gradient, if every gradient is clipped
    signal  scalar      signal to noise of one class over a whole run, if its gradients all point the same way
    """

    share: FloatArray
    weight: FloatArray
    signal: float

    @property
    def relative(self) -> FloatArray:
        """(classes,) weight / share: 1 for every class if no class has more strict people than the others."""
        return self.weight / self.share

    @property
    def tau(self) -> float:
        """How strongly the shift makes up for the tiers: signal ** POWER, at least 1.

        Where clipping limits what a class can do, its logits fall behind by more than the logarithm of its weight, and
        the further, the longer a model can be trained above the noise.
        """
        return max(1.0, float(self.signal**POWER))

    @property
    def shift(self) -> FloatArray:
        """(classes,) what is added to the logits of training alone: log share + tau · log(weight / share).

        Raises PlanError if a class is never drawn.
        """
        if not (self.weight > 0).all():
            raise PlanError("No record of some class is ever drawn. Choose a strategy in which all tiers take part.")
        return np.asarray(np.log(self.share) + self.tau * np.log(self.relative))

    def table(self, names: Sequence[str]) -> Table:
        """One row per class."""
        columns = zip(names, self.share, self.weight, self.relative, strict=True)
        rows = [[name, f"{share:.1%}", f"{weight:.1%}", f"{part:.2f}"] for name, share, weight, part in columns]
        return ["class", "of all people", "weight in training", "weight / people"], rows

    def warning(self, names: Sequence[str]) -> str | None:
        """A sentence about classes of low weight; None if there are none."""
        low = [f"{n!r} ({part:.2f})" for n, part in zip(names, self.relative, strict=True) if part < LOW_WEIGHT]
        words = f"for their number of people, these classes weigh too little in training: {', '.join(low)}. The model"
        return f"WARNING: {words} may never name them. It is {TIED}." if low else None


def balance(plan: PlanNumbers, classes: Classes) -> Balance:
    """What each class weighs under this plan.

    classes  {epsilon: one number per class}: how the people with this budget divide into the classes, as counts or
             shares; each row counts relative to its own sum. Declare them without looking at the data: numbers that
             were counted there are not covered by the guarantee. Rows of other epsilons are ignored

    Raises PlanError for a missing row, numbers that are negative or not finite, a row of zeros, and a class without
    people.

    >>> from epsilons import Budgets, Recipe, plan
    >>> budgets = Budgets.from_shares({1.0: .5, 3.0: .5}, records=1000)
    >>> scaled = plan(budgets, Recipe(steps=20, batch_size=100, clip_norm=1.0), "scale", "rdp")
    >>> balance(scaled, {1.0: [1, 0], 3.0: [0, 1]}).relative.round(2)
    array([0.68, 1.32])
    """
    rows = [classes.get(epsilon, ()) for epsilon in plan.epsilons.tolist()]
    is_even = len({len(row) for row in rows}) == 1 and len(rows[0]) > 1
    table = np.array(rows if is_even else [[-1.0]], dtype=np.float64)  # (groups, classes)
    if not (np.isfinite(table) & (table >= 0)).all() or not (table.sum(0) > 0).all() or not (table.sum(1) > 0).all():
        raise PlanError(
            "classes needs a row for each epsilon of the plan, with one number per class, at least two, none negative, "
            "and a positive one in each row and for each class: {1.0: [80, 20], 3.0: [10, 90]}."
        )
    people = plan.counts[:, None] * (table / table.sum(1, keepdims=True))
    mass, signal = np.zeros(table.shape[1]), 0.0
    for phase in plan.phases:
        of_phase = (phase.sample_rate * phase.weight * phase.clip_norm) @ people  # (classes,) of one step
        mass = mass + phase.steps * of_phase
        signal += phase.steps * (float(of_phase.sum()) / phase.noise_std) ** 2
    return Balance(people.sum(0) / people.sum(), mass / mass.sum(), math.sqrt(signal) / table.shape[1])
