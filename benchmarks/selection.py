"""Tuning at equal budgets: private selections of ten runs in expectation, beside ten runs that are all released.

    python benchmarks/selection.py [SEEDS] [FOLDER]

MNIST on scattering features, a linear model, Scale, tiers of 34 / 43 / 23 % at ε = 1, 2, 3. Both choose among the same
ten settings by the same held-out tenth of the training data. The ten runs are scored WITHOUT noise, which no plan pays
for, so the comparison favours them. The test data are read once per choice. FOLDER keeps the features.
"""

from __future__ import annotations

import itertools
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_model

import epsilons
from epsilons import Budgets, PlanFolder, Recipe, Selection, Training

SHARES = {1.0: 0.34, 2.0: 0.43, 3.0: 0.23}
RECIPE = Recipe(steps=200, batch_size=1024, clip_norm=1.0)
GRID = list(itertools.product((4.0, 8.0, 16.0, 32.0, 64.0), (0.0, 0.9)))
HELD_OUT = 6_000
RUNS = 10
SELECTIONS = (Selection("logarithmic", RUNS), Selection("poisson", RUNS))


def features(split: str, kept: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """(records, 729) scattering features of unit length, averaged to 3 x 3 places, and the labels."""
    file = kept / f"mnist-{split}.npz"
    if not file.is_file():
        from epsilons.training.features import scattering

        found = epsilons.data.load("mnist", split, pixels=True)
        parts = []
        for part in torch.from_numpy(np.asarray(found.inputs)).split(1000):
            maps = scattering(part)
            maps = maps.reshape(len(part), 81, *[round((maps.numel() / len(part) / 81) ** 0.5)] * 2)
            parts.append(torch.nn.functional.adaptive_avg_pool2d(maps, 3).flatten(1).half().numpy())
        kept.mkdir(parents=True, exist_ok=True)
        np.savez(file, x=np.concatenate(parts), y=np.asarray(found.targets))
    held = np.load(file)
    x = torch.from_numpy(held["x"]).float()
    return x / x.norm(dim=1, keepdim=True), torch.from_numpy(held["y"]).long()


def compared(seed: int, train: tuple[Any, Any], test: tuple[Any, Any]) -> list[float]:
    """Test accuracy in %: of the best of ten runs that are all released, and of each selection."""
    (x, y), records = train, len(train[0])
    order = torch.randperm(records, generator=torch.Generator().manual_seed(seed))
    held, kept = order[:HELD_OUT], order[HELD_OUT:]
    budgets = Budgets.from_shares(SHARES, records=records, seed=seed)
    of_kept, of_held = budgets.subset(kept.numpy()), budgets.subset(held.numpy())

    def run(candidate: tuple[float, float], plan: PlanFolder, run_dir: Any = None) -> torch.nn.Module:
        model = torch.nn.Linear(x.shape[1], 10)
        torch.nn.init.zeros_(model.weight)
        torch.nn.init.zeros_(model.bias)
        how = Training(lr=candidate[0], momentum=candidate[1])
        data = (x[kept], y[kept])
        epsilons.fit(model, data, plan, budgets=of_kept, training=how, run_dir=run_dir, seed=seed)
        return model

    def right(model: torch.nn.Module, part: tuple[Any, Any]) -> torch.Tensor:
        with torch.no_grad():
            return model(part[0]).argmax(1) == part[1]

    with tempfile.TemporaryDirectory() as parent:
        every = PlanFolder.create(f"{parent}/every", epsilons.plan(of_kept, RECIPE, runs=RUNS))
        models = [run(candidate, every) for candidate in GRID]
        best = max(models, key=lambda model: int(right(model, (x[held], y[held])).sum()))
        found = [float(right(best, test).double().mean())]
        for select in SELECTIONS:
            secret = PlanFolder.create(f"{parent}/{select}", epsilons.plan(of_kept, RECIPE, select=select))
            tuned = epsilons.tune(
                secret, GRID, run, lambda model: right(model, (x[held], y[held])), held_out=of_held, seed=seed
            )
            chosen = torch.nn.Linear(x.shape[1], 10)
            load_model(chosen, f"{tuned.path}/model.safetensors")
            found.append(float(right(chosen, test).double().mean()))
    return [100 * one for one in found]


def main(seeds: int, kept: Path) -> None:
    train, test = features("train", kept), features("test", kept)
    print(f"{RUNS} runs, the best; selected: {', '.join(map(str, SELECTIONS))}")
    rows = []
    for seed in range(seeds):
        rows.append(compared(seed, train, test))
        print(f"seed {seed}: {np.round(rows[-1], 2).tolist()}", flush=True)
    every = np.array(rows)
    gain = (every[:, 1:] - every[:, :1]).mean(0)
    print(f"mean of {seeds} seeds: {every.mean(0).round(2).tolist()}, gain {gain.round(2).tolist()}")


if __name__ == "__main__":
    main(
        int(sys.argv[1]) if len(sys.argv) > 1 else 5, Path(sys.argv[2]) if len(sys.argv) > 2 else Path("mnist-features")
    )
