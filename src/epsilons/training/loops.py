"""The batches of a run in groups: one iterable per draw, or per part of the plan."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .private import Private

#: Marks an empty draw among the batches of a loop.
EMPTY_DRAW = object()


def by_draw(private: Private) -> Iterator[Iterator[Any]]:
    """One iterable per remaining draw."""
    batches = private._run()
    while private._has_next:
        ended = private._ended
        yield _of_one_draw(private, batches)
        private._turns.check_draw_was_made(private._ended > ended)
    next(batches, None)  # runs the end of the loop: no draw is left


def by_part(private: Private, n: int) -> Iterator[Iterator[Any]]:
    """One iterable per remaining part of n."""
    batches = private._run()
    for part in range(1, n + 1):
        end = part * private.plan.steps // n
        if _steps_made(private) >= end:
            continue
        if not private._has_next:
            break
        yield _until(private, end, batches)
        private._turns.check_part_is_done()
    next(batches, None)


def _until(private: Private, end: int, batches: Iterator[Any]) -> Iterator[Any]:
    while _steps_made(private) < end and private._has_next:
        yield from _of_one_draw(private, batches)


def _of_one_draw(private: Private, batches: Iterator[Any]) -> Iterator[Any]:
    for batch in batches:
        if batch is EMPTY_DRAW:
            return
        yield batch
        if not private._turns.in_draw:
            return


def _steps_made(private: Private) -> int:
    """How many of the plan's steps come before the next draw."""
    at = private._position
    return sum(phase.steps for phase in private.plan.phases[: at.phase]) + at.step
