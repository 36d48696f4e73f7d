"""Registries on both databases, and a slow twin that knows everybody by name."""

from __future__ import annotations

import math
import sqlite3
from contextlib import closing
from dataclasses import dataclass, field

import numpy as np
import pytest

from epsilons.accounting import filter as filter_
from epsilons.accounting import rdp
from epsilons.registry import Roster, Table
from epsilons.registry.rosters import MOST, UNIT

#: The last of the 16 sums becomes 0.
ZEROED = {
    "sqlite": "cast(substr(sums, 1, 120) || x'0000000000000000' as blob)",
    "postgresql": r"substring(sums from 1 for 120) || '\x0000000000000000'::bytea",
}

#: A config of a logistic model on the visits of persons, without a section [registry].
VISITS = """
[data]
train = "visits.csv"
target = "label"
classes = ["no", "yes"]
person = "id"
read_off = []
[data.numeric]
age = [0, 100]
[model]
name = "logistic"
[training]
steps = 20
batch_size = 10
lr = 0.2
"""

#: Hashes, as commitments to keys and lines of ledgers.
KEY, OTHER_KEY, THIRD_KEY, FIRST_LINE, LAST_LINE = ("1" * 64, "2" * 64, "3" * 64, "a" * 64, "f" * 64)

only_sqlite = pytest.mark.parametrize("place", ["sqlite"], indirect=True)


def outside(place, statement):
    """Change a database behind the registry's back, without its rules; the number of rows that changed."""
    url = place[0]
    kind = url.partition(":")[0]
    statement = statement.replace("ZEROED", ZEROED[kind])
    if kind == "sqlite":
        with closing(sqlite3.connect(url.removeprefix("sqlite:///"))) as connection, connection:
            rules = connection.execute("select name from sqlite_master where type = 'trigger'").fetchall()
            for (rule,) in rules:
                connection.execute(f"drop trigger {rule}")
            return connection.execute(statement).rowcount
    import psycopg

    with psycopg.connect(url) as connection:
        connection.execute("set session_replication_role = replica")  # rules are off
        return connection.execute(statement).rowcount


def table(noises, steps=100, rate=0.02):
    """A table of one phase with a row for each of these noise multipliers."""
    return Table(np.full((1, len(noises)), rate), np.array([noises], dtype=np.float64), (steps,))


def using(part, epsilon=1.0, noise=8.0):
    """A table of one row that uses this part of a fresh lifetime budget, at the home order."""
    home = filter_.home_orders(epsilon, 1e-5)[0]
    cap = epsilon - filter_.offsets(1e-5, [home])[0, home]
    step = rdp.divergence(0.02, noise, filter_.ORDERS[home])[0]
    return table([noise], steps=round(part * cap / step))


def reserve(registry, run, ids, rows, of, **facts):
    registry.reserve_table(run, of, Roster(registry.numbers(ids), np.asarray(rows)), **facts)


def begin(registry, run, key=KEY, previous=None):
    registry.begin(run, key, previous, FIRST_LINE)


def settle(registry, run, charged, key=KEY):
    """Begin the run if it has not begun, and settle it."""
    begin(registry, run, key)
    registry.settle(run, charged, LAST_LINE, key)


@dataclass
class Twin:
    """The slow obvious registry: one dictionary per person, floating-point sums, no cohorts.

    people    id -> [epsilon, delta, home order, withdrawn, {run: nats at each order}]
    runs      run -> (ids, rows, table)
    projects  run -> project
    quotas    project -> the part of each lifetime budget that its runs may use
    """

    people: dict = field(default_factory=dict)
    runs: dict = field(default_factory=dict)
    projects: dict = field(default_factory=dict)
    quotas: dict = field(default_factory=dict)

    def enrol(self, ids, epsilons, delta):
        for one, epsilon in zip(ids, epsilons, strict=True):
            caps = [(epsilon - conversion(order, filter_.HOME_WEIGHT * delta)) / order for order in filter_.ORDERS]
            self.people[one] = [epsilon, delta, int(np.argmax(caps)), False, {}]

    def fits(self, one):
        epsilon, delta, home, withdrawn, spent = self.people[one]
        total = sum(spent.values(), np.zeros(16))
        weights = np.full(16, (1 - filter_.HOME_WEIGHT) / 15)
        weights[home] = filter_.HOME_WEIGHT
        caps = [epsilon - conversion(a, w * delta) for a, w in zip(filter_.ORDERS, weights, strict=True)]
        return not withdrawn and bool((total <= np.array(caps) + 1e-11).any())

    def charge(self, run, ids, rows, of, steps):
        for one, row in zip(ids, rows, strict=True):
            rate, noise = float(of.rates[0, row]), float(of.noises[0, row])
            exact = steps * rdp.divergence(rate, noise, filter_.ORDERS)
            self.people[one][4][run] = np.minimum(exact, MOST / UNIT)  # either way the order is of no use

    def is_within_quota(self, one, project):
        """Whether the runs of this project use at most its quota of one person's lifetime budget, at the home order."""
        epsilon, delta, home, _, spent = self.people[one]
        used = sum((nats[home] for run, nats in spent.items() if self.projects[run] == project), 0.0)
        cap = epsilon - conversion(filter_.ORDERS[home], filter_.HOME_WEIGHT * delta)
        return project not in self.quotas or used <= self.quotas[project] * cap + 1e-11

    def reserve(self, run, ids, rows, of, project=""):
        """True if everybody has room, and the project has; otherwise nothing changes."""
        self.projects[run] = project
        self.charge(run, ids, rows, of, of.steps[0])
        if all(self.fits(one) and self.is_within_quota(one, project) for one in ids):
            self.runs[run] = (ids, rows, of)
            return True
        for one in ids:
            del self.people[one][4][run]
        return False

    def settle(self, run, steps):
        self.charge(run, *self.runs[run], steps)


def conversion(order, delta):
    return math.log1p(-1 / order) - (math.log(delta) + math.log(order)) / (order - 1)
