"""Gaps: who is drawn among many, at a cost that grows with the number drawn and not with the number there.

Rates are brought to whole halvings first: a record of rate q, 2^-(h+1) < q <= 2^-h, becomes a candidate with
probability 2^-h, and a candidate is kept by a coin of probability q·2^h (thinning: Lewis & Shedler, Naval Research
Logistics Quarterly 26(3), 1979). Candidates are found by the geometric gaps between them (Fan, Muller & Rezucha,
JASA 57, 1962), so fewer than two are looked at for each one kept.

Both laws are exact. A kept coin is a 53-bit integer below an integer. A gap is the one that a real uniform number of
infinitely many bits would give (Bringmann & Friedrich, ICALP 2013): logarithms tell it from the first 53 bits where
no rounding of theirs could matter; else it is settled in whole numbers, with more bits where it takes them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt

from .randomness import COIN_BITS, Stream

#: Logarithms are trusted to this relative error: a thousand times what NumPy's own tests allow them (4 units in the
#: last place), and still no more than one gap in 2^(39 − h) is too close to a whole number to be told by them.
DOUBT = 2.0**-40


@dataclass(frozen=True)
class Halved:
    """Records that become candidates with probability 2^-halvings.

    members  (count,) their indices, ascending
    limits   (groups,) a candidate of this group is kept if its coin is below; 2^53 is always
    """

    halvings: int
    members: npt.NDArray[np.int64]
    limits: npt.NDArray[np.uint64]

    def drawn(
        self, group: npt.NDArray[np.int64], gaps: Stream, coins: Stream, more: Callable[[int], Stream]
    ) -> npt.NDArray[np.int64]:
        """Indices of the records drawn. group: (records,); more(n): further bits for the n-th gap."""
        chosen = self.members[candidates(len(self.members), self.halvings, gaps, more)]
        kept = coins.integers(len(chosen)) >> np.uint64(64 - COIN_BITS) < self.limits[group[chosen]]
        return chosen[kept]


def halved(limits: npt.NDArray[np.uint64], group: npt.NDArray[np.int64]) -> list[Halved]:
    """All records with a chance, by the number of halvings their rate allows. limits: (groups,) rates·2^53, whole."""
    each = np.array([COIN_BITS - (int(limit) - 1).bit_length() if limit else -1 for limit in limits])
    own = each[group]
    return [
        Halved(h, np.flatnonzero(own == h), np.where(each == h, limits << np.uint64(h), np.uint64(0)))
        for h in sorted({*each.tolist()} - {-1})
    ]


def candidates(count: int, halvings: int, gaps: Stream, more: Callable[[int], Stream]) -> npt.NDArray[np.int64]:
    """Ascending places below `count`, each taken with probability 2^-halvings, independently of all others."""
    if halvings == 0:
        return np.arange(count)
    found = [np.empty(0, dtype=np.int64)]
    place = used = 0
    while place < count:
        expected = (count - place) * 2.0**-halvings
        words = gaps.integers(int(expected + 4 * expected**0.5) + 4) >> np.uint64(64 - COIN_BITS)
        lengths = gap_lengths(words, halvings, count, partial(_shifted, more, used))
        places = place + np.cumsum(lengths + 1) - 1
        found.append(places[places < count])
        place, used = int(places[-1]) + 1, used + len(words)
    return np.concatenate(found)


def gap_lengths(
    words: npt.NDArray[np.uint64], halvings: int, most: int, more: Callable[[int], Stream]
) -> npt.NDArray[np.int64]:
    """How many are passed over before the next candidate; lengths from `most` on are all told as `most`.

    words: the first 53 bits of uniform numbers U. A gap is the largest k with U >= 1 − (1 − 2^-halvings)^k, so that
    P(gap >= k) = (1 − 2^-halvings)^k.
    """
    unit = 2.0**-COIN_BITS
    one = np.log1p(-(2.0**-halvings))
    with np.errstate(divide="ignore"):  # U may be as close to 1 as one likes
        least = np.log1p(-(words * unit)) / one * (1 - DOUBT)
        largest = np.log1p(-((words + np.uint64(1)) * unit)) / one * (1 + DOUBT)
    low: npt.NDArray[np.int64] = np.minimum(least, most).astype(np.int64)
    high = np.minimum(largest, most).astype(np.int64)
    for i in np.flatnonzero(low != high).tolist():
        low[i] = _settled(int(words[i]), halvings, int(low[i]), int(high[i]), more(i))
    return low


def _shifted(more: Callable[[int], Stream], by: int, number: int) -> Stream:
    return more(by + number)


def _settled(word: int, halvings: int, low: int, high: int, stream: Stream) -> int:
    """The gap between low and high, in whole numbers. stream: the bits of U after the first 53."""
    guard = 64
    bits = COIN_BITS

    def reaches(gap: int) -> bool:
        nonlocal word, bits
        while True:  # ends with probability 1: each round looks at 64 more bits
            lowest, highest = _survival(halvings, gap, bits + guard)
            if word << guard >= (1 << bits + guard) - lowest:
                return True
            if word + 1 << guard <= (1 << bits + guard) - highest:
                return False
            word, bits = word << 64 | int(stream.integers(1)[0]), bits + 64

    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if reaches(middle) else (low, middle - 1)
    return low


def _survival(halvings: int, gap: int, bits: int) -> tuple[int, int]:
    """(1 − 2^-halvings)^gap·2^bits from below and from above; bits >= halvings."""
    low = high = 1 << bits
    power = (1 << bits) - (1 << bits - halvings), (1 << bits) - (1 << bits - halvings)
    while gap:
        if gap & 1:
            low, high = low * power[0] >> bits, -(-high * power[1] >> bits)
        power = power[0] * power[0] >> bits, -(-power[1] * power[1] >> bits)
        gap >>= 1
    return low, high
