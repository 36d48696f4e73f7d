"""`epsilons registry backup | restore | repair`: copies of a registry, and sums that are computed again."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..errors import PromiseError
from .console import console
from .options import Quiet, option
from .registry import Pepper, Signer, Url, app, command, export_of

NONE = "none"


@command("backup", "backup sqlite:///people.db -o april.db", "backup postgresql://rita@db/people -o april.db")
def backup(
    url: Url,
    output: Annotated[Path, option("A new file, on a local disk.", "--output", "-o")],
    pepper: Pepper = None,
    quiet: Quiet = False,
) -> None:
    """Copy a registry into a SQLite file with mode 0600, as of one moment. Others use the registry meanwhile.

    The file says who takes part to everyone who has the pepper, which is not in it. It is a registry: epsilons registry
    verify sqlite:///FILE. Never use it as one: restore it.
    """
    from .registry_access import opened

    with opened(url, pepper) as registry:
        registry.copy(f"sqlite:///{output}")
    console(quiet=quiet).print(
        "Copied. Write an export, too, and keep it elsewhere: epsilons registry export URL -o FILE"
    )


@command(
    "restore",
    "restore april.db sqlite:///people.db --since april.json --signer officer-public.pem",
    "restore april.db postgresql://owner@db/people --since none",
)
def restore(
    file: Annotated[Path, typer.Argument(help="A file that epsilons registry backup wrote.", show_default=False)],
    url: Url,
    since: Annotated[str, option(f"The newest export; {NONE!r} if there is none at all.")],
    signer: Signer = None,
    quiet: Quiet = False,
) -> None:
    """Make a registry again from a backup, in a new and empty database, whole or not at all.

    A backup that is older than the export is refused: what was charged since would be spent twice. So is one that does
    not continue it, or that is wrong.
    """
    from ..registry import exports
    from .registry_access import opened

    earlier = export_of(None if since == NONE else Path(since), signer, quiet)
    if earlier is None:
        print(
            "--since none: nobody checks that this is the newest backup. What was charged after it can be spent again."
        )
    with opened(f"sqlite:///{file}", None) as source:
        if earlier is not None:
            exports.compare(source, earlier)
        if not source.verify().is_right:
            raise PromiseError(f"{file} is wrong, and nothing was made. See: epsilons registry verify sqlite:///{file}")
        source.copy(url)
    console(quiet=quiet).print(
        "Restored. Put the pepper in its place; in PostgreSQL, run the output of epsilons registry roles again. Count "
        "each run that was reserved after the backup as charged in full."
    )


@command("repair", "repair sqlite:///people.db")
def repair(url: Url, pepper: Pepper = None, quiet: Quiet = False) -> None:
    """Compute the stored sums of all people again from the events, where verify says that they are wrong.

    It is refused if an event is wrong: then restore a backup, or have the owner quarantine the event.
    """
    from .registry_access import opened

    with opened(url, pepper) as registry:
        registry.repair()
    console(quiet=quiet).print("All sums are computed again from the events. Now: epsilons registry verify URL")


__all__ = ["app"]
