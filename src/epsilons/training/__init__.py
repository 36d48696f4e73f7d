"""Training under a plan: one's own loop with `make_private`, or the whole loop with `fit`. torch starts here."""

from __future__ import annotations

from .evaluation import EvalData
from .fit_loop import fit
from .performance import Performance
from .private import Private
from .private_setup import make_private

__all__ = ["EvalData", "Performance", "Private", "fit", "make_private"]
