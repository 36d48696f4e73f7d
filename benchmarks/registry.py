"""What the registry costs: a million people, a hundred million, and 64 processes at once.

    python benchmarks/registry.py speed    [--people 1e6] [--postgres]  # reserve, settle, cut-off refund, accounts
    python benchmarks/registry.py cohorts  [--people 1e6] [--postgres]  # 16 different plans over random halves
    python benchmarks/registry.py together [--people 1e5] [--postgres]  # 64 processes reserve at once
    python benchmarks/registry.py large    [--people 1e8]               # streamed, without pseudonyms
    python benchmarks/registry.py requests [--people 1e5] --postgres    # one subject has 100,000 requests
    python benchmarks/registry.py verify   [--people 1e6] [--runs 500 1000 2000]  # in SQLite, in a process of its own

SQLite in a temporary folder, or with --postgres a server that this program starts (tests/servers.py), with fsync. Wall
time and processor time of this process; with PostgreSQL most of the work is the server's, so there wall time counts.
Each figure is one JSON line; --out appends them to a file.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import multiprocessing
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from epsilons.accounting import rdp
from epsilons.accounting.filter import ORDERS, home_orders, offsets
from epsilons.errors import RegistryRefusedError
from epsilons.registry import Registry, Roster, Table, databases
from epsilons.registry.cohorts import ids_of, store_page
from epsilons.registry.databases import PAGE, packed
from epsilons.registry.people import _wishes
from epsilons.registry.rosters import NO_PERSON, Rows

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

#: Lifetime budgets and how many people of a hundred state them.
LEVELS, PARTS = np.array([1.0, 2.0, 3.0]), np.array([0.34, 0.43, 0.23])
STEPS = 2000
#: A commitment to a key, and the hash of a line of a ledger.
KEY, LINE = "1" * 64, "a" * 64
NOISES = (12.0, 7.0, 5.0)
Place = tuple[str, Path]


def plan(noises: tuple[float, ...] = NOISES) -> Table:
    return Table(np.full((1, len(noises)), 0.0085), np.array([noises]), (STEPS,))


def settle(registry: Registry, run: str, charged: int) -> None:
    registry.begin(run, KEY, None, LINE)
    registry.settle(run, [charged], LINE, KEY)


@contextlib.contextmanager
def place(is_postgres: bool) -> Iterator[tuple[Place, Any]]:
    """Where to make a registry, removed afterwards, and the server of PostgreSQL (None for SQLite)."""
    with tempfile.TemporaryDirectory() as folder:
        pepper = Path(folder) / "pepper"
        if not is_postgres:
            yield (f"sqlite:///{folder}/people.db", pepper), None
            return
        from servers import Server

        server = Server(fsync=True)
        try:
            yield (server.place(), pepper), server
        finally:
            server.stop()


class Clock:
    """Prints the time of each part as a JSON line."""

    def __init__(self, out: Path | None, **facts: Any) -> None:
        self._out, self._facts = out, facts

    @contextlib.contextmanager
    def of(self, what: str) -> Iterator[dict[str, Any]]:
        found: dict[str, Any] = {"what": what, **self._facts}
        wall, processor = time.perf_counter(), time.process_time()
        yield found
        found |= {
            "wall_s": round(time.perf_counter() - wall, 3),
            "processor_s": round(time.process_time() - processor, 3),
        }
        self.line(found)

    def line(self, found: dict[str, Any]) -> None:
        text = json.dumps(found)
        print(text, flush=True)
        if self._out:
            with self._out.open("a") as file:
                file.write(text + "\n")


def peopled(at: Place, people: int, clock: Clock) -> tuple[Registry, np.ndarray[Any, Any]]:
    """A registry, and (people,) the index in LEVELS of what each states."""
    registry = Registry.create(*at)
    levels = np.random.default_rng(0).choice(3, people, p=PARTS)
    ids = range(people)
    with clock.of("enrol"):
        registry.enrol(ids, LEVELS[levels])
    return registry, levels


def speed(at: Place, people: int, clock: Clock) -> None:
    registry, levels = peopled(at, people, clock)
    with clock.of("look up all"):
        registry.numbers(range(people))
    for number in range(6):
        rng = np.random.default_rng(number)
        who = np.sort(rng.choice(people, people // 2, replace=False)) if number % 2 else np.arange(people)
        roster = Roster(who, levels[who])
        with clock.of(f"reserve for {'half' if number % 2 else 'all'}"):
            registry.reserve_table(f"run {number}", plan(), roster)
        with clock.of("settle in full"):
            settle(registry, f"run {number}", STEPS)
    roster = Roster(np.arange(people), levels)
    with clock.of("reserve for all"):
        registry.reserve_table("cut", plan(), roster)
    with clock.of("settle cut off, refund to all"):
        settle(registry, "cut", 137)
    with clock.of("refuse"), contextlib.suppress(RegistryRefusedError):
        registry.reserve_table("too much", plan((1.0, 1.0, 1.0)), roster)
    with clock.of("withdraw 1,000"):
        registry.withdraw(range(0, people, people // 1000))
    with clock.of("account of all"):
        registry.account(range(people))
    with clock.of("verify") as found:
        found["is_right"] = registry.verify().is_right


def cohorts(at: Place, people: int, clock: Clock) -> None:
    registry, levels = peopled(at, people, clock)
    for number in range(16):
        who = np.flatnonzero(np.random.default_rng(number).random(people) < 0.5)
        table = plan(tuple(noise * (1 + number / 37) * 1.3 for noise in (12.0, 7.0, 5.0)))
        with clock.of(f"reserve {number + 1} of 16 plans") as found:
            registry.reserve_table(f"run {number}", table, Roster(who, levels[who]))
            found["cohorts"] = registry._database.run("select count(*) from cohort")[0][0]
    with clock.of("settle cut off, refund to half"):
        settle(registry, "run 3", 100)
    with clock.of("verify") as found:
        found["is_right"] = registry.verify().is_right


def _reserve(at: Place, people: int, number: int, go: Any, results: Any) -> None:
    registry = Registry(*at)
    rng = np.random.default_rng(number)
    who = np.arange(people) if number % 2 == 0 else np.sort(rng.choice(people, people // 3, replace=False))
    levels = np.random.default_rng(0).choice(3, people, p=PARTS)
    roster = Roster(who, levels[who])
    results.put(None)
    go.wait()
    try:
        registry.reserve_table(f"run {number}", plan((9.0, 5.2, 4.0)), roster)
        registry.begin(f"run {number}", f"{number:064x}", None, LINE)
        results.put("reserved")
    except RegistryRefusedError:
        results.put("refused")
    except Exception as error:
        results.put(repr(error))


def _begin(at: Place, number: int, go: Any, results: Any) -> None:
    registry = Registry(*at)
    results.put(None)
    go.wait()
    try:
        registry.begin("one", f"{number:064x}", None, LINE)
        results.put("began")
    except RegistryRefusedError:
        results.put("refused")
    except Exception as error:
        results.put(repr(error))


def at_once(target: Any, arguments: list[tuple[Any, ...]]) -> tuple[float, dict[str, int]]:
    """Wall time, and how often each outcome occurred, of processes that begin at the same moment."""
    context = multiprocessing.get_context("fork")
    go, results = context.Event(), context.Queue()
    processes = [context.Process(target=target, args=(*given, go, results)) for given in arguments]
    for process in processes:
        process.start()
    for _ in processes:
        assert results.get(timeout=120) is None
    start = time.perf_counter()
    go.set()
    outcomes = [results.get(timeout=300) for _ in processes]
    wall = time.perf_counter() - start
    for process in processes:
        process.join()
    return wall, {outcome: outcomes.count(outcome) for outcome in sorted(set(outcomes))}


def together(at: Place, people: int, clock: Clock, processes: int = 64) -> dict[str, Any]:
    """All processes reserve at once, then all begin one run under keys of their own; what happened."""
    registry, levels = peopled(at, people, clock)
    registry.close()
    wall, outcomes = at_once(_reserve, [(at, people, number) for number in range(processes)])
    with Registry(*at) as registry:
        registry.reserve_table("one", plan((900.0,) * 3), Roster(np.arange(people), levels))
    wall_of_begins, begins = at_once(_begin, [(at, number) for number in range(processes)])
    with Registry(*at) as registry:
        verdict = registry.verify()
    found = {
        "what": f"{processes} processes at once",
        "people": people,
        "wall_s": round(wall, 2),
        "outcomes": outcomes,
        "lost": outcomes.get("reserved", 0) + 1 - verdict.runs,
        "over": verdict.over,
        "wrong": verdict.wrong,
        "begins": begins,
        "begins_wall_s": round(wall_of_begins, 2),
    }
    clock.line(found)
    return found


#: Requests of one subject, in a table from before there was one open request per subject; and of others, one each.
REQUESTS, OTHERS = 100_000, 2000
BACKLOG = f"""
drop trigger request_is_the_only_one on request; drop index one_open_request;
insert into subject values ('greedy', 0);
insert into subject select 'r' || n, n * STRIDE from generate_series(1, {OTHERS}) n;
insert into request (role, epsilon, delta)
  select 'greedy', 1 + n / 100000.0, 1e-5 from generate_series(1, {REQUESTS}) n;
