"""PLD for many histories that lie on one line: the same rate and many noises, or the same noise and many rates.

A mechanism between two neighbours of a fixed lattice is dominated by a public choice between these two: a coin shows
which of them makes a step. So its losses are bounded by a mixture of two discretised ones, and its transform by that
of theirs. A row then costs the power of some hundred coefficients, where a composition of its own costs 10 to 30 ms.
The chance of the end at which more is lost is linear (docs/planning.md#many-budgets has the proofs)

* in the rate, for the divergences of one step are convex in it;
* for noises in the advantage 2Φ(1/2σ) − 1 of the Gaussian mechanism.

Bounds are about 1e-4 of themselves above those of `pld.epsilon`, which is the slow twin.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from scipy import fft, special

from ..core.mechanism import SMALLEST_DELTA, SMALLEST_NOISE, FloatArray, IntArray, SampledGaussian
from . import pld

#: Distance of neighbours on the lattice in ln σ and in ln q; the bound grows with its square.
NOISE_STEP, RATE_STEP = 0.003, 0.02

#: Intervals that share a grid.
NOISE_BLOCK, RATE_BLOCK = 16, 4

#: As many rows are always computed one by one.
FEW = 64
#: Where a block has fewer rows for each interval, a composition of its own for each row takes less time.
ROWS_PER_INTERVAL = 0.5

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

    def loss(self, values: npt.ArrayLike) -> FloatArray:
        """A measure in which mixtures are linear; it grows with what is lost."""
        at = np.asarray(values, dtype=np.float64)
        return np.asarray(special.erf(8**-0.5 / at)) if self.of_noise else at


def line(rates: FloatArray, noises: FloatArray, steps: int) -> Line | None:
    """What the rows have in common; None if rate and noise both vary."""
    if np.ptp(rates) == 0:
        return Line(float(rates[0]), steps, True)
    return Line(float(noises[0]), steps, False) if np.ptp(noises) == 0 else None


def pay(rates: FloatArray, noises: FloatArray) -> bool:
    """Whether chords take less time than a composition for each of these distinct rows."""
    common = line(rates, noises, 1) if len(rates) > FEW else None
    if common is None or rates.min() <= 0:
        return False
    blocks = np.unique(common.blocks(noises if common.of_noise else rates))
    return len(rates) >= ROWS_PER_INTERVAL * len(blocks) * (NOISE_BLOCK if common.of_noise else RATE_BLOCK)


def epsilons(
    common: Line, values: FloatArray, deltas: FloatArray, points: float = pld.MOST_STEP_POINTS, slacks: float = 1.0
) -> FloatArray:
    """(rows,) upper bounds on epsilon at each row's delta; NaN where `pld.epsilon` has to compute a row itself.

    values          (rows,) noises or rates, above 0
    deltas          (rows,) probabilities
    points, slacks  as for `pld.epsilon`
    """
    out = np.full(len(values), np.nan)
    allowed = pld.slack([common.mechanism(1.0)], slacks)
    usable = np.array(common.steps >= FEWEST_STEPS) & (deltas >= SMALLEST_DELTA) & (allowed <= pld.MOST_SLACK * deltas)
    blocks = common.blocks(values)
    for block in np.unique(blocks[usable]):
        rows = np.flatnonzero(usable & (blocks == block))
        directions = _block(common, int(block), points)
        if directions is not None:
            place = _places(common.loss(common.nodes(int(block))), common.loss(values[rows]))
            out[rows] = _solved([sums.of(*place) for sums in directions], deltas[rows], allowed)
    with np.errstate(invalid="ignore"):
        return np.where((out > LEAST) & (out < MOST), out, np.nan)


def _places(nodes: FloatArray, losses: FloatArray) -> tuple[IntArray, IntArray, FloatArray]:
    """(rows,) the node that loses less, the one that loses more, and the chance of the second."""
    order = np.argsort(nodes)
    above = np.clip(np.searchsorted(nodes[order], losses, side="left"), 1, len(nodes) - 1)
    safe, unsafe = order[above - 1], order[above]
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

    def at(self, rows: npt.NDArray[np.bool_]) -> Mixtures:
        """Some rows."""
        return Mixtures(self.sums, self.weighted[rows], self.infinite[rows])


@functools.lru_cache(maxsize=64)  # of at most 9 MB each, mostly of less than 1
def _block(common: Line, block: int, points: float) -> tuple[Sums, Sums] | None:
    """The sums of removing and of adding; None where they would need too much memory, or rounding would show."""
    mechanisms = [common.mechanism(float(node)) for node in common.nodes(block)]
    if len(mechanisms) < 2 or min(one.noise_multiplier for one in mechanisms) < SMALLEST_NOISE:
        return None
    spacing = WIDER * max(max(pld.fitted_grid(one), pld.reach(one) / points) for one in mechanisms)
    removed = _sums(mechanisms, spacing, 0)
    added = _sums(mechanisms, spacing, 1) if removed is not None else None
    return None if removed is None or added is None else (removed, added)


def _sums(mechanisms: Sequence[SampledGaussian], spacing: float, direction: int) -> Sums | None:
    steps = mechanisms[0].steps
    if max(pld.points(one, spacing) for one in mechanisms) > pld.MOST_POINTS:
        return None
    ones = pld.on_one_grid(mechanisms, spacing, direction)
    if any(steps * abs(one.probability.sum() + one.infinite - 1) > pld.MOST_ROUNDING for one in ones):
        return None
    probability = [one.probability for one in ones]
    first, last = (
        (0, len(probability[0]) - 1) if steps == 1 else pld.window(probability[0], steps, others=probability[1:])
    )
    length = fft.next_fast_len(max(last - first + 1, len(probability[0])), real=True)
    if length > pld.MOST_POINTS:
        return None
    transforms, kept = [], np.zeros(length // 2 + 1, dtype=bool)
    for one in probability:
        transforms.append(fft.rfft(one, length))
        with np.errstate(divide="ignore"):
            kept |= steps * np.log(np.abs(transforms[-1])) > _SMALLEST_LOG
    frequency = np.flatnonzero(kept)
    if len(frequency) > _MOST_COEFFICIENTS:
        return None
    coefficients = np.stack([transform[frequency] for transform in transforms])
    infinite = np.array([one.infinite for one in ones])
    return Sums(spacing, steps, ones[0].lowest * steps + first, first, length, frequency, coefficients, infinite)


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
