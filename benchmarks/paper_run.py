"""The paper's run on MNIST from beginning to end, with nothing set: wall time, accuracy, seconds per step.

    python benchmarks/paper_run.py                    # 9,440 steps: 80 epochs of 60,000 records in batches of 512
    python benchmarks/paper_run.py --steps 500

Setup A of the paper (budgets 1, 2, 3; Scale; learning rate and clip norm of docs/results.md). To compare two versions,
start one process with each version on PYTHONPATH, at the same time on as many free cores.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import torch
from models import mnist

import epsilons


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=9_440)
    parser.add_argument("--threads", type=int, default=1)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    train, test = (epsilons.data.load("mnist", split) for split in ("train", "test"))
    shares = {1.0: 0.34, 2.0: 0.43, 3.0: 0.23}
    budgets = epsilons.Budgets.from_shares(shares, records=len(train.targets), delta=1e-5, seed=0)
    recipe = epsilons.Recipe(steps=given.steps, batch_size=512, clip_norm=0.2)
    plan = epsilons.plan(budgets, recipe, strategy="scale")
    torch.manual_seed(0)
    model = mnist()
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        run = epsilons.fit(
            model,
            tuple(train),
            plan,
            budgets=budgets,
            training=epsilons.Training(lr=0.6),
            evaluation=epsilons.EvalData(tuple(test), public=True),
            run_dir=Path(folder) / "run",
            seed=0,
        )
    seconds = time.perf_counter() - start
    print(f"{seconds:.0f} s, {1e3 * seconds / given.steps:.1f} ms a step, accuracy {run.metrics[-1]['accuracy']:.4f}")


if __name__ == "__main__":
    main()
