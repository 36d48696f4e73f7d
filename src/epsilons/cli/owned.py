"""The budgets that a config names, and the rows that belong to each of them."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..budgets import Budgets
from ..data.infer import names_persons, repeated_identifiers
from ..errors import BudgetError, DataError, EpsilonsWarning
from ..ids import Rule
from ..mechanism import IntArray
from ..persons import Roster
from ..planning.guarantee import EACH_ROW
from .config import BudgetsSection, Config
from .config_persons import column_of_persons
from .consent import Consent

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
    person, texts = persons_in(config, table, where, found)
    assert found is not None
    section = config.budgets
    if section.shares is not None:
        return Owned(_simulated(section, len(texts), "person"), person)
    keys = section.model_dump(include={*COLUMN_KEYS, "conflict"}) | {"person": column, "spelling": found.rule}
    if section.file is None:
        budgets = Budgets.from_table(table, folder / where, **keys)
        return Owned(budgets.without_ids(), budgets.person)
    budgets = Budgets.from_table(found.usable, folder / section.file, **keys)
    person = budgets.persons_of(found.rows)
    if section.without_rows is not None:
        return Owned(budgets.without_ids(), person)
    present, of_row = np.unique(person, return_inverse=True)
    return Owned(budgets.subset(present).without_ids(), of_row)


def persons_in(config: Config, table: Any, where: str, found: Consent | None) -> tuple[IntArray, list[str]]:
    """(rows,) each row's person, and (persons,) their ids, in the order of first rows. Raises DataError."""
    column = column_of_persons(config.data.person_stated)
    if column is None or found is None or found.rows is None:
        raise DataError(
            f"data.person must name the column with the id of each row's person, and {where} has none called "
            f'{column!r}. Name it, or write person = "{EACH_ROW}".'
        )
    _warn_of_other_ids(table, column, where)
    roster = Roster.of(found.rows)
    assert roster.of_row is not None
    return roster.of_row, roster.texts


def _of_records(config: Config, table: Any, rows: int, folder: Path, where: str, found: Consent | None) -> Budgets:
    """One budget per row: simulated, from a file, or from a column of the table."""
    section = config.budgets
    if section.shares is not None:
        return _simulated(section, rows, "record")
    keys = section.model_dump(include=COLUMN_KEYS)
    if section.file is not None:
        assert found is not None  # it has as many entries as there are records
        return Budgets.from_table(found.usable, folder / section.file, **keys)
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


def test_owned(config: Config, table: Any, path: Path, rule: Rule) -> Owned | None:
    """The budgets of test records from their own table; None if it has none."""
    section, columns = config.budgets, [] if table is None else table.column_names
    if section.column not in columns or section.shares is not None:
        return None
    person = column_of_persons(config.data.person_stated)
    if person is None or person not in columns:
        return Owned(Budgets.from_table(table, path, **section.model_dump(include=COLUMN_KEYS)))
    keys = section.model_dump(include={*COLUMN_KEYS, "conflict"})
    budgets = Budgets.from_table(table, path, **keys, person=person, spelling=rule)
    return Owned(budgets.without_ids(), budgets.person)
