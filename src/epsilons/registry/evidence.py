"""What a run's folder and an export say of a registry: notes of reservations, closed ledgers, heads. No torch here."""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any, NamedTuple

from ..core.files import close_folder, write_json
from ..errors import InputError, PromiseError, RegistryError, RegistryRefusedError, RunError, parsed_json, printable
from ..ledger import signatures
from ..ledger.account import Account, read
from ..ledger.ledger import Ledger
from ..ledger.run_folder import RunFolder
from ..planning import Plan
from .registry import Registry, table_of
from .runs import RESERVED
from .summary import coarse
from .verifier import Verdict


class Settled(NamedTuple):
    """What was settled. charged, reserved: steps of all phases"""

    run: str
    charged: int
    reserved: int


def settle(registry: Registry, path: Path, abandon: bool = False) -> Settled:
    """Give back the steps that the run in this folder did not charge. A repeated call changes nothing.

    abandon  True: close the ledger of an interrupted run first, and destroy its key, so that it never continues

    Raises RunError for a folder without such a run, and for a ledger that is not closed; LedgerError for a ledger that
    was altered; RegistryRefusedError for a ledger of another run or another registry.
    """
    folder = RunFolder(path)
    if (found := noted(path)) is not None:
        if not abandon:
            raise RunError(
                f"The run in {path} was reserved and never began. Begin it (epsilons train … --resume). Or give back "
                "what was reserved: epsilons registry settle URL RUN --abandon."
            )
        give_back(registry, path)
        return Settled(found["run"], 0, 0)
    run, account, last_line = _read(registry, folder)
    if abandon:
        _close(registry, folder)
        run, account, last_line = _read(registry, folder)
    charged = _closed(folder, account)
    registry.settle(run, charged, last_line, account.key)
    return Settled(run, sum(charged), account.plan.steps)


def approve(registry: Registry, run: str) -> str:
    """Allow a run to give back what its closed ledger did not charge, as an officer; its name.

    run  its folder; or the name of a run that never began, which may give back everything
    """
    folder = RunFolder(Path(run))
    never_began = noted(folder.path) if folder.path.is_dir() else {"run": run}
    if never_began is not None:
        registry.approve(never_began["run"])
        return never_began["run"]
    name, account, last_line = _read(registry, folder)
    registry.approve(name, _closed(folder, account), last_line)
    return name


def check(registry: Registry, path: Path) -> None:
    """Compare the ledger in this folder with what the registry was told of it when the run began and was settled.

    Raises PromiseError where they differ, and as `settle` for folders without such a run. A run that is not settled is
    charged for all its steps, whatever its ledger says.
    """
    folder = RunFolder(path)
    run, account, last_line = _read(registry, folder)
    stored = registry.run(run)
    # A run that began under an earlier version has a key, and no first line.
    said: dict[str, tuple[Any, Any]] = {"key": (stored.key, account.key)}
    said |= {"first line": (stored.begun or account.first_line, account.first_line)}
    if stored.charged is not None:
        said |= {"steps": (stored.charged, account.closed), "last line": (stored.ledger, last_line)}
    others = [name for name, (there, here) in said.items() if there != here]
    if others:
        raise PromiseError(
            f"The {others[0]} of the ledger in {path} is not what the registry has for the run {run!r}. This folder is "
            "a copy, or the run was settled by another ledger: ask who settled it for the ledger they used."
        )


def _read(registry: Registry, folder: RunFolder) -> tuple[str, Account, str]:
    """(name of the run in the registry, its account, hash of its ledger's last line)."""
    if not all(file.is_file() for file in (folder.plan, folder.settings, folder.ledger)):
        raise RunError(f"{folder.path} holds no run with a ledger. Give the folder of one run, e.g. runs/first.")
    plan = Plan.load(folder.plan)
    account, chain, _ = read(folder.ledger, plan)
    return _run_of(registry, folder, plan, account), account, chain.hash


def _closed(folder: RunFolder, account: Account) -> tuple[int, ...]:
    """(phases,) steps that a closed ledger has charged. Raises RunError for a ledger that is not closed."""
    if account.closed is None:
        raise RunError(
            f"The ledger in {folder.path} is not closed: the run was interrupted, or goes on. Continue it (epsilons "
            "train … --resume). Or give it up for good: epsilons registry settle URL RUN --abandon."
        )
    return account.closed


