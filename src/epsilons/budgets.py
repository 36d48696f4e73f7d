"""Budgets: the epsilon of each record, or of each person with all their rows.

There is one value per record, in data-set order, or one per person, in the order of their first row. Those with the
same (epsilon, delta) form a group. Groups are ordered strictest first; all values per group in this package are in that
order.
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

from .budget_checks import as_budgets, as_floats, as_starts, check, is_large, large_delta, outlier, usable
from .budget_columns import classes_of, epsilon_column, positions, tier_column
from .disclosure import SMALLEST_SHOWN
from .errors import BudgetError, EpsilonsWarning
from .ids import as_rule, ids_in
from .mechanism import FloatArray, Groups, IntArray, Unit, read_only
from .persons import Conflict, Roster, as_conflict, as_unit, check_agreement, one_column, per_person
from .tabular import Marks, read_table

DEFAULT_DELTA = 1e-5


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
    Budgets(4 records, 3 groups)
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
        if is_large(deltas, len(values)):
            warnings.warn(large_delta(len(values), unit), EpsilonsWarning, stacklevel=2)
        if words := outlier(values, SMALLEST_SHOWN):
            warnings.warn(words, EpsilonsWarning, stacklevel=2)
        self._unit = as_unit(unit)
        self._roster = None if ids is None else self._roster_of(ids, len(values), spelling)
        self._epsilon = values
        self._delta = deltas
        self._starts = None if starts is None else as_starts(starts, len(values))
        columns = np.stack([values, deltas, *([] if self._starts is None else self._starts.T)])
        order = np.lexsort(columns[::-1])
        ordered = columns[:, order]
        first = np.concatenate([[True], (ordered[:, 1:] != ordered[:, :-1]).any(axis=0)])
        group = np.empty(len(values), dtype=np.int64)
        group[order] = np.cumsum(first) - 1
        self._group: IntArray = read_only(group)
        of_groups = None if self._starts is None else ordered[2:, first].T
        self._groups = Groups(ordered[0, first], ordered[1, first], np.bincount(group), of_groups)

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
        tiers         {name: epsilon}, for example {"strict": 0.5, "open": 8.0}
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
        table = read_table(Path(path), "budgets", BudgetError, texts, marks)
        return cls.from_table(
            table,
            Path(path),
            column=column,
            delta=delta,
            delta_column=delta_column,
            tiers=tiers,
            person=person,
            conflict=conflict,
            spelling=spelling,
        )

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
        person: str | None = None,
        conflict: Conflict = "refuse",
        spelling: str | Sequence[str] | None = None,
    ) -> Budgets:
        """The same from a pyarrow.Table that was read from `path`; messages name the path."""
        epsilon = epsilon_column(table, column, path) if tiers is None else tier_column(table, column, path, tiers)
        deltas = delta if delta_column is None else epsilon_column(table, delta_column, path)
        if person is None:
            return cls(epsilon, deltas)
        ids = ids_in(table, one_column(person), path, BudgetError, as_rule(spelling))
        return cls.by_person(epsilon, ids, delta=deltas, conflict=conflict, spelling=spelling)

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
        Budgets(2 persons, 2 groups)
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
        return cls(np.random.default_rng(seed).permutation(epsilon), delta, unit=unit)

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
        classes, index, counts = classes_of(targets)
        without = {name: n for name, n in zip(classes, counts, strict=True) if name not in epsilons}
        if without:
            # Only classes of many records are named: the others are values of a few people.
            named = ", ".join(repr(name) for name, n in without.items() if n >= SMALLEST_SHOWN)
            which = f" ({named})" if named else ""
            raise BudgetError(
                f"{len(without):,} of {len(classes):,} classes have no epsilon{which}. Give one for each class."
            )
        values = np.array([epsilons[name] for name in classes], dtype=np.float64)[index]
        if ids is None:
            return cls(values, delta)
        return cls.by_person(values, ids, delta=delta, spelling=spelling)

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
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", EpsilonsWarning)
            starts = None if self._starts is None else self._starts[chosen]
            return Budgets(self._epsilon[chosen], self._delta[chosen], unit=self.unit, starts=starts)._with(roster)

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
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", EpsilonsWarning)
            return Budgets(self._epsilon, self._delta, unit=self.unit, starts=self._starts)

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
        """What an accountant needs beside a history: (groups,) deltas, or (groups, orders) starts of accounts."""
        return self._groups.claims

    @property
    def group(self) -> IntArray:
        """(records,) group of each record (or person): its index into `epsilons`."""
        return self._group

    @property
    def groups(self) -> Groups:
        """epsilons, deltas and counts of all groups as one value."""
        return self._groups

    @property
    def records(self) -> int:
        """Number of records, or of persons."""
        return len(self._epsilon)

    @cached_property
    def shares(self) -> FloatArray:
        """(groups,) part of all records in each group; adds up to 1."""
        shares: FloatArray = read_only(self.counts / self.counts.sum())
        return shares

    def __len__(self) -> int:
        return self.records

    def __repr__(self) -> str:
        return f"Budgets({self.records:,} {self.unit}s, {len(self._groups):,} groups)"


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
