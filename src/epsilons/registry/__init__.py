"""One lifetime budget per person, over many runs (docs/registry.md)."""

from __future__ import annotations

from .accounts import Accounts
from .registry import Registry, Reservation
from .rosters import Roster, Table
from .verifier import Verdict

__all__ = ["Accounts", "Registry", "Reservation", "Roster", "Table", "Verdict"]
