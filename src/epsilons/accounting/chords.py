"""PLD for many histories at once, each of one mechanism: losses on sparse grids, and chords between few of them.

Connect-the-dots bounds a loss on any set of points. Here their distance grows with the loss: a step has about 1,500
points in the place of 50,000, and most of the time goes into its transform.

Where all rows have one rate or one noise, and lie close together, fewer transforms are enough: a mechanism between two
neighbours of a fixed lattice is dominated by a public choice between these two, a coin that shows which of them makes a
step. So its losses are bounded by a mixture of two discretised ones, and its transform by that of theirs. A row then
costs the power of some hundred coefficients: 0.4 ms, where a transform of its own costs 2 ms and a composition 10 to 30
ms. The chance of the end at which more is lost is linear (docs/planning.md#many-budgets has the proofs)

* in the rate, for the divergences of one step are convex in it;
* for noises in the advantage 2Φ(1/2σ) − 1 of the Gaussian mechanism.

Bounds are above those of `pld.epsilon`, which is the slow twin: by about 1e-4 of themselves, without chords by 3e-5.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt
from scipy import fft, special

from ..core.mechanism import SMALLEST_DELTA, SMALLEST_NOISE, FloatArray, IntArray, SampledGaussian
from . import pld

Booleans = npt.NDArray[np.bool_]

#: Distance of neighbours on the lattice in ln σ and in ln q; the bound grows with its square.
NOISE_STEP, RATE_STEP = 0.003, 0.02

#: Intervals that share a grid.
NOISE_BLOCK, RATE_BLOCK = 16, 4

#: As many rows are always computed one by one.
FEW = 64
#: Where a block has fewer rows for each interval, a transform of its own for each row takes less time.
ROWS_PER_INTERVAL = 0.5

#: What takes least time: a composition of its own for each row, a transform of its own, or chords.
Way = Literal["composed", "each", "chords"]
#: Rows with transforms of their own share a grid; its spacing is a power of this. So many are computed together.
SPACING_STEP, TOGETHER = 1.05, 16
#: Distance of neighbours on a sparse grid, as a part of the loss.
SPARSENESS = 0.005
#: Coarser grids than this part of a step's deviation are left to `pld.epsilon`, whose own may be a little finer.
COARSEST = 0.2

#: Of fewer steps a composition is fast, and its bound is not always the smaller one.
FEWEST_STEPS = 50
#: Epsilons out of this range are left to `pld.epsilon`.
LEAST, MOST = 1e-2, 500.0

#: The grid is this much wider than that of `pld.epsilon`, so that its bound is the smaller one of the two.
WIDER = 1.05

#: Coefficients of a sum below e^−60 are left out: together they hold less than 1e-20 of a probability.
_SMALLEST_LOG = -60.0
_MOST_COEFFICIENTS = 2**14

#: A root is exact to this part of delta, and to the rounding of a divergence.
_PART, _ROUNDING = 1e-7, 1e-14


class Line(NamedTuple):
    """What the rows have in common: their rate, or their noise; the other one varies."""

    fixed: float
    steps: int
    of_noise: bool

    def blocks(self, values: FloatArray) -> IntArray:
        """(rows,) the block of each value."""
        step, count = (NOISE_STEP, NOISE_BLOCK) if self.of_noise else (RATE_STEP, RATE_BLOCK)
        return np.floor(np.log(values) / step / count).astype(np.int64)

    def nodes(self, block: int) -> FloatArray:
        """The lattice of a block, in rising order: count + 1 noises or rates."""
        step, count = (NOISE_STEP, NOISE_BLOCK) if self.of_noise else (RATE_STEP, RATE_BLOCK)
        nodes = np.exp(step * np.arange(block * count, (block + 1) * count + 1))
        return nodes if self.of_noise else np.unique(np.minimum(nodes, 1.0))

    def mechanism(self, value: float) -> SampledGaussian:
        if self.of_noise:
            return SampledGaussian(self.fixed, value, self.steps)
        return SampledGaussian(value, self.fixed, self.steps)

    def parts(
        self, mechanisms: Sequence[SampledGaussian], column: IntArray, usable: Booleans, points: float
    ) -> Iterator[Part]:
        """Rows by chords, block by block."""
        values = np.array([one.noise_multiplier if self.of_noise else one.sample_rate for one in mechanisms])[column]
        blocks = self.blocks(values)
        for block in np.unique(blocks[usable]):
            rows = np.flatnonzero(usable & (blocks == block))
            place = _places(self.loss(self.nodes(int(block))), self.loss(values[rows]))
            yield rows, _block(self, int(block), points), place

    def loss(self, values: npt.ArrayLike) -> FloatArray:
        """A measure in which mixtures are linear; it grows with what is lost."""
        at = np.asarray(values, dtype=np.float64)
        return np.asarray(special.erf(8**-0.5 / at)) if self.of_noise else at


def line(rates: FloatArray, noises: FloatArray, steps: int) -> Line | None:
    """What the rows have in common; None if rate and noise both vary."""
    if np.ptp(rates) == 0:
        return Line(float(rates[0]), steps, True)
    return Line(float(noises[0]), steps, False) if np.ptp(noises) == 0 else None


def way(rates: FloatArray, noises: FloatArray) -> Way:
    """What takes least time for these distinct rows."""
    if len(rates) <= FEW or rates.min() <= 0:
        return "composed"
    common = line(rates, noises, 1)
    if common is None:
        return "each"
    blocks = np.unique(common.blocks(noises if common.of_noise else rates))
    nodes = len(blocks) * (NOISE_BLOCK if common.of_noise else RATE_BLOCK)
    return "chords" if len(rates) >= ROWS_PER_INTERVAL * nodes else "each"


def epsilons(
    mechanisms: Sequence[SampledGaussian],
    column: IntArray,
    deltas: FloatArray,
    common: Line | None = None,
    points: float = pld.MOST_STEP_POINTS,
    slacks: float = 1.0,
) -> FloatArray:
    """(rows,) upper bounds on epsilon at each row's delta; NaN where `pld.epsilon` has to compute a row itself.

    mechanisms      of the same number of steps, with rates above 0
    column          (rows,) index of each row's mechanism
    deltas          (rows,) probabilities
    common          the line on which all lie, for bounds by chords
    points, slacks  as for `pld.epsilon`
    """
    out = np.full(len(deltas), np.nan)
    allowed = pld.slack(mechanisms[:1], slacks)
    usable = (deltas >= SMALLEST_DELTA) & (allowed <= pld.MOST_SLACK * deltas) & (mechanisms[0].steps >= FEWEST_STEPS)
    for rows, directions, place in (_each if common is None else common.parts)(mechanisms, column, usable, points):
        if directions is not None:
            out[rows] = _solved([sums.of(*place) for sums in directions], deltas[rows], allowed)
    with np.errstate(invalid="ignore"):
        return np.where((out > LEAST) & (out < MOST), out, np.nan)


def _each(mechanisms: Sequence[SampledGaussian], column: IntArray, usable: Booleans, points: float) -> Iterator[Part]:
    """Rows with transforms of their own: those of one spacing together, which is that of the widest or above."""
    fine = np.array([pld.fitted_grid(one) <= COARSEST * pld.deviation(one) for one in mechanisms])
    needed = np.unique(column[usable & fine[column]])
    power = np.array([math.ceil(math.log(_spacing([mechanisms[i]], points), SPACING_STEP)) for i in needed])
    for one in np.unique(power):
        alike = needed[power == one]
        for first in range(0, len(alike), TOGETHER):
            nodes = alike[first : first + TOGETHER]
            rows = np.flatnonzero(usable & np.isin(column, nodes))
            own = np.searchsorted(nodes, column[rows])
            yield rows, _directions([mechanisms[i] for i in nodes], SPACING_STEP**one), (own, own, np.zeros(len(own)))


def _places(nodes: FloatArray, losses: FloatArray) -> tuple[IntArray, IntArray, FloatArray]:
    """(rows,) the node that loses less, the one that loses more, and the chance of the second."""
    order = np.argsort(nodes)
    above = np.clip(np.searchsorted(nodes[order], losses, side="left"), 1, len(nodes) - 1)
    safe, unsafe = order[above - 1], order[above]
    with np.errstate(invalid="ignore"):  # one node, or two that lose alike: NaN, which `epsilons` hands on
        chance = (losses - nodes[safe]) / (nodes[unsafe] - nodes[safe])
    return safe, unsafe, np.clip(chance + 1e-9, 0.0, 1.0)  # 1e-9 covers the rounding of both differences


# -- The losses of all mixtures of two nodes, by their transforms


@dataclass(frozen=True, eq=False)
class Sums:
    """The losses of all steps, of removing or of adding, for every mixture of two nodes of a block.

    spacing       nats between neighbouring losses
    steps         number of steps
    lowest        the smallest loss of the sums, in spacings
    first         its index, from which the transform counts
    length        number of points of the transform
    frequency     (kept,) of the coefficients that are not negligible
    coefficients  (nodes, kept) of one step
    infinite      (nodes,) probability that one step's loss is infinite
    """

    spacing: float
    steps: int
    lowest: int
    first: int
    length: int
    frequency: IntArray
    coefficients: npt.NDArray[np.complex128]
    infinite: FloatArray

    def turned(self, index: IntArray) -> npt.NDArray[np.complex128]:
        """e^{2πi·frequency·index/length}; the integers are exact, and stay below length². index: (rows, 1)"""
        return np.asarray(np.exp(2j * np.pi / self.length * (self.frequency * (index % self.length) % self.length)))

    def of(self, safe: IntArray, unsafe: IntArray, chance: FloatArray) -> Mixtures:
        """The sums of rows between two nodes, with these chances of the unsafe one."""
        less, more = (1 - chance)[:, None] * self.coefficients[safe], chance[:, None] * self.coefficients[unsafe]
        infinite = (1 - chance) * self.infinite[safe] + chance * self.infinite[unsafe]
        twice = np.where((self.frequency == 0) | (2 * self.frequency == self.length), 1.0, 2.0)
        beyond = pld.CUT - np.expm1(self.steps * np.log1p(-infinite))
        return Mixtures(self, pld.raised(less + more, self.steps) * (twice / self.length), beyond)


@dataclass(frozen=True, eq=False)
class Mixtures:
    """The sums of many rows.

    weighted  (rows, kept) coefficients with which Re Σ weighted·z^i is the probability of the sum with index i
    infinite  (rows,) probability of an infinite loss
    """

    sums: Sums
    weighted: npt.NDArray[np.complex128]
    infinite: FloatArray

    @property
    def total(self) -> FloatArray:
        """(rows,) probability of all sums."""
        return np.asarray(self.weighted[:, 0].real * self.sums.length + self.infinite)

    def divergences(self, epsilons: FloatArray) -> tuple[FloatArray, FloatArray]:
        """(rows,) hockey-stick divergence at each row's epsilon, and how fast it falls there.

        Σ p_i·(1 − e^{ε − l_i}) over the losses above ε: two geometric sums for each coefficient.
        """
        sums = self.sums
        above = np.clip(np.floor(epsilons / sums.spacing).astype(np.int64) - sums.lowest + 1, 0, sums.length)
        left = sums.length - above
        start, end = sums.turned(above[:, None] + sums.first), sums.turned(np.array([[sums.first]]))
        z = sums.turned(np.array([[1]]))
        with np.errstate(divide="ignore", invalid="ignore"):
            plain = np.where(sums.frequency == 0, left[:, None], (start - end) / (1 - z))
        decayed = (start - np.exp(-sums.spacing * left)[:, None] * end) / (1 - math.exp(-sums.spacing) * z)
        scale = np.exp(np.minimum(epsilons - sums.spacing * (sums.lowest + above), 700.0))  # times 0 beyond the last
        mass, falls = ((self.weighted * part).real.sum(axis=1) for part in (plain, decayed))
        return mass - scale * falls + self.infinite, scale * falls

    def at(self, rows: Booleans) -> Mixtures:
        """Some rows."""
        return Mixtures(self.sums, self.weighted[rows], self.infinite[rows])


Directions = tuple[Sums, Sums]
#: Rows, their sums, and for each row two nodes and the chance of the second.
Part = tuple[IntArray, Directions | None, tuple[IntArray, IntArray, FloatArray]]


@functools.lru_cache(maxsize=64)  # of at most 9 MB each, mostly of less than 1
def _block(common: Line, block: int, points: float) -> Directions | None:
    """The sums of the nodes of a block."""
    mechanisms = [common.mechanism(float(node)) for node in common.nodes(block)]
    return _directions(mechanisms, _spacing(mechanisms, points)) if len(mechanisms) > 1 else None


def _spacing(mechanisms: Sequence[SampledGaussian], points: float) -> float:
    return WIDER * max(max(pld.fitted_grid(one), pld.reach(one) / points) for one in mechanisms)


def _directions(mechanisms: Sequence[SampledGaussian], spacing: float) -> Directions | None:
    """The sums of removing and of adding; None where they would need too much memory, or rounding would show."""
    if min(one.noise_multiplier for one in mechanisms) < SMALLEST_NOISE:
        return None
    removed, added = (_sums(mechanisms[0].steps, spacing, *one) for one in _steps(mechanisms, spacing))
    return None if removed is None or added is None else (removed, added)


def _steps(mechanisms: Sequence[SampledGaussian], spacing: float) -> Iterator[tuple[IntArray, FloatArray, FloatArray]]:
    """(points,) losses of one step in spacings, (mechanisms, points) and (mechanisms,) their probabilities, and of ∞.

    As `pld.connect_both`, on a sparse grid: first for removing, then for adding.
    """
    lowest, highest = zip(*map(pld.range_of, mechanisms), strict=True)
    up, down = _sparse(max(highest) / spacing, spacing), _sparse(-min(lowest) / spacing, spacing)
    gains, losses = (np.asarray(spacing * at, dtype=np.float64) for at in (up, down))
    gain, removed = _connected(np.stack([pld.removing_delta(one, gains) for one in mechanisms]), gains)
    loss, added = _connected(np.stack([pld.adding_delta(one, losses) for one in mechanisms]), losses)
    drop = removed[:, :1] - removed[:, 1:2] + added[:, :1] - added[:, 1:2]
    middle = np.maximum(0.0, 1 - removed[:, :1] - drop / math.expm1(spacing))
    for above, more, below, less, ends in ((up, gain, down, loss, removed), (down, loss, up, gain, added)):
        lower = (less * np.exp(-spacing * below[1:]))[:, ::-1]
        yield np.append(-below[:0:-1], above), np.concatenate([lower, middle, more], axis=1), ends[:, -1]


def _sparse(highest: float, spacing: float) -> IntArray:
    """Multiples of the spacing from 0 to `highest` or just above: all small ones, then at a part of their size."""
    at, widest = [0, 1], max(1, int(pld.WIDEST / spacing))
    while at[-1] < highest:
        at.append(at[-1] + min(max(1, int(SPARSENESS * at[-1])), widest))
    return np.array(at)


def _connected(delta: FloatArray, at: FloatArray) -> tuple[FloatArray, FloatArray]:
    """(mechanisms, points − 1) probabilities of the losses `at`, without that of 0, whose curve joins these dots.

    And the dots themselves, falling.
    """
    delta = np.minimum.accumulate(np.clip(delta, 0.0, 1.0), axis=1)
    step, gap = np.diff(delta), np.diff(at)
    probability = step / np.expm1(-gap)
    probability[:, :-1] += step[:, 1:] / np.expm1(gap[1:])
    return np.maximum(probability, 0.0), delta


def _sums(steps: int, spacing: float, at: IntArray, probability: FloatArray, infinite: FloatArray) -> Sums | None:
    if (steps * np.abs(probability.sum(axis=1) + infinite - 1) > pld.MOST_ROUNDING).any():
        return None
    index = at - at[0]
    first, last = pld.window(probability[0], steps, others=list(probability[1:]), index=index.astype(np.float64))
    length = fft.next_fast_len(last - first + 1, real=True)
    if length > pld.MOST_POINTS:
        return None
    # What wraps around, of one step or of all, lands where the sum modulo `length` does.
    transforms, kept = [], np.zeros(length // 2 + 1, dtype=bool)
    for one in probability:
        transforms.append(fft.rfft(np.bincount(index % length, one, length)))
        kept |= transforms[-1].real ** 2 + transforms[-1].imag ** 2 > math.exp(2 * _SMALLEST_LOG / steps)
    frequency = np.flatnonzero(kept)
    if len(frequency) > _MOST_COEFFICIENTS:
        return None
    coefficients = np.stack([transform[frequency] for transform in transforms])
    return Sums(spacing, steps, int(at[0]) * steps + first, first, length, frequency, coefficients, infinite)


# -- Epsilons of many mixtures


def _solved(directions: Sequence[Mixtures], deltas: FloatArray, allowed: float) -> FloatArray:
    """(rows,) the smallest epsilon at which no direction has more than delta, rounded up; NaN where none was found.

    allowed  what rounding may take off a divergence
    """
    worst = np.zeros(len(deltas))
    for mixtures in directions:
        lost = deltas * np.maximum(0.0, 1 / mixtures.total - 1)
        target = deltas - allowed - np.where(lost > pld.MOST_LOST * allowed, lost, 0.0)
        exceeds = ~(mixtures.divergences(worst)[0] <= target)
        if exceeds.any():
            worst[exceeds] = _root(mixtures.at(exceeds), target[exceeds], worst[exceeds])
    return worst


def _root(mixtures: Mixtures, target: FloatArray, start: FloatArray) -> FloatArray:
    """(rows,) an epsilon with at most this divergence, and hardly less: Newton's method for its logarithm."""
    part = _PART + _ROUNDING / np.maximum(target, SMALLEST_DELTA)
    aim = np.log(np.where(target > mixtures.infinite, target, np.nan)) + np.log1p(-part)
    x, low, high, out = start.copy(), start.copy(), np.full(len(start), np.inf), np.full(len(start), np.nan)
    for _ in range(60):
        divergence, falls = mixtures.divergences(x)
        with np.errstate(all="ignore"):
            above = np.log(np.maximum(divergence, 1e-300)) - aim
            newton = x + above * (divergence / falls)
        low, high = np.where(above > 0, x, low), np.where(above > 0, high, x)
        out = np.where(np.abs(above) <= part, x, out)
        if not (np.isnan(out) & ~np.isnan(aim)).any():
            break
        middle = np.where(np.isinf(high), 2 * low + 0.1, (low + high) / 2)
        x = np.where((newton > low) & (newton < np.minimum(high, low + 20.0)), newton, middle)
    return out
