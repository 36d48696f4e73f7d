"""Who of a file takes part, and why the others do not: the one join of rows, budgets, dates of consent and a registry.

A person takes part if an entry states a usable budget, no entry that is in force leaves them out, and they did not
withdraw. Whatever is not decided is refused: it is never taken for a yes.
"""

from __future__ import annotations

import re
import warnings
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ..budgets.budgets import epsilon_column, tier_column
from ..budgets.ids import Rule, count_unstated, ids_in, unstated
from ..core.disclosure import how_many, merge_small, shown_counts
from ..core.mechanism import IntArray
from ..errors import BudgetError, DataError, EpsilonsWarning
from ..tabular import DateRule, Marks, as_text, column_of, days, encoded, marks_of, meanings, read_table, speller
from ..tabular.table_files import pc, pyarrow
from .config import BudgetsSection, Config
from .config_training import ROSTER, column_of_persons

if TYPE_CHECKING:
    from .registry_train import Members

Mask = npt.NDArray[np.bool_]

#: Words in the name of a column that holds who withdrew, and of one that holds when an entry is in force.
WITHDRAWN = r"withdr[ae]w\w*|revo[ck]\w*|retract\w*|opt(ed)? ?out|widerr?uf\w*|widerrief|zur(ü|ue|u )ckgezogen"
IN_FORCE = r"valid|validity|valid ?(from|until|to|till)|g(ü|ue|u )ltig\w*|expir\w*|until|bis|ablauf\w*|abgelaufen"


@dataclass(eq=False)
class Entries:
    """What a list says of its records or persons.

    table    its rows
    ids      (rows,) their persons; None for entries by position
    reasons  why a record may be left out
    why      (rows,) the index of the row's reason. 0: its budget counts. -1: it is not in force, and another row is
    gone     (rows,) the day of withdrawal; None if there is no such column
    """

    table: Any
    ids: Any
    reasons: tuple[str, ...]
    why: IntArray
    gone: npt.NDArray[np.datetime64] | None = None

    @classmethod
    def of(cls, table: Any, ids: Any, section: BudgetsSection, path: Path) -> Entries:
        """Raises BudgetError for a cell that is no date, and if a cell of a record that is used is no budget."""
        cells, index = encoded(column_of(table, section.column, path, BudgetError))
        numbers = {reason: number for number, reason in enumerate(section.reasons, 1)}
        values = cells.to_pylist()
        find = speller([*map(as_text, section.left_out), *(section.levels or {})])
        spelt = [repr(find("" if value is None else as_text(value))) for value in values]
        said = ((*meanings(value, marks_of(table).decimal), name) for value, name in zip(values, spelt, strict=True))
        why = np.array([min((numbers[m] for m in may if m in numbers), default=0) for may in said])[index]
        reasons, gone = ["", *section.reasons], None
        if section.as_of is not None:
            late = _days(table, section, section.valid_from, path) > 0
            late |= _days(table, section, section.valid_until, path) < 0
            beside = np.zeros(len(table), dtype=bool) if ids is None else are_in(ids, ids, ~late)
            why[late] = np.where(beside, -1, len(reasons))[late]
            since = _days(table, section, section.withdrawn_on, path)
            why[since <= 0] = len(reasons) + 1
            gone = np.datetime64(section.as_of, "D") + np.nan_to_num(since).astype("timedelta64[D]")
            _warn_of_day(section.as_of, gone[since > 0], len(table))
            reasons += [f"not in force on {section.as_of}", f"withdrawn by {section.as_of}"]
        entries = cls(table, ids, tuple(reasons), why, gone)
        if section.decides:
            texts = [None if value is None else as_text(value) for value in values]
            _check_used([texts[i] for i in index.tolist()], entries.used, table, section, path)
        return entries

    @property
    def used(self) -> Mask:
        """(rows,) True for rows with budgets that count, of persons whom no row leaves out."""
        used = self.why == 0
        return np.asarray(used if self.ids is None else used & ~are_in(self.ids, self.ids, self.why > 0))

    def months(self, ids: Any) -> dict[str, int]:
        """When those of these persons who withdrew did -> how many; months are joined until 20 persons share a row."""
        if self.gone is None:
            return {}
        rows = np.flatnonzero((self.why == len(self.reasons) - 1) & are_in(self.ids, ids))
        _, first = np.unique(self.ids.take(rows).dictionary_encode().indices.to_numpy(), return_index=True)
        months, counts = np.unique(self.gone[rows[first]].astype("datetime64[M]"), return_counts=True)
        spans = merge_small(counts)
        return {f"of these, withdrew {months[s.start]} to {months[s.stop - 1]}": int(counts[s].sum()) for s in spans}


