"""What a history of sampled Gaussians costs: every accountant returns an upper bound on epsilon.

To add one: a file with `epsilon(history, delta) -> float`, and a line in ACCOUNTANTS. Callers may pass
such a function of their own wherever an accountant's name is taken.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..errors import PlanError
from ..mechanism import SampledGaussian
from . import pld, rdp
from .batched import Columns, epsilons

#: epsilon(history, delta): an upper bound on what a record that went through `history` has spent.
Accountant = Callable[[Sequence[SampledGaussian], float], float]

ACCOUNTANTS: dict[str, Accountant] = {"pld": pld.epsilon, "rdp": rdp.epsilon}

#: How the guarantee names what stands behind its epsilon.
DESCRIPTIONS = {
    "pld": "PLD, both directions,",
    "rdp": "RDP",
}


def accountant(which: str | Accountant) -> Accountant:
    """The accountant of this name, or the function itself. Raises PlanError for an unknown name."""
    if callable(which):
        return which
    if which not in ACCOUNTANTS:
        raise PlanError(f"No accountant is called {which!r}; there are: {', '.join(ACCOUNTANTS)}.")
    return ACCOUNTANTS[which]


def name_of(which: Accountant) -> str:
    """The name a plan records for this accountant: its key in ACCOUNTANTS, or the function's own name."""
    for name, function in ACCOUNTANTS.items():
        if function is which:
            return name
    return str(getattr(which, "__qualname__", type(which).__qualname__))


__all__ = ["ACCOUNTANTS", "DESCRIPTIONS", "Accountant", "Columns", "accountant", "epsilons", "name_of", "pld", "rdp"]
