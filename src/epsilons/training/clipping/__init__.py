"""Engines: from per-record losses to the sum of clipped gradients.

`loop` is the definition, one autograd call per record; every other engine is held to it. To add one: a file
with a class that meets Engine, and a line in ENGINES.
"""

from __future__ import annotations

from collections.abc import Callable

from ...errors import InputError
from .compiling import BatchLoss, Compiled, check_compiler
from .engine import Engine, NonFiniteGradientError
from .ghost.engine import Ghost
from .loop import Loop
from .vmap import Vmap
from .ways import Given, Ways

ENGINES: dict[str, Callable[[], Engine]] = {"loop": Loop, "vmap": Vmap, "ghost": Ghost}
AUTO = "ghost"


def engine(which: str | Engine, ways: Given = "rule") -> Engine:
    """A new engine of this name ("auto" chooses), or the object itself.

    ways: see `clipping.ways`. Raises InputError for an unknown name, and for ways where the engine has none to choose.
    """
    if not isinstance(which, str):
        if ways != "rule":
            raise InputError("ways= belongs to an engine's making: give them to the engine you made, e.g. Ghost(ways).")
        return which
    name = AUTO if which == "auto" else which
    if name not in ENGINES:
        raise InputError(f"No engine is called {which!r}; there are: auto, {', '.join(ENGINES)}.")
    if ENGINES[name] is Ghost:
        return Ghost(ways)
    if ways != "rule":
        raise InputError(f"The engine {name} has one way only; ways={ways!r} is for ghost.")
    return ENGINES[name]()


__all__ = [
    "ENGINES",
    "BatchLoss",
    "Compiled",
    "Engine",
    "Ghost",
    "Given",
    "NonFiniteGradientError",
    "Ways",
    "check_compiler",
    "engine",
]
