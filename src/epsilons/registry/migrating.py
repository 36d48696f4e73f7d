"""Two things that only the owner of a registry does: migrate it to the present tables, and quarantine wrong events."""

from __future__ import annotations

import json
from collections.abc import Sequence

from ..errors import RegistryError, RegistryRefusedError
from . import chain
from .databases import Database
from .runs import CANCELLED, SETTLED
from .schema import SCHEMA, rules

#: Earlier versions of the tables. 2 was 1 with a rule of ids.
EARLIER = ("1", "2")


def check(schema: str | None) -> None:
    """Raise RegistryError for tables of another version than the present one."""
    if schema in EARLIER:
        raise RegistryError(
            f"This registry has version {schema} of the tables, and this is {SCHEMA}. Its owner brings it there, and "
            "nothing is lost: epsilons registry migrate URL"
        )
    if schema != str(SCHEMA):
        raise RegistryError(f"This registry has version {schema} of the tables; this is {SCHEMA}. Update epsilons.")


def migrate(database: Database) -> None:
    """Bring the tables to the present version, inside a transaction; nothing if they have it."""
    ((schema,),) = database.run("select value from fact where name = 'schema'")
    if schema == str(SCHEMA):
        return
    if schema not in EARLIER:
        check(schema)
    database.run("alter table run add column begun text")
    for statement in rules(database):
        database.run(statement)
    chain.add(database, "migrate", schema=str(SCHEMA), was=schema)
    database.run("update fact set value = %s where name = 'schema'", str(SCHEMA))
    database.run("update run set state = %s where state = %s and key is null", CANCELLED, SETTLED)


def quarantine(database: Database, events: Sequence[int], reason: str) -> None:
    """Take these events out of the account, inside a transaction; what they wrote into tables goes with them."""
