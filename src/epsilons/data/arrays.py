"""What every reader returns: inputs and targets, one row per record, and the table they came from."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from ..errors import DataError
from ..tabular.table_files import pyarrow


@dataclass(frozen=True, eq=False)
class Encoded:
    """The inputs of a large table, which are made when some of them are needed: `np.asarray(encoded[rows])`.

    numbers  (rows, numbers) the first columns of the inputs
    codes    (rows, categories) the place of each record's value among those of its category, -1 for none of them
    widths   (categories,) how many values each category has: they become columns with a 1 or only zeros
    rows     (records,) which of these rows; all without it
    """

    numbers: npt.NDArray[np.float32]
    codes: npt.NDArray[np.signedinteger[Any]]
    widths: tuple[int, ...]
    rows: npt.NDArray[np.integer[Any]] | None = None

    dtype = np.dtype(np.float32)

    def __len__(self) -> int:
        return len(self.numbers if self.rows is None else self.rows)

    @property
    def shape(self) -> tuple[int, int]:
        return len(self), self.numbers.shape[1] + sum(self.widths)

    def __getitem__(self, records: slice | npt.NDArray[np.integer[Any]]) -> Encoded:
        """These records, in this order."""
        return self.at(self.places[records])

    @property
    def places(self) -> npt.NDArray[np.integer[Any]]:
        """(records,) the row of each record."""
        return np.arange(len(self), dtype=np.int32) if self.rows is None else self.rows

    def at(self, rows: npt.NDArray[np.integer[Any]]) -> Encoded:
        """The records in these rows of the table."""
        return replace(self, rows=rows)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> npt.NDArray[np.float32]:
        """(records, numbers and one column for each value of a category)."""
        rows = slice(None) if self.rows is None else self.rows
        numbers, codes = self.numbers[rows], self.codes[rows]
        made = np.zeros(self.shape, dtype=np.float32)
        made[:, : numbers.shape[1]] = numbers
        first = numbers.shape[1]
        for category, width in enumerate(self.widths):
            known = np.flatnonzero(codes[:, category] >= 0)
            made[known, first + codes[known, category].astype(np.int64)] = 1.0
            first += width
        return made if dtype is None else made.astype(dtype, copy=False)


class Arrays(NamedTuple):
    """Inputs and targets, one row per record.

    inputs   (records, …) 32-bit floats, or 32-bit integers if they are ids of tokens
    targets  (records,) class indices, or (records, 1) 32-bit floats
    """

    inputs: npt.NDArray[np.float32 | np.int32] | Encoded
    targets: npt.NDArray[Any]

    def subset(self, indices: npt.NDArray[np.int64]) -> Arrays:
        """These records, in this order."""
        return Arrays(self.inputs[indices], self.targets[indices])

    def whole(self) -> Arrays:
        """The same with inputs that are all in memory."""
        return Arrays(np.asarray(self.inputs), self.targets)


@dataclass(frozen=True, eq=False)
class Source:
    """A file's records, ready for training.

    arrays   inputs and targets
    classes  names of the classes, in the order of their indices; None if the target is a number
    table    the pyarrow.Table they came from, which may hold a column of budgets; None if there is none
    texts    (records, columns) texts that fixed features take; the inputs are then the other columns. None: no texts
    """

    arrays: Arrays
    classes: tuple[str, ...] | None
    table: Any = None
    texts: npt.NDArray[np.object_] | None = None

    def subset(self, indices: npt.NDArray[np.int64]) -> Source:
        """These records, in this order, without the table."""
        texts = None if self.texts is None else self.texts[indices]
        return Source(self.arrays.subset(indices), self.classes, None, texts)

    def chosen(self, kept: npt.NDArray[np.bool_]) -> Source:
        """The records where `kept` (records,) is True, with their rows of the table. Raises DataError if none is."""
        if kept.all():
            return self
        if not kept.any():
            raise DataError(f"All {len(kept):,} records are left out, so no record remains.")
        table = None if self.table is None else self.table.filter(pyarrow.array(kept))
        return replace(self.subset(np.flatnonzero(kept)), table=table)

    def __len__(self) -> int:
        return len(self.arrays.targets)


def check_class_indices(targets: npt.NDArray[np.int64], classes: tuple[str, ...] | None, what: str) -> tuple[str, ...]:
    """The names of the classes; without any, "0", "1", … up to the largest index.

    what  the targets and where they are, for messages: "labels in people.parquet"

    Raises DataError for an index without a name.
    """
    names = classes if classes is not None else tuple(map(str, range(int(targets.max(initial=0)) + 1)))
    bad = (targets < 0) | (targets >= len(names))
    if bad.any():
        raise DataError(
            f"{bad.sum():,} of {bad.size:,} {what} are not class indices from 0 to {len(names) - 1}. Add the class to "
            "data.classes, or correct the rows."
        )
    return names


# -- Where the bounds, categories and classes of a config come from: declared, or read off the data
#
# A bound that was read off private data is an output of these data, and no budget covers it. A config says in
# `data.read_off` which of its columns have such values. Without this key the origin is not stated, and counts as read
# off the data wherever a promise depends on it.

What = Literal["bounds", "categories", "classes", "preprocessing"]
HowKnown = Literal["declared", "read off the data", "not stated"]


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
    source: HowKnown

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

    def source(column: str) -> HowKnown:
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
