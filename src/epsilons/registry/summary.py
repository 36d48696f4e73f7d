"""What an officer sees of a registry: use per wish, project and run, by the rule of 20 (`disclosure`)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from ..core.disclosure import SMALLEST_SHOWN, at_least, display_rows, rounded_up
from ..core.mechanism import FloatArray, Groups, IntArray
from . import databases
from .accounts import LEAST_LEFT
from .cohorts import EMPTY, Known, Wishes, known, of_people, page_of
from .databases import PAGE, Database
from .rosters import NO_PERSON, UNIT
from .runs import StoredRun, rows_of, stored_runs


@dataclass(frozen=True)
class WishUse:
    """People with one lifetime budget, or with several merged.

    label          their ε: "1", "≤ 5", "all"
    people         at least so many, a multiple of 20; None if fewer. Exact, one fewer in a run would show that one left
    used           mean part of their lifetime budgets that is spent or reserved, rounded; None if fewer than 20
    can_take_part  how many of them later runs may include, in words
    """

    label: str
    epsilon: float | None
    delta: float | None
    people: int | None
    used: float | None
    can_take_part: str


@dataclass(frozen=True)
class RunUse:
    """A run. people: how many take part, in words; steps, charged: of all phases together."""

    run: str
    project: str
    kind: str
    state: str
    steps: int
    charged: int | None
    people: str


@dataclass(frozen=True)
class ProjectUse:
    """A project. people: who took part in any of its runs, in words; used: the mean part of their lifetime budgets."""

    project: str
    runs: int
    quota: float | None
    people: str
    used: float | None


@dataclass(frozen=True)
class Summary:
    """Use of a registry in aggregates. events: number of them; head: hash of the last one."""

    registry: str
    events: int
    head: str
    people: str
    wishes: tuple[WishUse, ...]
    projects: tuple[ProjectUse, ...]
    runs: tuple[RunUse, ...]

    def to_dict(self) -> dict[str, Any]:
        """As JSON values."""
        return asdict(self)


@dataclass(frozen=True)
class PersonRun:
    """One person's part in a run. used: of the lifetime budget, at the home order."""

    run: str
    project: str
    kind: str
    state: str
    used: float


def summary(database: Database, registry: str) -> Summary:
    """Everything that `epsilons registry show` prints; inside a transaction."""
    events, head = databases.head(database)
    ((people,),) = database.run("select count(*) from person")
    counts = _Totals(database)
    return Summary(
        registry=registry,
        events=events,
        head=head,
        people=at_least(people),
        wishes=_wish_rows(counts),
        projects=_project_rows(database, counts),
        runs=tuple(_run_row(run, at_least(counts.of_run[run.id])) for run in counts.runs),
    )


def _run_row(run: StoredRun, people: str) -> RunUse:
    charged = None if run.charged is None else sum(run.charged)
    return RunUse(run.id, run.project, run.kind, run.state, sum(run.table.steps), charged, people)


def counts(database: Database) -> dict[str, Any]:
    """Numbers of people and runs for an export, each on the grid of `coarse`; inside a transaction.

    Lifetime budgets are in classes that are the same for every registry: at most 1, 2, 5, 10, …. A class of fewer than
    20 people is left out.
    """
    wishes, people = Wishes(database), Counter[float]()
    bounds = np.array([rounded_up(epsilon) for epsilon in wishes.epsilon.tolist()])
    for _, _, wish, _, count in _pages(database, wishes):
        people.update(np.repeat(bounds[wish], count).tolist())
    ((runs,),) = database.run("select count(*) from run")
    budgets = {f"{bound:g}": coarse(people[bound]) for bound in sorted(people) if people[bound] >= SMALLEST_SHOWN}
    return {"people": coarse(people.total()), "runs": coarse(runs), "epsilon_at_most": budgets}


def runs_of_person(database: Database, number: int) -> list[PersonRun]:
    """The runs in which the person with this number takes part; inside a transaction."""
    (rows, _), wishes, (page, place) = of_people(database, np.array([number])), Wishes(database), divmod(number, PAGE)
    wish, found = int(wishes.places(rows.wishes)[0]), []
    for run in stored_runs(database):
        row = int(rows_of(database, run.id, page)[place])
        if row != NO_PERSON:
            used = float(_shares(run, wishes)[row, wish])
            found.append(PersonRun(run.id, run.project, run.kind, run.state, used))
    return found


def _shares(run: StoredRun, wishes: Wishes) -> FloatArray:
    """(rows, wishes) the part of a lifetime budget that a row of this run is charged."""
    return _part(run.costs[:, wishes.home] / UNIT, wishes.capacity)


def _part(nats: FloatArray, capacity: FloatArray) -> FloatArray:
    """The part of each capacity that these nats are; 1 where there is none."""
    part: FloatArray = np.divide(nats, capacity, out=np.ones_like(nats), where=capacity > 0)
    return part


