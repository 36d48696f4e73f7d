"""The budgets that a config names, and the rows that belong to each of them."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ..budgets import Budgets
from ..data import Source
from ..data.infer import names_persons, repeated_identifiers
from ..disclosure import how_many
from ..errors import BudgetError, DataError, EpsilonsWarning
from ..mechanism import IntArray
from ..persons import Roster, texts_of
from ..planning.guarantee import EACH_ROW
from ..tabular import column_of
from .config import BudgetsSection, Config
from .config_persons import column_of_persons
from .consent import offered

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


def owned(config: Config, table: Any, rows: int, folder: Path, where: str) -> Owned:
    """The budgets of all training records, and their persons.

    table  the pyarrow.Table of the training data; None if they are none
    rows   number of training records
    where  the training data, for messages

    Raises BudgetError for budgets that do not fit the data, DataError for data that need a statement about persons.
    """
    column = column_of_persons(config.data.person_stated)
    if column is None:
        if config.data.person_stated is None:
            _check_stated(table, where)
        return Owned(_of_records(config, table, rows, folder, where))
    if table is None or column not in table.column_names:
        raise DataError(
            f"{where} has no column {column!r}, which data.person names. Name the column with the id of each row's "
            f'person, or write person = "{EACH_ROW}".'
        )
    _warn_of_other_ids(table, column, where)
    return _of_persons(config, column, column_of(table, column, folder / where, DataError), table, folder, where)


def persons_in(config: Config, table: Any, folder: Path) -> tuple[IntArray, list[str]]:
    """(rows,) each row's person, and (persons,) their ids, in the order of first rows. Raises DataError."""
    column, where = column_of_persons(config.data.person_stated), config.data.train
    if column is None:
        raise DataError("A run that is charged to a registry is about people: name the column of ids in data.person.")
    if table is None or column not in table.column_names:
        raise DataError(f"{where} has no column {column!r}, which data.person names. Name the column of people's ids.")
    _warn_of_other_ids(table, column, where)
    roster = Roster.of(column_of(table, column, folder / where, DataError))
    assert roster.of_row is not None
    return roster.of_row, roster.texts


def withdrawn_rows(config: Config, table: Any, rows: int, members: Members) -> npt.NDArray[np.bool_]:
    """(rows,) True for test rows of people who withdrew; all False for data without their ids."""
    column = column_of_persons(config.data.person_stated)
    if table is None or column is None or column not in table.column_names:
        return np.zeros(rows, dtype=bool)
    roster = Roster.of(table.column(column))
    return np.asarray(members.withdrawn(roster.texts)[roster.of_row])


def _of_persons(config: Config, column: str, ids: Any, table: Any, folder: Path, where: str) -> Owned:
    """Budgets by the ids (rows,) of the training rows: simulated, from a file with ids, or from the table itself."""
    section = config.budgets
    if section.shares is not None:
        roster = Roster.of(ids)
        return Owned(_simulated(section, len(roster), "person"), roster.of_row)
    keys = section.model_dump(include={*COLUMN_KEYS, "conflict"})
    if section.file is None:
        budgets = Budgets.from_table(table, folder / where, **keys, person=column)
        return Owned(budgets.without_ids(), budgets.person)
    file = folder / section.file
    listed = offered(config, folder)
    if column not in listed.column_names:
        raise BudgetError(
            f"{file} has no column {column!r}, which data.person names. The budgets of persons need their ids: one row "
            "per person, in any order."
        )
    budgets = Budgets.from_table(listed, file, **keys, person=column)
    return Owned(budgets.without_ids(), budgets.persons_of(ids))


def _of_records(config: Config, table: Any, rows: int, folder: Path, where: str) -> Budgets:
    """One budget per row: simulated, from a file, or from a column of the table."""
    section = config.budgets
    if section.shares is not None:
        return _simulated(section, rows, "record")
    keys = section.model_dump(include=COLUMN_KEYS)
    if section.file is not None:
        file = folder / section.file
        budgets = Budgets.from_table(offered(config, folder), file, **keys)
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


def apart(config: Config, trained: Any, test: Source) -> tuple[Source, str | None]:
    """Test data without rows of people who also train, where data.test_people says so, and how many people these are.

    Where it does not, there is a warning about such people: scores are then too high.

    trained  the pyarrow.Table of the training data; None, or without the column of persons, it cannot be compared
    """
    import pyarrow.compute as pc

    column = column_of_persons(config.data.person_stated)
    if column is None or any(table is None or column not in table.column_names for table in (trained, test.table)):
        if config.data.test_people:
            raise DataError(f"data.test_people needs the column {column!r} in the training and the test data.")
        return test, None
    persons = texts_of(test.table.column(column))
    shared = pc.is_in(persons, value_set=texts_of(trained.column(column)))
    if not pc.any(shared).as_py():
        return test, None
    found = f"{how_many(len(persons.filter(shared).unique()), len(persons.unique()))} persons of the test data"
    if config.data.test_people:
        if pc.all(shared).as_py():
            raise DataError(
                "All persons of the test data have rows in the training data, so data.test_people leaves none."
            )
        return test.chosen(~np.asarray(shared)), f"{found} also train: their rows are not tested on."
    warnings.warn(
        f"{found} have rows in the training data, too. Their scores are too high, and say little of others. Leave "
        'them out with data.test_people = "new", or hold persons out with data.test_share.',
        EpsilonsWarning,
        stacklevel=2,
    )
    return test, None


def test_owned(config: Config, table: Any, path: Path, folder: Path) -> Owned | None:
    """The budgets of test records from their own table, or by their persons from the file of budgets; None without any.

    A person of the test data who is not in that file has no budget: position -1.
    """
    import pyarrow.compute as pc

    section, columns = config.budgets, [] if table is None else table.column_names
    column = column_of_persons(config.data.person_stated)
    person = column if column in columns else None
    keys = section.model_dump(include=COLUMN_KEYS if person is None else {*COLUMN_KEYS, "conflict"})
    if section.shares is not None or (section.column not in columns and (section.file is None or person is None)):
        return None
    if section.column in columns:
        budgets = Budgets.from_table(table, path, **keys, person=person)
        return Owned(budgets if person is None else budgets.without_ids(), budgets.person)
    listed, ids = offered(config, folder), texts_of(table.column(person))
    budgets = Budgets.from_table(listed, folder / str(section.file), **keys, person=person)
    known = pc.is_in(ids, value_set=texts_of(listed.column(person)))
    if not pc.any(known).as_py():
        return None
    tested, of_row = np.unique(budgets.persons_of(ids.filter(known)), return_inverse=True)
    places = np.full(len(ids), -1, dtype=np.int64)
    places[np.asarray(known)] = of_row
    return Owned(budgets.subset(tested).without_ids(), places)