insert into request (role, epsilon, delta)
  select 'r' || n, 1 + n % 5000 / 1000.0, 1e-5 from generate_series(1, {OTHERS}) n;
"""


def _use(at: Place, last: int, go: Any, results: Any) -> None:
    """What others do: each call's wall time, until `go` is cleared. last: the first person who withdraws."""
    registry, one = Registry(*at), Roster(np.array([1]), np.array([0]))
    calls = {
        "withdraw": lambda count: registry.withdraw([last - count]),
        "reserve": lambda count: registry.reserve_table(f"run {last - count}", plan((900.0,)), one),
        "account": lambda count: registry.account(range(1000)),
    }
    slowest, count = dict.fromkeys(calls, 0.0), 0
    results.put(None)
    go.wait()
    while go.is_set():
        for name, call in calls.items():
            start = time.perf_counter()
            call(count)
            slowest[name] = max(slowest[name], time.perf_counter() - start)
        count += 1
    results.put((count, slowest))


def requests(at: Place, people: int, clock: Clock) -> None:
    """The longest calls of another process, while nothing else happens and while an officer carries out a backlog."""
    from epsilons.registry.people import roles_script

    registry, _ = peopled(at, people, clock)
    if registry._database.blob != "bytea":
        raise SystemExit("Subjects are roles of PostgreSQL: give --postgres.")
    registry._database.run(roles_script())
    registry._database.run(BACKLOG.replace("STRIDE", str(people // (OTHERS + 1))))  # over all pages
    context = multiprocessing.get_context("fork")
    for what in ("idle", "carry out"):
        go, results = context.Event(), context.Queue()
        other = context.Process(target=_use, args=(at, people - 1 - (what == "idle") * people // 4, go, results))
        other.start()
        results.get(timeout=120)
        go.set()
        with clock.of(what) as found:
            found["requests"] = registry.carry_out() if what == "carry out" else time.sleep(5)
            go.clear()
            count, slowest = results.get(timeout=120)
            found |= {"calls": 3 * count, "slowest_s": {name: round(one, 3) for name, one in slowest.items()}}
        other.join()
    with clock.of("verify") as found:
        found["is_right"] = registry.verify().is_right


class Everybody:
    """A roster of all people that is made page by page."""

    def __init__(self, people: int) -> None:
        self._people = people

    def pages(self) -> Iterator[tuple[int, Rows]]:
        for page in range((self._people - 1) // PAGE + 1):
            rows = np.random.default_rng(page).choice(3, PAGE, p=PARTS).astype(np.int16)
            rows[self._people - page * PAGE :] = NO_PERSON
            yield page, rows


def enrol_pages(registry: Registry, roster: Everybody) -> None:
    """Everybody's first cohort, without pseudonyms and statements: only `reserve` and `settle` are measured."""
    database = registry._database

    def work() -> None:
        delta = np.full(3, 1e-5)
        wishes = _wishes(database, LEVELS, delta, home_orders(LEVELS, delta))
        first = ids_of(database, wishes, np.zeros(3, dtype=bool), np.zeros((3, 16), dtype=np.int64))
        for page, rows in roster.pages():
            store_page(database, page, np.where(rows == NO_PERSON, 0, first[rows]).astype(np.int32))

    database.transaction(work)


def large(at: Place, people: int, clock: Clock) -> None:
    registry, roster = Registry.create(*at), Everybody(people)
    with clock.of("make the pages (not part of the library)"):
        enrol_pages(registry, roster)
    with clock.of("read the roster (not part of the library)"):
        for _ in roster.pages():
            pass
    with clock.of("reserve for all, streamed") as found:
        registry.reserve_table("large", plan(), roster)
    with clock.of("settle cut off, refund to all") as found:
        settle(registry, "large", 137)
    registry._database.run("pragma wal_checkpoint(truncate)")
    registry.close()
    found = {"what": "size", "people": people}
    found["file_mb"] = round(os.path.getsize(at[0].removeprefix("sqlite:///")) / 1e6, 1)
    found["resident_mb"] = round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3)
    clock.line(found)


def many_runs(at: Place, people: int, runs: int, clock: Clock) -> None:
    """Settled runs of a project with a quota, written in bulk: over all people, or every second one over random halves.

    Together they use up to 0.9 of each lifetime budget. Every third gives steps back.
    """
    registry, levels = peopled(at, people, clock)
    registry.set_quota("", 1.0)
    homes = home_orders(LEVELS, 1e-5)
    nats = np.array([rdp.divergence(0.0085, noise, ORDERS[home])[0] for noise, home in zip(NOISES, homes, strict=True)])
    room = (LEVELS - offsets(np.full(3, 1e-5), homes)[np.arange(3), homes]) / nats
    steps = int(0.9 * room.min() / runs)
    tables = [Table(np.full((1, 3), 0.0085), np.array([NOISES]) * (1 + i / 997 / 8), (steps,)) for i in range(runs)]
    charged = [steps // 2 if i % 3 == 0 else steps for i in range(runs)]
    costs = [
        np.vstack([one.costs((n,)), np.zeros((1, 16), dtype=np.int64)]) for one, n in zip(tables, charged, strict=True)
    ]
    rosters = [hashlib.sha256() for _ in range(runs)]
    database = registry._database
    for (rule,) in database.run("select name from sqlite_master where type = 'trigger'"):
        database.run(f"drop trigger {rule}")

    known: dict[tuple[int, bytes], int] = {}
    ((first,),) = database.run("select max(id) from cohort")

    def write() -> None:
        for page in range((people - 1) // PAGE + 1):
            of_page = np.full(PAGE, NO_PERSON, dtype=np.int16)
            of_page[: len(levels[page * PAGE : (page + 1) * PAGE])] = levels[page * PAGE : (page + 1) * PAGE]
            sums, parts, rng = np.zeros((PAGE, 16), dtype=np.int64), [], np.random.default_rng(page)
            for i in range(runs):
                rows = of_page if i % 2 else np.where(rng.random(PAGE) < 0.5, of_page, NO_PERSON).astype(np.int16)
                rosters[i].update(page.to_bytes(8, "little") + rows.tobytes())
                parts.append((f"run {i}", page, packed(rows)))
                for some in (slice(j, j + 2048) for j in range(0, PAGE, 2048)):
                    sums[some] += costs[i][rows[some]]
            database.many("insert into part values (%s, %s, %s)", parts)
            here = of_page != NO_PERSON
            distinct, which = np.unique(np.column_stack([of_page[here] + 1, sums[here]]), axis=0, return_inverse=True)
            cohorts = np.zeros(PAGE, dtype=np.int32)
            keys = [(int(row[0]), row[1:].tobytes()) for row in distinct]
            new = [key for key in keys if key not in known]
            known.update(zip(new, range(len(known) + 1, len(known) + len(new) + 1), strict=True))
            database.many("insert into cohort values (%s, %s, 0, %s)", [(first + known[key], *key) for key in new])
            cohorts[here] = np.array([first + known[key] for key in keys], dtype=np.int32)[which]
            store_page(database, page, cohorts)
        for i, (table, roster) in enumerate(zip(tables, rosters, strict=True)):
            plan, run = json.dumps(table.to_dict(), sort_keys=True), f"run {i}"
            digest = hashlib.sha256(json.dumps([plan, roster.hexdigest(), "train", ""]).encode()).hexdigest()
            row = (run, "settled", "train", "", digest, plan, f"[{charged[i]}]", KEY, LINE, LINE)
            database.run("insert into run values (%s, %s, %s, %s, %s, %s, %s, %s, %s, %s)", *row)
            databases.add(database, "reserve", run=run, digest=digest, what="train", project="")
            databases.add(database, "begin", run=run, key=KEY, previous=None, ledger=LINE)
            databases.add(database, "settle", run=run, charged=[charged[i]], ledger=LINE, key=KEY)

    database.transaction(write)
    registry.close()


def verify(people: int, runs: list[int], clock: Clock) -> None:
    """Processor time and peak memory of a process that only verifies."""
    for number in runs:
        with place(False) as (at, _):
            with clock.of(f"write {number:,} runs (not part of the library)"):
                many_runs(at, people, number, clock)
            code = (
                "import json, re, sys, time; from epsilons.registry import Registry;"
                "registry = Registry(*sys.argv[1:]);"
                "start = time.process_time(); verdict = registry.verify();"
                "print(json.dumps({'processor_s': round(time.process_time() - start, 2), 'events': verdict.events,"
                # getrusage would tell the peak of the process that started this one, if that is higher.
                "'resident_mb': int(re.search(r'VmHWM:\\s+(\\d+)', open('/proc/self/status').read())[1]) // 1000,"
                "'is_right': verdict.is_right, 'first': str(verdict.first), 'wrong': verdict.wrong}))"
            )
            done = subprocess.run(
                [sys.executable, "-c", code, *map(str, at)], capture_output=True, text=True, check=True
            )
            clock.line({"what": f"verify {number:,} runs", "people": people, **json.loads(done.stdout)})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = {
        "speed": (speed, 1e6),
        "cohorts": (cohorts, 1e6),
        "together": (together, 1e5),
        "large": (large, 1e8),
        "requests": (requests, 1e5),
    }
    parser.add_argument("part", choices=[*parts, "verify"])
    parser.add_argument("--runs", type=int, nargs="+", default=[500, 1000, 2000])
    parser.add_argument("--people", type=float)
    parser.add_argument("--postgres", action="store_true")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.part == "verify":
        verify(int(options.people or 1e6), options.runs, Clock(options.out, part="verify", database="sqlite"))
        return
    measure, people = parts[options.part]
    with place(options.postgres) as (at, _):
        clock = Clock(options.out, part=options.part, database="postgresql" if options.postgres else "sqlite")
        measure(at, int(options.people or people), clock)


if __name__ == "__main__":
    main()
