"""Runs: reserve before anything is computed, begin under one key, settle by what the closed ledger says.

A reservation charges all steps of the plan, and never expires: a machine that is lost may have trained. Each function
may be called again after a crash; what was done already is not done twice.
"""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import dataclass

import numpy as np

from ..core.mechanism import IntArray
from ..errors import RegistryError, RegistryRefusedError
from . import databases
from .cohorts import Wishes, known, move, page_of
from .databases import PAGE, Database, check_name, unpacked
from .rosters import NO_PERSON, HeldRoster, Pages, Rows, Table

RESERVED, RUNNING, SETTLED, CANCELLED = "reserved", "running", "settled", "cancelled"
ENDED = (SETTLED, CANCELLED)


@dataclass(frozen=True)
class StoredRun:
    """A row of the table `run`.

    state    RESERVED, RUNNING, SETTLED or CANCELLED
    charged  (phases,) steps that were charged in the end; None until it is settled or cancelled
    key      commitment to its present key; None before it begins
    ledger   hash of the last line of its ledger; None until it is settled
    begun    hash of the first line of its ledger; "" for a statistic; None before it begins
    """

    table: Table
    charged: tuple[int, ...] | None
    id: str
    state: str
    kind: str
    project: str
    digest: str
    key: str | None
    ledger: str | None
    begun: str | None

    @property
    def costs(self) -> IntArray:
        """(rows, orders) pico-nats that are charged for it now."""
        return self.table.costs(self.charged)


def held(database: Database, run: str) -> HeldRoster:
    """The roster of a run that is stored."""
    return HeldRoster(database.run("select page, rows from part where run = %s order by page", run))


def rows_of(database: Database, run: str, page: int) -> Rows:
    """(PAGE,) each person's row in a run that is stored, or NO_PERSON."""
    stored = database.run("select rows from part where run = %s and page = %s", run, page)
    return unpacked(stored[0][0], np.int16) if stored else np.full(PAGE, NO_PERSON, dtype=np.int16)


def stored_runs(database: Database, **where: str) -> list[StoredRun]:
    """All runs, or those with this id (one, or none) or project."""
    which = "".join(f" where {name} = %s" for name in where)
    rows = database.run(
        f"select plan, charged, id, state, kind, project, digest, key, ledger, begun from run{which} order by id",
        *where.values(),
    )
    return [
        StoredRun(Table.from_dict(json.loads(plan)), charged and tuple(json.loads(charged)), *facts)
        for plan, charged, *facts in rows
    ]


def stored_run(database: Database, run: str) -> StoredRun:
    """The run of this id. Raises RegistryError if there is none."""
    found = stored_runs(database, id=run)
    if not found:
        raise RegistryError(f"No run {run!r} is reserved in this registry.")
    return found[0]


def reserve(database: Database, run: str, table: Table, roster: Pages, kind: str, project: str) -> None:
    """Charge all steps of this table to all people in the roster, inside a transaction. Nothing if done before.

    Raises RegistryRefusedError if some person has too little left, or if the run is reserved for something else.
    """
    for name in (run, project, kind):
        check_name(name)
    plan = json.dumps(table.to_dict(), sort_keys=True)
    given = HeldRoster.of(roster)
    asked = hashlib.sha256(json.dumps([plan, given.digest, kind, project]).encode()).hexdigest()
    earlier = stored_runs(database, id=run)
    if earlier:
        if earlier[0].digest != asked:
            raise RegistryRefusedError(
                f"The run {run!r} is reserved for another plan, other people, or another project. Choose another name."
            )
        return
    _check_quota(database, project, table, given)
    move(database, given, table.costs(), is_charge=True)
    database.run(
        "insert into run (id, state, kind, project, digest, plan) values (%s, %s, %s, %s, %s, %s)",
        *(run, RESERVED, kind, project, asked, plan),
    )
    database.many("insert into part values (%s, %s, %s)", ((run, *page) for page in given.stored))
    databases.add(database, "reserve", run=run, digest=asked, what=kind, project=project)


def begin(database: Database, run: str, key: str, previous: str | None, ledger: str) -> None:
    """Tie the run to one key, inside a transaction. Raises RegistryRefusedError if it has another, or is settled.

    previous  the key that this one replaces, for a run that lost its key; its steps are charged again in its ledger
    ledger    hash of the first line of the run's ledger; "" for a statistic, which has none
    """
    found = stored_run(database, run)
    if found.state in ENDED:
        raise RegistryRefusedError(f"The run {run!r} is {found.state}, and cannot be resumed. Reserve another run.")
    if found.key is not None and found.key not in (key, previous):
        raise RegistryRefusedError(
            f"The run {run!r} has begun under another key, perhaps on another machine. Under a second key its steps "
            "would be released twice. Reserve another run."
        )
    if found.begun not in (None, ledger):
        raise RegistryRefusedError(f"The run {run!r} has begun with another ledger. Continue it with that one.")
    if found.key != key:
        databases.add(database, "begin", run=run, key=key, previous=found.key, ledger=ledger)
        database.run("update run set state = %s, key = %s, begun = %s where id = %s", RUNNING, key, ledger, run)


