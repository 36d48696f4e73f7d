"""Plans as tables: the rows, made once for `print(plan)`, the ledger and the command line, and a plain-text setting.

Where fewer than 20 records hold some budget, the rows are those of a report for release (`rows.py`), and nothing that
was solved from all budgets together is shown: a visible group's spend, clip norm or noise would tell what the few
chose. The text is then the same whatever they chose.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from ..budgets import SMALLEST_SHOWN
from ..disclosure import Row, hides, rows
from ..escaping import printable

if TYPE_CHECKING:
    from .plans import Plan
    from .recipe import Phase

Table: TypeAlias = tuple[list[str], list[list[str]]]  # headers, rows

INFLUENCE = (
    "influence: how hard one record of the group can steer the whole run, steps · sample_rate / noise_multiplier"
)

WITHHELD = (
    "Withheld: exact spends, rates, clip norms and noise. Fewer than 20 records hold some of these budgets, and what "
    "they chose could be worked out. For the house, plan.json and plan.epsilon_spent() hold the numbers."
)


def phase_tables(plan: Plan) -> list[tuple[str, Table]]:
    """For each phase a title and what each group gives and gets; one table for all phases where some are hidden."""
    if hides(plan):
        title = f"{plan.steps:,} steps, expected batch {plan.batch_size:.6g}"
        promises = [[row.label, _delta(row), _records(row), at_most(plan, row)] for row in shown(plan)]
        return [(title, (["epsilon", "delta", "records", "epsilon_spent"], promises))]
    several = len(plan.phases) > 1
    return [
        ((f"phase {place}: " if several else "") + phase.title, _phase_table(plan, phase))
        for place, phase in enumerate(plan.phases, start=1)
    ]


def _phase_table(plan: Plan, phase: Phase) -> Table:
    weighted = bool((phase.weight != 1).any())
    headers = ["epsilon", "delta", "records", "epsilon_spent", "sample_rate", "clip_norm"]
    headers += ["weight", "noise_multiplier"] if weighted else ["noise_multiplier"]
    noise_multiplier = np.where(phase.sample_rate > 0, phase.noise_multiplier, np.inf)
    numbers = [phase.sample_rate, phase.clip_norm, *([phase.weight] if weighted else []), noise_multiplier]
    epsilon_spent = plan.epsilon_spent()
    return headers, [
        [
            number(level),
            number(delta),
            f"{count:,}",
            spent(epsilon_spent[group], level),
            *(number(n[group]) for n in numbers),
        ]
        for group, (level, delta, count) in enumerate(zip(plan.epsilons, plan.delta, plan.counts, strict=True))
    ]


def comparison_table(plans: Sequence[Plan]) -> Table:
    """Several plans for the same groups, side by side: what each spends and how hard its records pull."""
    first, hidden = plans[0], hides(plans[0])
    told = ("epsilon_spent",) if hidden else ("epsilon_spent", "influence")
    headers = ["epsilon", "records", *(f"{plan.strategy}: {what}" for plan in plans for what in told)]
    if hidden:
        return headers, [[*who(row), *(at_most(plan, row) for plan in plans)] for row in shown(first)]
    found = []
    for group, level in enumerate(first.epsilons):
        numbers = [(spent(plan.epsilon_spent()[group], level), number(plan.influence[group])) for plan in plans]
        found.append([number(level), f"{first.counts[group]:,}", *(cell for pair in numbers for cell in pair)])
    return headers, found


def spend_table(plan: Plan, charged: Sequence[int]) -> Table:
    """What each group was promised, was charged so far, and will have spent when the plan is done."""
    headers = ["epsilon", "records", "charged so far", "certified for the whole plan"]
    if hides(plan):
        begun = any(charged)
        bounds = [(row, at_most(plan, row)) for row in shown(plan)]
        return headers, [[*who(row), bound if begun else "0", bound] for row, bound in bounds]
    columns = (plan.epsilons, plan.counts, plan.spent_after(charged), plan.epsilon_spent())
    return headers, [
        [number(level), f"{count:,}", spent(so_far, level), spent(whole, level)]
        for level, count, so_far, whole in zip(*columns, strict=True)
    ]


def shown(plan: Plan) -> tuple[Row, ...]:
    """The rows of a plan that hides some budgets."""
    return rows(plan, None, release=True)


def who(row: Row) -> list[str]:
    """A row's first two cells: its label and its records."""
    return [row.label, _records(row)]


def at_most(plan: Plan, row: Row) -> str:
    """What a row spends, as far as that follows from its own budget: nothing if it is never drawn."""
    if row.merged:
        return "≤ own"
    return f"≤ {row.label}" if any(phase.sample_rate[row.groups.start] > 0 for phase in plan.phases) else "0"


def _records(row: Row) -> str:
    return f"<{SMALLEST_SHOWN}" if row.records is None else f"{row.records:,}"


def _delta(row: Row) -> str:
    return "merged" if row.delta is None else number(row.delta)


def aligned(content: Table) -> str:
    """Right-aligned columns, two spaces apart, for places without a terminal.

    >>> print(aligned((["epsilon", "records"], [["1", "20,400"], ["2", "25,800"]])))
    epsilon  records
          1   20,400
          2   25,800
    """
    headers, rows = list(map(printable, content[0])), [list(map(printable, row)) for row in content[1]]
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


def _up(value: float, digits: int) -> float:
    if not (math.isfinite(value) and value > 0):
        return value
    scale = 10.0 ** (digits - 1 - math.floor(math.log10(value)))
    return math.ceil(value * scale) / scale
