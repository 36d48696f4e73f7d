"""Processor time and memory of `epsilons init` and `epsilons plan` on a large table.

    python benchmarks/tables.py [ROWS]

Each command runs in a process of its own. Time is that of the processor, over all threads; memory is the peak.
"""

from __future__ import annotations

import json
import multiprocessing
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pyarrow
from pyarrow import csv

ROWS = 3_000_000

#: A command in a process of its own, which prints what it used.
MEASURED = """
import json, resource, sys
from epsilons.cli import app
app(sys.argv[1:], standalone_mode=False)
used = resource.getrusage(resource.RUSAGE_SELF)
print(json.dumps({"processor_s": round(used.ru_utime + used.ru_stime, 1), "peak_gb": round(used.ru_maxrss / 1e6, 2)}))
"""


def write(file: Path, rows: int) -> None:
    """A table of people: ids, numbers, dates, categories, codes, budgets and a label."""
    coins = np.random.default_rng(0)
    jobs = np.array(["clerk", "nurse", "teacher", "engineer", "farmer", "driver", "cook", "other"])
    days = np.datetime64("2010-01-01") + coins.integers(0, 5_000, rows)
    people = coins.integers(0, rows // 2, rows)
    columns = {
        "patient_id": people,
        "age": coins.integers(18, 95, rows),
        "income": np.round(coins.lognormal(10, 1, rows), 2),
        "weight": np.round(coins.normal(75, 12, rows), 1),
        "pressure": coins.normal(120, 15, rows),
        "admitted": days.astype(str),
        "zip": np.char.zfill(coins.integers(0, 30_000, rows).astype(str), 5),
        "job": jobs[coins.integers(0, len(jobs), rows)],
        "town": np.char.add("town", coins.integers(0, 300, rows).astype(str)),
        "smoker": np.array(["no", "yes"])[coins.integers(0, 2, rows)],
        "visits": coins.poisson(2, rows),
        "score": np.round(coins.random(rows), 4),
        "epsilon": np.array([0.5, 1.0, 2.0, 8.0])[people % 4],
        "label": np.array(["no", "yes"])[(coins.random(rows) < 0.3).astype(int)],
    }
    csv.write_csv(pyarrow.table(columns), file)


def measured(*arguments: str, folder: Path) -> dict[str, float]:
    """What a command of epsilons used."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", MEASURED, *arguments],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(done.stdout + done.stderr)
    used: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return used


def main() -> None:
    rows = int(sys.argv[1]) if len(sys.argv) > 1 else ROWS
    recipe = ["--batch-size", "4096", "--steps", "1000"]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        # In another process, because children inherit the peak of their parent's memory.
        writer = multiprocessing.get_context("spawn").Process(target=write, args=(folder / "big.csv", rows))
        writer.start()
        writer.join()
        print(f"{rows:,} rows, {(folder / 'big.csv').stat().st_size / 1e6:,.0f} MB")
        commands = [
            ["init", "big.csv"],
            ["plan", "--budgets", "big.csv", "--column", "epsilon", *recipe],
            ["plan", "big.toml"],
        ]
        for command in commands:
            print(" ".join(command[:3]), measured(*command, folder=folder), flush=True)


if __name__ == "__main__":
    main()
