"""Fixed features: functions of one record and of constants. Nothing is fitted, so features cost no privacy.

To add one: a function `(inputs, **options) -> (records, features)` in a new file, and a line in FEATURES. Contract: the
features of a record have the same bits whatever the other records are.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from .scattering import scattering

FEATURES: dict[str, Callable[..., Tensor]] = {"scattering": scattering}

__all__ = ["FEATURES", "scattering"]
