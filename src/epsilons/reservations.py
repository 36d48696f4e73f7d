"""What a ledger needs of a registry: a reservation, which the run is tied to while it trains.

A registry that cannot be reached stops no run: all its steps are paid for.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from .errors import EpsilonsError, EpsilonsWarning
from .mechanism import IntArray


class Reservation(Protocol):
    """The right to make the steps of one run (`registry.Reservation`)."""

    def begin(self, key: str, previous: str | None, ledger: str) -> None: ...

    def settle(self, charged: Sequence[int], ledger: str, key: str) -> None: ...

    def leavers(self) -> IntArray: ...


def settle(reservation: Reservation, charged: Sequence[int], last_line: str, key: str) -> None:
    """Give back what a closed ledger did not charge. All stays charged while the registry cannot be reached."""
    try:
        reservation.settle(charged, last_line, key)
    except Exception as error:  # a database may raise anything, and the run itself is over
        what = str(error) if isinstance(error, EpsilonsError) else f"Its registry failed: {type(error).__name__}."
        warnings.warn(
            f"The run is over, and was not settled, so all its steps stay charged in the registry. {what} Settle it "
            "later: epsilons registry settle URL RUN.",
            EpsilonsWarning,
            stacklevel=2,
        )


def leavers(reservation: Reservation, before: IntArray) -> IntArray:
    """(leavers,) places of the people who may not be drawn from now on, rising; `before` if nothing can be learnt."""
    try:
        return np.sort(reservation.leavers())
    except Exception as error:  # as above; who left before stays out
        warnings.warn(
            f"The registry cannot be reached ({type(error).__name__}). The run is paid for and goes on; people who "
            "withdraw now take effect when it is reached again.",
            EpsilonsWarning,
            stacklevel=2,
        )
        return before
