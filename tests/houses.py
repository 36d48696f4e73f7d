"""A registry in PostgreSQL with roles, and logins for each of them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from epsilons.registry import Registry
from epsilons.registry.requests import roles_script
from registries import reserve, table
from servers import Server

IDS = [f"p{i}" for i in range(40)]
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


def build(postgres, pepper):
    """A house with 40 people, two projects, and a run of one of them."""
    url = postgres.place()
    made = House(postgres, url.rpartition("%3D")[2], pepper)
    with Registry.create(url, made.pepper) as registry:
        registry.enrol(IDS, [1.0, 3.0] * 20)
        for _ in range(2):
            made.sql("owner", roles_script())
        for login, group in LOGINS.items():
            if not made.sql("owner", f"select from pg_roles where rolname = '{login}'"):
                made.sql("owner", f"create role {login} login password '{postgres.password}'")
            made.sql("owner", f"grant {group} to {login}" if group else "select")
        made.sql("owner", "insert into member values ('anna', 'cardiology'), ('bob', 'oncology')")
        registry.set_quota("oncology", 0.5)
        reserve(registry, "theirs", IDS, np.zeros(40, dtype=int), table([200.0]), project="oncology")
        registry.admit("sue", "p3")
        registry.admit("sam", "p4")
    return made
