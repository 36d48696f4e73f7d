"""Poisson draws with one rate per record.

A draw is a function of (key, phase, step); nothing here has state.

One coin per record is the definition. Above a million records, the number of drawn records is drawn first, and then a
uniform subset of that size: the distribution is exactly the same. The plan's number of records alone decides, because
it is public and part of the plan, so a resumed run uses the same method.

One draw of about 1,000 from 1e6, 1e7 and 1e8 records takes 4, 37 and 370 ms with one coin per record, and 0.7, 4 and
32 ms with counts, beside 37 ms for the gradients of 512 records in the paper's MNIST network (benchmarks/data_path.py,
processor's time). The first draw with counts also sorts the records into classes: 5, 120 and 2,800 ms, once per phase.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import numpy.typing as npt

from ..planning import Plan
from .randomness import COIN_BITS, Randomness, Stream, thresholds

#: Plans for more records than this are drawn by counts.
MOST_COINS = 1_000_000

#: Fair coins that are tossed at once, 64 per word: 8 MB.
WORDS_AT_ONCE = 2**20


@dataclass(frozen=True)
class Draws:
    """The draws of one run.

    plan        rates per group
    group       (records,) each record's group
    randomness  source of the coins
    """

    plan: Plan
    group: npt.NDArray[np.int64] = field(repr=False)  # each record's choice: kept out of logs
    randomness: Randomness

    @property
    def method(self) -> str:
        """ "coins" or "counts": the same distribution, other records under the same key."""
        return "coins" if self.plan.records <= MOST_COINS else "counts"

    def at(self, phase: int, step: int) -> npt.NDArray[np.int64]:
        """(drawn,) indices of the records drawn at this step, ascending."""
        return self.by_coins(phase, step) if self.method == "coins" else self.by_counts(phase, step)

    def by_coins(self, phase: int, step: int) -> npt.NDArray[np.int64]:
        """One coin for every record, by its index: it is drawn if the coin is below its group's limit."""
        limits = thresholds(self.plan.phases[phase].sample_rate)  # (groups,)
        coins = self.randomness.coins(phase, step, len(self.group))
        likely = np.flatnonzero(coins < limits.max())  # few, so the limits of the others are not looked up
        return likely[coins[likely] < limits[self.group[likely]]]

    def by_counts(self, phase: int, step: int) -> npt.NDArray[np.int64]:
        """The number of candidates, a uniform subset of that size, and one coin for each candidate.

        A record of rate q, 2^-(h+1) < q <= 2^-h, is a candidate with probability 2^-h, and is kept with probability
        q·2^h (thinning: Lewis & Shedler, Naval Research Logistics Quarterly 26(3), 1979). So records of many rates are
        drawn in few classes, and at most twice as many candidates as needed.
        """
        drawn = [np.empty(0, dtype=np.int64)]
        for part in self._classes(phase):
            stream = self.randomness.stream("counts", phase, step, part.halvings)
            count = successes(len(part.members), part.halvings, stream)
            candidates = part.members[subset(count, len(part.members), stream)]
            coins = stream.integers(count) >> np.uint64(64 - COIN_BITS)
            drawn.append(candidates[coins < part.limits[self.group[candidates]]])
        return np.sort(np.concatenate(drawn))

    def _classes(self, phase: int) -> list[RateClass]:
        if phase not in self._latest:
            self._latest.clear()  # as large as the data set, so only one is kept
            self._latest[phase] = rate_classes(thresholds(self.plan.phases[phase].sample_rate), self.group)
        return self._latest[phase]

    @cached_property
    def _latest(self) -> dict[int, list[RateClass]]:
        return {}


@dataclass(frozen=True)
class RateClass:
    """Records that are candidates with probability 2^-halvings.

    members  (count,) their indices, ascending
    limits   (groups,) a candidate of this group is kept if its coin is below; 2^53 is always
    """

    halvings: int
    members: npt.NDArray[np.int64]
    limits: npt.NDArray[np.uint64]


def rate_classes(limits: npt.NDArray[np.uint64], group: npt.NDArray[np.int64]) -> list[RateClass]:
    """All records that can be drawn, in classes. limits: (groups,) rates·2^53, integers."""
    halvings = np.array([COIN_BITS - (int(limit) - 1).bit_length() if limit else -1 for limit in limits])
    by_record = halvings[group]
    return [
        RateClass(h, np.flatnonzero(by_record == h), np.where(halvings == h, limits << np.uint64(h), np.uint64(0)))
        for h in sorted({*halvings.tolist()} - {-1})
    ]


def successes(trials: int, halvings: int, stream: Stream) -> int:
    """Binomial(trials, 2^-halvings), exactly: the trials that come out heads in all of `halvings` rounds."""
    for _ in range(halvings):
        trials = heads(trials, stream)
    return trials


def heads(coins: int, stream: Stream) -> int:
    """Binomial(coins, 1/2), exactly: the number of ones among so many random bits."""
    ones = 0
    while coins > 0:
        words = stream.integers(min(-(-coins // 64), WORDS_AT_ONCE))
        surplus = max(64 * len(words) - coins, 0)
        words[-1] >>= np.uint64(surplus)
        ones += int.from_bytes(words.tobytes(), "little").bit_count()
        coins -= 64 * len(words)
    return ones


def subset(size: int, count: int, stream: Stream) -> npt.NDArray[np.int64]:
    """(size,) distinct integers below `count`, ascending: every subset is equally likely.

    Uniform integers are drawn until there are enough different ones. Of more than half, the others are drawn.
    """
    if 2 * size > count:
        return np.setdiff1d(np.arange(count), subset(count - size, count, stream), assume_unique=True)
    chosen = np.empty(0, dtype=np.int64)
    while len(chosen) < size:
        bits = (count - 1).bit_length()
        words = stream.integers(2 * (size - len(chosen)) + 16) >> np.uint64(64 - bits)
        chosen = np.concatenate([chosen, words[words < count].astype(np.int64)])
        chosen = chosen[np.sort(np.unique(chosen, return_index=True)[1])]  # the first of each value
    return np.sort(chosen[:size])
