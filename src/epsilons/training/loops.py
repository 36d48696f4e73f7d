"""The loop of a Private over its draws, and the same loop in groups: by draw, or by part of the plan."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

import numpy as np
import torch

from ..ledger import Ledger
from ..planning import Plan
from .datasets import PhysicalBatch, Source
from .distributed import Ranks
from .microbatches import Issued, Issuer
from .resume import Checkpointer, Position
from .sampling import Draws, physical_batches
from .turns import Turns

#: Marks an empty draw among the batches of a loop.
EMPTY_DRAW = object()


class Loopable(Protocol):
    """The parts of a Private that its loop reads and drives."""

    plan: Plan
    ledger: Ledger
    ranks: Ranks
    _draws: Draws
    _source: Source
    _device: torch.device
    _largest: int
    _turns: Turns
    _position: Position
    _issuer: Issuer
    _checkpointer: Checkpointer
    _restarted: bool
    _ended: int

    @property
    def is_finished(self) -> bool: ...

    @property
    def _has_next(self) -> bool: ...

    def _begin_draw(self) -> bool: ...

    def _issue(self, issued: Issued, batch: Any) -> Any: ...

    def _update(self) -> None: ...

    def _settle(self) -> None: ...


def loop(private: Loopable) -> Iterator[Any]:
    """Every batch that the caller must process, and EMPTY_DRAW after the update of an empty draw."""
    private._turns.begin_loop()
    try:
        with private.ranks.reporting_errors():
            yield from _until_the_end(private)
    finally:
        private._issuer.stop_watching()


def _until_the_end(private: Loopable) -> Iterator[Any]:
    turns, position, source = private._turns, private._position, private._source
    turns.loops += 1
    number = turns.loops
    private._checkpointer.restore_generators()
    while private._has_next:
        private._restarted = False
        for physical, batch in source.stream(remaining(private), private._device, private._draws.randomness):
            turns.check_latest(number, (physical.phase, physical.step) == (position.phase, position.step))
            if physical.number == 0 and not private._begin_draw():
                return
            if batch is None:
                private._update()
                yield EMPTY_DRAW
                turns.check_batch_is_done(number)
            else:
                for issued, part in private._issuer.issue(physical, batch, private._draws.randomness):
                    yield private._issue(issued, part)
                    turns.check_batch_is_done(number)
            if private._restarted:
                break  # under another key, so other records are drawn
    if private.is_finished:
        private._settle()


def remaining(private: Loopable) -> Iterator[PhysicalBatch]:
    """Every physical batch of this rank from the current position on."""
    position, plan, ledger = private._position, private.plan, private.ledger
    for phase in range(position.phase, len(plan.phases)):
        first = position.step if phase == position.phase else 0
        for step in range(first, ledger.end(phase)):
            drawn = private.ranks.part(private._draws.at(phase, step))
            parts = physical_batches(drawn, private._largest) or [np.empty(0, dtype=np.int64)]
            for number, indices in enumerate(parts):
                yield PhysicalBatch(phase, step, number, len(parts), indices)


def by_draw(private: Loopable) -> Iterator[Iterator[Any]]:
    """One iterable per remaining draw."""
    batches = loop(private)
    while private._has_next:
        ended = private._ended
        yield _of_one_draw(private, batches)
        private._turns.check_draw_was_made(private._ended > ended)
    next(batches, None)  # runs the end of the loop: no draw is left


def by_part(private: Loopable, n: int) -> Iterator[Iterator[Any]]:
    """One iterable per remaining part of n."""
    batches = loop(private)
    for part in range(1, n + 1):
        end = part * private.plan.steps // n
        if _steps_made(private) >= end:
            continue
        if not private._has_next:
            break
        yield _until(private, end, batches)
        private._turns.check_part_is_done()
    next(batches, None)


def _until(private: Loopable, end: int, batches: Iterator[Any]) -> Iterator[Any]:
    while _steps_made(private) < end and private._has_next:
        yield from _of_one_draw(private, batches)


def _of_one_draw(private: Loopable, batches: Iterator[Any]) -> Iterator[Any]:
    for batch in batches:
        if batch is EMPTY_DRAW:
            return
        yield batch
        if not private._turns.in_draw:
            return


def _steps_made(private: Loopable) -> int:
    """How many of the plan's steps come before the next draw."""
    at = private._position
    return sum(phase.steps for phase in private.plan.phases[: at.phase]) + at.step
