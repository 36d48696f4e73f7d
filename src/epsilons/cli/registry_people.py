"""Import and withdraw lists of people. No message names a person, and small counts are not shown."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.progress import Progress

from ..budgets import Budgets
from ..data.tables import chosen
from ..disclosure import how_many
from ..errors import BudgetError, DataError, EpsilonsWarning, InputError, RegistryRefusedError
from ..ids import Rule, check_stated, ids_in
from ..registry import Registry
from ..tabular import read_table
from .config import BudgetsSection
from .consent import Entries, are_in, check_names
from .console import console

#: People per transaction, so that a large import shows progress and can be repeated after an interruption.
AT_ONCE = 100_000


def read_wishes(file: Path, left_out: Sequence[str], days: dict[str, Any], **columns: Any) -> tuple[Budgets, list[str]]:
    """The wishes in a file, and the ids of people whom it leaves out. Raises BudgetError.

    left_out  cells of the column of wishes that leave a person out, with all rows of the person; "" means empty cells
    days      as_of, withdrawn_on, valid_from, valid_until and dates, as in [budgets] of a config; {} without dates
    columns   as for `Budgets.from_csv`
    """
    keys: dict[str, Any] = {key: columns.get(key) for key in ("column", "delta_column", "tiers")} | days
    keys |= {"left_out": list(left_out), "blank": "left out" if "" in left_out else None}
    section = BudgetsSection.model_construct(**keys)
    table = read_table(file, "budgets", BudgetError, [*section.columns, columns["person"]])
    check_names(table.column_names, section, file, columns["person"], True)
    ids = ids_in(table, columns["person"], file, BudgetError, columns["spelling"])
    used = Entries.of(table, ids, section, file).used
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", EpsilonsWarning)  # of a large delta for few people: this is no data set
        budgets = Budgets.from_table(chosen(table, used, file), file, **columns)
    check_stated(columns["spelling"], ids)  # also of those who are left out
    return budgets, ids.filter(~are_in(ids, ids, used)).unique().to_pylist()  # an expired row may be beside a new one


def read_ids(file: Path, column: str | None, rule: Rule = ()) -> list[str]:
    """The ids in a file, each once. Raises DataError."""
    table = read_table(file, "list of people", DataError, as_written=True)  # 007 is no number
    names = table.column_names
    if column is None and len(names) != 1:
        raise InputError(f"{file} has {len(names):,} columns. Name the one with the ids: --column.")
    ids: list[str] = ids_in(table, column or names[0], file, DataError, rule).unique().to_pylist()
    if not ids:
        raise DataError(f"{file} has a header but no rows. Is the file whole? Nobody was withdrawn.")
    return ids


def import_wishes(registry: Registry, wishes: Budgets, out: list[str], change: bool, quiet: bool) -> Iterator[str]:
    """Enrol the new people and change the others, and say so. Raises RegistryRefusedError before a budget is written.

    out     ids of people whom the list leaves out: those enrolled are withdrawn, also where the rest is refused
    change  True: change the wishes of people who are enrolled with another one, unless they withdrew
    """
    ids, epsilon, delta = wishes.ids, wishes.epsilons[wishes.group], wishes.delta[wishes.group]
    if out:  # first, so that they are withdrawn also if the rest is refused
        withdraw(registry, out)
        yield f"{how_many(len(out), len(out) + len(ids))} people of this list are left out, and not enrolled."
    registry.check_wishes(epsilon, delta)
    if len(ids) >= 2 * AT_ONCE:
        console(stderr=True, quiet=quiet).print(f"Looking up {len(ids):,} people …", style="dim")
    enrolled = registry.are_enrolled(ids)
    known = np.flatnonzero(enrolled)
    other = known
    if len(known):
        accounts = registry.account([ids[i] for i in known])
        differs = (accounts.epsilon != epsilon[known]) | (accounts.delta != delta[known])
        other = known[differs & ~accounts.withdrawn]
        if accounts.withdrawn.any():
            yield "Some of these people withdrew. They stay so, and what the file says about them is not used."
    if len(other) and not change:
        raise RegistryRefusedError(
            f"{how_many(len(other), len(ids))} people of this list are enrolled with another budget. No "
            "budget was written. To change their budgets: --change. What they spent stays spent."
        )
    new = np.flatnonzero(~enrolled)
    with Progress(console=console(stderr=True), disable=quiet or len(new) + len(other) < 2 * AT_ONCE) as progress:
        task = progress.add_task("people", total=len(new) + len(other))
        for call, who in ((registry.change, other), (registry.enrol, new)):
            for i in range(0, len(who), AT_ONCE):
                some = who[i : i + AT_ONCE]
                call([ids[j] for j in some], epsilon[some], delta[some])
                progress.advance(task, len(some))
    yield f"{how_many(len(new), len(ids))} people of this list are new, and were enrolled."
    if len(other):
        yield f"{how_many(len(other), len(ids))} people of this list have another budget from now on."


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
