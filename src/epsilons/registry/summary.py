"""What an officer sees of a registry: use per wish, project and run, by the rule of 20 (`disclosure`)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from ..accounting.filter import offsets
from ..core.disclosure import SMALLEST_SHOWN, at_least, display_rows, rounded_up
from ..core.mechanism import FloatArray, Groups, IntArray
from .accounts import LEAST_LEFT
from .cohorts import EMPTY, known, page_of
from .databases import Database, unpacked
from .rosters import NO_PERSON, UNIT
from .runs import StoredRun, stored_runs


@dataclass(frozen=True)
class WishUse:
    """People with one lifetime budget, or with several merged.

    label          their ε: "1", "≤ 5", "all"
    people         None if fewer than 20
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
    ((events, head),) = database.run("select number, hash from head")
    ((people,),) = database.run("select count(*) from person")
    wishes = _Wishes(database)
    runs = stored_runs(database)
    counts = _Counts(database, wishes, runs)
    return Summary(
        registry=registry,
        events=int(events),
        head=str(head),
        people=_number(people),
        wishes=_wish_rows(database, wishes, counts.cohorts),
        projects=_project_rows(database, runs, counts),
        runs=tuple(_run_row(run, at_least(counts.of_run[run.id])) for run in runs),
    )


def counts(database: Database) -> dict[str, Any]:
    """Numbers of people and runs for an export, each on the grid of `coarse`; inside a transaction.

    Lifetime budgets are in classes that are the same for every registry: at most 1, 2, 5, 10, …. A class of fewer than
    20 people is left out.
    """
    wishes, people = _Wishes(database), Counter[float]()
    bounds = np.array([rounded_up(epsilon) for epsilon in wishes.epsilon.tolist()])
    for _, cohorts, wish in _pages(database, wishes):
        people.update(bounds[wish[cohorts != EMPTY]].tolist())
    ((runs,),) = database.run("select count(*) from run")
    budgets = {f"{bound:g}": coarse(people[bound]) for bound in sorted(people) if people[bound] >= SMALLEST_SHOWN}
    return {"people": coarse(people.total()), "runs": coarse(runs), "epsilon_at_most": budgets}


def runs_of_person(database: Database, number: int, page_size: int) -> list[PersonRun]:
    """The runs in which the person with this number takes part; inside a transaction."""
    page, place = divmod(number, page_size)
    cohort = known(database, [int(page_of(database, page)[place])])
    wishes = _Wishes(database)
    wish = int(np.searchsorted(wishes.ids, cohort.wishes[0]))
    found = []
    for run in stored_runs(database):
        stored = database.run("select rows from part where run = %s and page = %s", run.id, page)
        row = int(unpacked(stored[0][0], np.int16)[place]) if stored else NO_PERSON
        if row != NO_PERSON:
            used = float(wishes.shares(run)[row, wish])
            found.append(PersonRun(run.id, run.project, run.kind, run.state, used))
    return found


class _Wishes:
    """All wishes by number: ids, epsilon, delta, home (wishes,) each, and capacity (wishes,) nats at the home order."""

    def __init__(self, database: Database) -> None:
        rows = database.run("select id, epsilon, delta, home from wish order by id")
        columns = np.array(rows, dtype=np.float64).reshape(-1, 4).T
        if not (((columns >= 0) & (columns < 2**31)).all() and ((columns[2] > 0) & (columns[2] < 1)).all()):
            raise ValueError("a wish is out of range")
        self.ids, self.home = columns[0].astype(np.int64), columns[3].astype(np.int64)
        self.epsilon, self.delta = columns[1], columns[2]
        self.capacity = self.epsilon
        if rows:
            self.capacity = self.epsilon - offsets(self.delta, self.home)[np.arange(len(rows)), self.home]

    def shares(self, run: StoredRun) -> FloatArray:
        """(rows, wishes) the part of a lifetime budget that a row of this run is charged."""
        nats = run.costs[:, self.home] / UNIT
        share: FloatArray = np.divide(nats, self.capacity, out=np.ones_like(nats), where=self.capacity > 0)
        return share


