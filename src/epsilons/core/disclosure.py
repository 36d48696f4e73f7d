"""The rule of 20: what is printed or released does not show what fewer than 20 records share (small cells).

An internal report has one row per group, unless there are very many. Everywhere else small groups are merged into
larger rows. The label of a merged row names an exact epsilon only where 20 or more records hold it, else a bound from
the grid 1, 2, 5, 10, …. So the rows depend on the epsilons of small groups only through their order and through bounds
that the 20 or more records of a row keep. A remainder that is still small joins the row before it, because the total of
all records would give its size away. It is not shown how many groups a row merges, because one person can change that
number.

All plan numbers are solved from all budgets together, so where a plan has small groups, its exact numbers are
suppressed as a whole. The *_SUPPRESSED texts say so.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from .mechanism import FloatArray, Groups, IntArray, Unit

#: A group of fewer records than this is a small cell.
SMALLEST_SHOWN = 20

#: More rows than this are merged into about MERGED_ROWS, also in internal reports.
MOST_ROWS = 50
MERGED_ROWS = 25

#: Of a row that is made from no group of a plan.
_NO_GROUP = slice(0, 0)

PLAN_SUPPRESSED = (
    "Suppressed: exact epsilon_spent, rates, clip norms and noise. Fewer than 20 records hold some of these budgets, "
    "and the numbers would show what they chose. For internal use, plan.json and plan.epsilon_spent() hold the numbers."
)
ADVICE_SUPPRESSED = (
    "Suppressed: fewer than 20 records hold some of these budgets. Every signal is relative to uniform, which uses the "
    "strictest budget for everyone, so the signals would show what these records chose. For internal use, "
    "advise(…).ways and epsilons advise --json hold the numbers."
)
AUDIT_SUPPRESSED = (
    "Suppressed: epsilon_spent, bounds and measurements. Fewer than 20 records share some budget, and the numbers "
    "would show it. The saved result and --json hold them, for readers who may see the plan."
)
SOLVED_SUPPRESSED = (
    "Suppressed in this version. Some budgets are shared by fewer than 20 records. All rates, clip norms, noise and "
    "epsilon_spent were computed together, so these numbers would reveal the budgets of those records."
)
PRIVATE_SUPPRESSED = (
    "Suppressed in this version. Accuracy was measured on data that were not declared public, and the guarantee does "
    "not cover it."
)
SMALL_SUPPRESSED = "Suppressed in this version: at least one of its rows has fewer than 20 test records."
CHOSEN_SUPPRESSED = (
    "Suppressed in this version. Two reports on nearly the same people would show by their difference what the person "
    "chose who withdrew, joined or changed between them. So nothing in it depends on how many people are in a tier, or "
    "on what they used."
)
HASHES_SUPPRESSED = (
    "The hashes of plan and ledger are in the internal version only: a guessed list of budgets could be checked "
    "against them."
)


@dataclass(frozen=True)
class DisplayRow:
    """One group, or several neighbouring groups merged.

    label     name of the row: "0.5", "≤ 1", "3 to 10", "all"; "4, odds 55" for a tier by risk that has no name
    tier      name of the group's tier; of a merged row for release, of all declared tiers that it may hold; or None
    epsilon   the epsilon of a single group; None in a merged row
    at_least, at_most  bounds on the row's epsilons; None where suppressed
    delta     the delta of all groups of the row; None where they differ or are suppressed
    records   number of records; None where fewer than 20
    groups    the groups in the row
    tiers     (name, epsilon) of the tiers that a merged row for release names; else ()
    """

    label: str
    tier: str | None
    epsilon: float | None
    at_least: float | None
    at_most: float | None
    delta: float | None
    records: int | None
    groups: slice = field(repr=False)
    tiers: tuple[tuple[str, float], ...] = field(default=(), repr=False)

    @property
    def merged(self) -> bool:
        """True for several groups, and for one group with a suppressed epsilon."""
        return self.epsilon is None


def has_small_cells(groups: Groups) -> bool:
    """True if fewer than 20 records hold some budget."""
    return bool((groups.counts < SMALLEST_SHOWN).any())


def in_groups(groups: Groups) -> str:
    """ ", 3 groups", to be put after a number of records; "" with small cells, whose number one record can change."""
    return "" if has_small_cells(groups) else f", {len(groups):,} groups"


def display_rows(
    groups: Groups, tiers: Mapping[str, float] | None, release: bool, most: int = MOST_ROWS
) -> tuple[DisplayRow, ...]:
    """Rows that together hold all records, strictest first.

    tiers    {name: epsilon}, for the rows' tier names
    release  True: merge small groups, for readers who must not see everything
    most     more rows than this are merged, into about MERGED_ROWS and at most so many
    """
    rows = _rows(groups, _spans(groups.counts, release), tiers, release)
    if len(rows) > most:
        # Whole rows are merged: if one row cut another in two, their difference could be a small cell.
        rows = _rows(groups, _joined([row.groups for row in rows], groups.counts, most), tiers, release)
    return rows


def _rows(
    groups: Groups, spans: list[slice], tiers: Mapping[str, float] | None, release: bool
) -> tuple[DisplayRow, ...]:
    if not release:
        return tuple(_internal(groups, span, tiers) for span in spans)
    shown: list[DisplayRow] = []
    for span in reversed(spans):  # from the loosest: the bound of a row may be the next looser row
        row = _released(groups, span, tiers, shown[0] if shown else None)
        if shown and row.merged and shown[0].merged and row.label == shown[0].label:
            joined = slice(span.start, shown[0].groups.stop)
            shown[0] = _released(groups, joined, tiers, shown[1] if len(shown) > 1 else None)
        else:
            shown.insert(0, row)
    return tuple(_named(row, _tiers_within(groups, row, tiers)) if row.merged else row for row in shown)


def _named(row: DisplayRow, tiers: tuple[tuple[str, float], ...]) -> DisplayRow:
    return replace(row, tier=", ".join(name for name, _ in tiers) or None, tiers=tiers)


def _tiers_within(groups: Groups, row: DisplayRow, tiers: Mapping[str, float] | None) -> tuple[tuple[str, float], ...]:
    """All declared tiers that a row may hold, by its bounds and by the levels of 20 or more records in other rows.

    The same tiers whether or not anybody holds them.
    """
    known = [(float(e), g) for g, e in enumerate(groups.epsilons) if groups.counts[g] >= SMALLEST_SHOWN]
    above = max((epsilon for epsilon, group in known if group < row.groups.start), default=0.0)
    below = min((epsilon for epsilon, group in known if group >= row.groups.stop), default=math.inf)
    low, high = row.at_least or 0.0, row.at_most or math.inf
    held = sorted({epsilon for epsilon in (tiers or {}).values() if above < epsilon < below and low <= epsilon <= high})
    return tuple((str(tier_of(tiers, epsilon)), epsilon) for epsilon in held)


def declared_rows(
    epsilons: npt.ArrayLike, deltas: FloatArray, counts: IntArray, tiers: Mapping[str, float]
) -> tuple[DisplayRow, ...]:
    """Rows for release of what people chose: the declared tiers, held or not, each with the delta of most people.

    They do not depend on how many people hold a tier. Otherwise two releases on nearly the same people would show by
    their difference what the person chose who withdrew, joined or changed between them, however much is merged in each.
    One row without a promise is returned if no more than half of the people hold a declared tier. Without tiers, the
    epsilon that more than 19 of 20 hold is shown like one.

    epsilons, deltas, counts  (groups,) of the people
    tiers                     {name: epsilon}
    """
    held = np.asarray(epsilons)
    delta, levels = _commonest(deltas, counts), sorted(set(tiers.values())) or [_commonest(held, counts)]
    known = int(counts[np.isin(held, levels) & (deltas == delta)].sum())
    if known <= (0.5 if tiers else 0.95) * int(counts.sum()):
        return (DisplayRow("all", None, None, None, None, None, None, _NO_GROUP),)
    return tuple(
        DisplayRow(f"{level:.5g}", tier_of(tiers, level), level, level, level, delta, None, _NO_GROUP)
        for level in levels
    )


def _commonest(values: npt.ArrayLike, counts: IntArray) -> float:
    found, which = np.unique(values, return_inverse=True)
    return float(found[np.bincount(which.reshape(-1), counts).argmax()])


def shown_delta(groups: Groups) -> float | None:
    """The delta of all budgets that 20 or more records hold; None if they differ, or if there is no such budget."""
    found = {float(delta) for delta in groups.deltas[groups.counts >= SMALLEST_SHOWN]}
    return found.pop() if len(found) == 1 else None


def risk_of(groups: Groups, group: int) -> str:
    """What a group declares beside epsilon and delta, to be put after its epsilon: tiers of one tail differ in it.

    ", odds 55", ", TPR 0.05 at 0.01", or both; "" for budgets that are not by risk.
    """
    advantage, rate, power = (math.inf, 0.0, math.inf) if groups.limits is None else groups.limits[group].tolist()
    odds = f", odds {50 * (1 + advantage):.5g}" if math.isfinite(advantage) else ""
    return odds + (f", TPR {power:.5g} at {rate:.5g}" if math.isfinite(power) else "")


def merge_small(counts: npt.ArrayLike, smallest: int = SMALLEST_SHOWN) -> list[slice]:
    """Spans of neighbouring groups, each with at least `smallest` records; a single span may have fewer.

    A small group joins the next looser one, and the last those before it. A table with one record per row would show
    everyone's budget.

    >>> merge_small([3, 50, 10, 15, 40, 2])
    [slice(0, 2, None), slice(2, 4, None), slice(4, 6, None)]
    """
    spans: list[slice] = []
    start, records = 0, 0
    sizes = np.asarray(counts)
    for i, size in enumerate(sizes):
        records += int(size)
        if records >= smallest:
            spans.append(slice(start, i + 1))
            start, records = i + 1, 0
    if start < len(sizes):
        spans.append(slice(spans.pop().start if spans else start, len(sizes)))
    return spans


def how_many(count: int, records: int) -> str:
    """A count of records for the beginning of a sentence; small counts, and small remainders, are suppressed.

    >>> how_many(400, 1000), how_many(3, 1000), how_many(985, 1000), how_many(1000, 1000)
    ('400 of 1,000', 'Fewer than 20', 'All but fewer than 20 of 1,000', '1,000 of 1,000')
    """
    if count < SMALLEST_SHOWN:
        return f"Fewer than {SMALLEST_SHOWN}"
    shown = f"All but fewer than {SMALLEST_SHOWN}" if 0 < records - count < SMALLEST_SHOWN else f"{count:,}"
    return f"{shown} of {records:,}"


def at_least(count: int) -> str:
    """A count rounded down to a multiple of 20: the difference of two runs does not say who left between them.

    >>> at_least(19), at_least(58), at_least(1234)
    ('fewer than 20', '40 or more', '1,220 or more')
    """
    if count < SMALLEST_SHOWN:
        return f"fewer than {SMALLEST_SHOWN}"
    return f"{count // SMALLEST_SHOWN * SMALLEST_SHOWN:,} or more"


def shown_counts(counts: Mapping[str, int]) -> dict[str, str]:
    """Counts as they are shown. Small ones are joined, with the next larger one if need be: no difference shows them.

    >>> shown_counts({"no": 40, "maybe": 50, "blank": 3, "unlisted": 0})
    {'maybe': '50', 'no, blank, unlisted': '43'}
    >>> shown_counts({"blank": 3})
    {'blank': 'fewer than 20'}
    """
    small: list[str] = []
    total = 0
    for name in sorted(counts, key=counts.__getitem__):
        if counts[name] >= SMALLEST_SHOWN and not 0 < total < SMALLEST_SHOWN:
            break
        small.append(name)
        total += counts[name]
    shown = {name: f"{count:,}" for name, count in counts.items() if name not in small}
    few = f"fewer than {SMALLEST_SHOWN}" if total < SMALLEST_SHOWN else f"{total:,}"
    return shown | ({", ".join(name for name in counts if name in small): few} if small else {})


def of_unit(text: str, unit: Unit) -> str:
    """The text about records, about persons if these have the budgets.

    >>> of_unit("Fewer than 20 records hold it.", "person")
    'Fewer than 20 persons hold it.'
    """
    if unit == "record":
        return text
    return re.sub(r"\b([Rr])ecord(s?)\b", lambda found: ("P" if found[1] == "R" else "p") + "erson" + found[2], text)


def rounded_up(value: float) -> float:
    """The smallest of 1, 2, 5, 10, 20, … (and 0.5, 0.2, …) that is not below `value`.

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


