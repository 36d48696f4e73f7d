"""What each rank holds of a model that `fully_shard` has divided, and what a step takes.

    for n in 1 2 4; do torchrun --nproc-per-node $n benchmarks/shards.py --width 1024 --layers 8; done

prints, for each rank, the bytes of parameters and of Adam's state beside those of one process, the peak of its memory
above that before the model was made, and the seconds of a step. "held" is between two steps; the peak includes the
whole model before it was divided, and checks at steps 0, 1 and 10, when every rank holds all weights.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import time

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

import epsilons

RECORDS, CLASSES, STEPS = 512, 10, 24


def held(tensors: list[Tensor]) -> int:
    """Bytes on this rank."""
    own = [getattr(t, "_local_tensor", t) for t in tensors]
    return sum(t.numel() * t.element_size() for t in own)


def peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=8)
    width, layers = (vars(parser.parse_args())[name] for name in ("width", "layers"))
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    data = torch.randn(RECORDS, width), torch.randint(CLASSES, (RECORDS,))
    budgets = epsilons.Budgets(np.resize([1.0, 3.0], RECORDS), delta=1e-4)
    plan = epsilons.plan(budgets, epsilons.Recipe(STEPS, 32, clip_norm=1.0), accountant="rdp")
    mesh, before = init_device_mesh("cpu", (dist.get_world_size(),)), peak()
    parts = [nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(layers)]
    model = nn.Sequential(*parts, nn.Linear(width, CLASSES))
    whole = sum(p.numel() * p.element_size() for p in model.parameters())
    for part in [*parts, model]:
        fully_shard(part, mesh=mesh)
    optimizer, seconds = torch.optim.Adam(model.parameters(), lr=1e-4), []
    with epsilons.make_private(model, optimizer, data, plan, budgets=budgets) as private:
        begin = time.perf_counter()
        for x, y in private.batches:
            private.backward(F.cross_entropy(model(x), y, reduction="none"))
            if private.step():
                seconds.append(time.perf_counter() - begin)
                begin = time.perf_counter()
    state = [value for each in optimizer.state.values() for value in each.values() if isinstance(value, Tensor)]
    here = held(list(model.parameters())) + held(state)
    lines: list[str] = [""] * dist.get_world_size()
    text = (
        f"rank {dist.get_rank()} of {dist.get_world_size()}: held {here / 2**20:.0f} of {3 * whole / 2**20:.0f} MB "
        f"({here / (3 * whole):.0%}), peak {(peak() - before) / 2**20:.0f} MB, {statistics.median(seconds):.2f} s"
    )
    dist.all_gather_object(lines, text)
    if dist.get_rank() == 0:
        print("\n".join(lines))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
