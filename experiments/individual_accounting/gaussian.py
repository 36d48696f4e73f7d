"""The exact profile of the Gaussian mechanism: δ(ε) = Φ(μ/2 − ε/μ) − e^ε Φ(−μ/2 − ε/μ).

Balle and Wang, arXiv 1805.06530, Theorem 8; as μ-GDP, which composes by adding μ² exactly: Dong, Roth and Su, arXiv
1905.02383, Corollaries 1 and 2. Adaptive composition of steps with their own μ_t: Koskela et al., arXiv 2209.15596.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from scipy.special import log_ndtr, ndtr

from epsilons import SampledGaussian
from epsilons.core.mechanism import FloatArray
from epsilons.errors import PlanError

#: Halvings of the bracket: beyond the last bit of a double.
_HALVINGS = 80


def delta_of(epsilon: npt.ArrayLike, mu: npt.ArrayLike) -> FloatArray:
    """δ at ε of a μ-GDP mechanism; 0 for μ = 0.

    >>> round(float(delta_of(0.3, 0.08898)) * 1e5, 3)
    1.0
    """
    epsilon, mu = np.broadcast_arrays(np.asarray(epsilon, np.float64), np.asarray(mu, np.float64))
    with np.errstate(divide="ignore", invalid="ignore"):
        found = ndtr(mu / 2 - epsilon / mu) - np.exp(epsilon + log_ndtr(-mu / 2 - epsilon / mu))
    return np.asarray(np.where(mu > 0, found, 0.0), dtype=np.float64)


def epsilon_of(mu: npt.ArrayLike, delta: float) -> FloatArray:
    """The smallest ε at δ of a μ-GDP mechanism, rounded up.

    >>> epsilon_of([0.0, 0.08898345], 1e-5).round(6)
    array([0. , 0.3])
    """
    mu = np.atleast_1d(np.asarray(mu, np.float64))
    low, high = np.zeros_like(mu), mu * mu / 2 + mu * math.sqrt(2 * math.log(1 / delta))  # a tail bound
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        keeps = delta_of(middle, mu) <= delta
        low, high = np.where(keeps, low, middle), np.where(keeps, middle, high)
    return np.where(delta_of(0.0, mu) <= delta, 0.0, high)


def epsilon(history: Sequence[SampledGaussian], delta: float) -> float:
    """The accountant of full batches. Raises PlanError for a history with sampling."""
    parts = [part for part in history if not part.is_silent]
    if any(part.sample_rate < 1 for part in parts):
        raise PlanError("The Gaussian profile is exact for full batches only, got a sampling rate below 1.")
    squared = sum(part.steps / part.noise_multiplier**2 for part in parts)
    return float(epsilon_of(math.sqrt(squared), delta)[0])
