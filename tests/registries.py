"""Registries on both databases, with roles, and of earlier versions; a slow twin that knows everybody by name."""

from __future__ import annotations

import json
import math
import sqlite3
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest

from epsilons.accounting import filter as filter_
from epsilons.accounting import rdp
from epsilons.registry import Registry, Roster, Table
from epsilons.registry.databases import BEGINNING, _hash, database
from epsilons.registry.people import roles_script
from epsilons.registry.rosters import MOST, UNIT
from servers import Server

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


# -- registries as earlier versions made them: tables of schema 1, old events ------------------------------------------


FORTY = [f"p{i}" for i in range(40)]
#: Removes what schema 3 added, by the names in the catalogue.
RULES = {
    "sqlite": "select 'drop ' || type || ' ' || name from sqlite_master where type in ('trigger', 'view') "
    "or name = 'event_run'",
    "postgresql": "select 'drop function ' || oid::regprocedure || ' cascade' from pg_proc "
    "where pronamespace = current_schema()::regnamespace union all select 'drop view latest' "
    "union all select 'drop index event_run' union all "
    "select format('alter table %I drop constraint %I', conrelid::regclass::text, conname) from pg_constraint "
    "where connamespace = current_schema()::regnamespace and conname like '%\\_size'",
}


def write_history(registry: Registry) -> None:
    """Forty people, a quota, and a run in each state: reserved, running, settled, given back before it began."""
    registry.enrol(FORTY, [1.0, 3.0] * 20)
    registry.set_quota("", 0.9)
    for name in ("reserved", "running", "settled", "cancelled"):
        reserve(registry, name, FORTY, np.arange(40) % 2, table([50.0, 40.0]))
    begin(registry, "running")
    settle(registry, "settled", [10])
    registry.cancel("cancelled")
    registry.withdraw(["p3"])
    registry.release("mean", 1.0, ids=FORTY[:2], sensitivity=1.0, noise_multiplier=90.0)


def old(event: dict) -> dict:
    """An event in the form that schema 1 had."""
    if event["kind"] == "create":
        return event | {"schema": "1"}
    if event["kind"] == "begin":
        return {name: event[name] for name in ("kind", "time", "run", "key")}
    if event["kind"] == "settle":
        return {name: event[name] for name in ("kind", "time", "run", "charged", "ledger")}
    if event["kind"] == "cancel":
        return event | {"kind": "settle", "charged": [0], "ledger": ""}
    return event


def build_old(place, more=()) -> None:
    """Make a registry of schema 1 there.

    more  events that somebody added behind its back
    """
    with Registry.create(*place) as registry:
        write_history(registry)
    downgrade(place[0], more)


def downgrade(url: str, more=()) -> None:
    base = database(url)

    def work():
        for (statement,) in base.run(RULES[url.partition(":")[0]]):
            base.run(statement)
        last, events = (
            BEGINNING,
            [old(json.loads(body)) for (body,) in base.run("select body from event order by number")],
        )
        base.run("delete from event")
        for number, event in enumerate([*events, *more], 1):
            body = json.dumps(event, sort_keys=True)
            base.run("insert into event values (%s, %s, %s, %s)", number, last, _hash(last, body), body)
            last = _hash(last, body)
        base.run("update head set number = %s, hash = %s", len(events) + len(more), last)
        base.run("update fact set value = '1' where name = 'schema'")
        base.run("update run set state = 'settled' where state = 'cancelled'")
        base.run("alter table run drop column begun")

    base.transaction(work)
    base.close()


REPLAYED = {
    "kind": "settle", "time": "2026-01-01T00:00:00+00:00", "run": "settled", "charged": [10], "ledger": LAST_LINE,
}  # fmt: skip
GHOST = {"kind": "begin", "time": "2026-01-01T00:00:00+00:00", "run": "ghost", "key": OTHER_KEY}


# -- a registry in PostgreSQL with roles, and logins for each of them --------------------------------------------------


LOGINS = {
    "anna": "epsilons_runner",
    "bob": "epsilons_runner",
    "otto": "epsilons_officer",
    "rita": "epsilons_regulator",
    "sue": "epsilons_subject",
    "sam": "epsilons_subject",
    "nick": None,
}


@dataclass
class House:
    """A registry with roles. server, schema; pepper: its file"""

    server: Server
    schema: str
    pepper: Path

    def sql(self, login, *statement):
        import psycopg

        url = self.server.url(self.schema, user=login)
        with psycopg.connect(url, autocommit=True) as connection:
            cursor = connection.execute(*statement)
            return cursor.fetchall() if cursor.description else cursor.rowcount

    def registry(self, login, pepper=True):
        return Registry(self.server.url(self.schema, user=login), self.pepper if pepper else None)

    def refuses(self, login, *statement):
        import psycopg

        with pytest.raises((psycopg.errors.InsufficientPrivilege, psycopg.errors.CheckViolation)):
            self.sql(login, *statement)


def build_house(postgres, pepper):
    """A house with 40 people, two projects, and a run of one of them."""
    url = postgres.place()
    made = House(postgres, url.rpartition("%3D")[2], pepper)
    with Registry.create(url, made.pepper) as registry:
        registry.enrol(FORTY, [1.0, 3.0] * 20)
        for _ in range(2):
            made.sql("owner", roles_script())
        for login, group in LOGINS.items():
            if not made.sql("owner", f"select from pg_roles where rolname = '{login}'"):
                made.sql("owner", f"create role {login} login password '{postgres.password}'")
            made.sql("owner", f"grant {group} to {login}" if group else "select")
        made.sql("owner", "insert into member values ('anna', 'cardiology'), ('bob', 'oncology')")
        registry.set_quota("oncology", 0.5)
        reserve(registry, "theirs", FORTY, np.zeros(40, dtype=int), table([200.0]), project="oncology")
        registry.admit("sue", "p3")
        registry.admit("sam", "p4")
    return made
