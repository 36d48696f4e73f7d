"""A cache of composed losses that is bounded by their size, because each may have millions of points."""

from __future__ import annotations

from collections.abc import Callable
from threading import Lock

from .histories import Directions, History

Compose = Callable[[History, float], Directions]


class Recent:
    """A function (history, spacing) -> losses that remembers its last results.

    entries  results that are kept at most
    size     points that they may have together; the last result is kept whatever its size
    """

    def __init__(self, function: Compose, entries: int, size: int) -> None:
        self._function, self._entries, self._size = function, entries, size
        self._kept: dict[tuple[History, float], Directions] = {}  # the oldest first
        self._lock = Lock()

    def __call__(self, history: History, spacing: float) -> Directions:
        key = (history, spacing)
        with self._lock:
            found = self._kept.pop(key, None)
        value = found if found is not None else self._function(history, spacing)
        with self._lock:
            self._kept[key] = value
            while len(self._kept) > 1 and (len(self._kept) > self._entries or self.points > self._size):
                self._kept.pop(next(iter(self._kept)))
        return value

    @property
    def points(self) -> int:
        """Points of all results that are kept."""
        return sum(len(losses.probability) for value in self._kept.values() for losses in value)

    def cache_clear(self) -> None:
        """Forget all results."""
        with self._lock:
            self._kept.clear()


def recent(entries: int, size: int) -> Callable[[Compose], Recent]:
    """A decorator that remembers the last results of a function."""
    return lambda function: Recent(function, entries, size)
