"""Budgets: the epsilon of each record, or of each person with all their rows.

There is one value per record, in data-set order, or one per person, in the order of their first row. Those with the
same (epsilon, delta) form a group. Groups are ordered strictest first; all values per group in this package are in that
order.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ..core.columns import PART, Codes, coded, counted, cut, ranked, taken
from ..core.disclosure import SMALLEST_SHOWN, how_many, in_groups
from ..core.mechanism import SMALLEST_DELTA, FloatArray, Groups, IntArray, Unit, read_only
from ..errors import BudgetError, EpsilonsWarning
from ..tabular import (
    Marks,
    as_text,
    column_of,
    decimal,
    emptied,
    encoded,
    is_parquet,
    marks_of,
    meanings,
    numbers,
    read_table,
    speller,
)
from ..tabular.reading import read_parts, slices
from ..tabular.table_files import parquet
from .ids import Conflict, Roster, as_conflict, as_rule, as_unit, check_agreement, ids_in, one_column, per_person
from .risk import Contract, Risk, as_contract

DEFAULT_DELTA = 1e-5


class BudgetColumns(NamedTuple):
    """How a table states budgets: the arguments of `Budgets.from_csv`."""

    column: str = "epsilon"
    delta: npt.ArrayLike = DEFAULT_DELTA
    delta_column: str | None = None
    tiers: Mapping[str, Any] | None = None
    person: str | None = None
    conflict: Conflict = "refuse"
    spelling: str | Sequence[str] | None = None
    tail: Sequence[float] | None = None


# -- Checks of epsilons and deltas, whichever source they are from; messages give counts and rows, never values


def as_budgets(epsilon: npt.ArrayLike, delta: npt.ArrayLike, unit: str) -> tuple[FloatArray, FloatArray]:
    """(records,) epsilons and (records,) deltas. Raises BudgetError for values that no record can have."""
    values = as_floats(epsilon, "budgets")
    if values.ndim != 1 or len(values) == 0:
        raise BudgetError(
            f"Budgets must be a flat list with one epsilon per {unit}, got an array of shape {values.shape}."
        )
    check(usable(values), "budgets", "positive, finite numbers")
    deltas = as_floats(delta, "deltas")
    if deltas.ndim > 1 or (deltas.ndim == 1 and len(deltas) != len(values)):
        raise BudgetError(
            f"delta must be one number or one per {unit}, got {len(values):,} budgets and deltas of shape "
            f"{deltas.shape}."
        )
    _check_deltas(deltas, len(values), unit)
    return values, np.broadcast_to(deltas, values.shape)


def as_starts(starts: npt.ArrayLike, records: int) -> FloatArray:
    """(records, orders) what was spent before. Raises BudgetError for another shape, or numbers that are not finite."""
    values = as_floats(starts, "starts")
    if values.ndim != 2 or len(values) != records or not np.isfinite(values).all():
        raise BudgetError(f"starts must be finite numbers, one row per record, got shape {values.shape}.")
    return values


def as_floats(values: npt.ArrayLike, what: str) -> FloatArray:
    if np.ma.is_masked(values):
        raise BudgetError(f"Some {what} are masked. Every record needs one; fill them in, or drop those records.")
    try:
        return np.asarray(values, dtype=np.float64)
    except (TypeError, ValueError):
        raise BudgetError(f"The {what} are not all numbers: expected a flat list of numbers.") from None


def usable(values: FloatArray) -> npt.NDArray[np.bool_]:
    return np.isfinite(values) & (values > 0)


def check(good: npt.NDArray[np.bool_], what: str, expected: str) -> None:
    bad = ~np.atleast_1d(good)
    if bad.any():
        raise BudgetError(
            f"{bad.sum():,} of {bad.size:,} {what} are not {expected} (first at row {int(bad.argmax()):,}, counted "
            "from 0). To leave records out, drop their rows before planning and training, or say in a config what "
            'means that: [budgets] zero = "left out".'
        )


def _check_deltas(deltas: FloatArray, records: int, unit: str) -> None:
    # Negated, so that NaN is refused, too.
    if not ((deltas >= SMALLEST_DELTA) & (deltas < 1)).all():
        raise BudgetError(
            f"delta must be between {SMALLEST_DELTA:g} and 1 (1 excluded): double precision cannot certify a smaller "
            f"one. Usual values are well below 1/{unit}s = {1 / records:.2g}."
        )


def large_delta(records: int, unit: Unit) -> str:
    """The warning for a delta that protects little."""
    what = "record" if unit == "record" else "rows"
    return (
        f"delta is not below 1/{unit}s = {1 / records:.2g}: a mechanism that publishes one person's {what} would pass. "
        "Choose a smaller delta."
    )


def is_large(deltas: FloatArray, records: int) -> bool:
    """Whether some delta allows a mechanism that publishes one of the records."""
    return records > 1 and bool((deltas >= 1 / records).any())


def outlier(groups: Groups, few: int) -> str | None:
    """The warning for less than a tenth of the epsilons, and than `few`, above 100 and above 100 times all others."""
    largest = np.repeat(groups.epsilons[-few:], np.minimum(groups.counts[-few:], few))
    ordered = largest[len(largest) - min(few, groups.records // 10) :]
    found = f"Fewer than {few} epsilons are more than 100 times as large as all others, and protect nobody."
    is_far = (ordered[1:] > 100 * np.maximum(ordered[:-1], 1)).any()
    return f"{found} If they are slips, such as 1E5 for 1.5, correct them." if is_far else None


# -- What budgets are read from: columns of epsilons, columns of tiers, classes, positions

#: What to do about empty cells that have a meaning.
LEFT_OUT = 'If an empty cell leaves a record out, state [budgets] blank = "left out" (registry import: --left-out "").'

NAME_YOURS = " Name yours with column=… (--column, or [budgets] column in a config)."


INFINITE = 'If an infinite number means that its record is left out, a config says so: [budgets] infinite = "left out".'

#: What to do about tiers that have no epsilon.
NO_EPSILON = "Write down the epsilon of every tier; others go into [budgets] left_out (registry import: --left-out)."

#: What to do about numbers in the place of names, and about names in the place of numbers.
HOLDS_NUMBERS = (
    "20 or more of these are numbers, and tiers are names. If a number is an epsilon, leave tiers out; if it is the "
    'name of a tier, write it like one, with its epsilon: [budgets] tiers = { "1" = 0.5 } (--tiers 1:0.5).'
)
HOLDS_NAMES = "If they are tiers, write down the epsilon of each: [budgets] tiers = { NAME = 0.5 } (--tiers NAME:0.5)."


def epsilon_column(table: Any, column: str, path: Path, is_delta: bool = False) -> FloatArray:
    cells = _full(table, column, path, numeric=True)
    try:
        return numbers(cells, column, path, BudgetError, marks_of(table))
    except BudgetError as error:
        different, index = encoded(cells)
        names, said = [as_text(cell) for cell in different.to_pylist()], str(error)
        if any("infinite" in meanings(name) for name in names):
            said += f" {INFINITE}"
        is_name = [decimal(name) is None and not meanings(name)[0] for name in names]
        if not is_delta and (held := _held([name * one for name, one in zip(names, is_name, strict=True)], index)):
            said += f" {held} {HOLDS_NAMES}"
        raise BudgetError(said) from None


def tier_column(
    table: Any, column: str, path: Path, tiers: Mapping[str, float], others: Sequence[str] = ()
) -> FloatArray:
    """(records,) the epsilon of each cell's tier. Blanks around a name, its Unicode form and case make no other tier.

    others  names of no tier, which none of their spellings may become: of entries that leave a record out
    """
    cells, index = encoded(_full(table, column, path))
    find = speller([*tiers, *others])
    names = [find(as_text(cell)) for cell in cells.to_pylist()]
    unknown = np.array([name not in tiers for name in names], dtype=bool)[index]
    if unknown.any():
        # A small count is suppressed. So is its first row if a tier has no records, because its name may be misspelt in
        # the list, and the row would show who chose it.
        count, used = int(unknown.sum()), set(names)
        unused = [name for name in tiers if name not in used]
        hidden = unused and count < SMALLEST_SHOWN
        first = "" if hidden else f"; the first is row {int(unknown.argmax()):,}, counted from 0 below the header"
        spelling = f" No record holds: {', '.join(map(repr, unused))}. Is it spelt as in the file?" if unused else ""
        blank = f" Some are empty. {LEFT_OUT}" if "" in used else ""
        is_number = unknown & np.array([decimal(name) is not None for name in names], dtype=bool)[index]
        if is_number.sum() >= SMALLEST_SHOWN:
            blank += f" {HOLDS_NUMBERS}"
        elif count >= SMALLEST_SHOWN:
            blank += f" {_held(['' if name in tiers else name for name in names], index)} {NO_EPSILON}"
        raise BudgetError(
            f"{how_many(count, len(index))} cells of column {column!r} in {path} are not the name of a tier "
            f"({', '.join(map(repr, tiers))}){first}.{spelling}{blank}"
        )
    return np.array([tiers.get(name, np.nan) for name in names], dtype=np.float64)[index]


def _held(names: Sequence[str], index: IntArray) -> str:
    """The names that 20 or more cells hold, and so may be shown; "" for none.

    names  of the different cells; "" for those that do not count
    """
    counts = np.bincount(index, minlength=len(names)).tolist()
    held = [repr(name) for name, count in zip(names, counts, strict=True) if name and count >= SMALLEST_SHOWN]
    shown = ", ".join(sorted(held)[:5]) + ", …" * (len(held) > 5)
    return f"{SMALLEST_SHOWN} or more cells each hold {shown}." if held else ""


def in_parts(read: Callable[[Any, str, Path], FloatArray], table: Any | None, column: str, path: Path) -> FloatArray:
    """(records,) what `read` makes of a column, part by part. Where it refuses a part, it reads the whole column.

    table  None for a .parquet file, of which this column alone is read
    """
    is_file = table is None
    if table is not None:
        if table.column_names.count(column) != 1:
            return read(table, column, path)  # which refuses it
        table = table.select([column])
    with suppress(BudgetError):  # an error counts all rows
        some = read_parts(path, "budgets", BudgetError, [column], PART)[1] if is_file else slices(table, PART)
        values, last = np.empty(parquet.read_metadata(path).num_rows if table is None else table.num_rows), 0
        for part in some:
            first, last = last, last + part.num_rows
            values[first:last] = read(part, column, path)
        return values
    return read(read_table(path, "budgets", BudgetError) if is_file else table, column, path)


def _full(table: Any, column: str, path: Path, numeric: bool = False) -> Any:
    cells = column_of(table, column, path, BudgetError, NAME_YOURS)
    if numeric:
        cells = emptied(cells)
        if str(cells.type) == "bool":
            raise BudgetError(f"Column {column!r} in {path} holds true and false, which are no budgets.")
    if cells.null_count:
        first = int(np.asarray(cells.is_null()).argmax())
        raise BudgetError(
            f"{cells.null_count:,} of {len(cells):,} cells of column {column!r} in {path} are empty or NaN (first at "
            f"row {first:,}, counted from 0 below the header). Every record needs a budget. {LEFT_OUT}"
        )
    return cells


def classes_of(targets: npt.ArrayLike) -> tuple[list[Any], Codes]:
    """(classes,) the classes, and (records,) the index of each record's class. Raises BudgetError."""
    try:
        array = np.asarray(targets)
        found = coded(cut(array)) if array.ndim == 1 and len(array) else None
    except (TypeError, ValueError):
        raise BudgetError("The targets must be a flat list of classes of one type, got a mixture.") from None
    if found is None:
        raise BudgetError(f"The targets must be a flat list of one class per record, got shape {array.shape}.")
    return found[0].tolist(), found[1]


