"""Bytes and seconds that budgets, draws, persons and rosters take as the number of records grows.

    python benchmarks/budgets_size.py [array levels … roster] [--sizes 1e6 1e7 1e8]

Each row is a process of its own, with one thread. Bytes a record are the peak of the process while the value is made,
over what it held before with the input, divided by the records; `held` is what is left afterwards. Seconds are of the
processor.

    array     Budgets of an array of 3 epsilons        levels    of 1,000 epsilons      distinct  all different
    deltas    of arrays of 3 epsilons and 2 deltas     shares    Budgets.from_shares    labels    Budgets.by_class
    csv       epsilons of a text file                  parquet   epsilons of a .parquet file beside four other columns
    tiers     names of tiers of that file              persons   Budgets.by_person, whole numbers as ids, 5 rows each
    draw      the first draw of 1,000                  step      another one
    rows      the first readings of persons with 5 rows each, of which 2 are read      again     another one
    roster    pages of a roster of the registry
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
import numpy as np

import epsilons
from epsilons.draws.persons_rows import Draws, Persons
from epsilons.draws.randomness import Randomness

LEVELS = np.array([1.0, 2.0, 3.0])
NAMES = np.array(["strict", "medium", "open"])
SOURCES = (
    *("array", "levels", "distinct", "deltas", "shares", "labels", "csv", "parquet", "tiers", "persons"),
    *("draw", "step", "rows", "again", "roster"),
)


def status(name: str) -> int:
    """Bytes that the kernel counts for this process: VmRSS now, VmHWM at the peak."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(name)).split()[1])


def measured(make: Callable[[], Any]) -> dict[str, float]:
    """Bytes at the peak and afterwards over those before, and seconds."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak is now what is held
    before, begin = status("VmRSS"), time.process_time()
    value = make()
    seconds, peak, held = time.process_time() - begin, status("VmHWM"), status("VmRSS")
    del value
    return {"seconds": seconds, "peak": peak - before, "held": held - before, "process": peak}


def levels(records: int, values: Any) -> Any:
    return values[np.random.default_rng(0).integers(len(values), size=records, dtype=np.uint16)]


def write(source: str, records: int, path: str) -> None:
    """The file of a row; in a process of its own, whose memory is not measured."""
    import pyarrow
    from pyarrow import csv, parquet

    epsilon, tier = levels(records, LEVELS), levels(records, np.arange(3, dtype=np.int32))

    def part(first: int) -> Any:
        here = slice(first, first + (1 << 20))
        columns: dict[str, Any] = {"epsilon": epsilon[here]}
        if source != "csv":
            columns["tier"] = pyarrow.DictionaryArray.from_arrays(tier[here], NAMES.tolist())
            columns |= {name: epsilon[here] + k for k, name in enumerate("abcd")}
        return pyarrow.table(columns)

    schema = part(0).schema
    with (csv.CSVWriter if source == "csv" else parquet.ParquetWriter)(path, schema) as writer:
        for first in range(0, records, 1 << 20):
            writer.write_table(part(first))


def making(source: str, records: int, path: str) -> Callable[[], Any]:
    """What makes the value of a row, with its input in memory."""
    import pyarrow.csv
    import pyarrow.parquet  # noqa: F401  # what is imported is not counted

    budgets = epsilons.Budgets
    if source in ("array", "levels", "distinct"):
        count = {"array": 3, "levels": 1000, "distinct": records}[source]
        values = np.random.default_rng(0).random(records) + 1 if count == records else None
        values = levels(records, np.linspace(1, 3, count)) if values is None else values
        return lambda: budgets(values, delta=1e-9)
    if source == "deltas":
        both = levels(records, LEVELS), levels(records, np.array([1e-9, 2e-9]))
        return lambda: budgets(both[0], delta=both[1])
    if source == "shares":
        return lambda: budgets.from_shares({1.0: 0.3, 2.0: 0.4, 3.0: 0.3}, records=records, delta=1e-9)
    if source == "labels":
        names = levels(records, NAMES)
        return lambda: budgets.by_class(names, dict(zip(NAMES.tolist(), LEVELS, strict=True)), delta=1e-9)
    if source in ("csv", "parquet"):
        return lambda: budgets.from_csv(path, delta=1e-9)
    if source == "tiers":
        by_name = dict(zip(NAMES.tolist(), LEVELS.tolist(), strict=True))
        return lambda: budgets.from_parquet(path, column="tier", tiers=by_name, delta=1e-9)
    person = np.random.default_rng(0).permutation(records // 5 * 5) // 5
    if source == "persons":
        stated = LEVELS[person % 3]
        return lambda: budgets.by_person(stated, person, delta=1e-9, spelling="as written")
    if source in ("rows", "again"):
        persons, randomness = Persons.of(person, records // 5, 2), Randomness(bytes(32))
        drawn = np.arange(0, records // 5, max(records // 5000, 1))
        if source == "again":
            persons.readings(drawn, randomness, 0, 0)
        return lambda: (persons, persons.readings(drawn, randomness, 0, 1), persons.most)
    if source == "roster":
        from epsilons.registry.rosters import Roster

        rows = (person % 3).astype(np.int64)
        return lambda: sum(len(page) for _, page in Roster(np.arange(len(rows)), rows).pages())
    made = budgets(levels(records, LEVELS), delta=1e-9)
    draws = Draws(
        epsilons.plan(made, epsilons.Recipe(1000, 1000, 1.0), accountant="rdp"), made.group, Randomness(bytes(32))
    )
    if source == "step":
        draws.at(0, 0)
    return lambda: (draws, draws.at(0, 1))


def row(source: str, records: int) -> dict[str, float]:
    """The measures of one row, from processes of their own."""
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/budgets.{'csv' if source == 'csv' else 'parquet'}"
        command = [sys.executable, __file__, source, "--sizes", str(records), "--path", path]
        if source in ("csv", "parquet", "tiers"):
            subprocess.run([*command, "--write"], check=True)
        made = subprocess.run([*command, "--row"], capture_output=True, text=True, check=False)
    if made.returncode:
        raise SystemExit(f"{source}, {records:,} records: exit status {made.returncode}. {made.stderr[-300:]}")
    found: dict[str, float] = json.loads(made.stdout)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sources", nargs="*", help=", ".join(SOURCES))
    parser.add_argument("--sizes", type=float, nargs="+", default=[1e6, 1e7, 1e8])
    for hidden in ("--row", "--write"):
        parser.add_argument(hidden, action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--path", default="", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    warnings.simplefilter("ignore")
    sources, sizes = asked.sources or SOURCES, [int(size) for size in asked.sizes]
    if asked.write:
        write(sources[0], sizes[0], asked.path)
    elif asked.row:
        print(json.dumps(measured(making(sources[0], sizes[0], asked.path))))
    else:
        print(
            "| | records | bytes a record at the peak | held | GB of the process | seconds |\n|---|---|---|---|---|---|"
        )
        for source in sources:
            for size in sizes:
                found = row(source, size)
                each = f"{found['peak'] / size:.1f} | {found['held'] / size:.1f} | {found['process'] / 1e9:.2f}"
                print(f"| {source} | {size:g} | {each} | {found['seconds']:.2f} |", flush=True)


if __name__ == "__main__":
    main()
