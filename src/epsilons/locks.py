"""Locks: one process at a time in a run's folder, from before it reads the folder until the run ends.

A lock is the operating system's (flock) on a file in the folder. The system releases it when the process ends, so a
lock file that was left behind locks nothing. Without flock (Windows) nothing is locked.
"""

from __future__ import annotations

import errno
import os
from contextlib import suppress
from pathlib import Path

from .errors import RunError

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
