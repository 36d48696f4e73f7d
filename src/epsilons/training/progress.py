"""What one sees while it trains: steps charged and allowed, epsilon per group, time left. Never a private loss."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from ..budgets import merge_small
from .private import Private

MOST_GROUPS = 6  # more do not fit on a line


@contextmanager
def watched(private: Private, shown: bool = True) -> Iterator[Callable[[], None]]:
    """A live line on stderr; the caller ticks it after every update."""
    if not shown:
        yield lambda: None
        return
    columns = (
        TextColumn("charged"),
        MofNCompleteColumn(),
        BarColumn(bar_width=24),
        TimeRemainingColumn(),
        TextColumn("{task.fields[spent]}"),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("steps", total=private.plan.steps, spent=spent(private))

        def tick() -> None:
            bar.update(task, completed=sum(private.ledger.charged), spent=spent(private))

        yield tick


def spent(private: Private) -> str:
    """Epsilon charged and promised, of the loosest group in each printed row: "ε 0.31/0.5  0.62/1"."""
    plan = private.plan
    runs = merge_small(plan.counts)
    groups = [run.stop - 1 for run in runs[:MOST_GROUPS]]
    charged = plan.spent_after(private.ledger.charged, groups)
    shown = [f"{math.ceil(100 * spent) / 100:.2f}/{plan.levels[group]:g}" for group, spent in zip(groups, charged, strict=True)]
    return "ε " + "  ".join(shown) + (" …" if len(runs) > MOST_GROUPS else "")
