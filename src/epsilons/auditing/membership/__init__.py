"""Membership inference per privacy group: what an attacker learns who may only query the model.

`attack` trains shadow models (`shadows`), reads signals off them (`signals`), lets the attacks guess members, and
compares what they reach with what the plan certifies (`analysis`).

To add an attack: write a function `(signals) -> scores` in a new file, and add a line to ATTACKS in attacks.py.
"""

from __future__ import annotations

from ...reporting.membership import MembershipResult
from .analysis import paired
from .attacking import attack
from .attacks import ATTACKS, DEFAULT_ATTACKS, POPULATION_ATTACKS, Attack, Signals
from .folder import draw

__all__ = [
    "ATTACKS",
    "DEFAULT_ATTACKS",
    "POPULATION_ATTACKS",
    "Attack",
    "MembershipResult",
    "Signals",
    "attack",
    "draw",
    "paired",
]