def _close(registry: Registry, folder: RunFolder) -> None:
    """Close the ledger of an interrupted run, with all reserved steps charged, and destroy the key."""
    lock = folder.lock()  # refused while a process trains there
    try:
        run, account, _ = _read(registry, folder)  # nothing of another registry's is closed
        if registry.run(run).state == RESERVED:  # interrupted just before it began there
            registry.begin(run, account.key, None, account.first_line)
        Ledger.resume(account.plan, folder.ledger).close()
        folder.destroy_key()
    finally:
        lock.release()


def _run_of(registry: Registry, folder: RunFolder, plan: Plan, account: Account) -> str:
    """The name of the run in the registry. Raises RegistryRefusedError if the ledger is not that of such a run."""
    facts: Any = (account.rests_on or {}).get("registry")
    if not isinstance(facts, dict):
        raise RegistryError(f"The run in {folder.path} was not charged to a registry: there is nothing to settle.")
    if facts.get("id") != registry.id:
        raise RegistryRefusedError(
            f"The run in {folder.path} is charged to the registry {facts.get('id')}, and this is {registry.id}."
        )
    account.check(folder.read_settings(), folder.settings)
    registry.check_table(str(facts["run"]), table_of(plan))
    return str(facts["run"])


# -- Reservations are noted in a run's folder before they are made, so that a crash before the run begins loses none
#
# The order is: note, reserve, run.json, key, ledger, begin. Until the ledger is there, the run has not begun and made
# no step, so its reservation can be given back.


def note(path: Path, registry: str, run: str) -> None:
    """Make the run's folder and note durably what is about to be reserved: the registry's id, the name of the run."""
    folder = RunFolder(path)
    if not path.exists():
        path.mkdir(mode=0o700, parents=True)
        close_folder(path)
    write_json(folder.reservation, {"id": registry, "run": run})


def noted(path: Path) -> dict[str, str] | None:
    """What is noted in this folder; None if the folder has no note, or a run with a ledger."""
    folder = RunFolder(path)
    if folder.has_ledger or not folder.reservation.is_file():
        return None
    found: Any = folder.read_json(folder.reservation)
    return {"id": str(found.get("id")), "run": str(found.get("run"))}


def give_back(registry: Registry, path: Path) -> None:
    """Give back what is noted in this folder, and remove what a crash before the beginning of the run left there.

    Raises RegistryRefusedError for another registry, or if the run has begun, RunError while a process trains in the
    folder.
    """
    found, folder = noted(path), RunFolder(path)
    if found is not None and found["id"] != registry.id:
        raise RegistryRefusedError(
            f"The run in {path} was reserved in the registry {found['id']}, and this is {registry.id}."
        )
    if not path.is_dir():
        return
    lock = folder.lock()
    try:
        if found is not None:
            registry.cancel(found["run"], missing_ok=True)
        if not folder.has_begun:  # which removes the files of a run without a ledger
            folder.reservation.unlink(missing_ok=True)
    finally:
        lock.release()


def remove(path: Path) -> None:
    """Remove the note of a run that is known otherwise, and its folder if that is empty."""
    with suppress(OSError):  # of the folder, if there is more in it
        RunFolder(path).reservation.unlink(missing_ok=True)
        path.rmdir()


# -- Exports of a registry: its head, to keep elsewhere, so that a restored backup is noticed
#
# An export holds no id, and by default no number of people: the difference of two exports with exact numbers shows what
# one person did between them. With a key it is signed (Ed25519, RFC 8032).

#: Version 1 had exact numbers of people. It is still compared.
SCHEMA = 2
DOCUMENT = "epsilons registry"
#: The most events of a registry, and the most bytes of an export: version 1 had a line for each run.
MOST_EVENTS, MOST_BYTES = 2**31 - 1, 1 << 24


