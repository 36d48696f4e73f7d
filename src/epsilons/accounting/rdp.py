"""RDP: Rényi divergences of the sampled Gaussian, added over steps and converted to epsilon once.

Divergence: Mironov, Talwar, Zhang, arXiv 1908.10530v1, Section 3.3. With w = exp((2z − 1)/2σ²), z ~ N(0, σ²),

    A_α(q, σ) = E[(1 + q(w − 1))^α],   RDP = ln A_α / (α − 1).

Conversion: Balle et al., arXiv 1905.09982v2, Theorem 21 (what Opacus uses). Since E w = 1, A_α − 1 is
computed as the mean of the non-negative (1 + u)^α − 1 − αu with u = q(w − 1): no cancellation, where
the alternating series of other libraries lose all digits at small q. All functions work on many mechanisms at once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt
from scipy.special import binom, gammaln

from ..core.mechanism import SMALLEST_NOISE, FloatArray, SampledGaussian

#: Opacus' orders (1.1, 1.2, … 10.9, 12, 13, … 63), so that results equal those of Opacus.
OPACUS_ORDERS: tuple[float, ...] = (*(1 + x / 10 for x in range(1, 100)), *(float(x) for x in range(12, 64)))
#: More orders, for budgets below what OPACUS_ORDERS can reach (0.103 at delta = 1e-5).
EXTENDED_ORDERS: tuple[float, ...] = (
    *(1 + x / 100 for x in range(1, 10)),
    *OPACUS_ORDERS,
    *(float(x) for x in (64, 72, 80, 96, 112, 128, 160, 192, 256, 320, 384, 512, 640, 768, 1024)),
)

#: Added to ln(A_α − 1), to stay above the rounding of both evaluations below (measured against mpmath: < 1e-10).
_SLACK = 1e-9

#: Entries of the largest temporary array, which should stay in a core's cache.
_BLOCK = 250_000


def epsilon(history: Sequence[SampledGaussian], delta: float, orders: Sequence[float] = OPACUS_ORDERS) -> float:
    """Upper bound on epsilon at `delta` for a record with this history.

    history  the mechanisms that the record goes through
    delta    probability in (0, 1)
    orders   Rényi orders, each > 1. `functools.partial(rdp.epsilon, orders=rdp.EXTENDED_ORDERS)` is an accountant that
             certifies smaller epsilons

    >>> round(epsilon([SampledGaussian(512 / 60_000, 3.4358, 9375)], 1e-5), 4)
    1.0
    """
    parts = [m for m in history if not m.is_silent]
    rates, noises = (np.array([[getattr(m, name)] for m in parts]) for name in ("sample_rate", "noise_multiplier"))
    return float(batch_epsilon(rates, noises, [m.steps for m in parts], np.array([delta]), orders)[0])


def epsilon_at(history: Sequence[SampledGaussian], deltas: FloatArray) -> FloatArray:
    """(deltas,) the same at several deltas, for a history without silent parts."""
    total, alpha = _added(history), np.array(OPACUS_ORDERS)
    distinct, where = np.unique(deltas, return_inverse=True)
    blocks = np.array_split(distinct, max(1, len(distinct) * len(alpha) // _BLOCK))
    return np.concatenate([converted(total[None], block, alpha) for block in blocks])[where]


def delta_at(history: Sequence[SampledGaussian], epsilons: FloatArray) -> FloatArray:
    """(epsilons,) upper bounds on the hockey-stick divergence of either direction, at epsilons >= 0.

    The conversion above, solved for delta: ln δ = (α − 1)·(RDP + ln(1 − 1/α) − ε) − ln α.
    """
    return delta_of(_added(history), np.array(OPACUS_ORDERS), epsilons)


def delta_of(total: FloatArray, alpha: FloatArray, epsilons: FloatArray) -> FloatArray:
    """(epsilons,) the same from Rényi divergences `total` (orders,) at the orders alpha (orders,)."""
    above = (total + np.log1p(-1 / alpha)) - epsilons[:, None]  # (epsilons, orders)
    log_delta = ((alpha - 1) * above - np.log(alpha)).min(axis=1)
    return np.asarray(np.exp(np.minimum(log_delta, 0.0)), dtype=np.float64)


def _added(history: Sequence[SampledGaussian]) -> FloatArray:
    """(orders,) Rényi divergences of all steps of a history without silent parts, at OPACUS_ORDERS."""
    rates, noises = (np.array([getattr(m, name) for m in history]) for name in ("sample_rate", "noise_multiplier"))
    steps = np.array([m.steps for m in history], dtype=np.float64)
    return np.asarray(steps @ divergences(rates, noises, np.array(OPACUS_ORDERS)), dtype=np.float64)


def batch_epsilon(
    rates: FloatArray,
    noises: FloatArray,
    steps: Sequence[int],
    deltas: FloatArray,
    orders: Sequence[float] = OPACUS_ORDERS,
) -> FloatArray:
    """(rows,) the same for many histories: rates and noises (phases, rows), steps (phases,), deltas (rows,)."""
    alpha = np.asarray(orders, dtype=np.float64)  # (orders,)
    out = np.zeros(len(deltas))
    drawn = (np.asarray(rates) > 0).any(axis=0) if len(steps) else np.zeros(len(deltas), dtype=bool)
    total = np.zeros((int(drawn.sum()), len(alpha)))  # (rows, orders)
    for rate, noise, count in zip(rates, noises, steps, strict=True):
        total += count * divergences(rate[drawn], noise[drawn], alpha)
    out[drawn] = converted(total, deltas[drawn], alpha)
    return out


def converted(total: FloatArray, deltas: FloatArray, alpha: FloatArray) -> FloatArray:
    """(rows,) epsilon at each row's delta, from Rényi divergences `total` (rows, orders)."""
    fixed = np.log1p(-1 / alpha) - np.log(alpha) / (alpha - 1)  # (orders,)
    bounds = total + fixed - np.log(deltas)[:, None] / (alpha - 1)  # (rows, orders)
    return np.asarray(np.maximum(bounds.min(axis=1), 0.0), dtype=np.float64)


