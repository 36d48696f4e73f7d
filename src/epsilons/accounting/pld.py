"""PLD: upper bounds by numerical composition of privacy loss distributions, in both directions.

Composition by FFT: Koskela et al., arXiv 1906.03049v4. Connect-the-dots rounding, under which every discretised
distribution dominates the true one: Doroshenko et al., arXiv 2207.04380v1, Algorithm 1. dp-accounting computes the same
point by point; the tests compare with it. Here the grid is fitted to each mechanism, the arithmetic is vectorised over
grids, and deltas are evaluated slightly lower, to cover the rounding of the FFT.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt
from scipy import fft, special

from ..errors import BudgetError
from ..mechanism import SMALLEST_DELTA, SMALLEST_NOISE, FloatArray, SampledGaussian

History = tuple[SampledGaussian, ...]

#: Grid spacing as a fraction of one step's standard deviation of the loss: costs about 2e-4 of epsilon.
FINENESS = 0.05
WIDEST = 0.02  # nats
MOST_POINTS = 1e6

#: Bound on how much rounding lowers a tail: 1e-12, and 2e-16 for each step, because powers of a transform multiply its
#: error (measured against 80-bit arithmetic: at most 6e-12 at 100,000 steps, 1e-12 at 9,375).
FLOAT_SLACK, FLOAT_SLACK_PER_STEP = 1e-12, 2e-16

#: ln of the probability of a loss beyond one step's grid; probability of a loss beyond a composition's window. Both
#: count as infinite loss.
_LOG_TAIL = -50.0
_CUT = 1e-15
_BINS = 1000


def epsilon(
    history: Sequence[SampledGaussian],
    delta: float,
    grid: float | None = None,
    points: float = MOST_POINTS,
    slacks: float = 1.0,
) -> float:
    """Upper bound on epsilon at `delta` for a record with this history.

    history  the mechanisms that the record goes through
    delta    probability in [1e-9, 1)
    grid     spacing of the discretised privacy loss, in nats; by default fitted to the mechanisms
    points   approximate maximum size of one step's grid; a smaller one is less tight and faster
    slacks   how many times the rounding of the steps is subtracted from delta. One certifies; searches use two, so that
             their results verify whatever the last bits of the history are

    Returns inf where no finite epsilon can be certified, and 0 for a record that never takes part. Raises BudgetError
    for a delta out of range.

    >>> round(epsilon([SampledGaussian(512 / 60_000, 3.4358, 9375)], 1e-5), 4)
    0.9141
    """
    return _one(tuple(history), float(delta), grid, points, slacks)


def epsilon_at(
    history: Sequence[SampledGaussian],
    deltas: FloatArray,
    grid: float | None = None,
    points: float = MOST_POINTS,
    slacks: float = 1.0,
) -> FloatArray:
    """(deltas,) the same at several deltas, for little more than the cost of one."""
    if not ((deltas >= SMALLEST_DELTA) & (deltas < 1)).all():
        raise BudgetError(f"delta must lie between {SMALLEST_DELTA:g} and 1: a smaller one is beyond double precision.")
    directions = both_directions(history, grid, points)
    if directions is None:
        return np.full(len(deltas), math.inf)
    read = [losses.epsilons(np.maximum(deltas - slack(history, slacks), 0.0)) for losses in directions]
    worst: FloatArray = np.maximum.reduce([np.zeros(len(deltas)), *read])
    return worst


def slack(history: Sequence[SampledGaussian], times: float = 1.0) -> float:
    """Bound on how much rounding lowers a delta of this history; the part of the steps counts `times` times."""
    return FLOAT_SLACK + times * FLOAT_SLACK_PER_STEP * sum(m.steps for m in history if not m.is_silent)


@lru_cache(maxsize=65_536)
def _one(history: History, delta: float, grid: float | None, points: float, slacks: float) -> float:
    return float(epsilon_at(history, np.array([delta]), grid, points, slacks)[0])


def fitted_grid(mechanism: SampledGaussian) -> float:
    """Spacing that keeps the discretisation error near 2e-4 of epsilon, with at most about 1e6 points.

    One step's loss has standard deviation about q·sqrt(e^{1/σ²} − 1); its range is about (17σ + 1)/2σ² + ln q. The
    limit on points can only make the grid coarser, which can only raise the bound.
    """
    q, s = mechanism.sample_rate, mechanism.noise_multiplier
    deviation = q * math.sqrt(math.expm1(min(1 / s**2, 600.0)))
    return max(min(FINENESS * deviation, WIDEST), _reach(mechanism) / MOST_POINTS)


@dataclass(frozen=True, eq=False)
class Losses:
    """A discretised privacy loss.

    spacing      nats between neighbouring losses
    lowest       the smallest loss, in spacings
    probability  (points,) of each loss spacing·(lowest + i)
    infinite     probability of an infinite loss
    """

    spacing: float
    lowest: int
    probability: FloatArray
    infinite: float

    def epsilons(self, deltas: FloatArray) -> FloatArray:
        """(deltas,) the smallest epsilon >= 0 with a hockey-stick divergence of at most each delta, rounded up."""
        loss, above, below = self._sums
        divergence = above - np.exp(np.minimum(loss, 700.0)) * below  # with epsilon equal to each loss
        # Rounding can swap neighbours in the last digits; the running maximum is an upper bound.
        falling = np.maximum.accumulate(divergence[::-1])[::-1]
        first = np.searchsorted(-falling, -deltas, side="left")  # first point at which delta is met
        at = np.minimum(first, len(loss) - 1)
        # Between that point and the one before, divergence is above − e^ε · below.
        with np.errstate(divide="ignore", invalid="ignore"):
            inside = np.log(np.maximum(above[at] - deltas, 0.0) / below[at])
        inside = np.where(np.isfinite(inside), np.minimum(inside, loss[at]), loss[at])
        inside = np.where(above[at] <= deltas, 0.0, inside)  # delta covers everything
        out: FloatArray = np.maximum(np.where(at > 0, np.maximum(inside, loss[at - 1]), inside), 0.0)
        return np.where((self.infinite > deltas) | (first == len(loss)), math.inf, out)

    def deltas(self, epsilons: FloatArray) -> FloatArray:
        """(epsilons,) hockey-stick divergence at each epsilon, of either sign."""
        loss = self.spacing * (self.lowest + np.arange(len(self.probability)))
        at = np.searchsorted(loss, epsilons, side="right")
        above = np.append(np.cumsum(self.probability[::-1])[::-1], 0.0) + self.infinite
        # Σ p e^{ε − l} over l > ε, scaled so that nothing overflows.
        scale = np.append(_decayed_sums(self.probability, self.spacing), 0.0)
        nearest = np.append(loss, loss[-1] + self.spacing)[at]
        out: FloatArray = np.clip(above[at] - np.exp(epsilons - nearest) * scale[at], 0.0, 1.0)
        return out

    @property
    def _sums(self) -> tuple[FloatArray, FloatArray, FloatArray]:
        """Losses >= 0, the probability of a loss at least as large, and the same sum weighted by e^−loss."""
        start = max(0, -self.lowest)
        kept = self.probability[start:] if start < len(self.probability) else np.zeros(1)
        loss: FloatArray = self.spacing * (max(self.lowest, 0) + np.arange(len(kept), dtype=np.float64))
        above = np.cumsum(kept[::-1])[::-1] + self.infinite
        below = np.cumsum((kept * np.where(loss < 700, np.exp(-np.minimum(loss, 700.0)), 0.0))[::-1])[::-1]
        return loss, above, below


def both_directions(
    history: Sequence[SampledGaussian], grid: float | None = None, points: float = MOST_POINTS
) -> tuple[Losses, ...] | None:
    """The losses of removing and of adding a record, composed separately; None where nothing can be certified.

    Their hockey-stick divergences bound both orders of the two data sets, so the larger one counts. The tuple is empty
    for a record that never takes part.
    """
    steps: dict[tuple[float, float], int] = {}  # equal mechanisms are one with more steps
    for m in history:
        if not m.is_silent:
            steps[m.sample_rate, m.noise_multiplier] = steps.get((m.sample_rate, m.noise_multiplier), 0) + m.steps
    parts = tuple(SampledGaussian(*row, steps[row]) for row in sorted(steps))
    if not parts:
        return ()
    if min(m.noise_multiplier for m in parts) < SMALLEST_NOISE:
        return None
    # One grid for all: the finest that any mechanism needs, limited by the widest range.
    coarsest = max(map(_reach, parts)) / points
    return _composed(parts, grid if grid is not None else max(min(map(fitted_grid, parts)), coarsest))


@lru_cache(maxsize=32)
def _composed(history: History, spacing: float) -> tuple[Losses, ...] | None:
    directions = []
    for discretise in (_removing, _adding):
        composed: Losses | None = None
        for mechanism in history:
            many = _self_composed(discretise(mechanism, spacing), mechanism.steps)
            composed = many if composed is None else _convolved(composed, many)
        if composed is None or not np.isfinite(composed.probability).all():
            return None
        directions.append(composed)
    return tuple(directions)


def _removing(mechanism: SampledGaussian, spacing: float) -> Losses:
    """(1−q)·N(0,σ²) + q·N(1,σ²) against N(0,σ²): at ε > ln(1−q), δ = q · δ_Gauss(u) with e^u = 1 + (e^ε − 1)/q."""
    q, s = mechanism.sample_rate, mechanism.noise_multiplier
    far = -s * special.ndtri_exp(_LOG_TAIL - math.log(2))  # |z| beyond this has chance e^−50
    lowest, highest = _loss(mechanism, -far), _loss(mechanism, far + 1)
    eps = _grid(lowest, highest, spacing)
    u = _log_ratio(eps, q)
    x = s * u + 0.5 / s  # where the loss is ε, in units of σ
    gauss = special.ndtr(1 / s - x) - np.exp(u + special.log_ndtr(-x))
    delta = np.where(np.isneginf(u), -np.expm1(eps), q * gauss)
    return _connect_the_dots(delta, math.floor(lowest / spacing), spacing)


def _adding(mechanism: SampledGaussian, spacing: float) -> Losses:
    """N(0,σ²) against the mixture: at ε < −ln(1−q), δ = q·e^ε · (e^u Φ(x) − Φ(x − 1/σ)) with e^u = 1 + (e^−ε − 1)/q."""
    q, s = mechanism.sample_rate, mechanism.noise_multiplier
    far = -s * special.ndtri_exp(_LOG_TAIL - math.log(2))
    lowest, highest = -_loss(mechanism, far + 1), -_loss(mechanism, -far)
    eps = _grid(lowest, highest, spacing)
    u = _log_ratio(-eps, q)
    x = s * u + 0.5 / s
    with np.errstate(invalid="ignore"):
        gauss = np.exp(u + eps + special.log_ndtr(x)) - np.exp(eps + special.log_ndtr(x - 1 / s))
    return _connect_the_dots(np.where(np.isneginf(u), 0.0, q * gauss), math.floor(lowest / spacing), spacing)


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


def _connect_the_dots(delta: FloatArray, lowest: int, spacing: float) -> Losses:
    """Probabilities on the grid: their hockey-stick curve joins the given dots by chords in e^ε (Algorithm 1)."""
    delta = np.minimum.accumulate(np.clip(delta, 0.0, 1.0))
    step, grow = np.diff(delta), math.expm1(spacing)
    probability = np.empty_like(delta)
    probability[0] = 1 - delta[0] + step[0] / grow
    probability[1:-1] = (step[1:] - step[:-1] * math.exp(spacing)) / grow
    probability[-1] = step[-1] / math.expm1(-spacing)
    return Losses(spacing, lowest, np.maximum(probability, 0.0), float(delta[-1]))


def _self_composed(one: Losses, times: int) -> Losses:
    """The loss of `times` independent steps; losses outside the window count as infinite."""
    if times == 1:
        return one
    start, end = _window(one.probability, times)
    length = fft.next_fast_len(max(end - start + 1, len(one.probability)), real=True)
    power = fft.irfft(_power(fft.rfft(one.probability, length), times), length)
    # The transform wraps around: losses outside the window land inside it, where they only raise the bound.
    kept = np.roll(power, -(start % length))[: end - start + 1]
    infinite = _CUT - math.expm1(times * math.log1p(-one.infinite))
    return Losses(one.spacing, one.lowest * times + start, kept, infinite)


def _power(values: npt.NDArray[np.complex128], times: int) -> npt.NDArray[np.complex128]:
    """values ** times by repeated squaring: much faster than NumPy's power, and more accurate."""
    out: npt.NDArray[np.complex128] | None = None
    while times:
        if times & 1:
            out = values if out is None else out * values
        times >>= 1
        if times:
            values = values * values
    return np.ones_like(values) if out is None else out


def _window(probability: FloatArray, times: int) -> tuple[int, int]:
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


def _convolved(one: Losses, other: Losses) -> Losses:
    from scipy import signal  # only here: its import takes longer than all else that planning needs

    infinite = one.infinite + other.infinite - one.infinite * other.infinite
    probability = signal.fftconvolve(one.probability, other.probability)
    return Losses(one.spacing, one.lowest + other.lowest, probability, infinite)


def _decayed_sums(probability: FloatArray, spacing: float) -> FloatArray:
    """(points,) Σ_{j ≥ i} p_j e^{−(j − i)·spacing}, by a recursion from the top that cannot overflow."""
    from scipy import signal

    out: FloatArray = signal.lfilter([1.0], [1.0, -math.exp(-spacing)], probability[::-1])[::-1]
    return out


def _reach(mechanism: SampledGaussian) -> float:
    """The range of one step's privacy loss in nats, without the truncated tails."""
    s = mechanism.noise_multiplier
    return max(1.0, (17 * s + 1) / (2 * s * s) + math.log(mechanism.sample_rate))
