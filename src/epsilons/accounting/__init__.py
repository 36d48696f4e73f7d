"""What a history of sampled Gaussians costs: every accountant returns an upper bound on epsilon.

To add an accountant: one file with `epsilon(history, delta) -> float`, and one line in ACCOUNTANTS. Callers may pass
such a function wherever the name of an accountant is accepted.
"""

from __future__ import annotations

from ..core.mechanism import Counted, Repeated
from ..errors import PlanError, named
from . import filter, pld, rdp
from .calibration import Accountant, noise_for, rate_for
from .selection import Selected

ACCOUNTANTS: dict[str, Accountant] = {"pld": pld.epsilon, "rdp": rdp.epsilon, "filter": filter.epsilon}

#: How the guarantee names the source of its epsilon.
DESCRIPTIONS = {
    "pld": "PLD, both directions,",
    "rdp": "RDP",
    "filter": "RDP at weighted orders, for runs that are chosen from the outputs of others,",
}


def accountant(which: str | Accountant) -> Accountant:
    """The accountant of this name, or the function itself. Raises PlanError for an unknown name.

    >>> accountant("rdp") is rdp.epsilon
    True
    """
    return which if callable(which) else named(ACCOUNTANTS, which, "accountant", PlanError)


def name_of(which: Accountant) -> str:
    """The name a plan records for this accountant: its key in ACCOUNTANTS, or the function's name.

    >>> name_of(pld.epsilon)
    'pld'
    """
    if isinstance(which, Repeated | Selected | Counted):
        return name_of(which.accountant)
    for name, function in ACCOUNTANTS.items():
        if function is which:
            return name
    return str(getattr(which, "__qualname__", type(which).__qualname__))


__all__ = ["ACCOUNTANTS", "Accountant", "filter", "noise_for", "pld", "rate_for", "rdp"]
