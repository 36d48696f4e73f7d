"""The tables of a registry.

    fact    identity of the registry, version, commitment to its pepper
    wish    a lifetime budget: ε, δ, home order
    cohort  (wish, withdrawn, 16 sums of what is spent and reserved). People with equal sums share a row
    person  pseudonym -> number, from 0
    page    16,384 people -> the cohort of each
    quota   project -> the part of any lifetime budget that its runs may use together
    run     state, kind, project, digest, table, charged steps, commitment to the key, last and first line of its ledger
    part    (run, page) -> who of this page takes part, and in which row of the table
    statement  (event, page) -> the wish that each of these people stated, or that they withdrew
    event   a chain of hashes that is only ever added to; head has its end

`event`, `statement`, `run` and `part` are the truth. `page` and `cohort` follow from them, and `verify` computes
them again. rules_sqlite.sql and rules_postgresql.sql have the database refuse what the events do not allow.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from importlib import resources
from typing import Any

import numpy as np
import numpy.typing as npt

from .databases import Database

SCHEMA = 3
#: People per page.
PAGE = 1 << 14

TABLES = """
create table fact (name text primary key, value text not null);
create table wish (
  id integer primary key, epsilon double precision not null, delta double precision not null, home integer not null,
  unique (epsilon, delta, home));
create table cohort (
  id integer primary key, wish integer not null, withdrawn integer not null, sums BLOB not null,
  unique (wish, withdrawn, sums));
create table person (pseudonym BLOB primary key, number integer not null) WITHOUT;
create table page (number integer primary key, cohorts BLOB not null);
create table quota (project text primary key, share double precision not null);
create table run (
  id text primary key, state text not null, kind text not null, project text not null, digest text not null,
  plan text not null, charged text, key text, ledger text, begun text);
create table part (run text not null, page integer not null, rows BLOB not null, primary key (run, page));
create table statement (event integer not null, page integer not null, rows BLOB not null, primary key (event, page));
create table event (number integer primary key, previous text not null, hash text not null, body text not null);
create table head (one integer primary key, number integer not null, hash text not null);
"""


def create(database: Database, fill: Callable[[], object]) -> None:
    """Make all tables, fill them, and make the rules for what follows."""
    without = "without rowid" if database.blob == "blob" else ""
    for statement in TABLES.replace("BLOB", database.blob).replace("WITHOUT", without).split(";"):
        if statement.strip():
            database.run(statement)
    fill()
    for statement in rules(database):
        database.run(statement)


def rules(database: Database) -> list[str]:
    """The statements that have this database refuse what the events of a registry do not allow."""
    script = f"rules_{'sqlite' if database.blob == 'blob' else 'postgresql'}.sql"
    return resources.files(__package__).joinpath(script).read_text(encoding="utf-8").split("\n\n")


def packed(values: npt.NDArray[Any]) -> bytes:
    """An array as it is stored."""
    return zlib.compress(np.ascontiguousarray(values).tobytes(), 1)


def unpacked(stored: Any, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """The array, of this type."""
    return np.frombuffer(zlib.decompressobj().decompress(stored, 8 * PAGE), dtype=dtype).copy()
