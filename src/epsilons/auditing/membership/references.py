"""The references of each target: count, mean and variance of a signal over the other shadows, in and out.

Every shadow is the target of all others (leave-one-out). Sums over all shadows are made once; the sums without one
target follow by subtraction, so a target costs O(records) in time and memory.

A target's references do not depend on the target's own coins: the target's number is subtracted from the sum over
members or from the sum over non-members, and what remains are sums over the other shadows. So without a signal a score
is independent of the coin, if coins are independent. If instead exactly half of the shadows had each record, the number
of references in and out would give the target's coin away.
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

    def without(self, present: BoolArray, deviation: FloatArray) -> _Sums:
        own = present * deviation
        return _Sums(self.count - present, self.first - own, self.second - own * deviation)

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

    # The mean over all shadows, in and out, depends on no coin. Equal numbers have deviations of exactly 0 from it.
    centre = sum(rows(), np.zeros(signal.shape[1])) / len(signal)
    inside, outside = _sums(rows(), member, centre), _sums(rows(), ~member, centre)
    rounding = _ROUNDING * (inside.second + outside.second)
    for own, present in zip(rows(), member, strict=True):
        deviation = own - centre
        yield (
            own,
            inside.without(present, deviation).moments(centre, rounding),
            outside.without(~present, deviation).moments(centre, rounding),
        )


def _sums(rows: Iterable[FloatArray], present: BoolArray, centre: FloatArray) -> _Sums:
    first, second = np.zeros((2, len(centre)))
    for row, here in zip(rows, present, strict=True):
        own = here * (row - centre)
        first += own
        second += own * own
    return _Sums(present.sum(axis=0, dtype=np.float64), first, second)
