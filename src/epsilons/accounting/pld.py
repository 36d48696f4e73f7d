"""PLD: upper bounds by numerical composition of privacy loss distributions, in both directions.

Composition by FFT: Koskela et al., arXiv 1906.03049v4. Connect-the-dots rounding, under which every discretised
distribution dominates the true one: Doroshenko et al., arXiv 2207.04380v1, Algorithm 1. dp-accounting computes the same
point by point; the tests compare with it. Here the grid is fitted to each mechanism, the arithmetic is vectorised over
grids, and deltas are evaluated slightly lower, to cover the rounding of the FFT. Memory is bounded (histories.py).

Where the grid is coarse, or delta hardly larger than that rounding, RDP's bound can be the smaller one. Both hold for
the same history at the same delta, which is fixed before, so the smaller of the two holds as well.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from threading import Lock

import numpy as np
import numpy.typing as npt
from scipy import fft, special

from ..core.mechanism import SMALLEST_DELTA, SMALLEST_NOISE, FloatArray, SampledGaussian
from ..errors import BudgetError
from . import rdp

# -- Discretised privacy losses: epsilon at a delta, and delta at an epsilon


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


def connect_the_dots(delta: FloatArray, lowest: int, spacing: float) -> Losses:
    """Probabilities on the grid: their hockey-stick curve joins the given dots by chords in e^ε (Algorithm 1)."""
    delta = np.minimum.accumulate(np.clip(delta, 0.0, 1.0))
    step, grow = np.diff(delta), math.expm1(spacing)
    probability = np.empty_like(delta)
    probability[0] = 1 - delta[0] + step[0] / grow
    probability[1:-1] = (step[1:] - step[:-1] * math.exp(spacing)) / grow
    probability[-1] = step[-1] / math.expm1(-spacing)
    return Losses(spacing, lowest, np.maximum(probability, 0.0), float(delta[-1]))


def connect_both(removed: FloatArray, added: FloatArray, spacing: float) -> tuple[Losses, Losses]:
    """Both directions of one pair of distributions (P, Q), from the divergences of each at ε = 0, spacing, 2·spacing, …

    The losses of (Q, P) are those of (P, Q) with the other sign, each with probability e^−loss of before. Both curves
    fix the same dots, since δ_QP(−ε) = 1 − e^−ε + e^−ε·δ_PQ(ε), so the chords are the same, too.
    """
    removed, added = (np.minimum.accumulate(np.clip(delta, 0.0, 1.0)) for delta in (removed, added))
    grow = math.expm1(spacing)
    drop = (removed[0] - removed[1]) + (added[0] - added[1])
    middle = np.array([max(0.0, 1 - removed[0] - drop / grow)])
    up_removed, up_added = (connect_the_dots(delta, 0, spacing).probability[1:] for delta in (removed, added))
    down_removed, down_added = (
        (up * np.exp(-spacing * np.arange(1.0, len(up) + 1)))[::-1] for up in (up_added, up_removed)
    )
    return (
        Losses(spacing, -len(up_added), np.concatenate([down_removed, middle, up_removed]), float(removed[-1])),
        Losses(spacing, -len(up_removed), np.concatenate([down_added, middle, up_added]), float(added[-1])),
    )


def coarsened(losses: Losses, factor: int) -> Losses:
    """On a grid `factor` times as wide: never a smaller divergence at any ε.

    Each probability p at loss l is divided between the two neighbours of l on the new grid, so that Σ p and Σ p·e^−l
    stay the same. A divergence is Σ p·(1 − e^{ε − l})⁺, which is convex in e^−l, so it can only grow: connect-the-dots
    for a discrete distribution (Doroshenko et al., arXiv 2207.04380v1; between compositions: Ghazi et al., arXiv
    2207.04381v1).
    """
    lowest = losses.lowest // factor
    before = losses.lowest - lowest * factor
    cells = -(-(before + len(losses.probability)) // factor)
    padded = np.zeros((cells, factor))  # row i: the points from the new grid's point i up to the next
    padded.reshape(-1)[before : before + len(losses.probability)] = losses.probability
    upper = np.expm1(-losses.spacing * np.arange(factor)) / math.expm1(-losses.spacing * factor)
    probability = np.append(padded @ (1 - upper), 0.0)
    probability[1:] += padded @ upper
    return Losses(losses.spacing * factor, lowest, probability, losses.infinite)


def _decayed_sums(probability: FloatArray, spacing: float) -> FloatArray:
    """(points,) Σ_{j ≥ i} p_j e^{−(j − i)·spacing}, by a recursion from the top that cannot overflow."""
    from scipy import signal

    out: FloatArray = signal.lfilter([1.0], [1.0, -math.exp(-spacing)], probability[::-1])[::-1]
    return out


# -- The privacy loss of one step of a sampled Gaussian, on a grid fitted to it
#
# `removing` and `adding` compute each direction on its own. Where nearly all steps lose next to nothing, `adding` takes
# differences of numbers near 1, and their rounding adds up: 4e-4 of probability on a grid of 1.8 million points.
# `both_directions` has no such differences. It computes the losses above 0 of each direction, and reads those below 0
# off the other direction.

#: Grid spacing as a fraction of one step's standard deviation of the loss: costs about 2e-4 of epsilon.
FINENESS = 0.05
WIDEST = 0.02  # nats
MOST_STEP_POINTS = 1e6

#: ln of the probability of a loss beyond one step's grid, which counts as infinite loss.
_LOG_TAIL = -50.0


def fitted_grid(mechanism: SampledGaussian) -> float:
    """Spacing that keeps the discretisation error near 2e-4 of epsilon, with at most about 1e6 points.

    One step's loss has standard deviation about q·sqrt(e^{1/σ²} − 1); its range is about (17σ + 1)/2σ² + ln q. The
    limit on points can only make the grid coarser, which can only raise the bound.
    """
    return max(min(FINENESS * deviation(mechanism), WIDEST), reach(mechanism) / MOST_STEP_POINTS)


def deviation(mechanism: SampledGaussian) -> float:
    """Approximate standard deviation of one step's loss, in nats: that of the likelihood ratio."""
    return mechanism.sample_rate * math.sqrt(math.expm1(min(1 / mechanism.noise_multiplier**2, 600.0)))


