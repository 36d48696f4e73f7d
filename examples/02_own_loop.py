"""Your own PyTorch loop: the paper's MNIST network on real MNIST, with three tiers of privacy.

    python examples/02_own_loop.py [--steps 2000] [--run-dir runs/mnist]

Three lines differ from an ordinary loop, and are numbered. MNIST is read from EPSILONS_DATA, or from the hub.
"""

import argparse
import os
import time

import torch
import torch.nn.functional as F
from torch import nn

import epsilons
from epsilons import data
from epsilons.errors import DataError

TINY = bool(os.environ.get("EPSILONS_TINY"))  # a few steps on a few records, as a test


def network() -> nn.Module:
    """Tramer and Boneh's network, as in the paper: 26,010 parameters."""
    return nn.Sequential(
        *(nn.Conv2d(1, 16, 8, stride=2, padding=2), nn.Tanh(), nn.MaxPool2d(2, 1)),
        *(nn.Conv2d(16, 32, 4, stride=2), nn.Tanh(), nn.MaxPool2d(2, 1)),
        *(nn.Flatten(), nn.Linear(512, 32), nn.Tanh(), nn.Linear(32, 10)),
    )


def accuracy(model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> float:
    with torch.no_grad():
        right = [(model(x).argmax(1) == y).sum() for x, y in zip(inputs.split(1000), targets.split(1000), strict=True)]
    return float(sum(right)) / len(targets)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=3 if TINY else 2000)
    parser.add_argument("--run-dir", help="a new folder for the run's plan and ledger")
    arguments = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    train = [torch.from_numpy(a)[: 2_000 if TINY else None] for a in data.load("mnist", "train")]
    test = [torch.from_numpy(a).to(device) for a in data.load("mnist", "test")]

    # The budgets, here simulated: 34 % epsilon 1, 43 % epsilon 2, 23 % epsilon 3.
    budgets = epsilons.Budgets.from_shares({1.0: 0.34, 2.0: 0.43, 3.0: 0.23}, records=len(train[0]), delta=1e-5)
    recipe = epsilons.Recipe(steps=arguments.steps, batch_size=512, clip_norm=0.2)
    plan = epsilons.plan(budgets, recipe, strategy="scale")
    print(plan.summary(), flush=True)

    torch.manual_seed(0)
    model = network().to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.6)
    private = epsilons.make_private(  # 1: one object draws, clips, adds noise and keeps the ledger
        model, optimizer, tuple(train), plan, budgets=budgets, run_dir=arguments.run_dir
    )
    start, step, seen = time.monotonic(), 0, 0
    for x, y in private.batches:
        losses = F.cross_entropy(model(x), y, reduction="none")  # (batch,)
        private.backward(losses)  # 2: was losses.mean().backward()
        seen += 0 if private.is_check else len(x)  # a batch that only serves as a check is not trained on
        if private.step():  # 3: was optimizer.step()
            step += 1
            if step % 250 == 0:
                print(f"step {step:,}  {time.monotonic() - start:.0f} s  test {accuracy(model, *test):.2%}", flush=True)
    private.close()
    print(private.ledger)
    print(f"{seen:,} records drawn, {arguments.steps * 512:,} expected")
    print(f"test accuracy {accuracy(model, *test):.2%} after {time.monotonic() - start:.0f} s of training")


if __name__ == "__main__":
    try:
        main()
    except DataError as error:
        print(f"skipped: {error}")
