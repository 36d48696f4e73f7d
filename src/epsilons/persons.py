"""Persons: which rows of a table belong to one person, by an id in every row.

Ids are compared as texts, without blanks around them: 7, 7.0 and "7" are one id, and "07" is another. Ids are
confidential. No message, repr or file holds one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, cast

import numpy as np

from .disclosure import how_many
from .errors import BudgetError
from .mechanism import FloatArray, IntArray, Unit, read_only
from .tabular import EMPTY, as_text

#: What happens to a person whose rows state different budgets.
Conflict = Literal["refuse", "strictest"]

#: Characters around an id that do not belong to it.
BLANKS = " \t\r\n\v\f\u00a0"

#: Larger floats do not hold every whole number, so two ids could become one.
LARGEST_EXACT = 2**53

SEVERAL_OWNERS = (
    "A row has one person, got {count:,} columns of ids. A row about several people, such as a message with a sender "
    "and a receiver, is not protected for each of them by one id. Name the column of the people that you protect, and "
    "say that the others are not covered; or give linked people one id (of a household, of a conversation) in a new "
    "column, and name that."
)


class Roster:
    """The persons of some budgets: their ids, and the rows that belong to them. Its repr shows neither.

    of_row  (rows,) each row's person, as a position; None after a choice of persons
    """

    def __init__(self, names: Any, of_row: IntArray | None) -> None:
        self._names = names  # pyarrow.Array of texts, (persons,)
        self.of_row = of_row

    @classmethod
    def of(cls, ids: Any) -> Roster:
        """The persons of these ids (rows,), in the order of their first row. Raises BudgetError for an empty id."""
        import pyarrow.compute as pc

        encoded = pc.dictionary_encode(texts_of(ids))
        return cls(encoded.dictionary, read_only(encoded.indices.to_numpy().astype(np.int64)))

    def __len__(self) -> int:
        return len(self._names)

    @property
    def texts(self) -> list[str]:
        """(persons,) their ids. Confidential."""
        names: list[str] = self._names.to_pylist()
        return names

    def positions(self, ids: Any) -> IntArray:
        """(rows,) the position of each id's person. Raises BudgetError for ids that have no budget."""
        import pyarrow.compute as pc

        texts = texts_of(ids)
        found = pc.index_in(texts, value_set=self._names)
        if found.null_count:
            strangers = pc.count_distinct(texts.filter(pc.is_null(found))).as_py()
            raise BudgetError(
                f"{how_many(strangers, pc.count_distinct(texts).as_py())} persons have rows without a budget. Every "
                "person needs one: add these persons to the budgets, or leave their rows out."
            )
        return np.asarray(found.to_numpy().astype(np.int64))

    def chosen(self, positions: IntArray) -> Roster:
        """These persons, in this order, without rows. positions: each at most once"""
        return Roster(self._names.take(positions), None)


def per_person(values: FloatArray, of_row: IntArray, persons: int) -> FloatArray:
    """(persons,) the smallest of each person's values (rows,)."""
    smallest = np.full(persons, np.inf)
    np.minimum.at(smallest, of_row, values)
    return smallest


def check_agreement(smallest: Sequence[FloatArray], values: Sequence[FloatArray], of_row: IntArray) -> None:
    """Raise BudgetError if some person's rows state different budgets.

    smallest  (persons,) arrays, the smallest value of each person
    values    (rows,) arrays, in the same order
    """
    differs = np.zeros(len(of_row), dtype=bool)
    for low, value in zip(smallest, values, strict=True):
        differs |= value > low[of_row]
    if differs.any():
        persons, disagree = len(smallest[0]), len(np.unique(of_row[differs]))
        raise BudgetError(
            f"{how_many(disagree, persons)} persons have rows that state different budgets. State one budget for each "
            'person, or pass conflict="strictest" (--conflict, [budgets] conflict), which takes the smallest epsilon '
            "and the smallest delta of each person."
        )


def as_conflict(name: str) -> Conflict:
    """The rule of this name. Raises BudgetError for another name."""
    if name in ("refuse", "strictest"):
        return cast(Conflict, name)
    raise BudgetError(f"conflict must be 'refuse' or 'strictest', got {name!r}.")