def reach(mechanism: SampledGaussian) -> float:
    """The range of one step's privacy loss in nats, without the truncated tails."""
    s = mechanism.noise_multiplier
    return max(1.0, (17 * s + 1) / (2 * s * s) + math.log(mechanism.sample_rate))


def removing(mechanism: SampledGaussian, spacing: float) -> Losses:
    """(1−q)·N(0,σ²) + q·N(1,σ²) against N(0,σ²): at ε > ln(1−q), δ = q · δ_Gauss(u) with e^u = 1 + (e^ε − 1)/q."""
    lowest, highest = range_of(mechanism)
    delta = removing_delta(mechanism, _grid(lowest, highest, spacing))
    return connect_the_dots(delta, math.floor(lowest / spacing), spacing)


def adding(mechanism: SampledGaussian, spacing: float) -> Losses:
    """N(0,σ²) against the mixture: at ε < −ln(1−q), δ = q·e^ε · (e^u Φ(x) − Φ(x − 1/σ)) with e^u = 1 + (e^−ε − 1)/q."""
    lowest, highest = range_of(mechanism)
    delta = adding_delta(mechanism, _grid(-highest, -lowest, spacing))
    return connect_the_dots(delta, math.floor(-highest / spacing), spacing)


def losses_of_step(mechanism: SampledGaussian, spacing: float) -> tuple[Losses, Losses]:
    """The same distributions as `removing` and `adding`, without their rounding."""
    lowest, highest = range_of(mechanism)
    removed = removing_delta(mechanism, _grid(0.0, max(highest, spacing), spacing))
    added = adding_delta(mechanism, _grid(0.0, max(-lowest, spacing), spacing))
    return connect_both(removed, added, spacing)


def points(mechanism: SampledGaussian, spacing: float) -> float:
    """Approximate number of points of one step's grid."""
    lowest, highest = range_of(mechanism)
    return (highest - lowest) / spacing + 2


def removing_delta(mechanism: SampledGaussian, eps: FloatArray) -> FloatArray:
    """(points,) the hockey-stick divergence of removing at each ε."""
    q, s = mechanism.sample_rate, mechanism.noise_multiplier
    u = _log_ratio(eps, q)
    x = s * u + 0.5 / s  # where the loss is ε, in units of σ
    gauss = special.ndtr(1 / s - x) - np.exp(u + special.log_ndtr(-x))
    return np.where(np.isneginf(u), -np.expm1(eps), q * gauss)


