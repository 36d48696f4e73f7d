"""The altered forms in which a physical batch is computed.

as it is    the form that all others are compared with
exchanged   some records kept, the others replaced by copies of one of them; every record is kept in some form
resized     one record less; half of them, or more than there are, by copies
copied      a single record, with copies of itself
earlier     all records, with numbers in attributes of modules as they were before in a draw
alone       one record; the shortest one alone, so that padding has another length. For a foreign loop with a copy of
            itself, because such loops drop the dimension of the records if it is 1 (squeeze)
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

#: Draws seldom hold more records than expected and this many of its roots.
ROOTS = 8


@dataclass(frozen=True)
class Variant:
    """One altered form of a physical batch of n records.

    rows   the record in each place
    here   the places of the records that are compared
    there  their places in the batch as it is
    kind   "as it is", "exchanged", "resized", "copied", "earlier" or "alone"
    """

    rows: Sequence[int]
    here: Sequence[int]
    there: Sequence[int]
    kind: str


@dataclass
class Variants:
    """All forms of one physical batch.

    count     how many records it holds
    most      how many a physical batch can hold
    step      of the run: which halves are exchanged changes from check to check
    lengths   (count,) how much each record holds; all equal if that is not known
    fewest    how many records a form holds at least, by copies
    """

    count: int
    most: int
    step: int
    lengths: Sequence[int]
    fewest: int = 1

    def __post_init__(self) -> None:
        half = np.random.default_rng(self.step).permutation(self.count)[: self.count // 2].tolist()
        #: Sets of records that are kept where the others are exchanged.
        self.halves = [sorted(half), sorted(set(range(self.count)) - set(half))] if self.count > 1 else [[0]]
        self.shortest, longest = int(np.argmin(self.lengths)), int(np.argmax(self.lengths))
        #: A record that is padded to the batch's own length.
        self.longest = longest if self.varies else self.count - 1

    @property
    def varies(self) -> bool:
        """Whether records may be padded to different lengths."""
        return len(set(self.lengths)) > 1

    def separate_all(self) -> None:
        """More exchanged forms, so that any two records are in different halves of some form."""
        bits, records = range(max(1, (self.count - 1).bit_length())), range(self.count)
        halves = [[i for i in records if (i >> bit & 1) == side] for bit in bits for side in (0, 1)]
        self.halves = [half for half in halves if half]

    @property
    def alone(self) -> list[int]:
        """Records that are computed alone."""
        return [self.longest, self.shortest] if self.varies else [self.longest]

    def exchanged(self, kept: Sequence[int]) -> tuple[int, ...]:
        """Others replaced by copies of a kept record; of the longest, so that nothing is padded to another length."""
        copied, kept_places = self.longest if self.varies else kept[-1], set(kept)
        return tuple(i if i in kept_places else copied for i in range(self.count))

    def __iter__(self) -> Iterator[Variant]:
        everyone = range(self.count)
        yield Variant(everyone, everyone, everyone, "as it is")
        if self.count == 1:
            yield Variant(everyone, everyone, everyone, "as it is")
            for records in sorted({min(2, self._largest), self._largest} - {1}):
                yield Variant([0] * records, [0], [0], "copied")
            return
        for kept in self.halves:
            yield Variant(self.exchanged(kept), kept, kept, "exchanged")
        for rows in self._resized():
            yield Variant(rows, range(len(rows)), rows, "resized")
        for place in self.alone:
            yield Variant([place] * self.fewest, [0], [place], "alone")

    def _resized(self) -> list[tuple[int, ...]]:
        """One record less, and half of them; in every second check as many as a draw may hold.

        The places of all records change.
        """
        more = [n for n in range(self.count + 1, self._largest + 1) if math.gcd(n - self.count, 6) == 1]
        if more and self.step > 0 and round(math.log10(self.step)) % 2 == 0:
            return [tuple((i + 1) % self.count for i in range(more[-1]))]
        everyone = range(self.count)
        dropped = 0 if self.longest != 0 else 1
        one_less = tuple(i for i in everyone if i != dropped)
        half = tuple(sorted({*everyone[: self.count // 2], self.longest}))
        return [rows for rows in dict.fromkeys([one_less, half]) if len(rows) not in (1, self.count)]

    @property
    def _largest(self) -> int:
        return min(self.most, self.count + math.ceil(ROOTS * math.sqrt(self.count)))
