"""A PostgreSQL server of the tests' own: in a temporary folder, on 127.0.0.1, on a free port, with a password."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

#: Where Debian and Ubuntu, Fedora, and Homebrew put the programs; the newest comes first.
FOLDERS = ("/usr/lib/postgresql/*/bin", "/usr/pgsql-*/bin", "/opt/homebrew/opt/postgresql*/bin")
MISSING = "needs PostgreSQL and psycopg: apt-get install postgresql && pip install 'psycopg[binary]>=3.2'"


def programs() -> Path | None:
    """The folder with `postgres` and `initdb`; None without PostgreSQL or psycopg."""
    try:
        import psycopg  # noqa: F401
    except ImportError:
        return None
    found = [Path(place).resolve().parent for name in ("postgres",) if (place := shutil.which(name))]
    for pattern in FOLDERS:
        found += sorted(Path("/").glob(pattern.lstrip("/")), reverse=True)
    return next((folder for folder in found if (folder / "initdb").exists()), None)


class Server:
    """PostgreSQL as a child of this process.

    fsync   True for crashes: a killed server must find on disk what it promised
    initdb  arguments that say how logins are checked
    """

    def __init__(self, fsync: bool = False, initdb: Sequence[str] = ("--auth=scram-sha-256",)) -> None:
        folder = programs()
        assert folder is not None, MISSING
        self._programs, self._fsync = folder, fsync
        self.folder = Path(tempfile.mkdtemp(prefix="epsilons-postgres-"))
        self.password = secrets.token_hex(16)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        # PostgreSQL refuses to run as root.
        self._as = {"user": "postgres", "group": "postgres", "extra_groups": []} if os.geteuid() == 0 else {}
        secret = self.folder / "password"
        secret.write_text(self.password)
        if self._as:
            for path in (self.folder, secret):
                shutil.chown(path, "postgres", "postgres")
        self._run(
            *("initdb", "--no-sync", "--no-locale", "--encoding=UTF8", "--username=owner", *initdb),
            *(f"--pwfile={secret}", f"--pgdata={self.folder}/data"),
        )
        self.start()

    def _run(self, program: str, *arguments: str) -> None:
        assert self.code(program, *arguments) == 0, (program, arguments)

    def code(self, program: str, *arguments: str) -> int:
        """The exit code of a program of PostgreSQL, which finds this server's port by itself."""
        environment = {**os.environ, "PGPORT": str(self.port)}
        command = [str(self._programs / program), *arguments]
        return subprocess.run(command, capture_output=True, cwd=self.folder, env=environment, **self._as).returncode

    def start(self) -> None:
        """Start the server, and wait until it answers."""
        settings = {
            "listen_addresses": "127.0.0.1",
            "unix_socket_directories": str(self.folder),
            "fsync": "on" if self._fsync else "off",
            "max_connections": "120",
            "shared_buffers": "256MB",
        }
        options = [part for name, value in settings.items() for part in ("-c", f"{name}={value}")]
        with open(self.folder / "log", "ab") as log:
            self._process = subprocess.Popen(
                [str(self._programs / "postgres"), "-D", f"{self.folder}/data", "-p", str(self.port), *options],
                stdout=log, stderr=log, cwd=self.folder, start_new_session=True, **self._as,
            )  # fmt: skip
        self._wait()

    def _wait(self) -> None:
        import psycopg

        for _ in range(600):
            with contextlib.suppress(psycopg.OperationalError), psycopg.connect(self.url()):
                return
            assert self._process.poll() is None, (self.folder / "log").read_text()
            time.sleep(0.05)
        raise AssertionError("PostgreSQL did not start: " + (self.folder / "log").read_text())

    def url(self, schema: str = "public", user: str = "owner", database: str = "postgres") -> str:
        """Of this schema: an empty place for one registry, made faster than a database."""
        where = f"127.0.0.1:{self.port}/{database}?options=-csearch_path%3D{schema}"
        return f"postgresql://{user}:{self.password}@{where}"

    def place(self) -> str:
        """The URL of a new schema."""
        import psycopg

        schema = f"t{secrets.token_hex(6)}"
        with psycopg.connect(self.url(), autocommit=True) as connection:
            connection.execute(f"create schema {schema}")
        return self.url(schema)

    def kill(self) -> None:
        """SIGKILL to the server and to the processes that it started. A later `start` recovers from its log."""
        children = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children")
        started = [int(one) for one in children.read_text().split()] if children.exists() else []
        for one in (self._process.pid, *started):
            with contextlib.suppress(ProcessLookupError):
                os.kill(one, signal.SIGKILL)
        self._process.wait()

    @property
    def is_dead(self) -> bool:
        return self._process.poll() is not None

    def stop(self) -> None:
        """Stop the server at once, and remove its folder."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGQUIT)
            self._process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)
