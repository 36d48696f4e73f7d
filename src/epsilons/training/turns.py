"""Where a run is in its plan, and the order of calls in a private loop: a batch is issued, then backward, then step."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from ..errors import CallOrderError
from ..ledger.ledger import Ledger
from ..planning import Plan


@dataclass(repr=False, eq=False)
class Position:
    """Where a run is: the next draw, and the number of noisy updates."""

    plan: Plan
    ledger: Ledger
    phase: int = 0
    step: int = 0
    updates: int = 0

    @property
    def is_finished(self) -> bool:
        return self.phase == len(self.plan.phases)

    @property
    def steps_before(self) -> int:
        """How many of the plan's steps come before the next draw."""
        return sum(phase.steps for phase in self.plan.phases[: self.phase]) + self.step

    def skip_finished_phases(self) -> None:
        """Move to the next phase if this one is done, or if its charges are used up."""
        while not self.is_finished and self.step >= self.ledger.end(self.phase):
            self.phase, self.step = self.phase + 1, 0


#: Marks an empty draw among the batches of a loop.
EMPTY_DRAW = object()

#: What may happen next. Nothing may after an error in the middle of a draw, or after the run was closed.
Turn = Literal["draw", "backward", "step", "broken", "closed"]

_ORDER = """The order is:

    for batch in private.batches:
        private.backward(losses)  # of this batch, one per record
        private.step()"""

_WHERE: dict[Turn, str] = {
    "draw": "outside a physical batch, or twice on one",
    "step": "twice on one physical batch",
    "backward": "before private.backward",
    "broken": "after an error in this draw, which is never applied",
    "closed": "after private.close()",
}


class Turns:
    """Whose turn it is.

    turn        the call that must come next
    in_draw     True from a draw's charge to its update
    ended       number of draws that ended in this process, applied or not
    is_stopped  True if no further draw is to be made
    """

    def __init__(self, position: Position) -> None:
        self._position = position
        self.turn: Turn = "draw"
        self.in_draw, self.is_stopped = False, False
        self.ended = 0
        self._loops = 0  # how many loops over the batches were begun; only the latest may go on
        self._lock = threading.Lock()

    @property
    def has_next(self) -> bool:
        """True if there is another draw to make."""
        return not self._position.is_finished and not self.is_stopped

    def end_draw(self) -> None:
        self.in_draw = False
        self.ended += 1

    def take(self, turn: Literal["backward", "step"], then: Turn) -> None:
        """Raises CallOrderError if it is not the turn of this call. Of two threads, one has it."""
        with self._lock:
            if self.turn != turn:
                raise CallOrderError(f"private.{turn} was called {_WHERE[self.turn]}. {_ORDER}")
            self.turn = then

    def begin_loop(self) -> int:
        """The number of a new loop. Raises CallOrderError in the middle of a draw, and after closing."""
        if self.turn == "closed":
            raise CallOrderError("This run is closed. Call make_private again for another one.")
        if self.in_draw:
            raise CallOrderError(
                "The loop over private.batches was left in the middle of a draw and entered again. A draw must be "
                "finished: drawing again after looking at it would not be Poisson sampling. " + _ORDER
            )
        with self._lock:
            self._loops += 1
            return self._loops

    def check_latest(self, loop: int, is_next: bool = True) -> None:
        """Raises CallOrderError if another loop was begun after this one.

        is_next   False if the loop's draw is not the next one. An older loop may have made it in advance, and its noise
                  must never be added to a second sum
        """
        if loop != self._loops or not is_next:
            raise CallOrderError("Another loop over private.batches was begun since; go on with that one.")

    def check_batch_is_done(self, loop: int) -> None:
        """Raises CallOrderError if a loop asks for the next batch without having finished the last one."""
        self.check_latest(loop)
        if self.turn == "closed":
            middle = " in the middle of a draw, which is never applied" if self.in_draw else ""
            raise CallOrderError(f"This run was closed{middle}. Leave the loop after private.close().")
        if self.turn == "broken":
            raise CallOrderError(
                "private.backward failed on a physical batch of this draw, so the draw cannot be finished."
            )
        if self.turn != "draw":
            missing = "private.backward(losses)" if self.turn == "backward" else "private.step()"
            self.turn = "broken"
            raise CallOrderError(f"The loop went on to the next physical batch without {missing}. {_ORDER}")


def by_draw(batches: Iterator[Any], turns: Turns, end_body: Callable[[], None]) -> Iterator[Iterator[Any]]:
    """The batches of a loop, in one iterable per remaining draw.

    end_body   called after the body of a draw's last batch; what the caller does then follows empty draws, too
    """
    while turns.has_next:
        ended = turns.ended
        yield _of_one_draw(batches, turns, end_body)
        if turns.ended == ended:
            raise CallOrderError(
                "The next of private.draws was asked for before the last one was made. Iterate each to its end:\n\n"
                "    for draw in private.draws:\n"
                "        for batch in draw:\n"
                "            private.backward(losses)  # of this batch, one per record\n"
                "            private.step()"
            )
    next(batches, None)  # runs the end of the loop: no draw is left


def by_part(
    batches: Iterator[Any], turns: Turns, end_body: Callable[[], None], position: Position, n: int
) -> Iterator[Iterator[Any]]:
    """The batches of a loop, in one iterable per remaining part of n. end_body: as of `by_draw`"""

    def until(end: int) -> Iterator[Any]:
        while position.steps_before < end and turns.has_next:
            yield from _of_one_draw(batches, turns, end_body)

    for part in range(1, n + 1):
        end = part * position.plan.steps // n
        if position.steps_before >= end:
            continue
        if not turns.has_next:
            break
        yield until(end)
        if turns.in_draw:
            raise CallOrderError(
                "The next of private.epochs was asked for in the middle of a draw. Leave a part only after "
                "private.step() returned True, or iterate it to its end. " + _ORDER
            )
    next(batches, None)


def _of_one_draw(batches: Iterator[Any], turns: Turns, end_body: Callable[[], None]) -> Iterator[Any]:
    for batch in batches:
        if batch is EMPTY_DRAW:
            return
        yield batch
        if not turns.in_draw:
            end_body()
            return
