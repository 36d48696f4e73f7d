"""persons= of make_private and fit: each row's person, checked against the budgets. No message shows an id."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..budgets import Budgets
from ..errors import DataError, InputError
from ..ids import SEVERAL_OWNERS
from ..mechanism import IntArray
from .persons import Persons

_MAKE = 'Budgets.by_person(epsilon, ids) or Budgets.from_csv(…, person="…")'


def persons_of(budgets: Budgets, rows: int, persons: Any = None, rows_per_person: int = 1, views: int = 1) -> Persons:
    """Whose rows are whose.

    rows             number of rows of the data set
    persons          (rows,) ids that the budgets know, or, for budgets without ids, positions in the budgets; None
                     takes those of the budgets
    rows_per_person  number of rows that a drawn person contributes, at most
    views            number of readings of each row

    Raises DataError if persons, budgets and rows do not fit, InputError for other numbers than whole ones above 0,
    BudgetError for ids that the budgets do not know, or that may be several spellings of one, without a statement.
    """
    check_number("rows_per_person", rows_per_person)
    check_number("views", views)
    if budgets.unit == "record":
        _check_records(persons, rows_per_person)
        return Persons(rows, None, 1, int(views))
    budgets.check_spelling()
    person = _of_budgets(budgets, rows) if persons is None else _given(budgets, persons)
    if len(person) != rows:
        raise DataError(
            f"persons= needs the person of each row, in data-set order; got {len(person):,} for a data set of "
            f"{rows:,} rows. For part of the data take the same part of the ids."
        )
    return Persons.of(person, len(budgets), int(rows_per_person), int(views))


def check_size(persons: Persons, largest: int) -> None:
    """Refuse persons who do not fit into a physical batch. Raises DataError."""
    if persons.most > largest:
        settings = f"rows_per_person={persons.rows_per_person:,} and views={persons.views:,}"
        raise DataError(
            f"A person's rows are computed together, and with {settings} those of some person do not fit into a "
            f"physical batch of {largest:,} rows. Lower rows_per_person or views, or raise "
            "Performance(max_physical_batch=…)."
        )


def check_number(name: str, value: object) -> None:
    """Raise InputError for another value than a whole number above 0."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 1:
        raise InputError(f"{name} must be a whole number of at least 1, got {value!r}.")


def _check_records(persons: Any, rows_per_person: int) -> None:
    """Refuse what budgets of records have no use for."""
    if persons is not None or rows_per_person != 1:
        name = "persons" if persons is not None else "rows_per_person"
        raise DataError(
            f"{name}= is for budgets of persons, and these are of records: each row has a budget of its own, and all "
            f"rows of one person together lose the sum. Make budgets with {_MAKE}, plan with them, and pass them here; "
            f"or leave {name}= out if each row is one person."
        )


def _of_budgets(budgets: Budgets, rows: int) -> IntArray:
    if budgets.person is None or len(budgets.person) != rows:
        known = "hold no rows" if budgets.person is None else f"were made from {len(budgets.person):,} rows"
        raise DataError(
            f"The budgets are of persons and {known}, so it is unknown whose each of these {rows:,} rows is. Pass "
            "persons=, the id of each row's person in data-set order; for budgets without ids, the person's position "
            "in the budgets. If each row is one person, in the order of the budgets, pass persons=range(rows)."
        )
    return budgets.person


def _given(budgets: Budgets, persons: Any) -> IntArray:
    """(rows,) positions in the budgets."""
    if budgets._roster is not None:
        return budgets.persons_of(persons)
    if np.ma.is_masked(persons):
        raise DataError("Some persons are masked. Every row needs one; fill them in, or leave these rows out.")
    try:
        array = np.asarray(persons)
    except (TypeError, ValueError, RuntimeError):
        array = np.empty((), dtype=object)
    if array.ndim == 2:
        raise DataError(SEVERAL_OWNERS.format(count=array.shape[1]))
    if array.ndim != 1 or not np.issubdtype(array.dtype, np.integer):
        raise DataError(
            "These budgets hold no ids, so persons= takes positions in the budgets: a flat list of whole numbers "
            f"counted from 0, got an array of {array.dtype} of shape {array.shape}. For ids make the budgets with "
            f"{_MAKE}."
        )
    if len(array) and not (int(array.min()) >= 0 and int(array.max()) < len(budgets)):
        raise DataError(
            f"persons= has positions outside the budgets of {len(budgets):,} persons: positions are whole numbers from "
            f"0 to {len(budgets) - 1:,}. For ids make the budgets with {_MAKE}."
        )
    return array.astype(np.int64)
