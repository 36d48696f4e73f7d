"""Budgets: the epsilon of each record.

There is one value per record, in data-set order. Records with the same (epsilon, delta) form a group. Groups are
ordered strictest first; all values per group in this package are in that order.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from .disclosure import SMALLEST_SHOWN, how_many
from .errors import BudgetError, EpsilonsWarning
from .mechanism import SMALLEST_DELTA, FloatArray, Groups, IntArray, read_only
from .tabular import Marks, as_text, column_of, emptied, marks_of, numbers, read_table

DEFAULT_DELTA = 1e-5


class Budgets:
    """One privacy budget per record, in data-set order.

    epsilon  (records,) each > 0 and finite, in nats
    delta    one probability for all, or (records,); each in [1e-9, 1)

    Raises BudgetError when a value is not usable; the message gives counts and rows, never values.

    >>> budgets = Budgets([3.0, 1.0, 3.0, 2.0], delta=1e-5)
    >>> budgets
    Budgets(4 records, 3 groups)
    >>> budgets.epsilons
    array([1., 2., 3.])
    >>> budgets.counts
    array([1, 1, 2])
    >>> budgets.group
    array([2, 0, 2, 1])
    """

    def __init__(self, epsilon: npt.ArrayLike, delta: npt.ArrayLike = DEFAULT_DELTA) -> None:
        values = _as_floats(epsilon, "budgets")
        if values.ndim != 1 or len(values) == 0:
            raise BudgetError(
                f"Budgets must be a flat list with one epsilon per record, got an array of shape {values.shape}."
            )
        _check(_usable(values), "budgets", "positive, finite numbers")
        deltas = _as_floats(delta, "deltas")
        if deltas.ndim > 1 or (deltas.ndim == 1 and len(deltas) != len(values)):
            raise BudgetError(
                f"delta must be one number or one per record, got {len(values):,} budgets and deltas of shape "
                f"{deltas.shape}."
            )
        _check_delta(deltas, len(values))
        self._epsilon = values
        self._delta = np.broadcast_to(deltas, values.shape)
        order = np.lexsort([self._delta, self._epsilon])
        ordered = np.stack([self._epsilon[order], self._delta[order]])
        first = np.concatenate([[True], (ordered[:, 1:] != ordered[:, :-1]).any(axis=0)])
        group = np.empty(len(values), dtype=np.int64)
        group[order] = np.cumsum(first) - 1
        self._group: IntArray = read_only(group)
        self._groups = Groups(ordered[0, first], ordered[1, first], np.bincount(group))

    # -- where budgets come from -------------------------------------------------------------------

    @classmethod
    def from_csv(
        cls,
        path: str | Path,
        *,
        column: str = "epsilon",
        delta: npt.ArrayLike = DEFAULT_DELTA,
        delta_column: str | None = None,
        tiers: Mapping[str, float] | None = None,
        separator: str | None = None,
        decimal: str | None = None,
    ) -> Budgets:
        """Read one column of a .csv, .tsv or .parquet file, one row per record in data-set order.

        column        name of the column with each record's epsilon, or with the name of its tier
        delta         one probability for all, or (records,)
        delta_column  name of a column with a delta per record; replaces `delta`
        tiers         {name: epsilon}, for example {"strict": 0.5, "open": 8.0}
        separator     what separates the cells of a text file, for example ";"; without it, the first rows decide
        decimal       "," for numbers with decimal commas

        Raises BudgetError if the file or column is missing, or a cell is not a number or not the name of a tier.
        """
        # Cells are read as text and parsed here, because the reader of .csv files reads 0x10 as 16.
        texts = [column, *([delta_column] if delta_column else [])]
        table = read_table(Path(path), "budgets", BudgetError, texts, Marks(separator, decimal))
        return cls.from_table(table, Path(path), column=column, delta=delta, delta_column=delta_column, tiers=tiers)

    from_parquet = from_csv

    @classmethod
    def from_table(
        cls,
        table: Any,
        path: Path,
        *,
        column: str = "epsilon",
        delta: npt.ArrayLike = DEFAULT_DELTA,
        delta_column: str | None = None,
        tiers: Mapping[str, float] | None = None,
    ) -> Budgets:
        """The same from a pyarrow.Table that was read from `path`; messages name the path."""
        epsilon = _column(table, column, path) if tiers is None else _tiers(table, column, path, tiers)
        return cls(epsilon, delta if delta_column is None else _column(table, delta_column, path))

    @classmethod
    def from_shares(
        cls,
        shares: Mapping[float, float],
        *,
        records: int,
        delta: float = DEFAULT_DELTA,
        seed: int = 0,
    ) -> Budgets:
        """Simulated budgets: each epsilon goes to its share of `records` records, chosen at random.

        shares  {epsilon: share}; shares must add up to 1, and are rounded by largest remainder to whole counts
        delta   one probability for all
        seed    of the random order

        Raises BudgetError for shares that do not add up to 1, or that come to less than one record.

        >>> Budgets.from_shares({1.0: .34, 2.0: .43, 3.0: .23}, records=60_000, delta=1e-5).counts
        array([20400, 25800, 13800])
        """
        epsilon = np.repeat(*_share_counts(shares, records))
        return cls(np.random.default_rng(seed).permutation(epsilon), delta)

    @classmethod
    def by_class(
        cls, targets: npt.ArrayLike, epsilons: Mapping[Any, float], *, delta: npt.ArrayLike = DEFAULT_DELTA
    ) -> Budgets:
        """One epsilon per class: each record gets the epsilon of its class.

        targets   (records,) the class of each record, in data-set order
        epsilons  {class: epsilon}; it may name classes that no record has, as a list that was fixed beforehand does
        delta     one probability for all, or (records,)

        Such budgets publish the class of every record wherever the list of budgets is public; training notes it.

        Raises BudgetError for a class without an epsilon, and for targets that are not one class per record.

        >>> Budgets.by_class([0, 1, 1, 2], {0: 1.0, 1: 2.0, 2: 2.0}, delta=1e-3).counts
        array([1, 3])
        """
        _check(_usable(_as_floats(list(epsilons.values()), "epsilons")), "epsilons", "positive, finite numbers")
        classes, index, counts = _classes(targets)
        without = {name: n for name, n in zip(classes, counts, strict=True) if name not in epsilons}
        if without:
            # Only classes of many records are named: the others are values of a few people.
            named = ", ".join(repr(name) for name, n in without.items() if n >= SMALLEST_SHOWN)
            which = f" ({named})" if named else ""
            raise BudgetError(
                f"{len(without):,} of {len(classes):,} classes have no epsilon{which}. Give one for each class."
            )
        return cls(np.array([epsilons[name] for name in classes], dtype=np.float64)[index], delta)

    def subset(self, indices: Sequence[int] | npt.NDArray[Any]) -> Budgets:
        """The budgets of these records, in this order (as `torch.utils.data.Subset` orders its records).

        indices: whole numbers, counted from 0, or a (records,) mask of True and False. Raises BudgetError for anything
        else, and if no record is chosen.

        >>> Budgets([3.0, 1.0, 2.0]).subset([2, 0]).epsilons
        array([2., 3.])
        """
        chosen = _indices(indices, len(self))
        if len(chosen) == 0:
            raise BudgetError("A subset needs at least one record.")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", EpsilonsWarning)
            return Budgets(self._epsilon[chosen], self._delta[chosen])

    # -- what they are -----------------------------------------------------------------------------

    @property
    def epsilons(self) -> FloatArray:
        """(groups,) epsilon of each group, strictest first; equal epsilons at different deltas stay apart."""
        return self._groups.epsilons

    @property
    def delta(self) -> FloatArray:
        """(groups,) delta of each group."""
        return self._groups.deltas

    @property
    def counts(self) -> IntArray:
        """(groups,) records in each group."""
        return self._groups.counts

    @property
    def group(self) -> IntArray:
        """(records,) group of each record: its index into `epsilons`."""
        return self._group

    @property
    def groups(self) -> Groups:
        """epsilons, deltas and counts of all groups as one value."""
        return self._groups

    @property
    def records(self) -> int:
        """Number of records."""
        return len(self._epsilon)

    @cached_property
    def shares(self) -> FloatArray:
        """(groups,) part of all records in each group; adds up to 1."""
        shares: FloatArray = read_only(self.counts / self.counts.sum())
        return shares

    def __len__(self) -> int:
        return self.records

    def __repr__(self) -> str:
        return f"Budgets({self.records:,} records, {len(self._groups):,} groups)"


def _share_counts(shares: Mapping[float, float], records: int) -> tuple[FloatArray, IntArray]:
    """(epsilons, counts): `records` divided by `shares`, rounded by largest remainder. Raises BudgetError."""
    if not shares:
        raise BudgetError('Got no shares; give at least one epsilon, e.g. "1:34%,2:43%,3:23%".')
    if records != int(records) or records < 1:
        raise BudgetError(f"The number of records must be a whole number of at least 1, got {records}.")
    epsilons = _as_floats(sorted(shares), "epsilons")
    parts = _as_floats([shares[epsilon] for epsilon in sorted(shares)], "shares")
    _check(_usable(epsilons), "epsilons", "positive, finite numbers")
    _check(_usable(parts), "shares", "positive, finite numbers")
    if not math.isclose(float(parts.sum()), 1.0, abs_tol=1e-6):
        raise BudgetError(f"Shares must add up to 1 (100 %); these add up to {parts.sum():.6g}.")
    exact = parts / parts.sum() * records
    counts = np.floor(exact).astype(np.int64)
    by_remainder = np.argsort(-(exact - counts), kind="stable")
    counts[by_remainder[: int(records) - int(counts.sum())]] += 1
    if (counts == 0).any():
        raise BudgetError(
            f"{(counts == 0).sum()} of {len(counts)} shares come to less than one of {records:,} records. Give more "
            "records, or leave those epsilons out."
        )
    return epsilons, counts


def _classes(targets: npt.ArrayLike) -> tuple[list[Any], IntArray, IntArray]:
    """(classes,) the classes, (records,) the index of each record's class, (classes,) records. Raises BudgetError."""
    try:
        array = np.asarray(targets)
        if array.ndim != 1 or len(array) == 0:
            raise BudgetError(f"The targets must be a flat list of one class per record, got shape {array.shape}.")
        classes, index, counts = np.unique(array, return_inverse=True, return_counts=True)
    except (TypeError, ValueError):
        raise BudgetError("The targets must be a flat list of classes of one type, got a mixture.") from None
    return classes.tolist(), index, counts