def adding_delta(mechanism: SampledGaussian, eps: FloatArray) -> FloatArray:
    """(points,) the hockey-stick divergence of adding at each ε."""
    q, s = mechanism.sample_rate, mechanism.noise_multiplier
    u = _log_ratio(-eps, q)
    x = s * u + 0.5 / s
    with np.errstate(invalid="ignore"):
        gauss = np.exp(u + eps + special.log_ndtr(x)) - np.exp(eps + special.log_ndtr(x - 1 / s))
    return np.where(np.isneginf(u), 0.0, q * gauss)


def range_of(mechanism: SampledGaussian) -> tuple[float, float]:
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


# -- The loss of many steps, by FFT: Koskela et al., arXiv 1906.03049v4

#: The largest grid of a composition: its arrays have 64 MiB, and one epsilon needs about ten of them.
MOST_POINTS = 2**23

#: Probability of a loss beyond a composition's window, which counts as infinite loss.
CUT = 1e-15
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
    infinite = CUT - math.expm1(times * math.log1p(-one.infinite))
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


def window(
    probability: FloatArray,
    times: int,
    wide_search: bool = False,
    others: Sequence[FloatArray] = (),
    index: FloatArray | None = None,
) -> tuple[int, int]:
    """First and last index of a window that a sum of `times` draws leaves with probability at most 1e-15 (Chernoff).

    others: it holds for sums of draws from any mixtures of these, too, because a mixture has no larger moment than all.
    index: (points,) of each probability, from 0 on; by default 0, 1, 2, …
    wide_search: compare orders over eight decades. Otherwise follow the bound from the order of a Gaussian sum: faster,
    but where one step's tail is long it can miss the best order by far.
    """
    points = len(probability)
    index = np.arange(points, dtype=np.float64) if index is None else index
    mass = float(probability.sum())
    mean = float(probability @ index) / mass
    deviation = math.sqrt(max(float(probability @ (index - mean) ** 2) / mass, 1e-12))
    need = math.log(2 / CUT)

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
        log_binned, logs = np.log(binned), [np.log(one) for one in (probability, *others)]
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
        far.append(max(reach(float(order), log, sign * (index - mean)) for log in logs))
    first = max(0, math.floor(times * mean - far[0]))
    last = min(int(index[-1]) * times, math.ceil(times * mean + far[1]))
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


# -- The losses of a whole history, on a grid that fits into memory
#
# Most histories are composed on the grid that is asked for, with at most `composing.MOST_POINTS` points. The others are
# composed from distributions with less rounding, in tighter windows, and on a grid that is doubled until it fits: a
# wider grid only raises the divergence (`losses.coarsened`).

History = tuple[SampledGaussian, ...]
Directions = tuple[Losses, Losses]
DIRECTIONS = (removing, adding)

#: Rounding of one step's probabilities may change the total probability of all steps by this part.
MOST_ROUNDING = 1e-3


def composed(history: History, spacing: float) -> Directions:
    """The losses of removing and of adding a record, composed over all mechanisms (at least one)."""
    removed, added = (_as_asked(history, spacing, way) or _bounded(history, spacing, way) for way in (0, 1))
    return removed, added


def _as_asked(history: History, spacing: float, direction: int) -> Losses | None:
    """On this very grid; None where it has too many points, or where rounding would be visible."""
    total: Losses | None = None
    for mechanism in history:
        if points(mechanism, spacing) > MOST_POINTS:
            return None
        one, times = DIRECTIONS[direction](mechanism, spacing), mechanism.steps
        if times * abs(one.probability.sum() + one.infinite - 1) > MOST_ROUNDING:
            return None
        kept = window(one.probability, times) if times > 1 else (0, len(one.probability) - 1)
        if kept[1] - kept[0] + (len(total.probability) if total else 0) >= MOST_POINTS:
            return None
        many = self_composed(one, times, kept)
        total = many if total is None else convolved(total, many)
    return total if total is not None and np.isfinite(total.probability).all() else None


def _bounded(history: History, spacing: float, direction: int) -> Losses:
    """On grids of spacing·2^k with the smallest k that fits, and with little rounding."""
    most = MOST_POINTS // min(len(history), 2)
    parts = (_many(mechanism, spacing, most, direction) for mechanism in history)
    return functools.reduce(_joined, parts)


def _many(mechanism: SampledGaussian, spacing: float, most: int, direction: int) -> Losses:
    """All steps of one mechanism, with at most `most` points."""
    width = points(mechanism, spacing)
    while True:
        spacing *= 2 ** max(0, math.ceil(math.log2(width / most)))
        width = points(mechanism, spacing)
        if width > most:
            continue
        one = losses_of_step(mechanism, spacing)[direction]
        if mechanism.steps == 1:
            return one
        start, end = window(one.probability, mechanism.steps, wide_search=True)
        width = end - start + 1
        if width <= most:
            return self_composed(one, mechanism.steps, (start, end))


