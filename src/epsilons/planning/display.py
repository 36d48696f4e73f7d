"""Plans as text: titles, notes, aligned tables, and the rows that the ledger and the command line print.

Where a plan has small cells (fewer than 20 records hold some budget), the rows are those of a report for release
(`disclosure`), and no number is shown that was solved from all budgets together. The text is then the same whatever
the few chose, as long as the rows are the same.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from ..core import notebook
from ..core.disclosure import (
    PLAN_SUPPRESSED,
    SMALLEST_SHOWN,
    DisplayRow,
    display_rows,
    has_small_cells,
    how_many,
    of_unit,
    risk_of,
    tier_of,
)
from ..errors import PlanError, printable
from .plan_numbers import Phase, PlanNumbers

Table: TypeAlias = tuple[list[str], list[list[str]]]  # headers, rows

INFLUENCE = "influence: how far one record of the group can move the whole run, steps · sample_rate / noise_multiplier"

CLAIM = (
    "Claim the last column, however early you stop: the charge so far holds only if the stop was chosen without "
    "looking at data or outputs."
)

LEVELS = (
    "Lifetime level: how far into the lifetime budgets this plan may go, counting all that was charged before it. The "
    "promise is the lifetime budget. A level is an ε. The share used in epsilons registry show is counted at "
    "one Rényi order, so it is not the level divided by the budget."
)

RISKS = (
    "at most, beside epsilon at delta: right guesses of 100 at even odds; true positives at a rate of false positives"
)

#: A note mentions groups that leave more than this part of their budgets unused.
UNUSED = 0.002


# -- a plan as text --------------------------------------------------------------------------------


def title(plan: PlanNumbers) -> str:
    """The plan in one line."""
    return (
        f"{printable(plan.strategy)}: {plan.records:,} {plan.unit}s, {steps_of(plan)}, certified by "
        f"{printable(plan.accountant)}, {plan.adjacency}"
    )


def steps_of(plan: PlanNumbers) -> str:
    """The number of steps in words, and of runs where there are several."""
    runs = runs_of(plan)
    return f"{runs} runs of {plan.steps:,} steps" if runs else f"{plan.steps:,} steps"


def runs_of(plan: PlanNumbers) -> str:
    """How many runs a plan is for, in words; "" for one."""
    if plan.select is not None:
        return f"about {plan.select.mean:g} secret"
    return f"{plan.runs:,}" if plan.runs > 1 else ""


def summary(plan: PlanNumbers) -> str:
    """Title, one aligned table per phase, notes."""
    blocks = [f"{heading}\n{aligned(table)}" for heading, table in phase_tables(plan)]
    return "\n".join([title(plan), *blocks, *notes(plan)])


def notes(plan: PlanNumbers) -> tuple[str, ...]:
    """What the tables do not show at once: records that take no part, and budgets that are not used up.

    A plan with small cells has one note that says so, because counts may change with what one person chose.
    """
    levels = (*levels_note(plan), *_score_note(plan), *_count_note(plan))
    if has_small_cells(plan.groups):
        return of_unit(PLAN_SUPPRESSED, plan.unit), *levels
    rates = np.array([phase.sample_rate for phase in plan.phases])
    never_drawn = (rates == 0).all(axis=0)
    short = ~never_drawn & (plan.part_used < 1 - UNUSED)
    always_drawn = short & (rates.min(axis=0) == 1)
    sentences = [
        (never_drawn, "take no part and spend nothing."),
        (
            always_drawn,
            "are drawn in every step and still leave part of their budgets unused; mix or scale would use it.",
        ),
        (short & ~always_drawn, f"leave more than {UNUSED:.1%} of their budgets unused."),
    ]
    counts = [(int(plan.counts[groups].sum()), what) for groups, what in sentences if groups.any()]
    found = (f"{how_many(count, plan.records)} {plan.unit}s {what}" for count, what in counts)
    return *found, *levels


def _score_note(plan: PlanNumbers) -> tuple[str, ...]:
    """How exact the scores of a selection are."""
    if plan.select is None:
        return ()
    of = "" if has_small_cells(plan.groups) else f" of {plan.score_noise.min():.1f} right answers"
    return (f"Each run's score on held-out {plan.unit}s gets noise{of}; strict tiers weigh less in it.",)


def _count_note(plan: PlanNumbers) -> tuple[str, ...]:
    """What is charged beside the steps."""
    if plan.class_noise is None:
        return ()
    return (f"The classes in each tier may be counted once, with noise of {plan.class_noise:g} people: it is charged.",)


def levels_note(plan: PlanNumbers) -> tuple[str, ...]:
    """What the first column means, for a plan on accounts of a registry."""
    return () if plan.groups.starts is None else (LEVELS,)


def promised(plan: PlanNumbers) -> str:
    """The header of the first column: budgets, or levels of lifetime budgets for a plan on accounts of a registry."""
    return "epsilon" if plan.groups.starts is None else "lifetime level"


def comparison(plans: Sequence[PlanNumbers]) -> str:
    """Plans for the same groups side by side, as text. Raises PlanError for other groups."""
    first, unit = plans[0].groups, plans[0].unit
    for plan in plans:
        if plan.unit != unit:
            raise PlanError("A plan of persons cannot be compared with a plan of records: their epsilons differ.")
        if not (np.array_equal(first.epsilons, plan.epsilons) and np.array_equal(first.counts, plan.counts)):
            raise PlanError("Plans can be compared only when they were made for the same groups of records.")
    below = of_unit(PLAN_SUPPRESSED if has_small_cells(first) else INFLUENCE, unit)
    return aligned(comparison_table(plans)) + "\n\n" + below


# -- tables ----------------------------------------------------------------------------------------


def phase_tables(plan: PlanNumbers, tiers: Mapping[str, float] | None = None) -> list[tuple[str, Table]]:
    """A title and a table for each phase; one table for all phases where the plan has small cells.

    tiers  {name: epsilon}, for names beside the epsilons; those of lifetime levels have none
    """
    tiers = tiers if plan.groups.starts is None else None
    if has_small_cells(plan.groups):
        heading = f"{plan.steps:,} steps, expected batch {plan.batch_size:.6g}"
        promises = [
            [named(row.label, row.tier), _delta(row), _records(row), spent_bound(plan, row)]
            for row in display_rows(plan.groups, tiers, release=True)
        ]
        return [(heading, ([promised(plan), "delta", f"{plan.unit}s", "epsilon_spent"], promises))]
    several = len(plan.phases) > 1
    tables = [
        ((f"phase {i}: " if several else "") + phase.title, _phase_table(plan, phase, tiers))
        for i, phase in enumerate(plan.phases, start=1)
    ]
    if plan.groups.limits is not None:
        headers = [promised(plan), f"{plan.unit}s", "limit", "declared", "certified"]
        columns = enumerate(zip(plan.epsilons, plan.counts, strict=True))
        rows = [
            [number(epsilon), f"{count:,}", *limit.cells]
            for group, (epsilon, count) in columns
            for limit in limits_of(plan, group)
        ]
        tables.append((RISKS, (headers, rows)))
    return tables


@dataclass(frozen=True)
class Limit:
    """What a tier by risk declares beside (epsilon, delta), and what the plan certifies of it.

    what       "right of 100": at most so many of 100 guesses are right, at even odds; "TPR": the largest
               true-positive rate
    at_fpr     of a true-positive rate: at this false-positive rate; else None
    declared   by the tier
    certified  of the plan; None where it is not shown
    """

    what: str
    at_fpr: float | None
    declared: float
    certified: float | None

    @property
    def cells(self) -> list[str]:
        """In print: what is limited, what is declared, and what is certified, rounded up within it."""
        what = self.what if self.at_fpr is None else f"{self.what} at FPR {self.at_fpr:g}"
        certified = "–" if self.certified is None else rounded_spend(self.certified, self.declared)
        return [what, number(self.declared), certified]


def limits_of(plan: PlanNumbers, group: int, is_suppressed: bool = False) -> tuple[Limit, ...]:
    """The limits of one group; () for budgets that are not by risk. is_suppressed: leave out what is certified"""
    if plan.groups.limits is None:
        return ()
    reached = () if is_suppressed else plan.certified_limits[group].tolist()
    return declared_limits(*plan.groups.limits[group].tolist(), *reached)


def declared_limits(
    advantage: float = math.inf,
    rate: float = 0.0,
    power: float = math.inf,
    reached: float | None = None,
    found: float | None = None,
) -> tuple[Limit, ...]:
    """A row of `Groups.limits`, and the advantage and the true-positive rate that are certified, as far as declared."""
    odds = Limit("right of 100", None, 50 * (1 + advantage), None if reached is None else 50 * (1 + reached))
    return tuple(one for one in (odds, Limit("TPR", rate, power, found)) if math.isfinite(one.declared))


def _phase_table(plan: PlanNumbers, phase: Phase, tiers: Mapping[str, float] | None) -> Table:
    weighted = bool((phase.weight != 1).any())
    headers = [promised(plan), "delta", f"{plan.unit}s", "epsilon_spent", "sample_rate", "clip_norm"]
    headers += ["weight", "noise_multiplier"] if weighted else ["noise_multiplier"]
    noise_multiplier = np.where(phase.sample_rate > 0, phase.noise_multiplier, np.inf)
    columns = [phase.sample_rate, phase.clip_norm, *([phase.weight] if weighted else []), noise_multiplier]
    groups = zip(plan.epsilons, plan.delta, plan.counts, plan.epsilon_spent(), strict=True)
    return headers, [
        [
            named(number(epsilon) + risk_of(plan.groups, group), tier_of(tiers, epsilon)),
            number(delta),
            f"{count:,}",
            rounded_spend(spent, epsilon),
            *(number(column[group]) for column in columns),
        ]
        for group, (epsilon, delta, count, spent) in enumerate(groups)
    ]


def comparison_table(plans: Sequence[PlanNumbers]) -> Table:
    """Several plans for the same groups, side by side: epsilon spent, and influence of one record."""
    first = plans[0]
    suppressed = has_small_cells(first.groups)
    columns = ("epsilon_spent",) if suppressed else ("epsilon_spent", "influence")
    headers = [
        promised(first),
        f"{first.unit}s",
        *(f"{plan.strategy}: {column}" for plan in plans for column in columns),
    ]
    if suppressed:
        return headers, [
            [*first_cells(row), *(spent_bound(plan, row) for plan in plans)] for row in small_cell_rows(first)
        ]
    rows = []
    for group, epsilon in enumerate(first.epsilons):
        pairs = [(rounded_spend(plan.epsilon_spent()[group], epsilon), number(plan.influence[group])) for plan in plans]
        name = number(epsilon) + risk_of(first.groups, group)
        rows.append([name, f"{first.counts[group]:,}", *(cell for pair in pairs for cell in pair)])
    return headers, rows


def spend_table(plan: PlanNumbers, charged: Sequence[int]) -> Table:
    """The budget of each group, what it was charged so far, and what it spends when the plan is done."""
    level = "" if plan.groups.starts is None else "level "
    headers = [promised(plan), f"{plan.unit}s", f"{level}charged so far", f"{level}certified for the whole plan"]
    if has_small_cells(plan.groups):
        begun = any(charged)
        bounds = [(row, spent_bound(plan, row)) for row in small_cell_rows(plan)]
        return headers, [[*first_cells(row), bound if begun else "0", bound] for row, bound in bounds]
    columns = (plan.epsilons, plan.counts, plan.spent_after(charged), plan.epsilon_spent())
    return headers, [
        [
            number(epsilon) + risk_of(plan.groups, group),
            f"{count:,}",
            rounded_spend(so_far, epsilon),
            rounded_spend(total, epsilon),
        ]
        for group, (epsilon, count, so_far, total) in enumerate(zip(*columns, strict=True))
    ]


# -- rows and cells --------------------------------------------------------------------------------


def small_cell_rows(plan: PlanNumbers) -> tuple[DisplayRow, ...]:
    """The rows of a plan that has small cells."""
    return display_rows(plan.groups, None, release=True)


def named(label: str, tier: str | None) -> str:
    """The label of a row with the name of its tier, if it has one: "0.5 (strict)"."""
    return f"{label} ({tier})" if tier else label


def first_cells(row: DisplayRow) -> list[str]:
    """The first two cells of a row: its label and its records."""
    return [row.label, _records(row)]


def spent_bound(plan: PlanNumbers, row: DisplayRow) -> str:
    """A bound on the epsilon a row spends that follows from its budget alone; 0 if it is never drawn."""
    if row.epsilon is None:
        return "≤ budget"
    return f"≤ {number(row.epsilon)}" if any(phase.sample_rate[row.groups.start] > 0 for phase in plan.phases) else "0"


def _records(row: DisplayRow) -> str:
    return f"<{SMALLEST_SHOWN}" if row.records is None else f"{row.records:,}"


def _delta(row: DisplayRow) -> str:
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


def rounded_spend(value: float, promised: float) -> str:
    """An epsilon spent, rounded up to four significant digits, but not beyond the promised epsilon.

    >>> rounded_spend(0.999991, 1.0), rounded_spend(0.123451, 0.12346), rounded_spend(0.31234, 1.0)
    ('1', '0.12346', '0.3124')
    """
    rounded = round_up(value, 4)
    return number(min(rounded, promised) if value <= promised else rounded)


def round_up(value: float, digits: int) -> float:
    """The value with so many significant digits, rounded up: a bound is never shown too low."""
    if not (math.isfinite(value) and value > 0):
        return value
    scale = 10.0 ** (digits - 1 - math.floor(math.log10(value)))
    return math.ceil(value * scale) / scale


# -- Plans, and what was charged under them, as HTML for notebooks; the same content as the printed text


def of_plan(plan: PlanNumbers) -> str:
    """Title, one table per phase, notes, and the guarantee."""
    tables = [notebook.table(*table, caption=caption) for caption, table in phase_tables(plan)]
    return notebook.document(
        notebook.heading(title(plan)),
        *tables,
        notebook.paragraphs(notes(plan)),
        notebook.details("The guarantee", plan.guarantee),
    )


def of_charges(plan: PlanNumbers, charged: Sequence[int], title: str, notes: Sequence[str] = ()) -> str:
    """What each group was charged so far and what it spends in all.

    charged  (phases,) steps charged
    """
    suppressed = [of_unit(PLAN_SUPPRESSED, plan.unit)] if has_small_cells(plan.groups) else []
    return notebook.document(
        notebook.heading(title),
        notebook.table(*spend_table(plan, charged)),
        notebook.paragraphs([*notes, *suppressed, *levels_note(plan), CLAIM]),
    )
