"""Work for several threads, for processes of this machine, and for a cluster.

Threads are for functions that spend their time outside Python's lock, as NumPy's and hashlib's do. All else is for
processes, which joblib starts here, or dask or ray on other machines.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from tempfile import TemporaryDirectory
from threading import RLock
from typing import Any, TypeVar

from ..errors import EpsilonsWarning, RunError, app_packages

T = TypeVar("T")


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

#: A training uses the generators and the number of threads of its process, so each process makes one call at a time.
_ONE_CALL = RLock()


def workers(jobs: int | None = None) -> tuple[int, bool]:
    """(number of calls at the same time, whether a cluster makes them), by joblib's active backend.

    jobs  number of calls; 1 is never a cluster. By default what parallel_config says, or one per core

    joblib's own backends, also its threads, become processes of this machine: threads would share torch's generators.
    """
    if jobs == 1:
        return 1, False
    with app_packages():
        from joblib import cpu_count, effective_n_jobs
        from joblib._parallel_backends import LokyBackend
        from joblib.parallel import get_active_backend
    backend, chosen = get_active_backend()
    if type(backend).__module__ != LokyBackend.__module__:
        return effective_n_jobs(jobs or chosen or -1), True
    return jobs or (effective_n_jobs(chosen) if chosen else cpu_count()), False


def spread(function: Callable[..., T], items: Sequence[Sequence[Any]], jobs: int, cluster: bool) -> Iterator[T]:
    """The result of function(*item) for each item, in any order, as soon as it is there; jobs, cluster: of `workers`.

    If a worker was ended, what it did not finish is done again. Raises RunError if this does not help.
    """
    left, ended = dict(enumerate(items)), 0
    while left:
        try:
            for number, result in _results(function, left, jobs, cluster):
                del left[number]
                ended = 0
                yield result
        except Exception as error:
            if LOST.isdisjoint(kind.__name__ for kind in type(error).__mro__):
                raise
            ended += 1
            what = "A worker was ended from outside; most often memory was short."
            if ended > REPEATS:
                raise RunError(
                    f"{what} Its work was repeated {REPEATS} times. Use fewer processes (jobs=, --jobs) or larger "
                    "workers, and repeat the call: an attack with a folder continues with resume."
                ) from None
            warnings.warn(f"{what} What it did not finish is done again.", EpsilonsWarning, stacklevel=2)


def _results(
    function: Callable[..., T], items: Mapping[int, Sequence[Any]], jobs: int, cluster: bool
) -> Iterator[tuple[int, T]]:
    from joblib import Parallel, delayed
    from joblib.parallel import get_active_backend

    calls = [delayed(_call)(cluster, number, function, *item) for number, item in items.items()]
    if cluster:
        # The backend of ray returns results together, so its calls are made in rounds.
        streams = get_active_backend()[0].supports_return_generator
        width, how = (len(calls), "generator_unordered") if streams else (jobs, "list")
        for start in range(0, len(calls), width):
            yield from Parallel(n_jobs=jobs, max_nbytes=None, return_as=how)(calls[start : start + width])
        return
    # joblib shares large arrays with processes by files. Only the owner can read this folder.
    with TemporaryDirectory(prefix="epsilons-", ignore_cleanup_errors=True) as folder:
        yield from Parallel(n_jobs=jobs, backend="loky", return_as="generator_unordered", temp_folder=folder)(calls)


def _call(cluster: bool, number: int, function: Callable[..., T], *item: Any) -> tuple[int, T]:
    from joblib import parallel_config

    # What the function spreads in its turn stays on the worker's machine: the cluster's workers may all be waiting.
    with _ONE_CALL, parallel_config("loky") if cluster else nullcontext():
        return number, function(*item)
