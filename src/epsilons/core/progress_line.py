"""How far a work of many steps is, on stderr: a live line in a terminal, elsewhere a line now and then."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from functools import partial
from importlib.util import find_spec
from typing import Any

from ..errors import app_packages, printable

SECONDS_PER_LINE = 10.0  # where there is no terminal


def can_rewrite() -> bool:
    """True in a terminal where rich can rewrite a line."""
    return sys.stderr.isatty() and find_spec("rich") is not None


@contextmanager
def live_line(
    columns: Sequence[str], total: float | None = None, hidden: bool = False, **fields: Any
) -> Iterator[Callable[..., None]]:
    """A line that is rewritten in place, and gone at the end. Yields a function that takes `completed` and fields.

    columns  "<count>", "<bar>", "<elapsed>", "<remaining>", or a text with fields
    """
    with app_packages():
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            ProgressColumn,
            TextColumn,
            TimeElapsedColumn,
            TimeRemainingColumn,
        )
    kinds: dict[str, Callable[[], ProgressColumn]] = {
        "<count>": MofNCompleteColumn,
        "<bar>": partial(BarColumn, bar_width=24),
        "<elapsed>": TimeElapsedColumn,
        "<remaining>": TimeRemainingColumn,
    }
    made = [kinds[column]() if column in kinds else TextColumn(column) for column in columns]
    with Progress(*made, console=Console(stderr=True), transient=True, disable=hidden) as progress:
        task = progress.add_task("", total=total, **fields)
        yield partial(progress.update, task)


def log(run: object, text: str) -> None:
    """Print a line on stderr, where there is no terminal: the time in UTC, which run, and how far it is."""
    now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    print(f"{now}  {printable(run)}  {text}", file=sys.stderr, flush=True)


class Pace:
    """When to print a line again, and the time that is left.

    The time left follows from the steps after the first call. The time before is not counted, because it includes what
    is done once, or the steps of a process that was cut off.
    """

    def __init__(self, total: float, seconds: float = SECONDS_PER_LINE) -> None:
        self._total, self._seconds = total, seconds
        self._shown = time.monotonic()
        self._first: tuple[float, float] | None = None  # (time, steps done) at the first call
        self.left: timedelta | None = None

    def is_due(self, done: float, is_last: bool = False) -> bool:
        """Call it after every step. True for the last one, and if nothing was shown for a while."""
        now = time.monotonic()
        began, before = self._first = self._first or (now, done)
        if now - self._shown < self._seconds and not is_last:
            return False
        self._shown = now
        if done > before:
            self.left = timedelta(seconds=round((now - began) / (done - before) * (self._total - done)))
        return True
