"""Atomic, durable writes with owner-only permissions.

A file is written to a temporary name in the same folder, made durable and renamed, so no half-written file is ever
seen. It has mode 0600 from the first byte, also where it replaces a file that others could read, unless the caller
says that it is for release.
"""

from __future__ import annotations

import errno
import hashlib
import math
import os
import secrets
import stat
import warnings
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

from ..errors import EpsilonsWarning, RunError, json_text

#: Metadata of a dataclass's field that is not in its JSON.
UNWRITTEN = {"json": False}


def as_json(value: Any) -> Any:
    """The value with dicts for dataclasses, models and mappings, lists for arrays, and None for infinity and NaN."""
    if is_dataclass(value):
        return {one.name: as_json(getattr(value, one.name)) for one in fields(value) if one.metadata != UNWRITTEN}
    if hasattr(value, "model_dump"):
        return as_json(value.model_dump())
    if isinstance(value, Mapping):
        return {key: as_json(item) for key, item in value.items()}
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    if hasattr(value, "tolist"):
        return as_json(value.tolist())
    return [as_json(item) for item in value] if isinstance(value, list | tuple) else value


def write_json(path: Path, values: Any, release: bool = False) -> Path:
    """Write JSON to `path`, as `write_text` does. Raises RunError if it cannot be written."""
    return write_text(path, json_text(values) + "\n", release)


def write_text(path: Path, text: str, release: bool = False) -> Path:
    """Write text to `path`, whole or not at all. Raises RunError if it cannot be written.

    release  False: only the owner may read the file (mode 0600). True: the umask decides
    """
    return write_bytes(path, text.replace("\n", os.linesep).encode("utf-8"), release)


def write_bytes(path: Path, content: bytes, release: bool = False) -> Path:
    """Write bytes to `path`, as `write_text` does."""
    temporary: Path | None = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        unique = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
        with open(unique, "xb", opener=None if release else for_owner) as file:
            temporary = unique
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        temporary = None
        sync_folder(path.parent)
    except OSError as error:
        raise RunError(f"{path} cannot be written: {error.strerror or error}. Choose another place.") from None
    finally:
        if temporary:
            temporary.unlink(missing_ok=True)
    return path


def create(path: Path, content: bytes) -> None:
    """Create a file with mode 0600, durably. Raises OSError if it cannot be written, or is there already."""
    with open(path, "xb", opener=for_owner) as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def read(path: Path) -> bytes:
    """A file's content. Raises RunError if it cannot be read."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise RunError(f"{path} cannot be read: {error.strerror or error}.") from None


def sha256_of(path: Path) -> str:
    """SHA-256 of a file's content, in hex. Raises RunError if it cannot be read."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise RunError(f"{path} cannot be read: {error.strerror or error}.") from None


def for_owner(path: str, flags: int) -> int:
    """An opener for `open`: it creates files with mode 0600."""
    return os.open(path, flags, 0o600)


def close_folder(path: Path) -> None:
    """Set an existing folder's mode to 0700. Raises RunError if the folder keeps another mode.

    On a file system without modes the function only warns, because the mount decides who may read.
    """
    if os.name == "nt" or not _is_open(path):
        return
    with suppress(OSError):  # the mode afterwards decides
        os.chmod(path, 0o700)
    if not _is_open(path):
        return
    if _keeps_modes(path):
        raise RunError(
            f"Others may read {path}, and its mode cannot be set to 0700: it may belong to another user. A run's files "
            "hold every budget and how many chose it. Choose a folder that does not exist yet."
        )
    warnings.warn(
        f"The file system of {path} keeps no modes, so its mount options decide who may read a run's files: every "
        "budget and how many chose it. If others have access to it, choose a folder elsewhere.",
        EpsilonsWarning,
        stacklevel=2,
    )


def _is_open(path: Path) -> bool:
    return bool(stat.S_IMODE(path.stat().st_mode) & 0o077)


