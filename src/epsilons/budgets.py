"""Budgets: which record asked for which epsilon.

One value per record, in data-set order; records that asked for the same (epsilon, delta) form a group.
Groups are ordered strictest first, and everything per group in this package is in that order.
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

from .errors import BudgetError, EpsilonsWarning
from .tabular import as_text, column_of, emptied, numbers, read_table

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

#: Below this, the accountants' double precision no longer carries the result (design: refuse).
SMALLEST_DELTA = 1e-9

DEFAULT_DELTA = 1e-5

#: Levels held by fewer records than this are merged in whatever is printed.
SMALLEST_SHOWN = 20


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
                f"Budgets must be a flat list with one epsilon per record; an array of shape {values.shape} arrived."
            )
        _check(np.isfinite(values) & (values > 0), "budgets", "positive, finite numbers")
        deltas = _as_floats(delta, "deltas")
        if deltas.ndim > 1 or (deltas.ndim == 1 and len(deltas) != len(values)):
            raise BudgetError(
                f"delta must be one number or one per record: {len(values):,} budgets arrived with deltas of shape "
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
        self._levels: FloatArray = _frozen(ordered[0, first])
        self._deltas: FloatArray = _frozen(ordered[1, first])
        self._group: IntArray = _frozen(group)
        self._counts: IntArray = _frozen(np.bincount(group))

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
    ) -> Budgets:
        """Read one column of a .csv or .parquet file, one row per record in data-set order.

        `delta_column` names a column with a delta per record; otherwise `delta` holds for all. With `tiers`, the
        column holds names, and each stands for an epsilon: {"strict": 0.5, "open": 8.0}.
        Raises BudgetError if the file or column is missing, a cell is not a number, or not the name of a tier.
        """
        # Numbers are parsed here, for the reader of .csv files takes 0x10 for 16.
        table = read_table(
            Path(path), "budgets", BudgetError, texts=[column, *([delta_column] if delta_column else [])]
        )
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
        """The same from a pyarrow.Table that was read from `path`, which only messages name."""
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
        """Simulated budgets: `records` records, of which a share `shares[epsilon]` gets each epsilon, at random.

        Shares must add up to 1; counts are rounded by largest remainder, so they add up to `records`.

        >>> Budgets.from_shares({1.0: .34, 2.0: .43, 3.0: .23}, records=60_000, delta=1e-5).counts
        array([20400, 25800, 13800])
        """
        levels, counts = share_counts(shares, records)
        epsilon = np.repeat(levels, counts)
        return cls(np.random.default_rng(seed).permutation(epsilon), delta)

    def subset(self, indices: Sequence[int] | npt.NDArray[Any]) -> Budgets:
        """The budgets of these records, in this order (as `torch.utils.data.Subset` orders its records).

        indices: whole numbers, counted from 0, or a (records,) mask of True and False.
        Raises BudgetError for anything else, and if nobody is chosen.
        """
        chosen = indices_of(indices, len(self), "A subset")
        if len(chosen) == 0:
            raise BudgetError("A subset needs at least one record.")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", EpsilonsWarning)
            return Budgets(self._epsilon[chosen], self._delta[chosen])

    # -- what they are -----------------------------------------------------------------------------

    @property
    def epsilons(self) -> FloatArray:
        """(groups,) epsilon of each group, strictest first; equal epsilons at different deltas stay apart."""
        return self._levels

    @property
    def delta(self) -> FloatArray:
        """(groups,) delta of each group."""
        return self._deltas

    @property
    def counts(self) -> IntArray:
        """(groups,) records in each group."""
        return self._counts

    @property
    def group(self) -> IntArray:
        """(records,) index into `levels` for each record."""
        return self._group

    @property
    def records(self) -> int:
        """Number of records."""
        return len(self._epsilon)

    @cached_property
    def shares(self) -> FloatArray:
        """(groups,) part of all records in each group; adds up to 1."""
        return _frozen(self._counts / self._counts.sum())

    def __len__(self) -> int:
        return self.records

    def __repr__(self) -> str:
        return f"Budgets({self.records:,} records, {len(self._levels):,} groups)"


def share_counts(shares: Mapping[float, float], records: int) -> tuple[FloatArray, IntArray]:
    """(levels, counts): `records` dealt out by `shares`, rounded by largest remainder. Raises BudgetError."""
    if not shares:
        raise BudgetError('No shares arrived; give at least one level, e.g. "1:34%,2:43%,3:23%".')
    if records != int(records) or records < 1:
        raise BudgetError(f"The number of records must be a whole number of at least 1; {records} arrived.")
    levels = _as_floats(sorted(shares), "epsilons")
    parts = _as_floats([shares[level] for level in sorted(shares)], "shares")
    _check(np.isfinite(levels) & (levels > 0), "epsilons", "positive, finite numbers")
    _check(np.isfinite(parts) & (parts > 0), "shares", "positive, finite numbers")
    if not math.isclose(float(parts.sum()), 1.0, abs_tol=1e-6):
        raise BudgetError(f"Shares must add up to 1 (100 %); these add up to {parts.sum():.6g}.")
    exact = parts / parts.sum() * records
    counts = np.floor(exact).astype(np.int64)
    by_remainder = np.argsort(-(exact - counts), kind="stable")
    counts[by_remainder[: int(records) - int(counts.sum())]] += 1
    if (counts == 0).any():
        raise BudgetError(
            f"{(counts == 0).sum()} of {len(counts)} shares come to less than one of {records:,} records. Give more "
            "records, or leave those levels out."
        )
    return levels, counts


def merge_small(counts: npt.ArrayLike, smallest: int = SMALLEST_SHOWN) -> list[slice]:
    """Runs of neighbouring groups so that each holds at least `smallest` records, merged upwards.

    What is printed never shows a level held by fewer: a table with one record per level is everybody's budget. A
    small group joins the next looser one; what is left at the top, with nothing to join, may stay small.

    >>> merge_small([3, 50, 10, 15, 40, 2])
    [slice(0, 2, None), slice(2, 4, None), slice(4, 5, None), slice(5, 6, None)]
    """
    runs: list[slice] = []
    start, held = 0, 0
    sizes = np.asarray(counts)
    for i, size in enumerate(sizes):
        held += int(size)
        if held >= smallest:
            runs.append(slice(start, i + 1))
            start, held = i + 1, 0
    if start < len(sizes):
        runs.append(slice(start, len(sizes)))
    return runs


def how_many(count: int, records: int) -> str:
    """A number of records in words that tell nothing of few, nor of the few others: the beginning of a sentence.

    >>> how_many(400, 1000), how_many(3, 1000), how_many(985, 1000), how_many(1000, 1000)
    ('400 of 1,000', 'Fewer than 20', 'All but fewer than 20 of 1,000', '1,000 of 1,000')
    """
    if count < SMALLEST_SHOWN:
        return f"Fewer than {SMALLEST_SHOWN}"
    told = f"All but fewer than {SMALLEST_SHOWN}" if 0 < records - count < SMALLEST_SHOWN else f"{count:,}"
    return f"{told} of {records:,}"


def indices_of(chosen: npt.ArrayLike, records: int, what: str) -> IntArray:
    """The records that a list of indices, or a (records,) mask of True and False, names. Raises BudgetError for others.

    >>> indices_of([2, 0], 3, "A subset"), indices_of([False, False, True], 3, "A subset")
    (array([2, 0]), array([2]))
    """
    try:
        named = np.asarray(chosen)
    except ValueError:  # lists of different lengths
        named = np.empty((), dtype=object)
    if named.dtype == bool and named.shape == (records,):
        return np.flatnonzero(named)
    if named.shape == (0,) and named.dtype != bool:
        return np.empty(0, dtype=np.int64)
    if named.ndim != 1 or not np.issubdtype(named.dtype, np.integer):
        raise BudgetError(
            f"{what} takes a flat list of record indices, whole numbers counted from 0, or a mask of True and False "
            f"for each of the {records:,} records; an array of {named.dtype} of shape {named.shape} arrived."
        )
    outside = (named < 0) | (named >= records)
    if outside.any():
        raise BudgetError(
            f"{what} takes record indices in 0..{records - 1:,}; {outside.sum():,} of {len(named):,} do not lie there "
            f"(first at place {int(outside.argmax()):,})."
        )
    return named.astype(np.int64)


# -- checks and readers ---------------------------------------------------------------------------------


def _as_floats(values: npt.ArrayLike, what: str) -> FloatArray:
    if np.ma.is_masked(values):
        raise BudgetError(f"Some {what} are masked. Every record needs one; fill them in, or drop those records.")
    try:
        return np.array(values, dtype=np.float64)
    except (TypeError, ValueError):
        raise BudgetError(f"The {what} are not all numbers: expected a flat list of numbers.") from None


def _check(good: npt.NDArray[np.bool_], what: str, expected: str) -> None:
    bad = ~np.atleast_1d(good)
    if bad.any():
        raise BudgetError(
            f"{bad.sum():,} of {bad.size:,} {what} are not {expected} (first at row {int(bad.argmax()):,}, counted "
            "from 0). To leave people out altogether, drop their rows before planning and training."
        )


def _check_delta(deltas: FloatArray, records: int) -> None:
    # Negated, so that NaN is caught too.
    if not ((deltas >= SMALLEST_DELTA) & (deltas < 1)).all():
        raise BudgetError(
            f"delta must lie between {SMALLEST_DELTA:g} and 1 (1 excluded): a smaller one is beyond what double "
            f"precision can certify. Usual values are well below 1/records = {1 / records:.2g}."
        )
    if is_large(deltas, records):
        warnings.warn(LARGE_DELTA.format(1 / records), EpsilonsWarning, stacklevel=3)


LARGE_DELTA = (
    "delta is not below 1/records = {:.2g}: a mechanism that publishes one person's record outright would pass. Choose "
    "a smaller delta."
)


def is_large(deltas: FloatArray, records: int) -> bool:
    """Whether some delta permits to publish one of so many records in full."""
    return records > 1 and bool((deltas >= 1 / records).any())


_NAME_YOURS = " Name yours with column=… (--column, or [budgets] column in a config)."


def _column(table: Any, column: str, path: Path) -> FloatArray:
    return numbers(_full(table, column, path, numeric=True), column, path, BudgetError)


def _tiers(table: Any, column: str, path: Path, tiers: Mapping[str, float]) -> FloatArray:
    """(records,) the epsilon that each cell's tier stands for."""
    names = [as_text(cell) for cell in _full(table, column, path).to_pylist()]
    unknown = np.array([name not in tiers for name in names])
    if unknown.any():
        # Of few records neither how many nor which: it would tell who chose a tier whose name is misspelt.
        count = int(unknown.sum())
        few = count < SMALLEST_SHOWN
        first = "" if few else f"; the first is row {int(unknown.argmax()):,}, counted from 0 below the header"
        held = set(names)
        unheld = [name for name in tiers if name not in held]
        spelling = f" No record holds: {', '.join(map(repr, unheld))}. Is it spelt as in the file?" if unheld else ""
        raise BudgetError(
            f"{how_many(count, len(names))} cells of column {column!r} in {path} are not the name of a tier "
            f"({', '.join(map(repr, tiers))}){first}.{spelling}"
        )
    return np.array([tiers[name] for name in names], dtype=np.float64)


def _full(table: Any, column: str, path: Path, numeric: bool = False) -> Any:
    cells = column_of(table, column, path, BudgetError, _NAME_YOURS)
    if numeric:
        cells = emptied(cells)
    if cells.null_count:
        first = next(i for i, cell in enumerate(cells) if not cell.is_valid)
        raise BudgetError(
            f"{cells.null_count:,} of {len(cells):,} cells of column {column!r} in {path} are empty or NaN (first at "
            f"row {first:,}, counted from 0 below the header). Every record needs a budget."
        )
    return cells


def _frozen(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    array = np.ascontiguousarray(array)
    array.setflags(write=False)
    return array
