"""The order of calls in a private loop: a batch is issued, then backward, then step."""

from __future__ import annotations

from typing import Literal

from ..errors import CallOrderError

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

    turn      the call that must come next
    in_draw   True from a draw's charge to its update
    loops     how many loops over the batches were begun; only the latest may go on
    """

    def __init__(self) -> None:
        self.turn: Turn = "draw"
        self.in_draw = False
        self.loops = 0

    def require(self, turn: Literal["backward", "step"]) -> None:
        """Raises CallOrderError if it is not the turn of this call."""
        if self.turn != turn:
            raise CallOrderError(f"private.{turn} was called {_WHERE[self.turn]}. {_ORDER}")

    def begin_loop(self) -> None:
        """A loop over the batches begins. Raises CallOrderError in the middle of a draw, and after closing."""
        if self.turn == "closed":
            raise CallOrderError("This run is closed. Call make_private again for another one.")
        if self.in_draw:
            raise CallOrderError(
                "The loop over private.batches was left in the middle of a draw and entered again. A draw must be "
                "finished: drawing again after looking at it would not be Poisson sampling. " + _ORDER
            )

    def check_latest(self, loop: int, is_next: bool = True) -> None:
        """Raises CallOrderError if another loop was begun after this one.

        is_next   False if the loop's draw is not the next one. An older loop may have made it in advance, and its noise
                  must never be added to a second sum
        """
        if loop != self.loops or not is_next:
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

    def check_draw_was_made(self, was_made: bool) -> None:
        """Raises CallOrderError if the next of private.draws is requested too early."""
        if not was_made:
            raise CallOrderError(
                "The next of private.draws was asked for before the last one was made. Iterate each to its end:\n\n"
                "    for draw in private.draws:\n"
                "        for batch in draw:\n"
                "            private.backward(losses)  # of this batch, one per record\n"
                "            private.step()"
            )

    def check_part_is_done(self) -> None:
        """Raises CallOrderError if the next of private.epochs is requested too early."""
        if self.in_draw:
            raise CallOrderError(
                "The next of private.epochs was asked for in the middle of a draw. Leave a part only after "
                "private.step() returned True, or iterate it to its end. " + _ORDER
            )
