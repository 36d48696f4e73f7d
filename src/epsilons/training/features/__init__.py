"""Fixed features: functions of one record and of public constants. Nothing is fitted, so features cost no privacy.

To add one: a function `(inputs, **options) -> (records, features)` in a new file, and a line in FEATURES. Contract: the
features of a record have the same bits whatever the other records are.
"""

from __future__ import annotations

from .encoder import ENCODER, encoder
from .hashed_text import HASHED_TEXT, hashed_text
from .kinds import Features
from .scattering import SCATTERING, scattering

FEATURES: dict[str, Features] = {"scattering": SCATTERING, "hashed-text": HASHED_TEXT, "encoder": ENCODER}

__all__ = ["FEATURES", "Features", "encoder", "hashed_text", "scattering"]
