"""An accountant of several equal runs together: each mechanism of a history counts once for every run.

The n runs are n · steps mechanisms of one fixed table, and what may differ between them never enters an accountant:
adaptive composition of mechanisms that are each dominated by one fixed pair (Zhu, Dong, Wang, "Optimal Accounting of
Differential Privacy via Characteristic Function", arXiv 2106.08567, Theorem 10; docs/tuning.md#why-it-holds).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from ..mechanism import SampledGaussian


@dataclass(frozen=True)
class Repeated:
    """epsilon(history, delta) of `runs` runs that go through this history each.

    accountant  a function (history, delta) -> epsilon
    runs        number of runs, at least 1

    >>> from epsilons.accounting import rdp
    >>> twice = Repeated(rdp.epsilon, runs=2)
    >>> one, both = SampledGaussian(0.01, 1.1, steps=50), SampledGaussian(0.01, 1.1, steps=100)
    >>> twice([one], 1e-5) == rdp.epsilon([both], 1e-5)
    True
    """

    accountant: Callable[[Sequence[SampledGaussian], float], float]
    runs: int

    def __call__(self, history: Sequence[SampledGaussian], delta: float) -> float:
        return self.accountant([replace(part, steps=part.steps * self.runs) for part in history], delta)
