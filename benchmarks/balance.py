"""Budgets that are tied to classes: accuracy on the strict class with and without `balanced_loss`.

    python benchmarks/balance.py [SEEDS]

The handwritten digits and logistic regression under Scale. Each of ten classes in turn has ε = 1, the others 3. Both
losses have the same plan, draws and noise; the settings are those of Scale. Prints accuracies of the test data in %.
"""

from __future__ import annotations

import sys

import numpy as np
import torch
from torch.nn import functional as F

import epsilons

STEPS, BATCH, CLIP_NORM, LR, CLASSES = 100, 256, 2.0, 0.25, 10
STRICT, OTHERS = 1.0, 3.0


def digits(split: str) -> tuple[torch.Tensor, torch.Tensor]:
    found = epsilons.data.load("digits", split)
    return torch.as_tensor(np.asarray(found.inputs)).float(), torch.as_tensor(np.asarray(found.targets)).long()


def accuracies(strict: int, seed: int) -> list[tuple[float, float]]:
    """(all, strict class) with plain cross entropy, and with the balanced loss."""
    (x, y), (test_x, test_y) = digits("train"), digits("test")
    budgets = epsilons.Budgets.by_class(y.numpy(), {k: STRICT if k == strict else OTHERS for k in range(CLASSES)})
    plan = epsilons.plan(budgets, epsilons.Recipe(steps=STEPS, batch_size=BATCH, clip_norm=CLIP_NORM), "scale")
    tied = {STRICT: [k == strict for k in range(CLASSES)], OTHERS: [k != strict for k in range(CLASSES)]}
    balanced = epsilons.balanced_loss(plan, tied)  # declared: classes of equal size
    found = []
    for loss in (lambda logits, targets: F.cross_entropy(logits, targets, reduction="none"), balanced):
        model = torch.nn.Linear(x.shape[1], CLASSES)
        for p in model.parameters():
            torch.nn.init.zeros_(p)
        optimizer = torch.optim.SGD(model.parameters(), lr=LR)
        with epsilons.make_private(model, optimizer, (x, y), plan, budgets=budgets, seed=seed) as private:
            for inputs, targets in private.batches:
                private.backward(loss(model(inputs), targets))
                private.step()
        right = 100 * (model(test_x).argmax(1) == test_y).double()
        found.append((float(right.mean()), float(right[test_y == strict].mean())))
    return found


def main(seeds: int) -> None:
    every = np.array([[accuracies(strict, seed) for seed in range(seeds)] for strict in range(CLASSES)])
    for strict, (plain, balanced) in enumerate(every.mean(1)):
        print(f"class {strict} strict: all {plain[0]:.1f} -> {balanced[0]:.1f}, it {plain[1]:.1f} -> {balanced[1]:.1f}")
    plain, balanced = every.mean((0, 1))
    print(f"mean, {seeds} seeds: all {plain[0]:.1f} -> {balanced[0]:.1f}, strict {plain[1]:.1f} -> {balanced[1]:.1f}")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 5)
