"""A run's folder and its file formats. No torch in here.

    runs/first/
      plan.json       the plan, as `Plan.save` writes it
      run.json        settings, versions, and the guarantee with the run's randomness
      ledger.jsonl    the charges and updates, in hash-chained lines
      metrics.jsonl   one line per evaluation
      audit.json      the latest audit
      membership.json the latest membership attack
      model.safetensors     the weights, at the end of the run
      model.json      how the model is built, how a record becomes its input, what its outputs mean (`model_file`)
      features.safetensors  fixed features: name, options, public constants
      release/        the files that may be given away (`release_folder`)
      checkpoints/    the last states to resume from; removed when the run ends
      secret/key      32 bytes, mode 0600, never released; destroyed when the run ends
      reservation.json  what was reserved in a registry; removed when the run ends (`registry/evidence.py`)
      claim.json      the slot that is claimed among the runs of a plan; removed when there is a ledger (`plan_folder`)
      .lock           held by the process that trains; removed when it ends

Everything but secret/ may be kept. The report decides what may be published; checkpoints never may, because they hold a
fingerprint of the data. The folder has mode 0700, so only its owner can read what is in it.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import platform
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from .._version import __version__
from ..core import files
from ..core.files import close_folder, for_owner, sync_folder, unfinished_writes, write_json
from ..errors import EpsilonsWarning, RunError, not_too_deep, parsed_json
from ..planning import Plan

SCHEMA = 2
#: The entries of run.json that say when: it began; it was ended; `epsilons train` had nothing left to do.
TIMES = ("started", "ended", "done")
KEY_BYTES = 32


class RunFolder:
    """The files of one run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.plan = path / "plan.json"
        self.settings = path / "run.json"
        self.ledger = path / "ledger.jsonl"
        self.metrics = path / "metrics.jsonl"
        self.audit = path / "audit.json"
        self.membership = path / "membership.json"
        self.checkpoints = path / "checkpoints"
        self.key = path / "secret" / "key"
        self.reservation = path / "reservation.json"
        self.claim = path / "claim.json"

    @classmethod
    def create(cls, path: str | Path, plan: Plan, settings: Mapping[str, Any]) -> RunFolder:
        """Create the folder with the plan and the run's settings.

        Raises RunError if the folder is not empty, or if JSON cannot hold the settings.
        """
        folder = cls.prepare(path, settings)
        plan.save(folder.plan)
        write_json(folder.settings, {"schema": SCHEMA, **settings, "started": now(), "versions": versions()})
        return folder

    @classmethod
    def prepare(cls, path: str | Path, settings: Mapping[str, Any]) -> RunFolder:
        """An empty folder for a new run with these settings. Raises RunError as `create` does."""
        folder = cls(Path(path))
        try:
            json.dumps(not_too_deep(dict(settings)), allow_nan=False)
        except (TypeError, ValueError) as error:
            raise RunError(f"run.json cannot hold these settings or metadata: {error}.") from None
        try:
            folder.path.parent.mkdir(parents=True, exist_ok=True)
            folder.path.mkdir(mode=0o700, exist_ok=True)  # its files hold every budget
            is_empty = folder._is_empty()
            if is_empty:
                close_folder(folder.path)
                is_empty = folder._is_empty()  # again, because others could write until now
        except OSError as error:
            raise RunError(f"{path} cannot be used as a run's folder: {error.strerror or error}.") from None
        if not is_empty:
            raise RunError(f"{path} is not empty; it may hold another run. Choose a folder that does not exist yet.")
        return folder

    def _is_empty(self) -> bool:
        return all(file.name in (files.NAME, self.reservation.name, self.claim.name) for file in self.path.iterdir())

    @classmethod
    def reopen(cls, path: str | Path, plan: Plan) -> RunFolder:
        """The folder of an unfinished run of this plan.

        Raises RunError if it holds no such run.
        """
        folder = cls(Path(path))
        missing = [file.name for file in (folder.plan, folder.settings, folder.ledger) if not file.is_file()]
        if missing:
            raise RunError(
                f"{path} holds no run that can be resumed: {', '.join(missing)} missing. Start a new run in a new "
                "folder."
            )
        # A warning would say nothing new: the plan equals the given one, or is refused.
        with warnings.catch_warnings(action="ignore", category=EpsilonsWarning):
            same = Plan.load(folder.plan, plan.accountant_fn) == plan
        if not same:
            raise RunError(
                f"{path} holds a run of another plan, and charges under one plan do not apply to another. Use the "
                f"run's plan, Plan.load({str(folder.plan)!r}), or start a new run in a new folder."
            )
        close_folder(folder.path)
        return folder

    def lock(self) -> files.FolderLock:
        """Lock the folder for this process, before anything in it is read.

        Raises RunError if another process holds it, or if it cannot be used.
        """
        return files.FolderLock(self.path)

    @property
    def has_ledger(self) -> bool:
        """True if there is a ledger in which a run may have been charged."""
        return self.ledger.is_file() and self.ledger.read_bytes().count(b"\n") >= 2

    @property
    def has_begun(self) -> bool:
        """True if a run may have been charged here. Files of a run without a durable ledger are removed.

        Call it only while `lock` holds the folder, because another process may be writing these files.
        """
        if not self.path.is_dir():
            return False
        if self.has_ledger:
            return True
        written = {self.plan, self.settings, self.ledger, self.key, self.key.with_name("key.new")}
        unfinished = {
            file
            for name in (self.plan, self.settings, self.reservation, self.claim)
            for file in unfinished_writes(name)
        }
        kept = {self.path / files.NAME, self.reservation, self.claim}
        if {file for file in self.path.rglob("*") if file.is_file()} <= written | unfinished | kept:
            for file in written | unfinished:
                file.unlink(missing_ok=True)
            if self.key.parent.is_dir() and not any(self.key.parent.iterdir()):
                self.key.parent.rmdir()
            return False
        return any(self.path.iterdir())

    def note(self, **values: Any) -> None:
        """Write these values into run.json, durably."""
        write_json(self.settings, {**self.read_settings(), **values})

    def read_settings(self) -> dict[str, Any]:
        """The values in run.json. Raises RunError if it is damaged."""
        return self.read_json(self.settings)

    @staticmethod
    def read_json(file: Path) -> dict[str, Any]:
        """The values in one of the folder's JSON files. Raises RunError if it is damaged."""
        return _json_object(files.read(file), str(file))

    def write_key(self, key: bytes) -> None:
        """Write the run's key, readable by its owner only. An older key is replaced."""
        self.key.parent.mkdir(mode=0o700, exist_ok=True)
        temporary = self.key.with_name("key.new")
        temporary.unlink(missing_ok=True)
        files.create(temporary, key)
        os.replace(temporary, self.key)
        sync_folder(self.key.parent)
        sync_folder(self.path)

    def read_key(self) -> bytes | None:
        """The key of an unfinished run; None if it is missing or damaged."""
        try:
            key = self.key.read_bytes()
        except OSError:
            return None
        return key if len(key) == KEY_BYTES else None

    def key_file(self) -> str:
        """A name for the file on disk that holds the key; "" if the key is missing or damaged.

        Every copy of the file has another name, and so has a file restored from a backup or shared by a hard link: the
        name depends on device, inode and the time of the inode's last change (ctime), which no program can set. Moving
        the folder within a file system keeps the name. A needless change (other device numbers after a restart, chmod
        of the key) costs charges only.
        """
        key = self.read_key()
        if key is None:
            return ""
        of = os.stat(self.key)
        identity = f"{of.st_dev} {of.st_ino} {of.st_ctime_ns}"
        return hashlib.blake2b(identity.encode(), key=key, digest_size=16).hexdigest()

    def end(self) -> None:
        """End the run for good: destroy its key, and note when."""
        self.destroy_key()
        self.note(ended=now())

    def destroy_key(self) -> None:
        """Overwrite and remove the key, so that the run's noise cannot be reproduced. Raises RunError if it stays."""
        try:
            if self.key.exists():
                with self.key.open("r+b") as file:
                    file.write(bytes(KEY_BYTES))
                    file.flush()
                    os.fsync(file.fileno())
                self.key.unlink()
        except OSError as error:
            raise RunError(
                f"The run's key cannot be destroyed, and who reads it can remove the noise: {error.strerror or error}. "
                f"Repeat the command, or overwrite and remove {self.key} yourself."
            ) from None
        with suppress(OSError):  # of a folder that is gone, or that holds other files
            self.key.parent.rmdir()

    def append_metrics(self, row: Mapping[str, Any]) -> None:
        """Add a line to metrics.jsonl. Numbers that are not finite are written as null."""
        finite = {k: v if not isinstance(v, float) or math.isfinite(v) else None for k, v in row.items()}
        with open(self.metrics, "a+b", opener=for_owner) as file:
            complete = self.metrics.read_bytes().rfind(b"\n") + 1
            file.truncate(complete)  # the resumed run writes an incomplete line again
            file.write(json.dumps(finite, allow_nan=False).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())