# -- checks and readers ---------------------------------------------------------------------------------


def _indices(chosen: npt.ArrayLike, records: int) -> IntArray:
    """The indices that a list of indices or a (records,) mask of True and False selects."""
    try:
        array = np.asarray(chosen)
    except ValueError:  # lists of different lengths
        array = np.empty((), dtype=object)
    if array.dtype == bool and array.shape == (records,):
        return np.flatnonzero(array)
    if array.shape == (0,) and array.dtype != bool:
        return np.empty(0, dtype=np.int64)
    if array.ndim != 1 or not np.issubdtype(array.dtype, np.integer):
        raise BudgetError(
            "A subset takes a flat list of record indices, whole numbers counted from 0, or a mask of True and False "
            f"for each of the {records:,} records, got an array of {array.dtype} of shape {array.shape}."
        )
    outside = (array < 0) | (array >= records)
    if outside.any():
        raise BudgetError(
            f"A subset takes record indices in 0..{records - 1:,}, but {outside.sum():,} of {len(array):,} are outside "
            f"(first at position {int(outside.argmax()):,})."
        )
    return array.astype(np.int64)


def _as_floats(values: npt.ArrayLike, what: str) -> FloatArray:
    if np.ma.is_masked(values):
        raise BudgetError(f"Some {what} are masked. Every record needs one; fill them in, or drop those records.")
    try:
        return np.array(values, dtype=np.float64)
    except (TypeError, ValueError):
        raise BudgetError(f"The {what} are not all numbers: expected a flat list of numbers.") from None