def _joined(one: Losses, other: Losses) -> Losses:
    """The sum of two independent losses, on the coarser of their grids or one that fits."""
    spacing = max(one.spacing, other.spacing)
    while (one.spacing * len(one.probability) + other.spacing * len(other.probability)) / spacing > (MOST_POINTS - 4):
        spacing *= 2
    one, other = (coarsened(losses, round(spacing / losses.spacing)) for losses in (one, other))
    return convolved(one, other)


# -- A cache of composed losses that is bounded by their size, because each may have millions of points

Compose = Callable[[History, float], Directions]


class Recent:
    """A function (history, spacing) -> losses that remembers its last results.

    entries  results that are kept at most
    size     points that they may have together; the last result is kept whatever its size
    """

    def __init__(self, function: Compose, entries: int, size: int) -> None:
        self._function, self._entries, self._size = function, entries, size
        self._kept: dict[tuple[History, float], Directions] = {}  # the oldest first
        self._lock = Lock()

    def __call__(self, history: History, spacing: float) -> Directions:
        key = (history, spacing)
        with self._lock:
            found = self._kept.pop(key, None)
        value = found if found is not None else self._function(history, spacing)
        with self._lock:
            self._kept[key] = value
            while len(self._kept) > 1 and (len(self._kept) > self._entries or self.points > self._size):
                self._kept.pop(next(iter(self._kept)))
        return value

    @property
    def points(self) -> int:
        """Points of all results that are kept."""
        return sum(len(losses.probability) for value in self._kept.values() for losses in value)

    def cache_clear(self) -> None:
        """Forget all results."""
        with self._lock:
            self._kept.clear()


_composed = Recent(composed, entries=32, size=2**24)


# -- PLD: upper bounds by numerical composition of privacy loss distributions, in both directions

#: Bound on how much rounding lowers a tail: 1e-12, and 2e-16 for each step, because powers of a transform multiply its
#: error (measured against 80-bit arithmetic, at 150 random histories of 10^4 to 10^8 steps and small deltas: at most
#: 0.9 of this bound). What rounding takes off large divergences is `_lost`.
FLOAT_SLACK, FLOAT_SLACK_PER_STEP = 1e-12, 2e-16

#: Losses of a divergence below this part of the slack are counted as part of it.
MOST_LOST = 0.1

#: Where the slack is more than this part of a delta, RDP's bound is computed, too.
MOST_SLACK = 0.1


def epsilon(
    history: Sequence[SampledGaussian],
    delta: float,
    grid: float | None = None,
    points: float = MOST_STEP_POINTS,
    slacks: float = 1.0,
) -> float:
    """Upper bound on epsilon at `delta` for a record with this history.

    history  the mechanisms that the record goes through
    delta    probability in [1e-9, 1)
    grid     spacing of the discretised privacy loss, in nats; by default fitted to the mechanisms. It is doubled
             where it would need more than 2^23 points
    points   approximate maximum size of one step's grid; a smaller one is less tight and faster
    slacks   how many times the rounding of the steps is subtracted from delta. One certifies; searches use two, so that
             their results verify whatever the last bits of the history are

    Returns RDP's epsilon where that is smaller, unless `grid` is given. Returns inf where no finite epsilon can be
    certified, and 0 for a record that never takes part. Raises BudgetError for a delta out of range.

    >>> round(epsilon([SampledGaussian(512 / 60_000, 3.4358, 9375)], 1e-5), 4)
    0.9141
    """
    return _one(tuple(history), float(delta), grid, points, slacks)


def epsilon_at(
    history: Sequence[SampledGaussian],
    deltas: FloatArray,
    grid: float | None = None,
    points: float = MOST_STEP_POINTS,
    slacks: float = 1.0,
) -> FloatArray:
    """(deltas,) the same at several deltas, for little more than the cost of one."""
    if not ((deltas >= SMALLEST_DELTA) & (deltas < 1)).all():
        raise BudgetError(f"delta must lie between {SMALLEST_DELTA:g} and 1: a smaller one is beyond double precision.")
    parts = merged(history)
    directions = _directions(parts, grid, points)
    if directions is None:
        worst = np.full(len(deltas), math.inf)
    else:
        allowed = slack(history, slacks)
        read = [
            losses.epsilons(np.maximum(deltas - allowed - _lost(losses, deltas, allowed), 0)) for losses in directions
        ]
        worst = np.maximum.reduce([np.zeros(len(deltas)), *read])
    if grid is None:
        rough = _is_coarse(parts, directions) | (slack(history, slacks) > MOST_SLACK * deltas)
        if rough.any():
            worst[rough] = np.fmin(worst[rough], rdp.epsilon_at(parts, deltas[rough]))
    return worst


