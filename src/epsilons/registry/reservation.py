"""Reservation: the right of one run to make the steps that its people were charged for."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from ..core.mechanism import IntArray


class Keeper(Protocol):
    """What a reservation needs of a registry."""

    id: str

    def begin(self, run: str, key: str, previous: str | None, ledger: str) -> None: ...

    def settle(self, run: str, charged: Sequence[int], ledger: str, key: str) -> None: ...

    def leavers(self, numbers: IntArray) -> IntArray: ...


@dataclass(frozen=True)
class Reservation:
    """What `Registry.reserve` gives, for `fit` and `make_private`.

    registry  where it was reserved
    run       its name there
    plan      digest of the plan that was charged
    roster    digest of each person's row, in the order of the list
    numbers   (people,) their numbers in the registry
    """

    registry: Keeper = field(repr=False)
    run: str
    plan: str = field(repr=False)
    roster: str = field(repr=False)
    numbers: IntArray = field(repr=False, compare=False)

    def begin(self, key: str, previous: str | None, ledger: str) -> None:
        """Tie the run to the commitment of its key, or of the one that replaces `previous`.

        ledger  the hash of its first line

        Raises RegistryRefusedError if the run has begun under another key, or with another ledger.
        """
        self.registry.begin(self.run, key, previous, ledger)

    @property
    def settings(self) -> dict[str, str]:
        """As in run.json and in the first line of the ledger."""
        return {"id": self.registry.id, "run": self.run}

    def leavers(self) -> IntArray:
        """(leavers,) places in the list of those who withdrew, or lowered their budget below what is spent."""
        return self.registry.leavers(self.numbers)

    def settle(self, charged: Sequence[int], ledger: str, key: str) -> None:
        """Give back the steps that a closed ledger did not charge.

        ledger  the hash of its last line
        key     commitment to its last key
        """
        self.registry.settle(self.run, charged, ledger, key)


def roster_digest(group: IntArray) -> str:
    """SHA-256 of each person's row."""
    return hashlib.sha256(group.astype("<i8").tobytes()).hexdigest()