def _usable(values: FloatArray) -> npt.NDArray[np.bool_]:
    return np.isfinite(values) & (values > 0)


def _check(good: npt.NDArray[np.bool_], what: str, expected: str) -> None:
    bad = ~np.atleast_1d(good)
    if bad.any():
        raise BudgetError(
            f"{bad.sum():,} of {bad.size:,} {what} are not {expected} (first at row {int(bad.argmax()):,}, counted "
            "from 0). To leave records out, drop their rows before planning and training, or write in a config what "
            'means that: [budgets] zero = "left out".'
        )


def _check_delta(deltas: FloatArray, records: int) -> None:
    # Negated, so that NaN is refused, too.
    if not ((deltas >= SMALLEST_DELTA) & (deltas < 1)).all():
        raise BudgetError(
            f"delta must be between {SMALLEST_DELTA:g} and 1 (1 excluded): double precision cannot certify a smaller "
            f"one. Usual values are well below 1/records = {1 / records:.2g}."
        )
    if is_large(deltas, records):
        warnings.warn(LARGE_DELTA.format(1 / records), EpsilonsWarning, stacklevel=3)


LARGE_DELTA = (
    "delta is not below 1/records = {:.2g}: a mechanism that publishes one person's record would pass. Choose a "
    "smaller delta."
)


