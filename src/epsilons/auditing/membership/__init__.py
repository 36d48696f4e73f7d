"""Membership inference per privacy group: what an attacker learns who may only query the model.

To add an attack: write a function `(signals) -> scores` in a new file, and add a line to ATTACKS.
"""

from __future__ import annotations

__all__: list[str] = []
