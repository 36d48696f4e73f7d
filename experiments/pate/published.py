"""The weights of the published code of individualized PATE, and what they cost.

github.com/fraboeni/individualized-pate at ee82793, WeightingGNMax: a group's weight is its share of the records times
its epsilon, divided by the mean over records. Teachers vote with these weights. For accounting the code assigns the
sorted weights to the sorted budgets, which is another assignment if the weights do not rise with the budgets.
"""

from __future__ import annotations

import numpy as np

from epsilons import Budgets
from epsilons.accounting import ACCOUNTANTS, noise_for
from epsilons.core.mechanism import FloatArray, SampledGaussian

from .costs import SENSITIVITY


def code_weights(budgets: Budgets) -> tuple[FloatArray, FloatArray]:
    """(groups,) weights that the teachers vote with, and (groups,) weights that the groups are charged for.

    >>> voted, charged = code_weights(Budgets.from_shares({1.0: .54, 2.0: .37, 3.0: .09}, records=50_000))
    >>> voted.round(3), charged.round(3)
    (array([0.916, 1.255, 0.458]), array([0.458, 0.916, 1.255]))
    """
    product = budgets.shares * budgets.epsilons
    voted = product / float(budgets.shares @ product)
    return voted, np.sort(voted)


def spends_of(weight: FloatArray, charged: FloatArray, budgets: Budgets, votes: int) -> FloatArray:
    """(groups,) exact epsilon of votes of this weight, under the noise that suits the charged weights.

    The noise is the least one under which no group is charged more than its budget.
    """
    spends = ACCOUNTANTS["pld"]
    groups = list(zip(budgets.epsilons.tolist(), budgets.delta.tolist(), strict=True))
    multipliers = np.array([noise_for(epsilon, 1.0, votes, delta, spends) for epsilon, delta in groups])
    noise = float((SENSITIVITY * charged * multipliers).max())
    return exact_spends(weight, noise, [delta for _, delta in groups], votes)


def exact_spends(weight: FloatArray, noise_std: float, deltas: list[float], votes: int) -> FloatArray:
    """(groups,) epsilon by PLD of so many votes of these weights."""
    pairs = zip(weight.tolist(), deltas, strict=True)
    mechanisms = [(SampledGaussian(1.0, noise_std / (SENSITIVITY * w), votes), delta) for w, delta in pairs]
    return np.array([ACCOUNTANTS["pld"]([mechanism], delta) for mechanism, delta in mechanisms])
