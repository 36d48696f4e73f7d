"""Work for several threads: functions that spend their time outside Python's lock, as NumPy's and hashlib's do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor


def for_each(items: Sequence[int], work: Callable[[int], None], threads: int) -> None:
    """Do the work for every item; by threads that end with this call, unless one is enough. Raises what it raises."""
    if min(threads, len(items)) <= 1:
        for item in items:
            work(item)
        return
    with ThreadPoolExecutor(min(threads, len(items))) as pool:
        for _ in pool.map(work, items):  # raises what the work raised
            pass