def positions(chosen: npt.ArrayLike, records: int, unit: Unit) -> IntArray:
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
            f"A subset takes a flat list of {unit} indices, whole numbers counted from 0, or a mask of True and False "
            f"for each of the {records:,} {unit}s, got an array of {array.dtype} of shape {array.shape}."
        )
    outside = (array < 0) | (array >= records)
    if outside.any():
        raise BudgetError(
            f"A subset takes {unit} indices in 0..{records - 1:,}, but {outside.sum():,} of {len(array):,} are outside "
            f"(first at position {int(outside.argmax()):,})."
        )
    return array.astype(np.int64, copy=False)


# -- Budgets: the epsilon of each record, or of each person with all their rows


class Budgets:
    """One privacy budget per record, in data-set order, or one per person.

    epsilon  (records,) each > 0 and finite, in nats; with unit "person": (persons,)
    delta    one probability for all, or (records,); each in [1e-9, 1)
    unit     "record", or "person": a budget covers all rows of one person. `by_person` makes such budgets from ids
    ids      (persons,) the id of each person, for `persons_of`
    spelling how ids are made equal, as in `by_person`
    starts   (records, orders) for accounts of a registry, which makes them (`Registry.account`): what was spent before

    Raises BudgetError when a value is not usable; the message gives counts and rows, never values.

    >>> budgets = Budgets([3.0, 1.0, 3.0, 2.0], delta=1e-5)
    >>> budgets
    Budgets(4 records)
    >>> budgets.epsilons
    array([1., 2., 3.])
    >>> budgets.counts
    array([1, 1, 2])
    >>> budgets.group
    array([2, 0, 2, 1])
    """

    def __init__(
        self,
        epsilon: npt.ArrayLike,
        delta: npt.ArrayLike = DEFAULT_DELTA,
        *,
        unit: Unit = "record",
        starts: npt.ArrayLike | None = None,
        ids: Any = None,
        spelling: str | Sequence[str] | None = None,
    ) -> None:
        values, deltas = as_budgets(epsilon, delta, unit)
        spent = None if starts is None else as_starts(starts, len(values))
        self._codes, first = ranked([values, deltas, *(() if spent is None else spent.T)])
        of_groups = None if spent is None else spent[first]
        self._groups = Groups(values[first], deltas[first], counted(self._codes, len(first)), of_groups)
        if is_large(self._groups.deltas, len(values)):
            warnings.warn(large_delta(len(values), unit), EpsilonsWarning, stacklevel=2)
        if words := outlier(self._groups, SMALLEST_SHOWN):
            warnings.warn(words, EpsilonsWarning, stacklevel=2)
        self._unit = as_unit(unit)
        self._roster = None if ids is None else self._roster_of(ids, len(values), spelling)
        self._contract: Contract | None = None

    # -- where budgets come from -------------------------------------------------------------------

    @classmethod
    def from_csv(
        cls,
        path: str | Path,
        *,
        column: str = "epsilon",
        delta: npt.ArrayLike = DEFAULT_DELTA,
        delta_column: str | None = None,
        tiers: Mapping[str, float] | Mapping[str, Risk] | None = None,
        person: str | None = None,
        conflict: Conflict = "refuse",
        spelling: str | Sequence[str] | None = None,
        separator: str | None = None,
        decimal: str | None = None,
    ) -> Budgets:
        """Read one column of a .csv, .tsv or .parquet file, one row per record in data-set order.

        column        name of the column with each record's epsilon, or with the name of its tier
        delta         one probability for all, or (records,)
        delta_column  name of a column with a delta per record; replaces `delta`
        tiers         {name: epsilon}, for example {"strict": 0.5, "open": 8.0}; or {name: Risk} (`by_risk`), each with
                      the epsilon that it keeps at `delta`: {"strict": Risk(odds=55, epsilon=2.0)}
        person        name of the column with the id of each row's person; the budgets are then of persons (`by_person`)
        conflict      "refuse" or "strictest", for a person whose rows state different budgets
        spelling      how ids are made equal, as in `by_person`
        separator     what separates the cells of a text file, for example ";"; without it, the first rows decide
        decimal       "," for numbers with decimal commas

        Raises BudgetError if the file or a column is missing, or a cell is not a number or not the name of a tier; with
        `person`, also for what `by_person` refuses.
        """
        # Cells are read as text and parsed here, because the reader of .csv files reads 0x10 as 16.
        names = [column, delta_column, None if person is None else one_column(person)]
        texts, marks = [name for name in names if name], Marks(separator, decimal)
        columns = BudgetColumns(column, delta, delta_column, tiers, person, conflict, spelling)
        in_file = is_parquet(Path(path)) and person is None
        table = None if in_file else read_table(Path(path), "budgets", BudgetError, texts, marks, columns=texts)
        return cls.from_table(table, Path(path), columns)

    from_parquet = from_csv

    @classmethod
    def from_table(cls, table: Any, path: Path, columns: BudgetColumns) -> Budgets:
        """The same from a pyarrow.Table that was read from `path`; messages name the path.

        table  None for a .parquet file without persons: its columns are then read in parts
        """
        column, delta, delta_column, tiers, person, conflict, spelling, tail = columns
        contract = None
        if tiers is not None and any(isinstance(one, Risk | Mapping) for one in tiers.values()):
            if delta_column is not None or conflict != "refuse":
                raise BudgetError(
                    "Tiers by risk have one delta, and none of two risks is the stricter one: leave out delta_column "
                    "and conflict."
                )
            contract, delta = as_contract(tiers, tail, delta)
            tiers = contract.levels
        read = epsilon_column if tiers is None else partial(tier_column, tiers=tiers)
        epsilon = in_parts(read, table, column, path)
        of_delta = partial(epsilon_column, is_delta=True)
        deltas = delta if delta_column is None else in_parts(of_delta, table, delta_column, path)
        if person is None:
            return cls(epsilon, deltas).limited(contract)
        ids = ids_in(table, one_column(person), path, BudgetError, as_rule(spelling))
        return cls.by_person(epsilon, ids, delta=deltas, conflict=conflict, spelling=spelling).limited(contract)

    @classmethod
    def by_person(
        cls,
        epsilon: npt.ArrayLike,
        ids: Any,
        *,
        delta: npt.ArrayLike = DEFAULT_DELTA,
        conflict: Conflict = "refuse",
        spelling: str | Sequence[str] | None = None,
    ) -> Budgets:
        """One epsilon per person, from rows that state their person and a budget. Persons are in order of first rows.

        epsilon   (rows,) what each row states
        ids       (rows,) texts or whole numbers, such as a list, an array or a column of a table; compared as texts
                  without blanks around them: 7 and "7" are one person, "07" is another
        delta     one probability for all, or (rows,)
        conflict  what happens to a person whose rows state different budgets: "refuse", or "strictest", the smallest
                  epsilon and the smallest delta
        spelling  how ids are made equal: "as written", or one or several of "nfkc", "casefold", "strip invisible",
                  "strip blanks", "strip .0", "strip leading zeros". Training needs it for ids that are equal up to such
                  differences

        Ids are confidential; no message or repr shows one. Raises BudgetError for conflicts that are refused, for empty
        ids, and for budgets that are not usable.

        >>> budgets = Budgets.by_person([1.0, 3.0, 1.0], ["ann", "bob", "ann"])
        >>> budgets
        Budgets(2 persons)
        >>> budgets.person
        array([0, 1, 0])
        >>> budgets.persons_of(["bob", "ann"])
        array([1, 0])
        """
        rule = as_conflict(conflict)
        rows = as_budgets(epsilon, delta, "row")
        roster = Roster.of(ids, as_rule(spelling))
        of_row = roster.of_row
        if of_row is None or len(of_row) != len(rows[0]):
            raise BudgetError(f"Every row needs one id, got {len(rows[0]):,} budgets and another number of ids.")
        smallest = [per_person(values, of_row, len(roster)) for values in rows]
        if rule == "refuse":
            check_agreement(smallest, rows, of_row)
        return cls(*smallest, unit="person")._with(roster)

    @classmethod
    def from_shares(
        cls,
        shares: Mapping[float, float],
        *,
        records: int,
        delta: float = DEFAULT_DELTA,
        seed: int = 0,
        unit: Unit = "record",
    ) -> Budgets:
        """Simulated budgets: each epsilon goes to its share of `records` records, chosen at random.

        shares   {epsilon: share}; shares must add up to 1, and are rounded by largest remainder to whole counts
        records  number of records; with unit "person", of persons
        delta    one probability for all
        seed     of the random order
        unit     "record" or "person"

        Raises BudgetError for shares that do not add up to 1, or that come to less than one record.

        >>> Budgets.from_shares({1.0: .34, 2.0: .43, 3.0: .23}, records=60_000, delta=1e-5).counts
        array([20400, 25800, 13800])
        """
        epsilon = np.repeat(*_share_counts(shares, records))
        np.random.default_rng(seed).shuffle(epsilon)
        return cls(epsilon, delta, unit=unit)

    @classmethod
    def by_class(
        cls,
        targets: npt.ArrayLike,
        epsilons: Mapping[Any, float],
        *,
        delta: npt.ArrayLike = DEFAULT_DELTA,
        ids: Any = None,
        spelling: str | Sequence[str] | None = None,
    ) -> Budgets:
        """One epsilon per class: each record gets the epsilon of its class.

        targets   (records,) the class of each record, in data-set order
        epsilons  {class: epsilon}; it may name classes that no record has, as a list that was fixed beforehand does
        delta     one probability for all, or (records,)
        ids       (records,) each record's person: one epsilon per person, whose rows must agree (`by_person`)
        spelling  how ids are made equal, as in `by_person`

        Such budgets publish the class of every record wherever the list of budgets is public; training notes it.

        Raises BudgetError for a class without an epsilon, for targets that are not one class per record, and for
        persons with rows in classes of different epsilons.

        >>> Budgets.by_class([0, 1, 1, 2], {0: 1.0, 1: 2.0, 2: 2.0}, delta=1e-3).counts
        array([1, 3])
        """
        check(usable(as_floats(list(epsilons.values()), "epsilons")), "epsilons", "positive, finite numbers")
        classes, index = classes_of(targets)
        counts = counted(index, len(classes))
        without = {name: n for name, n in zip(classes, counts, strict=True) if name not in epsilons}
        if without:
            # Only classes of many records are named: the others are values of a few people.
            named = ", ".join(repr(name) for name, n in without.items() if n >= SMALLEST_SHOWN)
            which = f" ({named})" if named else ""
            raise BudgetError(
                f"{len(without):,} of {len(classes):,} classes have no epsilon{which}. Give one for each class."
            )
        values = taken(np.array([epsilons[name] for name in classes], dtype=np.float64), index)
        if ids is None:
            return cls(values, delta)
        return cls.by_person(values, ids, delta=delta, spelling=spelling)

    @classmethod
    def by_risk(
        cls,
        risks: Mapping[Any, Risk],
        tiers: npt.ArrayLike | Mapping[Any, float],
        *,
        tail: Sequence[float],
        records: int | None = None,
        seed: int = 0,
        unit: Unit = "record",
        ids: Any = None,
        spelling: str | Sequence[str] | None = None,
    ) -> Budgets:
        """Tiers that state risks in place of epsilons. A plan meets each of them directly, and needs accountant="pld".

        risks     {tier: Risk}; it may name tiers that no record has. An epsilon in place of a Risk limits the tail only
        tiers     (records,) the tier of each record; or {tier: share}, simulated as by `from_shares`
        tail      (epsilon, delta) that every tier keeps, too, and that people are told: limits alone leave open what a
                  rare attack learns
        records, seed, unit  of simulated tiers
        ids, spelling  as in `by_class`

        Tiers with one epsilon and different limits get epsilons that differ in their last digits.

        Raises BudgetError for tiers that are not among `risks`, and for what `by_class` or `from_shares` refuse.

        >>> risks = {"strict": Risk(odds=55), "open": Risk(tpr=0.05, at_fpr=0.01)}
        >>> Budgets.by_risk(risks, ["open", "strict", "open"], tail=(4.0, 1e-5))
        Budgets(3 records)
        """
        contract, delta = as_contract(risks, tail)
        if isinstance(tiers, Mapping):
            simulated = cls.from_shares(contract.shares(tiers), records=records or 0, delta=delta, seed=seed, unit=unit)
            return simulated.limited(contract)
        if not all(name in contract.levels for name in classes_of(tiers)[0]):
            raise BudgetError(f"Some records have a tier without a risk. There are: {', '.join(map(repr, risks))}.")
        return cls.by_class(tiers, contract.levels, delta=delta, ids=ids, spelling=spelling).limited(contract)

    @classmethod
    def of_groups(cls, groups: Groups, unit: Unit = "record") -> Budgets:
        """Budgets that form these groups, ordered by them."""
        columns = (np.repeat(values, groups.counts) for values in (groups.epsilons, groups.deltas))
        return cls(*columns, unit=unit).limited(Contract({}, groups.declared) if groups.declared else None)

    def subset(self, indices: Sequence[int] | npt.NDArray[Any]) -> Budgets:
        """The budgets of these records, in this order (as `torch.utils.data.Subset` orders its records).

        indices: whole numbers, counted from 0, or a (records,) mask of True and False. Budgets of persons take
        positions of persons. The result keeps their ids, and not which rows are theirs: look these up with
        `persons_of`. Raises BudgetError for anything else, and if no record is chosen.

        >>> Budgets([3.0, 1.0, 2.0]).subset([2, 0]).epsilons
        array([2., 3.])
        """
        chosen = positions(indices, len(self), self.unit)
        if len(chosen) == 0:
            raise BudgetError(f"A subset needs at least one {self.unit}.")
        if self.unit == "person" and len(np.unique(chosen)) < len(chosen):
            raise BudgetError("A subset of budgets of persons takes each person at most once: two coins spend more.")
        roster = None if self._roster is None else self._roster.chosen(chosen)
        with warnings.catch_warnings(action="ignore", category=EpsilonsWarning):
            group, groups = self._codes[chosen], self._groups
            starts = None if groups.starts is None else groups.starts[group]
            some = Budgets(taken(groups.epsilons, group), taken(groups.deltas, group), unit=self.unit, starts=starts)
            return some._with(roster).limited(self._contract)

    def limited(self, contract: Contract | None) -> Budgets:
        """The same budgets, with the limits of these tiers beside the epsilons that they are known by."""
        self._contract = contract
        if contract is not None:
            limits = np.array([contract.limits[epsilon] for epsilon in self.epsilons.tolist()])
            self._groups = replace(self._groups, limits=limits)
        return self

    def _with(self, roster: Roster | None) -> Budgets:
        self._roster = roster
        return self

    def _roster_of(self, ids: Any, records: int, spelling: str | Sequence[str] | None) -> Roster:
        roster = Roster.of(ids, as_rule(spelling))
        if self._unit != "person" or len(roster) != records or roster.of_row is None or len(roster.of_row) != records:
            raise BudgetError('ids= takes one id per person, each once, and needs unit="person". From rows: by_person.')
        return roster.chosen(np.arange(records))

    # -- persons -----------------------------------------------------------------------------------

    @property
    def unit(self) -> Unit:
        """What has a budget: "record", or "person" with all their rows."""
        return self._unit

    @property
    def person(self) -> IntArray | None:
        """(rows,) each row's person, as a position in these budgets; None if the rows are not known."""
        return None if self._roster is None else self._roster.of_row

    @property
    def has_ids(self) -> bool:
        """True if these are budgets of persons, and their ids are known."""
        return self._roster is not None

    @property
    def ids(self) -> list[str]:
        """(persons,) the id of each person, as text. Confidential. Raises BudgetError for budgets without ids."""
        if self._roster is None:
            raise BudgetError("These budgets hold no ids.")
        return self._roster.texts

    def without_ids(self) -> Budgets:
        """The same budgets without ids and rows; the rows of a person are then given by positions in the budgets.

        >>> Budgets.by_person([1.0, 2.0], ["ann", "bob"]).without_ids().has_ids
        False
        """
        return copy.copy(self)._with(None)

    def persons_of(self, ids: Any) -> IntArray:
        """(rows,) the person of each id, as a position in these budgets; for the rows of a subset or another file.

        Raises BudgetError for an id that these budgets do not know, and for budgets without ids.
        """
        if self._roster is None:
            raise BudgetError(
                "These budgets hold no ids. Make them with Budgets.by_person(epsilon, ids) or "
                'Budgets.from_csv(…, person="…"), or pass positions in the budgets as persons.'
            )
        return self._roster.positions(ids)

    def check_spelling(self) -> None:
        """Raise BudgetError if it was not stated which ids are of one person, and they leave it open."""
        if self._roster is not None:
            self._roster.check_stated()

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
        """(groups,) records in each group, or persons."""
        return self._groups.counts

    @property
    def claims(self) -> FloatArray:
        """What calibration needs beside epsilons, as `Groups.terms`: (groups,) deltas, or more of each group."""
        return self._groups.terms

    @property
    def contract(self) -> Contract | None:
        """The tiers of budgets by risk; None for others."""
        return self._contract

    @cached_property
    def group(self) -> IntArray:
        """(records,) group of each record (or person): its index into `epsilons`."""
        group: IntArray = read_only(self._codes.astype(np.int64))
        return group

    @property
    def groups(self) -> Groups:
        """epsilons, deltas and counts of all groups as one value."""
        return self._groups

    @property
    def records(self) -> int:
        """Number of records, or of persons."""
        return len(self._codes)

    @cached_property
    def shares(self) -> FloatArray:
        """(groups,) part of all records in each group; adds up to 1."""
        shares: FloatArray = read_only(self.counts / self.counts.sum())
        return shares

    def __len__(self) -> int:
        return self.records

    def __repr__(self) -> str:
        return f"Budgets({self.records:,} {self.unit}s{in_groups(self._groups)})"


def _share_counts(shares: Mapping[float, float], records: int) -> tuple[FloatArray, IntArray]:
    """(epsilons, counts): `records` divided by `shares`, rounded by largest remainder. Raises BudgetError."""
    if not shares:
        raise BudgetError('Got no shares; give at least one epsilon, e.g. "1:34%,2:43%,3:23%".')
    if records != int(records) or records < 1:
        raise BudgetError(f"The number of records must be a whole number of at least 1, got {records}.")
    epsilons = as_floats(sorted(shares), "epsilons")
    parts = as_floats([shares[epsilon] for epsilon in sorted(shares)], "shares")
    check(usable(epsilons), "epsilons", "positive, finite numbers")
    check(usable(parts), "shares", "positive, finite numbers")
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
