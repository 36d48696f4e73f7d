"""The same keys, initial models and draws for a test whenever it runs: a failure is about a change and not about luck.

It does not reach into processes that a test starts, and --slow does without it.
"""

from __future__ import annotations

import hashlib
import random
import sys
from itertools import count
from types import SimpleNamespace

import numpy as np

FRESH_KEYS = "epsilons.draws.randomness"


def begin(name: str) -> None:
    """Let all that is drawn in this process from now on depend on this name alone."""
    numbers = count()

    def token_bytes(size: int) -> bytes:
        return hashlib.shake_256(f"{name} {next(numbers)}".encode()).digest(size)

    seed = int.from_bytes(token_bytes(4))
    random.seed(seed)
    np.random.seed(seed)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(seed)
    if FRESH_KEYS in sys.modules:
        vars(sys.modules[FRESH_KEYS])["secrets"] = SimpleNamespace(token_bytes=token_bytes)
