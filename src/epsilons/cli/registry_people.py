"""Import and withdraw lists of people. No message names a person, and small counts are not shown."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rich.progress import Progress

from ..budgets import Budgets
from ..data.tables import chosen
from ..disclosure import how_many
from ..errors import BudgetError, DataError, EpsilonsWarning, InputError, RegistryRefusedError
from ..ids import Rule, check_stated, ids_in
from ..mechanism import FloatArray
from ..persons import as_conflict
from ..registry import Registry
from ..tabular import read_table
from .config import BudgetsSection
from .consent import Entries
from .console import console

#: People per transaction, so that a large import shows progress and can be repeated after an interruption.
AT_ONCE = 100_000


class Wishes(NamedTuple):
    """ids, epsilon, delta: (people,) each. left_out: the ids of those whom the list leaves out"""

    ids: list[str]
    epsilon: FloatArray
    delta: FloatArray
    left_out: list[str]


def read_wishes(
    file: Path,
    person: str,
    column: str,
    delta: float,
    delta_column: str | None,
    tiers: dict[str, float] | None,
    conflict: str,
    rule: Rule = (),
    left_out: Sequence[str] = (),
) -> Wishes:
    """The wishes in a file, as `Budgets.from_csv` reads them. Raises BudgetError.

    left_out  cells of the column that leave a person out, with all rows of the person; "" means empty cells
    """
    table = read_table(file, "budgets", BudgetError, [name for name in (column, delta_column, person) if name])
    ids = ids_in(table, person, file, BudgetError, rule)
    section: dict[str, Any] = {"column": column, "tiers": tiers, "left_out": left_out, "blank": "" in left_out or None}
    used = Entries.of(table, ids, BudgetsSection.model_construct(**section), file).used
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", EpsilonsWarning)  # of a large delta for few people: this is no data set
        budgets = Budgets.from_table(
            chosen(table, used, file),
            file,
            column=column,
            delta=delta,
            delta_column=delta_column,
            tiers=tiers,
            person=person,
            conflict=as_conflict(conflict),
            spelling=rule,
        )
    check_stated(rule, ids)  # also of those who are left out
    out = ids.filter(~used).unique().to_pylist()
    return Wishes(budgets.ids, budgets.epsilons[budgets.group], budgets.delta[budgets.group], out)


def read_ids(file: Path, column: str | None, rule: Rule = ()) -> list[str]:
    """The ids in a file, each once. Raises DataError."""
    names = [column] if column else read_table(file, "list of people", DataError).column_names
    if len(names) != 1:
        raise InputError(f"{file} has {len(names):,} columns. Name the one with the ids: --column.")
    table = read_table(file, "list of people", DataError, names)  # as texts, because 007 is no number
    ids: list[str] = ids_in(table, names[0], file, DataError, rule).unique().to_pylist()
    return ids


def import_wishes(registry: Registry, wishes: Wishes, change: bool, quiet: bool) -> Iterator[str]:
    """Enrol the new people and change the others, and say so. Raises RegistryRefusedError before anything is written.

    change  True: change the wishes of people who are enrolled with another one, unless they withdrew

    People whom the list leaves out are withdrawn, if they are enrolled.
    """
    registry.check_wishes(wishes.epsilon, wishes.delta)
    if len(wishes.ids) >= 2 * AT_ONCE:
        console(stderr=True, quiet=quiet).print(f"Looking up {len(wishes.ids):,} people …", style="dim")
    enrolled = registry.are_enrolled(wishes.ids)
    known = np.flatnonzero(enrolled)
    other = known
    if len(known):
        accounts = registry.account([wishes.ids[i] for i in known])
        differs = (accounts.epsilon != wishes.epsilon[known]) | (accounts.delta != wishes.delta[known])
        other = known[differs & ~accounts.withdrawn]
        if accounts.withdrawn.any():
            yield "Some of these people withdrew. They stay so, and what the file says about them is not used."
    if len(other) and not change:
        raise RegistryRefusedError(
            f"{how_many(len(other), len(wishes.ids))} people of this list are enrolled with another budget. Nothing "
            "was written. To change their budgets: --change. What they spent stays spent."
        )
    new = np.flatnonzero(~enrolled)
    with Progress(console=console(stderr=True), disable=quiet or len(new) + len(other) < 2 * AT_ONCE) as progress:
        task = progress.add_task("people", total=len(new) + len(other))
        for call, who in ((registry.change, other), (registry.enrol, new)):
            for i in range(0, len(who), AT_ONCE):
                some = who[i : i + AT_ONCE]
                call([wishes.ids[j] for j in some], wishes.epsilon[some], wishes.delta[some])
                progress.advance(task, len(some))
    yield f"{how_many(len(new), len(wishes.ids))} people of this list are new, and were enrolled."
    if len(other):
        yield f"{how_many(len(other), len(wishes.ids))} people of this list have another budget from now on."
    if out := wishes.left_out:
        withdraw(registry, out)
        yield f"{how_many(len(out), len(out) + len(wishes.ids))} people of this list are left out, and not enrolled."


def withdraw(registry: Registry, ids: list[Any]) -> str | None:
    """Withdraw all people who are enrolled; a message if others are in the list."""
    enrolled = registry.are_enrolled(ids)
    if enrolled.any():
        registry.withdraw([one for one, is_known in zip(ids, enrolled.tolist(), strict=True) if is_known])
    if not (strangers := int((~enrolled).sum())):
        return None
    if strangers == len(ids):
        return "No person of this list is enrolled. Check the ids: they are compared as texts."
    return (
        f"{how_many(strangers, len(ids))} people of this list are not enrolled; check their ids. All others were "
        "withdrawn."
    )
