"""The loss of many steps, by FFT: Koskela et al., arXiv 1906.03049v4."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
from scipy import fft

from ..mechanism import FloatArray
from .losses import Losses

#: Probability of a loss beyond a composition's window, which counts as infinite loss.
_CUT = 1e-15
_BINS = 1000


def self_composed(one: Losses, times: int) -> Losses:
    """The loss of `times` independent steps; losses outside the window count as infinite."""
    if times == 1:
        return one
    start, end = window(one.probability, times)
    length = fft.next_fast_len(max(end - start + 1, len(one.probability)), real=True)
    power = fft.irfft(raised(fft.rfft(one.probability, length), times), length)
    # The transform wraps around: losses outside the window land inside it, where they only raise the bound.
    kept = np.roll(power, -(start % length))[: end - start + 1]
    infinite = _CUT - math.expm1(times * math.log1p(-one.infinite))
    return Losses(one.spacing, one.lowest * times + start, kept, infinite)


def raised(values: npt.NDArray[np.complex128], times: int) -> npt.NDArray[np.complex128]:
    """values ** times by repeated squaring: much faster than NumPy's power, and more accurate."""
    out: npt.NDArray[np.complex128] | None = None
    while times:
        if times & 1:
            out = values if out is None else out * values
        times >>= 1
        if times:
            values = values * values
    return np.ones_like(values) if out is None else out


def window(probability: FloatArray, times: int) -> tuple[int, int]:
    """First and last index of a window that a sum of `times` draws leaves with probability at most 1e-15 (Chernoff)."""
    points = len(probability)
    index = np.arange(points, dtype=np.float64)
    mass = float(probability.sum())
    mean = float(probability @ index) / mass
    deviation = math.sqrt(max(float(probability @ (index - mean) ** 2) / mass, 1e-12))
    need = math.log(2 / _CUT)

    def reach(order: float, log_mass: FloatArray, from_mean: FloatArray) -> float:
        """Distance from the mean at which the tail of the sum is cut; every order gives a valid bound."""
        tilted = log_mass + order * from_mean
        top = float(tilted.max())
        return (times * (top + math.log(float(np.exp(tilted - top).sum()))) + need) / order

    # The best order is searched on a few bins; the bound at this order is then computed on all points.
    starts = np.arange(0, points, -(-points // _BINS))
    binned = np.add.reduceat(probability, starts)
    middle = np.add.reduceat(probability * index, starts) / np.maximum(binned, 1e-300) - mean
    with np.errstate(divide="ignore"):
        log_binned, log_probability = np.log(binned), np.log(probability)
    best = math.sqrt(2 * need / times) / deviation  # the best order for a Gaussian sum
    far = []
    for sign in (-1.0, 1.0):
        order, distance = best, reach(best, log_binned, sign * middle)
        for factor in (0.5, 1.4):
            while (tried := reach(order * factor, log_binned, sign * middle)) < distance:
                order, distance = order * factor, tried
        far.append(reach(order, log_probability, sign * (index - mean)))
    first = max(0, math.floor(times * mean - far[0]))
    last = min((points - 1) * times, math.ceil(times * mean + far[1]))
    return first, max(first, last)


def convolved(one: Losses, other: Losses) -> Losses:
    from scipy import signal  # only here: its import takes longer than all else that planning needs

    infinite = one.infinite + other.infinite - one.infinite * other.infinite
    probability = signal.fftconvolve(one.probability, other.probability)
    return Losses(one.spacing, one.lowest + other.lowest, probability, infinite)
