"""Gaussian: an estimate and a bound, if the scores of in and out are two normal curves of one width.

Their distance in standard deviations is µ, and the mechanism is µ-Gaussian-DP (Dong, Roth, Su, arXiv 1905.02383v3,
Definition 6), which is (ε, δ(ε))-DP with δ(ε) = Φ(µ/2 − ε/µ) − e^ε·Φ(−µ/2 − ε/µ) (Corollary 1). Sharp, and no stronger
than its assumption: where the noise is small and the rate smaller, scores are far from normal.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from scipy.special import log_ndtr, nctdtr, nctdtrinc, ndtr

from .scores import FloatArray

_HIGHEST = 1e6  # nats
_LARGEST_T = 1000.0


@dataclass(frozen=True)
class GaussianFit:
    """mu: distance of the two means in standard deviations, as estimated; mu_bound: its lower confidence bound."""

    mu: float
    mu_bound: float


def fit_gaussian(inside: FloatArray, outside: FloatArray, alpha: float) -> GaussianFit:
    """Cohen's d of in against out, and what it exceeds with confidence 1 − alpha.

    d·√(nm/(n + m)) has a noncentral t distribution about µ·√(nm/(n + m)) (Hedges and Olkin 1985, chapter 5): the
    bound is exact under the assumption. Both are 0 where there is nothing to compare.
    """
    n, m = len(inside), len(outside)
    if n < 2 or m < 2:
        return GaussianFit(0.0, 0.0)
    gap = float(inside.mean() - outside.mean())
    width = math.sqrt((inside.var(ddof=1) * (n - 1) + outside.var(ddof=1) * (m - 1)) / (n + m - 2))
    if gap <= 0:
        return GaussianFit(0.0, 0.0)
    mu = gap / width if width > 0 else math.inf
    root = math.sqrt(n * m / (n + m))
    t = min(mu * root, _LARGEST_T)  # beyond, the bound only falls short
    at_zero = float(nctdtr(n + m - 2, 0.0, t))
    found = float(nctdtrinc(n + m - 2, 1 - alpha, t)) / root if at_zero > 1 - alpha else 0.0
    return GaussianFit(mu, found if math.isfinite(found) else 0.0)


def epsilon_of(mu: float, delta: float) -> float:
    """The smallest epsilon >= 0 at which a µ-Gaussian-DP mechanism has δ(ε) <= delta, from below.

    >>> round(epsilon_of(1.0, 1e-5), 4)
    4.3772
    """
    if mu <= 0 or _divergence(0.0, mu) <= delta:
        return 0.0
    if not math.isfinite(mu) or _divergence(_HIGHEST, mu) > delta:
        return math.inf
    low, high = 0.0, 1.0
    while _divergence(high, mu) > delta:
        low, high = high, 2 * high
    while high - low > 1e-9 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if _divergence(middle, mu) > delta else (low, middle)
    return low


def _divergence(epsilon: float, mu: float) -> float:
    return float(ndtr(mu / 2 - epsilon / mu) - np.exp(epsilon + log_ndtr(-mu / 2 - epsilon / mu)))
