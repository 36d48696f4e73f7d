"""Many small models under one plan as one batched program: the shadow models of a membership attack.

Logistic regression and multilayer perceptrons. Model k is trained on its own members, with the draws, clip norms and
noise that `make_private` would use under its randomness, and ends at the same parameters up to rounding.

No guarantee covers a stack: it is trained on real records, many times, with known seeds, to measure what an attacker
learns. So there is no ledger, and sums are in the precision of the model. Only norms are computed in 64 bits.
"""

from __future__ import annotations

from .architecture import unstackable
from .stack import StackedModel, train_stacked

__all__ = ["StackedModel", "train_stacked", "unstackable"]
