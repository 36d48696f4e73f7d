"""Random histories of a registry in SQLite, made by its public calls, and random changes behind its back.

A page holds 16,384 people. Most histories are made with pages of 8, so that a few people are on several pages.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import json
import sqlite3
import zlib
from contextlib import closing

import numpy as np

from epsilons.errors import EpsilonsError
from epsilons.registry import Registry, Roster, Table
from old_registries import downgrade
from registries import FIRST_LINE, LAST_LINE

#: Modules that know how many people a page has.
MODULES = ("accounts", "cohorts", "people", "quotas", "registry", "rosters", "schema", "verifier")
SMALL_PAGE = 8


def small_pages(monkeypatch):
    """Pages of 8 people from here on."""
    for name in MODULES:
        monkeypatch.setattr(importlib.import_module(f"epsilons.registry.{name}"), "PAGE", SMALL_PAGE)
    monkeypatch.setattr(importlib.import_module("old_verifying"), "PAGE", SMALL_PAGE)


def random_table(rng, most_phases=2):
    """Few phases, one to three rows. Some are dear, some reveal little at the home order and much elsewhere."""
    phases, rows = int(rng.integers(1, most_phases + 1)), int(rng.integers(1, 4))
    noises = rng.choice([1.0, 3.0, 8.0, 20.0, 60.0, np.inf], (phases, rows), p=[0.05, 0.2, 0.25, 0.3, 0.15, 0.05])
    rates = rng.choice([0.0, 0.01, 0.05, 1.0], (phases, rows), p=[0.05, 0.4, 0.4, 0.15])
    return Table(rates, noises, tuple(int(n) for n in rng.choice([0, 1, 20, 100, 1000], phases)))


class History:
    """One registry and what was done in it. Calls that the registry refuses change nothing.

    is_old  only what the first form of registries had
    """

    def __init__(self, registry, rng, people=20, is_old=False):
        self.registry, self.rng, self.people, self.is_old = registry, rng, people, is_old
        self.enrolled, self.keys, self.runs = 0, {}, {}

    def make(self, events):
        with contextlib.suppress(EpsilonsError):
            self.enrol()
        for _ in range(events):
            name = self.rng.choice(
                [
                    "enrol",
                    "change",
                    "withdraw",
                    "quota",
                    "limit",
                    "approve",
                    "reserve",
                    "begin",
                    "again",
                    "settle",
                    "cancel",
                    "release",
                ],
                p=[0.06, 0.09, 0.05, 0.08, 0.04, 0.04, 0.26, 0.15, 0.04, 0.12, 0.04, 0.03],
            )
            if self.is_old and name in ("limit", "approve"):
                continue
            with contextlib.suppress(EpsilonsError):
                getattr(self, name)()

    def age(self, url, pepper):
        """Make it one of the first form, and perhaps migrate it and go on."""
        self.registry.close()
        downgrade(url)
        if self.rng.random() < 0.5:
            return
        Registry.migrate(url)
        self.is_old = False
        with Registry(url, pepper) as self.registry:
            self.make(int(self.rng.integers(1, 5)))

    def some(self):
        """Ids of some people who are enrolled."""
        return np.flatnonzero(self.rng.random(self.enrolled) < self.rng.choice([0.2, 0.6, 1.0])).tolist() or [0]

    def budgets(self, people):
        return self.rng.choice([0.5, 1.0, 1.5, 4.0], people)

    def enrol(self):
        new = min(int(self.rng.integers(1, 8)), self.people - self.enrolled)
        if new > 0:
            self.registry.enrol(range(self.enrolled, self.enrolled + new), self.budgets(new))
            self.enrolled += new

    def change(self):
        some = self.some()
        self.registry.change(some, self.budgets(len(some)))

    def withdraw(self):
        self.registry.withdraw(self.some()[:2])

    def quota(self):
        self.registry.set_quota(str(self.rng.choice(["a", "b"])), float(self.rng.choice([0.1, 0.3, 0.7, 1.0])))

    def limit(self):
        self.registry.limit_refunds(float(self.rng.choice([0.0, 0.3, 1.0])))

    def approve(self):
        if run := self.any_run(begun=bool(self.rng.random() < 0.5)):
            steps = [0] * len(self.runs[run].steps)
            self.registry.approve(run, steps, LAST_LINE if run in self.keys else "")

    def reserve(self):
        some, table = self.some(), random_table(self.rng, 1 if self.is_old else 2)
        roster = Roster(self.registry.numbers(some), self.rng.integers(0, table.rows, len(some)))
        name = f"run {len(self.runs)}"
        self.registry.reserve_table(name, table, roster, project=str(self.rng.choice(["a", "b", ""])))
        self.runs[name] = table

    def any_run(self, begun):
        found = [name for name in self.runs if (name in self.keys) == begun]
        return str(self.rng.choice(found)) if found else None

    def begin(self):
        if run := self.any_run(begun=False):
            key = hashlib.sha256(run.encode()).hexdigest()
            self.registry.begin(run, key, None, FIRST_LINE)
            self.keys[run] = key

    def again(self):
        if run := self.any_run(begun=True):
            key = hashlib.sha256(self.keys[run].encode()).hexdigest()
            self.registry.begin(run, key, self.keys[run], FIRST_LINE)
            self.keys[run] = key

    def settle(self):
        if run := self.any_run(begun=True):
            part = self.rng.choice([0.0, 0.5, 1.0])
            steps = [int(part * n) for n in self.runs[run].steps]
            self.registry.settle(run, steps, LAST_LINE, self.keys[run])

    def cancel(self):
        if run := self.any_run(begun=False):
            self.registry.cancel(run)

    def release(self):
        name = f"statistic {self.rng.integers(1000)}"
        self.registry.release(name, 1.0, ids=self.some(), sensitivity=1.0, noise_multiplier=30.0, project="a")


# -- behind its back ---------------------------------------------------------------------------------------------

#: Values that a column of SQLite may hold, whatever its type.
STRANGE = (0, -1, 7, 10**18, 1.5, 1e308, "", "x", "0" * 64, b"", b"\xff\xfe\x00", b"x" * 70_000)
TABLES = ("fact", "wish", "cohort", "person", "page", "quota", "run", "part", "statement", "event", "head")


def tamper(path, rng):
    """Change the database in one way; what was done. It may be that nothing changes."""
    with closing(sqlite3.connect(path)) as connection, connection, contextlib.suppress(sqlite3.IntegrityError):
        for (rule,) in connection.execute("select name from sqlite_master where type = 'trigger'").fetchall():
            connection.execute(f"drop trigger {rule}")
        connection.execute("drop index if exists event_run")
        connection.text_factory = lambda raw: raw.decode(errors="replace")
        way = rng.choice(["cell", "delete", "copy", "blob", "event"], p=[0.25, 0.1, 0.1, 0.2, 0.35])
        return f"{way}: {globals()[f'_{way}'](connection, rng)}"


def _any_row(connection, rng, table):
    columns = [row[1] for row in connection.execute(f"pragma table_info({table})")]
    rows = connection.execute(f"select * from {table}").fetchall()
    return columns, rows, (rows[int(rng.integers(len(rows)))] if rows else None)


def _where(columns, row):
    return " and ".join(f"{name} is ?" for name in columns), row


def _cell(connection, rng):
    table = str(rng.choice(TABLES))
    columns, rows, row = _any_row(connection, rng, table)
    if row is None:
        return "nothing"
    place = int(rng.integers(len(columns)))
    others = [*(other[place] for other in rows), *STRANGE, *([row[place] + 1] if isinstance(row[place], int) else [])]
    value = others[int(rng.integers(len(others)))]
    where, old = _where(columns, row)
    connection.execute(f"update {table} set {columns[place]} = ? where {where}", (value, *old))
    return f"{table}.{columns[place]}"


def _delete(connection, rng):
    table = str(rng.choice(TABLES))
    columns, _, row = _any_row(connection, rng, table)
    if row is not None:
        where, old = _where(columns, row)
        connection.execute(f"delete from {table} where {where}", old)
    return table


def _copy(connection, rng):
    """Another row, almost like one that exists."""
    table = str(rng.choice(TABLES))
    columns, _, row = _any_row(connection, rng, table)
    if row is not None:
        new = [
            f"{row[0]}x" if isinstance(row[0], str) else row[0] + 1 if isinstance(row[0], int) else row[0][::-1],
            *row[1:],
        ]
        connection.execute(f"insert into {table} values ({', '.join('?' * len(columns))})", new)
    return table


def _blob(connection, rng):
    """One person's row or cohort."""
    table, column, dtype = [("part", "rows", "<i2"), ("statement", "rows", "<i2"), ("page", "cohorts", "<i4")][
        rng.integers(3)
    ]
    columns, _, row = _any_row(connection, rng, table)
    if row is None:
        return "nothing"
    values = np.frombuffer(zlib.decompress(row[columns.index(column)]), dtype=dtype).copy()
    values[int(rng.integers(min(len(values), SMALL_PAGE)))] += int(rng.choice([-1, 1, 2]))
    where, old = _where(columns, row)
    connection.execute(f"update {table} set {column} = ? where {where}", (zlib.compress(values.tobytes(), 1), *old))
    return table


