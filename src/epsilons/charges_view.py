"""How a ledger is printed: the steps that are charged, and what they spend."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from .disclosure import PLAN_SUPPRESSED, has_small_cells, of_unit
from .escaping import printable
from .plan_folder import Slot
from .planning import Plan, display, notebook_views


def text(plan: Plan, charged: Sequence[int], slot: Slot | None, path: Path | None) -> list[str]:
    """The lines of a terminal."""
    suppressed = [of_unit(PLAN_SUPPRESSED, plan.unit)] if has_small_cells(plan.groups) else []
    table = display.aligned(display.spend_table(plan, charged))
    return [
        *_of_several(slot),
        _title(plan, charged, path),
        table,
        *suppressed,
        *display.levels_note(plan),
        display.CLAIM,
    ]


def html(plan: Plan, charged: Sequence[int], slot: Slot | None, path: Path | None) -> str:
    """The same for a notebook."""
    return notebook_views.of_charges(plan, charged, _title(plan, charged, path), _of_several(slot))


def _title(plan: Plan, charged: Sequence[int], path: Path | None) -> str:
    where = printable(path) if path else "in memory, not durable"
    return f"{sum(charged):,} of {plan.steps:,} steps charged ({where})"


def _of_several(slot: Slot | None) -> list[str]:
    """A note if this is one of several runs of a plan."""
    if slot is None or slot.of == 1:
        return []
    return [
        f"This is {slot} of its plan. The epsilons are those of all runs together, and “so far” counts the others in "
        "full."
    ]
