"""Crashes of workers, of the PostgreSQL server and of the power, and what the registry says afterwards.

    python benchmarks/crashes.py kill  [--rounds 100] [--people 300]             # SIGKILL of a worker, SQLite
    python benchmarks/crashes.py kill  [--rounds 100] --postgres [--servers 10]  # and of the server's processes
    python benchmarks/crashes.py power [--rounds 50]                             # needs a C compiler
    python benchmarks/crashes.py last  [--rounds 50]                             # power cuts in the last reservations

A worker migrates a registry of schema 1, sets quotas and a limit of what is given back without an approval. Then run
after run it reserves, begins, writes a ledger (each step is charged in one file before it is applied in another), and
settles or cancels, until it is killed at a random moment; between runs people withdraw or change their budgets. It
reports each finished call through a pipe. Then a new worker goes on. After --fresh rounds they begin with a new
registry. With the noise of the default, quotas and most budgets are full by then, and reservations are refused. In each
tenth round another registry is migrated, and this is killed, too.

A power cut is a SIGKILL, at a random moment or right before a random fsync, after which every file goes back to what
was on the disk: benchmarks/power_cut.c keeps a copy at each fsync. Of the 512-byte sectors that differ from that copy a
random part survives (none, all, or a coin each). The shared memory of SQLite is lost.

In the part "last" every round begins with the same files, in which budgets have room for three more runs. The power is
cut while these are reserved and settled; then a worker goes on until all is refused, and budgets must not be over.

    illegal   rounds after which tests/registry_twin.py calls the registry illegal: it replays sums, quotas, homes and
              states without the library. Each round is examined up to 2,000 people, and `verify` runs, too
    halves    migrations after whose end the registry was neither in the old form nor in the new one
    wrong     people whose stored sums, wish or state are not what the events say
    over      people charged beyond their budgets at a reservation
    lost      calls that had returned before the crash and are not in the registry after it
    unlike    runs that applied more steps than were charged, or were settled at other steps than their ledger has
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from registry import LEVELS, PARTS, Place, place  # the tests' modules are found after it

from epsilons.errors import RegistryRefusedError
from epsilons.registry import Registry, Roster, Table
from epsilons.registry.runs import CANCELLED, ENDED, SETTLED, stored_runs

import registry_twin as twin  # isort: skip
from registry_forging import old_registry  # isort: skip

SECTOR = 512
#: Steps of the registry per step of the ledger.
BLOCK = 680
BLOCKS = 3
#: A run that gives back more than this share of its steps needs an approval.
LIMIT = 0.5
#: project of each third run -> its quota. A quota is full before the budgets are.
QUOTAS = {"": None, "alpha": 0.3, "beta": 0.15}
#: The twin replays up to so many people after each round.
FEW = 2000


def hash_of(*facts: object) -> str:
    return hashlib.sha256(repr(facts).encode()).hexdigest()


class Plans:
    """What run number k does: table, roster, and how many blocks it makes before it stops."""

    def __init__(self, people: int, noise: float) -> None:
        self.people, self._noise = people, noise
        self.levels = np.random.default_rng(1).choice(3, people, p=PARTS)

    def __call__(self, number: int) -> tuple[Table, Roster, int]:
        rng = np.random.default_rng(1000 + number)
        who = np.flatnonzero(rng.random(self.people) < 0.6) if number % 3 else np.arange(self.people)
        noise = self._noise * (1 + 0.6 * (number % 4))
        table = Table(np.full((1, 3), 0.0085), noise * np.array([[1.0, 0.6, 0.45]]), (BLOCKS * BLOCK,))
        return table, Roster(who, self.levels[who]), int(rng.integers(1, BLOCKS + 1))


def lines(folder: Path, number: int, kind: str) -> int:
    file = folder / f"{number}.{kind}"
    return file.read_bytes().count(b"\n") if file.exists() else 0


def write_line(folder: Path, number: int, kind: str) -> None:
    with open(folder / f"{number}.{kind}", "ab") as file:
        file.write(b".\n")
        file.flush()
        os.fsync(file.fileno())


def work(at: Place, folder: Path, plans: Plans, refused: set[int], pipe: int) -> None:
    """Run after run, from the first that is neither over nor refused."""

    def report(*facts: Any) -> None:
        os.write(pipe, (json.dumps(facts) + "\n").encode())

    Registry.migrate(at[0])
    report("migrated", 0)
    registry = Registry(*at)
    if not registry._database.run("select 1 from fact where name = 'refund'"):
        for project, share in QUOTAS.items():
            if share is not None:
                registry.set_quota(project, share)
        registry.limit_refunds(LIMIT)
    over = {run.id for run in stored_runs(registry._database) if run.state in ENDED}
    number = -1
    while True:
        number += 1
        if f"run {number}" in over or number in refused:
            continue
        state_something(registry, plans.people, number, report)
        one_run(registry, folder, plans, number, report)


def state_something(registry: Registry, people: int, number: int, report: Callable[..., None]) -> None:
    """People of the upper half withdraw, and those of the lower half change their budgets, one at a time."""
    who = number % (people // 2)
    if number % 4 == 1:
        registry.withdraw([people - 1 - who])
        report("withdrew", people - 1 - who)
    elif number % 4 == 3:
        registry.change([who], float(LEVELS[number % 3]))


def one_run(registry: Registry, folder: Path, plans: Plans, number: int, report: Callable[..., None]) -> bool:
    """Reserve, begin, make all blocks, settle; False if it is refused. Every seventh is cancelled instead."""
    name, project = f"run {number}", list(QUOTAS)[number % 3]
    table, roster, stop = plans(number)
    if not stored_runs(registry._database, name):
        stays = np.setdiff1d(np.arange(len(roster.numbers)), registry.leavers(roster.numbers))
        try:
            if len(stays) == 0:
                raise RegistryRefusedError("Everyone left.")
            registry.reserve_table(name, table, Roster(roster.numbers[stays], roster.rows[stays]), project=project)
        except RegistryRefusedError as error:
            # The server may end what a killed worker had asked for, after this one looked: "is reserved for other …".
            if "is reserved for" not in str(error):
                report("refused", number)
                return False
    report("reserved", number)
    if number % 7 == 5:
        registry.approve(name)
        registry.cancel(name)
        report("cancelled", number)
        return True
    key, ledger = hash_of("key", number), hash_of("last line", number)
    registry.begin(name, key, None, hash_of("first line", number))
    report("began", number)
    while lines(folder, number, "applied") < stop:
        if lines(folder, number, "charged") == lines(folder, number, "applied"):
            write_line(folder, number, "charged")
        write_line(folder, number, "applied")
    charged = lines(folder, number, "charged") * BLOCK
    if 1 - charged / sum(table.steps) > LIMIT:
        registry.approve(name, [charged], ledger)
    registry.settle(name, [charged], ledger, key)
    report("settled", number, charged)
    return True


def start(at: Place, folder: Path, plans: Plans, refused: set[int]) -> tuple[int, int]:
    """(process, pipe)"""
    read, write = os.pipe()
    process = os.fork()
    if process == 0:
        os.close(read)
        try:
            work(at, folder, plans, refused, write)
        except BaseException as error:
            os.write(write, (json.dumps(["error", repr(error)[:300]]) + "\n").encode())
        os._exit(1)
    os.close(write)
    return process, read


def reports(pipe: int) -> list[list[Any]]:
    """What a dead worker had said."""
    with os.fdopen(pipe, "rb") as file:
        return [json.loads(line) for line in file.read().splitlines()]


def lost(registry: Registry, said: list[list[Any]]) -> int:
    """Calls that had returned and are not in the registry."""
    runs = {run.id: run for run in stored_runs(registry._database)}

    def is_there(kind: str, number: int, facts: list[Any]) -> bool:
        run = runs.get(f"run {number}")
        if kind == "migrated":
            return True  # a registry of schema 1 cannot be opened
        if kind == "withdrew":
            return len(registry.leavers(np.array([number]))) == 1
        if kind == "refused":
            return run is None
        return run is not None and (kind != "began" or run.key is not None) and (
            kind != "settled" or run.charged == (facts[0],)
        ) and (kind != "cancelled" or run.state == CANCELLED)  # fmt: skip

    missing = [one for one in said if one[0] != "error" and not is_there(one[0], one[1], one[2:])]
    if missing:
        print("lost:", missing, file=sys.stderr)
    return len(missing)


def unlike(registry: Registry, folder: Path, plans: Plans) -> int:
    found = 0
    for run in stored_runs(registry._database):
        if not run.id.startswith("run "):  # it is older than the migration
            continue
        number = int(run.id.removeprefix("run "))
        charged, applied = lines(folder, number, "charged"), lines(folder, number, "applied")
        stop = 0 if run.state == CANCELLED else plans(number)[2]
        is_over = run.state in ENDED
        found += applied > charged or (is_over and (run.charged != (charged * BLOCK,) or applied != stop))
    return found


# -- power -------------------------------------------------------------------------------------------------------


def synced(folder: Path, shadow: Path) -> None:
    """Everything is on the disk now."""
    shutil.rmtree(shadow, ignore_errors=True)
    shadow.mkdir()
    for file in folder.rglob("*"):
        if file.is_file() and not file.name.endswith("-shm"):
            shutil.copyfile(file, shadow / str(file).replace("/", "%"))


def cut(folder: Path, shadow: Path, rng: np.random.Generator) -> int:
    """Files go back to their last fsync, but for a random part of the sectors; the number of sectors that went back."""
    went_back, survives = 0, rng.choice([0.0, 0.5, 1.0])
    for file in [file for file in folder.rglob("*") if file.is_file()]:
        copy = shadow / str(file).replace("/", "%")
        if file.name.endswith("-shm"):
            file.unlink()
            continue
        old, new = copy.read_bytes() if copy.exists() else b"", file.read_bytes()
        length = len(new) if rng.random() < survives else len(old)  # of the file, as the folder has it
        count = -(-length // SECTOR)
        went_back += max(-(-len(new) // SECTOR) - count, 0)
        parts = []
        for i in range(count):
            here = slice(i * SECTOR, min((i + 1) * SECTOR, length))
            before = old[here].ljust(here.stop - here.start, b"\0")
            after = new[here].ljust(here.stop - here.start, b"\0")
            keeps = before == after or rng.random() < survives
            went_back += not keeps
            parts.append(after if keeps else before)
        file.write_bytes(b"".join(parts))
    return went_back


def with_power_cuts(folder: Path) -> None:
    """Start this program again with benchmarks/power_cut.c below it."""
    library = folder / "power_cut.so"
    source = Path(__file__).parent / "power_cut.c"
    subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", str(library), str(source), "-ldl"], check=True)
    os.environ["LD_PRELOAD"] = str(library)
    os.execv(sys.executable, [sys.executable, *sys.argv])


# -- rounds ------------------------------------------------------------------------------------------------------


def connected(url: str) -> Any:
    """To the database itself, without the library."""
    if url.startswith("sqlite:///"):
        return sqlite3.connect(url.removeprefix("sqlite:///"))
    import psycopg

    return psycopg.connect(url)


def fresh(at: Place, server: Any, people: int, seed: int, name: str = "people.db") -> Place:
    """A new registry of schema 1 with so many people and some events."""
    url, pepper = at
    if server is None:
        file = pepper.parent / name
        for path in pepper.parent.glob(f"{name}*"):
            path.unlink()
        os.close(os.open(file, os.O_CREAT | os.O_RDWR, 0o600))
        url = f"sqlite:///{file}"
    else:
        url = server.place()
    if not pepper.exists():
        pepper.write_bytes(os.urandom(32))
        pepper.chmod(0o600)
    with contextlib.closing(connected(url)) as connection:
        old_registry(connection, pepper.read_bytes(), [str(i) for i in range(people)], random.Random(seed))
        connection.commit()
    return url, pepper


def is_legal(at: Place) -> bool:
    """Whether the slow twin finds every sum, state and row to be what the events say."""
    with contextlib.closing(connected(at[0])) as connection:
        judgement = twin.judge(twin.read(connection))
    if not judgement.is_legal or judgement.unclear:
        print(judgement, file=sys.stderr)
    return judgement.is_legal


def migration(at: Place, server: Any, rng: np.random.Generator, seed: int, found: dict[str, Any]) -> None:
    """Kill a process that migrates a registry: it is the old one or the new one, and a second try ends."""
    other = fresh(at, server, 60, seed, "old.db")
    begun = time.perf_counter()
    process = os.fork()
    if process == 0:
        Registry.migrate(other[0])
        os._exit(0)
    if "seconds_of_a_migration" in found:
        time.sleep(float(rng.uniform(0, found["seconds_of_a_migration"])))
        os.kill(process, signal.SIGKILL)
        found["killed_migrations"] += 1
    os.waitpid(process, 0)
    found.setdefault("seconds_of_a_migration", round(time.perf_counter() - begun, 4))
    with contextlib.closing(connected(other[0])) as connection:
        ((schema,),) = connection.execute("select value from fact where name = 'schema'").fetchall()
        has_column = "begun" in [column[0] for column in connection.execute("select * from run").description]
    found["killed_and_old"] += schema == "1"
    found["halves"] += has_column != (schema == "3") or not is_legal(other)
    Registry.migrate(other[0])
    with Registry(*other) as registry:
        found["halves"] += not (registry.verify().is_right and is_legal(other))


def rounds(at: Place, folder: Path, options: argparse.Namespace, server: Any) -> dict[str, Any]:
    plans, rng, is_power = (
        Plans(options.people, options.noise),
        np.random.default_rng(options.seed),
        options.part == "power",
    )
    ledgers, shadow = folder / "ledgers", folder.parent / f"{folder.name}-shadow"
    names = ("kills", "kills_when_full", "servers", "lost", "unlike", "wrong", "over", "illegal", "killed_migrations")
    found: dict[str, Any] = dict.fromkeys((*names, "killed_and_old", "halves"), 0)
    found |= {"sectors_that_went_back": 0, "errors": 0, "registries": 0}
    found |= dict.fromkeys(("runs", "settled", "cancelled", "refused", "withdrawn", "events"), 0)
    refused: set[int] = set()
    for number in range(options.rounds):
        if number % options.fresh == 0:
            shutil.rmtree(ledgers, ignore_errors=True)
            ledgers.mkdir()
            at, refused = fresh(at, server, options.people, options.seed + number), set()
            found["registries"] += 1
        if number % 10 == 0 and not is_power:
            migration(at, server, rng, number, found)
        if is_power:
            synced(folder, shadow)
            os.environ["SHADOW"] = str(shadow)
            if number % 3:
                os.environ["CUT_AT"] = str(rng.integers(1, 25))
        process, pipe = start(at, ledgers, plans, refused if number % 2 else set())
        is_timed = os.environ.pop("CUT_AT", None) is None
        os.environ.pop("SHADOW", None)
        time.sleep(float(rng.uniform(0.005, options.longest)) if is_timed else 4 * options.longest)
        if server is not None and number % (options.rounds // options.servers) == 0:
            server.kill()
            found["servers"] += 1
            time.sleep(0.1)
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)
        said = reports(pipe)
        if server is not None and server.is_dead:
            server.start()
        for one in said:
            if one[0] == "error" and server is None:
                found["errors"] += 1
                print(one, file=sys.stderr)
        if is_power:
            found["sectors_that_went_back"] += cut(folder, shadow, rng)
        refused |= {one[1] for one in said if one[0] == "refused"}
        found["kills"] += 1
        found["kills_when_full"] += len(refused) > 20
        examine(at, ledgers, plans, said, options.people, found)
        if (number + 1) % options.fresh == 0 or number + 1 == options.rounds:
            count(at, options.people, len(refused), found)
    shutil.rmtree(shadow, ignore_errors=True)
    return found


def examine(at: Place, ledgers: Path, plans: Plans, said: list[list[Any]], people: int, found: dict[str, Any]) -> None:
    """What is wrong after a crash. A worker that died in its migration leaves a registry that a next one migrates."""
    if people <= FEW:
        found["illegal"] += not is_legal(at)
    with contextlib.closing(connected(at[0])) as connection:
        ((schema,),) = connection.execute("select value from fact where name = 'schema'").fetchall()
    if schema != "3":
        if missing := [one for one in said if one[0] != "error"]:  # a migration that had ended is not there
            print("lost:", missing, file=sys.stderr)
        found["lost"] += len(missing)
        return
    with Registry(*at) as registry:
        found["lost"] += lost(registry, said)
        found["unlike"] += unlike(registry, ledgers, plans)
        verdict = registry.verify()
    found["illegal"] += verdict.first is not None
    found["wrong"], found["over"] = found["wrong"] + verdict.wrong, max(found["over"], verdict.over)


def count(at: Place, people: int, refused: int, found: dict[str, Any]) -> None:
    """Add up what became of a registry."""
    Registry.migrate(at[0])
    with Registry(*at) as registry:
        runs = stored_runs(registry._database)
        account = registry.account([str(i) for i in range(people)])
        found["events"] += registry.head[0]
    found["runs"], found["refused"] = found["runs"] + len(runs), found["refused"] + refused
    found["settled"] += sum(run.state == SETTLED for run in runs)
    found["cancelled"] += sum(run.state == CANCELLED for run in runs)
    found["withdrawn"] += int((~account.can_take_part).sum())


# -- the last reservations -------------------------------------------------------------------------------------------


def go_on(at: Place, ledgers: Path, plans: Plans, runs: int, before: Callable[[], None] = lambda: None) -> int:
    """Make all of so many runs that fit; the number of those that were reserved now. before: called before each."""
    made = 0
    for number in range(runs):
        with Registry(*at) as registry:
            found = {run.id: run.state for run in stored_runs(registry._database)}.get(f"run {number}")
        if found in ENDED:
            continue
        before()
        with Registry(*at) as registry:
            made += one_run(registry, ledgers, plans, number, lambda *_: None) and found is None
    return made


def copied(folder: Path, to: Path) -> None:
    shutil.rmtree(to, ignore_errors=True)
    shutil.copytree(folder, to)


def last(at: Place, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Power cuts while the last three runs that fit are reserved and settled."""
    plans, rng = Plans(options.people, options.noise), np.random.default_rng(options.seed)
    ledgers, shadow, start_ = folder / "ledgers", Path(f"{folder}-shadow"), Path(f"{folder}-start")
    ledgers.mkdir()
    with Registry.create(*at) as registry:
        registry.enrol(range(options.people), LEVELS[plans.levels])
    copied(folder, start_)
    in_all = go_on(at, ledgers, plans, options.runs)
    shutil.rmtree(folder)
    shutil.copytree(start_, folder)
    left = in_all

    def keep() -> None:
        nonlocal left
        with Registry(*at) as registry:
            left = in_all - len(stored_runs(registry._database))
        if left >= 3:
            copied(folder, start_)

    go_on(at, ledgers, plans, options.runs, keep)
    found: dict[str, Any] = dict.fromkeys(("cuts", "cuts_with_unwritten_sectors", "sectors_that_went_back"), 0)
    found |= dict.fromkeys(("reserved_again", "cuts_with_runs_that_go_on", "lost", "unlike", "wrong", "over"), 0)
    for _ in range(options.rounds):
        copied(start_, folder)
        synced(folder, shadow)
        os.environ |= {"SHADOW": str(shadow), "CUT_AT": str(rng.integers(1, 25))}
        process, pipe = start(at, ledgers, plans, set())
        for name in ("SHADOW", "CUT_AT"):
            del os.environ[name]
        time.sleep(4 * options.longest)
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)
        said, back = reports(pipe), cut(folder, shadow, rng)
        with Registry(*at) as registry:
            found["lost"] += lost(registry, said)
            found["unlike"] += unlike(registry, ledgers, plans)
            verdict = registry.verify()
            found["cuts_with_runs_that_go_on"] += any(run.state != SETTLED for run in stored_runs(registry._database))
        found["wrong"], found["over"] = found["wrong"] + verdict.wrong, found["over"] + verdict.over
        found["reserved_again"] += go_on(at, ledgers, plans, options.runs)
        with Registry(*at) as registry:
            verdict = registry.verify()
            found["unlike"] += unlike(registry, ledgers, plans)
            found["unlike"] += len(stored_runs(registry._database)) != in_all
        found["wrong"], found["over"] = found["wrong"] + verdict.wrong, found["over"] + verdict.over
        found["cuts"], found["sectors_that_went_back"] = found["cuts"] + 1, found["sectors_that_went_back"] + back
        found["cuts_with_unwritten_sectors"] += back > 0
    for place_ in (shadow, start_):
        shutil.rmtree(place_, ignore_errors=True)
    return found | {"runs_that_fit": in_all}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=["kill", "power", "last"])
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--people", type=float, help="300; in the part last 100,000")
    parser.add_argument("--fresh", type=int, default=50, help="rounds until they go on with a new registry")
    parser.add_argument("--postgres", action="store_true")
    parser.add_argument("--servers", type=int, default=10, help="how many of the rounds kill the server, too")
    parser.add_argument("--longest", type=float, default=1.0, help="seconds until a worker is killed, at most")
    parser.add_argument("--noise", type=float, default=12.0, help="with 12 some hundred runs fit, with 2.5 about 15")
    parser.add_argument("--runs", type=int, default=40, help="in the part last: how many runs are tried")
    parser.add_argument("--seed", type=int, default=7)
    options = parser.parse_args()
    options.people = int(options.people or (100_000 if options.part == "last" else 300))
    if options.part != "kill" and "LD_PRELOAD" not in os.environ:
        with_power_cuts(Path(tempfile.mkdtemp()))
    with place(options.postgres) as (at, server):
        folder = at[1].parent
        found = last(at, folder, options) if options.part == "last" else rounds(at, folder, options, server)
        print(json.dumps({"part": options.part, "database": at[0].partition(":")[0], **found}))


if __name__ == "__main__":
    main()
