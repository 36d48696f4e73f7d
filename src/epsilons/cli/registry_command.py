"""`epsilons registry`: lifetime budgets of people, over all runs (docs/registry.md)."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable
from datetime import datetime
from inspect import signature
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.progress import Progress
from typer.core import TyperCommand

from ..budgets.ids import AS_WRITTEN, WAYS
from ..configs.registry_train import NEXT, VARIABLE, id_of, opened
from ..errors import InputError, PromiseError, RegistryError, RegistryRefusedError, json_text, printable
from .options import AsJson, Quiet, console, option, parse_tiers, saying

_URL = "sqlite:///people.db, or postgresql://host/database. Default: EPSILONS_REGISTRY."
Url = Annotated[
    str,
    typer.Argument(
        metavar="URL",
        help=_URL,
        show_default=False,
    ),
]
Pepper = Annotated[
    Path | None,
    option("The file with the key of the pseudonyms. Default, for SQLite: beside the database (people.db.pepper)."),
]
Ids = Annotated[str | None, option('The id of one person; "-" reads it from the standard input.', "--id")]
Share = Annotated[float, typer.Argument(help="From 0 to 1.", show_default=False)]
Part = Annotated[float, typer.Argument(help="Above 0, at most 1.", show_default=False)]
Project = Annotated[str, typer.Argument(help="The project.", show_default=False)]
Role = Annotated[str, typer.Argument(help="A login with the role epsilons_subject.", show_default=False)]
Runs = Annotated[list[str], typer.Argument(metavar="RUN...", help="Folders; names of runs that never began.")]
Signer = Annotated[str | None, option("A public key, fingerprint or PEM file: who must have signed that export.")]
LocalFile = Annotated[Path, option("A new file, on a local disk.", "--output", "-o")]
DAY = ["%Y-%m-%d"]
NewEpsilon = Annotated[float, option("The lifetime budget from now on.")]
Delta = Annotated[float, option("The delta of all these people.")]
Spelling = Annotated[
    list[str] | None,
    option(f"How ids are made equal: {AS_WRITTEN!r}, or {', '.join(map(repr, WAYS))}. Repeatable.", "--ids"),
]

app = typer.Typer(
    name="registry",
    help="Keep one lifetime budget per person over many runs: whatever is computed from people reserves first, is "
    "charged for what it did, and gives the rest back.\n\nNo name and no id enters the database, and no message shows "
    "one. A URL with a password is neither printed nor stored; better keep the password in ~/.pgpass.",
    epilog="[bold]The first day[/bold]\n\nepsilons registry create sqlite:///people.db\n\n"
    "epsilons registry import sqlite:///people.db wishes.csv --person patient_id --column epsilon\n\n"
    "epsilons train people.toml --registry sqlite:///people.db --share 0.25 --project cardiology\n\n"
    "epsilons registry show sqlite:///people.db\n\n[bold]Every month[/bold]\n\n"
    "epsilons registry verify sqlite:///people.db --since march.json\n\n"
    "epsilons registry export sqlite:///people.db -o april.json --sign officer.pem",
    no_args_is_help=True,
    rich_markup_mode="rich",
)


class _Command(TyperCommand):
    """The registry's URL may be left out where the environment has it."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        names, url = [one.name for one in self.params if one.param_type_name == "argument"], os.environ.get(VARIABLE)
        if url and "url" in names and not any(re.match("(sqlite|postgres|postgresql)://", one) for one in args):
            args = [url, *args] if names[0] == "url" else [*args, url]
        return super().parse_args(ctx, args)


