"""How processor time and memory grow with people, budgets, steps and bytes, and where the first wall is.

    python benchmarks/growth.py                          # all rows, about 15 minutes on one core
    python benchmarks/growth.py --rows ledger budgets    # these

Each point is measured in a process of its own: processor time of the work without its preparation, and the peak of
memory beyond that before the work. The exponents are those of the last two sizes: 1 is linear. The wall is the size at
which one of both would reach a minute or 8 GB, if it grows on so. `tests/test_growth.py` holds the numbers of calls and
of bytes of the same work at smaller sizes.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import torch

import epsilons
from epsilons.accounting import chords, pld
from epsilons.accounting import rdp as rdp_curve
from epsilons.auditing.membership.analysis import analyse
from epsilons.auditing.membership.attacks import ATTACKS, Signals
from epsilons.draws.persons_rows import Draws
from epsilons.draws.randomness import Randomness
from epsilons.ledger.ledger import Ledger
from epsilons.registry import Registry, Roster, Table
from epsilons.registry.evidence import export

#: A wall: so many seconds of processor time, or so many bytes.
SECONDS, BYTES = 60.0, 8e9
#: Work prepares itself, yields, and does what is measured.
Work = Iterator[None]


def of_people(count: int, levels: int = 3) -> epsilons.Budgets:
    return epsilons.Budgets(np.resize(np.linspace(1.0, 3.0, levels), count), delta=1e-9)


def planned(levels: int, accountant: str, strategy: str) -> Work:
    budgets, recipe = of_people(10**6, levels), epsilons.Recipe(steps=1000, batch_size=1024, clip_norm=1.0)
    for cached in (pld._one, pld._composed, rdp_curve._terms, chords._block):
        cached.cache_clear()
    yield
    epsilons.plan(budgets, recipe, strategy=strategy, accountant=accountant)


def rdp(levels: int, folder: Path) -> Work:
    """Scale"""
    return planned(levels, "rdp", "scale")


def pld_scale(levels: int, folder: Path) -> Work:
    """Scale"""
    return planned(levels, "pld", "scale")


def pld_sample(levels: int, folder: Path) -> Work:
    """Sample"""
    return planned(levels, "pld", "sample")


def pld_mix(levels: int, folder: Path) -> Work:
    """Mix"""
    return planned(levels, "pld", "mix")


def budgets(records: int, folder: Path) -> Work:
    """of an array"""
    values = np.resize([1.0, 2.0, 3.0], records)
    yield
    epsilons.Budgets(values, delta=1e-9)


def parquet(records: int, folder: Path) -> Work:
    """of a .parquet file with ids, `Budgets.from_csv`"""
    columns = {"id": np.arange(records), "epsilon": np.resize([1.0, 2.0, 3.0], records)}
    pyarrow.parquet.write_table(pyarrow.table(columns), folder / "people.parquet")
    yield
    epsilons.Budgets.from_csv(folder / "people.parquet", column="epsilon", delta=1e-9)


def draw(records: int, folder: Path) -> Work:
    """of 1,000 expected records"""
    made = of_people(records)
    plan = epsilons.plan(made, epsilons.Recipe(steps=100, batch_size=1000, clip_norm=1.0), accountant="rdp")
    draws = Draws(plan, made.group, Randomness(bytes(32)))
    draws.at(0, 0)
    yield
    draws.at(0, 1)


def ledger(steps: int, folder: Path) -> Work:
    """read again when a run is resumed"""
    recipe = epsilons.Recipe(steps=steps, batch_size=50, clip_norm=1.0)
    plan, path = epsilons.plan(of_people(5000), recipe, accountant="rdp"), folder / "ledger.jsonl"
    made = Ledger(plan, path)
    for step in range(steps):
        made.charge(0, step)
        made.record(0, step, f"{step:032x}")
    made.suspend()
    del made
    yield
    Ledger.resume(plan, path)


def opening(size: int, folder: Path) -> Work:
    """a run begins on a mapped file"""
    rows, columns = 10_000, size // 40_000
    (folder / "file").touch()
    os.truncate(folder / "file", 4 * rows * columns)
    inputs = torch.from_file(str(folder / "file"), shared=True, size=rows * columns).view(rows, columns)
    made, model = of_people(rows), torch.nn.Sequential(torch.nn.Flatten(), torch.nn.AdaptiveAvgPool1d(8))
    model.append(torch.nn.Linear(8, 2))
    plan = epsilons.plan(made, epsilons.Recipe(steps=10, batch_size=10, clip_norm=1.0), accountant="rdp")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    yield
    targets = torch.zeros(rows, dtype=torch.long)
    epsilons.make_private(model, optimizer, (inputs, targets), plan, budgets=made, run_dir=folder / "run").close()


def registry(people: int, folder: Path) -> tuple[Registry, Table]:
    made = Registry.create(f"sqlite:///{folder}/people.db", folder / "pepper")
    made.enrol(range(people), np.resize([1.0, 2.0, 3.0], people))
    return made, Table(np.full((1, 3), 0.0085), np.array([[12.0, 7.0, 5.0]]), (100,))


def reserve(people: int, folder: Path) -> Work:
    """one run for all"""
    made, table = registry(people, folder)
    yield
    made.reserve_table("run", table, Roster(np.arange(people), np.resize([0, 1, 2], people)))


def after_runs(runs: int, folder: Path) -> Registry:
    made, table = registry(1000, folder)
    for run in range(runs):
        made.reserve_table(f"run {run}", table, Roster(np.arange(1000), np.resize([0, 1, 2], 1000)))
        made.begin(f"run {run}", f"{run:064x}", None, "a" * 64)
        made.settle(f"run {run}", [1], "b" * 64, f"{run:064x}")
    return made


def verify(runs: int, folder: Path) -> Work:
    """of 1,000 people"""
    made = after_runs(runs, folder)
    yield
    assert made.verify().is_right


def apart(people: int, folder: Path) -> tuple[Registry, tuple[Table, Roster]]:
    """A registry after two runs in which few people spent alike, and a third one."""
    (made, _), random = registry(people, folder), np.random.default_rng(0)
    table = Table(np.full((1, 1000), 0.0085), 12 + random.random((1, 1000)), (20,))
    for run in range(2):
        made.reserve_table(f"run {run}", table, Roster(np.arange(people), random.integers(1000, size=people)))
    return made, (table, Roster(np.arange(people), random.integers(1000, size=people)))


def reserve_apart(people: int, folder: Path) -> Work:
    """one run for all, who spent differently"""
    made, run = apart(people, folder)
    yield
    made.reserve_table("run", *run)


def verify_apart(people: int, folder: Path) -> Work:
    """of two runs, people spent differently"""
    made, _ = apart(people, folder)
    yield
    assert made.verify().is_right


def show(people: int, folder: Path) -> Work:
    """of two runs, people spent differently"""
    made, _ = apart(people, folder)
    yield
    made.summary()


def show_runs(runs: int, folder: Path) -> Work:
    """of 1,000 people"""
    made = after_runs(runs, folder)
    yield
    made.summary()


def exported(people: int, folder: Path) -> Work:
    """with coarse numbers, people spent differently"""
    made, _ = apart(people, folder)
    yield
    export(made, counts=True)


def shadows(targets: int) -> Signals:
    """Of 512 models."""
    coins = np.random.default_rng(0)
    member, signal = coins.random((512, targets)) < 0.5, coins.standard_normal((512, targets), np.float32)
    return Signals(member, signal, signal, signal, np.zeros((512, 0), np.float32))


def lira(targets: int, folder: Path, attack: str = "lira") -> Work:
    """online, own variances"""
    signals = shadows(targets)
    yield
    ATTACKS[attack](signals)


def lira_fixed(targets: int, folder: Path) -> Work:
    """online, fixed variances"""
    return lira(targets, folder, "lira-fixed")


def lira_offline(targets: int, folder: Path) -> Work:
    """offline, fixed variances"""
    return lira(targets, folder, "lira-offline")


def lira_shrunk(targets: int, folder: Path) -> Work:
    """the default, shrunk variances"""
    return lira(targets, folder, "lira-shrunk")


def analysis(targets: int, folder: Path) -> Work:
    """the result of one attack"""
    signals, made = shadows(targets), of_people(targets)
    plan = epsilons.plan(made, epsilons.Recipe(steps=100, batch_size=100, clip_norm=1.0), accountant="rdp")
    yield
    analyse(signals, {"lira": signals.margin}, plan, made.group, dealt_at_random=False)


@dataclass(frozen=True)
class Row:
    """Work that grows.

    what    that is done
    of      what its size counts
    sizes   that are measured
    held    size at which tests count calls and bytes, and four times it
    limits  exponents of calls and of bytes that tests allow
    """

    work: Callable[[int, Path], Work]
    what: str
    of: str
    sizes: tuple[int, ...]
    held: int
    limits: tuple[float, float]


ROWS = {
    row.work.__name__: row
    for row in (
        Row(rdp, "plan, RDP", "budgets", (10**2, 10**3, 10**4), 250, (1.0, 1.0)),
        Row(pld_scale, "plan, PLD", "budgets", (10, 100, 1000), 100, (1.0, 1.0)),
        Row(pld_sample, "plan, PLD", "budgets", (10, 100, 1000), 100, (1.0, 1.0)),
        Row(pld_mix, "plan, PLD", "budgets", (10, 30, 100), 8, (1.0, 1.0)),
        Row(budgets, "`Budgets`", "records", (10**6, 10**7, 10**8), 10**6, (1.0, 1.0)),
        Row(parquet, "`Budgets`", "records", (10**5, 10**6, 10**7), 10**5, (1.0, 1.0)),
        Row(draw, "draw", "records", (10**6, 10**7, 10**8), 10**6, (1.0, 1.0)),
        Row(ledger, "ledger", "steps", (10**4, 10**5, 10**6), 5000, (1.0, 1.0)),
        Row(opening, "tensors", "bytes", (2 * 10**9, 10**10, 10**11), 10**10, (0.1, 0.1)),
        Row(reserve, "registry", "people", (10**4, 10**5, 10**6), 20_000, (1.0, 1.0)),
        Row(verify, "registry: verify", "runs", (50, 200, 800), 25, (1.0, 1.0)),
        Row(reserve_apart, "registry", "people", (10**4, 10**5, 10**6), 20_000, (1.0, 0.2)),
        Row(verify_apart, "registry: verify", "people", (10**4, 10**5, 10**6), 20_000, (1.0, 0.2)),
        Row(show, "registry: show", "people", (10**4, 10**5, 10**6), 20_000, (1.0, 0.4)),
        Row(show_runs, "registry: show", "runs", (10, 100, 1000), 25, (1.0, 0.3)),
        Row(exported, "registry: export", "people", (10**4, 10**5, 10**6), 20_000, (1.0, 0.4)),
        Row(lira, "LiRA, 512 shadow models", "targets", (10**3, 10**4, 10**5), 1000, (0.1, 1.0)),
        Row(lira_fixed, "LiRA, 512 shadow models", "targets", (10**3, 10**4, 10**5), 1000, (0.1, 1.0)),
        Row(lira_offline, "LiRA, 512 shadow models", "targets", (10**3, 10**4, 10**5), 1000, (0.1, 1.0)),
        Row(lira_shrunk, "LiRA, 512 shadow models", "targets", (10**3, 10**4, 10**5), 1000, (0.1, 1.0)),
        Row(analysis, "membership, 512 shadow models", "targets", (10**3, 10**4, 10**5), 1000, (0.3, 0.2)),
    )
}


def kilobytes() -> int:
    """Memory in use."""
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    return int(status.split("VmRSS:")[1].split()[0])


def peak() -> int:
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    return int(status.split("VmHWM:")[1].split()[0])


def point(name: str, size: int) -> None:
    """Measure one size and print a JSON line."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        work = ROWS[name].work(size, Path(folder))
        next(work)
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # the peak begins again
        before, start = kilobytes(), time.process_time()
        next(work, None)
        seconds = time.process_time() - start
        print(json.dumps({"size": size, "seconds": seconds, "bytes": 1024 * (peak() - before)}))