def _spans(counts: IntArray, release: bool) -> list[slice]:
    smallest = SMALLEST_SHOWN if release else 1
    spans = merge_small(counts, smallest)
    singles = [slice(group, group + 1) for group in range(len(counts))]
    return _joined(singles, counts, MERGED_ROWS) if len(spans) > MOST_ROWS else spans


def _joined(spans: list[slice], counts: IntArray, most: int) -> list[slice]:
    """Neighbouring spans merged into at most `most`."""
    smallest = max(SMALLEST_SHOWN, math.ceil(int(counts.sum()) / most))
    merged = merge_small([int(counts[span].sum()) for span in spans], smallest)
    return [slice(spans[m.start].start, spans[m.stop - 1].stop) for m in merged]


def _internal(groups: Groups, span: slice, tiers: Mapping[str, float] | None) -> DisplayRow:
    low, high = float(groups.epsilons[span.start]), float(groups.epsilons[span.stop - 1])
    alone = span.stop - span.start == 1
    deltas, tier = np.unique(groups.deltas[span]), tier_of(tiers, low if alone else None)
    return DisplayRow(
        label=_of_group(groups, span.start, tier) if alone else f"{low:.5g} to {high:.5g}",
        tier=tier,
        epsilon=low if alone else None,
        at_least=low,
        at_most=high,
        delta=float(deltas[0]) if len(deltas) == 1 else None,
        records=int(groups.counts[span].sum()),
        groups=span,
    )


