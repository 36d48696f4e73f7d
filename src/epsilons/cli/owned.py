"""The budgets that a config names, and the rows that belong to each of them."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..budgets import Budgets
from ..data.infer import names_persons, repeated_identifiers
from ..disclosure import how_many
from ..errors import BudgetError, DataError, EpsilonsWarning
from ..mechanism import IntArray
from ..persons import Roster
from ..planning.guarantee import EACH_ROW
from .config import BudgetsSection, Config
from .config_persons import column_of_persons
from .consent import Consent, Mask, are_in, check_names

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
    if table is not None and config.budgets.file is None and config.budgets.shares is None:
        check_names(table.column_names, config.budgets, folder / where, column, False)
    if column is None:
        if config.data.person_stated is None:
            _check_stated(table, where)
        return Owned(_of_records(config, table, rows, folder, where, found))
    person, texts = persons_in(config, table, where, None if found is None else found.rows)
    assert found is not None
    section = config.budgets
    if section.shares is not None:
        return Owned(_simulated(section, len(texts), "person"), person)
    source, path = (table, where) if section.file is None else (found.usable, section.file)
    budgets = Budgets.from_table(source, folder / path, **_keys(config, found))
    owner = Owned(budgets.without_ids(), budgets.persons_of(found.rows))
    return owner.of(np.arange(len(found.rows)), section.without_rows is not None)


def _keys(config: Config, found: Consent) -> dict[str, Any]:
    """The arguments of `Budgets.from_table` for budgets of persons."""
    keys = config.budgets.model_dump(include={*COLUMN_KEYS, "conflict"})
    return keys | {"person": column_of_persons(config.data.person_stated), "spelling": found.rule}


def persons_in(config: Config, table: Any, where: str, ids: Any) -> tuple[IntArray, list[str]]:
    """(rows,) each row's person, and (persons,) their ids, in the order of first rows. Raises DataError.

    ids  (rows,) as the join read them; None without persons
    """
    column = column_of_persons(config.data.person_stated)
    if column is None or ids is None:
        raise DataError(
            f"data.person must name the column with the id of each row's person, and {where} has none called "
            f'{column!r}. Name it, or write person = "{EACH_ROW}".'
        )
    _warn_of_other_ids(table, column, where)
    roster = Roster.of(ids)
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


def apart(config: Config, of_train: Any, of_test: Any, rows: int, members: Members | None) -> tuple[Mask, str | None]:
    """(rows,) which test rows are tested on, and how many persons are not because they also train.

    Those who withdrew from a registry are not. Those who also train are not if data.test_people says so; else there is
    a warning about them: scores are then too high.

    of_train, of_test  the ids of the rows; None without persons
    """
    kept, is_new = np.ones(rows, dtype=bool), config.data.test_people is not None
    if of_train is None or of_test is None:
        if is_new:
            raise DataError("data.test_people needs the column of data.person in the training and the test data.")
        return kept, None
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


def test_owned(config: Config, table: Any, path: Path, found: Consent | None, ids: Any) -> Owned | None:
    """The budgets of the records of another file: from their own table, or by their persons from the file of budgets.

    A person of the test data who is not in that file has no budget: position -1. None if there are no budgets.

    found  who of the test data takes part, and the entries of the file of budgets
    ids    (rows,) their persons; None without persons
    """
    section, columns = config.budgets, [] if table is None else table.column_names
    if section.shares is None and section.column in columns:
        if found is None or ids is None:
            return Owned(Budgets.from_table(table, path, **section.model_dump(include=COLUMN_KEYS)))
        budgets = Budgets.from_table(table, path, **_keys(config, found))
        return Owned(budgets.without_ids(), budgets.person)
    if section.file is None or found is None or ids is None or found.entries is None:
        return None  # simulated, or not known
    person = np.full(len(ids), -1, dtype=np.int64)
    known = np.flatnonzero(are_in(ids, found.entries.ids, found.entries.used))
    if not len(known):
        return None
    budgets = Budgets.from_table(found.usable, path.parent / section.file, **_keys(config, found))
    present, person[known] = np.unique(budgets.persons_of(ids.take(known)), return_inverse=True)
    return Owned(budgets.subset(present).without_ids(), person)
