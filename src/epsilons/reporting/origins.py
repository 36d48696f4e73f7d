"""Where bounds, categories and classes come from: declared, or read off the data, which no budget covers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..data.arrays import Provenance, in_words, undeclared
from .sentences import listed

_ONE = {"bounds": "the bounds of one column", "categories": "the categories of one column", "classes": "the classes"}
_MANY = {"bounds": "the bounds of {} columns", "categories": "the categories of {} columns", "classes": "the classes"}


@dataclass(frozen=True)
class Origins:
    """What preprocessing depends on.

    read_off    what was read off the data, in words; None if nothing was
    not_stated  what may have been: its origin is not stated; None if all is stated
    recorded    False if the run says nothing about it
    sentences   the same for readers
    """

    read_off: str | None
    not_stated: str | None
    recorded: bool
    sentences: tuple[str, ...]


def origins_of(entries: Any, release: bool) -> Origins:
    """From the entries in run.json. A report for release names no columns."""
    if not isinstance(entries, list):
        return Origins(None, None, False, (_NOT_RECORDED,))
    open_ones = [_plain(entry) for entry in undeclared(entries)]
    read_off = [entry for entry in open_ones if entry.source == "read off the data"]
    others = [entry for entry in open_ones if entry.source != "read off the data"]
    name = _counted if release else in_words
    first, second = (name(some) if some else None for some in (read_off, others))
    return Origins(first, second, True, tuple(_sentences(first, second, len(entries))))


_NOT_RECORDED = (
    "This run did not record where the bounds, categories and classes of its preprocessing come from. They are covered "
    "only if they were not read off these data."
)


def _sentences(read_off: str | None, not_stated: str | None, entries: int) -> list[str]:
    sentences = []
    if read_off:
        sentences.append(
            f"NOT COVERED: {read_off} were read off the private data, without noise and outside of every budget. They "
            "may show what single people have, such as the highest income. To be covered, replace them by values that "
            "are known without looking at the data, and train again."
        )
    if not_stated:
        sentences.append(
            f"Not stated: where {not_stated} come from. They are covered only if they were not read off these data."
        )
    if not sentences and entries:
        sentences.append(
            "All bounds, categories and classes of the preprocessing were declared: the run’s config states that they "
            "were not read off the data. Nothing checked this statement."
        )
    return sentences


def _plain(entry: Provenance) -> Provenance:
    """The entry, with the kind of its values among those that are known."""
    return entry if str(entry.what) in _ONE else replace(entry, what="bounds")


def _counted(entries: Sequence[Provenance]) -> str:
    """
    >>> _counted([Provenance("age", "bounds", "declared"), Provenance("fee", "bounds", "declared")])
    'the bounds of 2 columns'
    """
    counts = Counter(entry.what for entry in entries)
    return listed([_ONE[what] if count == 1 else _MANY[what].format(count) for what, count in counts.items()])
