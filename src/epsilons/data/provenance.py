"""Where the bounds, categories and classes of a config come from: declared, or read off the data.

A bound that was read off private data is an output of these data, and no budget covers it. A config says in
`data.read_off` which of its columns have such values. Without this key the origin is not stated, and counts as read off
the data wherever a promise depends on it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

What = Literal["bounds", "categories", "classes", "preprocessing"]
Source = Literal["declared", "read off the data", "not stated"]


@dataclass(frozen=True)
class Provenance:
    """Where the values that a config states about one column come from.

    column  name of the column; the target's for its classes
    what    "bounds" of a number, "categories" of an input, "classes" of the target, or "preprocessing" in the caller's
            own code
    source  "declared", "read off the data", or "not stated"
    """

    column: str
    what: What
    source: Source

    @property
    def is_declared(self) -> bool:
        """True if the values do not depend on the data, as the config states."""
        return self.source == "declared"

    def to_dict(self) -> dict[str, str]:
        """The fields as JSON values, as run.json holds them in metadata.provenance."""
        return asdict(self)


def provenance_of(stated: Mapping[str, What], read_off: Sequence[str] | None) -> tuple[Provenance, ...]:
    """The provenance of each stated value.

    stated    column -> what the config states about it
    read_off  the columns with values that were read off the data; None if the config does not say

    >>> provenance_of({"age": "bounds", "job": "categories"}, ["job"])[1].source
    'read off the data'
    """

    def source(column: str) -> Source:
        if read_off is None:
            return "not stated"
        return "read off the data" if column in read_off else "declared"

    return tuple(Provenance(column, what, source(column)) for column, what in stated.items())


def in_words(entries: Iterable[Provenance]) -> str:
    """What these entries are about, for messages.

    >>> in_words([Provenance("age", "bounds", "declared"), Provenance("y", "classes", "declared")])
    "the bounds of 'age', and the classes of 'y'"
    """
    columns: dict[str, list[str]] = {}
    for entry in entries:
        columns.setdefault(entry.what, []).append(repr(entry.column))
    return ", and ".join(f"the {what} of {', '.join(names)}" for what, names in columns.items())


def undeclared(values: Iterable[Any]) -> list[Provenance]:
    """The entries that are not declared, from values as in `to_dict`. An entry of another form is not declared."""
    entries = [_entry(value) for value in values]
    return [entry for entry in entries if not entry.is_declared]


def _entry(value: Any) -> Provenance:
    try:
        return Provenance(**value)
    except TypeError:
        return Provenance("(unknown)", "bounds", "not stated")
