"""Settle a run by its folder: the closed ledger there is the evidence of what was charged. No torch in here."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from ..account import Account, read
from ..errors import PromiseError, RegistryError, RegistryRefusedError, RunError
from ..ledger import Ledger
from ..planning import Plan
from ..run_folder import RunFolder
from . import pending
from .registry import Registry, table_of
from .runs import RESERVED


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
    if (found := pending.noted(path)) is not None:
        if not abandon:
            raise RunError(
                f"The run in {path} was reserved and never began. Begin it (epsilons train … --resume). Or give back "
                "what was reserved: epsilons registry settle URL RUN --abandon."
            )
        pending.give_back(registry, path)
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
    never_began = pending.noted(folder.path) if folder.path.is_dir() else {"run": run}
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
    account, last_line, _ = read(folder.ledger, plan)
    return _run_of(registry, folder, plan, account), account, last_line


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
