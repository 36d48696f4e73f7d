"""The person of a row in a config: data.person, and what must go with it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..ids import SEVERAL_OWNERS
from ..planning.guarantee import EACH_ROW

#: What being left out means for the guarantee.
ROSTER = (
    "Who is left out is a part of the list of budgets, so while the roster is public, the guarantee does not hide it."
)


def one_owner(person: Any) -> Any:
    """The value of data.person. Raises ValueError for several columns: no guarantee covers several owners of a row."""
    if isinstance(person, list):
        one = f"write person = {person[0]!r}. " if len(person) == 1 else ""
        raise ValueError(one or SEVERAL_OWNERS.format(count=len(person)).rstrip("."))
    if isinstance(person, str) and not person.strip():
        raise ValueError(f'name the column with the id of each row\'s person, or write "{EACH_ROW}"')
    return person


def check_persons(person: str | None, uses: Mapping[str, list[str]], needs: Mapping[str, bool]) -> None:
    """Raise ValueError for a column of persons with another use, and for keys that need one.

    person  data.person
    uses    key -> the columns that it names
    needs   key -> whether it asks for something that only persons have
    """
    column = column_of_persons(person)
    for key, names in uses.items():
        if column is not None and column in names:
            raise ValueError(
                f"{column!r} is data.person, and a person's id is never an input or a target: remove it from {key}"
            )
    for key, is_asked in needs.items():
        if is_asked and column is None:
            raise ValueError(f"{key} is about several rows of one person: name the column of their ids in data.person")


def check_charged(person: str | None, given: Mapping[str, bool]) -> None:
    """Raise ValueError for a config with [registry] without a column of persons, or with a key that does not fit.

    given  key -> whether the config has it
    """
    if column_of_persons(person) is None:
        raise ValueError("[registry] is about people: name the column of their ids in data.person")
    for key, is_given in given.items():
        if is_given:
            raise ValueError(
                f"{key} does not go with [registry]: budgets come from the registry, which adds up unseeded runs one "
                f"by one. Remove {key}, or [registry] (--registry, --share, --project)"
            )


def column_of_persons(person: str | None) -> str | None:
    """The column of ids that data.person names; None if it names none."""
    return None if person == EACH_ROW else person
