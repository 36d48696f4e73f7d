"""Several processes that do things together, each time in a new process group: for tests of ranks."""

from __future__ import annotations

import importlib
import multiprocessing
import os
import random
import signal
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import Dataset

RECORDS, FEATURES, CLASSES = 60, 4, 3

#: Longer than anything here takes, on a busy machine, too: who waits for so long hangs.
SECONDS = 600.0
#: A rank that another one waits for in vain is missed after so long.
SECONDS_PER_MEETING = 60.0


def points(seed: int = 0, records: int = RECORDS) -> tuple[Tensor, Tensor, Tensor]:
    """Inputs, classes, and each record's own number."""
    make = torch.Generator().manual_seed(seed)
    inputs, classes = torch.randn(records, FEATURES, generator=make), torch.randint(CLASSES, (records,), generator=make)
    return inputs, classes, torch.arange(records)


class Listed(Dataset[Any]):
    """The same records, as a data set that is read one by one, with noise of its own as augmentation does it."""

    def __len__(self) -> int:
        return RECORDS

    def __init__(self) -> None:
        self._points = points()

    def __getitem__(self, index: int) -> Any:
        inputs, classes, numbers = self._points
        return inputs[index] + 0.1 * torch.randn(FEATURES), classes[index], numbers[index]


@dataclass(frozen=True)
class Stopped:
    """An error that ended what a rank did."""

    kind: str
    message: str


class Processes:
    """`together(do, *arguments)`: do(*arguments) on every rank; returns what each returned, or how it Stopped."""

    def __init__(self, size: int = 2) -> None:
        importlib.import_module("torch._dynamo")  # as an optimizer does: here once, and not in every process
        context = multiprocessing.get_context("fork")  # to import torch in each process takes seconds
        ends = [context.Pipe() for _ in range(size)]
        self._ours = [ours for ours, _ in ends]
        self._workers = [context.Process(target=_work, args=(ends, rank)) for rank in range(size)]
        for worker in self._workers:
            worker.start()
        for _, theirs in ends:
            theirs.close()
        self._folder = tempfile.TemporaryDirectory()
        self._number = 0

    def together(self, do: Callable[..., Any], *arguments: Any) -> list[Any]:
        self.begin(do, *arguments)
        return [self.outcome(rank) for rank in range(len(self._workers))]

    def begin(self, do: Callable[..., Any], *arguments: Any) -> None:
        """The same without waiting for it."""
        self._number += 1
        for end in self._ours:
            end.send((do, arguments, str(Path(self._folder.name) / str(self._number))))

    def outcome(self, rank: int) -> Any:
        """Wait for this rank. Raises EOFError if its process is gone."""
        if not self._ours[rank].poll(SECONDS):
            self.end()
            raise AssertionError(f"rank {rank} hangs")
        return self._ours[rank].recv()

    def kill(self, rank: int) -> None:
        """As a power cut or the system's out-of-memory killer does."""
        pid = self._workers[rank].pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        self._workers[rank].join()

    def end(self) -> None:
        for worker in self._workers:
            worker.kill()
            worker.join()
        self._folder.cleanup()


def _work(ends: list[tuple[Any, Any]], rank: int) -> None:
    torch.set_num_threads(1)
    random.seed()  # a process of torchrun has random numbers of its own
    np.random.seed()
    end, size = ends[rank][1], len(ends)
    for other in {one for both in ends for one in both} - {end}:
        other.close()  # so that each side sees the other's end
    while True:
        try:
            do, arguments, store = end.recv()
        except EOFError:
            return
        wait = timedelta(seconds=SECONDS_PER_MEETING)
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size, timeout=wait)
        dist.barrier()  # a rank that is done at once would break the connections of one that is still joining
        try:
            outcome = do(*arguments)
        except Exception as error:
            outcome = Stopped(type(error).__name__, str(error))
        if dist.is_initialized():
            dist.destroy_process_group()
        end.send(outcome)


def wait_until(true: Callable[[], bool]) -> None:
    """Look again and again until it is true."""
    deadline = time.monotonic() + SECONDS
    while not true():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.01)
