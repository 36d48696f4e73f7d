"""Import and withdraw lists of people. No message names a person, and small counts are not shown."""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from rich.progress import Progress

from ..budgets.budgets import BudgetColumns, Budgets
from ..budgets.ids import Rule, check_stated, ids_in
from ..configs.config import BudgetsSection
from ..configs.consent import Entries, are_in, check_names
from ..core.disclosure import at_least, how_many
from ..data.tables import chosen
from ..errors import BudgetError, DataError, EpsilonsWarning, InputError, RegistryRefusedError, printable
from ..registry import Registry
from ..tabular import read_table
from .options import console, show_table

#: People per transaction, so that a large import shows progress and can be repeated after an interruption.
AT_ONCE = 100_000
#: A budget that is raised by more than this is confirmed.
FACTOR = 5


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
        budgets = Budgets.from_table(chosen(table, used, file), file, BudgetColumns(**columns))
    check_stated(columns["spelling"], ids)  # also of those who are left out
    return budgets, ids.filter(~are_in(ids, ids, used)).unique().to_pylist()  # an expired row may be beside a new one


def read_ids(file: Path, column: str | None, rule: Rule = ()) -> list[str]:
    """The ids in a file, each once. Raises DataError."""
    table = read_table(file, "list of people", DataError, as_written=True)  # 007 is no number
    names = table.column_names
    if column is None and len(names) != 1:
        raise InputError(f"{file} has {len(names):,} columns. Name the one with the ids: --person.")
    ids: list[str] = ids_in(table, column or names[0], file, DataError, rule).unique().to_pylist()
    if not ids:
        raise DataError(f"{file} has a header but no rows. Is the file whole? Nobody was withdrawn.")
    return ids


def import_wishes(
    registry: Registry, wishes: Budgets, out: list[str], change: bool, quiet: bool, yes: bool = False
) -> Iterator[str]:
    """Enrol the new people and change the others, and say so. Raises RegistryRefusedError before a budget is written.

    out     ids of people whom the list leaves out: those enrolled are withdrawn, also where the rest is refused
    change  True: change the wishes of people who are enrolled with another one, unless they withdrew
    yes     True: also to more than FACTOR times the epsilon that they had
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
    other = raised = known
    if len(known):
        accounts = registry.account([ids[i] for i in known])
        differs = (accounts.epsilon != epsilon[known]) | (accounts.delta != delta[known])
        other = known[differs & ~accounts.withdrawn]
        raised = known[(epsilon[known] > FACTOR * accounts.epsilon) & ~accounts.withdrawn]
        if accounts.withdrawn.any():
            yield "Some of these people withdrew. They stay so, and what the file says about them is not used."
    if len(other) and not change:
        raise RegistryRefusedError(
            f"{how_many(len(other), len(ids))} people of this list are enrolled with another budget. No "
            "budget was written. To change their budgets: --change. What they spent stays spent."
        )
    if len(raised) and not yes:  # such as 30, typed for 3
        raise RegistryRefusedError(
            f"{at_least(len(raised)).capitalize()} people of this list would have more than {FACTOR} times the epsilon "
            "that they had. No budget was written. If that is what they chose: --yes."
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


# -- What `epsilons registry show` prints

CONFIDENTIAL = "CONFIDENTIAL: this is one person's own account. Give it to that person alone, and keep no copy."


def show_all(registry: Registry, as_json: bool) -> None:
    """Aggregates: wishes, projects, runs."""
    found = registry.summary()
    if as_json:
        print(json.dumps(found.to_dict(), indent=1))
        return
    out = console()
    title = f"Registry {found.registry}: {found.people} people, {found.events:,} events. Internal: do not publish."
    out.print(title, style="bold")
    out.print(
        "Lifetime budgets. Share used: spent and reserved, on average over all who are enrolled, also those in no run."
    )
    wishes = [[w.label, at_least(w.people or 0), _part(w.used), w.can_take_part] for w in found.wishes]
    show_table((["epsilon", "people", "share used", "can take part"], wishes), out, left=1)
    if found.projects:
        projects = [
            [p.project or "(none)", f"{p.runs:,}", _part(p.quota), _part(p.used), p.people] for p in found.projects
        ]
        show_table((["project", "runs", "quota", "share used", "people"], projects), out, left=1)
    if found.runs:
        runs = [
            [r.run, r.project or "(none)", r.kind, r.state, f"{r.steps:,}", _of(r.charged), r.people]
            for r in found.runs
        ]
        show_table((["run", "project", "kind", "state", "reserved", "charged", "people"], runs), out, left=4)
    if any(r.state in ("reserved", "running") for r in found.runs):
        out.print(
            "Runs that are not settled stay charged for all reserved steps. An interrupted run continues (epsilons "
            "train … --resume), or is given up: epsilons registry settle URL RUN --abandon. So is a run that never "
            "began; without its folder: epsilons registry settle URL --cancel NAME.",
            style="dim",
        )


def show_run(registry: Registry, name: str, as_json: bool) -> None:
    """One run. Raises InputError if there is none of this name."""
    found = [run for run in registry.summary().runs if run.run == name]
    if not found:
        raise InputError(f"The registry has no run {name!r}. epsilons registry show URL lists all.")
    _show(asdict(found[0]), as_json)


def show_person(registry: Registry, one: str, as_json: bool) -> None:
    """One person's own account."""
    account = registry.account([one])
    used = float(account.used_share[0])
    values: dict[str, Any] = {
        "registry": registry.id,
        "epsilon": float(account.epsilon[0]),
        "delta": float(account.delta[0]),
        "used": round(used, 6) if np.isfinite(used) else None,
        "withdrawn": bool(account.withdrawn[0]),
        "can_take_part": bool(account.can_take_part[0]),
        "runs": [asdict(run) | {"used": round(run.used, 6)} for run in registry.runs_of(one)],
    }
    console(stderr=as_json).print(CONFIDENTIAL, style="bold")
    if as_json:
        print(json.dumps(values, indent=1))
        return
    runs = values.pop("runs")
    values["share_used"] = _part(values.pop("used"))
    _show(values, as_json)
    rows = [[run["run"], run["project"] or "(none)", run["kind"], run["state"], _part(run["used"])] for run in runs]
    show_table((["run", "project", "kind", "state", "share used"], rows), console(), left=4)


def _show(values: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print(json.dumps(values, indent=1))
        return
    for name, value in values.items():
        print(f"{name.replace('_', ' '):<14} {printable(_text(value))}", file=sys.stdout)


def _text(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "-", True: "yes", False: "no"}[value]
    return f"{value:,}" if isinstance(value, int) else f"{value:g}" if isinstance(value, float) else str(value)


def _part(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"


def _of(value: int | None) -> str:
    return "-" if value is None else f"{value:,}"
