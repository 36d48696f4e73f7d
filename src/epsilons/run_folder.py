"""A run's folder and its file formats. No torch in here.

    runs/first/
      plan.json       the plan, as `Plan.save` writes it
      run.json        settings, versions, the guarantee with the run's randomness; the ledger repeats what that rests on
      ledger.jsonl    what was charged, one hash-chained line per reservation
      metrics.jsonl   one line per evaluation
      audit.json   of the latest audit of it
      checkpoints/    the last states to go on from; removed when the run ends
      secret/key      32 bytes, mode 0600, never released; destroyed when the run ends
      .lock           held by the process that trains here; removed when it is done

All but secret/ may be kept; what may be published is decided by the report, and checkpoints, which hold a fingerprint
of the data, never may. The folder has mode 0700 whoever made it, so nothing in it can be read by others.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import platform
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from . import locks
from ._version import __version__
from .errors import EpsilonsWarning, RunError
from .files import close_folder, for_owner, sync_folder, unfinished_writes, write_json
from .planning import Plan

SCHEMA = 2
KEY_BYTES = 32


@dataclass(frozen=True)
class RunFolder:
    """The files of one run, by name."""

    path: Path

    @property
    def plan(self) -> Path:
        return self.path / "plan.json"

    @property
    def settings(self) -> Path:
        return self.path / "run.json"

    @property
    def ledger(self) -> Path:
        return self.path / "ledger.jsonl"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def key(self) -> Path:
        return self.path / "secret" / "key"

    @property
    def audit(self) -> Path:
        return self.path / "audit.json"

    @classmethod
    def create(cls, path: str | Path, plan: Plan, settings: Mapping[str, Any]) -> RunFolder:
        """A new folder with the plan and the run's settings in it.

        Raises RunError if it holds anything already, or if settings are not what JSON can hold.
        """
        folder = cls(Path(path))
        try:
            json.dumps(dict(settings), allow_nan=False)
        except (TypeError, ValueError) as error:
            raise RunError(f"run.json cannot hold these settings or notes: {error}.") from None
        try:
            folder.path.parent.mkdir(parents=True, exist_ok=True)
            folder.path.mkdir(mode=0o700, exist_ok=True)  # it holds every level, and how many chose it
            occupied = any(file.name != locks.NAME for file in folder.path.iterdir())
            if not occupied:
                close_folder(folder.path)
                # Nobody else can put anything there from here on.
                occupied = any(file.name != locks.NAME for file in folder.path.iterdir())
        except OSError as error:
            raise RunError(f"{path} cannot be used as a run's folder: {error.strerror or error}.") from None
        if occupied:
            raise RunError(f"{path} is not empty; it may hold another run. Choose a folder that does not exist yet.")
        plan.save(folder.plan)
        write_json(folder.settings, {"schema": SCHEMA, **settings, "versions": versions()})
        return folder

    @classmethod
    def reopen(cls, path: str | Path, plan: Plan) -> RunFolder:
        """The folder of an unfinished run of this plan.

        Raises RunError if it holds no such run.
        """
        folder = cls(Path(path))
        missing = [file.name for file in (folder.plan, folder.settings, folder.ledger) if not file.is_file()]
        if missing:
            raise RunError(
                f"{path} holds no run that could be taken up again: {', '.join(missing)} missing. Start a new run in a "
                "new folder."
            )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", EpsilonsWarning)  # it is the plan in hand, or refused
            same = Plan.load(folder.plan, plan.accountant_fn) == plan
        if not same:
            raise RunError(
                f"{path} holds a run of another plan, and what was charged under one plan says nothing about another. "
                f"Use its own: Plan.load({str(folder.plan)!r}); or start a new run in a new folder."
            )
        close_folder(folder.path)
        return folder

    def lock(self) -> locks.FolderLock:
        """Hold the folder for this process, before anything in it is looked at.

        Raises RunError if another process holds it, or if it cannot be used.
        """
        return locks.FolderLock(self.path)

    @property
    def has_begun(self) -> bool:
        """True if a run may have been charged here. What was written before its ledger was durable is cleared away.

        Ask only while `lock` holds the folder: another process may be writing just that.
        """
        if not self.path.is_dir():
            return False
        if self.ledger.is_file() and self.ledger.read_bytes().count(b"\n") >= 2:
            return True
        own = {self.plan, self.settings, self.ledger, self.key, self.key.with_name("key.new")}
        unfinished = {file for name in (self.plan, self.settings) for file in unfinished_writes(name)}
        if {file for file in self.path.rglob("*") if file.is_file()} <= own | unfinished | {self.path / locks.NAME}:
            for file in own | unfinished:
                file.unlink(missing_ok=True)
            if self.key.parent.is_dir() and not any(self.key.parent.iterdir()):
                self.key.parent.rmdir()
            return False
        return any(self.path.iterdir())

    def note(self, **values: Any) -> None:
        """Put these into run.json, durably."""
        write_json(self.settings, {**self.read_settings(), **values})

    def read_settings(self) -> dict[str, Any]:
        """What run.json holds. Raises RunError if it is damaged."""
        try:
            values = json.loads(self.settings.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError):
            values = None
        if not isinstance(values, dict):
            raise RunError(f"{self.settings} is not whole; bring it back from where it was written.")
        return values

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    def write_key(self, key: bytes) -> None:
        """Keep the run's key where only its owner can read it; an older one is replaced."""
        self.key.parent.mkdir(mode=0o700, exist_ok=True)
        temporary = self.key.with_name("key.new")
        temporary.unlink(missing_ok=True)
        handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(handle, "wb") as file:
            file.write(key)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, self.key)
        sync_folder(self.key.parent)
        sync_folder(self.path)

    def read_key(self) -> bytes | None:
        """The key of an unfinished run; None if it is lost or not whole."""
        try:
            key = self.key.read_bytes()
        except OSError:
            return None
        return key if len(key) == KEY_BYTES else None

    def key_file(self) -> str:
        """A name for the file that holds the key: this file on this disk, since it was written; "" if it is not whole.

        Another name for every copy of it, for what a back-up brings back and for what a hard link shares: device, inode
        and the time of the last change to the inode (ctime), which no program can set. Moving the folder within one
        file system keeps the name. What is changed without need (other device numbers after a restart, chmod of the
        key) costs charges, and no more.
        """
        key = self.read_key()
        if key is None:
            return ""
        of = os.stat(self.key)
        return hashlib.blake2b(
            f"{of.st_dev} {of.st_ino} {of.st_ctime_ns}".encode(), key=key, digest_size=16
        ).hexdigest()

    def destroy_key(self) -> None:
        """Overwrite and remove the key: from here on nobody can undo the run's noise."""
        if self.key.exists():
            with self.key.open("r+b") as file:
                file.write(bytes(KEY_BYTES))
                file.flush()
                os.fsync(file.fileno())
            self.key.unlink()
            if not any(self.key.parent.iterdir()):
                self.key.parent.rmdir()

    def append_metrics(self, row: Mapping[str, Any]) -> None:
        """Add one line to metrics.jsonl; a value that is not finite is written as null."""
        finite = {k: v if not isinstance(v, float) or math.isfinite(v) else None for k, v in row.items()}
        with open(self.metrics, "a+b", opener=for_owner) as file:
            whole = self.metrics.read_bytes().rfind(b"\n") + 1
            file.truncate(whole)  # a line that was cut off is written again by the run that goes on
            file.write(json.dumps(finite, allow_nan=False).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())