def divergence(sample_rate: float, noise_multiplier: float, orders: npt.ArrayLike) -> FloatArray:
    """(orders,) Rényi divergence of one step, rounded up."""
    alpha = np.atleast_1d(np.asarray(orders, dtype=np.float64))
    return divergences(np.array([sample_rate]), np.array([noise_multiplier]), alpha).reshape(-1)


def divergences(rates: FloatArray, noises: FloatArray, orders: FloatArray) -> FloatArray:
    """(rows, orders) Rényi divergence of one step of each mechanism, rounded up."""
    out = np.logaddexp(0.0, log_excess(rates, noises, orders)) / (orders - 1)
    always = np.asarray(rates) == 1
    out[always] = orders / (2 * np.asarray(noises)[always, None] ** 2)
    return np.asarray(out, dtype=np.float64)


def log_excess(rates: FloatArray, noises: FloatArray, orders: FloatArray) -> FloatArray:
    """(rows, orders) ln(A_α − 1), rounded up: −inf at rate 0; not meaningful at rate 1."""
    rates, noises = np.asarray(rates, dtype=np.float64), np.asarray(noises, dtype=np.float64)
    out = np.full((len(rates), len(orders)), -np.inf)
    partly = (rates > 0) & (rates < 1) & np.isfinite(noises)
    # For less noise the quadrature would need too many points; the next whole order bounds a fractional one.
    loud = partly & (noises < SMALLEST_NOISE)
    for rows, alpha in ((partly & ~loud, orders), (loud, np.ceil(orders))):
        if not rows.any():
            continue
        is_whole = alpha == np.round(alpha)
        part = np.empty((int(rows.sum()), len(alpha)))
        if is_whole.any():
            part[:, is_whole] = _by_series(rates[rows], noises[rows], tuple(alpha[is_whole].astype(int)))
        if (~is_whole).any():
            part[:, ~is_whole] = _by_quadrature(rates[rows], noises[rows], alpha[~is_whole])
        out[rows] = part + _SLACK
    return out


@lru_cache(maxsize=16)
def _terms(orders: tuple[int, ...]) -> tuple[FloatArray, FloatArray, FloatArray, npt.NDArray[np.int64]]:
    """k, α − k and ln C(α, k) of all terms of all orders' series, concatenated, and the start of each series."""
    k = np.concatenate([np.arange(2, a + 1, dtype=np.float64) for a in orders])
    lengths = np.array([a - 1 for a in orders])
    alpha = np.repeat(np.array(orders, dtype=np.float64), lengths)
    log_choose = gammaln(alpha + 1) - gammaln(k + 1) - gammaln(alpha - k + 1)
    return k, alpha - k, log_choose, np.cumsum(lengths) - lengths


