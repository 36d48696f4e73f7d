"""What it costs to read rows at random from a mapped file: not yet in the page cache, and in it.

    python benchmarks/mapped_rows.py [--folder .]    # writes and removes a file of 2 GB

Microseconds a row of 4 KB, by the clock, over five draws of 512 rows; as the system reads, and with MADV_RANDOM, which
says that no reading ahead is worth it. The kernel is asked to forget the file before each.
"""

from __future__ import annotations

import argparse
import mmap
import os
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

ROWS, COLUMNS, DRAWS, BATCH = 500_000, 1024, 5, 512


def write(file: Path) -> None:
    with file.open("wb") as out:
        for part in range(50):
            out.write(np.random.default_rng(part).random((ROWS // 50, COLUMNS), dtype=np.float32).tobytes())
        os.fsync(out.fileno())


def forget(file: Path) -> None:
    with file.open("rb") as held:
        os.posix_fadvise(held.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def microseconds(rows: torch.Tensor) -> float:
    draws = np.random.default_rng(1)
    places = [torch.from_numpy(np.sort(draws.choice(ROWS, BATCH, replace=False))) for _ in range(DRAWS)]
    start = time.perf_counter()
    for one in places:
        rows.index_select(0, one)
    return 1e6 * (time.perf_counter() - start) / (DRAWS * BATCH)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--folder", type=Path, default=Path("."), help="on the disk that is to be measured")
    with tempfile.NamedTemporaryFile(dir=parser.parse_args().folder) as made:
        file = Path(made.name)
        write(file)
        for name, advice in (("as the system reads", mmap.MADV_NORMAL), ("MADV_RANDOM", mmap.MADV_RANDOM)):
            forget(file)
            mapped = np.memmap(file, np.float32, "c", shape=(ROWS, COLUMNS))
            mapped._mmap.madvise(advice)
            rows = torch.from_numpy(mapped)
            print(f"{name}: {microseconds(rows):.0f} µs a row, again {microseconds(rows):.0f}", flush=True)
            del rows, mapped


if __name__ == "__main__":
    main()