@dataclass(eq=False)
class Consent:
    """Chooses the records of a data set that are used.

    path      the data
    listed    the table in the file of budgets; None if the data hold them, or a registry
    members   the people of a registry, which has the budgets
    trained   who was chosen of the training data; for data to test on, whose persons need no budget
    is_check  True to count alone: what is not decided is then in `problems`, and not raised
    ids       the different ids in the data; None without persons
    rows      (rows that are used,) their persons; None without persons
    counts    what -> how many of the data's records or persons; together they are all
    months    when those who withdrew did -> how many
    words     how many are left out, by the rule of 20; None if none is
    spellings how many ids may be another spelling of another one
    absent    how many of the file of budgets have no rows in the data; None without such a file
    """

    config: Config
    path: Path
    rule: Rule
    listed: Any = None
    members: Members | None = None
    trained: Consent | None = None
    is_check: bool = False
    ids: Any = field(default=None, init=False)
    rows: Any = field(default=None, init=False)
    counts: dict[str, int] = field(default_factory=dict, init=False)
    months: dict[str, int] = field(default_factory=dict, init=False)
    words: str | None = field(default=None, init=False)
    spellings: int = field(default=0, init=False)
    absent: int | None = field(default=None, init=False)
    problems: list[str] = field(default_factory=list, init=False)
    entries: Entries | None = field(default=None, init=False)

    def __call__(self, table: Any) -> Mask:
        """(rows,) which records of the data are used. Raises BudgetError if it is not decided for all."""
        person = column_of_persons(self.config.data.person_stated)
        if person is None or person not in table.column_names:  # the readers of ids refuse the latter
            return self._by_position(table, len(table))
        ids = ids_in(table, person, self.path, DataError, self.rule)
        self.ids, self.entries = ids.unique(), self._entries_of(table, ids, person)
        others = [one.ids for one in (self.entries, self.trained) if one is not None and one.ids is not None]
        self.spellings, all_ids = count_unstated(self.rule, self.ids, *others)
        left = np.zeros(len(ids), dtype=bool)
        if self.entries is not None:
            self._leave_out_by_entries(self.entries, ids, left)
        states = None if self.members is None else self.members.states(self.ids.to_pylist())
        if states is not None:
            self._unlisted("not enrolled", are_in(ids, self.ids, states == -1), ids, left)
            if self.trained is not None:
                self._leave_out("withdrew in the registry", are_in(ids, self.ids, states == 1), ids, left)
        self.rows = ids.filter(_arrow(~left))
        self._count_all(len(self.rows.unique()), "persons")
        if states is not None and self.trained is None:  # a run leaves them out, after the choice of test people
            for state, what in {1: "withdrew in the registry", 2: "nothing left in the registry"}.items():
                self.counts[what] = int(are_in(self.rows.unique(), self.ids, states == state).sum())
                self.counts["matched"] -= self.counts[what]
        if self.spellings:
            self.problems.insert(0, unstated(self.spellings, all_ids))  # whoever is not found may be spelt otherwise
        if self.problems and not self.is_check:
            raise BudgetError(self.problems[0])
        return ~left

    def _entries_of(self, table: Any, ids: Any, person: str) -> Entries | None:
        """The entries of the file of budgets, or of the data; None if neither says who takes part."""
        section = self.config.budgets
        if self.listed is None:
            is_said = section.column in table.column_names or (self.members and not self.trained)
            return Entries.of(table, ids, section, self.path) if section.decides and is_said else None
        path = self.path.parent / str(section.file)
        if person not in self.listed.column_names:
            raise BudgetError(
                f"{path} has no column {person!r}, which data.person names. The budgets of persons need their ids: one "
                "row per person, in any order."
            )
        return Entries.of(self.listed, ids_in(self.listed, person, path, BudgetError, self.rule), section, path)

    def _leave_out_by_entries(self, entries: Entries, ids: Any, left: Mask) -> None:
        for number in reversed(range(1, len(entries.reasons))):
            self._leave_out(entries.reasons[number], are_in(ids, entries.ids, entries.why == number), ids, left)
        self.months = entries.months(ids)
        if self.listed is None:
            return
        is_listed = are_in(ids, entries.ids)
        if self.trained is None and not is_listed.any():
            where = f"in {self.config.budgets.file} occurs in {self.path.name}"
            self.problems.append(f"None of the ids {where}: is it the right list, and are ids spelt alike?")
        self._unlisted("unlisted", ~is_listed, ids, left)
        some = entries.ids.filter(_arrow(entries.used)).unique()
        self.absent = int((~are_in(some, ids)).sum())

    def of_rows(self, table: Any, rows: int) -> Mask:
        """The same for data that may have no table."""
        return self._by_position(None, rows) if table is None else self(table)

    @property
    def usable(self) -> Any:
        """The rows of the file of budgets without those that leave their records out."""
        entries = self.entries
        return self.listed if entries is None else entries.table.filter(_arrow(entries.used))

    def table(self) -> list[dict[str, str]]:
        """What the join found, file by file, in counts that follow the rule of 20."""
        matched = {what: n for what, n in self.counts.items() if what == "matched"}
        out = shown_counts({what: n for what, n in self.counts.items() if what not in matched})
        found = shown_counts(matched)
        for what, count in out.items():
            found[f"not in: {what if what in self.counts else f'one or more of {what}'}"] = count
            if what.startswith("withdrawn by") and what in self.counts:  # as a number of their own
                found |= shown_counts(self.months)
        if self.ids is not None:  # none is no secret: with some, training is refused
            counted = shown_counts({"spellings not decided": self.spellings})
            found |= counted if self.spellings else dict.fromkeys(counted, "none")
        rows = [{"file": self.path.name, "what": what, "count": count} for what, count in found.items()]
        if self.absent is None or self.trained is not None:
            return rows
        [(what, count)] = shown_counts({"listed without rows": self.absent}).items()
        return [*rows, {"file": str(self.config.budgets.file), "what": what, "count": count}]

    def _by_position(self, table: Any, rows: int) -> Mask:
        section, is_data = self.config.budgets, self.listed is None
        has_persons = column_of_persons(self.config.data.person_stated) is not None
        source = table if is_data else self.listed
        if has_persons or source is None or section.column not in source.column_names:
            return np.ones(rows, dtype=bool)  # the readers of budgets and ids refuse such data
        if len(source) != rows:
            raise BudgetError(
                f"{section.file} holds {len(source):,} budgets for the {rows:,} records of {self.path}. It needs one "
                "row per record, in the same order; or name the column of ids of both files in data.person."
            )
        if not section.decides:
            return np.ones(rows, dtype=bool)
        self.entries = Entries.of(source, None, section, self.path if is_data else self.path.parent / str(section.file))
        why = self.entries.why
        self.counts = {reason: int((why == n).sum()) for n, reason in enumerate(self.entries.reasons) if n}
        self._count_all(int((why == 0).sum()), "records")
        return np.asarray(why == 0)

    def _count_all(self, matched: int, unit: str) -> None:
        out = sum(self.counts.values())
        self.words = f"{how_many(out, out + matched)} {unit} are left out, as [budgets] says. {ROSTER}" if out else None
        self.counts = {"matched": matched, **self.counts}

    def _leave_out(self, what: str, rows: Mask, ids: Any, left: Mask) -> None:
        """Leave these rows out, and count their persons once, for the first reason."""
        self.counts[what] = _count(ids, rows & ~left)
        left |= rows

    def _unlisted(self, what: str, rows: Mask, ids: Any, left: Mask) -> None:
        """Leave out rows of persons without an entry, if the config says so; else it is not decided."""
        is_decided, everyone = self.config.budgets.unlisted is not None, _count(ids, ~left)
        if self.trained is not None and not is_decided:
            return  # they are tested on, without a budget
        self._leave_out(what, rows, ids, left)  # those who are not decided take part in nothing
        if (count := self.counts[what]) and not is_decided:
            where = "a budget" if what == "unlisted" else "an account in the registry: they are not enrolled"
            self.problems.append(
                f"{how_many(count, everyone)} persons have rows without {where}. Every person needs one: add these "
                'persons, or leave out the rows of all of them by [budgets] unlisted = "left out".'
            )


