"""What ranks would save if each made a part of the noise: against what they do now, where each makes all of it.

    for n in 2 4; do torchrun --nproc-per-node $n benchmarks/noise_ranks.py; done

prints milliseconds by the clock, and of the processor on rank 0, for 1e7 numbers: of the parts, and of three ways from
the ranks' sums to the noisy sum in 32 bits.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from epsilons.draws.randomness import BLOCK, Randomness

ROUNDS = 7


def milliseconds(work: Callable[[], object]) -> str:
    work()
    clocks: list[float] = []
    used: list[float] = []
    for _ in range(ROUNDS):
        dist.barrier()
        clock, processor = time.perf_counter(), time.process_time()
        work()
        clocks.append(time.perf_counter() - clock)
        used.append(time.process_time() - processor)
    return f"{1e3 * statistics.median(clocks):.0f}, processor {1e3 * statistics.median(used):.0f}"


def main() -> None:
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    rank, size, randomness = dist.get_rank(), dist.get_world_size(), Randomness(bytes(32))
    part = 10**7 // (size * BLOCK) * BLOCK
    count, here = part * size, (rank * part, (rank + 1) * part)
    total, own, every = torch.randn(count, dtype=torch.float64), torch.empty(part).double(), torch.empty(count).double()
    update = torch.empty(count)

    def noise() -> Tensor:
        return torch.from_numpy(randomness.noise(0, 0, count))

    def own_noise() -> Tensor:
        return torch.from_numpy(randomness.noise_at(0, 0, [here], count))

    def now() -> None:
        summed = total.clone()
        dist.all_reduce(summed)
        summed.add_(noise()).float()

    def gather_noise() -> None:
        summed = total.clone()
        dist.all_reduce(summed)
        dist.all_gather_into_tensor(every, own_noise())
        summed.add_(every).float()

    def gather_update() -> None:
        dist.reduce_scatter_tensor(own, total)
        dist.all_gather_into_tensor(update, own.add_(own_noise()).float())

    rows = {
        "all noise": noise,
        "a part of the noise": own_noise,
        "all_reduce": lambda: dist.all_reduce(total.clone()),
        "now: all_reduce, all noise": now,
        "all_reduce, a part of the noise, gathered": gather_noise,
        "reduce_scatter, a part of the noise, the update gathered": gather_update,
    }
    for name, work in rows.items():
        found = milliseconds(work)
        if rank == 0:
            print(f"{size} ranks, {name}: {found}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
