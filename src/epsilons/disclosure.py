"""Rows: which groups are shown alone, and which together under what name; in printed tables and in reports.

In an internal report every group has its row, unless there are very many. Everywhere else, what fewer than 20 records
share is shown merged, and a merged row's name says no more than these: an exact level only where 20 or more hold it,
else a bound from the grid 1, 2, 5, 10, … that is the same whatever the hidden levels are in between. A remainder that
is still small joins the row below it, for the total of all records would give its size away.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from .budgets import SMALLEST_SHOWN, FloatArray, IntArray, merge_small

#: More rows than this are merged, also internally; then into about MERGED_ROWS.
MOST_ROWS = 50
MERGED_ROWS = 25


class Grouped(Protocol):
    """A plan, as far as disclosure needs it: the groups' budgets and sizes, (groups,) each."""

    @property
    def epsilons(self) -> FloatArray: ...
    @property
    def delta(self) -> FloatArray: ...
    @property
    def counts(self) -> IntArray: ...


@dataclass(frozen=True)
class Row:
    """One group, or neighbouring groups merged.

    label     how the row is called: "0.5", "≤ 1", "3 to 10", "all"
    tier      the name its tier was given, if any
    epsilon   the level, of a single group
    at_least, at_most  bounds on the row's levels; None where not told
    delta     one for all of the row; None where they differ or are not told
    records   None where fewer than 20
    """

    label: str
    tier: str | None
    epsilon: float | None
    at_least: float | None
    at_most: float | None
    delta: float | None
    records: int | None
    groups: slice = field(repr=False)

    @property
    def merged(self) -> bool:
        """True if the row stands for more than one group, or hides the one it stands for."""
        return self.epsilon is None


def hides(plan: Grouped) -> bool:
    """True if some budget is held by so few records that it is not shown."""
    return bool((plan.counts < SMALLEST_SHOWN).any())


def rows(plan: Grouped, tiers: Mapping[str, float] | None, release: bool) -> tuple[Row, ...]:
    """The rows, strictest first; together they hold all records. `release`: also for who must not see everything."""
    counts = plan.counts
    runs = _runs(counts, release)
    if not release:
        return tuple(_internal(plan, run, tiers) for run in runs)
    found: list[Row] = []
    for run in reversed(runs):  # from the loosest: a row's bound may be what comes after it
        row = _released(plan, run, tiers, found[0] if found else None)
        if found and row.merged and found[0].merged and row.label == found[0].label:
            joined = slice(run.start, found[0].groups.stop)
            found[0] = _released(plan, joined, tiers, found[1] if len(found) > 1 else None)
        else:
            found.insert(0, row)
    return tuple(found)


def _runs(counts: IntArray, release: bool) -> list[slice]:
    smallest = SMALLEST_SHOWN if release else 1
    runs = merge_small(counts, smallest)
    if len(runs) > MOST_ROWS:
        smallest = max(SMALLEST_SHOWN, math.ceil(int(counts.sum()) / MERGED_ROWS))
        runs = merge_small(counts, smallest)
    if len(runs) > 1 and int(counts[runs[-1]].sum()) < smallest:
        runs[-2:] = [slice(runs[-2].start, runs[-1].stop)]
    return runs


def _internal(plan: Grouped, run: slice, tiers: Mapping[str, float] | None) -> Row:
    low, high = float(plan.epsilons[run.start]), float(plan.epsilons[run.stop - 1])
    alone = run.stop - run.start == 1
    deltas = np.unique(plan.delta[run])
    return Row(
        label=f"{low:.5g}" if alone else f"{low:.5g} to {high:.5g}",
        tier=_tier(tiers, low) if alone else None,
        epsilon=low if alone else None,
        at_least=low,
        at_most=high,
        delta=float(deltas[0]) if len(deltas) == 1 else None,
        records=int(plan.counts[run].sum()),
        groups=run,
    )


def _released(plan: Grouped, run: slice, tiers: Mapping[str, float] | None, after: Row | None) -> Row:
    """A row that is the same whatever the levels and deltas are that fewer than 20 records hold."""
    first, last = run.start, run.stop - 1
    records = int(plan.counts[run].sum())
    many = plan.counts >= SMALLEST_SHOWN
    low = float(plan.epsilons[first]) if many[first] else None
    alone = first == last and low is not None
    high = float(plan.epsilons[last]) if many[last] else rounded_up(float(plan.epsilons[last]))
    known = many[last]
    if records < SMALLEST_SHOWN:
        label, high_told = "all", None
    elif not known and after is not None and after.at_least is not None and high >= after.at_least:
        label, high_told = f"below {after.at_least:.5g}", after.at_least
    else:
        label, high_told = f"≤ {high:.5g}", high
    if low is not None and high_told is not None:
        label = f"{low:.5g}" if alone else f"{low:.5g} to {high_told:.5g}"
    return Row(
        label=label,
        tier=_tier(tiers, low) if alone and low is not None else None,
        epsilon=low if alone else None,
        at_least=low,
        at_most=high_told,
        delta=float(plan.delta[first]) if alone else None,
        records=records if records >= SMALLEST_SHOWN else None,
        groups=run,
    )


def rounded_up(value: float) -> float:
    """The next of 1, 2, 5, 10, 20, … that is not smaller: says only between which two of them a value lies.

    >>> [rounded_up(value) for value in (0.7123, 1.0, 1.01, 7.7, 50.1)]
    [1.0, 1.0, 2.0, 10.0, 100.0]
    """
    exponent = math.floor(math.log10(value)) - 1
    while True:
        for step in (1, 2, 5):
            bound = float(f"{step}e{exponent}")
            if bound >= value:
                return bound
        exponent += 1


def _tier(tiers: Mapping[str, float] | None, level: float) -> str | None:
    names = [name for name, epsilon in (tiers or {}).items() if epsilon == level]
    return " / ".join(names) or None
