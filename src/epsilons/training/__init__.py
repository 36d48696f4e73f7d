"""Training under a plan: one's own loop with `make_private`, or the whole loop with `fit`. torch starts here."""

from __future__ import annotations

from .fitting import fit
from .making import make_private
from .private import Private

__all__ = ["Private", "fit", "make_private"]
