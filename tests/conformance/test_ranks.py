"""Promise: several processes make the updates that one would make: each record in one of them, noise once."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest
import torch.distributed as dist

from .adapters import Inexpressible, Ours, Table, Trainer, record
from .probes import NEXT_TO_NONE, Echo, losses_of_echo, mixed, one_hot, who

RECORDS, UPDATES = 40, 12


def together(do: Callable[[], np.ndarray], folder: Path, size: int = 2) -> list[np.ndarray]:
    """do() in so many copies of this process, which know of one another; what each returned."""
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
    assert [os.waitpid(pid, 0)[1] for pid in pids] == [0] * size, "a process came to an error of its own"
    return [np.load(folder / f"{rank}.npy") for rank in range(size)]


@pytest.mark.parametrize("std", [NEXT_TO_NONE, 1.7], ids=["next to no noise", "noise"])
@pytest.mark.parametrize("chunk", [None, 3])
def test_two_processes_make_the_updates_of_one(
    trainer: Trainer, std: float, chunk: int | None, seed: int, tmp_path: Path
):
    """Both of them: draws that fall to one of them alone, or to none, are among them."""
    if not isinstance(trainer, Ours):
        raise Inexpressible("several processes, by this adapter")
    table = Table(UPDATES, mixed(RECORDS, 2), (0.02, 0.2), (0.5, 1.5), std, 4.4)

    def sums() -> np.ndarray:
        return record(trainer, Echo(RECORDS), one_hot(RECORDS), losses_of_echo, table, seed=seed, chunk=chunk).stacked()

    alone = sums()
    for of_rank in together(sums, tmp_path):
        assert np.abs(of_rank - alone).max() <= 1e-9
        if std == NEXT_TO_NONE:
            assert who(of_rank, table).max() == 1
