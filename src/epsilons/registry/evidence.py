"""Settle a run by its folder: the closed ledger there is the evidence of what was charged. No torch in here."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from ..account import Account, read
from ..errors import RegistryError, RegistryRefusedError, RunError
from ..ledger import Ledger
from ..planning import Plan
from ..run_folder import RunFolder
from . import pending
from .registry import Registry, table_of


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
    if not all(file.is_file() for file in (folder.plan, folder.settings, folder.ledger)):
        raise RunError(f"{path} holds no run with a ledger. Give the folder of one run, e.g. runs/first.")
    plan = Plan.load(folder.plan)
    if abandon:
        _close(registry, folder, plan)
    account, last_line, _ = read(folder.ledger, plan)
    run = _run_of(registry, folder, plan, account)
    if account.closed is None:
        raise RunError(
            f"The ledger in {path} is not closed: the run was interrupted, or goes on. Continue it (epsilons train … "
            "--resume). Or give it up for good: epsilons registry settle URL RUN --abandon."
        )
    registry.settle(run, account.closed, last_line, account.key)
    return Settled(run, sum(account.closed), plan.steps)


def _close(registry: Registry, folder: RunFolder, plan: Plan) -> None:
    """Close the ledger of an interrupted run, with all reserved steps charged, and destroy the key."""
    lock = folder.lock()  # refused while a process trains there
    try:
        account = read(folder.ledger, plan)[0]
        _run_of(registry, folder, plan, account)  # nothing of another registry's is closed
        Ledger.resume(plan, folder.ledger).close()
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
