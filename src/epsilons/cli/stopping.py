"""Ctrl-C, also where it is swallowed.

Python raises it wherever it happens to be, and libraries catch all and everything while they are imported, as some are
by a first step.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def swallowed_or_not() -> Iterator[Callable[[object], None]]:
    """What to call between steps: it raises KeyboardInterrupt if Ctrl-C was pressed and nothing has come of it."""
    if (
        threading.current_thread() is not threading.main_thread()
        or signal.getsignal(signal.SIGINT) is not signal.default_int_handler
    ):
        yield lambda _: None  # somebody else sees to it
        return
    pressed = False

    def press(number: int, frame: FrameType | None) -> None:
        nonlocal pressed
        pressed = True
        signal.default_int_handler(number, frame)

    def check(_: object) -> None:
        if pressed:
            raise KeyboardInterrupt

    signal.signal(signal.SIGINT, press)
    try:
        yield check
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
