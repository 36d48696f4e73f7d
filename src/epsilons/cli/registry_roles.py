"""`epsilons registry roles | admit | carry-out`: roles of a registry in PostgreSQL."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.progress import Progress

from ..errors import InputError
from .console import console
from .options import Quiet
from .registry import Ids, Pepper, Url, app, command
from .registry_access import id_of, opened


@command("roles", "roles > roles.sql", "roles | psql postgresql://owner@db/people")
def roles() -> None:
    """Print the SQL that sets up the roles subject, runner, officer and regulator in PostgreSQL.

    Run it once with psql, as the owner of the registry's tables. The database itself then refuses what a role may not
    do.
    """
    from ..registry.requests import roles_script

    print(roles_script(), end="")


@command("admit", "admit postgresql://otto@db/people sue --person - --pepper /keys/pepper")
def admit(
    url: Url,
    role: Annotated[str, typer.Argument(help="A login with the role epsilons_subject.", show_default=False)],
    person: Ids = None,
    pepper: Pepper = None,
    quiet: Quiet = False,
) -> None:
    """Let a login of PostgreSQL state what one person wants: a budget, or a withdrawal.

    What it states waits until an officer carries it out (epsilons registry carry-out).
    """
    _check_url(url)
    one = id_of(person)
    with opened(url, pepper) as registry:
        registry.admit(role, one)
    console(quiet=quiet).print("Admitted: what this login states counts for that person, once it is carried out.")


@command("carry-out", "carry-out postgresql://otto@db/people")
def carry_out(url: Url, pepper: Pepper = None, quiet: Quiet = False) -> None:
    """Carry out the budgets and withdrawals that people stated themselves, oldest first.

    Budgets are rounded down to two significant digits of epsilon. How many there were is not printed: it would say how
    many left. An interrupted call is repeated; others use the registry meanwhile.
    """
    _check_url(url)
    with opened(url, pepper) as registry, Progress(console=console(stderr=True), disable=quiet) as progress:
        task = progress.add_task("requests", total=1.0)
        registry.carry_out(lambda part: progress.update(task, completed=part))
    console(quiet=quiet).print("Everything that people stated is carried out.")


def _check_url(url: str) -> None:
    if url.startswith("sqlite:"):
        raise InputError("A SQLite file has one owner and no roles. Roles need a registry in PostgreSQL.")


__all__ = ["app"]
