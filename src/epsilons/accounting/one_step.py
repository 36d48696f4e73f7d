"""The privacy loss of one step of a sampled Gaussian, on a grid fitted to it.

`removing` and `adding` compute each direction on its own. Where nearly all steps lose next to nothing, `adding` takes
differences of numbers near 1, and their rounding adds up: 4e-4 of probability on a grid of 1.8 million points.
`both_directions` has no such differences. It computes the losses above 0 of each direction, and reads those below 0
off the other direction.
"""

from __future__ import annotations

import math

import numpy as np
from scipy import special

from ..mechanism import FloatArray, SampledGaussian
from .losses import Losses, connect_both, connect_the_dots

#: Grid spacing as a fraction of one step's standard deviation of the loss: costs about 2e-4 of epsilon.
FINENESS = 0.05
WIDEST = 0.02  # nats
MOST_POINTS = 1e6

#: ln of the probability of a loss beyond one step's grid, which counts as infinite loss.
_LOG_TAIL = -50.0


def fitted_grid(mechanism: SampledGaussian) -> float:
    """Spacing that keeps the discretisation error near 2e-4 of epsilon, with at most about 1e6 points.

    One step's loss has standard deviation about q·sqrt(e^{1/σ²} − 1); its range is about (17σ + 1)/2σ² + ln q. The
    limit on points can only make the grid coarser, which can only raise the bound.
    """
    return max(min(FINENESS * deviation(mechanism), WIDEST), reach(mechanism) / MOST_POINTS)


def deviation(mechanism: SampledGaussian) -> float:
    """Approximate standard deviation of one step's loss, in nats: that of the likelihood ratio."""
    return mechanism.sample_rate * math.sqrt(math.expm1(min(1 / mechanism.noise_multiplier**2, 600.0)))


def reach(mechanism: SampledGaussian) -> float:
    """The range of one step's privacy loss in nats, without the truncated tails."""
    s = mechanism.noise_multiplier
    return max(1.0, (17 * s + 1) / (2 * s * s) + math.log(mechanism.sample_rate))


def removing(mechanism: SampledGaussian, spacing: float) -> Losses:
    """(1−q)·N(0,σ²) + q·N(1,σ²) against N(0,σ²): at ε > ln(1−q), δ = q · δ_Gauss(u) with e^u = 1 + (e^ε − 1)/q."""
    lowest, highest = _range(mechanism)
    delta = _removing_delta(mechanism, _grid(lowest, highest, spacing))
    return connect_the_dots(delta, math.floor(lowest / spacing), spacing)


def adding(mechanism: SampledGaussian, spacing: float) -> Losses:
    """N(0,σ²) against the mixture: at ε < −ln(1−q), δ = q·e^ε · (e^u Φ(x) − Φ(x − 1/σ)) with e^u = 1 + (e^−ε − 1)/q."""
    highest, lowest = (-end for end in _range(mechanism))
    delta = _adding_delta(mechanism, _grid(lowest, highest, spacing))
    return connect_the_dots(delta, math.floor(lowest / spacing), spacing)


def both_directions(mechanism: SampledGaussian, spacing: float) -> tuple[Losses, Losses]:
    """The same distributions as `removing` and `adding`, without their rounding."""
    lowest, highest = _range(mechanism)
    removed = _removing_delta(mechanism, _grid(0.0, max(highest, spacing), spacing))
    added = _adding_delta(mechanism, _grid(0.0, max(-lowest, spacing), spacing))
    return connect_both(removed, added, spacing)


def points(mechanism: SampledGaussian, spacing: float) -> float:
    """Approximate number of points of one step's grid."""
    lowest, highest = _range(mechanism)
    return (highest - lowest) / spacing + 2


def _removing_delta(mechanism: SampledGaussian, eps: FloatArray) -> FloatArray:
    """(points,) the hockey-stick divergence of removing at each ε."""
    q, s = mechanism.sample_rate, mechanism.noise_multiplier
    u = _log_ratio(eps, q)
    x = s * u + 0.5 / s  # where the loss is ε, in units of σ
    gauss = special.ndtr(1 / s - x) - np.exp(u + special.log_ndtr(-x))
    return np.where(np.isneginf(u), -np.expm1(eps), q * gauss)


def _adding_delta(mechanism: SampledGaussian, eps: FloatArray) -> FloatArray:
    """(points,) the hockey-stick divergence of adding at each ε."""
    q, s = mechanism.sample_rate, mechanism.noise_multiplier
    u = _log_ratio(-eps, q)
    x = s * u + 0.5 / s
    with np.errstate(invalid="ignore"):
        gauss = np.exp(u + eps + special.log_ndtr(x)) - np.exp(eps + special.log_ndtr(x - 1 / s))
    return np.where(np.isneginf(u), 0.0, q * gauss)


def _range(mechanism: SampledGaussian) -> tuple[float, float]:
    """The smallest and largest loss of removing on the grid; a noise beyond has chance e^−50."""
    far = -mechanism.noise_multiplier * special.ndtri_exp(_LOG_TAIL - math.log(2))
    return _loss(mechanism, -far), _loss(mechanism, far + 1)


def _grid(lowest: float, highest: float, spacing: float) -> FloatArray:
    """The multiples of spacing from just below `lowest` to just above `highest`."""
    points = np.arange(math.floor(lowest / spacing), math.ceil(highest / spacing) + 1, dtype=np.float64)
    return np.asarray(spacing * points, dtype=np.float64)


def _loss(mechanism: SampledGaussian, z: float) -> float:
    """ln(1 − q + q·e^{(2z − 1)/2σ²}): the privacy loss of removing at z."""
    q, w = mechanism.sample_rate, (2 * z - 1) / (2 * mechanism.noise_multiplier**2)
    if q == 1:
        return w
    return math.log1p(q * math.expm1(w)) if w < 30 else float(np.logaddexp(math.log1p(-q), math.log(q) + w))


def _log_ratio(eps: FloatArray, q: float) -> FloatArray:
    """ln(1 + (e^ε − 1)/q): the unsampled loss behind a sampled one of ε; −inf where there is none."""
    if q == 1:
        return eps
    with np.errstate(divide="ignore", invalid="ignore"):
        near = np.log1p(np.maximum(np.expm1(np.minimum(eps, 30.0)) / q, -1.0))
        out: FloatArray = np.where(eps < 30, near, eps - math.log(q) + np.log1p((q - 1) * np.exp(-np.maximum(eps, 0))))
    return out
