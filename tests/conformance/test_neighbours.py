"""Promise: two data sets that differ in one record give, under one key, updates that differ by that record alone."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from small_runs import lines

from .adapters import Table, Trace, Trainer, record
from .probes import mixed

RECORDS, UPDATES = 40, 20
TABLE = Table(UPDATES, mixed(RECORDS, 3), (0.1, 0.2, 0.5), (0.05, 0.1, 0.2), 0.9, 10.0)
#: A record of the group that is drawn most often.
WHO = TABLE.group.index(2)


def some_data() -> tuple[Tensor, Tensor, Tensor]:
    make = torch.Generator().manual_seed(2)
    x = torch.randn(RECORDS, 6, generator=make, dtype=torch.float64)
    return x, torch.randint(3, (RECORDS,), generator=make), torch.ones(RECORDS, dtype=torch.float64)


def some_model() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 3)).double()


def losses_of(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none") * batch[2]


def flat(trace: Trace) -> np.ndarray:
    """(updates, values) of all parameters."""
    return np.concatenate([trace.stacked(k) for k in range(len(trace.sums[0]))], axis=1)


def moved(difference: np.ndarray) -> np.ndarray:
    """(updates,) where anything is different, NaN too."""
    return ~(np.linalg.norm(difference, axis=1) <= 1e-9)


def clipped(data: tuple[Tensor, ...], who: int, bound: float) -> np.ndarray:
    """The oracle: one record's gradient by itself, cut to its bound."""
    model = some_model()
    losses = losses_of(model, tuple(t[who : who + 1] for t in data))
    gradient = torch.cat([g.flatten() for g in torch.autograd.grad(losses.sum(), list(model.parameters()))]).numpy()
    return gradient * min(1.0, bound / np.linalg.norm(gradient))


def written(folder: Path) -> dict[str, object]:
    """The contents of a run's files, without times, hashes of updates and lines, and of the place of the key's file.

    Checkpoints are only counted: they hold the updated model and a fingerprint of the data, and are not released.
    """
    contents: dict[str, object] = {}
    for file in sorted(folder.glob("**/*")):
        name = str(file.relative_to(folder))
        contents[name] = file.read_bytes() if file.is_file() and "checkpoint" not in name else None
    if "run.json" in contents:
        settings = json.loads((folder / "run.json").read_text())
        contents["run.json"] = {key: value for key, value in settings.items() if key not in ("started", "ended")}
    if "ledger.jsonl" in contents:
        contents["ledger.jsonl"] = [
            {key: value for key, value in line.items() if key not in ("update", "prev", "hash", "file")}
            for line in lines(folder)
        ]
    return contents


@pytest.mark.parametrize("null", ["weight of zero", "not a number", "infinite"])
def test_an_emptied_record_removes_its_contribution_and_nothing_else(
    each: Trainer, null: str, seed: int, tmp_path: Path
):
    """Noise and draws of both runs are the same, and so is everything that is written down, but for the updates."""
    table = each.express(TABLE)
    x, y, counted = some_data()
    emptied, silenced = x.clone(), counted.clone()
    if null == "weight of zero":
        silenced[WHO] = 0.0
    else:
        emptied[WHO] = torch.nan if null == "not a number" else torch.inf
    runs = {
        name: record(each, some_model(), data, losses_of, table, seed=seed, physical_batch=3, run_dir=tmp_path / name)
        for name, data in {"whole": (x, y, counted), "emptied": (emptied, y, silenced)}.items()
    }
    difference = flat(runs["whole"]) - flat(runs["emptied"])
    drawn = moved(difference)
    assert 0 < drawn.sum() < table.steps, "drawn sometimes and not always, but for one seed in half a million"
    expected = clipped((x, y, counted), WHO, table.bounds[WHO])
    assert np.abs(difference[drawn] - expected).max() <= 1e-5 * table.bounds[WHO]
    assert (np.linalg.norm(difference, axis=1) <= table.bounds[WHO] * (1 + 1e-6)).all()
    assert runs["whole"].charged == runs["emptied"].charged
    assert written(tmp_path / "whole") == written(tmp_path / "emptied")


def test_another_record_in_its_place_is_drawn_and_noised_in_the_same_way(each: Trainer, seed: int):
    """Contents differ, so the updates where it was drawn do: by the difference of the two clipped gradients."""
    table = each.express(TABLE)
    x, y, counted = some_data()
    other, label = x.clone(), y.clone()
    other[WHO], label[WHO] = -3 * x[WHO] + 1, (y[WHO] + 1) % 3
    one = record(each, some_model(), (x, y, counted), losses_of, table, seed=seed)
    two = record(each, some_model(), (other, label, counted), losses_of, table, seed=seed)
    difference = flat(one) - flat(two)
    drawn = moved(difference)
    bound = table.bounds[WHO]
    expected = clipped((x, y, counted), WHO, bound) - clipped((other, label, counted), WHO, bound)
    assert drawn.any()
    assert np.abs(difference[drawn] - expected).max() <= 1e-5 * bound


def test_a_data_set_without_finite_values_gives_noise_and_nothing_else(each: Trainer, seed: int):
    table = each.express(TABLE)
    x, y, counted = some_data()
    broken = record(each, some_model(), (torch.full_like(x, torch.nan), y, counted), losses_of, table, seed=seed)
    silent = record(each, some_model(), (x, y, torch.zeros_like(counted)), losses_of, table, seed=seed)
    assert np.isfinite(flat(broken)).all()
    assert np.abs(flat(broken) - flat(silent)).max() <= 1e-9