def run_folders(folder: Path, seeds: Sequence[int]) -> dict[int | None, Path]:
    """Seed -> the folder of its run; None without seeds."""
    if len(seeds) > 1:
        return {seed: folder / f"seed-{seed}" for seed in seeds}
    return {seeds[0] if seeds else None: folder}


def read_metrics(folder: RunFolder) -> tuple[Mapping[str, Any], ...]:
    """All complete lines of metrics.jsonl, in order. Raises RunError if one of them is damaged."""
    if not folder.metrics.exists():
        return ()
    lines = files.read(folder.metrics).split(b"\n")[:-1]
    return tuple(_json_object(line, f"Line {number} of {folder.metrics}") for number, line in enumerate(lines, start=1))


def _json_object(text: bytes, where: str) -> dict[str, Any]:
    try:
        values = parsed_json(text)
    except ValueError:
        values = None
    if not isinstance(values, dict):
        raise RunError(f"{where} is damaged: it is not a complete JSON object. Restore the file.")
    return values


def now() -> str:
    """The time in UTC, to the second.

    >>> len(now()), now()[-1]
    (20, 'Z')
    """
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def versions() -> dict[str, str]:
    """Versions of the packages that a run's numbers depend on."""
    packages = {"epsilons": __version__, "python": platform.python_version()}
    for package in ("torch", "numpy", "scipy"):
        try:
            packages[package] = version(package)
        except PackageNotFoundError:
            packages[package] = "absent"
    return packages
