"""Progress of a run on stderr: steps charged and allowed, epsilon per group, time left. Never a private loss."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from ..disclosure import has_small_cells
from .private import Private

MOST_GROUPS = 6  # more do not fit on a line
SECONDS_PER_LINE = 10.0  # where there is no terminal


@contextmanager
def watched(
    private: Private, shown: bool = True, what: str = "charged", details: Callable[[Private], str] | None = None
) -> Iterator[None]:
    """Progress on stderr, moved by every update: a live line in a terminal, elsewhere a line every so often.

    what: verb for the steps; details: text beside them, by default what each group has spent.
    """
    details = details or spent
    if not shown:
        yield
    elif sys.stderr.isatty():
        with _bar(private, what, details):
            yield
    else:
        with _lines(private, what, details):
            yield


@contextmanager
def _bar(private: Private, what: str, details: Callable[[Private], str]) -> Iterator[None]:
    columns = (
        TextColumn(what),
        MofNCompleteColumn(),
        BarColumn(bar_width=24),
        TimeRemainingColumn(),
        TextColumn("{task.fields[spent]}"),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("steps", total=private.plan.steps, spent=details(private))

        def tick(private: Private) -> None:
            bar.update(task, completed=sum(private.ledger.charged), spent=details(private))

        private.on_update(tick)
        yield


@contextmanager
def _lines(private: Private, what: str, details: Callable[[Private], str]) -> Iterator[None]:
    printed = time.monotonic()
    first: tuple[float, int] | None = None  # time before the first update is not counted: compiling, or resuming

    def tick(private: Private) -> None:
        nonlocal printed, first
        now, done, steps = time.monotonic(), sum(private.ledger.charged), private.plan.steps
        began, before = first = first or (now, done)
        if now - printed < SECONDS_PER_LINE and not private.is_finished:
            return
        printed = now
        left = ""
        if done > before:
            left = f"{timedelta(seconds=round((now - began) / (done - before) * (steps - done)))} left  "
        print(f"{what} {done:,}/{steps:,}  {left}{details(private)}", file=sys.stderr, flush=True)

    private.on_update(tick)
    yield


def spent(private: Private) -> str:
    """Epsilon charged and promised per group: "ε 0.31/0.5  0.62/1"; nothing where few hold some budget."""
    plan = private.plan
    if has_small_cells(plan.groups):  # a spend may reveal what these few chose, as everyone's does under uniform
        return ""
    groups = range(len(plan.epsilons))[:MOST_GROUPS]
    charged = plan.spent_after(private.ledger.charged, groups)
    shown = [
        f"{_rounded_up(spent, float(plan.epsilons[group]))}/{plan.epsilons[group]:g}"
        for group, spent in zip(groups, charged, strict=True)
    ]
    return "ε " + "  ".join(shown) + ("" if len(shown) == len(plan.epsilons) else " …")


def _rounded_up(spent: float, level: float) -> str:
    """To two places, or to three digits of a level below 0.1; never above the level, which a plan keeps.

    >>> _rounded_up(0.1234, 1.0), _rounded_up(0.0012341, 0.005), _rounded_up(1.9999, 2.0)
    ('0.13', '0.00124', '2.00')
    """
    places = max(2, 2 - math.floor(math.log10(level)))
    return f"{min(math.ceil(spent * 10**places) / 10**places, level):.{places}f}"
