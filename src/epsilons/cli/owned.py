"""The budgets that a config names, and the rows that belong to each of them."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..budgets import Budgets
from ..data import Source
from ..data.infer import names_persons, repeated_identifiers
from ..disclosure import how_many
from ..errors import BudgetError, DataError, EpsilonsWarning
from ..ids import Rule, ids_in
from ..mechanism import IntArray
from ..persons import Roster
from ..planning.guarantee import EACH_ROW
from .config import BudgetsSection, Config
from .config_persons import column_of_persons
from .consent import Consent, Mask, are_in, read_listed

if TYPE_CHECKING:
    from .registry_train import Members

#: The keys of [budgets] that are also arguments of `Budgets.from_csv` and `Budgets.from_table`.
COLUMN_KEYS = {"column", "delta", "delta_column", "tiers"}


@dataclass(frozen=True, eq=False)
class Owned:
    """Budgets, and which rows of the data they are of. Ids are not kept: from here on, positions count.

    person  (rows,) each row's person, as a position in the budgets; None if each row has a budget of its own
    """

    budgets: Budgets
    person: IntArray | None = None

    def part(self, positions: IntArray) -> tuple[IntArray, Owned]:
        """(the rows of these records or persons, in data-set order, and their budgets)."""
        chosen = self.budgets.subset(positions)
        if self.person is None:
            return positions, Owned(chosen)
        place = np.full(len(self.budgets), -1, dtype=np.int64)
        place[positions] = np.arange(len(positions))
        rows = np.flatnonzero(place[self.person] >= 0)
        return rows, Owned(chosen, place[self.person[rows]])

    def of(self, rows: IntArray, everyone: bool = False) -> Owned:
        """The same of these rows alone. everyone: True to keep the budgets of persons without such rows."""
        if self.person is None:
            return Owned(self.budgets.subset(rows))
        present = np.arange(len(self.budgets)) if everyone else np.unique(self.person[rows])
        return Owned(self.budgets.subset(present), np.searchsorted(present, self.person[rows]))


def owned(config: Config, table: Any, rows: int, folder: Path, where: str, found: Consent | None) -> Owned:
    """The budgets of all training records, and their persons.

    table  the pyarrow.Table of the training data; None if they are none
    rows   number of training records
    where  the training data, for messages
    found  who takes part, and the entries of the file of budgets

    Raises BudgetError for budgets that do not fit the data, DataError for data that need a statement about persons.
    """
    column = column_of_persons(config.data.person_stated)
    if column is None:
        if config.data.person_stated is None:
            _check_stated(table, where)
        return Owned(_of_records(config, table, rows, folder, where, found))
    if table is None or column not in table.column_names:
        raise DataError(
            f"{where} has no column {column!r}, which data.person names. Name the column with the id of each row's "
            f'person, or write person = "{EACH_ROW}".'
        )
    _warn_of_other_ids(table, column, where)
    assert found is not None  # made for every config with persons
    return _of_persons(config, column, table, folder, where, found)


def persons_in(config: Config, table: Any, folder: Path, rule: Rule) -> tuple[IntArray, list[str]]:
    """(rows,) each row's person, and (persons,) their ids, in the order of first rows. Raises DataError."""
    column, where = column_of_persons(config.data.person_stated), config.data.train
    if column is None:
        raise DataError("A run that is charged to a registry is about people: name the column of ids in data.person.")
    if table is None or column not in table.column_names:
        raise DataError(f"{where} has no column {column!r}, which data.person names. Name the column of people's ids.")
    _warn_of_other_ids(table, column, where)
    roster = Roster.of(ids_in(table, column, folder / where, DataError, rule))
    assert roster.of_row is not None
    return roster.of_row, roster.texts


def _of_persons(config: Config, column: str, table: Any, folder: Path, where: str, found: Consent) -> Owned:
    """Budgets by the ids of the training rows: simulated, from a file with ids, or from the table itself."""
    section, rule = config.budgets, found.rule
    ids = ids_in(table, column, folder / where, DataError, rule)
    if section.shares is not None:
        roster = Roster.of(ids)
        return Owned(_simulated(section, len(roster), "person"), roster.of_row)
    keys = section.model_dump(include={*COLUMN_KEYS, "conflict"}) | {"person": column, "spelling": rule}
    if section.file is None:
        budgets = Budgets.from_table(table, folder / where, **keys)
        return Owned(budgets.without_ids(), budgets.person)
    file, listed = folder / section.file, found.usable
    budgets = Budgets.from_table(listed, file, **keys)
    owner = Owned(budgets.without_ids(), budgets.persons_of(ids))
    return owner.of(np.arange(len(ids)), section.without_rows is not None)