def command(*examples: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A command with these examples, and its docstring as the help: one paragraph per blank line.

    examples: without "epsilons registry". The first word is the command's name
    """
    shown = "\n\n".join(f"epsilons registry {example}" for example in examples)

    def add(function: Callable[..., Any]) -> Callable[..., Any]:
        text = "\n\n".join(" ".join(part.split()) for part in (function.__doc__ or "").split("\n\n"))
        made = function if "as_json" in signature(function).parameters else saying(function)
        epilog = f"[bold]Examples[/bold]\n\n{shown}"
        app.command(examples[0].split()[0], help=text, epilog=epilog, cls=_Command)(made)
        return function

    return add


@command("create sqlite:///people.db", "create postgresql://db/people --pepper /keys/pepper")
def create(url: Url, ids: Spelling = None, pepper: Pepper = None) -> tuple[str, dict[str, Any]]:
    """Make an empty registry, and the pepper of its pseudonyms if that file does not exist yet.

    The pepper is a secret key. Without it no person is found again, and with it and the database every holder can ask
    whether a person takes part. Keep a copy of it, and keep it apart from copies of the database.
    """

    with opened(url, pepper, ids, is_new=True) as registry:
        return (
            f"Registry {registry.id}, without people. Its pepper is a secret file beside it, or where --pepper says: "
            "keep a copy apart from copies of the database.\nNext: epsilons registry import URL wishes.csv --person "
            "COLUMN"
        ), {"registry": registry.id}


@command(
    "import sqlite:///people.db wishes.csv --person patient_id",
    "import sqlite:///people.db wishes.csv --person id --column tier --tiers strict=1,open=8",
    "import sqlite:///people.db wishes.csv --person id --change",
)
def import_(
    url: Url,
    file: Annotated[Path, typer.Argument(help="A .csv, .tsv or .parquet file.", show_default=False)],
    person: Annotated[str, option("The column with the id of each row's person.")],
    column: Annotated[str, option("The column of lifetime budgets, or of names of tiers.")] = "epsilon",
    delta: Delta = 1e-5,
    delta_column: Annotated[str | None, option("A column with a delta per person, in place of --delta.")] = None,
    tiers: Annotated[str | None, option('Epsilon of each tier: "strict=1,open=8".')] = None,
    conflict: Annotated[str, option('For persons whose rows differ: "refuse" or "strictest".')] = "refuse",
    ids: Spelling = None,
    left_out: Annotated[list[str] | None, option('A tier that means no; "" for empty cells. Repeatable.')] = None,
    as_of: Annotated[datetime | None, option("The day that decides which entries count.", formats=DAY)] = None,
    withdrawn_on: Annotated[str | None, option("The column with the day of withdrawal.")] = None,
    valid_from: Annotated[str | None, option("The column with the first day of an entry.")] = None,
    valid_until: Annotated[str | None, option("The column with its last day.")] = None,
    dates: Annotated[Literal["day first", "month first"] | None, option("The order of dates like 3/4/2024.")] = None,
    change: Annotated[bool, option("Also change the budgets of people who are enrolled.", "--change")] = False,
    yes: Annotated[
        bool, option("With --change, also to more than 5 times the epsilon that they had.", "--yes")
    ] = False,
    pepper: Pepper = None,
    quiet: Quiet = False,
) -> tuple[None, dict[str, Any]]:
    """Enrol people with the lifetime budgets that they chose.

    People who are enrolled with the same budget stay as they are, so an import that was interrupted is repeated.
    Another budget of an enrolled person is refused without --change. People who withdrew stay so: to take part again
    they state a budget themselves (epsilons registry change). With --left-out, people with such an entry are not
    enrolled, and are withdrawn if they were.

    With --as-of DAY, the same holds for people who withdrew by that day, and for those without an entry in force on
    it: not yet, or no longer. To take part later, they too state a budget themselves. A list with a column that by its
    name holds such days is refused until an option names it.
    """
    from .registry_people import import_wishes, read_wishes

    days: dict[str, Any] = {"withdrawn_on": withdrawn_on, "valid_from": valid_from, "valid_until": valid_until}
    if (as_of is None) == any(days.values()):
        raise InputError("--as-of is given with --withdrawn-on, --valid-from or --valid-until, and those with it.")
    days |= {"dates": dates, "as_of": as_of and as_of.date()}
    columns = {"column": column, "delta": delta, "delta_column": delta_column, "person": person, "conflict": conflict}
    named = None if tiers is None else parse_tiers(tiers.replace("=", ":"))
    with opened(url, pepper, ids) as registry:
        wishes, out = read_wishes(file, left_out or [], days, tiers=named, spelling=registry.spelling, **columns)
        said = []
        for line in import_wishes(registry, wishes, out, change, quiet, yes):
            console(quiet=quiet).print(line)
            said.append(line)
    return None, {"said": " ".join(said)}


@command("change sqlite:///people.db --id - --epsilon 2")
def change(url: Url, epsilon: NewEpsilon, person: Ids = None, delta: Delta = 1e-5, pepper: Pepper = None) -> str:
    """Raise or lower the lifetime budget of one person, or let a person take part again who withdrew.

    What was spent stays spent. Below it, no further run includes the person, and what was released was promised at the
    former budget. For many people: epsilons registry import --change.
    """

    one = id_of(person)
    with opened(url, pepper) as registry:
        registry.change([one], epsilon, delta)
    return "The lifetime budget is changed, for every run that is reserved from now on."


@command("withdraw sqlite:///people.db --id -", "withdraw sqlite:///people.db --file leaving.csv --person patient_id")
def withdraw(
    url: Url,
    one: Ids = None,
    file: Annotated[Path | None, option("A .csv, .tsv or .parquet file of ids.")] = None,
    person: Annotated[str | None, option("The column of ids in --file, if it has several.")] = None,
    pepper: Pepper = None,
) -> str:
    """Include these people in no further run. What was released stays, and so does what was spent.

    A run that goes on leaves them out from its next block of steps. Of a file,
    all people who are enrolled are withdrawn; if others are in it, the exit code is 3.
    """
    from . import registry_people

    if (one is None) == (file is None):
        raise InputError("Give either --id or --file.")
    with opened(url, pepper) as registry:
        ids = [id_of(one)] if file is None else registry_people.read_ids(file, person, registry.spelling)
        strangers = registry_people.withdraw(registry, ids)
    if strangers is not None:
        raise RegistryRefusedError(strangers)
    who = "the person" if file is None else f"all {len(ids):,} people of {printable(file)}"
    said = "No later run includes them, and a run that goes on leaves them out from its next block of steps."
    return f"Withdrawn: {who}. {said}"


@command("quota sqlite:///people.db cardiology 0.5")
def quota(url: Url, project: Project, share: Part, pepper: Pepper = None) -> str:
    """Allow the runs of a project this part of each lifetime budget, all together.

    A quota keeps one project from using people up. It is no privacy guarantee: only the lifetime budget is.
    """

    with opened(url, pepper) as registry:
        registry.set_quota(project, share)
    return f"{printable(project)}: at most {100 * share:.4g}% of each lifetime budget."


@command("limit sqlite:///people.db 0.25")
def limit(url: Url, share: Share) -> str:
    """Let a run give back at most this share of its steps, unless an officer approves more.

    The steps that a run made are known from its ledger, which is in the hands of those who ran it. In PostgreSQL only
    the owner of the tables sets the limit.
    """

    with opened(url, None) as registry:
        registry.limit_refunds(share)
    return f"A run gives back at most {share:.4g} of its steps without an approval."


@command("approve sqlite:///people.db runs/people-1", "approve sqlite:///people.db people-1-3f9c2a71")
def approve(url: Url, runs: Runs) -> str:
    """Allow these runs to give back more than the owner's limit. Settle them afterwards: epsilons registry settle.

    In PostgreSQL an officer does this. Read the ledger first, and ask how the steps were counted that it says were not
    made: the approval holds for this ledger alone.
    """
    from ..registry import evidence

    with opened(url, None) as registry:
        names = [printable(evidence.approve(registry, run)) for run in runs]
    return "\n".join(f"{name}: approved. Next: epsilons registry settle URL RUN" for name in names)


@command('quarantine sqlite:///people.db --event 17 --event 18 --reason "by hand on 3 March, ticket 9"')
def quarantine(
    url: Url,
    event: Annotated[list[int], option("The number of an event that is wrong. Repeatable.")],
    reason: Annotated[str, option("Why, in one line, for everyone who verifies.")],
) -> str:
    """Take wrong events out of the account, so that everyone else goes on. They stay in the chain, and are told.

    verify names the first event that is wrong. In PostgreSQL only the owner of the tables does this. A run whose
    reservation is taken out is charged to nobody: its model must not be released.
    """

    with opened(url, None) as registry:
        registry.quarantine(event, reason)
    return "Quarantined. Next: epsilons registry repair URL, then epsilons registry verify URL"


@command("migrate sqlite:///people.db")
def migrate(url: Url) -> str:
    """Bring a registry of an earlier version of epsilons to the present tables, whole or not at all.

    Nothing is lost, and the events of before stay as they are. Make a copy of the database first all the same. In
    PostgreSQL the owner of the tables does this, and then repeats: epsilons registry roles | psql URL
    """
    from ..registry import Registry

    Registry.migrate(url)
    return "The registry has the present tables. Next: epsilons registry verify URL"


@command(
    "show sqlite:///people.db",
    "show sqlite:///people.db --run people-1-3f9c2a71",
    "show sqlite:///people.db --id -",
)
def show(
    url: Url,
    run: Annotated[str | None, option("One run, by its name in the registry.")] = None,
    person: Ids = None,
    pepper: Pepper = None,
    as_json: AsJson = False,
) -> None:
    """Show how much of the lifetime budgets is used, per wish and project, and all runs.

    Groups of fewer than 20 people are merged or left out. --id shows one person's own account, which is
    confidential: print it for that person alone.
    """
    from . import registry_people

    if run is not None and person is not None:
        raise InputError("Give either --run or --id.")
    if person is not None and not as_json and not sys.stdout.isatty():
        raise InputError("A person's account is confidential, and is printed on a terminal only. For a file: --json.")
    one = None if person is None else id_of(person)
    with opened(url, pepper) as registry:
        if one is not None:
            registry_people.show_person(registry, one, as_json)
        elif run is not None:
            registry_people.show_run(registry, run, as_json)
        else:
            registry_people.show_all(registry, as_json)


@command(
    "settle sqlite:///people.db runs/people-1",
    "settle sqlite:///people.db runs/people-1 --abandon",
    "settle sqlite:///people.db --cancel people-1-3f9c2a71",
)
def settle(
    url: Url,
    run: Annotated[Path | None, typer.Argument(help="The folder of one run.", show_default=False)] = None,
    abandon: Annotated[
        bool, option("Give up an interrupted run for good: close its ledger and destroy its key.", "--abandon")
    ] = False,
    cancel: Annotated[str | None, option("The name of a run that was reserved and never began.")] = None,
    pepper: Pepper = None,
) -> tuple[str, dict[str, Any]]:
    """Give back the steps that a run did not make, by its closed ledger.

    A run that ends does this itself. It is needed when the registry could not be reached then, or for a run that was
    interrupted and is given up. A run with a lost folder stays charged for all its steps: it may have made them.
    """

    if (run is None) == (cancel is None) or (cancel is not None and abandon):
        raise InputError("Give the folder of a run, or the name of a run that never began with --cancel.")
    with opened(url, pepper) as registry:
        if cancel is not None:
            registry.cancel(cancel)
            name, charged, reserved = cancel, 0, 0
        else:
            from ..registry.evidence import settle as settle_folder

            assert run is not None
            name, charged, reserved = settle_folder(registry, run, abandon)
    said = f"{printable(name)}: never began, and all its steps are given back. It cannot begin any more."
    if reserved:
        said = f"{printable(name)}: {charged:,} of {reserved:,} steps stay charged; the others are given back.\n{NEXT}"
    return said, {"run": name, "charged": charged, "reserved": reserved}


@command(
    "verify sqlite:///people.db",
    "verify sqlite:///people.db --since march.json --signer officer-public.pem",
    "verify sqlite:///people.db --run runs/people-1",
)
def verify(
    url: Url,
    since: Annotated[Path | None, option("An earlier export that this registry must continue.")] = None,
    signer: Signer = None,
    run: Annotated[
        Path | None, option("The folder of a run: is its ledger the one that the run began with and was settled by?")
    ] = None,
    pepper: Pepper = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Replay every event, and compare the result with what is stored.

    Without --since, an older copy of the whole database is not noticed, nor one that its owner wrote as a whole.

    Exit code 3 if something was altered, if a person was charged beyond a lifetime budget, or if the registry does not
    continue the export.
    """
    from ..registry import evidence

    earlier = export_of(since, signer, as_json or quiet)
    with opened(url, pepper) as registry:
        if earlier is not None:
            evidence.compare(registry, earlier)
        try:
            verdict = registry.verify()
        except RegistryError as error:
            raise PromiseError(str(error)) from None
        if run is not None:
            evidence.check(registry, run)
    evidence.check_export(verdict)
    quarantined = [{"event": number, "reason": reason} for number, reason in verdict.quarantined]
    if as_json:
        found = {"right": True, "runs": verdict.runs, "events": verdict.events, "quarantined": quarantined}
        print(json.dumps(found | {"since": earlier is not None, "signer": signer is not None}))
        return
    console(quiet=quiet).print(
        f"All {verdict.events:,} events and {verdict.runs:,} runs replayed: every account is what they say, and no "
        f"person was charged beyond a lifetime budget, or after they had withdrawn. {_since(earlier)}"
    )
    for number, reason in verdict.quarantined:
        console(quiet=quiet).print(f"Event {number:,} is in quarantine, without effect: {printable(reason)}")


def export_of(since: Path | None, signer: str | None, quiet: bool) -> dict[str, Any] | None:
    """The export in this file. Without a signer, the first line that is printed says that nobody vouches for it."""
    from ..registry import evidence

    if signer is not None and since is None:
        raise InputError("--signer checks the export in --since; give both.")
    earlier = None if since is None else evidence.read_export(since, signer)
    if earlier is not None and signer is None:
        signed = "is signed with a key that nothing here confirms" if "signature" in earlier else "is not signed"
        said = f"Nobody vouches for this export: it {signed}, so anyone can have made it. Check who did: --signer KEY."
        console(stderr=quiet).print(said, soft_wrap=True)
    return earlier


def _since(earlier: dict[str, Any] | None) -> str:
    if earlier is None:
        return "To notice a restored copy, give an earlier export: --since."
    return f"The registry continues the export of {printable(str(earlier.get('time')))}."


@command("export sqlite:///people.db -o april.json", "export sqlite:///people.db -o april.json --sign officer.pem")
def export(
    url: Url,
    output: Annotated[Path, option("A new file.", "--output", "-o")],
    sign: Annotated[Path | None, option("A private Ed25519 key, as PEM.")] = None,
    counts: Annotated[bool, option("Also write coarse numbers of people and runs.", "--counts")] = False,
    excluded: Annotated[
        datetime | None,
        option(
            "Also state that who withdrew before this day is in no later roster. Who never enrolled is in none at all.",
            formats=DAY,
        ),
    ] = None,
    pepper: Pepper = None,
) -> tuple[str, dict[str, Any]]:
    """Write the number and the hash of the last event, to keep elsewhere.

    epsilons registry verify --since compares a registry with it. The file holds no id and, without --counts, no number
    of people. A key is made with: openssl genpkey -algorithm ed25519 -out officer.pem
    """
    from ..core.files import write_text
    from ..registry import evidence

    if output.exists():
        raise InputError(f"{output} exists, and an earlier export is evidence. Choose a new name.")
    with opened(url, pepper) as registry:
        values = evidence.export(registry, sign, None if excluded is None else excluded.date(), counts)
    write_text(output, json_text(values) + "\n")
    said = f"{printable(output)}: keep it where the owner of the database cannot change it."
    return said, {"file": str(output), "head": values["head"]}


@command("backup sqlite:///people.db -o april.db", "backup postgresql://rita@db/people -o april.db")
def backup(url: Url, output: LocalFile, pepper: Pepper = None) -> tuple[str, dict[str, Any]]:
    """Copy a registry into a SQLite file with mode 0600, as of one moment. Others use the registry meanwhile.

    The file says who takes part to everyone who has the pepper, which is not in it. It is a registry: epsilons registry
    verify sqlite:///FILE. Never use it as one: restore it.
    """

    with opened(url, pepper) as registry:
        registry.copy(f"sqlite:///{output}")
    said = "Copied. Now its head, to be kept elsewhere: epsilons registry export URL -o FILE"
    return said, {"file": str(output)}


@command(
    "restore april.db sqlite:///people.db --since april.json --signer officer-public.pem",
    "restore april.db postgresql://owner@db/people --since none",
)
def restore(
    file: Annotated[Path, typer.Argument(help="A file that epsilons registry backup wrote.", show_default=False)],
    url: Url,
    since: Annotated[str, option('The newest export, or "none" if there is none at all.')],
    signer: Signer = None,
    quiet: Quiet = False,
) -> str:
    """Make a registry again from a backup, in a new and empty database, whole or not at all.

    A backup that is older than the export is refused: what was charged since would be spent twice. So is one that does
    not continue it, or that is wrong.
    """
    from ..registry import evidence

    earlier = export_of(None if since == "none" else Path(since), signer, quiet)
    if earlier is None:
        said = "--since none: nobody checks that this is the newest backup. What it lacks can be spent again."
        console(stderr=quiet).print(said, soft_wrap=True)
    with opened(f"sqlite:///{file}", None) as source:
        if earlier is not None:
            evidence.compare(source, earlier)
        if not source.verify().is_right:
            raise PromiseError(f"{file} is wrong, and nothing was made. See: epsilons registry verify sqlite:///{file}")
        source.copy(url)
    return "Restored. Put the pepper in its place. In PostgreSQL, make the roles again."


@command("repair sqlite:///people.db")
def repair(url: Url, pepper: Pepper = None) -> str:
    """Compute the stored sums of all people again from the events, where verify says that they are wrong.

    It is refused if an event is wrong: then restore a backup, or have the owner quarantine the event.
    """

    with opened(url, pepper) as registry:
        registry.repair()
    return "All sums are computed again from the events. Now: epsilons registry verify URL"


# -- `epsilons registry roles | admit | carry-out`: roles of a registry in PostgreSQL


@command("roles > roles.sql", "roles | psql postgresql://owner@db/people")
def roles(as_json: AsJson = False) -> None:
    """Print the SQL that sets up the roles subject, runner, officer and regulator in PostgreSQL.

    Run it once with psql, as the owner of the registry's tables. The database itself then refuses what a role may not
    do.
    """
    from ..registry.people import roles_script

    print(json_text({"sql": roles_script()}) + "\n" if as_json else roles_script(), end="")


@command("admit postgresql://otto@db/people sue --id - --pepper /keys/pepper")
def admit(url: Url, role: Role, person: Ids = None, pepper: Pepper = None) -> str:
    """Let a login of PostgreSQL state what one person wants: a budget, or a withdrawal.

    What it states waits until an officer carries it out (epsilons registry carry-out).
    """
    _check_url(url)
    one = id_of(person)
    with opened(url, pepper) as registry:
        registry.admit(role, one)
    return "Admitted: what this login states counts for that person, once it is carried out."


@command("carry-out postgresql://otto@db/people")
def carry_out(url: Url, pepper: Pepper = None, quiet: Quiet = False) -> str:
    """Carry out the budgets and withdrawals that people stated themselves, oldest first.

    Budgets are rounded down to two significant digits of epsilon. How many there were is not printed: it would say how
    many left. An interrupted call is repeated; others use the registry meanwhile.
    """
    _check_url(url)
    with opened(url, pepper) as registry, Progress(console=console(stderr=True), disable=quiet) as progress:
        task = progress.add_task("requests", total=1.0)
        registry.carry_out(lambda part: progress.update(task, completed=part))
    return "Everything that people stated is carried out."


def _check_url(url: str) -> None:
    if url.startswith("sqlite:"):
        raise InputError("A SQLite file has one owner and no roles. Roles need a registry in PostgreSQL.")


__all__ = ["app"]