@dataclass(frozen=True)
class Run:
    """What a finished or interrupted run has to show.

    path     its folder, or None if nothing was kept
    plan     what it was allowed to do
    charged  (phases,) steps charged so far
    metrics  one mapping per evaluation, in order
    """

    path: Path | None
    plan: Plan
    charged: tuple[int, ...]
    metrics: tuple[Mapping[str, Any], ...]

    def epsilon_spent(self) -> npt.NDArray[np.float64]:
        """(groups,) epsilon certified for the whole plan: what to claim, however early one stops.

        Claiming only the steps charged needs a stop chosen without looking at data or outputs.
        """
        return self.plan.epsilon_spent()


def read_metrics(folder: RunFolder) -> tuple[Mapping[str, Any], ...]:
    """All whole lines of metrics.jsonl, in order. Raises RunError if one of them is damaged."""
    if not folder.metrics.exists():
        return ()
    rows: list[Mapping[str, Any]] = []
    for number, line in enumerate(folder.metrics.read_bytes().split(b"\n")[:-1], start=1):
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            row = None
        if not isinstance(row, dict):
            raise RunError(f"Line {number} of {folder.metrics} is damaged; bring it back from where it was written.")
        rows.append(row)
    return tuple(rows)


def versions() -> dict[str, str]:
    """Versions of what a run's numbers depend on."""
    found = {"epsilons": __version__, "python": platform.python_version()}
    for package in ("torch", "numpy", "scipy"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "absent"
    return found
