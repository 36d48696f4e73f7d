"""The references of each target: count, mean and variance of a signal over the other shadows, in and out.

Every shadow is the target of all others (leave-one-out). Sums over all shadows are made once; the sums without one
target follow by subtraction, so a target costs O(records) in time and memory.

A target's references do not depend on the target's own coins: the target's number is subtracted from the sum over
members or from the sum over non-members, and what remains are sums over the other shadows. So without a signal a score
is independent of the coin, if coins are independent. If instead exactly half of the shadows had each record, the number
of references in and out would reveal the target's coin.

The same must hold to the last bit. Where shadows have equal signals, scores that should be equal would otherwise be
ordered by rounding, which depends on the coin: in a test without a signal the AUC was 10 standard errors from one half.
So the summands are rounded to a grid on which their sums and differences are exact.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .signals import BoolArray, Float32Array

FloatArray = npt.NDArray[np.float64]

#: A variance below this part of the sum of all squared deviations is rounding, and counts as 0.
_ROUNDING = 1e-12


@dataclass(frozen=True, eq=False)
class Moments:
    """Moments of a signal over one target's references of one kind (in or out), (records,) each.

    count     number of references
    mean      without meaning where there is no reference
    variance  unbiased; 0 where there are fewer than 2 references, or where they are equal
    """

    count: FloatArray
    mean: FloatArray
    variance: FloatArray

    @property
    def freedom(self) -> FloatArray:
        """Degrees of freedom of the variance, (records,)."""
        return np.maximum(self.count - 1, 0)

    def pooled_variance(self) -> float:
        """One variance for all records, weighted by degrees of freedom; 1 if the references show no spread at all."""
        pooled = float(self.freedom @ self.variance) / max(float(self.freedom.sum()), 1.0)
        return pooled if pooled > 0 else 1.0


@dataclass(frozen=True, eq=False)
class _Sums:
    """Sums over shadows of one kind, (records,) each: their number, their deviations from a centre, the squares."""

    count: FloatArray
    first: FloatArray
    second: FloatArray

    def without(self, present: BoolArray, deviation: FloatArray, square: FloatArray) -> _Sums:
        return _Sums(self.count - present, self.first - present * deviation, self.second - present * square)

    def moments(self, centre: FloatArray, rounding: FloatArray) -> Moments:
        mean = self.first / np.maximum(self.count, 1)
        variance = (self.second - self.first * mean) / np.maximum(self.count - 1, 1)
        return Moments(self.count, centre + mean, np.where(variance > rounding, variance, 0.0))


#: Scores of one target, (records,), from its own signal, (records,), and its references in and out.
Rule = Callable[[FloatArray, Moments, Moments], FloatArray]


def score_targets(signal: Float32Array, member: BoolArray, rule: Rule) -> Float32Array:
    """The scores that `rule` gives each target, (shadows, records); signal, member (shadows, records)."""
    return collect((rule(own, inside, outside) for own, inside, outside in leave_one_out(signal, member)), member.shape)


def collect(rows: Iterable[FloatArray], shape: tuple[int, ...]) -> Float32Array:
    """Rows of scores as one array in 32 bits. Numbers beyond the range of 32 bits become its ends."""
    scores, largest = np.empty(shape, np.float32), float(np.finfo(np.float32).max)
    for target, row in enumerate(rows):
        scores[target] = np.clip(row, -largest, largest)
    return scores


def leave_one_out(
    signal: Float32Array, member: BoolArray, transform: Callable[[FloatArray], FloatArray] = np.positive
) -> Iterator[tuple[FloatArray, Moments, Moments]]:
    """For each target its own signal, (records,), and the moments of its references in and out.

    signal, member  (shadows, records)
    transform       applied first to every row of the signal, in 64 bits
    """

    def rows() -> Iterator[FloatArray]:
        return (transform(row.astype(np.float64)) for row in signal)

    def deviations() -> Iterator[tuple[FloatArray, FloatArray]]:
        for row in rows():
            deviation = _on_grid(row - centre, grid)
            yield deviation, _on_grid(np.square(deviation), square_grid)

    centre, largest = _centre(rows(), signal.shape)
    # Sums of multiples of 2^m that stay below 2^(m + 53) are exact.
    grid, square_grid = (np.spacing(2 * len(signal) * values) for values in (largest, np.square(largest)))
    inside, outside = _sums(deviations(), member), _sums(deviations(), ~member)
    rounding = _ROUNDING * (inside.second + outside.second)
    for own, (deviation, square), present in zip(rows(), deviations(), member, strict=True):
        yield (
            own,
            inside.without(present, deviation, square).moments(centre, rounding),
            outside.without(~present, deviation, square).moments(centre, rounding),
        )


def _centre(rows: Iterable[FloatArray], shape: tuple[int, ...]) -> tuple[FloatArray, FloatArray]:
    """The mean over all shadows, in and out, so that it depends on no coin, and a bound on deviations from it."""
    total, low, high = np.zeros(shape[1]), np.full(shape[1], np.inf), np.full(shape[1], -np.inf)
    for row in rows:
        total += row
        low, high = np.minimum(low, row), np.maximum(high, row)
    return total / shape[0], high - low


def _on_grid(values: FloatArray, grid: FloatArray) -> FloatArray:
    """`values` rounded to multiples of `grid`, (records,), powers of 2."""
    rounded: FloatArray = np.rint(values / grid) * grid
    return rounded


def _sums(rows: Iterable[tuple[FloatArray, FloatArray]], present: BoolArray) -> _Sums:
    count = present.sum(axis=0, dtype=np.float64)
    first, second = np.zeros((2, len(count)))
    for (deviation, square), here in zip(rows, present, strict=True):
        first += here * deviation
        second += here * square
    return _Sums(count, first, second)
