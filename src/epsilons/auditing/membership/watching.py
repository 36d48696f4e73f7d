"""Progress of the shadows on stderr: how many are trained, and the time left."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from .shadows import Watch

SECONDS_PER_LINE = 10.0  # where there is no terminal


@contextmanager
def watched(shadows: int, what: str, shown: bool) -> Iterator[Watch]:
    """A function to call with the number of shadows that are done: a live line, or a line every so often."""
    if not shown:
        yield lambda done: None
    elif sys.stderr.isatty():
        with _bar(shadows, what) as watch:
            yield watch
    else:
        yield _Lines(shadows, what)


@contextmanager
def _bar(shadows: int, what: str) -> Iterator[Watch]:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        TextColumn("{task.fields[done]} of {task.total:,} trained"),
        TimeElapsedColumn(),
        TextColumn("passed,"),
        TimeRemainingColumn(),
        TextColumn("left"),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=shadows, done="0")
        yield lambda done: bar.update(task, completed=done, done=f"{int(done):,}")


class _Lines:
    """A line every ten seconds, with the time that is left."""

    def __init__(self, shadows: int, what: str) -> None:
        self._shadows, self._what = shadows, what
        self._printed = time.monotonic()
        self._first: tuple[float, float] | None = None  # blocks of an earlier call cost no time

    def __call__(self, done: float) -> None:
        now = time.monotonic()
        began, before = self._first = self._first or (now, done)
        if now - self._printed < SECONDS_PER_LINE:
            return
        self._printed, left = now, ""
        if done > before:
            seconds = round((now - began) / (done - before) * (self._shadows - done))
            left = f", {timedelta(seconds=seconds)} left"
        print(f"{self._what}: {int(done):,} of {self._shadows:,} trained{left}", file=sys.stderr, flush=True)
