"""The loss of many steps, by FFT: Koskela et al., arXiv 1906.03049v4."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
from scipy import fft

from ..mechanism import FloatArray
from .losses import Losses

#: The largest grid of a composition: its arrays have 64 MiB, and one epsilon needs about ten of them.
MOST_POINTS = 2**23

#: Probability of a loss beyond a composition's window, which counts as infinite loss.
_CUT = 1e-15
_BINS = 1000


def self_composed(one: Losses, times: int, kept: tuple[int, int] | None = None) -> Losses:
    """The loss of `times` independent steps; losses outside the window count as infinite.

    kept: the window, by default `window(one.probability, times)`.
    """
    if times == 1:
        return one
    start, end = kept or window(one.probability, times)
    length = fft.next_fast_len(max(end - start + 1, len(one.probability)), real=True)
    power = fft.irfft(raised(fft.rfft(one.probability, length), times), length)
    # The transform wraps around: losses outside the window land inside it, where they only raise the bound.
    inside = np.roll(power, -(start % length))[: end - start + 1]
    infinite = _CUT - math.expm1(times * math.log1p(-one.infinite))
    return Losses(one.spacing, one.lowest * times + start, inside, infinite)


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


def window(probability: FloatArray, times: int, wide_search: bool = False) -> tuple[int, int]:
    """First and last index of a window that a sum of `times` draws leaves with probability at most 1e-15 (Chernoff).

    wide_search: compare orders over eight decades. Otherwise follow the bound from the order of a Gaussian sum: faster,
    but where one step's tail is long it can miss the best order by far.
    """
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
        if wide_search:
            # Where the tail is long, one bin holds much of the spread: e^{order²·spread/2} accounts for it.
            squares = np.add.reduceat(probability * (index - mean) ** 2, starts)
            spread = np.maximum(squares / np.maximum(binned, 1e-300) - middle**2, 0.0)
            orders = best * np.geomspace(1e-7, 10, 81)
            order = orders[np.argmin([reach(o, log_binned + o * o * spread / 2, sign * middle) for o in orders])]
        else:
            order = _descended(best, functools.partial(reach, log_mass=log_binned, from_mean=sign * middle))
        far.append(reach(float(order), log_probability, sign * (index - mean)))
    first = max(0, math.floor(times * mean - far[0]))
    last = min((points - 1) * times, math.ceil(times * mean + far[1]))
    return first, max(first, last)


def _descended(order: float, distance: Callable[[float], float]) -> float:
    """The order at which halving, and then steps of 1.4, no longer lower the distance."""
    least = distance(order)
    for factor in (0.5, 1.4):
        while 1e-100 < order < 1e100 and (tried := distance(order * factor)) < least:
            order, least = order * factor, tried
    return order


def convolved(one: Losses, other: Losses) -> Losses:
    from scipy import signal  # only here: its import takes longer than all else that planning needs

    infinite = one.infinite + other.infinite - one.infinite * other.infinite
    probability = signal.fftconvolve(one.probability, other.probability)
    return Losses(one.spacing, one.lowest + other.lowest, probability, infinite)
