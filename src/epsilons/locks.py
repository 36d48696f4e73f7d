"""Locks: one process at a time in a run's folder, from before it looks at the folder until the run ends.

A lock is the operating system's (flock) on a file in the folder. The system releases it when the process ends, however
it ends, so a lock file that was left behind holds nothing. Without flock (Windows) nothing is locked.
"""

from __future__ import annotations

import errno
import os
from contextlib import suppress
from pathlib import Path

from .errors import RunError

#: The lock's file in the run's folder.
NAME = ".lock"
#: How often a file that was removed between opening and locking it is looked for again.
ATTEMPTS = 1000


def hold(handle: int, folder: Path) -> None:
    """Lock an open file for this process, for as long as it is open. Raises RunError if another one holds it."""
    try:
        import fcntl
    except ImportError:  # not on Windows
        return
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            raise RunError(
                f"Another process is training in {folder} (or an earlier make_private that was not closed). Wait for "
                "it, or end it: two at once would charge one run twice."
            ) from None
        raise RunError(
            f"Files in {folder} cannot be locked: {error.strerror or error}. Without a lock two processes could train "
            "one run. Choose a folder on a file system with locks."
        ) from None


class FolderLock:
    """A folder held for this process; it is made if it does not exist.

    Raises RunError, and leaves everything as it is, if another process holds the folder or it cannot be used.
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self._file, self._made = folder.absolute(), folder.absolute() / NAME, False
        for _ in range(ATTEMPTS):
            try:
                handle = self._opened()
            except FileNotFoundError:
                continue  # another process made the folder, failed, and removed it
            except OSError as error:
                raise RunError(f"{folder} cannot be used as a run's folder: {error.strerror or error}.") from None
            try:
                hold(handle, folder)
                is_current = self._is_at_its_place(handle)
            except BaseException:
                os.close(handle)
                raise
            if is_current:
                self._handle: int | None = handle
                return
            os.close(handle)  # its holder removed it after it was opened here
        raise RunError(f"{folder} cannot be used as a run's folder: its lock is removed again and again.")

    def _opened(self) -> int:
        self._folder.parent.mkdir(parents=True, exist_ok=True)
        try:
            self._folder.mkdir(mode=0o700)  # it will hold every level, and how many chose it
            self._made = True
        except FileExistsError:
            pass
        return os.open(self._file, os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0), 0o600)

    def _is_at_its_place(self, handle: int) -> bool:
        try:
            return os.path.samestat(os.fstat(handle), os.stat(self._file))
        except FileNotFoundError:
            return False

    def release(self) -> None:
        """Let other processes in. The lock's file is removed, and the folder if it was made here and is empty."""
        if self._handle is None:
            return
        handle, self._handle = self._handle, None
        with suppress(OSError):
            if self._is_at_its_place(handle):
                self._file.unlink()
            if self._made:
                self._folder.rmdir()  # fails where the folder holds something
        with suppress(ImportError, OSError):
            import fcntl

            fcntl.flock(handle, fcntl.LOCK_UN)  # also for copies of the handle in processes forked from this one
        os.close(handle)
