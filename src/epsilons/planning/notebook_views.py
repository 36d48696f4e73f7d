"""Plans, and what was charged under them, as HTML for notebooks; the same content as the printed text."""

from __future__ import annotations

from collections.abc import Sequence

from .. import notebook
from ..disclosure import PLAN_SUPPRESSED, has_small_cells, of_unit
from . import display
from .plan_numbers import PlanNumbers


def of_plan(plan: PlanNumbers) -> str:
    """Title, one table per phase, notes, and the guarantee."""
    tables = [notebook.table(*table, caption=caption) for caption, table in display.phase_tables(plan)]
    return notebook.document(
        notebook.heading(display.title(plan)),
        *tables,
        notebook.paragraphs(display.notes(plan)),
        notebook.details("The guarantee", plan.guarantee),
    )


def of_charges(plan: PlanNumbers, charged: Sequence[int], title: str, notes: Sequence[str] = ()) -> str:
    """What each group was charged so far and what it spends in all.

    charged  (phases,) steps charged
    """
    suppressed = [of_unit(PLAN_SUPPRESSED, plan.unit)] if has_small_cells(plan.groups) else []
    return notebook.document(
        notebook.heading(title),
        notebook.table(*display.spend_table(plan, charged)),
        notebook.paragraphs([*notes, *suppressed, *display.levels_note(plan), display.CLAIM]),
    )
