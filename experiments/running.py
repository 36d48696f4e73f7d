"""Run the missing cells of some tables in parallel, and write each result as soon as it is there."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatch
from pathlib import Path
from types import MappingProxyType
from typing import cast

from joblib import cpu_count, parallel_config

from epsilons.core.threads import spread, workers
from epsilons.errors import InputError

from .cells import TIMED, run
from .results import RESULTS, Line, finished, is_current, keep
from .settings import Cell, MembershipSettings, Settings, Table
from .training import forget

#: Backends of joblib: processes here, or a cluster's workers.
BACKENDS = ("loky", "dask", "ray")


def missing(
    wanted: Sequence[Table],
    only: str = "*",
    seeds: int | None = None,
    done: Mapping[str, Line] = MappingProxyType({}),
    shadows: int | None = None,
) -> list[tuple[Table, Cell, int]]:
    """Cells and seeds that are not done, ordered by seed, so that an interruption leaves some seeds of every cell.

    A membership attack is done if it has all of its shadows, or with `shadows` so many.

    Raises InputError if no cell has such a name.
    """
    cells = [(table, _limited(cell, shadows)) for table in wanted for cell in table.cells]
    chosen = [(table, cell) for table, cell in cells if fnmatch(cell.name, only)]
    if not chosen:
        raise InputError(f"No cell is called {only!r}; there are: {', '.join(cell.name for _, cell in cells)}.")
    todo: dict[str, tuple[Table, Cell, int]] = {}
    for table, cell in chosen:
        for seed in cell.seeds[:seeds]:
            name = cell.settings.named(seed)
            if name not in done or not _is_done(cell.settings, done[name]):
                todo.setdefault(name, (table, cell, seed))  # two cells may ask for one run
    return sorted(todo.values(), key=lambda job: job[2])


def _limited(cell: Cell, shadows: int | None) -> Cell:
    return cell.but(at_most=shadows) if isinstance(cell.settings, MembershipSettings) else cell


def _is_done(settings: Settings, line: Line) -> bool:
    return not isinstance(settings, MembershipSettings) or line["shadows"] >= settings.wanted


def run_tables(
    wanted: Sequence[Table],
    *,
    only: str = "*",
    seeds: int | None = None,
    shadows: int | None = None,
    again: bool = False,
    outdated: bool = False,
    jobs: int = 1,
    threads: int = 1,
    backend: str = "loky",
    device: str = "auto",
    folder: Path = RESULTS,
) -> list[str]:
    """Run the missing cells; returns one sentence per run that failed. The next call tries these again.

    only    the cells to run: a name, or a pattern such as "mnist-*-a"
    seeds   largest number per cell
    shadows largest number per cell of kind "membership"
    again   also repeat finished runs, and replace their results
    outdated  also repeat finished runs whose coins and noise were those of another version
    jobs    runs at the same time; -1: as many as there are cores
    threads of each run, useful with fewer runs than cores; with another number an unfinished run may start again
    backend "loky" (processes here), "dask" or "ray" (a cluster that was connected to before)
    """
    before = finished(folder)
    fresh = {name: line for name, line in before.items() if not again and (is_current(line) or not outdated)}
    todo = missing(wanted, only, seeds, fresh, shadows)
    if not todo:
        print("nothing is missing; --again repeats finished runs", file=sys.stderr)
        return []
    if any(cell.settings.kind in TIMED for _, cell, _ in todo):
        jobs = threads = 1  # other runs would make it slower
    elif jobs == -1 and backend == "loky":
        jobs = max(cpu_count() // threads, 1)
    print(f"{len(todo)} runs", file=sys.stderr, flush=True)
    _connect(backend)
    tasks = [(table.name, cell.name, cell.settings, seed, device, threads) for table, cell, seed in todo]
    failures, started = [], time.monotonic()
    with parallel_config(backend=backend, n_jobs=jobs):
        for number, line in enumerate(spread(run, tasks, *workers()), start=1):
            what = f"{line['table']} {line['cell']} seed {line['seed']}"
            if "error" in line:
                failures.append(f"{what}: {line['error']}")
                print(f"{number}/{len(todo)} {what} FAILED: {line['error']}", file=sys.stderr, flush=True)
                continue
            keep(line, folder)
            forget(line)
            left = (time.monotonic() - started) / number * (len(todo) - number)
            score = f"{100 * line['accuracy']:.2f} %" if "accuracy" in line else "done"
            if "accuracy" in line and line["id"] in before:
                score += f" (before: {100 * before[line['id']]['accuracy']:.2f} %)"
            print(
                f"{number}/{len(todo)} {what}: {score} in {line['wall_seconds']:,} s; about {left / 60:.0f} min left",
                file=sys.stderr,
                flush=True,
            )
    return failures


def _connect(backend: str) -> None:
    """dask: the cluster at DASK_SCHEDULER_ADDRESS, or a local one. ray: the one that ray.init finds."""
    if backend not in BACKENDS:
        raise InputError(f"No backend is called {backend!r}; there are: {', '.join(BACKENDS)}.")
    try:
        if backend == "dask":
            from distributed import Client

            Client()
        elif backend == "ray":
            import ray
            from ray.util.joblib import register_ray

            ray.init(ignore_reinit_error=True)
            cast(Callable[[], None], register_ray)()
    except ImportError:
        raise InputError(f"The backend {backend!r} is not installed; install it, or use loky.") from None
