"""Two databases with one interface: SQL with `%s` for arguments, and transactions that happen one after the other.

    sqlite:///people.db            one file of one owner, mode 0600; the standard library's sqlite3
    postgresql://host/database     several machines; psycopg 3, the extra `postgres`

A transaction takes the registry's only lock before it reads anything. In PostgreSQL the lock must come before the
transaction's snapshot, or most transactions would be repeated.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
import random
import secrets
import sqlite3
import stat
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import UTC, datetime
from importlib import resources
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from ..core.files import for_owner, sync_folder
from ..errors import RegistryError, RegistryRefusedError

T = TypeVar("T")

#: Rows that one statement asks for, or that are in memory. One row of a roster has up to 40 kB.
AT_ONCE = 500
#: Bytes of the largest value that is read from SQLite, where a column may have any.
LARGEST_VALUE = 1 << 26
#: Seconds to wait for the lock of another process.
PATIENCE = 300
#: A lock that is held too long, and a holder that is gone, end with an error instead of waiting for ever.
SETTINGS = (
    f"set lock_timeout = '{PATIENCE}s'",
    f"set idle_in_transaction_session_timeout = '{PATIENCE}s'",
    "set tcp_keepalives_idle = 60",
)
ROLES = "epsilons docs registry"
NO_RIGHT = f"The database does not give your role the right to do this. What each role may do: {ROLES}"
ALTERED = "The registry was altered: it holds values that cannot be read. See what is wrong: epsilons registry verify."
NO_SCHEMA = "The schema of this registry's URL does not exist, or your role may not use it."
#: File systems on which several machines see one file. SQLite's locks do not hold between them.
NETWORK = frozenset(
    ["nfs", "nfs4", "cifs", "smb3", "smbfs", "afs", "ceph", "glusterfs", "lustre", "9p", "fuse.sshfs", "gpfs", "beegfs"]
)


class Sqlite:
    """A file. Writes are durable when a transaction ends (WAL, synchronous=FULL).

    What the registry needs of a database, here and in PostgreSQL:

    run          one statement -> its rows
    stream       the same, a few rows at a time, inside a transaction. Raises ValueError for a value that is too large
    many         one statement for each of these arguments
    load         many rows into a table without row-level security, fast
    build        do the work that makes the tables, whole or not at all
    transaction  do the work under the lock, whole or not at all, and return its result. The work may be repeated
    snapshot     do work that only reads, as of one moment; it waits for no lock, and needs no right to write

    Errors of the database become RegistryError, and a right that is missing RegistryRefusedError.
    """

    blob = "blob"

    def __init__(self, path: Path, is_new: bool) -> None:
        refuse_network(path.absolute().parent)
        self._path = self._file = path
        try:
            if is_new:
                if path.exists():
                    raise RegistryError(f"{path} exists already. A registry is made once, in a new file.")
                self._file = path.with_name(f".{path.name}.{secrets.token_hex(4)}")  # until all of it is there
                os.close(for_owner(str(self._file), os.O_CREAT | os.O_EXCL | os.O_RDWR))
            elif not path.is_file():
                raise RegistryError(f"There is no registry at {path}. Make one with `epsilons registry create`.")
            elif os.name != "nt" and stat.S_IMODE(path.stat().st_mode) & 0o077:
                raise RegistryError(
                    f"Others may read {path}. Set its mode to 0600: participation itself is confidential."
                )
            self._connection = sqlite3.connect(self._file, timeout=PATIENCE, isolation_level=None)
            self._connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, LARGEST_VALUE)
            self._connection.text_factory = _text
            for setting in ("journal_mode=wal", "synchronous=full", "foreign_keys=on", "cache_size=-65536"):
                self.run(f"pragma {setting}")
        except (OSError, sqlite3.Error, UnicodeDecodeError) as error:  # its message may quote damaged bytes
            raise RegistryError(f"{path} cannot be used as a registry: {error}.") from None

    def run(self, statement: str, *arguments: object) -> list[tuple[Any, ...]]:
        return self._connection.execute(statement.replace("%s", "?"), arguments).fetchall()

    def stream(self, statement: str, *arguments: object) -> Iterator[tuple[Any, ...]]:
        try:
            # Not the cursor itself: it would be closed with this iterator, perhaps after the connection.
            yield from iter(self._connection.execute(statement.replace("%s", "?"), arguments).fetchone, None)
        except sqlite3.DataError as error:
            raise ValueError(str(error)) from None

    def many(self, statement: str, arguments: Iterable[Sequence[object]]) -> None:
        self._connection.executemany(statement.replace("%s", "?"), arguments)

    def load(self, table: str, rows: Sequence[Sequence[object]]) -> None:
        if rows:
            self.many(f"insert into {table} values ({', '.join(['%s'] * len(rows[0]))})", rows)

    def build(self, work: Callable[[], None]) -> None:
        try:
            self.transaction(work)
            self._connection.close()  # which empties the log beside the file
            os.link(self._file, self._path)
            sync_folder(self._path.absolute().parent)
        except OSError as error:
            raise RegistryError(f"{self._path} cannot be made: {error.strerror}. Choose another place.") from None
        finally:
            self.close()

    def transaction(self, work: Callable[[], T]) -> T:
        return self._between("begin immediate", work)

    def snapshot(self, work: Callable[[], T]) -> T:
        return self._between("begin", work)

    def _between(self, begin: str, work: Callable[[], T]) -> T:
        try:
            self.run(begin)
            result = work()
            self.run("commit")
        except (sqlite3.Error, UnicodeDecodeError) as error:
            self._undo()
            if getattr(error, "sqlite_errorname", "") == "SQLITE_CONSTRAINT_TRIGGER":
                raise RegistryRefusedError(str(error)) from None
            raise RegistryError(failed(error)) from None
        except BaseException:
            self._undo()
            raise
        return result

    def _undo(self) -> None:
        if self._connection.in_transaction:
            self.run("rollback")

    def close(self) -> None:
        self._connection.close()
        if self._file != self._path:
            for ending in ("", "-wal", "-shm"):
                Path(f"{self._file}{ending}").unlink(missing_ok=True)


class Postgres:
    """A PostgreSQL database, for several machines."""

    blob = "bytea"

    def __init__(self, url: str, is_new: bool) -> None:
        try:
            import psycopg
        except ImportError:
            raise RegistryError('A registry in PostgreSQL needs psycopg: pip install "psycopg[binary]>=3.2".') from None
        self._errors, self._url, self._connect = psycopg.errors, url, psycopg.connect
        self._streams = itertools.count()
        self._connection = self._connected()
        has_head = self.snapshot(lambda: self.run("select to_regclass('head') is not null"))[0][0]
        if has_head == is_new:
            self.close()
            raise RegistryError(
                "This database holds a registry already."
                if is_new
                else "This database holds no registry that your role may see. Make one (epsilons registry create), "
                f"or have its owner give you one of its roles: {ROLES}"
            )

    def _connected(self) -> Any:
        try:
            connection = self._connect(self._url, autocommit=True)
            for setting in SETTINGS:
                connection.execute(setting)
            return connection
        except self._errors.Error as error:
            # The URL may hold a password, so it is not repeated.
            raise RegistryError(f"The registry's database cannot be reached: {type(error).__name__}.") from None

    def run(self, statement: str, *arguments: object) -> list[tuple[Any, ...]]:
        cursor = self._connection.execute(statement, arguments or None)
        return cursor.fetchall() if cursor.description else []

    def stream(self, statement: str, *arguments: object) -> Iterator[tuple[Any, ...]]:
        with self._connection.cursor(name=f"stream {next(self._streams)}") as cursor:
            cursor.itersize = 64
            yield from cursor.execute(statement, arguments or None)

    def many(self, statement: str, arguments: Iterable[Sequence[object]]) -> None:
        with self._connection.cursor() as cursor:
            cursor.executemany(statement, arguments)

    def load(self, table: str, rows: Sequence[Sequence[object]]) -> None:
        with self._connection.cursor() as cursor, cursor.copy(f"copy {table} from stdin") as copy:
            for row in rows:
                copy.write_row(row)

    def build(self, work: Callable[[], None]) -> None:
        self._between(["begin"], work)

    def transaction(self, work: Callable[[], T]) -> T:
        return self._between(["begin isolation level serializable", "lock table head in exclusive mode"], work)

    def snapshot(self, work: Callable[[], T]) -> T:
        return self._between(["begin isolation level repeatable read read only"], work)

    def _between(self, begin: Sequence[str], work: Callable[[], T]) -> T:
        for attempt in range(10_000):
            try:
                self._begin(begin)
                result = work()
                self.run("commit")
                return result
            except BaseException as error:
                self._undo()
                if not isinstance(error, self._errors.Error):
                    raise
                if not isinstance(error, (self._errors.SerializationFailure, self._errors.DeadlockDetected)):
                    raise self._translated(error) from None
            time.sleep(random.random() * 0.02 * min(attempt + 1, 20))
        raise RegistryError("The registry's database refused the same transaction again and again. Try again later.")

    def _translated(self, error: Any) -> RegistryError | RegistryRefusedError:
        """What a user reads of this error of the database. Its own text may quote a row, so it is not repeated."""
        if isinstance(error, self._errors.InsufficientPrivilege):
            return RegistryRefusedError(NO_RIGHT)
        if isinstance(error, self._errors.CheckViolation):  # of a rule, whose words name nobody
            return RegistryRefusedError(error.diag.message_primary)
        if isinstance(error, self._errors.InvalidSchemaName):
            return RegistryError(NO_SCHEMA)
        return RegistryError(failed(type(error).__name__))

    def _begin(self, begin: Sequence[str]) -> None:
        """Begin a transaction. A connection that was lost, perhaps hours ago, is made again: nothing depends on it."""
        try:
            self.run(begin[0])
        except self._errors.OperationalError:
            self._connection.close()
            self._connection = self._connected()
            self.run(begin[0])
        for statement in begin[1:]:
            self.run(statement)

    def _undo(self) -> None:
        with contextlib.suppress(self._errors.Error):  # the server undoes what a lost connection had begun
            self.run("rollback")

    def close(self) -> None:
        self._connection.close()


Database = Sqlite | Postgres


def failed(error: object) -> str:
    """What a user reads where the database failed."""
    return f"The registry's database failed: {error}. Repeat the call: what was done already is not done twice."


def rows_in(found: Database, select: str, values: Iterable[Any]) -> list[tuple[Any, ...]]:
    """The rows of `select`, which ends with the name of a column, where that column has one of these values."""
    wanted, rows = sorted(set(values)), list[tuple[Any, ...]]()
    for some in (wanted[i : i + AT_ONCE] for i in range(0, len(wanted), AT_ONCE)):
        rows += found.run(f"{select} in ({', '.join(['%s'] * len(some))})", *some)
    return rows


def database(url: str, is_new: bool = False) -> Database:
    """The database at this URL. Raises RegistryError if it cannot be used.

    is_new: True for one that is about to be made, False for one that exists.
    """
    if url.startswith("sqlite:///"):
        return Sqlite(Path(url.removeprefix("sqlite:///")), is_new)
    if url.startswith(("postgresql://", "postgres://")):
        return Postgres(url, is_new)
    raise RegistryError("A registry's URL is sqlite:///people.db or postgresql://host/database.")


def _text(raw: bytes) -> str | bytes:
    """A text of SQLite; the bytes themselves if it is none, which no reader takes for a text."""
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return raw


def refuse_network(folder: Path, mounts: Path = Path("/proc/self/mountinfo")) -> None:
    """Raise RegistryError if this folder is on a file system that several machines share, as far as the system says."""
    try:
        lines = mounts.read_text(encoding="utf-8").splitlines()
    except OSError:  # not Linux
        return
    kinds = {}
    for line in lines:  # …  mount point  …  -  kind  …
        left, _, right = line.partition(" - ")
        kinds[left.split(" ")[4].encode().decode("unicode_escape")] = right.split(" ")[0]
    for place in (resolved := folder.resolve(), *resolved.parents):
        if str(place) in kinds:
            if kinds[str(place)] in NETWORK:
                raise RegistryError(
                    f"{folder} is on a network drive ({kinds[str(place)]}), where the locks of SQLite do not hold. Use "
                    "a local disk, or a registry in PostgreSQL."
                )
            return


# -- The chain of events: each has the hash of the one before, so that nothing in the middle can be changed unseen
#
# The owner of the database can write a whole new chain. To notice that, keep the hash of the last event elsewhere
# (`epsilons registry export`).

#: What comes before the first event.
BEGINNING = "0" * 64


def add(database: Database, kind: str, **facts: Any) -> None:
    """Add an event, inside a transaction. Its rows follow, except a run and its roster, which come before.

    Its time is never before the one of the last event.
    """
    ((number, last),) = database.run("select number, hash from head")
    ((before,),) = database.run("select coalesce(max(time), '') from latest")
    time = max(before, datetime.now(UTC).isoformat(timespec="seconds"))
    body = json.dumps({"kind": kind, "time": time, **facts}, sort_keys=True, allow_nan=False)
    new = _hash(last, body)
    database.run("insert into event values (%s, %s, %s, %s)", number + 1, last, new, body)
    database.run("update head set number = %s, hash = %s", number + 1, new)


def head(database: Database) -> tuple[int, str]:
    """(number of events, hash of the last one)."""
    ((number, last),) = database.run("select number, hash from head")
    return int(number), str(last)


def hash_at(database: Database, number: int) -> str | None:
    """The hash of this event; None if there are fewer events."""
    if number == 0:
        return BEGINNING
    rows = database.run("select hash from event where number = %s", number)
    return rows[0][0] if rows else None


def _hash(last: str, body: str) -> str:
    return hashlib.sha256((last + body).encode()).hexdigest()


# -- Names of runs, projects and kinds: they are printed, so no control character is in them

LONGEST_NAME = 200


def check_name(name: str) -> None:
    """Raise RegistryError for a name that is too long, or that does not print as it is."""
    if not isinstance(name, str) or len(name) > LONGEST_NAME or not name.isprintable():
        raise RegistryError(
            f"Names of runs and projects are text of at most {LONGEST_NAME} printable characters, without line breaks."
        )


# -- The tables of a registry
#
# fact    identity of the registry, version, commitment to its pepper
#     wish    a lifetime budget: ε, δ, home order
#     cohort  (wish, withdrawn, 16 sums of what is spent and reserved). People with equal sums share a row
#     person  pseudonym -> number, from 0
#     page    16,384 people -> the cohort of each
#     quota   project -> the part of any lifetime budget that its runs may use together
#     run     state, kind, project, digest, table, charged steps, commitment to the key, last and first line of its
#     ledger
#     part    (run, page) -> who of this page takes part, and in which row of the table
#     statement  (event, page) -> the wish that each of these people stated, or that they withdrew
#     event   a chain of hashes that is only ever added to; head has its end
#
# `event`, `statement`, `run` and `part` are the truth. `page` and `cohort` follow from them, and `verify` computes
# them again. rules_sqlite.sql and rules_postgresql.sql have the database refuse what the events do not allow.

SCHEMA = 3
#: People per page.
PAGE = 1 << 14

TABLES = """
create table fact (name text primary key, value text not null);
create table wish (
  id integer primary key, epsilon double precision not null, delta double precision not null, home integer not null,
  unique (epsilon, delta, home));
