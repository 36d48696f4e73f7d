"""Plans as tables: the rows, made once for `print(plan)`, the ledger and the command line, and a plain-text setting.

Groups of fewer than 20 records are merged upwards (`merge_small`), and a merged row shows none of their numbers: with
one record per group, the table would be everybody's budget.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from ..budgets import SMALLEST_SHOWN, FloatArray, is_shown_alone, merge_small

if TYPE_CHECKING:
    from .phases import Phase
    from .plans import Plan

Table: TypeAlias = tuple[list[str], list[list[str]]]  # headers, rows

PULL = "pull: how hard one record of the group can steer the whole run, steps · sample_rate / noise_multiplier"


def phase_table(plan: Plan, phase: Phase) -> Table:
    """What each group gives and gets in one phase."""
    weighted = bool((phase.weight != 1).any())
    headers = ["epsilon", "delta", "records", "spends", "sample_rate", "clip_norm"]
    headers += ["weight", "noise_multiplier"] if weighted else ["noise_multiplier"]
    noise_multiplier = np.where(phase.sample_rate > 0, phase.noise_multiplier, np.inf)
    numbers = [phase.sample_rate, phase.clip_norm, *([phase.weight] if weighted else []), noise_multiplier]
    rows = []
    for run in merge_small(plan.counts):
        epsilon, records = shown_as(plan, run)
        delta = f"{plan.delta[run].max():.5g}"
        rows.append([epsilon, delta, records, *_cells(plan, run, [plan.spends()], numbers)])
    return headers, rows


def comparison_table(plans: Sequence[Plan]) -> Table:
    """Several plans for the same groups, side by side: what each spends and how hard its records pull."""
    headers = ["epsilon", "records", *(f"{plan.strategy}: {what}" for plan in plans for what in ("spends", "pull"))]
    rows = []
    for run in merge_small(plans[0].counts):
        cells = [cell for plan in plans for cell in _cells(plan, run, [plan.spends()], [plan.pull])]
        rows.append([*shown_as(plans[0], run), *cells])
    return headers, rows


def spend_table(plan: Plan, charged: Sequence[int]) -> Table:
    """What each group was promised, was charged so far, and will have spent when the plan is done."""
    headers = ["epsilon", "records", "charged so far", "certified for the whole plan"]
    spends = [plan.spent_after(charged), plan.spends()]
    return headers, [[*shown_as(plan, run), *_cells(plan, run, spends, [])] for run in merge_small(plan.counts)]


def shown_as(plan: Plan, run: slice) -> list[str]:
    """A row's first two cells: the level, or a merged row's highest, and its records."""
    if is_shown_alone(plan.counts, run):
        return [number(plan.levels[run.start]), f"{plan.counts[run.start]:,}"]
    records = int(plan.counts[run].sum())
    if records < SMALLEST_SHOWN:
        return ["looser" if run.start else "any", f"<{SMALLEST_SHOWN}"]
    top = float(plan.levels[run.stop - 1])
    return ["≤ " + (number(top) if plan.counts[run.stop - 1] >= SMALLEST_SHOWN else coarse(top)), f"{records:,}"]


def _cells(plan: Plan, run: slice, spends: Sequence[FloatArray], numbers: Sequence[FloatArray]) -> list[str]:
    """A row's numbers; of merged groups only that each keeps to its own budget."""
    if not is_shown_alone(plan.counts, run):
        return ["≤ own"] * len(spends) + ["merged"] * len(numbers)
    group = run.start
    promised = float(plan.levels[group])
    return [spent(values[group], promised) for values in spends] + [number(values[group]) for values in numbers]


def aligned(content: Table) -> str:
    """Right-aligned columns, two spaces apart, for places without a terminal.

    >>> print(aligned((["epsilon", "records"], [["1", "20,400"], ["2", "25,800"]])))
    epsilon  records
          1   20,400
          2   25,800
    """
    headers, rows = content
    widths = [max(map(len, column)) for column in zip(headers, *rows, strict=True)]
    lines = ([cell.rjust(width) for cell, width in zip(row, widths, strict=True)] for row in [headers, *rows])
    return "\n".join("  ".join(line) for line in lines)


def number(value: float) -> str:
    """Five significant digits."""
    return f"{value:.5g}"


def spent(value: float, promised: float) -> str:
    """A spend, rounded upwards to four significant digits, but not beyond what was promised.

    >>> spent(0.999991, 1.0), spent(0.123451, 0.12346), spent(0.31234, 1.0)
    ('1', '0.12346', '0.3124')
    """
    rounded = _up(value, 4)
    return number(min(rounded, promised) if value <= promised else rounded)


def coarse(value: float) -> str:
    """Two significant digits, rounded upwards: the end of a row of levels that few people hold.

    >>> coarse(7.7123)
    '7.8'
    """
    return f"{_up(value, 2):.5g}"


def _up(value: float, digits: int) -> float:
    if not (math.isfinite(value) and value > 0):
        return value
    scale = 10.0 ** (digits - 1 - math.floor(math.log10(value)))
    return math.ceil(value * scale) / scale
