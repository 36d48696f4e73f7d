"""Persons: which rows of a table belong to one person, by an id in every row (`ids`).

Ids are confidential. No message, repr or file holds one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, cast

import numpy as np

from ..core.disclosure import how_many
from ..core.mechanism import FloatArray, IntArray, Unit, read_only
from ..errors import BudgetError
from .ids import SEVERAL_OWNERS, Rule, check_stated, texts_of

#: What happens to a person whose rows state different budgets.
Conflict = Literal["refuse", "strictest"]


class Roster:
    """The persons of some budgets: their ids, and the rows that belong to them. Its repr shows neither.

    of_row  (rows,) each row's person, as a position; None after a choice of persons
    rule    how ids are made equal
    """

    def __init__(self, names: Any, of_row: IntArray | None, rule: Rule = ()) -> None:
        self._names = names  # pyarrow.Array of texts, (persons,)
        self.of_row = of_row
        self.rule = rule

    @classmethod
    def of(cls, ids: Any, rule: Rule = ()) -> Roster:
        """The persons of these ids (rows,), in the order of their first row. Raises BudgetError for an empty id."""
        import pyarrow.compute as pc

        encoded = pc.dictionary_encode(texts_of(ids, rule))
        return cls(encoded.dictionary, read_only(encoded.indices.to_numpy().astype(np.int64)), rule)

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

        texts = texts_of(ids, self.rule)
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
        return Roster(self._names.take(positions), None, self.rule)

    def check_stated(self) -> None:
        """Raise BudgetError if the rule leaves open which ids are of one person."""
        check_stated(self.rule, self._names)


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
