"""Engines: from per-record losses to the sum of clipped gradients.

`loop` is the reference: one autograd call per record or person. Every other engine is compared with it. To add one: a
file with a class that meets `Engine`, and a line in ENGINES.
"""

from __future__ import annotations

from collections.abc import Callable

from ..errors import named
from .engine import Engine, NonFiniteGradientError, check_takes_persons
from .ghost.ghost import Ghost
from .loop import Loop
from .vmap import Vmap

ENGINES: dict[str, Callable[[], Engine]] = {"loop": Loop, "vmap": Vmap, "ghost": Ghost}
AUTO = "ghost"


def engine(which: str | Engine) -> Engine:
    """A new engine of this name ("auto" chooses), or the object that was given. Raises InputError for other names."""
    return named({"auto": ENGINES[AUTO], **ENGINES}, which, "engine")() if isinstance(which, str) else which


__all__ = ["ENGINES", "Engine", "Ghost", "NonFiniteGradientError", "check_takes_persons", "engine"]
