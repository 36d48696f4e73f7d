"""Under torchrun: several processes run one command together. torch loads where they meet, not before."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from ..errors import InputError

if TYPE_CHECKING:
    from ..training.distributed import Ranks


def processes() -> int:
    """How many torchrun started; 1 without it."""
    return int(os.environ.get("WORLD_SIZE", "1")) if "TORCHELASTIC_RUN_ID" in os.environ else 1


@contextmanager
def joined(device: str) -> Iterator[Ranks]:
    """This process among those that torchrun started, in a process group for as long as the body runs.

    On GPUs each takes the one of its local rank, and sums are added up by NCCL; else by gloo. Raises InputError where
    they cannot have a device each.
    """
    import torch
    import torch.distributed as dist

    from ..training.distributed import Ranks

    if processes() == 1 or dist.is_initialized():
        yield Ranks()
        return
    on_gpu = device.startswith("cuda") or (device == "auto" and torch.cuda.is_available())
    if on_gpu:
        _take_gpu(device, int(os.environ["LOCAL_RANK"]), torch.cuda.device_count())
    dist.init_process_group("cpu:gloo,cuda:nccl" if on_gpu else "gloo")
    try:
        yield Ranks()
        dist.barrier()  # whoever leaves first may be torn down while others still talk to it
    finally:
        dist.destroy_process_group()


def _take_gpu(device: str, place: int, gpus: int) -> None:
    import torch

    if device not in ("auto", "cuda"):
        raise InputError(f'training.device {device!r} names one GPU for several processes; "cuda" gives each its own.')
    if place >= gpus:
        raise InputError(f"torchrun started more processes than the {gpus} GPUs of this machine; one each is needed.")
    torch.cuda.set_device(place)