def _by_series(q: FloatArray, s: FloatArray, orders: tuple[int, ...]) -> FloatArray:
    """ln(A_α − 1) = ln Σ_{k≥2} C(α,k) q^k (1−q)^{α−k} (e^{(k²−k)/2σ²} − 1): every term is positive."""
    k, rest, log_choose, starts = _terms(orders)
    most = int(k.max())
    pairs = np.arange(most + 1, dtype=np.float64)
    out = np.empty((len(q), len(orders)))
    block = max(1, _BLOCK // len(k))
    for i in range(0, len(q), block):
        rows = slice(i, i + block)
        exponent = (pairs * (pairs - 1)) / (2 * s[rows, None] ** 2)  # (rows, largest order): k(k−1)/2σ²
        with np.errstate(divide="ignore", over="ignore"):
            log_expm1 = exponent + np.log(-np.expm1(-exponent))
        terms = log_choose + k * np.log(q[rows, None]) + rest * np.log1p(-q[rows, None]) + log_expm1[:, k.astype(int)]
        top = np.maximum.reduceat(terms, starts, axis=1)
        np.subtract(terms, np.repeat(top, np.diff(np.append(starts, len(k))), axis=1), out=terms)
        out[rows] = top + np.log(np.add.reduceat(np.exp(terms, out=terms), starts, axis=1))
    return out


def _by_quadrature(q: FloatArray, s: FloatArray, alpha: FloatArray) -> FloatArray:
    """ln(A_α − 1) for real orders, by the trapezoid rule over z = s·y.

    The integrand is analytic, so the rule converges like e^{−2π²s/step}: 5e-15 at the step below.
    """
    out = np.empty((len(q), len(alpha)))
    # Points depend on the noise's power of 1.2 and not on other rows, so a row's result does not depend on the batch.
    bins = np.floor(np.log(s) / math.log(1.2))
    for power in np.unique(bins):
        least = 1.2 ** float(power) * (1 - 1e-12)
        step = min(0.25, 0.6 * least)
        y = np.arange(-9.5, alpha.max() / least + 9.5 + step, step)
        members = np.flatnonzero(bins == power)
        block = max(1, _BLOCK // (len(y) * len(alpha)))
        for i in range(0, len(members), block):
            rows = members[i : i + block]
            out[rows] = _on_points(q[rows, None], s[rows, None], alpha, y, step, least)
    return out


def _on_points(q: FloatArray, s: FloatArray, alpha: FloatArray, y: FloatArray, step: float, least: float) -> FloatArray:
    log_w = y / s - 1 / (2 * s * s)  # (rows, points)
    log_density = -0.5 * y * y - 0.5 * math.log(2 * math.pi) + math.log(step)
    density = np.exp(log_density)  # (points,)
    with np.errstate(over="ignore"):
        u = q * np.expm1(np.minimum(log_w, 700.0))
    log_1u = np.where(log_w < 700, np.log1p(u), np.log(q) + log_w)
    # Near u = 0: the binomial series Σ_{k≥2} C(α, k) E[u^k], dominated by its first term.
    near = np.abs(u) < 0.2 / max(10.0, float(alpha.max()))
    u_near = np.where(near, u, 0.0)
    power = u_near * density
    total = np.zeros((len(q), len(alpha)))
    for k in range(2, 12):
        power = power * u_near
        total += binom(alpha, k) * power.sum(axis=1)[:, None]
    # Elsewhere: the definition.
    u_far, log_far = np.where(near, 0.0, u), np.where(near, 0.0, log_1u)
    x = alpha[:, None] * log_far[:, None, :]  # (rows, orders, points)
    if alpha.max() * y[-1] / least < 600:
        total += (np.expm1(x) * density).sum(axis=2) - alpha * (u_far * density).sum(axis=1)[:, None]
        return np.asarray(np.log(np.maximum(total, np.finfo(np.float64).tiny)), dtype=np.float64)
    low = x < 500
    small = np.where(low, np.expm1(np.where(low, x, 0.0)) - alpha[:, None] * np.where(low, u_far[:, None, :], 0.0), 0.0)
    total += (small * density).sum(axis=2)
    large = np.where(low, -np.inf, x + log_density)
    with np.errstate(divide="ignore"):
        log_total = np.log(np.maximum(total, np.finfo(np.float64).tiny))
    return np.asarray(np.logaddexp(log_total, np.logaddexp.reduce(large, axis=2)), dtype=np.float64)
