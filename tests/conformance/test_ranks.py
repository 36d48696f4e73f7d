"""Promise: several processes make the updates of one process: each record in one of them, noise once."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest
import torch.distributed as dist

from .adapters import Inexpressible, Ours, Table, Trainer
from .probes import ALMOST_NO_NOISE, drawn_in, mixed, recorded

RECORDS, UPDATES = 40, 12


def together(do: Callable[[], np.ndarray], folder: Path, size: int = 2) -> list[np.ndarray]:
    """What do() returns in each of so many copies of this process, which form a process group."""
    pids = []
    for rank in range(size):
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                dist.init_process_group(
                    "gloo",
                    init_method=f"file://{folder / 'group'}",
                    rank=rank,
                    world_size=size,
                    timeout=timedelta(minutes=1),
                )
                np.save(folder / f"{rank}.npy", do())
                status = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(status)
        pids.append(pid)
    assert [os.waitpid(pid, 0)[1] for pid in pids] == [0] * size, "a process ended with an error"
    return [np.load(folder / f"{rank}.npy") for rank in range(size)]


@pytest.mark.parametrize("std", [ALMOST_NO_NOISE, 1.7], ids=["almost no noise", "noise"])
@pytest.mark.parametrize("physical_batch", [None, 3])
def test_two_processes_make_the_updates_of_one(
    trainer: Trainer, std: float, physical_batch: int | None, seed: int, tmp_path: Path
):
    """Some draws have records in one process only, or none at all."""
    if not isinstance(trainer, Ours):
        raise Inexpressible("several processes, by this adapter")
    table = Table(UPDATES, mixed(RECORDS, 2), (0.02, 0.2), (0.5, 1.5), std, 4.4)

    def sums() -> np.ndarray:
        return recorded(trainer, table, seed=seed, physical_batch=physical_batch).stacked()

    alone = sums()
    for of_rank in together(sums, tmp_path):
        assert np.abs(of_rank - alone).max() <= 1e-9
        if std == ALMOST_NO_NOISE:
            assert drawn_in(of_rank, table).max() == 1
