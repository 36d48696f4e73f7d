"""Copies of a registry: all tables as of one moment, in a new database of either kind.

A backup is a registry in a SQLite file, whichever database it came from. So it can be verified, and restoring it is
one more copy. What waits in the tables of roles.sql goes along; logins and their roles do not, nor does the pepper.
"""

from __future__ import annotations

import re
from itertools import islice

from . import schema
from .databases import Database, database
from .requests import roles_script

#: Tables of roles.sql: their columns, and how a time is read.
ROLES = {"member": "role, project", "subject": "role, number", "request": "id, role, time, epsilon, delta, applied"}
TIME = ("time", "cast(time as text)")
#: Rows that are in memory. One row of a roster has up to 40 kB.
AT_ONCE = 500


def copy(source: Database, url: str) -> None:
    """Copy all tables into a new, empty database, whole or not at all; nobody waits for it. Raises RegistryError."""
    target = database(url, is_new=True)
    try:
        source.snapshot(lambda: target.build(lambda: schema.create(target, lambda: _fill(source, target))))
    finally:
        target.close()


def _fill(source: Database, target: Database) -> None:
    for table in re.findall(r"create table (\w+)", schema.TABLES):
        _load(source, target, f"select * from {table}", table)
    known = (
        "sqlite_master where name" if source.blob == "blob" else "pg_class where oid = to_regclass(relname) and relname"
    )
    for table, columns in ROLES.items() if source.run(f"select 1 from {known} = 'request'") else ():
        [stated] = re.findall(rf"create table if not exists {table} \(.*?\);", roles_script(), re.DOTALL)
        target.run(f"create table {table} ({columns})" if target.blob == "blob" else stated)
        _load(source, target, f"select {columns.replace(*TIME)} from {table}", table)
        if target.blob != "blob" and table == "request":
            target.run("select setval(pg_get_serial_sequence('request', 'id'), max(id)) from request")


def _load(source: Database, target: Database, statement: str, table: str) -> None:
    rows = source.stream(statement)
    while some := list(islice(rows, AT_ONCE)):
        target.load(table, some)
