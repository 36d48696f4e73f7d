"""One step in bfloat16 by each engine: a small transformer, forward, backward and clipped sum, interleaved.

    python benchmarks/half.py --rounds 9 --records 32

Processor seconds of one thread; medians, and medians of ratios to `ghost` in bfloat16 in the same round.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
from models import Transformer
from torch.nn import functional as F

from epsilons.clipping import engine

SIDES = ("ghost float32", "ghost bfloat16", "ghost autocast", "vmap bfloat16", "loop bfloat16")


def steps(side: str, records: int) -> tuple[object, ...]:
    which, how = side.split()
    torch.manual_seed(0)
    model = Transformer(128, 2, 2000, 64)
    if how == "bfloat16":
        model.bfloat16()
    one = engine(which)
    one.attach(model, list(model.parameters()))
    x, y = torch.randint(2000, (records, 64)), torch.randint(2, (records,))
    ones = torch.ones(records, dtype=torch.float64)

    def step() -> float:
        start = time.process_time()
        one.begin(records)
        with torch.autocast("cpu", torch.bfloat16, enabled=how == "autocast"):
            losses = F.cross_entropy(model(x).float(), y, reduction="none")
        one.clipped_sum(losses, ones, ones)
        return time.process_time() - start

    return step, one


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--records", type=int, default=32)
    given = parser.parse_args()
    torch.set_num_threads(1)
    made = {side: steps(side, given.records) for side in SIDES}
    for step, _ in made.values():
        step()  # the first is checked
    seconds = [{side: step() for side, (step, _) in made.items()} for _ in range(given.rounds)]
    for side in SIDES:
        own = [row[side] for row in seconds]
        ratio = statistics.median(row[side] / row["ghost bfloat16"] for row in seconds)
        proven = getattr(made[side][1], "is_proven", "")
        print(f"{side:16} {statistics.median(own):8.4f} s  {ratio:6.2f} of ghost bfloat16  proven {proven}", flush=True)


if __name__ == "__main__":
    main()