def settle(database: Database, run: str, charged: tuple[int, ...], ledger: str, key: str) -> None:
    """Give back the steps that were not made, inside a transaction; the run can never be resumed.

    charged  (phases,) steps, from the run's closed ledger
    ledger   hash of the ledger's last line; "" if nothing is given back
    key      commitment to the ledger's last key. Of two copies of a folder, the one that lost its right to go on does
             not know what the other charged

    Raises RegistryRefusedError if the run never began, was settled at other steps, or has another key, or if the owner
    allows less to be given back without an approval.
    """
    found = stored_run(database, run)
    if key != found.key:
        raise RegistryRefusedError(
            f"The run {run!r} never began, or went on under another key, perhaps in a copy of its folder. Settle it by "
            "the ledger of that copy: this one does not know what was charged since."
        )
    if found.state == SETTLED:
        if found.charged != charged:
            raise RegistryRefusedError(f"The run {run!r} was settled before, at another number of steps.")
        return
    _end(database, found, SETTLED, charged, ledger)


def cancel(database: Database, run: str, missing_ok: bool = False) -> None:
    """Give back all steps of a run that never began, inside a transaction: no step is made before `begin`.

    Raises RegistryRefusedError if it has begun, or if the owner allows less to be given back without an approval.
    """
    if missing_ok and not stored_runs(database, id=run):
        return
    found = stored_run(database, run)
    if found.key is not None:
        raise RegistryRefusedError(
            f"The run {run!r} has begun, so only its ledger can say what was charged. Settle it by its folder. If that "
            "is lost, its steps stay charged."
        )
    if found.state == RESERVED:
        _end(database, found, CANCELLED, (0,) * len(found.table.steps), "")


def _end(database: Database, run: StoredRun, state: str, charged: tuple[int, ...], ledger: str) -> None:
    """Give back what was not charged. The database refuses what has no ledger, or is above the owner's limit."""
    back = run.table.costs(charged) - run.table.costs()  # raises for more steps than were reserved
    said = {"charged": list(charged), "ledger": ledger, "key": run.key} if state == SETTLED else {}
    databases.add(database, "settle" if said else "cancel", run=run.id, **said)
    update = "update run set state = %s, charged = %s, ledger = %s where id = %s"
    database.run(update, state, json.dumps(list(charged)), ledger, run.id)
    if back.any():
        move(database, held(database, run.id), back, is_charge=False)


def limit_refunds(database: Database, share: float) -> None:
    """Let runs give back at most this share of their steps without an approval, inside a transaction."""
    if not 0 <= share <= 1:
        raise RegistryError(f"A share of steps to give back is from 0 to 1, got {share}.")
    databases.add(database, "limit", refund=float(share))
    insert = "insert into fact values ('refund', %s) on conflict (name) do update set value = excluded.value"
    database.run(insert, json.dumps(float(share)))


def approve(database: Database, run: str, charged: tuple[int, ...] | None, ledger: str) -> None:
    """Allow what is above the owner's limit to be given back, inside a transaction.

    charged, ledger  as in `settle`; None and "" for a run that never began
    """
    found = stored_run(database, run)
    charged = (0,) * len(found.table.steps) if charged is None else charged
    found.table.costs(charged)  # refuses other steps than it reserved
    databases.add(database, "approve", run=run, charged=list(charged), ledger=ledger)


# -- Quotas: the part of any person's lifetime budget that the runs of one project may use together
#
# A quota protects people's budgets from one project. It is no privacy guarantee of its own: only the lifetime budget
# is.


def set_quota(database: Database, project: str, share: float) -> None:
    """Allow a project's runs this part of any lifetime budget, inside a transaction. Raises RegistryError."""
    check_name(project)
    if not (math.isfinite(share) and 0 < share <= 1):
        raise RegistryError(f"A quota is a part of a lifetime budget, above 0 and at most 1, got {share}.")
    databases.add(database, "quota", project=project, share=float(share))
    database.run(
        "insert into quota values (%s, %s) on conflict (project) do update set share = excluded.share", project, share
    )


def _check_quota(database: Database, project: str, table: Table, roster: Pages) -> None:
    """Raise RegistryRefusedError if this run would exceed its project's quota for a person, at the home order."""
    quota = database.run("select share from quota where project = %s", project)
    if not quota:
        return
    costs, wishes = table.costs(), Wishes(database)
    others = [(run.id, run.costs) for run in stored_runs(database, project=project)]
    for page, rows in roster.pages():
        takes_part = rows != NO_PERSON
        used = np.zeros((PAGE, costs.shape[1]), dtype=np.int64)
        used[takes_part] += costs[rows[takes_part]]
        for run, cost in others:
            of_run = rows_of(database, run, page)
            used[of_run != NO_PERSON] += cost[of_run[of_run != NO_PERSON]]
        distinct, which = np.unique(page_of(database, page)[takes_part], return_inverse=True)
        theirs = known(database, distinct).wishes
        if len(theirs) != len(distinct):
            raise RegistryError("The roster has people who are not enrolled.")
        home = wishes.home[wishes.places(theirs)]
        limit = wishes.caps(theirs)[np.arange(len(home)), home] * quota[0][0]
        if (used[takes_part][np.arange(len(which)), home[which]] > limit[which]).any():
            raise RegistryRefusedError(
                f"The project {project!r} would use more than its quota from some people. Nothing was charged. "
                "Plan a smaller run, or have the quota raised."
            )
