"""Training under a plan: one's own loop with `make_private`, or the whole loop with `fit`. torch starts here."""

from __future__ import annotations

from .evaluating import TestData
from .fitting import fit
from .making import make_private
from .private import Private

__all__ = ["Private", "TestData", "fit", "make_private"]