def _event(connection, rng):
    """Events that are left out, repeated, exchanged or changed, with hashes that are right again."""
    bodies = [body for (body,) in connection.execute("select body from event order by number")]
    one, two = (int(n) for n in rng.integers(0, len(bodies), 2))
    way = str(rng.choice(["repeat", "leave out", "exchange", "field", "kind", "time", "form"]))
    event = json.loads(bodies[one])
    kind = event["kind"]
    if way == "repeat":
        bodies.append(bodies[one])
    elif way == "leave out":
        del bodies[one]
    elif way == "exchange":
        bodies[one], bodies[two] = bodies[two], bodies[one]
    elif way == "form":
        bodies[one] = bodies[one].replace(": ", ":", 1)
    else:
        names = sorted(set(event) - {"kind", "time"})
        name = {"kind": "kind", "time": "time"}.get(way) or str(rng.choice(names))
        event[name] = (
            changed(event[name], rng) if way == "field" else "2020-01-01T00:00:00+00:00" if way == "time" else "x"
        )
        bodies[one] = json.dumps(event, sort_keys=True)
        way += f" {name}"
    write_events(connection, bodies)
    return f"{way} of {kind}"


def changed(value, rng):
    """Almost this value."""
    if value is None:
        return "0" * 64
    if isinstance(value, str):
        return value + "x" if rng.random() < 0.5 else ("0" if value[:1] != "0" else "1") + value[1:]
    if isinstance(value, list):
        return [max(0, n - 1) for n in value] if rng.random() < 0.5 else [n + 1 for n in value]
    return value + 1 if rng.random() < 0.5 else value / 2 if isinstance(value, float) else 0


def write_events(connection, bodies):
    """These events instead of all, with hashes."""
    last = "0" * 64
    connection.execute("delete from event")
    for number, body in enumerate(bodies, 1):
        new = hashlib.sha256((last + body).encode()).hexdigest()
        connection.execute("insert into event values (?, ?, ?, ?)", (number, last, new, body))
        last = new
    connection.execute("update head set number = ?, hash = ?", (len(bodies), last))