def divergences(
    history: Sequence[SampledGaussian],
    epsilons: FloatArray,
    grid: float | None = None,
    points: float = MOST_STEP_POINTS,
    slacks: float = 1.0,
) -> FloatArray:
    """(2, epsilons) upper bounds on the hockey-stick divergence of removing and of adding, at any real epsilons.

    grid, points, slacks  as for `epsilon`
    """
    parts = merged(history)
    directions = _directions(parts, grid, points)
    never = -np.expm1(np.minimum(epsilons, 0.0))  # the divergence of a record that never takes part
    if directions == ():
        return np.stack([never, never])
    bound = np.ones((2, len(epsilons)))
    if directions:
        allowed = slack(history, slacks)
        computed = [(losses, losses.deltas(epsilons)) for losses in directions]
        bound = np.stack([np.minimum(part + _lost(losses, part, allowed) + allowed, 1.0) for losses, part in computed])
    if _is_coarse(parts, directions) or slack(history) > MOST_SLACK * SMALLEST_DELTA:
        # Below 0 by the other direction: δ(ε) = 1 − e^ε + e^ε·δ'(−ε). RDP bounds both directions alike.
        by_rdp = never + np.exp(np.minimum(epsilons, 0.0)) * rdp.delta_at(parts, np.abs(epsilons))
        bound = np.fmin(bound, by_rdp)
    return bound


def _lost(losses: Losses, deltas: FloatArray, allowed: float) -> FloatArray:
    """(deltas,) what rounding of the total probability takes off each divergence; 0 where it is far below `allowed`.

    Probabilities of a step that add up to 1 − η, not 1, make those of n steps too small by the factor (1 − η)^n.
    """
    lost = deltas * max(0.0, 1 / (float(losses.probability.sum()) + losses.infinite) - 1)
    return np.where(lost > MOST_LOST * allowed, lost, 0.0)


def _is_coarse(parts: History, directions: tuple[Losses, ...] | None) -> bool:
    """Whether the grid is coarser than FINENESS asks, or no PLD exists: then RDP's bound can be smaller."""
    if directions is None:
        return True
    return any(losses.spacing > 1.001 * FINENESS * deviation(m) for losses in directions for m in parts)


def slack(history: Sequence[SampledGaussian], times: float = 1.0) -> float:
    """Bound on how much rounding lowers a delta of this history; the part of the steps counts `times` times."""
    return FLOAT_SLACK + times * FLOAT_SLACK_PER_STEP * sum(m.steps for m in history if not m.is_silent)


@lru_cache(maxsize=65_536)
def _one(history: History, delta: float, grid: float | None, points: float, slacks: float) -> float:
    return float(epsilon_at(history, np.array([delta]), grid, points, slacks)[0])


def both_directions(
    history: Sequence[SampledGaussian], grid: float | None = None, points: float = MOST_STEP_POINTS
) -> tuple[Losses, ...] | None:
    """The losses of removing and of adding a record, composed separately; None where nothing can be certified.

    Their hockey-stick divergences bound both orders of the two data sets, so the larger one counts. The tuple is empty
    for a record that never takes part.
    """
    return _directions(merged(history), grid, points)


def _directions(parts: History, grid: float | None, points: float) -> tuple[Losses, ...] | None:
    if not parts:
        return ()
    if min(m.noise_multiplier for m in parts) < SMALLEST_NOISE:
        return None
    # One grid for all: the finest that any mechanism needs, limited by the widest range.
    coarsest = max(map(reach, parts)) / points
    return _composed(parts, grid if grid is not None else max(min(map(fitted_grid, parts)), coarsest))


def merged(history: Sequence[SampledGaussian]) -> History:
    """The history in an order of its own, without silent parts; equal mechanisms are one with more steps."""
    steps: dict[tuple[float, float], int] = {}
    for m in history:
        if not m.is_silent:
            steps[m.sample_rate, m.noise_multiplier] = steps.get((m.sample_rate, m.noise_multiplier), 0) + m.steps
    return tuple(SampledGaussian(*row, steps[row]) for row in sorted(steps))
