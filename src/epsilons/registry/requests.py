"""Requests: what subjects state by themselves in PostgreSQL (roles.sql), and how an officer carries it out.

A subject has no right to any table of the registry: a page holds 16,384 people. A statement waits in `request`
until an officer's program carries it out.
"""

from __future__ import annotations

from importlib import resources
from typing import Any

import numpy as np

from ..errors import RegistryError
from . import chain, people
from .databases import Database


def roles_script() -> str:
    """roles.sql, which sets up the roles subject, runner, officer and regulator in PostgreSQL."""
    return resources.files(__package__).joinpath("roles.sql").read_text(encoding="utf-8")


def admit(database: Database, role: str, number: int) -> None:
    """Let this role of PostgreSQL state what the person with this number wants, inside a transaction."""
    database.run("insert into subject values (%s, %s)", role, number)


def carry_out(database: Database) -> int:
    """Carry out all requests that wait, in the order in which they were made; their number. Inside a transaction.

    A budget that no account can keep is marked as refused, and the others are carried out.
    """
    waiting = database.run(
        "select id, number, epsilon, delta from request join subject using (role) where applied is null order by id"
    )
    for request, number, epsilon, delta in waiting:
        event = chain.head(database)[0] if _applied(database, number, epsilon, delta) else 0
        database.run("update request set applied = %s where id = %s", event, request)
    return len(waiting)


def _applied(database: Database, number: int, epsilon: Any, delta: Any) -> bool:
    who = np.array([number], dtype=np.int64)
    if epsilon is None:
        people.withdraw(database, who)
        return True
    try:
        people.change(database, who, np.array([epsilon]), np.array([delta]))
    except RegistryError:  # nothing was written before the budget was checked
        return False
    return True