def exponent(sizes: list[float], values: list[float]) -> float:
    """Of the last two sizes."""
    return math.log(values[-1] / values[-2]) / math.log(sizes[-1] / sizes[-2])


def wall(size: float, value: float, power: float, limit: float) -> float:
    """Size at which the limit is reached."""
    return size * (limit / value) ** (1 / power) if power >= 0.1 else math.inf


def line(row: Row, points: list[dict[str, float]]) -> str:
    sizes = [p["size"] for p in points]
    cells, ends = [], []
    for name, limit, least in (("seconds", SECONDS, 1e-3), ("bytes", BYTES, 1e6)):
        values = [max(p[name], least) for p in points]
        power = exponent(sizes, values)
        cells.append(f"{power:.2f}" if values[-2] > least else "–")
        ends.append(wall(sizes[-1], values[-1], power, limit))
    shown = " / ".join(f"{p['seconds']:.3g}" for p in points)
    memory = " / ".join(f"{p['bytes'] / 1e6:.3g}" for p in points)
    first = min(ends)
    end = f"{first:.0e}, {'time' if ends[0] <= ends[1] else 'memory'}" if first < 1e15 else "–"
    steps = " / ".join(f"{size:.0e}".replace("e+0", "e").replace("e+", "e") for size in sizes)
    about = (row.work.__doc__ or "").strip()
    return f"| {row.what}: {about} | {row.of} {steps} | {shown} | {memory} | {cells[0]} | {cells[1]} | {end} |"


HEAD = (
    "| work | size | seconds | MB | exponent of time | of memory | first wall |",
    "| --- | --- | --- | --- | --- | --- | --- |",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS))
    parser.add_argument("--point", nargs=2, metavar=("ROW", "SIZE"), help="one point, as a JSON line")
    parser.add_argument("--out", type=Path, help="append the points to this file, as JSON lines")
    given = parser.parse_args()
    if given.point:
        return point(given.point[0], int(given.point[1]))
    print("\n".join(HEAD))
    for name in given.rows:
        points = []
        for size in ROWS[name].sizes:
            command = [sys.executable, __file__, "--point", name, str(size)]
            alone = {**os.environ, "OMP_NUM_THREADS": "1"}
            done = subprocess.run(command, capture_output=True, text=True, check=False, env=alone)
            if done.returncode:
                raise SystemExit(done.stderr)
            points.append(json.loads(done.stdout.splitlines()[-1]))
            if given.out:
                with given.out.open("a", encoding="utf-8") as file:
                    file.write(json.dumps({"row": name, **points[-1]}) + "\n")
        print(line(ROWS[name], points), flush=True)
    return None


if __name__ == "__main__":
    main()
