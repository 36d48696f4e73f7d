"""Quotas: the part of any person's lifetime budget that the runs of one project may use together.

A quota protects people's budgets from one project. It is no privacy guarantee of its own: only the lifetime budget is.
"""

from __future__ import annotations

import json
import math

import numpy as np

from ..errors import RegistryError, RegistryRefusedError
from . import chain
from .amounts import Table
from .cohorts import caps_of, known, page_of
from .databases import Database
from .names import check_name
from .rosters import NO_PERSON, Pages
from .schema import PAGE, unpacked


def set_quota(database: Database, project: str, share: float) -> None:
    """Allow a project's runs this part of any lifetime budget, inside a transaction. Raises RegistryError."""
    check_name(project)
    if not (math.isfinite(share) and 0 < share <= 1):
        raise RegistryError(f"A quota is a part of a lifetime budget, above 0 and at most 1, got {share}.")
    chain.add(database, "quota", project=project, share=float(share))
    database.run(
        "insert into quota values (%s, %s) on conflict (project) do update set share = excluded.share", project, share
    )


def check(database: Database, project: str, table: Table, roster: Pages) -> None:
    """Raise RegistryRefusedError if this run would exceed its project's quota for a person, at the home order."""
    quota = database.run("select share from quota where project = %s", project)
    if not quota:
        return
    others = [
        (run, Table.from_dict(json.loads(plan)).costs(tuple(json.loads(charged)) if charged else None))
        for run, plan, charged in database.run("select id, plan, charged from run where project = %s", project)
    ]
    homes = dict(database.run("select id, home from wish"))
    costs = table.costs()
    for page, rows in roster.pages():
        takes_part = rows != NO_PERSON
        used = np.zeros((PAGE, costs.shape[1]), dtype=np.int64)
        used[takes_part] += costs[rows[takes_part]]
        for run, cost in others:
            for (stored,) in database.run("select rows from part where run = %s and page = %s", run, page):
                of_run = unpacked(stored, np.int16)
                used[of_run != NO_PERSON] += cost[of_run[of_run != NO_PERSON]]
        cohorts = page_of(database, page)[takes_part]
        distinct, which = np.unique(cohorts, return_inverse=True)
        wishes = known(database, distinct).wishes
        if len(wishes) != len(distinct):
            raise RegistryError("The roster has people who are not enrolled.")
        home = np.array([homes[wish] for wish in wishes.tolist()])
        limit = caps_of(database, wishes)[np.arange(len(home)), home] * quota[0][0]
        if (used[takes_part][np.arange(len(which)), home[which]] > limit[which]).any():
            raise RegistryRefusedError(
                f"The project {project!r} would use more than its quota from some people. Nothing was charged. "
                "Plan a smaller run, or have the quota raised."
            )