def is_large(deltas: FloatArray, records: int) -> bool:
    """Whether some delta allows a mechanism that publishes one of the records."""
    return records > 1 and bool((deltas >= 1 / records).any())


_NAME_YOURS = " Name yours with column=… (--column, or [budgets] column in a config)."


def _column(table: Any, column: str, path: Path) -> FloatArray:
    return numbers(_full(table, column, path, numeric=True), column, path, BudgetError, marks_of(table))


def _tiers(table: Any, column: str, path: Path, tiers: Mapping[str, float]) -> FloatArray:
    """(records,) the epsilon of each cell's tier."""
    codes = _full(table, column, path).combine_chunks().dictionary_encode()
    names = [as_text(cell) for cell in codes.dictionary.to_pylist()]
    index = np.asarray(codes.indices)
    unknown = np.array([name not in tiers for name in names], dtype=bool)[index]
    if unknown.any():
        # A small count is suppressed, and so is its first row: both would show which records chose a misspelt tier.
        count = int(unknown.sum())
        few = count < SMALLEST_SHOWN
        first = "" if few else f"; the first is row {int(unknown.argmax()):,}, counted from 0 below the header"
        used = set(names)
        unused = [name for name in tiers if name not in used]
        spelling = f" No record holds: {', '.join(map(repr, unused))}. Is it spelt as in the file?" if unused else ""
        blank = ' If an empty cell leaves the record out, write [budgets] blank = "left out".' if "" in used else ""
        raise BudgetError(
            f"{how_many(count, len(index))} cells of column {column!r} in {path} are not the name of a tier "
            f"({', '.join(map(repr, tiers))}){first}.{spelling}{blank}"
        )
    return np.array([tiers[name] for name in names], dtype=np.float64)[index]


def _full(table: Any, column: str, path: Path, numeric: bool = False) -> Any:
    cells = column_of(table, column, path, BudgetError, _NAME_YOURS)
    if numeric:
        cells = emptied(cells)
    if cells.null_count:
        first = int(np.asarray(cells.is_null()).argmax())
        raise BudgetError(
            f"{cells.null_count:,} of {len(cells):,} cells of column {column!r} in {path} are empty or NaN (first at "
            f"row {first:,}, counted from 0 below the header). Every record needs a budget. If an empty cell means that the "
            'record is left out, write in a config: [budgets] blank = "left out".'
        )
    return cells
