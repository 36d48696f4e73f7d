"""The loss attack: a record with a small loss under the target is classified as a member. It needs no references.

Yeom, Giacomelli, Fredrikson, Jha, "Privacy Risk in Machine Learning", arXiv 1709.01604v5, Adversary 2 (threshold): the
score is −loss = log p of the true class. The statistics cover every threshold.
"""

from __future__ import annotations

from .signals import Float32Array, Signals


def loss(signals: Signals) -> Float32Array:
    """The negative loss, (shadows, records)."""
    return signals.checked("log_p").copy()