def _today() -> date:
    return date.today()


def _warn_of_day(as_of: date, later: npt.NDArray[np.datetime64], rows: int) -> None:
    """Warn if people withdrew since the day that decides, or if it is still to come. later: (withdrawals,) days"""
    today = _today()
    since = int((later <= np.datetime64(today, "D")).sum())
    why = f"{how_many(since, rows)} entries were withdrawn since then, and count as if they were not" if since else ""
    if as_of > today:
        why = "that day is still to come, and withdrawals up to it count already"
    if why:
        message = f"as_of = {as_of}: {why}. To begin now, set it to today, {today}."
        warnings.warn(message, EpsilonsWarning, stacklevel=2)


def _days(table: Any, section: BudgetsSection, column: str | None, path: Path) -> npt.NDArray[np.float64]:
    """(rows,) days from the day that decides to the day in this column; NaN without one."""
    if column is None:
        return np.full(len(table), np.nan)
    assert section.as_of is not None
    order = None if section.dates is None else section.dates == "day first"
    cells = column_of(table, column, path, BudgetError)
    return days(cells, column, path, BudgetError, DateRule(section.as_of, section.as_of, order))


def _check_used(texts: list[str | None], used: Mask, table: Any, section: BudgetsSection, path: Path) -> None:
    """Raise BudgetError, with rows counted in the file, if a cell of a record that is used is no budget."""
    usable = "1" if section.levels is None else next(iter(section.levels))
    cells = [text if is_used else usable for text, is_used in zip(texts, used.tolist(), strict=True)]
    whole = table.select([section.column]).set_column(0, section.column, pyarrow.array(cells, pyarrow.string()))
    if section.levels is None:
        epsilon_column(whole, section.column, path)
    else:
        tier_column(whole, section.column, path, section.levels, [as_text(one) for one in section.left_out])


