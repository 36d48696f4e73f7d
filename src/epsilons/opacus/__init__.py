"""Opacus' PrivacyEngine with a budget for every record: replace `from opacus import PrivacyEngine` by this package.

    from epsilons.opacus import PrivacyEngine

`make_private` and `make_private_with_epsilon` take the arguments of Opacus 1.6 and return objects of the same use. The
names, orders and defaults of all arguments are those of Opacus; `target_epsilon` may also be one value per record. See
docs/doors/opacus.md for what differs. Opacus itself is needed for `epsilons.opacus.layers` alone.
"""

from __future__ import annotations

from . import import_paths  # noqa: F401  # Opacus' other paths
from .accountant import Accountant
from .loader import PrivateLoader
from .privacy_engine import PrivacyEngine
from .wrappers import PrivateModule, PrivateOptimizer

__all__ = ["Accountant", "PrivacyEngine", "PrivateLoader", "PrivateModule", "PrivateOptimizer"]
