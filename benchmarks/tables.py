"""Processor time and memory of `epsilons init`, `epsilons plan` and `epsilons train` on a large table.

    python benchmarks/tables.py [ROWS]          # 14 columns: init, and plan
    python benchmarks/tables.py --wide [ROWS]   # 50 columns, as .csv and as .parquet: plan, and train

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
from pyarrow import csv, parquet

ROWS, WIDE_ROWS = 3_000_000, 5_000_000

#: Rows that are written at once.
PART = 250_000

#: A command in a process of its own, which prints what it used.
MEASURED = """
import json, resource, sys
from epsilons.cli import app
app(sys.argv[1:], standalone_mode=False)
used = resource.getrusage(resource.RUSAGE_SELF)
seconds, peak = used.ru_utime + used.ru_stime, used.ru_maxrss * 1024 / 1e9
print(json.dumps({"processor_s": round(seconds, 1), "peak_gb": round(peak, 2)}))
"""

#: The config of a wide table. Inputs are 30 numbers, a date and 15 columns of categories: 225 features.
CONFIG = """
model = {{ name = "logistic" }}
training = {{ steps = 10, batch_size = 4096, lr = 0.5 }}
[data]
train = "{name}"
target = "label"
classes = ["no", "yes"]
person = "patient_id"
drop = ["zip"]
read_off = []
test_share = 0.1
[data.numeric]
age = [18, 95]
income = [0, 1000000, "log"]
{numbers}
[data.categorical]
job = ["clerk", "nurse", "teacher", "engineer", "farmer", "driver", "cook", "other"]
town = 64
smoker = ["no", "yes"]
{codes}
[data.dates]
admitted = ["2010-01-01", "2024-12-31"]
[budgets]
column = "tier"
tiers = {{ strict = 1, usual = 2, open = 8 }}
"""


def narrow(coins: np.random.Generator, rows: int) -> dict[str, np.ndarray]:
    """People: ids, numbers, dates, categories, codes, budgets and a label."""
    jobs = np.array(["clerk", "nurse", "teacher", "engineer", "farmer", "driver", "cook", "other"])
    days = np.datetime64("2010-01-01") + coins.integers(0, 5_000, rows)
    people = coins.integers(0, rows // 2, rows)
    return {
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


def write(file: Path, rows: int) -> None:
    """A table of people."""
    csv.write_csv(pyarrow.table(narrow(np.random.default_rng(0), rows)), file)


def write_wide(folder: Path, rows: int) -> None:
    """The same with 50 columns, as wide.csv and wide.parquet, each with its config."""
    coins, writers = np.random.default_rng(0), []
    for start in range(0, rows, PART):
        count = min(PART, rows - start)
        columns = narrow(coins, count)
        columns["patient_id"] += start // 5  # five rows or so of each person
        columns["tier"] = np.array(["strict", "usual", "open"])[columns["patient_id"] % 3]
        del columns["epsilon"]
        columns |= {f"lab{i}": np.round(coins.normal(5 + i, 1 + i, count), 2 + i % 4) for i in range(24)}
        columns |= {f"code{i}": coins.integers(0, 10, count).astype(str) for i in range(12)}
        part = pyarrow.table(columns)
        if not writers:
            writers = [csv.CSVWriter(folder / "wide.csv", part.schema)]
            writers += [parquet.ParquetWriter(folder / "wide.parquet", part.schema)]
        for writer in writers:
            writer.write_table(part)
    for writer in writers:
        writer.close()
    numbers = [f"{name} = [{low}, {high}]" for name, low, high in (("weight", 30, 150), ("pressure", 60, 200))]
    numbers += [f"{name} = [{low}, {high}]" for name, low, high in (("visits", 0, 20), ("score", 0, 1))]
    numbers += [f"lab{i} = [-50, 50]" for i in range(24)]
    codes = [f'code{i} = ["0", "1", "2", "3", "4", "5", "6", "7", "8", "9"]' for i in range(12)]
    for kind in ("csv", "parquet"):
        filled = CONFIG.format(name=f"wide.{kind}", numbers="\n".join(numbers), codes="\n".join(codes))
        (folder / f"{kind}.toml").write_text(filled)


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
    arguments = sys.argv[1:]
    is_wide = "--wide" in arguments
    rows = next((int(one) for one in arguments if one != "--wide"), WIDE_ROWS if is_wide else ROWS)
    recipe = ["--batch-size", "4096", "--steps", "1000"]
    commands = [
        ["init", "big.csv"],
        ["plan", "--budgets", "big.csv", "--column", "epsilon", *recipe],
        ["plan", "big.toml"],
    ]
    if is_wide:
        kinds = ("parquet", "csv")
        commands = [["plan", f"{kind}.toml"] for kind in kinds]
        commands += [["train", f"{kind}.toml", "--run-dir", f"run-{kind}"] for kind in kinds]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        # In another process, because children inherit the peak of their parent's memory.
        target, where = (write_wide, folder) if is_wide else (write, folder / "big.csv")
        writer = multiprocessing.get_context("spawn").Process(target=target, args=(where, rows))
        writer.start()
        writer.join()
        sizes = (f"{file.name} {file.stat().st_size / 1e6:,.0f} MB" for file in folder.iterdir())
        print(f"{rows:,} rows, {', '.join(sizes)}")
        for command in commands:
            print(" ".join(command[:3]), measured(*command, folder=folder), flush=True)


if __name__ == "__main__":
    main()