def are_in(ids: Any, others: Any, where: Mask | None = None) -> Mask:
    """(rows,) which ids are among the others, of those where `where` is True."""
    return np.asarray(pc.is_in(ids, value_set=others if where is None else others.filter(_arrow(where))))


def _count(ids: Any, rows: Mask) -> int:
    return len(ids.filter(_arrow(rows)).unique())


def _arrow(mask: Mask) -> Any:
    return pyarrow.array(mask)


def consent(
    config: Config,
    folder: Path,
    where: str,
    members: Members | None = None,
    *,
    trained: Consent | None = None,
    is_check: bool = False,
) -> Consent | None:
    """What chooses the records of a file; None if all are used, whatever they are.

    trained  who was chosen of the training data, for data to test on: a list in their order says nothing of these
    """
    section, person = config.budgets, column_of_persons(config.data.person_stated)
    rule = config.data.spelling if members is None else members.rule
    is_listed = section.file is not None and (members is None or section.decides)
    if person is None and (not (section.decides or is_listed) or (trained is not None and is_listed)):
        return None
    listed = None
    if section.file is not None:  # beside a registry, too: its columns may hold withdrawals
        texts, marks = [*section.columns, *([person] if person else [])], Marks(section.separator, section.decimal)
        listed = read_table(folder / str(section.file), "budgets", BudgetError, texts, marks)
        check_names(listed.column_names, section, folder / str(section.file), person, True)
    return Consent(config, folder / where, rule, listed if is_listed else None, members, trained, is_check)


def check_names(names: list[str], section: BudgetsSection, path: Path, person: str | None, is_list: bool) -> None:
    """Raise BudgetError if the name of a column says that it holds withdrawals or validity, and nothing states that.

    person   the column of ids
    is_list  False for a table of data, of which only names of withdrawals count
    """
    said = re.compile(rf"(^| )({WITHDRAWN}{f'|{IN_FORCE}' if is_list else ''})( |$)")
    words = {name: re.sub("[^a-zäöü]+", " ", re.sub("([a-zäöü])([A-ZÄÖÜ])", r"\1 \2", name).lower()) for name in names}
    if unread := [name for name in names if said.search(words[name]) and name not in (*section.columns, person)]:
        raise BudgetError(
            f"By their names, columns of {path} hold withdrawals or validity: {', '.join(map(repr, unread))}. State "
            "in [budgets] as_of with withdrawn_on, valid_from, valid_until, or --as-of with --withdrawn-on and so on. "
            "Rename or remove a column that means something else."
        )


def stated(config: Config, *joins: Consent) -> dict[str, Any] | None:
    """What a run keeps of its joins: how ids were made equal, the day that decided, and the counts, file by file."""
    if not joins or joins[0].ids is None:
        return None
    tables = dict(zip(("table", "tested"), (join.table() for join in joins), strict=False))
    day = config.budgets.as_of
    return {"ids": list(joins[0].rule), "as_of": None if day is None else str(day), **tables}
