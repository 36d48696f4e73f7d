"""RDP: Rényi divergences of the sampled Gaussian, added up over steps and converted once.

Divergence: Mironov, Talwar, Zhang, arXiv 1908.10530v1, Section 3.3. With w = exp((2z − 1)/2σ²), z ~ N(0, σ²),

    A_α(q, σ) = E[(1 + q(w − 1))^α],   RDP = ln A_α / (α − 1).

Conversion: Balle et al., arXiv 1905.09982v2, Theorem 21 (what Opacus uses). Since E w = 1, A_α − 1 is
computed as the mean of the non-negative (1 + u)^α − 1 − αu with u = q(w − 1): no cancellation, where
the alternating series of other libraries lose all digits at small q.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from scipy.special import gammaln

from ..mechanism import SMALLEST_NOISE, SampledGaussian

FloatArray = npt.NDArray[np.float64]

#: Opacus' orders (1.1, 1.2, … 10.9, 12, 13, … 63), so that its users find their numbers again.
OPACUS_ORDERS: tuple[float, ...] = (*(1 + x / 10 for x in range(1, 100)), *(float(x) for x in range(12, 64)))
#: More orders, for budgets below what OPACUS_ORDERS can reach (0.103 at delta = 1e-5).
EXTENDED_ORDERS: tuple[float, ...] = (
    *(1 + x / 100 for x in range(1, 10)),
    *OPACUS_ORDERS,
    *(float(x) for x in (64, 72, 80, 96, 112, 128, 160, 192, 256, 320, 384, 512, 640, 768, 1024)),
)

#: Raises ln A_α − 1 a hair, above the rounding of both evaluations below (measured against mpmath: < 1e-10).
_SLACK = 1e-9


def epsilon(history: Sequence[SampledGaussian], delta: float, orders: Sequence[float] = OPACUS_ORDERS) -> float:
    """Upper bound on epsilon at `delta` for a record that went through `history`.

    Reaches further with other `orders` (each > 1), e.g. `functools.partial(rdp.epsilon, orders=rdp.EXTENDED_ORDERS)`.

    >>> round(epsilon([SampledGaussian(512 / 60_000, 3.4358, 9375)], 1e-5), 4)
    1.0
    """
    parts = [m for m in history if not m.is_silent]
    if not parts:
        return 0.0
    alpha = np.asarray(orders, dtype=np.float64)  # (orders,)
    total = np.zeros_like(alpha)
    for mechanism in parts:
        total += mechanism.steps * divergence(mechanism.sample_rate, mechanism.noise_multiplier, alpha)
    converted = total + np.log1p(-1 / alpha) - (math.log(delta) + np.log(alpha)) / (alpha - 1)
    return max(float(converted.min()), 0.0)


def divergence(sample_rate: float, noise_multiplier: float, orders: npt.ArrayLike) -> FloatArray:
    """(orders,) Rényi divergence of one step, rounded up."""
    alpha = np.atleast_1d(np.asarray(orders, dtype=np.float64))
    if sample_rate == 0:
        return np.zeros_like(alpha)
    if sample_rate == 1:
        return alpha / (2 * noise_multiplier**2)
    if noise_multiplier < SMALLEST_NOISE:  # the quadrature would need too many points
        alpha = np.ceil(alpha)  # the divergence grows with the order, so the next whole one bounds it
    whole = alpha == np.round(alpha)
    log_excess = np.empty_like(alpha)  # ln(A_α − 1)
    if whole.any():
        log_excess[whole] = [_by_series(sample_rate, noise_multiplier, int(a)) for a in alpha[whole]]
    if (~whole).any():
        log_excess[~whole] = _by_quadrature(sample_rate, noise_multiplier, alpha[~whole])
    upper: FloatArray = np.logaddexp(0.0, log_excess + _SLACK) / (alpha - 1)
    return upper


def _by_series(q: float, s: float, alpha: int) -> float:
    """ln(A_α − 1) = ln Σ_{k≥2} C(α,k) q^k (1−q)^{α−k} (e^{(k²−k)/2σ²} − 1): every term is positive."""
    k = np.arange(2, alpha + 1, dtype=np.float64)
    exponent = (k * k - k) / (2 * s * s)
    log_expm1 = np.where(exponent > 30, exponent, np.log(np.expm1(np.minimum(exponent, 30)))) + np.where(
        exponent > 30, np.log1p(-np.exp(-exponent)), 0.0
    )
    log_choose = gammaln(alpha + 1) - gammaln(k + 1) - gammaln(alpha - k + 1)
    terms = log_choose + k * math.log(q) + (alpha - k) * math.log1p(-q) + log_expm1
    return float(np.logaddexp.reduce(terms))


def _by_quadrature(q: float, s: float, alpha: FloatArray) -> FloatArray:
    """ln(A_α − 1) for real orders, by the trapezoid rule over z = s·y.

    The integrand is analytic, so the rule converges like e^{−2π²s/step}: 5e-15 at the step below.
    """
    step = min(0.25, 0.6 * s)
    y = np.arange(-9.5, alpha.max() / s + 9.5 + step, step)[None, :]  # (1, points)
    a = alpha[:, None]  # (orders, 1)
    log_w = y / s - 1 / (2 * s * s)
    u = q * np.expm1(np.minimum(log_w, 700.0))
    log_1u = np.where(
        log_w < 30, np.log1p(np.where(log_w < 30, u, 0.0)), np.logaddexp(math.log(q) + log_w, math.log1p(-q))
    )
    near = np.abs(u) < 1e-3
    u_near = np.where(near, u, 0.0)
    taylor = 0.5 * a * (a - 1) * u_near**2
    taylor = taylor * (1 + (a - 2) / 3 * u_near * (1 + (a - 3) / 4 * u_near * (1 + (a - 4) / 5 * u_near)))
    power = a * log_1u  # ln (1 + u)^α
    direct = np.expm1(np.minimum(power, 600.0)) - a * u
    tiny = np.finfo(np.float64).tiny
    log_g = np.where(near, np.log(np.maximum(taylor, tiny)), np.log(np.maximum(direct, tiny)))
    log_g = np.where(power > 600, power, log_g)
    log_density = -0.5 * y * y - 0.5 * math.log(2 * math.pi) + math.log(step)
    total: FloatArray = np.logaddexp.reduce(log_g + log_density, axis=1)
    return total
