"""One lifetime budget per person, over many runs (docs/registry.md)."""

from __future__ import annotations

from .amounts import Table
from .registry import Registry
from .rosters import Roster
from .verifying import Verdict

__all__ = ["Registry", "Roster", "Table", "Verdict"]