def _released(groups: Groups, span: slice, tiers: Mapping[str, float] | None, looser: DisplayRow | None) -> DisplayRow:
    """A row that depends on small groups only through a grid bound that 20 or more records keep."""
    first, last = span.start, span.stop - 1
    records = int(groups.counts[span].sum())
    is_large = groups.counts >= SMALLEST_SHOWN
    low = float(groups.epsilons[first]) if is_large[first] else None
    alone = first == last and low is not None
    tier = tier_of(tiers, low if alone else None)
    bound = float(groups.epsilons[last]) if is_large[last] else rounded_up(float(groups.epsilons[last]))
    above = math.inf if looser is None or looser.at_least is None else looser.at_least
    high = None if records < SMALLEST_SHOWN else bound if is_large[last] else min(bound, above)
    if high is None:
        label = "all"
    elif low is not None:
        label = _of_group(groups, first, tier) if alone else f"{low:.5g} to {high:.5g}"
    else:
        label = f"below {high:.5g}" if high == above and not is_large[last] else f"≤ {high:.5g}"
    return DisplayRow(
        label=label,
        tier=tier,
        epsilon=low if alone else None,
        at_least=low,
        at_most=high,
        delta=float(groups.deltas[first]) if alone else None,
        records=records if records >= SMALLEST_SHOWN else None,
        groups=span,
    )


def _of_group(groups: Groups, group: int, tier: str | None) -> str:
    return f"{groups.epsilons[group]:.5g}" + ("" if tier else risk_of(groups, group))


def tier_of(tiers: Mapping[str, float] | None, epsilon: float | None) -> str | None:
    """The name of the tier with this epsilon; None if there is none."""
    names = [name for name, value in (tiers or {}).items() if value == epsilon]
    return " / ".join(names) or None
