"""Training under a plan: one's own loop with `make_private`, or the whole loop with `fit`. torch starts here."""

from __future__ import annotations

from .evaluation import TestData
from .fit_loop import fit
from .private_setup import make_private
from .private import Private

__all__ = ["Private", "TestData", "fit", "make_private"]