class _Totals:
    """One pass over all pages.

    of_wish     (3, wishes) people, sum of the parts of their budgets that they used, people who can take part
    of_run      run -> people
    of_project  project -> people in any of its runs
    used        project -> sum of the parts of lifetime budgets that its runs used
    """

    def __init__(self, database: Database) -> None:
        self.wishes, self.runs = Wishes(database), stored_runs(database)
        self.of_wish, self.of_run, self.of_project = np.zeros((3, len(self.wishes.ids))), Counter[str](), Counter[str]()
        self.used = {run.project: 0.0 for run in self.runs}
        shares = {run.id: _shares(run, self.wishes) for run in self.runs}
        for page, rows, of_cohort, which, count in _pages(database, self.wishes):
            nats = rows.sums[np.arange(len(of_cohort)), self.wishes.home[of_cohort]] / UNIT
            used = np.minimum(_part(nats, self.wishes.capacity[of_cohort]), 1.0)
            stays = (used < 1 - LEAST_LEFT) & ~rows.withdrawn
            sums = (count, used * count, stays * count)
            self.of_wish += [np.bincount(of_cohort, one, self.of_wish.shape[1]) for one in sums]
            wish, took_part = of_cohort[which], dict[str, Any]()
            for run in self.runs:
                of_page = rows_of(database, run.id, page)
                here = of_page != NO_PERSON
                self.of_run[run.id] += int(here.sum())
                self.used[run.project] += float(shares[run.id][of_page[here], wish[here]].sum())
                took_part[run.project] = took_part.get(run.project, False) | here
            for project, mask in took_part.items():
                self.of_project[project] += int(mask.sum())


def _pages(database: Database, wishes: Wishes) -> Iterator[tuple[int, Known, IntArray, IntArray, IntArray]]:
    """(page, its cohorts, (cohorts,) place of the wish of each, (PAGE,) cohort of each person, (cohorts,) people)."""
    for (page,) in database.run("select number from page order by number"):
        cohorts = page_of(database, page)
        distinct, which, count = np.unique(cohorts, return_inverse=True, return_counts=True)
        empty = int(distinct[0] == EMPTY)
        rows = known(database, distinct[empty:])
        yield page, rows, wishes.places(rows.wishes), which - empty, count[empty:]


def _wish_rows(counts: _Totals) -> tuple[WishUse, ...]:
    there, wishes = counts.of_wish[0] > 0, counts.wishes
    if not there.any():
        return ()
    count, used, stays = counts.of_wish[:, there]
    stated = np.stack([wishes.epsilon[there], wishes.delta[there]], axis=1)
    distinct, group = np.unique(stated, axis=0, return_inverse=True)
    group = group.reshape(-1)
    groups = Groups(distinct[:, 0], distinct[:, 1], np.bincount(group, count).astype(np.int64))
    shown = []
    for row in display_rows(groups, None, release=True):
        here = (group >= row.groups.start) & (group < row.groups.stop)
        size = int(count[here].sum())
        mean = None if size < SMALLEST_SHOWN else round(float(used[here].sum()) / size, 2)
        left = _left(int(stays[here].sum()), size)
        people = None if row.records is None else row.records // SMALLEST_SHOWN * SMALLEST_SHOWN
        shown.append(WishUse(row.label, row.epsilon, row.delta, people, mean, left))
    return tuple(shown)


def _project_rows(database: Database, counts: _Totals) -> tuple[ProjectUse, ...]:
    quotas = dict(database.run("select project, share from quota"))
    rows = []
    for project in sorted({*counts.used, *quotas}):
        took_part = counts.of_project[project]
        mean = None if took_part < SMALLEST_SHOWN else round(counts.used[project] / took_part, 2)
        number = sum(run.project == project for run in counts.runs)
        rows.append(ProjectUse(project, number, quotas.get(project), at_least(took_part), mean))
    return tuple(rows)


def _left(count: int, size: int) -> str:
    """How many of a row can take part, in words that do not say whether a person left."""
    if count >= SMALLEST_SHOWN and size - count < SMALLEST_SHOWN:
        return f"all, or all but fewer than {SMALLEST_SHOWN}"
    return at_least(count)


def coarse(people: int) -> str:
    """A count rounded down to 20, 50, 100, 200, 500, …: one more or less seldom shows.

    >>> [coarse(people) for people in (19, 20, 49, 470, 1234)]
    ['fewer than 20', '20 or more', '20 or more', '200 or more', '1,000 or more']
    """
    if people < SMALLEST_SHOWN:
        return at_least(people)
    power: int = 10 ** (len(str(people)) - 1)
    return f"{max(step for step in (1, 2, 5) if step * power <= people) * power:,} or more"
