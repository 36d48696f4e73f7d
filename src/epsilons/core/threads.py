"""Work for several threads, for processes of this machine, and for a cluster.

Threads are for functions that spend their time outside Python's lock, as NumPy's and hashlib's do. All else is for
processes, which joblib starts here, or dask or ray on other machines.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from tempfile import TemporaryDirectory
from threading import RLock
from typing import Any, TypeVar

from ..errors import EpsilonsWarning, Package, RunError

T = TypeVar("T")

joblib = Package("joblib")


def for_each(items: Sequence[int], work: Callable[[int], None], threads: int) -> None:
    """Do the work for every item; by threads that end with this call, unless one is enough. Raises what it raises."""
    if min(threads, len(items)) <= 1:
        for item in items:
            work(item)
        return
    with ThreadPoolExecutor(min(threads, len(items))) as pool:
        for _ in pool.map(work, items):  # raises what the work raised
            pass


# -- Processes, or a cluster: calls that train

#: What joblib, dask and ray raise if a worker was ended, or if what it held is lost.
LOST = {"BrokenProcessPool", "KilledWorker", "FutureCancelledError", "RayActorError"}

#: So often in a row, without a result in between, the calls of such workers are made again.
REPEATS = 3

ENDED = "A worker was ended from outside; most often memory was short."

#: A training uses the generators and the number of threads of its process, so each process makes one call at a time.
_ONE_CALL = RLock()


def workers(jobs: int | None = None) -> tuple[int, bool]:
    """(number of calls at the same time, whether a cluster makes them), by joblib's active backend.

    jobs  number of calls; 1 is never a cluster. By default what parallel_config says, or one per core

    joblib's own backends, also its threads, become processes of this machine: threads would share torch's generators.
    """
    if jobs == 1:
        return 1, False
    backend, chosen = joblib.parallel.get_active_backend()
    if type(backend).__module__ != "joblib._parallel_backends":
        return joblib.effective_n_jobs(jobs or chosen or -1), True
    return jobs or (joblib.effective_n_jobs(chosen) if chosen else joblib.cpu_count()), False


def spread(function: Callable[..., T], items: Sequence[Sequence[Any]], jobs: int, cluster: bool) -> Iterator[T]:
    """The result of function(*item) for each item, in any order, as soon as it is there; jobs, cluster: of `workers`.

    If a worker was ended, what it did not finish is done again. Raises RunError if this does not help.
    """
    calls: Iterator[Any] = ((_call, (cluster, number, function, *item), {}) for number, item in enumerate(items))
    ended, left = 0, dict[int, Any](enumerate(calls))
    while left:
        try:
            for number, result in _results(list(left.values()), jobs, cluster):
                del left[number]
                ended = 0
                yield result
        except Exception as error:
            if LOST.isdisjoint(kind.__name__ for kind in type(error).__mro__):
                raise
            ended += 1
            if ended > REPEATS:
                raise RunError(f"{ENDED} Repeating does not help: use fewer jobs, and continue with resume.") from None
            warnings.warn(f"{ENDED} What it did not finish is done again.", EpsilonsWarning, stacklevel=2)


def _results(calls: list[Any], jobs: int, cluster: bool) -> Iterator[tuple[int, Any]]:
    # The backend of ray returns results together, so its calls are made in rounds.
    streams = not cluster or joblib.parallel.get_active_backend()[0].supports_return_generator
    width, how = (len(calls), "generator_unordered") if streams else (jobs, "list")
    # joblib shares large arrays with processes by files. Only the owner can read this folder.
    with TemporaryDirectory(prefix="epsilons-", ignore_cleanup_errors=True) as folder:
        where = {"max_nbytes": None} if cluster else {"backend": "loky", "temp_folder": folder}
        with joblib.Parallel(jobs, return_as=how, **where) as parallel:  # of all rounds
            for start in range(0, len(calls), width):
                yield from parallel(calls[start : start + width])


def _call(cluster: bool, number: int, function: Callable[..., T], *item: Any) -> tuple[int, T]:
    # What the function spreads in its turn stays on the worker's machine: the cluster's workers may all be waiting.
    with _ONE_CALL, joblib.parallel_config("loky") if cluster else nullcontext():
        return number, function(*item)