class _Counts:
    """One pass over all pages.

    cohorts     cohort -> people
    of_run      run -> people
    of_project  project -> people in any of its runs
    used        project -> sum of the parts of lifetime budgets that its runs used
    """

    def __init__(self, database: Database, wishes: _Wishes, runs: Sequence[StoredRun]) -> None:
        self.cohorts, self.of_run, self.of_project = Counter[int](), Counter[str](), Counter[str]()
        self.used: dict[str, float] = {run.project: 0.0 for run in runs}
        self._database, self._runs = database, runs
        shares = {run.id: wishes.shares(run) for run in runs}
        for page, cohorts, wish in _pages(database, wishes):
            self.cohorts.update(cohorts.tolist())
            self._add(page, wish, shares)

    def _add(self, page: int, wish: IntArray, shares: dict[str, FloatArray]) -> None:
        took_part: dict[str, Any] = {}
        for run in self._runs:
            stored = self._database.run("select rows from part where run = %s and page = %s", run.id, page)
            if not stored:
                continue
            rows = unpacked(stored[0][0], np.int16)
            here = rows != NO_PERSON
            self.of_run[run.id] += int(here.sum())
            self.used[run.project] += float(shares[run.id][rows[here], wish[here]].sum())
            took_part[run.project] = took_part.get(run.project, False) | here
        for project, mask in took_part.items():
            self.of_project[project] += int(mask.sum())


def _pages(database: Database, wishes: _Wishes) -> Iterator[tuple[int, Any, IntArray]]:
    """(page, (PAGE,) cohort of each place, (PAGE,) place of its wish in `wishes`)."""
    for (page,) in database.run("select number from page order by number"):
        cohorts = page_of(database, page)
        distinct, which = np.unique(cohorts, return_inverse=True)
        rows = known(database, distinct[distinct != EMPTY])
        empty = np.zeros(int(distinct[0] == EMPTY), dtype=np.int64)
        yield page, cohorts, np.concatenate([empty, np.searchsorted(wishes.ids, rows.wishes)])[which]


def _wish_rows(database: Database, wishes: _Wishes, cohorts: dict[int, int]) -> tuple[WishUse, ...]:
    people = {cohort: count for cohort, count in cohorts.items() if cohort != EMPTY}
    if not people:
        return ()
    rows = known(database, people)
    count = np.array([people[int(cohort)] for cohort in rows.ids])
    wish = np.searchsorted(wishes.ids, rows.wishes)
    nats = rows.sums[np.arange(len(wish)), wishes.home[wish]] / UNIT
    capacity = wishes.capacity[wish]
    used = np.minimum(np.divide(nats, capacity, out=np.ones_like(nats), where=capacity > 0), 1.0)
    stays = (used < 1 - LEAST_LEFT) & ~rows.withdrawn
    stated = np.stack([wishes.epsilon[wish], wishes.delta[wish]], axis=1)
    distinct, group = np.unique(stated, axis=0, return_inverse=True)
    group = group.reshape(-1)
    groups = Groups(distinct[:, 0], distinct[:, 1], np.bincount(group, count).astype(np.int64))
    shown = []
    for row in display_rows(groups, None, release=True):
        here = (group >= row.groups.start) & (group < row.groups.stop)
        size = int(count[here].sum())
        mean = None if size < SMALLEST_SHOWN else round(float((used * count)[here].sum()) / size, 2)
        left = _left(int((count * stays)[here].sum()), size)
        shown.append(WishUse(row.label, row.epsilon, row.delta, row.records, mean, left))
    return tuple(shown)


def _project_rows(database: Database, runs: Sequence[StoredRun], counts: _Counts) -> tuple[ProjectUse, ...]:
    quotas = dict(database.run("select project, share from quota"))
    rows = []
    for project in sorted({*counts.used, *quotas}):
        took_part = counts.of_project[project]
        mean = None if took_part < SMALLEST_SHOWN else round(counts.used[project] / took_part, 2)
        number = sum(run.project == project for run in runs)
        rows.append(ProjectUse(project, number, quotas.get(project), at_least(took_part), mean))
    return tuple(rows)


def _run_row(run: StoredRun, people: str) -> RunUse:
    charged = None if run.charged is None else sum(run.charged)
    return RunUse(run.id, run.project, run.kind, run.state, sum(run.table.steps), charged, people)


def _left(count: int, size: int) -> str:
    """How many of a row can take part, in words that do not say whether a person left."""
    if count >= SMALLEST_SHOWN and size - count < SMALLEST_SHOWN:
        return f"all, or all but fewer than {SMALLEST_SHOWN}"
    return _number(count)


def coarse(people: int) -> str:
    """A count rounded down to 20, 50, 100, 200, 500, …: one more or less seldom shows.

    >>> [coarse(people) for people in (19, 20, 49, 470, 1234)]
    ['fewer than 20', '20 or more', '20 or more', '200 or more', '1,000 or more']
    """
    if people < SMALLEST_SHOWN:
        return _number(people)
    power: int = 10 ** (len(str(people)) - 1)
    return f"{max(step for step in (1, 2, 5) if step * power <= people) * power:,} or more"


def _number(people: int) -> str:
    return f"fewer than {SMALLEST_SHOWN}" if people < SMALLEST_SHOWN else f"{people:,}"
