"""Plans as tables: the rows, made once for `print(plan)`, the ledger and the command line, and a plain-text setting.

Groups of fewer than 20 records are merged upwards (`merge_small`): with one record per group, the table is everybody's
budget.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import numpy.typing as npt

from ..budgets import merge_small

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
    rows = []
    for run in merge_small(plan.counts):
        row = [*_who(plan, run), span(plan.spends()[run], up=True)]
        row[1:1] = [span(plan.delta[run])]
        row += [span(phase.sample_rate[run]), span(phase.clip_norm[run])]
        row += [span(phase.weight[run])] if weighted else []
        rows.append([*row, span(noise_multiplier[run])])
    return headers, rows


def comparison_table(plans: Sequence[Plan]) -> Table:
    """Several plans for the same groups, side by side: what each spends and how hard its records pull."""
    headers = ["epsilon", "records", *(f"{plan.strategy}: {what}" for plan in plans for what in ("spends", "pull"))]
    rows = []
    for run in merge_small(plans[0].counts):
        cells = [cell for plan in plans for cell in (span(plan.spends()[run], up=True), span(plan.pull[run]))]
        rows.append([*_who(plans[0], run), *cells])
    return headers, rows


def spend_table(plan: Plan, charged: Sequence[int]) -> Table:
    """What each group was promised, was charged so far, and will have spent when the plan is done."""
    headers = ["epsilon", "records", "charged so far", "certified for the whole plan"]
    so_far = plan.spent_after(charged)
    rows = [
        [*_who(plan, run), span(so_far[run], up=True), span(plan.spends()[run], up=True)]
        for run in merge_small(plan.counts)
    ]
    return headers, rows


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


def span(values: npt.NDArray[np.float64], up: bool = False) -> str:
    """One number, or the range of a merged row; `up` rounds away from zero, as a spend must.

    >>> span(np.array([0.99999123]), up=True), span(np.array([1.0, 2.5]))
    ('1', '1–2.5')
    """

    def show(value: float) -> str:
        if not (up and math.isfinite(value) and value > 0):
            return f"{value:.5g}"
        scale = 10.0 ** (4 - math.floor(math.log10(value)))
        return f"{math.ceil(value * scale) / scale:.5g}"

    low, high = show(float(values.min())), show(float(values.max()))
    return low if low == high else f"{low}–{high}"


def _who(plan: Plan, run: slice) -> list[str]:
    return [span(plan.levels[run]), f"{plan.counts[run].sum():,}"]