def _of_records(config: Config, table: Any, rows: int, folder: Path, where: str, found: Consent | None) -> Budgets:
    """One budget per row: simulated, from a file, or from a column of the table."""
    section = config.budgets
    if section.shares is not None:
        return _simulated(section, rows, "record")
    keys = section.model_dump(include=COLUMN_KEYS)
    if section.file is not None:
        file = folder / section.file
        listed = read_listed(config, folder) if found is None else found.usable
        budgets = Budgets.from_table(listed, file, **keys)
        if len(budgets) != rows:
            raise BudgetError(
                f"{file} holds {len(budgets):,} budgets for the {rows:,} records of {where}. It needs one row "
                "per record, in the same order; or name the column of ids of both files in data.person."
            )
        return budgets
    if table is None:
        raise BudgetError(
            f"{where} has no columns to read budgets from. Give [budgets] file = … with one row per record, or "
            "simulate budgets with [budgets] shares."
        )
    return Budgets.from_table(table, folder / where, **keys)


def _simulated(section: BudgetsSection, count: int, unit: Any) -> Budgets:
    assert section.shares is not None
    shares = {float(level): share for level, share in section.shares.items()}
    return Budgets.from_shares(shares, records=count, delta=section.delta, seed=section.seed, unit=unit)


def _check_stated(table: Any, where: str) -> None:
    """Raise DataError if some column looks like ids of persons with several rows, and the config says nothing."""
    repeated = [] if table is None else repeated_identifiers(table)
    if repeated:
        name = repeated[0]
        raise DataError(
            f"Column {name!r} of {where} looks like the id of a person, and its values repeat: several rows may belong "
            "to one person, and a budget per row would not cover them together. Write in [data]: person = "
            f'"{name}" for one budget per person, with all rows of the person; or person = "{EACH_ROW}" if no person '
            "has several."
        )


def _warn_of_other_ids(table: Any, column: str, where: str) -> None:
    """Warn if every row has a person of its own, and another column looks like ids of persons with several rows."""
    repeated = repeated_identifiers(table)
    others = [name for name in repeated if names_persons(name)]
    if others and column not in repeated:
        warnings.warn(
            f"Every row of {where} has its own id in {column!r}, which data.person names, and the values of "
            f"{others[0]!r} repeat. If that is the id of a person, name it: otherwise a budget covers one row.",
            EpsilonsWarning,
            stacklevel=2,
        )


def apart(
    config: Config, trained: Source, test: Source, path: Path, members: Members | None
) -> tuple[Mask, str | None]:
    """(test rows,) which are tested on, and how many persons are not because they also train.

    Those who withdrew from a registry are not. Those who also train are not if data.test_people says so; else there is
    a warning about them: scores are then too high.

    path  the file of the test data
    """
    column, is_new = column_of_persons(config.data.person_stated), config.data.test_people is not None
    tables, kept = (trained.table, test.table), np.ones(len(test), dtype=bool)
    if column is None or any(table is None or column not in table.column_names for table in tables):
        if is_new:
            raise DataError(f"data.test_people needs the column {column!r} in the training and the test data.")
        return kept, None
    rule = config.data.spelling if members is None else members.rule
    of_train, of_test = (ids_in(table, column, path, DataError, rule) for table in tables)
    shared, persons = are_in(of_test, of_train), of_test.unique()
    if members is not None:
        kept = ~are_in(of_test, persons, members.withdrawn(persons.to_pylist()))
    if not shared.any():
        return kept, None
    found = f"{how_many(int(are_in(persons, of_train).sum()), len(persons))} persons of the test data"
    if is_new:
        return kept & ~shared, f"{found} also train: their rows are not tested on."
    warnings.warn(
        f"{found} have rows in the training data, too. Their scores are too high, and say little of others. Leave "
        'them out with data.test_people = "new", or hold persons out with data.test_share.',
        EpsilonsWarning,
        stacklevel=2,
    )
    return kept, None


def test_owned(config: Config, table: Any, path: Path, found: Consent | None) -> Owned | None:
    """The budgets of the records of another file: from their own table, or by their persons from the file of budgets.

    A person of the test data who is not in that file has no budget: position -1. None if there are no budgets.

    found  who of the test data takes part, and the entries of the file of budgets
    """
    section, columns = config.budgets, [] if table is None else table.column_names
    column, rule = column_of_persons(config.data.person_stated), () if found is None else found.rule
    if section.shares is None and section.column in columns:
        if column not in columns:
            return Owned(Budgets.from_table(table, path, **section.model_dump(include=COLUMN_KEYS)))
        keys = section.model_dump(include={*COLUMN_KEYS, "conflict"})
        budgets = Budgets.from_table(table, path, **keys, person=column, spelling=rule)
        return Owned(budgets.without_ids(), budgets.person)
    if column is None or column not in columns or section.file is None or found is None:
        return None  # simulated, or not known
    listed = ids_in(found.usable, column, path.parent / section.file, BudgetError, rule)
    known = are_in(ids_in(table, column, path, DataError, rule), listed)
    if not known.any():
        return None
    rows = np.flatnonzero(known)
    owner = _of_persons(config, column, table.take(rows), path.parent, path.name, found).of(np.arange(len(rows)))
    return replace(owner, person=np.where(known, np.asarray(owner.person)[np.cumsum(known) - 1], -1))
