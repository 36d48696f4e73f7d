"""Training under a plan: one's own loop with `make_private`, or the whole loop with `fit`. torch starts here."""

from __future__ import annotations

from ..clipping import ENGINES
from ..clipping.engine import Engine, NonFiniteGradientError, clip_factors
from ..models.mending import mend
from .distributed import Ranks
from .fitting.evaluation import EvalData
from .fitting.fit_loop import Training, fit
from .performance import Performance
from .private import Private
from .private_setup import make_private
from .values import Randomness, Records, RunFolder

__all__ = [
    "ENGINES",
    "Engine",
    "EvalData",
    "NonFiniteGradientError",
    "Performance",
    "Private",
    "Randomness",
    "Ranks",
    "Records",
    "RunFolder",
    "Training",
    "clip_factors",
    "fit",
    "make_private",
    "mend",
]
