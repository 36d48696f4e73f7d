"""Tuning at equal budgets: a private selection of ten runs in expectation, beside ten runs that are all released.

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

import epsilons
from epsilons import Budgets, PlanFolder, Recipe, Selection, Training

SHARES = {1.0: 0.34, 2.0: 0.43, 3.0: 0.23}
RECIPE = Recipe(steps=300, batch_size=4096, clip_norm=0.1)
GRID = list(itertools.product((0.5, 2.0, 8.0, 32.0, 128.0), (0.0, 0.9)))
HELD_OUT = 6_000
RUNS = 10


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


def compared(seed: int, train: tuple[Any, Any], test: tuple[Any, Any]) -> tuple[float, float]:
    """Test accuracy in %: of ten runs that are all released, and of a selection."""
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
        select = Selection("logarithmic", mean=RUNS)
        secret = PlanFolder.create(f"{parent}/secret", epsilons.plan(of_kept, RECIPE, select=select))
        found = epsilons.tune(
            secret, GRID, run, lambda model: right(model, (x[held], y[held])), held_out=of_held, seed=seed
        )
        chosen = torch.nn.Linear(x.shape[1], 10)
        from safetensors.torch import load_model

        load_model(chosen, f"{found.path}/model.safetensors")
    return tuple(100 * float(right(model, test).double().mean()) for model in (best, chosen))  # type: ignore[return-value]


def main(seeds: int, kept: Path) -> None:
    train, test = features("train", kept), features("test", kept)
    rows = []
    for seed in range(seeds):
        rows.append(compared(seed, train, test))
        print(f"seed {seed}: {RUNS} runs, the best {rows[-1][0]:.2f}, selected {rows[-1][1]:.2f}", flush=True)
    every = np.array(rows)
    gain = every[:, 1] - every[:, 0]
    print(
        f"mean of {seeds}: {every.mean(0).round(2).tolist()}, gain {gain.mean():.2f}, of each {gain.round(2).tolist()}"
    )


if __name__ == "__main__":
    main(
        int(sys.argv[1]) if len(sys.argv) > 1 else 5, Path(sys.argv[2]) if len(sys.argv) > 2 else Path("mnist-features")
    )
