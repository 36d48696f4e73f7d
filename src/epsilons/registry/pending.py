"""Reservations that are noted in a run's folder before they are made, so that a crash before the run begins loses none.

The order is: note, reserve, run.json, key, ledger, begin. Until the ledger is there, the run has not begun and made no
step, so its reservation can be given back.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

from ..core.files import close_folder, write_json
from ..errors import EpsilonsError, RegistryRefusedError
from ..ledger.run_folder import RunFolder
from .registry import Registry


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


def forget(registry: Registry, path: Path, run: str) -> None:
    """Give back a reservation after an error. Nothing happens if the run has begun, or if the registry is away."""
    with suppress(EpsilonsError):
        registry.cancel(run, missing_ok=True)
        remove(path)


def remove(path: Path) -> None:
    """Remove the note of a run that is known otherwise, and its folder if that is empty."""
    with suppress(OSError):  # of the folder, if there is more in it
        RunFolder(path).reservation.unlink(missing_ok=True)
        path.rmdir()