create table cohort (
  id integer primary key, wish integer not null, withdrawn integer not null, sums BLOB not null,
  unique (wish, withdrawn, sums));
create table person (pseudonym BLOB primary key, number integer not null) WITHOUT;
create table page (number integer primary key, cohorts BLOB not null);
create table quota (project text primary key, share double precision not null);
create table run (
  id text primary key, state text not null, kind text not null, project text not null, digest text not null,
  plan text not null, charged text, key text, ledger text, begun text);
create table part (run text not null, page integer not null, rows BLOB not null, primary key (run, page));
create table statement (event integer not null, page integer not null, rows BLOB not null, primary key (event, page));
create table event (number integer primary key, previous text not null, hash text not null, body text not null);
create table head (one integer primary key, number integer not null, hash text not null);
"""


def create(database: Database, fill: Callable[[], object]) -> None:
    """Make all tables, fill them, and make the rules for what follows."""
    without = "without rowid" if database.blob == "blob" else ""
    for statement in TABLES.replace("BLOB", database.blob).replace("WITHOUT", without).split(";"):
        if statement.strip():
            database.run(statement)
    fill()
    for statement in rules(database):
        database.run(statement)


def rules(database: Database) -> list[str]:
    """The statements that have this database refuse what the events of a registry do not allow."""
    script = f"rules_{'sqlite' if database.blob == 'blob' else 'postgresql'}.sql"
    return resources.files(__package__).joinpath("sql", script).read_text(encoding="utf-8").split("\n\n")


def packed(values: npt.NDArray[Any]) -> bytes:
    """An array as it is stored."""
    return zlib.compress(np.ascontiguousarray(values).tobytes(), 1)


def unpacked(stored: Any, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """The array, of this type."""
    return np.frombuffer(zlib.decompressobj().decompress(stored, 8 * PAGE), dtype=dtype).copy()