def export(
    registry: Registry, key: Path | None = None, day: date | None = None, counts: bool = False
) -> dict[str, Any]:
    """The registry's head, signed with the private key in this PEM file.

    day     the export also states that who withdrew before this day is in the roster of no later run. Raises
            PromiseError if it is not so
    counts  the export also has coarse numbers of people and runs (docs/registry.md)
    """
    number, last = registry.head
    if registry.hash_at(number) != last:  # refused for a role that sees the runs of some projects only
        raise RegistryError("The registry was altered: its last events are missing.")
    values: dict[str, Any] = {
        "document": DOCUMENT,
        "schema": SCHEMA,
        "registry": registry.id,
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "head": {"number": number, "hash": last},
        **({"counts": registry.counts()} if counts else {}),
    }
    if day is not None:
        verdict = registry.verify(day)
        check_export(verdict)
        people = coarse(verdict.excluded)
        values["excluded"] = {"withdrew_before": str(day), "people": people, "in_later_rosters": 0}
    return values if key is None else {**values, "signature": _signed(values, key)}


def read_export(path: Path, signer: str | None = None) -> dict[str, Any]:
    """The export in this file.

    signer  who must have signed it, as `signatures.signer` takes it

    Without one, a signature shows only that the file is as its unknown signer left it. Raises InputError if it is no
    export, PromiseError if its signature is wrong or missing.
    """
    try:
        with path.open("rb") as file:
            values: Any = parsed_json(file.read(MOST_BYTES).decode())
        number, last = values["head"]["number"], values["head"]["hash"]
        is_export = values["document"] == DOCUMENT and values["schema"] in (1, SCHEMA)
        is_export &= type(number) is int and 0 < number <= MOST_EVENTS and bool(re.fullmatch("[0-9a-f]{64}", last))
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror or error}.") from None
    except (ValueError, KeyError, TypeError, RecursionError):
        is_export = False
    if not is_export:
        raise InputError(f"{path} is no export of a registry, or is damaged. Write one: epsilons registry export URL")
    if "signature" in values:
        _check_signature(values, path, signer)
    elif signer is not None:
        raise PromiseError(f"{path} is not signed.")
    return dict(values)


def check_export(verdict: Verdict) -> None:
    """Raise PromiseError if a verification found something wrong."""
    if not verdict.is_right:
        what = verdict.first or "people are stored with other sums or budgets than the events say"
        raise PromiseError(
            f"The registry is wrong, or was altered: {printable(str(what))}. Compare it with a copy and its exports."
        )


def compare(registry: Registry, earlier: Mapping[str, Any]) -> None:
    """Raise PromiseError if this registry does not continue the one that an export was made of."""
    if earlier.get("registry") != registry.id:
        raise PromiseError("The export is of another registry.")
    number, last = earlier["head"]["number"], earlier["head"]["hash"]
    found = registry.hash_at(number)
    if found is None:
        raise PromiseError(
            f"The registry has fewer than the {number:,} events of the export: it was restored from an older copy. "
            "What was charged since that copy is missing, so people would spend it twice. Restore a newer copy, or "
            "count every run since then as charged in full."
        )
    if found != last:
        raise PromiseError(
            f"The registry was rewritten: its event {number:,} is not the one of the export. Find a copy that "
            "continues the export."
        )
    if (excluded := earlier.get("excluded")) is not None:  # `verify` finds whoever withdrew and was taken up
        try:
            date.fromisoformat(excluded["withdrew_before"])
        except (TypeError, KeyError, ValueError):
            raise InputError("The export states who is excluded, and no day. Make another one.") from None


def _signed(values: Mapping[str, Any], path: Path) -> dict[str, str]:
    key, public = signatures.private_key(path)
    return {"kind": "Ed25519", "key": public, "value": signatures.as_text(key.sign(signatures.body(values)))}


def _check_signature(values: Mapping[str, Any], path: Path, signer: str | None) -> None:
    wanted = None if signer is None else signatures.signer(signer)
    try:
        signature = values["signature"]
        if wanted is not None and wanted not in (signature["key"], signatures.fingerprint(signature["key"])):
            raise PromiseError(f"{path} is signed with another key than {signer}.")
        signatures.verify(signature["key"], signature["value"], signatures.body(values))
    except PromiseError:
        raise
    except Exception:  # a signature or a key that is damaged raises many things
        raise PromiseError(f"{path} was changed after it was signed, or its signature or key is damaged.") from None