def as_unit(name: str) -> Unit:
    """The unit of this name. Raises BudgetError for another name."""
    if name in ("record", "person"):
        return cast(Unit, name)
    raise BudgetError(f"unit must be 'record' or 'person', got {name!r}.")


def one_column(person: Any) -> str:
    """The one column of ids. Raises BudgetError for several: no guarantee covers several owners of a row."""
    if isinstance(person, str):
        return person
    if isinstance(person, list | tuple | set) and len(person) != 1:
        raise BudgetError(SEVERAL_OWNERS.format(count=len(person)))
    raise BudgetError(f"person must be the name of one column, got a {type(person).__name__}.")


def texts_of(ids: Any) -> Any:
    """pyarrow.Array (rows,) of the ids as texts. Raises BudgetError for empty ids, and for what is no list of ids."""
    import pyarrow
    import pyarrow.compute as pc

    cells = _as_arrow(ids)
    if pyarrow.types.is_integer(cells.type):
        texts = cells.cast(pyarrow.large_string())
    elif pyarrow.types.is_large_string(cells.type):
        texts = pc.utf8_trim(cells, BLANKS)
    else:
        texts = pyarrow.array([_text(cell) for cell in cells.to_pylist()], type=pyarrow.large_string())
    empty = pc.or_(pc.is_null(texts), pc.is_in(texts, value_set=pyarrow.array(EMPTY, type=pyarrow.large_string())))
    if count := int(pc.sum(empty).as_py() or 0):
        raise BudgetError(
            f"{how_many(count, len(texts))} rows have no id of a person: the cell is empty. Every row needs one. Fill "
            "them in, or leave these rows out."
        )
    return texts


def _as_arrow(ids: Any) -> Any:
    """pyarrow.Array (rows,). Lists of several types become texts. Raises BudgetError if that is impossible."""
    import pyarrow

    if not isinstance(ids, pyarrow.Array | pyarrow.ChunkedArray):
        if isinstance(ids, list) and set(map(type, ids)) == {str}:
            return pyarrow.array(ids, type=pyarrow.large_string())  # as below, without a look at each text
        ids = _as_array(ids)
        if ids.dtype == object:
            ids = pyarrow.array([_text(cell) for cell in ids.tolist()], type=pyarrow.large_string())
        else:
            ids = pyarrow.array(ids)
    if pyarrow.types.is_dictionary(ids.type):
        ids = ids.cast(ids.type.value_type)
    if pyarrow.types.is_string(ids.type):
        ids = ids.cast(pyarrow.large_string())  # the texts of one array may take more than 2 GB
    if isinstance(ids, pyarrow.ChunkedArray):
        ids = pyarrow.concat_arrays(ids.chunks) if ids.num_chunks else pyarrow.array([], type=ids.type)
    return ids


def _as_array(ids: Any) -> Any:
    """(rows,) an array; a list keeps the types of its cells, which numpy would turn into one type."""
    try:
        array = np.array(list(ids), dtype=object) if isinstance(ids, list | tuple) else np.asarray(ids)
    except (TypeError, ValueError, RuntimeError):
        raise BudgetError("The ids of persons must be a flat list of texts or whole numbers, one per row.") from None
    if array.ndim == 2 and array.shape[1] > 1:
        raise BudgetError(SEVERAL_OWNERS.format(count=array.shape[1]))
    if array.ndim != 1 or len(array) == 0:
        raise BudgetError(f"The ids of persons must be a flat list, one per row, got shape {array.shape}.")
    if np.ma.is_masked(ids):
        raise BudgetError("Some ids of persons are masked. Every row needs one; fill them in, or leave these rows out.")
    return array


def _text(cell: Any) -> str | None:
    """An id as text; None for an empty one. Raises BudgetError for a value that is no id."""
    if cell is None or type(cell).__name__ in ("NAType", "NaTType"):  # pandas' empty cells
        return None
    if isinstance(cell, np.generic):
        cell = cell.item()
    if isinstance(cell, float):
        if np.isnan(cell):
            return None
        if not abs(cell) <= LARGEST_EXACT:
            raise BudgetError(
                "Some ids of persons are infinite, or floats too large to be exact. Read the column as text or as "
                "whole numbers."
            )
    if isinstance(cell, bytes | bytearray | list | tuple | dict | set):
        raise BudgetError(f"The ids of persons must be texts or whole numbers, got a {type(cell).__name__}.")
    return as_text(cell)