def _keeps_modes(folder: Path) -> bool:
    probe = folder / f".modes.{secrets.token_hex(4)}"
    try:
        probe.mkdir(mode=0o700)
        try:
            return not _is_open(probe)
        finally:
            probe.rmdir()
    except OSError:
        return True


def unfinished_writes(path: Path) -> list[Path]:
    """Temporary files that an interrupted write to this path left behind."""
    return list(path.parent.glob(f".{path.name}.*"))


def sync_folder(path: Path) -> None:
    """Make a folder's entries durable: an fsync of a file does not cover its name."""
    if os.name == "nt":  # Windows cannot open folders
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


# -- Locks: one process at a time in a run's folder, from before it reads the folder until the run ends
#
# A lock is the operating system's (flock) on a file in the folder. The system releases it when the process ends, so a
# lock file that was left behind locks nothing. Without flock (Windows) nothing is locked.

#: The lock's file in the run's folder.
NAME = ".lock"
#: Number of attempts if the lock's file is removed between opening and locking it.
ATTEMPTS = 1000


def hold(handle: int, folder: Path) -> None:
    """Lock an open file until it is closed. Raises RunError if another process holds it."""
    try:
        import fcntl
    except ImportError:  # Windows
        return
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            raise RunError(
                f"Another process is training in {folder} (or an earlier make_private was not closed). Wait for it, or "
                "end it: two processes would charge one run twice."
            ) from None
        raise RunError(
            f"Files in {folder} cannot be locked: {error.strerror or error}. Without a lock two processes could train "
            "one run. Choose a folder on a file system with locks."
        ) from None


class FolderLock:
    """A lock on a folder, which is created if it does not exist.

    Raises RunError and changes nothing if another process holds the folder or it cannot be used.
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self._file, self._is_new = folder.absolute(), folder.absolute() / NAME, False
        if links := [path for path in (*folder.glob("*"), *folder.glob("*/*")) if path.is_symlink()]:
            raise RunError(f"{links[0]} is a link: what is removed in {folder} would be elsewhere. Put the file there.")
        for _ in range(ATTEMPTS):
            try:
                handle = self._opened()
            except FileNotFoundError:
                continue  # another process created the folder, failed, and removed it
            except OSError as error:
                raise RunError(f"{folder} cannot be used as a run's folder: {error.strerror or error}.") from None
            try:
                hold(handle, folder)
                is_current = self._is_current(handle)
            except BaseException:
                os.close(handle)
                raise
            if is_current:
                self._handle: int | None = handle
                self._process = os.getpid()
                return
            os.close(handle)  # its holder removed the file after it was opened here
        raise RunError(f"{folder} cannot be used as a run's folder: its lock is removed again and again.")

    def _opened(self) -> int:
        self._folder.parent.mkdir(parents=True, exist_ok=True)
        try:
            self._folder.mkdir(mode=0o700)  # a run's files hold every budget
            self._is_new = True
        except FileExistsError:
            pass
        return os.open(self._file, os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0), 0o600)

    def _is_current(self, handle: int) -> bool:
        try:
            return os.path.samestat(os.fstat(handle), os.stat(self._file))
        except FileNotFoundError:
            return False

    def release(self) -> None:
        """Release the lock. The lock's file is removed, and the folder if it was created here and is empty.

        In a forked process this closes a copy of the handle: the process that took the lock keeps it.
        """
        if self._handle is None:
            return
        handle, self._handle = self._handle, None
        if self._process != os.getpid():
            os.close(handle)
            return
        with suppress(OSError):
            if self._is_current(handle):
                self._file.unlink()
            if self._is_new:
                self._folder.rmdir()  # fails if the folder is not empty
        with suppress(ImportError, OSError):
            import fcntl

            fcntl.flock(handle, fcntl.LOCK_UN)  # also for copies of the handle in forked processes
        os.close(handle)
